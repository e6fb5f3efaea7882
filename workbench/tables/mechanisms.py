"""The census: how does each seed of a Winograd model say who waited? Told by cuts, not by attention maps.

For each run every edge into the answer's position (all heads of a block together) is cut, in two ways:

    contribution   what the edge moves is replaced by what it moves in another sentence (mean over three draws of those)
    knock-out      the source is taken out of the softmax, and the rest of the row renormalised

An edge is *needed* if fewer than a threshold of the held-out sentences are still right. The rule that names the
mechanism looks at nothing but which edges are needed (`name_of`). A label counts only if both kinds of cut and all
thresholds from 65 to 85 % give the same one; else the seed is "mixed". One mechanism shows by how the kinds differ:
where knocking out the adjective is fatal but replacing its contribution is not, what it says passes through the
softmax's denominator, onto sources that say nothing themselves.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import Undefined
from workbench.evidence import examples
from workbench.tables.engine import Asked, Plan, Quick
from workbench.tables.table import Column, Compared, Row, percent
from workbench.tasks import load_task

if TYPE_CHECKING:
    from circuits.edges import Edge, Reference
    from circuits.examples import Examples
    from circuits.smallest import SmallestCircuit
    from workbench.runs import Run

TITLE = "How each seed says who waited"
SEEDS = 16
QUICK = Quick()

ADJECTIVE_FIRST = "adjective first, then the noun it selects"
FIRST_NOUN = "first noun as default, adjective overrides"
SECOND_NOUN = "second noun as default, adjective overrides"
DENOMINATOR = "through the softmax denominator"
ONE_BLOCK = "both nouns in one block"
MIXED = "mixed"
RULES = {
    ADJECTIVE_FIRST: "block 1 needs the adjective and neither noun; block 2 needs the nouns (both cut together)",
    FIRST_NOUN: "block 1 needs the first noun, not the second; block 2 needs the second noun or the adjective",
    SECOND_NOUN: "block 1 needs the second noun, not the first; block 2 needs the first noun or the adjective",
    DENOMINATOR: (
        "knocking the adjective out is fatal, replacing its contribution (in both blocks at once) is not, replacing "
        "those of the words that never change (block 1, all at once) is; block 2 needs the nouns under either cut"
    ),
    ONE_BLOCK: "one block needs each of the nouns; the other does not need them (both cut together)",
    MIXED: "anything else, or what depends on the kind of cut or on the threshold",
}
THRESHOLDS = (0.65, 0.70, 0.75, 0.80, 0.85)
KEEP, LEAVE = 0.95, 0.60
CHOSEN_KEEP, CHOSEN_LEAVE = 0.97, 0.55
"""Asked of the training sentences, with a margin, since held-out ones differ a little."""
DRAWS = 3  # other sentences for each, to resample from
ROLES = ("x", "y", "adjective")
MODELS = ("winograd-2", "winograd-2-attn")
Key = tuple[int, str]
"""(block from 0, source): a role, "nouns" for both, "constants" for all words that are the same in every sentence."""
EVERYWHERE: Key = (-1, "adjective")
"""The adjective in both blocks at once."""


@dataclass(frozen=True)
class Part:
    """Which head plays a part of the circuit."""

    edge: str
    """The edge of all heads together, such as adjective→0.all→answer."""
    head: str
    """The head whose edge costs most when it is cut alone (contribution, another sentence's)."""
    share: float
    """Its cost in answer − foil, over the sum of all heads' costs."""


@dataclass(frozen=True, repr=False)
class Mechanism:
    """What one seed does."""

    model: str
    seed: int
    label: str
    held_out_accuracy: float
    contribution: dict[Key, float]
    """Held-out accuracy when that is cut, 0 to 1."""
    knock_out: dict[Key, float]
    circuit: "SmallestCircuit"
    parts: tuple[Part, ...]
    carrier: tuple[str, float, float] | None
    """Of a denominator seed: the edge from a word that never changes which costs most (its head the one that varies
    most), and the attention to it where the answer is x and where it is y."""

    @property
    def holds(self) -> bool:
        """A circuit of at most four edges that alone keeps 95 %, and without which at most 60 % are left."""
        kept, cut = (which.get("contribution") for which in (self.circuit.kept, self.circuit.cut))
        return kept is not None and cut is not None and kept >= KEEP and cut <= LEAVE and len(self.circuit.edges) <= 4

    def __repr__(self) -> str:
        return f"{self.model} seed {self.seed}: {self.label}; {', '.join(map(repr, self.circuit.edges))}"


def plans(asked: Asked) -> list[Plan]:
    """One row a seed."""
    return [
        Plan({"model": name, "seed": recipe.seeds.initialisation}, (recipe,), measure)
        for name in MODELS
        for recipe in asked.recipes(name)
    ]


def measure(runs: list["Run"]) -> Row:
    return _row(mechanism(runs[0]))


def summary(rows: Sequence[Row]) -> list[str]:
    """For each model the mechanisms, how often, and the seed whose circuit is clearest."""
    said = []
    for model in dict.fromkeys(row["model"] for row in rows):
        group = [row for row in rows if row["model"] == model]
        clearest = representatives(group)
        told = "; ".join(
            f"{n} {label} (clearest: seed {clearest[label]['seed']})"
            for label, n in Counter(row["mechanism"] for row in group).most_common()
        )
        holding = sum(row["holds"] for row in group)
        said.append(f"{model}: {told}; {holding} of {len(group)} seeds have a circuit of at most four edges")
    return said


def representatives(rows: Sequence[Row]) -> dict[str, Row]:
    """Of each label the seed whose circuit is clearest: kept alone minus cut alone, held out."""

    def clearness(row: Row) -> float:
        return row["kept_alone"]["contribution"] - row["cut_alone"]["contribution"] if row["kept_alone"] else -1.0

    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["mechanism"], []).append(row)
    return {label: max(group, key=clearness) for label, group in groups.items()}


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Agreement: several mechanisms, as before in three seeds; a small circuit in every seed, as before in ten."""
    made = []
    for model in dict.fromkeys(row["model"] for row in rows):
        group = [row for row in rows if row["model"] == model]
        named = sum(row["mechanism"] != MIXED for row in group)
        holding = sum(row["holds"] for row in group)
        kinds = len({row["mechanism"] for row in group} - {MIXED})
        made += [
            Compared(f"{model}: mechanisms among the seeds", "at least 2, in 3 seeds", str(kinds), kinds >= 2),
            Compared(f"{model}: seeds with a label that is stable", "", f"{named} of {len(group)}", None),
            Compared(f"{model}: seeds with a circuit of ≤ 4 edges", "10 of 10", f"{holding} of {len(group)}",
                     holding == len(group)),
        ]  # fmt: skip
    return made


def discussion(rows: Sequence[Row]) -> list[str]:
    said = [
        "All these models answer nearly every held-out sentence, and they do not do it in the same way. "
        "[evidence.md](evidence.md) goes through the mechanisms one by one."
    ]
    for row in rows:
        if not row["holds"]:
            why = row["failed"] or f"{len(row['circuit'])} edges keep {percent(row['kept_alone']['contribution'])} %"
            said.append(f"{row['model']} seed {row['seed']} has no circuit of at most four edges: {why}.")
    return said


def words_that_never_change() -> str:
    """Position and word, where all sentences have the same."""
    task = load_task("winograd")
    up_to_answer = task.held_out[:, : task.answer_position + 1]
    same = (up_to_answer == up_to_answer[0]).all(0).nonzero().flatten().tolist()
    return ", ".join(f"{at} {task.str_tokens(up_to_answer[0])[at]}" for at in same)


def _row(each: Mechanism) -> Row:
    def accuracies(cut: dict[Key, float]) -> dict[str, float]:
        named = {"both blocks" if block < 0 else f"block {block + 1}": block for block, _ in cut}
        return {f"{name} ← {source}": cut[block, source] for name, block in named.items()
                for at, source in cut if at == block}  # fmt: skip

    return {
        "mechanism": each.label,
        "held_out_accuracy": each.held_out_accuracy,
        "circuit": [repr(edge) for edge in each.circuit.edges],
        "kept_alone": each.circuit.kept,
        "cut_alone": each.circuit.cut,
        "holds": each.holds,
        "failed": each.circuit.failed,
        "heads": [{"edge": part.edge, "head": part.head, "share": part.share} for part in each.parts],
        "carrier": None if each.carrier is None else list(each.carrier),
        "accuracy_without": {
            "contribution": accuracies(each.contribution), "knock-out": accuracies(each.knock_out),
        },
    }  # fmt: skip


NOTES = (
    "each seed's label is what its cuts say: an edge into the answer's position (all heads of a block together) is "
    "needed if fewer than a threshold of the held-out sentences are still right without it; "
    + "; ".join(f"{label}: {rule}" for label, rule in RULES.items()),
    "a label counts only if both kinds of cut (contribution of another sentence, mean of three draws; knock-out) and "
    "all thresholds from 65 to 85 % give it, or else the seed is mixed; rule and kinds were chosen after looking at "
    "sixteen seeds of each model, and of six later ones three were mixed",
    "circuit: the smallest set of edges into the answer's position that alone keeps 95 % (the others replaced by their "
    "mean over the task) and without which at most 60 % are left; chosen on training pairs, figures on held-out ones; "
    "exhaustive up to three edges (smallest), greedy beyond (minimal)",
    "heads: of each edge, the head whose cut costs most, with its share of the cost of all heads cut one by one",
    f"numbers in edges are positions of words that never change: {words_that_never_change()}; chance between the two "
    "nouns is 50 %",
)


def _rate(value: float | None) -> str:
    return "–" if value is None else percent(value)


COLUMNS = (
    Column("model", lambda row: row["model"], essential=True, text=True),
    Column("seed", lambda row: str(row["seed"]), essential=True),
    Column("held-out %", lambda row: percent(row["held_out_accuracy"])),
    Column("mechanism", lambda row: row["mechanism"], essential=True, text=True),
    Column("circuit", lambda row: ", ".join(row["circuit"]) or row["failed"], essential=True),
    Column("alone %", lambda row: _rate(row["kept_alone"].get("contribution")), essential=True),
    Column("without %", lambda row: _rate(row["cut_alone"].get("contribution")), essential=True),
    Column("heads", lambda row: ", ".join(f"{p['head']} ({p['share']:.0%})" for p in row["heads"])),
    Column("budget", lambda row: row["budget"], essential=True, text=True),
)


def mechanism(run: "Run") -> Mechanism:
    """One run's: some ten seconds. Raises: Undefined for a task without the roles x, y, adjective, or another depth."""
    from circuits.edges import reference
    from circuits.smallest import smallest_circuit

    if any(role not in run.task.roles for role in ROLES) or run.model.cfg.n_layers != 2:
        raise Undefined(f"{run.name}: the census is of two-block models of tasks with the roles {', '.join(ROLES)}")
    held_out, train = examples(run), examples(run, "train")
    others = [reference(run.model, held_out.shuffled(seed)) for seed in range(DRAWS)]
    groups = _groups(held_out)
    contribution, knock_out = (
        {key: _accuracy(run.model, held_out, edges, what, others) for key, edges in groups.items()}
        for what in ("contribution", "knock-out")
    )
    label = stable_label(contribution, knock_out)
    circuit = smallest_circuit(run.model, train, held_out, keep=CHOSEN_KEEP, leave=CHOSEN_LEAVE)
    return Mechanism(
        run.name, run.seed, label, run.held_out_accuracy, contribution, knock_out, circuit,
        tuple(_part(run.model, held_out, edge, others[0]) for edge in circuit.edges),
        _carrier(run.model, held_out, groups[0, "constants"], others[0]) if label == DENOMINATOR else None,
    )  # fmt: skip


