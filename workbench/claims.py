"""What can be said of a run, each sentence with the cut that could refute it."""

from collections.abc import Callable
from typing import TypeVar

from circuits.claims import Claim, Verdict, composition_claims, looking_claims
from circuits.composition import CompositionScores, Kind
from circuits.errors import CircuitError
from circuits.heads import HeadScores
from circuits.smallest import smallest_circuit
from workbench.errors import WorkbenchError
from workbench.evidence import examples
from workbench.runs import Run
from workbench.wording import percent

PAIRS = 4  # of each kind of composition that are spoken of
EXAMPLES = 256  # held-out sequences to cut on
T = TypeVar("T")


def defined(make: Callable[[], T]) -> T | str:
    """A part, or why it is undefined for this model."""
    try:
        return make()
    except (CircuitError, WorkbenchError) as error:
        return str(error)


def scored_claims(run: Run, heads: HeadScores | None, composition: dict[Kind, CompositionScores] | None) -> list[Claim]:
    """Where heads look and whom they read: suggested by their scores, at once; what decides is `Claim.check`.

    Raises: NoCorpus where the task's text is not here.
    """
    found = [] if heads is None else looking_claims(run.model, heads)
    if composition is not None:
        tokens = run.task.held_out[:EXAMPLES]
        found += composition_claims(
            run.model, tokens, composition, positions=list(run.task.scored), clusters=run.task.clusters(tokens),
            pairs=PAIRS,
        )  # fmt: skip
    return found


def deciding_claim(run: Run) -> Claim:
    """The smallest set of edges into the answer's position that does the task; the search takes seconds.

    Raises: Undefined without foils; what `circuits.smallest_circuit` raises.
    """
    circuit = smallest_circuit(run.model, examples(run, "train"), examples(run))
    names = ", ".join(map(repr, circuit.edges))

    def check() -> Verdict:
        if not circuit.kept:
            return Verdict(False, circuit.failed)
        found = (
            f"alone {percent(circuit.kept['contribution'])} right, without them {percent(circuit.cut['contribution'])}"
        )
        return Verdict(not circuit.failed and circuit.cut["contribution"] <= 0.6, found)

    text = f"{names or 'no set of edges'} decide{'s' * (len(circuit.edges) < 2)} the answer"
    return Claim(text, circuit.edges, "all other edges into it replaced by their mean", check)
