"""One way into every model: its weights as the formulas need them, raw or folded, and the names of its parts.

Vectors are rows, `x @ W`, as in TransformerLens: W_Q, W_K, W_V are [d_model, d_head] and *read* the residual stream,
W_O is [d_head, d_model] and *writes* it, W_QK = W_Q W_Kᵀ and W_OV = W_V W_O.

**Only what is written can be read.** The residual stream varies within the span of what is written into it: token
embeddings and positions about their means, W_O, W_out. What a reader would take from any other direction is either
never there or a constant, and so a bias. `read` therefore shows every reader from inside that span, moving what a
constant direction contributes into the biases (exact wherever no LayerNorm stands between). In most models the span
is everything and nothing changes; where LayerNorm's centring, a dead dimension or a dimension that holds the constant 1
makes it smaller, scores and their nulls do not depend on it. (Raw weights behind a LayerNorm are left as they are: its
gain and bias come in between. Fold first.) `Weights.written` is its orthonormal basis, and the
width that nulls are computed for is its size: d_model − 1 for folded weights.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Literal, TypeVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from circuits.errors import BadModel, NoSuchPart, NoSurface, Undefined

Basis = Literal["raw", "folded", "behaviour"]
Head = tuple[int, int]
"""(layer, head), both from 0; written "1.3"."""

EXPECTED = "expected a model with TransformerLens' surface: cfg, hooks and W_E, W_Q … W_O, W_U"
LARGEST = 1e8  # of a weight; beyond, products of four leave single precision
CLEARLY = 1e-5  # of a Gram matrix's trace: an eigenvalue above it is none of single precision's noise, at 1e-7
RANK_TOLERANCE = 1e-5  # of the largest singular value; float32 noise lies at 1e-7, trained weights above 1e-3

M = TypeVar("M")


@dataclass(frozen=True)
class Weights:
    """All weights of a model in float32 (float64 if they are), read from inside the written subspace."""

    W_E: Float[Tensor, "d_vocab d_model"]
    W_pos: Float[Tensor, "n_ctx d_model"] | None
    """None where positions are not added to the residual stream."""
    W_Q: Float[Tensor, "layer head d_model d_head"]
    W_K: Float[Tensor, "layer head d_model d_head"]
    W_V: Float[Tensor, "layer head d_model d_head"]
    W_O: Float[Tensor, "layer head d_head d_model"]
    b_Q: Float[Tensor, "layer head d_head"]
    b_K: Float[Tensor, "layer head d_head"]
    b_V: Float[Tensor, "layer head d_head"]
    W_in: Float[Tensor, "layer d_model d_mlp"] | None
    """None in an attention-only model."""
    W_out: Float[Tensor, "layer d_mlp d_model"] | None
    W_U: Float[Tensor, "d_model d_vocab"]
    b_U: Float[Tensor, "d_vocab"]
    written: Float[Tensor, "d_model width"]
    """Orthonormal basis of what is written into the residual stream."""
    basis: Basis
    """"raw": as trained. "folded": as `folded` leaves them."""

    @property
    def n_layers(self) -> int:
        return self.W_Q.shape[0]

    @property
    def n_heads(self) -> int:
        return self.W_Q.shape[1]

    @property
    def d_head(self) -> int:
        return self.W_Q.shape[3]

    @property
    def d_vocab(self) -> int:
        return self.W_E.shape[0]

    @property
    def width(self) -> int:
        """Dimensions of the residual stream that anything is written into."""
        return self.written.shape[1]


def read(model: Any, fold: bool = False, inside: bool = True) -> Weights:
    """The weights of any model with TransformerLens' surface.

    `fold` reads those of `folded(model)`. `inside` shows readers from inside the written subspace; False gives every
    weight as it stands. Grouped keys and values are repeated for each query head. Raises: NoSurface, BadModel if a
    weight is not finite, Undefined where folding is.
    """
    if fold:
        model = folded(model)
    check_surface(model)
    found = {name: _weight(model, name) for name in ("W_E", "W_Q", "W_K", "W_V", "W_O", "W_U")}
    layers, heads, _, d_head = found["W_Q"].shape
    for name in ("W_K", "W_V"):
        found[name] = _repeated(found[name], heads, name)
    for name in ("b_Q", "b_K", "b_V"):
        bias = _weight(model, name, optional=True)
        found[name] = found["W_Q"].new_zeros(layers, heads, d_head) if bias is None else _repeated(bias, heads, name)
    bias = _weight(model, "b_U", optional=True)
    found["b_U"] = found["W_E"].new_zeros(found["W_U"].shape[1]) if bias is None else bias
    attn_only = bool(getattr(model.cfg, "attn_only", False))
    added = positions(model) in ("standard", "learned", "sinusoidal")
    optional = {
        "W_pos": _weight(model, "W_pos") if added else None,
        "W_in": None if attn_only else _weight(model, "W_in"),
        "W_out": None if attn_only else _weight(model, "W_out"),
    }
    width = found["W_E"].shape[1]
    raw = Weights(**found, **optional, written=torch.eye(width).to(found["W_E"]), basis=basis(model))  # pyright: ignore[reportArgumentType]
    return _from_inside(model, raw) if inside else raw


def folded(model: M) -> M:
    """A copy that computes the same function, in a form whose weights can be compared.

    LayerNorm's gain and bias are folded into the readers behind it, what writes is centred (LayerNorm subtracts the
    mean anyway), value biases move into the output bias, W_U is centred. Log-probabilities do not change. The copy is
    for reading and running, not for training. A model that is folded already is returned as it is. Raises: Undefined
    for LayerNorm after the addition, sub-layers without a residual stream, and shortformer positions, which enter
    behind LayerNorm.
    """
    check_surface(model)
    if basis(model) == "folded":
        return model
    for name in ("W_E", "W_Q", "W_K", "W_V", "W_O", "W_U"):
        _weight(model, name)
    reasons = {
        "LayerNorm after each addition": post_norm(model),
        "sub-layers that replace the token": not residual(model),
        "shortformer positions": positions(model) == "shortformer",
    }
    for reason, applies in reasons.items():
        if applies:
            raise Undefined(f"folding is undefined for a model with {reason}; read its raw weights with fold=False")
    if hasattr(model, "expanded"):  # a Transformer
        same: Any = _in_single(model.expanded())  # pyright: ignore[reportAttributeAccessIssue]
        same.load_state_dict(_processed(same.state_dict(), same.cfg), assign=True)
    elif hasattr(model, "enable_compatibility_mode"):  # a TransformerBridge
        same = _in_single(copy.deepcopy(model))
        same.enable_compatibility_mode(disable_warnings=True)
        if not _is_folded(same):
            raise Undefined("this bridge's weights were processed by halves before; fold one that was booted anew")
    else:
        raise NoSurface(f"{type(model).__name__} has no way to fold its weights; read them with fold=False")
    same.eval()
    same.folded_weights = True
    return same


def basis(model: Any) -> Basis:
    """Whether this model's weights are as trained, or folded by `folded`."""
    return "folded" if getattr(model, "folded_weights", False) else "raw"


