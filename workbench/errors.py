"""Every error that a user can cause, in one tree. The message is one line: what, what was expected, what to do.

WorkbenchError
├── UnknownName        a model, task, table, word or role that does not exist; lists the nearest ones
├── BadRecipe          a recipe or task file with an unknown, missing or contradictory field
├── BadPrompt          a prompt that is empty or longer than the context
├── BadRun             a run that is missing, unfinished, damaged, or made from another recipe
├── NoCorpus           a text that is not here, cannot be fetched, or is another one
├── BadWeights         weights that do not fit the model they are loaded into
└── Undefined          a decomposition asked of a model for which it does not hold
"""

from collections.abc import Iterable
from difflib import get_close_matches


class WorkbenchError(Exception):
    """Something a user can put right. The command line prints it as one line and exits with code 2."""


class UnknownName(WorkbenchError):
    """`kind` says what was looked for, `known` what there is, `where` (optional) in what."""

    def __init__(self, kind: str, name: str, known: Iterable[str], where: str = ""):
        super().__init__(kind, name, tuple(known), where)  # the arguments, so that it crosses process boundaries

    def __str__(self) -> str:
        kind, name, known, where = self.args
        nearest = get_close_matches(name, known, n=3, cutoff=0.5) or sorted(known)[:8]
        plain = all(any(map(str.isalnum, other)) for other in nearest)  # a comma among commas needs its quotes
        listed = ", ".join(nearest if plain else map(repr, nearest))
        return f"unknown {kind} {name!r}{where}" + (f"; nearest: {listed}" if nearest else "")


class BadRecipe(WorkbenchError):
    pass


class BadPrompt(WorkbenchError):
    pass


class BadRun(WorkbenchError):
    pass


class NoCorpus(WorkbenchError):
    pass


class BadWeights(WorkbenchError):
    pass


class Undefined(WorkbenchError):
    pass
