"""Cuts: the forward pass without some paths or edges, which is the test behind the words "reads" and "composes".

A *path* (`circuits.paths`) is what one head reads from an earlier one, an *edge* (`circuits.edges`) what heads move
from one position to another. `cut` takes either away, or puts a mean or another prompt's in its place; all behind it
is computed anew. `force` is the opposite: it lets a head attend to one source only.

Heads back each other up: where several do the same, cutting one costs little loss and cutting all of them much. Two
questions find the path all the same: what does the reader itself lose (`measure="prefix_matching"`, its own attention),
and what do all paths of one writer cost together?
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from scipy.special import stdtr, stdtrit
from torch import Tensor

from circuits.attention import exclusive
from circuits.edges import Edge, Reference, Resolved, check_replacement, edge_hooks, forcing_hook, reference, resolve
from circuits.errors import BadModel, NoSuchPart, Undefined
from circuits.examples import Examples, Place, clustered_error
from circuits.hooks import on
from circuits.paths import Path, check_paths, every_path, path_hooks
from circuits.sequences import PLACES, places, predicted
from circuits.surface import Head

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Edge", "Path", "PathEffects", "cut", "every_path", "force", "path_effects"]

LOSS = "mean next-token loss (nats)"
ATTENTION = ("previous_token", "current_token", "duplicate_token", "prefix_matching")


@dataclass
class _State:
    """The cuts that a model is inside, and what paths' readers read in this pass after those so far."""

    paths: list[Path] = field(default_factory=list)
    edges: list[Resolved] = field(default_factory=list)
    reads: dict[tuple[Head, str], Tensor] = field(default_factory=dict)


