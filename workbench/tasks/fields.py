"""Reading a task's TOML key by key: each value checked, what was not read refused."""

import math
from typing import Any

from workbench.errors import BadRecipe, UnknownName
from workbench.untrusted import is_plain, short

MOST_NUMBERS = 2**24
"""That a task's sequences, or a table that they are drawn from, may hold: 128 MiB each."""
LONGEST_WORD = 100
"""Characters."""


class Fields:
    def __init__(self, raw: dict[str, Any], where: str):
        self.raw, self.where = raw, where
        self._read: set[str] = set()

    def _take(self, key: str, kind: type | tuple[type, ...], expected: str) -> Any:
        if key not in self.raw:
            raise BadRecipe(f"{self.where}: {key} is missing; expected {expected}")
        value = self.raw[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise BadRecipe(f"{self.where}: {key} must be {expected}")
        self._read.add(key)
        return value

    def text(self, key: str) -> str:
        return self._take(key, str, "a text")

    def table(self, key: str) -> "Fields":
        return Fields(self._take(key, dict, f"a section, [{key}]"), f"{self.where} [{key}]")

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        expected = f"one of {', '.join(choices)}"
        if (value := self._take(key, str, expected)) not in choices:
            raise BadRecipe(f"{self.where}: {key} = {short(value, 60)!r}; expected {expected}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        expected = f"a number from {low} to {high}"
        if not low <= (value := self._take(key, (int, float), expected)) <= high:
            raise BadRecipe(f"{self.where}: {key} = {short(str(value), 60)}; expected {expected}")
        return float(value)

    def whole(self, key: str, low: int, high: int = 100_000) -> int:
        expected = f"a whole number from {low} to {high}"
        if not low <= (value := self._take(key, int, expected)) <= high:
            raise BadRecipe(f"{self.where}: {key} = {short(str(value), 60)}; expected {expected}")
        return value

    def words(self, key: str) -> list[str]:
        """At least one word, none twice, none with a space or what cannot be seen in it."""
        expected = "a list of different words"
        values = self._take(key, list, expected)
        if not values or not all(isinstance(value, str) and is_word(value) for value in values):
            raise BadRecipe(f"{self.where}: {key} must be {expected}")
        if len(set(values)) < len(values):
            seen: set[str] = set()
            twice = next(value for value in values if value in seen or seen.add(value))
            raise BadRecipe(f"{self.where}: {key} has {twice!r} twice; expected {expected}")
        return values

    def check_size(self, most: int = MOST_NUMBERS, **sizes: int) -> None:
        """Before anything of that size is made. Raises: BadRecipe where their product is over `most`."""
        if math.prod(sizes.values()) > most:
            said = " × ".join(f"{size:,} {name}" for name, size in sizes.items())
            raise BadRecipe(f"{self.where}: {said} are over {most:,}; choose fewer or shorter ones")

    def done(self) -> None:
        """Refuse keys that nothing asked for."""
        for key in self.raw:
            if key not in self._read:
                raise BadRecipe(f"{self.where}: {UnknownName('field', short(key, 60), self._read)}")


def is_word(text: str) -> bool:
    """One word of a vocabulary: without blanks, seen as it is."""
    return text.split() == [text] and len(text) <= LONGEST_WORD and is_plain(text)
