"""Words and their numbers. A prompt is words separated by spaces; every word is one token."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from workbench.errors import BadPrompt, UnknownName
from workbench.untrusted import short

LONGEST = 200
"""Characters of an unknown word that are quoted: of a longer one both ends."""


@dataclass(frozen=True)
class Vocabulary:
    words: tuple[str, ...]

    @cached_property
    def _tokens(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def token(self, word: str) -> int:
        """Raises UnknownName with the nearest words."""
        word = word.strip()
        if word not in self._tokens:
            raise UnknownName("word", short(word, LONGEST), self.words)
        return self._tokens[word]

    def encode(self, text: str) -> list[int]:
        """Raises BadPrompt for an empty text, UnknownName for a word that is not in the vocabulary."""
        words = text.split()
        if not words:
            raise BadPrompt(f"the prompt is empty; write words such as: {' '.join(self.words[:6])}")
        unknown = set(words) - self._tokens.keys()
        if unknown:
            self.token(next(word for word in words if word in unknown))
        return [self._tokens[word] for word in words]

    def str_tokens(self, tokens: Sequence[int]) -> list[str]:
        return [self.words[token] for token in tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.str_tokens(tokens))
