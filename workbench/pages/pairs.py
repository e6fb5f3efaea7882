"""The other side of a comparison: the same sentence with one thing changed, or the same one read by another model."""

from typing import TYPE_CHECKING

from workbench.byte_pairs import BytePairs

if TYPE_CHECKING:
    from workbench.tasks import Task
    from workbench.tasks.winograd import Winograd

ADJECTIVE, NOUNS, NEXT, TEXT, NONE = "swap adjective", "swap nouns", "next example", "free text", "none"
SEED, CHECKPOINT = "another seed", "a checkpoint"
OTHER_MODEL = (SEED, CHECKPOINT)
LONGEST = 32
"""Tokens of an example of a task that has no last answer: a text."""


def normal(task: "Task", prompt: str) -> str:
    """The prompt with what makes no difference to its tokens left out: in a text blanks count, between words not."""
    return prompt if isinstance(task.vocabulary, BytePairs) else " ".join(prompt.split())


def examples(task: "Task") -> list[str]:
    """The held-out sequences up to the position from which the last answer is predicted; of a text the first words.

    Raises: NoCorpus.
    """
    end = min(task.answer_position + 1, LONGEST) if isinstance(task.vocabulary, BytePairs) else task.answer_position + 1
    return [task.decode(row[:end]) for row in task.held_out]


def first_prompt(task: "Task") -> str:
    """What a page opens on: the animal and the street where the task has them, else the first held-out example.

    For a text a sentence that is not in it, since the text itself may not be here.
    """
    if isinstance(task.vocabulary, BytePairs):
        return "The king is asleep.\nWho is it that wakes the king?"
    sentence = "the animal did not cross the street because it was too tired , so the"
    known = set(task.vocabulary.words)
    return sentence if _winograd(task) and known.issuperset(sentence.split()) else examples(task)[0]


def roles(task: "Task", prompt: str) -> dict[str, int]:
    """The task's named places, if each word of the prompt stands where some sequence of the task has it; else none."""
    if not task.roles:
        return {}
    tokens = task.encode(prompt)
    seen = [(rows[:, : tokens.shape[1]] == tokens).any(0) for rows in (task.train, task.held_out)]
    return task.roles if bool((seen[0] | seen[1]).all()) else {}


def ways(task: "Task", seeds: int = 1, checkpoints: int = 0) -> list[str]:
    """The ways to compare in this task; the first is the one a page opens with.

    Another seed where there are several, a checkpoint where some were kept.
    """
    models = [SEED] * (seeds > 1) + [CHECKPOINT] * (checkpoints > 0)
    return [ADJECTIVE, NOUNS, TEXT, *models, NONE] if _winograd(task) else [NONE, NEXT, TEXT, *models]


def counterpart(task: "Task", prompt: str, way: str) -> str | None:
    """The prompt's pair, made in one of `ways`; None where this prompt has nothing to swap, or way is none or text.

    An adjective is exchanged for the one of the other role in the same place of the list, so twice is back again.
    Raises: NoCorpus for the next example of a text that is not here.
    """
    if way == NEXT:
        prompts, prompt = examples(task), normal(task, prompt)
        here = prompts.index(prompt) if prompt in prompts else -1
        return prompts[(here + 1) % len(prompts)]
    winograd, words = _winograd(task), prompt.split()
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