_states: WeakKeyDictionary[Any, _State] = WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def cut(
    model: Any,
    edges_or_paths: Edge | Path | Sequence[Edge | Path],
    replacement: str = "mean",
    *,
    what: str = "contribution",
    reference: Examples | Reference | Tensor | None = None,
    roles: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Inside, every forward pass of `model` is that without these paths and edges.

    That holds for plain calls, run_with_hooks, run_with_cache and functions that use them, whoever makes them; other
    threads that enter `exclusive(model)` wait. `replacement`: "zero" takes what was moved away, "mean" puts its mean
    over the batch in its place (and so needs a batch of at least two). Several at once are taken away together, and so
    are those of a cut within a cut. Other people's hooks stay; what is cut is noted after they, and any put on inside,
    have acted on it. All hooks of the cut are removed at the end.

    For edges, `what` is cut, as `circuits.edges` has it: "contribution", "value", "pattern" or "knock-out" (which needs
    no replacement). `reference` gives other prompts to take the mean over, as they are when the cut is entered, or the
    other prompt of each example for "resample": Examples, tokens with the same roles, or what `edges.reference` made.
    `roles`: name → position, or positions [example] (of the batch); by default those of `reference`.

    Raises: NoSuchPart for heads, roles or positions that are not there; Undefined for a path where what a reader reads
    is not the normalised sum of what was written (LayerNorm after the addition, no residual stream, norms behind
    attention), for active dropout, for a key or value that several heads share, for what is cut already, and in a
    forward pass for one sequence with "mean".
    """
    given = (edges_or_paths,) if isinstance(edges_or_paths, (Edge, Path)) else tuple(dict.fromkeys(edges_or_paths))
    own_paths = tuple(one for one in given if isinstance(one, Path))
    own_edges = tuple(one for one in given if isinstance(one, Edge))
    if (own_paths or not own_edges) and replacement not in ("mean", "zero"):
        raise NoSuchPart(f"{replacement!r} is no replacement; expected mean or zero")
    with exclusive(model):
        if own_paths or not own_edges:
            check_paths(model, own_paths)
        with _lock:
            state = _states.setdefault(model, _State())
        if again := [path for path in own_paths if path in state.paths]:
            raise Undefined(f"{again[0]} is cut already; leave the outer cut first")
        hooks = path_hooks(model, own_paths, replacement, state.paths, state.reads)
        edges: list[Resolved] = []
        if own_edges:
            edges, more = _edges(model, own_edges, replacement, what, reference, roles, state)
            hooks = more + hooks
        state.paths += own_paths
        state.edges += edges
        try:
            with on(hooks):
                yield
        finally:
            del state.paths[len(state.paths) - len(own_paths) :]
            del state.edges[len(state.edges) - len(edges) :]
            state.reads.clear()


def _edges(
    model: Any, edges: tuple[Edge, ...], replacement: str, what: str, source: Any, roles: Any, state: _State
) -> tuple[list[Resolved], list[Any]]:
    """The edges with their positions, and the hooks that cut them."""
    if isinstance(source, Tensor):
        source = reference(model, source, roles)
    elif isinstance(source, Examples):
        source = reference(model, source)
    check_replacement(what, replacement, source)
    found = resolve(model, edges, roles if roles is not None else source.roles if source is not None else {})
    for edge in found:
        if any(edge & outer for outer in state.edges):
            raise Undefined(f"{edge.edge} is cut already; leave the outer cut first")
    return found, edge_hooks(model, found, what, replacement, source)


@contextmanager
def force(
    model: Any,
    layer: int,
    head: int | str | None,
    destination: Place,
    source: Place,
    roles: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Inside, this head (or all of the layer, "all") attends from the destination to that source and nowhere else.

    Raises: NoSuchPart, as for an Edge.
    """
    with (
        exclusive(model),
        on([forcing_hook(model, resolve(model, [Edge(layer, head, destination, source)], roles or {})[0])]),
    ):
        yield


@dataclass(frozen=True, repr=False)
class PathEffects:
    """What cutting paths costs, paired by sequence."""

    measure: str
    cuts: tuple[tuple[Path, ...], ...]
    """The paths of each cut."""
    clean: Float[Tensor, "cut sequence"]
    """The measure without a cut; with attention, that of the readers of each cut."""
    changes: Float[Tensor, "cut sequence"]
    """The measure with the cut minus that without, for each sequence."""
    moved: Float[Tensor, "cut"]
    """How far the readers' attention moved, 0 … 1: half the sum of |difference| over sources, mean over the rest."""
    cluster: Int[Tensor, "sequence"]
    """Which sequences go together: their errors are not independent."""
    d_vocab: int
    replacement: str

    @property
    def mean(self) -> Float[Tensor, "cut"]:
        return self.changes.mean(1)

    @property
    def standard_error(self) -> Float[Tensor, "cut"]:
        """Over sequences, or over clusters of them."""
        return clustered_error(self.changes, self.cluster)

    @property
    def _freedom(self) -> int:
        return int(self.cluster.max())  # clusters less one

    @property
    def z(self) -> Float[Tensor, "cut"]:
        """Mean over its standard error; 0 where the cut changes nothing."""
        return torch.where(self.mean == 0, 0.0, self.mean / self.standard_error)

    @property
    def p(self) -> Float[Tensor, "cut"]:
        """Two-sided, from Student's t distribution with as many degrees of freedom as clusters less one."""
        return torch.as_tensor(2 * stdtr(self._freedom, -self.z.abs().numpy())).to(self.z)

    @property
    def interval(self) -> Float[Tensor, "two cut"]:
        """95 % interval of the mean."""
        half = float(stdtrit(self._freedom, 0.975)) * self.standard_error
        return torch.stack([self.mean - half, self.mean + half])

    def confirmed(self, level: float = 0.05, share: float = 0.05) -> Bool[Tensor, "cut"]:
        """Whether each cut is shown to cost something that matters.

        p ≤ level / number of cuts (Bonferroni), and a cost of at least `share` of what there is to lose. For the loss
        that is ln d_vocab, the loss of knowing nothing, minus the clean loss; for attention it is the clean attention,
        and the cost is its fall. Raises: Undefined for any other measure.
        """
        if self.measure not in (LOSS, *ATTENTION):
            raise Undefined(f"confirmed needs a limit of what can be lost, which {self.measure} lacks; read its p")
        clean, loss = self.clean.mean(1), self.measure == LOSS
        cost, to_lose = (self.mean, math.log(self.d_vocab) - clean) if loss else (-self.mean, clean)
        return (self.p <= level / len(self.cuts)) & (cost >= share * to_lose) & (cost > 0) & (to_lose > 0)

    def to_frame(self) -> "DataFrame":
        """One row for each cut: its paths, clean value, change with standard_error, z, p, low and high, and
        attention_moved; confirmed too where that is defined."""
        from pandas import DataFrame

        low, high = self.interval
        columns = {
            "clean": self.clean.mean(1), "change": self.mean, "standard_error": self.standard_error, "z": self.z,
            "p": self.p, "low": low, "high": high, "attention_moved": self.moved,
        }  # fmt: skip
        frame = DataFrame({"paths": [_label(paths) for paths in self.cuts]})
        frame = frame.assign(**{name: value.tolist() for name, value in columns.items()})
        frame = frame.assign(measure=self.measure, replacement=self.replacement)
        limited = self.measure in (LOSS, *ATTENTION)
        return frame.assign(confirmed=self.confirmed().tolist()) if limited else frame

    def __repr__(self) -> str:
        shown = self.to_frame().drop(columns=["measure", "replacement"])
        return f"{self._heading}\n{shown.to_string(index=False, float_format='{:.4f}'.format)}"

    def _repr_html_(self) -> str:
        shown = self.to_frame().drop(columns=["measure", "replacement"])
        return f"<p>{self._heading}</p>{shown.to_html(index=False, float_format='{:.4f}'.format)}"

    @property
    def _heading(self) -> str:
        what = self.measure.replace("_", "-") + " attention of the readers" * (self.measure in ATTENTION)
        return f"Change of the {what} when paths are cut ({self.replacement}), {self._sample}"

    @property
    def _sample(self) -> str:
        n, groups = self.clean.shape[1], self._freedom + 1
        return f"{n} sequences" + ("" if groups == n else f" in {groups} clusters")


def path_effects(
    model: Any,
    tokens: Int[Tensor, "sequence position"],
    paths: Path | Sequence[Path | Sequence[Path]],
    *,
    together: bool = False,
    replacement: str = "mean",
    positions: slice | Sequence[int] | None = None,
    measure: str | Callable[[Tensor, Tensor], Tensor] = LOSS,
    clusters: Sequence[str] | None = None,
) -> PathEffects:
    """What each path is worth: the change of the loss when it is cut, sequence by sequence.

    `paths`: each is cut alone, or, where it is a sequence of paths, these together; `together` cuts all of them at
    once. The loss is the mean next-token loss of a sequence in nats, over all positions or over those whose *next*
    token is predicted (`positions`, counted from 0, such as slice(24, None)). In its place `measure` is one of
    ATTENTION, the attention score of the readers themselves as in `circuits.heads` (mean over these positions and the
    readers of a cut, nothing subtracted), or a function of logits and tokens that gives one number for each sequence.
    `clusters`: a name for each sequence; those of one name err together (the sentences of a noun pair), and standard
    error and p go by clusters. By default sequences are taken as independent.

    Raises: what `cut` raises; NoSuchPart for another measure; ValueError for fewer than two sequences or tokens, no
    paths, no positions or none that the measure could see; BadModel where the clean run is not finite.
    """
    paths = [paths] if isinstance(paths, Path) else paths
    if isinstance(measure, str) and measure not in (LOSS, *ATTENTION):
        raise NoSuchPart(f"{measure!r} is no measure; expected one of {', '.join(ATTENTION)}, or a function")
    singles = tuple((path,) if isinstance(path, Path) else tuple(path) for path in paths)
    cuts = (tuple(path for group in singles for path in group),) if together else singles
    if not all(cuts) or not cuts:
        raise ValueError("no paths to cut; give at least one")
    check_paths(model, tuple({path for group in cuts for path in group}))
    chosen = predicted(tokens, positions)
    names = [str(i) for i in range(len(tokens))] if clusters is None else list(clusters)
    if len(names) != len(tokens):
        raise ValueError(f"{len(names)} clusters for {len(tokens)} sequences; expected one for each")
    known = {name: i for i, name in enumerate(dict.fromkeys(names))}
    where = _places(tokens, chosen, measure) if isinstance(measure, str) and measure != LOSS else None

    def run(readers: set[Head]) -> tuple[Tensor, dict[Head, Tensor]]:
        names = [f"blocks.{layer}.attn.hook_pattern" for layer in sorted({layer for layer, _ in readers})]
        logits, cache = model.run_with_cache(tokens, names_filter=names)
        value = measure(logits, tokens) if callable(measure) else _losses(logits, tokens, chosen)
        if value.shape != tokens.shape[:1]:
            raise ValueError(f"measure gave shape {list(value.shape)}; expected one number for each sequence")
        return value, {(n, h): cache[f"blocks.{n}.attn.hook_pattern"][:, h, chosen] for n, h in readers}

    before, changes, moved = [], [], []
    with exclusive(model), torch.no_grad():
        clean, patterns = run({path.reader for group in cuts for path in group})
        if not bool(clean.isfinite().all()):
            raise BadModel("what is measured is not finite before any cut; the model diverged, or its file is damaged")
        for group in cuts:
            readers = {path.reader for path in group}
            with cut(model, group, replacement):
                value, others = run(readers)
            olds, news = (torch.stack([found[head] for head in sorted(readers)]) for found in (patterns, others))
            pair = clean, value
            if where is not None:
                pair = tuple((pattern.mean(0) * where).sum((1, 2)) for pattern in (olds, news))
            before.append(pair[0])
            changes.append(pair[1] - pair[0])
            moved.append((news - olds).abs().sum(-1).mean() / 2)
    measured = measure if isinstance(measure, str) else getattr(measure, "__name__", "measure")
    values, change, moves = (torch.stack(each).float().cpu() for each in (before, changes, moved))
    cluster = torch.tensor([known[name] for name in names])
    return PathEffects(measured, cuts, values, change, moves, cluster, int(model.cfg.d_vocab), replacement)


def _label(paths: tuple[Path, ...]) -> str:
    few = len(paths) <= 4
    return " + ".join(map(repr, paths)) if few else f"{paths[0]} … {paths[-1]} ({len(paths)} paths)"


def _places(tokens: Tensor, chosen: Tensor, measure: str) -> Float[Tensor, "sequence destination source"]:
    """What attention counts, so that its sum is a mean over the chosen destinations that have such a place."""
    found = places(tokens)[:, PLACES.index(measure), chosen] > 0
    destinations = found.any(2).sum(1)
    if not bool(destinations.all()):
        raise ValueError(f"a sequence has no place for {measure} at these positions; give sequences that repeat there")
    return found / destinations[:, None, None]


def _losses(logits: Tensor, tokens: Tensor, chosen: Tensor) -> Float[Tensor, "sequence"]:
    logits, target = logits[:, chosen], tokens[:, chosen + 1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape).mean(1)
