"""The other prompt of a minimal pair: the same sentence with one thing changed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.tasks import Task
    from workbench.tasks.winograd import Winograd

ADJECTIVE, NOUNS, NEXT, TEXT, NONE = "swap adjective", "swap nouns", "next example", "free text", "none"


def examples(task: "Task") -> list[str]:
    """The held-out sequences up to the position from which the last answer is predicted."""
    return [task.decode(row[: task.answer_position + 1]) for row in task.held_out]


def first_prompt(task: "Task") -> str:
    """What a page opens on: the animal and the street where the task has them, else the first held-out example."""
    sentence = "the animal did not cross the street because it was too tired , so the"
    known = set(task.vocabulary.words)
    return sentence if _winograd(task) and known.issuperset(sentence.split()) else examples(task)[0]


def ways(task: "Task") -> list[str]:
    """The ways to make a pair in this task; the first is the one a page opens with."""
    return [ADJECTIVE, NOUNS, TEXT, NONE] if _winograd(task) else [NONE, NEXT, TEXT]


def counterpart(task: "Task", prompt: str, way: str) -> str | None:
    """The prompt's pair, made in one of `ways`; None where this prompt has nothing to swap, or way is none or text.

    An adjective is exchanged for the one of the other role in the same place of the list, so twice is back again.
    """
    words = prompt.split()
    if way == NEXT:
        prompts = examples(task)
        here = prompts.index(" ".join(words)) if " ".join(words) in prompts else -1
        return prompts[(here + 1) % len(prompts)]
    winograd = _winograd(task)
    if winograd is None:
        return None
    if way == ADJECTIVE:
        of_x, of_y = ([a for a, role in winograd.answer_of.items() if role == r] for r in ("x", "y"))
        other = dict(zip([*of_x, *of_y], [*of_y, *of_x], strict=False))
        return " ".join(other.get(word, word) for word in words) if any(word in other for word in words) else None
    x, y = task.roles["x"], task.roles["y"]
    if way == NOUNS and len(words) > max(x, y) and words[x] != words[y]:
        other = {words[x]: words[y], words[y]: words[x]}
        return " ".join(other.get(word, word) for word in words)
    return None


def _winograd(task: "Task") -> "Winograd | None":
    from workbench.tasks.winograd import Winograd  # imports torch: not before the page has painted

    return task if isinstance(task, Winograd) else None
