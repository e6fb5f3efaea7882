"""From a run to what the circuits library asks of a task: prompts, answers, foils, roles, clusters."""

from typing import TYPE_CHECKING, Any, Literal

import torch

from workbench.errors import Undefined

if TYPE_CHECKING:
    from circuits.examples import Examples

Part = Literal["train", "held_out"]


def examples(run: Any, part: Part = "held_out", n: int | None = None, seed: int = 0) -> "Examples":
    """The examples of a run's task: the right noun against the other one of the pair, roles by the task's names.

    `n` draws that many of them (a pure function of `seed`); None takes all. Raises: Undefined for a task without foils,
    that is, without one wrong answer that matters.
    """
    from circuits.examples import Examples

    task = run.task
    if not hasattr(task, "foils"):
        raise Undefined(f"task {task.name} names no foil, the wrong answer to compare with; winograd tasks do")
    tokens = getattr(task, part)
    if n is not None and n < len(tokens):
        tokens = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))[:n]]
    at = task.answer_position
    return Examples(
        tokens=tokens[:, : at + 1],
        answers=tokens[:, at + 1],
        foils=task.foils(tokens),
        roles={**task.roles, "answer": at},
        clusters=tuple(task.clusters(tokens)),
    )