def check_surface(model: Any) -> None:
    """Raises: NoSurface for what is no model with TransformerLens' surface."""
    for name in ("cfg", "W_E", "W_Q"):
        if not (hasattr(type(model), name) or hasattr(model, name)):  # a property is not called: it stacks all layers
            raise NoSurface(f"{type(model).__name__} has no {name}; {EXPECTED}")


def check_stream(model: Any) -> None:
    """Raises: NoSurface; Undefined where sub-layers replace the token, so that nothing passes them by."""
    check_surface(model)
    if not residual(model):
        raise Undefined("undefined where sub-layers replace the token: there is no residual stream to write to")


def residual(model: Any) -> bool:
    """Whether sub-layers add to the stream."""
    return getattr(getattr(model, "config", None), "residual", True)


def post_norm(model: Any) -> bool:
    """Whether LayerNorm follows each addition."""
    return getattr(getattr(model, "config", None), "norm", None) == "post"


def positions(model: Any) -> str:
    """How the model knows positions: standard (added to the stream), rotary, alibi, shortformer or none."""
    return getattr(model.cfg, "positional_embedding_type", None) or "standard"


def head_of(name: Any, weights: Weights) -> Head:
    """(layer, head) of "1.3", or of (1, 3). Raises: NoSuchPart."""
    try:
        layer, head = (int(part) for part in name.split(".")) if isinstance(name, str) else map(index, name)
    except (TypeError, ValueError):
        raise NoSuchPart(f"{name!r} is no head; a head is written layer.head, such as 1.3") from None
    if not (0 <= layer < weights.n_layers and 0 <= head < weights.n_heads):
        raise NoSuchPart(
            f"no head {layer}.{head}: this model has {weights.n_layers} layers of {weights.n_heads} heads, from 0.0"
        )
    return layer, head


