"""What `workbench inspect` prints: one model on one screen, every number beside what it would be by chance.

Three parts: what each head looks at and moves; which pairs of heads stand out by composition, in which sense, and what
it costs to cut exactly those paths on the held-out task; what is erased. A part that is undefined for a model (one
block of sub-layers that replace the token, say) is one line that says why.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from circuits import (
    Path,
    composition_spectrum,
    compositions,
    copying_score,
    head_scores,
    memory_management,
    path_effects,
)
from circuits.claims import Claim, claims_frame
from circuits.composition import KINDS, CompositionScores, Kind
from circuits.cuts import PathEffects
from circuits.heads import HeadScores
from circuits.memory import MemoryManagement
from circuits.scores import LEVEL, Scores, p_text
from circuits.spectra import CompositionSpectrum, CopyingScores
from workbench.claims import EXAMPLES, PAIRS, deciding_claim, defined, scored_claims
from workbench.runs import Run
from workbench.wording import count

if TYPE_CHECKING:
    from pandas import DataFrame

HEADINGS = {
    "previous_token": "previous token", "current_token": "current", "duplicate_token": "duplicate",
    "prefix_matching": "induction", "copying": "copying",
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """One pair that stands out: score, sign, and what its cut costs."""

    scores: Scores
    spectrum: CompositionSpectrum
    path: Path


@dataclass(frozen=True)
class InspectReport:
    """The parts; one that is undefined for this model is the reason why."""

    run: Run
    heads: HeadScores | str
    copying: CopyingScores | str
    composition: dict[Kind, CompositionScores] | str
    pairs: list[Pair]
    cuts: PathEffects | None
    memory: MemoryManagement | str
    claims: list[Claim]
    """What can be said of this model, each sentence with the cut that could refute it."""

    @property
    def data(self) -> dict[str, Any]:
        """Everything in plain numbers."""
        composition = self.composition if isinstance(self.composition, dict) else {}
        spectra = [p.spectrum.positivity.to_frame().assign(path=repr(p.path)) for p in self.pairs]
        return {
            "model": self.run.name, "seed": self.run.seed, "step": self.run.step, "score": self.run.score,
            "roles": {} if isinstance(self.heads, str) else self.heads.roles(),
            "heads": _records(self.heads), "copying": _records(self.copying),
            "composition": [row for scores in composition.values() for row in _records(scores)],
            "positivity": [row for frame in spectra for row in frame.to_dict("records")],
            "cuts": [] if self.cuts is None else _records(self.cuts),
            "erasing_heads": [] if isinstance(self.memory, str) else self.memory.erasers,
            "memory": _records(self.memory), "claims": claims_frame(self.claims).to_dict("records"),
            "undefined": [part for part in (self.heads, self.copying, self.composition, self.memory)
                          if isinstance(part, str)],
        }  # fmt: skip

    def lines(self) -> list[str]:
        model = self.run.recipe.model
        return [
            f"{self.run.name} seed {self.run.seed}: {self.run.recipe.about}",
            f"{count(model.n_layers, 'layer')} of {count(model.n_heads, 'head')}, {self.run.score}",
        ]

    def head_table(self) -> tuple[list[str], list[list[str]], list[str]]:
        """(headings, rows, notes): one row a head, score [middle 95 % of chance], * outside it."""
        model = self.run.recipe.model
        if not model.n_layers:
            return [], [], ["no layers, so no heads: its direct path is all there is (circuits.direct_path)"]
        scores: dict[str, Scores] = {}
        notes = []
        if isinstance(self.heads, str):
            notes.append(f"attention: {self.heads}")
        else:
            scores |= {heading: self.heads[measure] for measure, heading in HEADINGS.items()}
            notes.append("score [middle 95 % of its null]; * outside, which one in twenty is by chance; † dead")
            notes.append(
                f"attention on {self.heads.sequences} random repeated sequences of {self.heads.length} tokens, "
                "induction and duplicate less the same offsets without repeats; "
                "copying: share of what is moved, on its own token"
            )
        if isinstance(self.copying, str):
            notes.append(f"spectra: {self.copying}")
        else:
            scores |= {"OV spectrum": self.copying.eigenvalue, "OV arg-max": self.copying.argmax}
            basis = self.copying.eigenvalue.basis
            notes.append(f"OV: Σ Re λ / Σ |λ|, and the share of tokens that raise themselves most; {basis} weights")
        if not scores:
            return [], [], notes
        roles = {} if isinstance(self.heads, str) else self.heads.roles()
        names = [f"{layer}.{head}" for layer in range(model.n_layers) for head in range(model.n_heads)]
        rows = []
        for name in names:
            named = ", ".join(role for role, heads in roles.items() if name in heads)
            rows.append([name, *(_cell(score[name]) for score in scores.values()), named])
        return ["head", *scores, "where it looks"], rows, notes

    def pair_table(self) -> tuple[list[str], list[list[str]], list[str]]:
        """(headings, rows, notes): the pairs that stand out above chance, and the cost of cutting them."""
        if isinstance(self.composition, str):
            return [], [], [f"composition: {self.composition}"]
        n = sum(int(s.defined.sum()) for s in self.composition.values())
        if not n:
            return [], [], ["composition: no head reads another here"]
        counts = ", ".join(
            f"{kind} {int((s.outside & (s.z > 0)).sum())} above and {int((s.outside & (s.z < 0)).sum())} below"
            for kind, s in self.composition.items()
        )
        each = n // len(self.composition)
        basis = next(iter(self.composition.values())).basis
        notes = [
            f"composition: {each} pairs of each kind, {basis} weights; outside the 95 % band {counts} "
            f"({each * LEVEL / 2:.1f} each by chance)"
        ]
        if not self.pairs or self.cuts is None:
            return [], [], [*notes, "no pair stands out above chance"]
        notes.append(
            "z says “not random”, never “composes”: the last column is what the held-out loss rises by, in nats "
            "[95 %], when exactly that is cut (its mean over sequences instead); attention moved: the reader's, 0 … 1; "
            "small: surely not 0, but less than 5 % of what can be lost; heads that back each other up fall together"
        )
        names = [repr(pair.path) for pair in self.pairs]
        names += [f"these {len(paths)} {paths[0].kind} paths together" for paths in self.cuts.cuts[len(names) :]]
        weights = []
        for pair in self.pairs:
            z, p = f"{pair.scores.z.item():+.1f}", p_text(pair.scores.p.item())
            weights.append([_cell(pair.scores), z, p, _cell(pair.spectrum.positivity)])
        weights += [[""] * 4] * (len(names) - len(weights))
        moved = [f"{moved:.2f}" for moved in self.cuts.moved]
        rows = [[n, *w, m, c] for n, w, m, c in zip(names, weights, moved, self._costs(), strict=True)]
        return ["path", "score", "z", "p", "positivity", "attention moved", "cutting it costs"], rows, notes

    def _costs(self) -> list[str]:
        """The change of the loss for every cut, with its interval."""
        assert self.cuts is not None
        low, high = self.cuts.interval
        confirmed, sure = self.cuts.confirmed().tolist(), (self.cuts.p <= LEVEL / len(self.cuts.cuts)).tolist()
        words = [" confirmed" if yes else " small" if known else "" for yes, known in zip(confirmed, sure, strict=True)]
        return [f"{m:+.3f} [{low[i]:+.3f} {high[i]:+.3f}]{words[i]}" for i, m in enumerate(self.cuts.mean)]

    def memory_line(self) -> str:
        if isinstance(self.memory, str):
            return f"memory: {self.memory}"
        erasers = ", ".join(self.memory.erasers) or "none"
        if self.memory.neurons is None or not self.memory.neurons.scores.numel():
            return f"erasing heads: {erasers}"
        z = self.memory.neurons
        below = int((z.outside & (z.scores < 0)).sum())
        expected = z.scores.numel() * LEVEL / 2
        return (
            f"erasing heads: {erasers}; neurons whose output opposes their input: {below} of {z.scores.numel()} below "
            f"the 95 % band ({expected:.0f} by chance), most opposed cosine {z.scores.min().item():+.2f}"
        )


def inspect_report(run: Run, draws: int = 199) -> InspectReport:
    """Read one model. `draws` for every drawn null; fewer are quicker and coarser."""
    model = run.model
    heads = defined(lambda: head_scores(model, draws=draws))
    composition = defined(lambda: compositions(model))
    pairs = [] if isinstance(composition, str) else _pairs(model, composition, draws)
    cuts = None
    if pairs:
        paths = [pair.path for pair in pairs]
        by_kind = [[path for path in paths if path.kind == kind] for kind in KINDS]
        joint = [group for group in by_kind if len(group) > 1]
        tokens = run.task.held_out[:EXAMPLES]
        cuts = path_effects(
            model, tokens, [*paths, *joint], positions=list(run.task.scored), clusters=run.task.clusters(tokens)
        )
    known = None if isinstance(heads, str) else heads
    memory = defined(lambda: memory_management(model, heads=known, draws=draws))
    copying = defined(lambda: copying_score(model, draws=draws))
    return InspectReport(run, heads, copying, composition, pairs, cuts, memory, _claims(run, known, composition))


def _claims(run: Run, heads: HeadScores | None, composition: dict[Kind, CompositionScores] | str) -> list[Claim]:
    """Where heads look, whom they read, and which edges decide, as far as this model and task define it."""
    found = scored_claims(run, heads, composition if isinstance(composition, dict) else None)
    deciding = defined(lambda: deciding_claim(run)) if run.recipe.model.n_layers == 2 else ""
    return found if isinstance(deciding, str) else [*found, deciding]


def _pairs(model: Any, composition: dict[Kind, CompositionScores], draws: int) -> list[Pair]:
    """Of each kind, the pairs furthest above chance, the highest z first."""
    found = []
    for kind, scores in composition.items():
        for writer, reader in scores.ranked()[:PAIRS]:
            path = Path(writer, kind, reader)
            one = scores[f"{writer[0]}.{writer[1]}", f"{reader[0]}.{reader[1]}"]
            if bool(one.outside) and one.z > 0:
                found.append(Pair(one, composition_spectrum(model, kind, writer, reader, draws=draws), path))
    return found


def _records(part: Any) -> list[dict[str, Any]]:
    if isinstance(part, str):
        return []
    frame: DataFrame = part.to_frame()
    return frame.to_dict("records")


def _cell(score: Scores) -> str:
    """0.97 [−0.05 0.06]*: the number, the middle 95 % of its null, and whether it is outside; as many decimals, from
    two on, as show the star to be true."""
    value, (low, high), outside = score.value, score.band.tolist(), bool(score.outside)
    digits = next((n for n in (2, 3, 4) if (round(low, n) <= round(value, n) <= round(high, n)) != outside), 4)
    mark = "†" if bool(score.dead) else "*" if outside else ""
    return f"{value:.{digits}f} [{low:.{digits}f} {high:.{digits}f}]{mark}"
