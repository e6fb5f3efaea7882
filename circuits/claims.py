"""A claim is a sentence about what a part of a model does, with the cut that would refute it, and what that cut said.

Nothing here is a figure of speech: `Claim.check` runs the experiment, and `str(claim)` shows the sentence as held or as
refuted. What is claimed comes from scores (who looks where, who stands out by composition); whether it holds is decided
by cutting exactly what the sentence speaks of, by nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor

from circuits.composition import KINDS, CompositionScores, Kind
from circuits.cuts import Path, path_effects
from circuits.heads import EFFECT, HeadScores, head_scores
from circuits.scores import Scores
from circuits.surface import Head, head_name

if TYPE_CHECKING:
    from pandas import DataFrame

PARTS = {"Q": "queries", "K": "keys", "V": "values"}
LOOKS = {
    "previous-token": "at the token before", "current-token": "at its own position",
    "duplicate-token": "at earlier occurrences of the same token",
    "induction": "at what followed earlier occurrences of the same token",
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What the experiment said."""

    holds: bool
    found: str
    """The figures, with their interval or null."""


@dataclass(frozen=True, repr=False)
class Claim:
    """One sentence, what it speaks of, and the experiment that could refute it."""

    text: str
    circuit: tuple[Any, ...]
    """Heads, `Path`s or `Edge`s."""
    test: str
    """The experiment in words."""
    check: Callable[[], Verdict]

    @cached_property
    def verdict(self) -> Verdict:
        """Run once."""
        return self.check()

    @property
    def holds(self) -> bool:
        return self.verdict.holds

    def __str__(self) -> str:
        return f"{'✓' if self.holds else '✗ refuted:'} {self.text} ({self.test}: {self.verdict.found})"

    __repr__ = __str__


def claims_frame(claims: Sequence[Claim]) -> "DataFrame":
    """One row for each: text, circuit, test, found, holds."""
    from pandas import DataFrame

    return DataFrame([
        {"claim": c.text, "circuit": ", ".join(map(str, c.circuit)), "test": c.test, "found": c.verdict.found,
         "holds": c.holds}
        for c in claims
    ])  # fmt: skip


def looking_claims(model: Any, heads: HeadScores, seed: int = 1) -> list[Claim]:
    """Where heads with a role look. What could refute it: other sequences and other draws of the null than those that
    the role was named by. So `seed` must not be the one that `heads` were measured with."""
    like = {"sequences": heads.sequences, "length": heads.length, "draws": heads.draws}
    again = cache(lambda: head_scores(model, **like, seed=seed))
    return [
        _looking(role, name, lambda role=role, name=name: again()[role][name])
        for role, names in heads.roles().items()
        for name in names
    ]


def composition_claims(
    model: Any,
    tokens: Int[Tensor, "sequence position"],
    composition: dict[Kind, CompositionScores],
    *,
    positions: slice | Sequence[int] | None = None,
    clusters: Sequence[str] | None = None,
    pairs: int = 4,
) -> list[Claim]:
    """For each kind and writer that stands out above chance: the readers that it stands out with read it.

    `pairs` of each kind are looked at, the highest z first. Refuted unless the loss at `positions` rises, surely and by
    5 % of what there is to lose, when all paths that the sentence speaks of are cut together: heads back each other up.
    """
    found = []
    for kind in KINDS:
        scores = composition.get(kind)
        if scores is None:
            continue
        groups: dict[Head, list[Head]] = {}
        for writer, reader in scores.ranked()[:pairs]:
            one = scores[head_name(*writer), head_name(*reader)]
            if bool(one.outside) and one.z > 0:
                groups.setdefault(writer, []).append(reader)
        for writer, readers in groups.items():
            found.append(_reading(model, tokens, kind, writer, sorted(readers), positions, clusters))
    return found


def _looking(role: str, name: str, measure: Callable[[], Scores]) -> Claim:
    def check() -> Verdict:
        score = measure()
        low, high = score.band.tolist()
        holds = score.value >= EFFECT and bool(score.outside) and score.value > high
        return Verdict(holds, f"{score.value:.2f}, by chance {low:.2f} … {high:.2f}")

    controlled = role in ("induction", "duplicate-token")
    test = "attention there on other sequences" + ", less the same offsets without repeats" * controlled
    return Claim(f"head {name} looks {LOOKS[role]}", (name,), test, check)


def _reading(
    model: Any,
    tokens: Tensor,
    kind: Kind,
    writer: Head,
    readers: list[Head],
    positions: slice | Sequence[int] | None,
    clusters: Sequence[str] | None,
) -> Claim:
    paths = tuple(Path(writer, kind, reader) for reader in readers)

    def check() -> Verdict:
        effect = path_effects(model, tokens, [paths], positions=positions, clusters=clusters)
        low, high = effect.interval[:, 0].tolist()
        found = f"loss {effect.mean[0].item():+.3f} nats [{low:+.3f} {high:+.3f}]"
        return Verdict(bool(effect.confirmed()[0]), found)

    names = ", ".join(head_name(*reader) for reader in readers)
    return Claim(f"the {PARTS[kind]} of {names} read head {head_name(*writer)}", paths, "cut together", check)