def pair_of(writer: Any, reader: Any, weights: Weights) -> tuple[Head, Head]:
    """Two heads, the second in a later layer. Raises: NoSuchPart."""
    first, second = head_of(writer, weights), head_of(reader, weights)
    if first[0] >= second[0]:
        names = head_name(*second), head_name(*first)
        raise NoSuchPart("head {} does not read head {}: it is not in a later layer".format(*names))
    return first, second


def head_name(layer: int, head: int) -> str:
    """ "1.3": layer, head, both from 0."""
    return f"{layer}.{head}"


def output_factor(
    left: Float[Tensor, "*axes before rank"], right: Float[Tensor, "*axes rank after"]
) -> Float[Tensor, "*axes least after"]:
    """P with PᵀP = AᵀA for A = left right, however A is split: of `left`, only R of its QR decomposition matters.

    P of W_V and W_O stands for what a head writes, with the strength of what it reads.
    """
    return torch.linalg.qr(left, mode="r").R @ right


def input_factor(
    left: Float[Tensor, "*axes before rank"], right: Float[Tensor, "*axes rank after"]
) -> Float[Tensor, "*axes least before"]:
    """N with NᵀN = A Aᵀ for A = left right: what A reads, with the strength of what it makes of it."""
    return output_factor(right.mT, left.mT)


def _processed(weights: dict[str, Tensor], cfg: Any) -> dict[str, Tensor]:
    """A model's own weights folded, in place where they are large.

    TransformerLens' processing copies W_E and W_U several times, which a large vocabulary has no room for; so it gets
    one token of them, and the same is done to all here.
    """
    from transformer_lens.weight_processing import ProcessWeights

    W_E, W_U, b_U = (weights[name] for name in ("embed.W_E", "unembed.W_U", "unembed.b_U"))
    gain, bias = weights.get("ln_final.w"), weights.get("ln_final.b")
    one = {"embed.W_E": W_E[:1].clone(), "unembed.W_U": W_U[:, :1].clone(), "unembed.b_U": b_U[:1].clone()}
    normed = cfg.normalization_type is not None
    done = ProcessWeights.process_weights({**weights, **one}, cfg, center_writing_weights=normed)
    if gain is not None and bias is not None:
        b_U += bias @ W_U
        W_U *= gain[:, None]
        W_U -= W_U.mean(0)  # what reads a centred stream
        W_E -= W_E.mean(1, keepdim=True)
    W_U -= W_U.mean(1, keepdim=True)  # the same for all logits
    b_U -= b_U.mean()
    return {**done, "embed.W_E": W_E, "unembed.W_U": W_U, "unembed.b_U": b_U}


def _is_folded(bridge: Any) -> bool:
    """Whether nothing of LayerNorm is left: gains of 1, and centred writers where it centres."""
    kind = bridge.cfg.normalization_type
    if kind is None or not len(bridge.blocks):
        return True
    gain = getattr(getattr(bridge.blocks[0].ln1, "original_component", None), "weight", None)
    plain = gain is None or bool((gain - 1).abs().max() < 1e-5)
    return plain and (kind.startswith("RMS") or bool(bridge.W_O.mean(-1).abs().max() < 1e-5 * bridge.W_O.abs().max()))


def _in_single(model: Any) -> Any:
    """At least single precision: centring in half precision leaves rests that look like something written."""
    return model.float() if model.W_E.dtype in (torch.bfloat16, torch.float16) else model


def _weight(model: Any, name: str, optional: bool = False) -> Any:
    try:
        weight = getattr(model, name)
    except (AttributeError, TypeError) as error:
        if optional:
            return None
        raise NoSurface(f"{type(model).__name__} has no {name} ({error}); {EXPECTED}"[:300]) from None
    if not isinstance(weight, Tensor):
        raise NoSurface(f"{type(model).__name__}.{name} is a {type(weight).__name__}; {EXPECTED}")
    weight = weight.detach()
    weight = weight if weight.dtype == torch.float64 else weight.float()
    low, high = weight.aminmax() if weight.numel() else (torch.zeros(()), torch.zeros(()))
    if not (bool(low >= -LARGEST) and bool(high <= LARGEST)):  # so NaN does not pass
        wrong = "beyond 1e8" if bool(weight.isfinite().all()) else "that are not finite"
        raise BadModel(f"{name} holds values {wrong}; the model diverged in training or its file is damaged")
    return weight


