"""A number beside what it would be by chance.

No score of a tiny model means anything bare: at d_head 8 a freshly initialised head reaches a copying score of .67.
`Scores` holds a number for every head (or pair of heads, or neuron), the mean and standard deviation of its null, the
95 % band, z and p. The null is either *drawn* (the very weights at hand, turned at random against each other: what the
spectra and shapes give when nothing is aligned) or *closed* (the exact moments of that). A z or a p says "not random";
it never says what the head does. That needs a cut (`circuits.cuts`).
"""

import html
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from circuits.errors import NoSuchPart, Undefined
from circuits.surface import Basis

if TYPE_CHECKING:
    from pandas import DataFrame

LEAST_DRAWS = 39  # fewer do not reach the ends of a 95 % band
DRAWS = 199  # with 199, leaving the band between the 5th smallest and 5th largest has a chance of exactly 5 %
LEVEL = 0.05
SHOWN = 20  # rows of a printed result


@dataclass(frozen=True, repr=False)
class Scores:
    """One number for every part, each with its null."""

    measure: str
    """What is measured, such as "previous-token attention"."""
    scores: Float[Tensor, "*axes"]
    """[layer, head] for heads, [layer, head, layer, head] for pairs (writer, then reader), [] for one number."""
    null_mean: Float[Tensor, "*axes"]
    null_sd: Float[Tensor, "*axes"]
    band: Float[Tensor, "two *axes"]
    """Lower and upper end of the middle 95 % of the null."""
    p: Float[Tensor, "*axes"]
    """Two-sided: how often the null is at least as far out on the nearer side, doubled."""
    parts: tuple[str, ...]
    """What each pair of axes names: ("head",), ("writer", "reader"), ("neuron",), or () for one number."""
    null: str
    """How the null was made, in a sentence."""
    basis: Basis
    """From raw or folded weights, or from what the model does on data."""
    defined: Bool[Tensor, "*axes"]
    """False where the question has no meaning (a reader before its writer); scores are 0 there."""
    dead: Bool[Tensor, "*axes"]
    """True where the weights are zero: z is 0 and p is 1, and so is a score of weights 0. (A head without queries
    attends all the same; how it does is not its own doing.)"""

    @property
    def value(self) -> float:
        """The number, where there is only one. Raises: NoSuchPart where there are several."""
        if self.scores.ndim:
            raise NoSuchPart(f"{self.measure} is one number for each {' and '.join(self.parts)}; index it by name")
        return self.scores.item()

    @property
    def z(self) -> Float[Tensor, "*axes"]:
        """Standard deviations above the null's mean; 0 for dead parts."""
        sure = (self.null_sd > 0) & self.defined & ~self.dead
        return torch.where(sure, (self.scores - self.null_mean) / self.null_sd.clamp(min=1e-30), 0.0)

    @property
    def outside(self) -> Bool[Tensor, "*axes"]:
        """Whether the number leaves the 95 % band: one in twenty does by chance."""
        return (self.p <= LEVEL) & self.defined & ~self.dead

    def __getitem__(self, names: Any) -> "Scores":
        """The number of one part: scores["1.3"], of one pair: scores["0.2", "1.1"]. (1, 3) does for "1.3"."""
        names = (names,) if len(self.parts) == 1 else names if isinstance(names, tuple) else (names,)
        index = self._index(names)
        one = {name: getattr(self, name)[index] for name in ("scores", "null_mean", "null_sd", "p", "defined", "dead")}
        return replace(_plain(self), **one, band=self.band[(slice(None), *index)], parts=())

    def to_frame(self) -> "DataFrame":
        """One row for each part that is defined: its name, score, null_mean, null_sd, z, p, low, high, dead."""
        from pandas import DataFrame

        columns: dict[str, Any] = {}
        at = self.defined.nonzero()
        for i, part in enumerate(self.parts):
            columns[part] = [_label(part, *pair) for pair in at[:, 2 * i : 2 * i + 2].tolist()]
        values = {
            "score": self.scores, "null_mean": self.null_mean, "null_sd": self.null_sd, "z": self.z, "p": self.p,
            "low": self.band[0], "high": self.band[1], "dead": self.dead,
        }  # fmt: skip
        columns |= {name: value[self.defined].reshape(-1).tolist() for name, value in values.items()}
        return DataFrame(columns | {"measure": self.measure, "basis": self.basis})

    def top(self, n: int = 10) -> "DataFrame":
        """The n rows of `to_frame` with the highest z; a negative n gives the lowest, the lowest first."""
        order = self.z[self.defined].argsort(descending=n > 0, stable=True)
        n = abs(n)
        return self.to_frame().iloc[order[:n].tolist()].reset_index(drop=True)

    def __repr__(self) -> str:
        return f"{self._heading}\n{self._shown.to_string(index=False, float_format='{:.3f}'.format)}"

    def _repr_html_(self) -> str:
        shown = self._shown.to_html(index=False, float_format="{:.3f}".format)
        return f"<p>{html.escape(self._heading)}</p>{shown}"

    @property
    def _shown(self) -> "DataFrame":
        frame = self.top(SHOWN).drop(columns=["measure", "basis"])
        return frame.assign(p=frame["p"].map(p_text)) if len(frame) else frame

    @property
    def _heading(self) -> str:
        n, out = int(self.defined.sum()), int(self.outside.sum())
        count = f"; {out} of {n} outside the 95 % band, the highest z first" if self.parts else ""
        return f"{self.measure} ({self.basis}){count}. Null: {self.null}"

    def _index(self, names: tuple[Any, ...]) -> tuple[int, ...]:
        known = "; ".join(self.parts) or "nothing: it is one number"
        if len(names) != len(self.parts):
            raise NoSuchPart(f"{self.measure} is indexed by {known}; got {len(names)} names")
        index: list[int] = []
        for name, part in zip(names, self.parts, strict=True):
            sizes = self.scores.shape[len(index) : len(index) + 2]
            try:
                pair = name.replace(".mlp.", ".").split(".") if isinstance(name, str) else name
                first, second = (int(number) for number in pair)
            except (TypeError, ValueError):
                first = second = -1
            if not (0 <= first < sizes[0] and 0 <= second < sizes[1]):
                last = _label(part, sizes[0] - 1, sizes[1] - 1)
                raise NoSuchPart(f"{name!r} is no {part} here; they go from {_label(part, 0, 0)} to {last}")
            index += [first, second]
        if not bool(self.defined[tuple(index)]):
            raise NoSuchPart(
                f"{self.measure} of {' and '.join(map(str, names))} is undefined: the reader is not behind the writer"
            )
        return tuple(index)


