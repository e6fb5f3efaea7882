"""What a run gets wrong: the held-out sequences whose answer it does not say."""

from dataclasses import dataclass

import torch

from circuits.attention import exclusive
from workbench.figures.style import visible
from workbench.runs import Run

BATCH = 2**16  # tokens in one forward pass
MOST_LISTED = 200


@dataclass(frozen=True)
class Mistake:
    """One sequence, up to where its last answer is to be said."""

    prompt: str
    short: str
    """The words that set it apart from others: those at the task's roles, or its last ones."""
    said: str
    said_probability: float
    answer: str
    answer_probability: float


@dataclass(frozen=True)
class Mistakes:
    """The surest mistakes first."""

    n: int
    """Sequences that were asked."""
    wrong: int
    listed: list[Mistake]


def mistakes(run: Run, most: int) -> Mistakes:
    """The held-out sequences (the first `most`) whose last answer is not the model's likeliest next token.

    Raises: NoCorpus where the task's text is not here.
    """
    task, at = run.task, run.task.answer_position
    tokens = task.held_out[:most]
    said, answered = [], []
    for rows in tokens.split(max(1, BATCH // (at + 1))):
        with exclusive(run.model), torch.no_grad():
            probabilities = run.model(rows[:, : at + 1])[:, at].float().softmax(-1)
        said.append(torch.stack(probabilities.max(-1)))
        answered.append(probabilities.gather(1, rows[:, at + 1, None])[:, 0])
    (sure, guess), answer = torch.cat(said, dim=1), torch.cat(answered)
    wrong = (guess.long() != tokens[:, at + 1]).nonzero()[:, 0]
    order = wrong[sure[wrong].argsort(descending=True, stable=True)].tolist()
    named = sorted({position for role, position in task.roles.items() if role != "answer" and position < at})
    words = task.vocabulary.words
    listed = []
    for i in order[:MOST_LISTED]:
        row = tokens[i]
        parts = [words[t] for t in row[named].tolist()] if named else [words[t] for t in row[max(0, at - 5) : at + 1]]
        listed.append(
            Mistake(
                prompt=task.decode(row[: at + 1]),
                short=(" · " if named else " ").join(visible(part) for part in parts),
                said=words[int(guess[i])],
                said_probability=float(sure[i]),
                answer=words[int(row[at + 1])],
                answer_probability=float(answer[i]),
            )
        )
    return Mistakes(len(tokens), len(wrong), listed)