def stable_label(contribution: dict[Key, float], knock_out: dict[Key, float]) -> str:
    """The label on which both kinds of cut and all thresholds agree, or "mixed"."""
    if all(_through_denominator(contribution, knock_out, threshold) for threshold in THRESHOLDS):
        return DENOMINATOR
    labels = {name_of(needed(kind, t)) for kind in (contribution, knock_out) for t in THRESHOLDS}
    return labels.pop() if len(labels) == 1 else MIXED


def needed(accuracies: dict[Key, float], threshold: float) -> set[Key]:
    return {key for key, accuracy in accuracies.items() if accuracy < threshold}


def name_of(needs: set[Key]) -> str:
    """The rule, for one kind of cut and one threshold: RULES in code."""
    first = {source for block, source in needs if block == 0}
    second = {source for block, source in needs if block == 1}
    if "adjective" in first and not first & {"x", "y"} and "nouns" in second:
        return ADJECTIVE_FIRST
    if "x" in first and "y" not in first and second & {"y", "adjective"}:
        return FIRST_NOUN
    if "y" in first and "x" not in first and second & {"x", "adjective"}:
        return SECOND_NOUN
    for here, there in ((first, second), (second, first)):
        if {"x", "y"} <= here and "nouns" not in there:
            return ONE_BLOCK
    return MIXED


