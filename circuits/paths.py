"""What one head reads from another, cut: the test behind the word "composes".

A composition score says that two heads' weights are not turned against each other at random. Whether head 2 *uses* what
head 1 writes, on any input, is a question about the running model: compute head 2's query, key or value as if head 1
had not written into the residual stream it reads, leave everything else as it is, and see what gets worse.

    q' = q + (ln(x − c + r) − ln(x)) W_Q,   c = z¹ W_O¹,   r = 0 ("zero") or the mean of c over the batch ("mean")

x is the residual stream before head 2's layer and c what head 1 wrote there, both of this very forward pass.
LayerNorm is computed anew, its scale included. Only the *direct* path is cut: what head 1 does to head 2 through other
heads or feed-forward layers stays, and so does what head 1 does to every other reader. Written as a difference, the
formula is the same for all positions (rotary and ALiBi act later; shortformer's and the biases are in q already), and
an edit that somebody else made to q stays. This is path patching (Wang et al. 2022, Goldowsky-Dill et al. 2023) of one
edge.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from circuits.composition import KINDS, Kind
from circuits.errors import NoSuchPart, Undefined
from circuits.hooks import Hook, check_heads, check_own_weights, coming_last
from circuits.surface import Head, head_name


@dataclass(frozen=True, init=False, repr=False)
class Path:
    """Writer's output, as it enters the query, key or value of a reader directly. Printed as 0.2→K→1.1."""

    writer: Head
    kind: Kind
    reader: Head

    def __init__(self, writer: str | Head, kind: str, reader: str | Head):
        """Heads as "0.2" or (0, 2), kind "Q", "K" or "V". Raises: NoSuchPart, also for a reader in no later layer."""
        if kind not in KINDS:
            raise NoSuchPart(f"{kind!r} is no kind of path; expected one of Q, K, V")
        first, second = _head(writer), _head(reader)
        if first[0] >= second[0]:
            raise NoSuchPart(
                f"head {head_name(*second)} does not read head {head_name(*first)}: it is not in a later layer"
            )
        for name, value in (("writer", first), ("kind", kind), ("reader", second)):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"{head_name(*self.writer)}→{self.kind}→{head_name(*self.reader)}"


def every_path(model: Any, kinds: Sequence[Kind] = KINDS) -> list[Path]:
    """Every path of these kinds between a head and a later one, kind by kind."""
    heads = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    return [Path(a, kind, b) for kind in kinds for a in heads for b in heads if a[0] < b[0]]


def path_hooks(
    model: Any, paths: tuple[Path, ...], replacement: str, outer: Sequence[Path], reads: dict[tuple[Head, str], Tensor]
) -> list[Hook]:
    """In the order of the forward pass: come last, note what is written, note what is read, change the readers.

    `outer`: the paths that are cut already; `reads`: what their readers read in this pass after those cuts.
    """
    written: dict[Head, Tensor] = {}
    streams: dict[int, Tensor] = {}
    earlier = {(path.reader, path.kind) for path in outer}

    def note_write(z: Tensor, hook: Any, layer: int) -> None:
        for head in {path.writer for path in paths if path.writer[0] == layer}:
            out = z[:, :, head[1]] @ model.blocks[layer].attn.W_O[head[1]]
            if replacement == "mean" and len(out) == 1:
                raise Undefined(
                    'the mean over a batch of one is the contribution itself; give more, or replacement="zero"'
                )
            written[head] = out if replacement == "zero" else out - out.mean(0)

    def note_stream(stream: Tensor, hook: Any, layer: int) -> None:
        streams[layer] = stream

    def change(heads: Tensor, hook: Any, layer: int, kind: str) -> Tensor:
        heads, block = heads.clone(), model.blocks[layer]
        for reader in {path.reader for path in paths if path.reader[0] == layer and path.kind == kind}:
            key = reader, kind
            before = reads[key] if key in earlier else streams[layer]
            after = before - sum(written[p.writer] for p in paths if (p.reader, p.kind) == key)
            change = what_is_read(model, block, after) - what_is_read(model, block, before)
            heads[:, :, reader[1]] += change @ getattr(block.attn, f"W_{kind}")[reader[1]]
            reads[key] = after
        return heads

    writers, readers = sorted({path.writer[0] for path in paths}), sorted({path.reader[0] for path in paths})
    noting = [Hook(model, f"blocks.{n}.attn.hook_z", partial(note_write, layer=n)) for n in writers]
    noting += [Hook(model, f"blocks.{n}.hook_resid_pre", partial(note_stream, layer=n)) for n in readers]
    changing = [
        Hook(model, f"blocks.{n}.attn.hook_{kind.lower()}", partial(change, layer=n, kind=kind))
        for n, kind in sorted({(path.reader[0], path.kind) for path in paths})
    ]
    return [coming_last(model, n, noting) for n in writers[:1]] + noting + changing


def what_is_read(model: Any, block: Any, stream: Tensor) -> Tensor:
    """What heads read of this stream. No hook of LayerNorm's fires."""
    if model.cfg.normalization_type is None:
        return stream
    norm = block.ln1
    if hasattr(norm, "original_component"):  # a bridge's
        return norm.original_component(stream)
    return F.layer_norm(stream, stream.shape[-1:], norm.w, norm.b, norm.eps)


def _head(name: str | Head) -> Head:
    try:
        layer, head = (int(part) for part in name.split(".")) if isinstance(name, str) else name
    except ValueError:
        raise NoSuchPart(f"{name!r} is no head; a head is written layer.head, such as 1.3") from None
    return layer, head


def check_paths(model: Any, paths: tuple[Path, ...]) -> None:
    """Raises: NoSurface, NoSuchPart; Undefined where what a reader reads is no normalised sum of what was written."""
    check_heads(model, {head for path in paths for head in (path.writer, path.reader)})
    config = getattr(model, "config", None)
    reasons = {
        "with LayerNorm after each addition": getattr(config, "norm", None) == "post",
        "whose sub-layers replace the token": not getattr(config, "residual", True),
        "with a norm behind attention": any(hasattr(block, "ln1_post") for block in model.blocks),
    }
    for reason, applies in reasons.items():
        if applies:
            raise Undefined(f"a path cut is undefined in a model {reason}")
    for path in paths:
        check_own_weights(model, path.reader[0], path.kind)
