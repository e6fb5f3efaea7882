"""Edges cut, or attention forced elsewhere: what a model says before and after, on a prompt and on held-out sequences.

A session is a thread, and a model is shared: every pass through it here is made inside `circuits.exclusive`, so that
no other session's pass runs through these cuts, nor these through another's.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.errors import NoCorpus, Undefined
from workbench.pages.cache import MOST, Target
from workbench.runs import Run

if TYPE_CHECKING:
    from circuits.edges import Reference
    from circuits.examples import Examples

FORCE = "force elsewhere"
KINDS = ("contribution", "value", "pattern", "knock-out", FORCE)
MEAN, ZERO, OTHER = "held-out mean", "nothing", "B's"
"""What is put in the place of what is cut."""
NUMBERS = 2**26  # in the patterns of all held-out sequences together: a quarter of a gigabyte


class Cut(NamedTuple):
    """What is done to the model, in plain values."""

    edges: tuple[tuple[int, int | None, int, int], ...]
    """(layer, head or None for all, destination, source)."""
    kind: str
    """One of KINDS."""
    put: str = MEAN
    forced: int | None = None
    """The source that destinations then look at."""


@dataclass(frozen=True)
class Said:
    """What the model says at the position."""

    word: int
    """The likeliest token."""
    probability: float
    answer: float
    """Probability of the answer."""
    difference: float
    """answer − foil, in logits."""


@dataclass(frozen=True)
class Outcome:
    before: Said
    after: Said
    accuracy: tuple[float, float] | None
    """Share of held-out sequences whose next token at the position is right, before and after."""
    n: int
    """How many sequences, in so many clusters."""
    clusters: int
    why: str
    """Why there is no accuracy, or empty."""


def held_out(run: Run, position: int) -> "Examples":
    """Held-out sequences up to the position, with what comes next: where the task asks for an answer its own examples.

    Raises: NoCorpus; Undefined where they are not that long.
    """
    from circuits.examples import ANSWER, Examples

    task, size = run.task, run.recipe.model
    most = min(MOST, max(2, NUMBERS // max(1, size.n_layers * size.n_heads * (position + 1) ** 2)))
    if position == task.answer_position and hasattr(task, "foils"):
        return run.examples(n=most)
    tokens = task.held_out[:most]
    if tokens.shape[1] < position + 2:
        raise Undefined(f"held-out sequences have {tokens.shape[1]} tokens, none with a next one at {position}")
    answers = tokens[:, position + 1]
    roles = {ANSWER: position}
    return Examples(tokens[:, : position + 1], answers, answers, roles, tuple(task.clusters(tokens)))


def intervene(run: Run, prompt: str, position: int, target: Target, cut: Cut, other: str | None = None) -> Outcome:
    """The model before and after a cut. `other`: the prompt whose activations stand in for OTHER.

    Raises: WorkbenchError, CircuitError.
    """
    import torch

    from circuits.attention import exclusive
    from circuits.edges import reference

    model, tokens = run.model, run.encode(prompt)[:, : position + 1]
    examples, why = None, ""
    try:
        examples = held_out(run, position)
    except (NoCorpus, Undefined) as error:
        why = str(error)
    with exclusive(model), torch.no_grad():
        here, there = None, None
        if cut.kind not in (FORCE, "knock-out") and cut.put == MEAN:
            if examples is None:
                raise Undefined(f"no mean to put in: {why}")
            here = there = reference(model, examples.tokens)
        elif cut.kind not in (FORCE, "knock-out") and cut.put == OTHER:
            if other is None:
                raise Undefined("no second prompt of the same length to take from; choose another replacement")
            here = reference(model, run.encode(other)[:, : position + 1])
            there = None if examples is None else reference(model, examples.shuffled().tokens)
        before = _said(model(tokens)[0, position], target)
        with changed(model, cut, here):
            after = _said(model(tokens)[0, position], target)
        if examples is None:
            return Outcome(before, after, None, 0, 0, why)
        right = examples.judge(model(examples.tokens))[0]
        with changed(model, cut, there):
            still = examples.judge(model(examples.tokens))[0]
    accuracy = float(right.double().mean()), float(still.double().mean())
    return Outcome(before, after, accuracy, len(examples), len(set(examples.clusters)), "")


@contextmanager
def changed(model: Any, cut: Cut, taken_from: "Reference | None") -> Iterator[None]:
    """Inside, the model is that with the cut. Raises: CircuitError."""
    from circuits import cuts

    with ExitStack() as stack:
        if cut.kind == FORCE:
            for layer, head, destination, source in cut.edges:
                to = source if cut.forced is None else cut.forced
                stack.enter_context(cuts.force(model, layer, head, destination, to))
        else:
            edges = [cuts.Edge(*edge) for edge in cut.edges]
            how = {MEAN: "mean", OTHER: "resample"}[cut.put] if taken_from is not None else "zero"
            stack.enter_context(cuts.cut(model, edges, how, what=cut.kind, reference=taken_from, roles={}))
        yield


def _said(logits: Any, target: Target) -> Said:
    probabilities = logits.float().softmax(-1)
    word, foil = int(probabilities.argmax()), target.answer if target.foil is None else target.foil
    difference = float(logits[target.answer] - logits[foil])
    return Said(word, float(probabilities[word]), float(probabilities[target.answer]), difference)