def _through_denominator(contribution: dict[Key, float], knock_out: dict[Key, float], threshold: float) -> bool:
    moved, reached = needed(contribution, threshold), needed(knock_out, threshold)
    silent = EVERYWHERE not in moved and EVERYWHERE in reached
    return silent and (0, "constants") in moved and (1, "nouns") in moved & reached


def _groups(held_out: "Examples") -> dict[Key, tuple["Edge", ...]]:
    """What is cut together, by name."""
    from circuits.edges import Edge

    def edges(block: int, sources: Sequence[Any]) -> tuple[Edge, ...]:
        return tuple(Edge(block, None, "answer", source) for source in sources)

    groups: dict[Key, tuple[Edge, ...]] = {(block, role): edges(block, [role]) for block in (0, 1) for role in ROLES}
    groups |= {(block, "nouns"): edges(block, ["x", "y"]) for block in (0, 1)}
    groups[EVERYWHERE] = groups[0, "adjective"] + groups[1, "adjective"]
    constants = [
        place
        for place in held_out.places()
        if len(held_out.tokens[torch.arange(len(held_out)), held_out.at(place)].unique()) == 1
    ]
    groups[0, "constants"] = edges(0, constants)
    return groups


def _accuracy(model: Any, held_out: "Examples", gone: Sequence["Edge"], what: str, others: list["Reference"]) -> float:
    """With these edges cut: by another sentence's contribution, averaged over draws, or by knock-out."""
    from circuits.smallest import accuracy_without

    draws = others if what == "contribution" else others[:1]
    found = [accuracy_without(model, held_out, gone, what, "resample", draw) for draw in draws]
    return sum(found) / len(found)


