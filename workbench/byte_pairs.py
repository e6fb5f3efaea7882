"""A vocabulary of byte pairs (Sennrich et al. 2016; on bytes as in GPT-2), with the library `tokenizers`.

Any text can be written in it, and decoding gives back the very same text. Tokens are shown as the text they stand for:
" the" has its space; a byte that is no character by itself is shown as <0xE2>.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import BadPrompt, BadRecipe
from workbench.untrusted import plain, short
from workbench.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class BytePairs(Vocabulary):
    tokenizer: "Tokenizer"

    @classmethod
    def of(cls, tokenizer: "Tokenizer") -> "BytePairs":
        from tokenizers.pre_tokenizers import ByteLevel

        byte_of = dict(zip(_gpt2_letters(), range(256), strict=True))
        assert set(byte_of) == set(ByteLevel.alphabet())
        names = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        return cls(tuple(_shown(bytes(byte_of[letter] for letter in name)) for name, _ in names), tokenizer)

    @classmethod
    def read(cls, path: Path) -> "BytePairs":
        """From a file of `tokenizers`. Raises: BadRecipe if it is none."""
        from tokenizers import Tokenizer

        try:
            return cls.of(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare exceptions
            raise BadRecipe(f"{path}: not a readable tokenizer ({error})") from None

    def token(self, word: str) -> int:
        """Raises BadPrompt where the text is not a single token."""
        if len(word) > max(map(len, self.words)):
            raise BadPrompt(f"{short(word, 80)!r} is longer than every token; expected the text of one")
        tokens = self.encode(word)
        if len(tokens) != 1:
            pieces = plain(" | ".join(self.str_tokens(tokens)), 80)
            raise BadPrompt(
                f"{short(word, 80)!r} is {len(tokens)} tokens ({pieces}); expected the text of one, spaces included"
            )
        return tokens[0]

    def encode(self, text: str) -> list[int]:
        """Raises BadPrompt for an empty text, and for one that holds bytes which are no text."""
        if not text:
            raise BadPrompt("the prompt is empty; write some text")
        try:
            return self.tokenizer.encode(text).ids
        except TypeError:  # half of a surrogate pair: what Python makes of a byte that is no UTF-8
            raise BadPrompt(f"the prompt {short(text, 80)!r} is not all text; leave out what is no UTF-8") from None

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens))


def train_tokenizer(texts: Iterable[str], size: int) -> "Tokenizer":
    """Byte-level byte pairs, merged within words as GPT-2 splits them. The same texts give the same merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)  # pyright: ignore
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _shown(token: bytes) -> str:
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in token)


def _gpt2_letters() -> list[str]:
    """The letter that stands for each byte: itself where it can be printed, else the next free one from 256 on."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]
