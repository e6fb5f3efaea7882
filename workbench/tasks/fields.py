"""Reading a task's TOML key by key: each value checked, what was not read refused."""

from typing import Any

from workbench.errors import BadRecipe, UnknownName


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
            raise BadRecipe(f"{self.where}: {key} = {value!r}; expected {expected}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        expected = f"a number from {low} to {high}"
        if not low <= (value := self._take(key, (int, float), expected)) <= high:
            raise BadRecipe(f"{self.where}: {key} = {value}; expected {expected}")
        return float(value)

    def whole(self, key: str, low: int, high: int = 100_000) -> int:
        expected = f"a whole number from {low} to {high}"
        if not low <= (value := self._take(key, int, expected)) <= high:
            raise BadRecipe(f"{self.where}: {key} = {value}; expected {expected}")
        return value

    def words(self, key: str) -> list[str]:
        """At least one word, none twice, none with a space in it."""
        expected = "a list of different words"
        values = self._take(key, list, expected)
        if not values or any(not isinstance(v, str) or len(v.split()) != 1 or v != v.strip() for v in values):
            raise BadRecipe(f"{self.where}: {key} must be {expected}")
        if len(set(values)) < len(values):
            twice = next(v for v in values if values.count(v) > 1)
            raise BadRecipe(f"{self.where}: {key} has {twice!r} twice; expected {expected}")
        return values

    def done(self) -> None:
        """Refuse keys that nothing asked for."""
        for key in self.raw:
            if key not in self._read:
                raise BadRecipe(f"{self.where}: {UnknownName('field', key, self._read)}")