def from_draws(
    measure: str,
    scores: Float[Tensor, "*axes"],
    draws: Float[Tensor, "draw *axes"],
    *,
    parts: tuple[str, ...],
    null: str,
    basis: Basis,
    dead: Tensor | None = None,
) -> Scores:
    """Scores against a drawn null. `p` is exact if, under the null, the score is as good as one more draw."""
    n = len(draws)
    if n < LEAST_DRAWS:
        raise Undefined(f"{n} draws do not reach the ends of a 95 % band; expected at least {LEAST_DRAWS}")
    dead = torch.zeros_like(scores, dtype=torch.bool) if dead is None else dead
    below, above = (draws <= scores).sum(0), (draws >= scores).sum(0)
    k = max(1, int((n + 1) * LEVEL / 2))
    ordered = draws.sort(dim=0).values
    sd = draws.std(0) if scores.numel() else torch.zeros_like(scores)  # torch warns of the s.d. of nothing
    return without_dead(Scores(
        measure, scores, draws.mean(0), sd, torch.stack([ordered[k - 1], ordered[n - k]]),
        (2 * (torch.minimum(below, above).to(scores) + 1) / (n + 1)).clamp(max=1.0), parts, null, basis,
        torch.ones_like(dead), dead,
    ))  # fmt: skip


def without_dead(scores: Scores) -> Scores:
    """The same, with 0 (and p = 1) where the weights are zero or nothing is defined."""
    gone = scores.dead | ~scores.defined
    zeroed = {name: getattr(scores, name).masked_fill(gone, 0) for name in ("scores", "null_mean", "null_sd", "band")}
    return replace(scores, **zeroed, p=scores.p.masked_fill(gone, 1))


def p_text(p: float) -> str:
    """ "< .001" for what three decimals do not show."""
    return "< .001" if p < 0.001 else f"{p:.3f}"


def _plain(scores: Scores) -> Scores:
    """As the base class: what a subclass adds belongs to all of its parts together."""
    return Scores(**{name: getattr(scores, name) for name in Scores.__dataclass_fields__})


def _label(part: str, first: int, second: int) -> str:
    return f"{first}.mlp.{second}" if part == "neuron" else f"{first}.{second}"