def _part(model: Any, held_out: "Examples", edge: "Edge", other: "Reference") -> Part:
    """The head that matters most on this edge."""
    from circuits.edges import Edge
    from circuits.effects import edge_effects

    single = [Edge(edge.layer, head, edge.destination, edge.source) for head in range(model.cfg.n_heads)]
    effects = edge_effects(model, held_out, edges=single, replacement="resample", reference=other, pairs=0)
    costs = (-effects.difference_change).clamp(min=0)
    best = int(costs.argmax())
    return Part(repr(edge), f"{edge.layer}.{best}", float(costs[best] / costs.sum().clamp(min=1e-9)))


def _carrier(
    model: Any, held_out: "Examples", constants: Sequence["Edge"], other: "Reference"
) -> tuple[str, float, float]:
    """The word that never changes whose edge costs most, and how the attention to it differs."""
    from circuits.edges import Edge, reference
    from circuits.effects import edge_effects

    effects = edge_effects(model, held_out, edges=constants, replacement="resample", reference=other, pairs=0)
    edge = constants[int(effects.difference_change.argmin())]
    rows = torch.arange(len(held_out))
    pattern = reference(model, held_out).patterns[0][rows, :, held_out.at("answer"), held_out.at(edge.source)]
    is_x = held_out.answers == held_out.tokens[rows, held_out.at("x")]
    means = torch.stack([pattern[is_x].mean(0), pattern[~is_x].mean(0)])
    head = int((means[0] - means[1]).abs().argmax())
    return repr(Edge(0, head, edge.destination, edge.source)), float(means[0, head]), float(means[1, head])
