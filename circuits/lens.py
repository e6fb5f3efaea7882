"""TransformerLens' own tools on one prompt or a pair: what each place of the stream would say, which component adds
what to an answer, what one patched activation restores.

- **Logit lens** (nostalgebraist 2020): the stream behind each sub-layer through the last LayerNorm and W_U, as if the
  model ended there. The last entry is the model's own prediction. Before it there is no reason why a stream should be
  written in the language of the output, so an early "wrong" word is not an error.
- **Direct logit attribution** (*A Mathematical Framework for Transformer Circuits*, 2021): what each component's output
  adds straight to answer − foil, the last LayerNorm's scale held fixed. Components add up to it exactly; what later
  ones make of an earlier one is counted as theirs.
- **Activation patching** (Meng et al. 2022; Wang et al. 2023): the corrupted prompt is run with one activation of the
  clean one. 0: as corrupted; 1: the whole difference is back. What is the same in both runs restores 0.

TransformerLens' `logit_attrs` leaves the last LayerNorm's gain and bias out; here the gain belongs to the direction and
the bias is a component, so that the sum holds for weights as they were trained. Nothing here is a statistic.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.attention import exclusive
from circuits.errors import NoSuchPart, Undefined
from circuits.frozen import one_prompt, position_of
from circuits.steps import last_norm
from circuits.surface import read

MOST_RUNS = 4_096
"""Forward passes that heads × positions may take; above, heads are patched at all positions at once."""
PARTS = ("resid_pre", "attn_out", "mlp_out")


@dataclass(frozen=True)
class StreamWords:
    """What the stream would say at each place."""

    places: tuple[str, ...]
    """In order: "embedding", "block 1, attention", "block 1, neurons", …"""
    probabilities: Float[Tensor, "place position d_vocab"]


def stream_words(model: Any, tokens: Tensor) -> StreamWords:
    """The logit lens at every position of one prompt [1, position], LayerNorm's scale computed anew at each place.

    Raises: ValueError for more than one prompt.
    """
    from transformer_lens.tools.analysis import logit_lens

    attn_only = bool(getattr(model.cfg, "attn_only", False))
    names = [f"blocks.{i}.hook_resid_{part}" for i in range(model.cfg.n_layers) for part in ("pre", "mid", "post")]
    with exclusive(model), torch.no_grad():
        logits, cache = model.run_with_cache(one_prompt(tokens), names_filter=lambda name: name in names)
        if not model.cfg.n_layers:
            return StreamWords(("embedding",), logits[:1].detach().float().softmax(-1))
        found = logit_lens(model, cache=cache, positions=None, incl_mid=not attn_only)
        values = found.values[:, 0].detach().float().softmax(-1)
    places = ["embedding"]
    for layer in range(1, model.cfg.n_layers + 1):
        places += [f"block {layer}"] if attn_only else [f"block {layer}, attention", f"block {layer}, neurons"]
    return StreamWords(tuple(places), values)


@dataclass(frozen=True)
class Attribution:
    """What each component adds straight to the logit of an answer minus that of a foil, at one position."""

    components: tuple[str, ...]
    """ "embed", "pos", "0.1" (a head), "0.mlp", "bias" (output biases), "last norm" (its bias, and b_U)."""
    values: Float[Tensor, "component"]
    """In logits; they sum to `total`."""
    total: float
    """The logit difference of the run."""


def attribution(model: Any, tokens: Tensor, position: int, answer: int, foil: int) -> Attribution:
    """Direct logit attribution by TransformerLens' decomposition of the stream.

    Raises: NoSuchPart for a position or token; Undefined (of circuits or workbench) where the stream is no sum of
    components; ValueError for more than one prompt.
    """
    at = position_of(position, one_prompt(tokens).shape[1])
    column, constant = _toward(model, answer, foil)
    with exclusive(model), torch.no_grad():
        logits, cache = model.run_with_cache(tokens)
        stack, labels = cache.get_full_resid_decomposition(
            expand_neurons=False, apply_ln=True, pos_slice=at, return_labels=True
        )
    values = [float(value) for value in stack[:, 0].detach().to(column) @ column]
    named = {_component(label): value for label, value in zip(labels, values, strict=True)}
    order = [*sorted(named, key=_place), "last norm"]
    named["last norm"] = constant
    total = float(logits[0, at, answer] - logits[0, at, foil])
    kept = [name for name in order if named[name] or name not in ("bias", "last norm")]
    return Attribution(tuple(kept), torch.tensor([named[name] for name in kept]), total)


@dataclass(frozen=True)
class Neuron:
    """One neuron at one position."""

    layer: int
    index: int
    activation: float
    """After the non-linearity."""
    adds: float
    """Straight to answer − foil, in logits."""
    raises: tuple[int, ...]
    """Tokens that its output raises most against the mean of all, when it is active."""
    lowers: tuple[int, ...]


def neurons(
    model: Any, tokens: Tensor, position: int, answer: int, foil: int, n: int = 12, words: int = 4
) -> list[Neuron]:
    """The `n` neurons of all layers that add most to answer − foil, positive or negative, largest first.

    The output weights' tokens are read from W_out, the last LayerNorm's gain and W_U alone. An attention-only model has
    none. Raises as `attribution`.
    """
    at = position_of(position, one_prompt(tokens).shape[1])
    column, _ = _toward(model, answer, foil)
    w = read(model, inside=False)
    if w.W_out is None or not w.n_layers:
        return []
    with exclusive(model), torch.no_grad():
        _, cache = model.run_with_cache(tokens)
        results = cache.stack_neuron_results(-1, pos_slice=at, apply_ln=True)[:, 0].detach().to(column)
        active = torch.cat([cache[f"blocks.{i}.mlp.hook_post"][0, at] for i in range(w.n_layers)]).detach()
    adds, m = results @ column, w.W_out.shape[1]
    norm, found = last_norm(model), []
    gain = 1.0 if norm is None else norm.gain
    for i in adds.abs().topk(min(n, len(adds))).indices.tolist():
        layer, index = divmod(i, m)
        out = w.W_out[layer, index]
        out = out - out.mean() if norm is not None and norm.centring else out
        logits = (out * gain) @ w.W_U
        up, down = (logits.topk(min(words, len(logits)), largest=high).indices.tolist() for high in (True, False))
        found.append(Neuron(layer, index, float(active[i]), float(adds[i]), tuple(up), tuple(down)))
    return found


@dataclass(frozen=True)
class Patching:
    """The logit of answer − foil at one position of the corrupted prompt, with one activation of the clean one."""

    parts: dict[str, Float[Tensor, "layer position"]]
    """ "resid_pre": the stream before a block; "attn_out", "mlp_out": what attention and neurons write."""
    heads: Float[Tensor, "layer head position"] | Float[Tensor, "layer head 1"]
    """What one head has gathered, z, at one position; or at all of them where the prompt is too long for that."""
    clean: float
    corrupted: float

    def restored(self, values: Tensor) -> Tensor:
        """0 as corrupted, 1 as clean. Raises: Undefined where the two do not differ."""
        if abs(self.clean - self.corrupted) < 1e-6:
            raise Undefined("the two prompts have the same logits of answer − foil here: there is nothing to restore")
        return (values - self.corrupted) / (self.clean - self.corrupted)


def patching(model: Any, clean: Tensor, corrupted: Tensor, position: int, answer: int, foil: int) -> Patching:
    """Every activation of the clean prompt, one at a time, in the run of the corrupted one.

    By `transformer_lens.patching`: one forward pass a cell. Raises: Undefined for prompts of different lengths, a model
    without layers or with active dropout; NoSuchPart; ValueError for more than one prompt.
    """
    from transformer_lens import patching as sweeps

    if one_prompt(clean).shape != one_prompt(corrupted).shape:
        raise Undefined(
            f"patching needs prompts of one length; these have {clean.shape[1]} and {corrupted.shape[1]} words, so "
            "their positions do not correspond"
        )
    at = position_of(position, clean.shape[1])
    layers, per_layer, length = model.cfg.n_layers, model.cfg.n_heads, clean.shape[1]
    if not layers:
        raise Undefined("a model without layers has no activations to patch but its embedding")
    if any(isinstance(m, torch.nn.Dropout) and m.training and m.p > 0 for m in model.modules()):
        raise Undefined("patching is undefined in a model in training mode with dropout (call eval())")
    for token in (answer, foil):
        if not 0 <= token < model.cfg.d_vocab:
            raise NoSuchPart(f"no token {token}: the vocabulary has {model.cfg.d_vocab}, from 0")

    def metric(logits: Tensor) -> Tensor:
        return (logits[0, at, answer] - logits[0, at, foil]).detach()

    with exclusive(model), torch.no_grad():
        logits, cache = model.run_with_cache(clean)
        found = {
            "resid_pre": sweeps.get_act_patch_resid_pre(model, corrupted, cache, metric),
            "attn_out": sweeps.get_act_patch_attn_out(model, corrupted, cache, metric),
        }
        if not getattr(model.cfg, "attn_only", False):
            found["mlp_out"] = sweeps.get_act_patch_mlp_out(model, corrupted, cache, metric)
        if layers * per_layer * length <= MOST_RUNS:
            heads = sweeps.get_act_patch_attn_head_out_by_pos(model, corrupted, cache, metric).transpose(1, 2)
        else:
            heads = sweeps.get_act_patch_attn_head_out_all_pos(model, corrupted, cache, metric)[..., None]
        floor = float(metric(model(corrupted)))
    parts = {name: values.detach().float().cpu() for name, values in found.items()}
    return Patching(parts, heads.detach().float().cpu(), float(metric(logits)), floor)


def _toward(model: Any, answer: int, foil: int) -> tuple[Float[Tensor, "d_model"], float]:
    """What a normalised stream is multiplied by for answer − foil, and the constant that comes on top."""
    w, norm = read(model, inside=False), last_norm(model)
    for token in (answer, foil):
        if not 0 <= token < w.d_vocab:
            raise NoSuchPart(f"no token {token}: the vocabulary has {w.d_vocab}, from 0")
    difference, constant = w.W_U[:, answer] - w.W_U[:, foil], w.b_U[answer] - w.b_U[foil]
    if norm is None:
        return difference, float(constant)
    return norm.gain * difference, float(constant + norm.bias @ difference)


def _component(label: str) -> str:
    """TransformerLens' labels in our words: L0H1 is 0.1, 0_mlp_out is 0.mlp."""
    head = re.fullmatch(r"L(\d+)H(\d+)", label)
    if head:
        return f"{head[1]}.{head[2]}"
    return {"pos_embed": "pos"}.get(label, label.replace("_mlp_out", ".mlp"))


def _place(component: str) -> tuple[float, float]:
    """Where in the model it comes."""
    if component in ("embed", "pos"):
        return -1, component == "pos"
    if component == "bias":
        return float("inf"), 0
    layer, _, part = component.partition(".")
    return int(layer), float("inf") if part == "mlp" else int(part)
