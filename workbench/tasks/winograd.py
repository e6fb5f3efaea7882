"""A Winograd-style sentence: who waited depends on the adjective, and on nothing else.

    the animal did not cross the street because it was too tired , so the  → animal
    the animal did not cross the street because it was too wet   , so the  → street

The adjectives go by role: some say something of x, who crosses, others of y, what is crossed. In the closed version
x and y come from one pool and every noun stands in either slot, so no word betrays the answer. Held out are ordered
pairs whose reversed order is in training: both nouns were seen in both slots, this pair never in this order.
"""

import hashlib
import itertools
import re
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from workbench.errors import BadRecipe
from workbench.tasks.fields import Fields, is_word
from workbench.tasks.task import Task
from workbench.vocabulary import Vocabulary

MOST_WORDS = 2**21
"""Of all sentences together."""
SLOTS = ("x", "y", "adjective", "answer")


@dataclass(frozen=True)
class Winograd(Task):
    answer_of: dict[str, str]
    """Adjective → the role it speaks of, x or y."""

    def clusters(self, tokens: Int[Tensor, "example position"]) -> list[str]:
        x, y = self.roles["x"], self.roles["y"]
        return [self.decode(row[[x, y]]) for row in tokens]

    def foils(self, tokens: Int[Tensor, "example position"]) -> Int[Tensor, "example"]:
        """The other noun of each sentence: what a reader would say who mistook the adjective."""
        x, y, answer = tokens[:, self.roles["x"]], tokens[:, self.roles["y"]], tokens[:, self.answer_position + 1]
        return torch.where(answer == x, y, x)

    def details(self, tokens, guesses, log_probs):
        answers, guesses = tokens[:, self.answer_position + 1], guesses[:, 0]
        wrong_noun = guesses == self.foils(tokens)
        other_word = ~(wrong_noun | (guesses == answers))
        return {"wrong_noun": wrong_noun.double().numpy(), "other_word": other_word.double().numpy()}, {}

    def truth(self) -> str:
        of = {role: [a for a, r in self.answer_of.items() if r == role] for role in ("x", "y")}
        return f"{', '.join(of['x'])} → x, the crosser; {', '.join(of['y'])} → y, the crossed"


def read_winograd(name: str, about: str, raw: Fields, seed: int) -> Winograd:
    template = raw.text("template")
    if not all(map(is_word, template.split())):
        raise BadRecipe(f"{raw.where}: template must be words that can be seen, none of them endless")
    pieces = re.split(r"\{(\w+)\}", template)
    slots = pieces[1::2]
    for slot in SLOTS:
        if slots.count(slot) != 1:
            raise BadRecipe(
                f"{raw.where}: the template needs the slot {{{slot}}} once, it has it {slots.count(slot)} ×"
            )
    for slot in slots:
        if slot not in SLOTS:
            raise BadRecipe(f"{raw.where}: unknown slot {{{slot}}} in the template; slots are {', '.join(SLOTS)}")
    nouns, adjectives, split = raw.table("nouns"), raw.table("adjectives"), raw.table("split")
    xs, ys = nouns.words("x"), nouns.words("y")
    both = set(adjectives.words("x")) & set(adjectives.words("y"))
    if both:
        raise BadRecipe(f"{adjectives.where}: {min(both)!r} speaks of both x and y; the answer would not be decided")
    answer_of = {a: role for role in ("x", "y") for a in adjectives.words(role)}
    rule = split.choice("rule", ("reversed", "pairs"))
    share = split.number("held_out", 0, 1)
    for part in (nouns, adjectives, split, raw):
        part.done()

    raw.check_size(MOST_WORDS, x=len(xs), y=len(ys), adjectives=len(answer_of), words=len(template.split()))
    pairs = [(x, y) for x, y in itertools.product(xs, ys) if x != y]
    held = held_out_pairs(pairs, share, rule, seed)
    if not held or len(held) == len(pairs):
        raise BadRecipe(f"{raw.where}: held_out = {share} leaves {len(held)} of {len(pairs)} pairs held out")

    def sentence(x: str, y: str, adjective: str) -> list[str]:
        fill = {"x": x, "y": y, "adjective": adjective, "answer": {"x": x, "y": y}[answer_of[adjective]]}
        return "".join(fill[p] if i % 2 else p for i, p in enumerate(pieces)).split()

    sentences = {pair: [sentence(*pair, adjective) for adjective in answer_of] for pair in pairs}
    words = tuple(dict.fromkeys(word for rows in sentences.values() for row in rows for word in row))
    vocabulary = Vocabulary(words)
    rows = {pair: [vocabulary.encode(" ".join(row)) for row in rows] for pair, rows in sentences.items()}
    slot_at = {slot: template.split().index(f"{{{slot}}}") for slot in SLOTS if f"{{{slot}}}" in template.split()}
    if len(slot_at) < len(SLOTS) or slot_at["answer"] == 0:
        raise BadRecipe(f"{raw.where}: every slot must be a word of its own, and {{answer}} not the first")
    answer_at = slot_at["answer"] - 1
    return Winograd(
        name=name,
        about=about,
        vocabulary=vocabulary,
        train=torch.tensor([row for pair in pairs if pair not in held for row in rows[pair]]),
        held_out=torch.tensor([row for pair in pairs if pair in held for row in rows[pair]]),
        scored=(answer_at,),
        roles={slot: slot_at[slot] for slot in ("x", "y", "adjective")} | {"answer": answer_at},
        chance=0.5,
        answer_of=answer_of,
    )


def held_out_pairs(pairs: list[tuple[str, str]], share: float, rule: str, seed: int) -> set[tuple[str, str]]:
    """The pairs to hold out, ranked by a hash, so that a seed gives one split on every machine and for every version.

    "pairs": `share` of the pairs. "reversed": `share` of the unordered pairs, each in one of its orders, the other
    order staying in training.
    """

    def rank(*words: str) -> str:
        return hashlib.sha256("|".join([str(seed), *words]).encode()).hexdigest()

    if rule == "pairs":
        return set(sorted(pairs, key=lambda pair: rank(*pair))[: round(share * len(pairs))])
    both = sorted({tuple(sorted(pair)) for pair in pairs if pair[::-1] in pairs}, key=lambda pair: rank(*pair))
    chosen = both[: round(share * len(both))]
    return {min((a, b), (b, a), key=lambda pair: rank("order", *pair)) for a, b in chosen}