def _repeated(weight: Tensor, heads: int, name: str) -> Tensor:
    """Grouped-query attention: one key and value head serves several query heads."""
    if weight.shape[1] == heads:
        return weight
    if heads % weight.shape[1]:
        raise BadModel(f"{name} has {weight.shape[1]} heads for {heads} query heads; they must divide")
    return weight.repeat_interleave(heads // weight.shape[1], dim=1)


def _from_inside(model: Any, w: Weights) -> Weights:
    """The same weights, their readers seen from the written subspace, where readers read sums of what is written."""
    normed = getattr(model.cfg, "normalization_type", None) is not None
    if (normed and w.basis == "raw") or post_norm(model) or positions(model) == "shortformer":
        return w  # a LayerNorm's gain and bias, and shortformer's positions, come in between
    constant = w.W_E.mean(0) + (0 if w.W_pos is None else w.W_pos.mean(0))
    written_biases = [_weight(model, name, optional=True) for name in ("b_O", "b_out")]
    biases = [bias for bias in written_biases if bias is not None]
    # behind LayerNorm a constant is divided by a scale that varies, and so is no bias
    written = _span(_writers(w, [constant[None], *biases] if normed else []))
    if written.shape[1] == written.shape[0]:
        return w
    project = written @ written.T
    layers = []
    for layer in range(w.n_layers):  # what is constant before each layer: embeddings' means and earlier output biases
        layers.append(constant - constant @ project)
        constant = constant + sum(bias[layer] for bias in biases)
    outside = torch.stack(layers) if layers else w.W_E.new_zeros(0, w.W_E.shape[1])
    end = constant - constant @ project
    inside = {name: project @ getattr(w, name) for name in ("W_Q", "W_K", "W_V", "W_U")}
    inside |= {
        f"b_{x}": getattr(w, f"b_{x}") + torch.einsum("lm, lhmd -> lhd", outside, getattr(w, f"W_{x}")) for x in "QKV"
    }
    if w.W_in is not None:
        inside["W_in"] = project @ w.W_in
    return replace(w, **inside, b_U=w.b_U + end @ w.W_U, written=written)


def _writers(w: Weights, more: Iterable[Tensor]) -> list[Tensor]:
    """Everything that varies and is added to the residual stream, as rows."""
    rows = [rearrange(w.W_O, "l h d m -> (l h d) m"), w.W_E - w.W_E.mean(0), *more]
    if w.W_pos is not None:
        rows.append(w.W_pos - w.W_pos.mean(0))
    if w.W_out is not None:
        rows.append(rearrange(w.W_out, "l n m -> (l n) m"))
    return rows


def _span(rows: list[Tensor]) -> Float[Tensor, "d_model width"]:
    """Orthonormal basis of the rows' span; the identity where it is everything, which a few rows usually show."""
    width = rows[0].shape[1]
    few = rows[0][: 2 * width].float()
    gram = few.T @ few
    gram.diagonal().sub_(CLEARLY * gram.trace())
    if int(torch.linalg.cholesky_ex(gram).info) == 0:
        return torch.eye(width).to(rows[0])
    for parts in ([rows[0][: 2 * width]], rows):
        gram = torch.zeros(width, width, dtype=torch.float64, device=rows[0].device)
        for part in parts:
            own = torch.zeros_like(gram)
            for chunk in part.split(4096):
                own += chunk.double().T @ chunk.double()
            gram += own / own.trace().clamp(min=1e-300)  # a small part counts as much as a large one
        least = RANK_TOLERANCE**2 * gram.trace() * torch.eye(width).to(gram)
        if int(torch.linalg.cholesky_ex(gram - least).info) == 0:  # quicker than eigenvalues, and usually so
            return torch.eye(width).to(rows[0])
        values, vectors = torch.linalg.eigh(gram)
        kept = values > values[-1].clamp(min=1e-300) * RANK_TOLERANCE**2
        if bool(kept.all()):
            return torch.eye(width).to(rows[0])
    if not bool(kept.any()):  # pyright: ignore[reportPossiblyUnboundVariable] - all weights are zero
        return torch.eye(width).to(rows[0])
    return vectors[:, kept].to(rows[0])  # pyright: ignore[reportPossiblyUnboundVariable]
