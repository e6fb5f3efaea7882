"""Two hops: source → (earlier head) → middle → (later head) → answer, ranked by what they do to answer − foil.

A later head can use what an earlier one moved in three ways, and they are measured in two:

- **V-chains**: the later head moves on what the earlier one moved. With patterns and LayerNorm scales frozen that is
  linear, A²[t,m] A¹[m,s] x_s W_OV¹ W_OV², and its effect on the logits exact; V-chains add up.
- **K- and Q-chains**: the later head attends where it does because of what the earlier one moved, into the key at the
  middle position or into the query at the answer. That lives in the softmax and has no exact share. So just this term,
  A¹[m,s] v_s W_O¹, is taken out of what the one key (or query) reads, the pattern is computed anew, and the loss of
  answer − foil is what the chain is worth. These values are **never summed**: two keys that stand in for each other are
  worth nothing each. What all of them are worth together beyond their sum is `interaction`.

Everything is in logits, and positive where the chain speaks for the answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.attention import exclusive
from circuits.decompose import chain_contributions
from circuits.edges import reference
from circuits.errors import NoSuchPart
from circuits.examples import ANSWER, Examples, Place, judged
from circuits.hooks import Hook, on
from circuits.paths import check_paths, what_is_read
from circuits.surface import Head, head_name

if TYPE_CHECKING:
    from pandas import DataFrame

TOKENS = 2**15  # in one forward pass


class Chain(NamedTuple):
    """Printed as earlier→0.0→middle→K→1.0→answer. For a Q-chain the middle is the answer's own position."""

    kind: str
    source: Place
    writer: Head
    middle: Place
    reader: Head

    def __str__(self) -> str:
        writer, reader = head_name(*self.writer), head_name(*self.reader)
        return f"{self.source}→{writer}→{self.middle}→{self.kind}→{reader}→{ANSWER}"


@dataclass(frozen=True, repr=False)
class TwoHops:
    """Every chain's worth, example by example."""

    chains: tuple[Chain, ...]
    values: Float[Tensor, "chain example"]
    """V: exact contribution to answer − foil. Q and K: how much of answer − foil goes when the chain is cut."""
    clean: Float[Tensor, "example"]
    """answer − foil of the run itself."""
    together: Float[Tensor, "example"]
    """How much of answer − foil goes when all Q- and K-chains are cut at once."""

    @property
    def mean(self) -> Float[Tensor, "chain"]:
        return self.values.mean(1)

    @property
    def interaction(self) -> float:
        """What all Q- and K-chains are worth together, minus the sum of what each is worth: no chain's own."""
        composed = [chain.kind != "V" for chain in self.chains]
        return (self.together.mean() - self.mean[torch.tensor(composed, dtype=torch.bool)].sum()).item()

    def ranked(self, kind: str | None = None) -> list[tuple[Chain, float]]:
        """Chains (of one kind) and their mean values, the largest in size first. Raises: NoSuchPart."""
        if kind not in (None, "Q", "K", "V"):
            raise NoSuchPart(f"{kind!r} is no kind of chain; expected one of Q, K, V")
        values = self.mean.tolist()
        order = sorted(range(len(values)), key=lambda i: -abs(values[i]))
        return [(self.chains[i], values[i]) for i in order if kind in (None, self.chains[i].kind)]

    def to_frame(self) -> "DataFrame":
        """One row for each chain, the largest first: chain, kind, source, writer, middle, reader, value."""
        from pandas import DataFrame

        return DataFrame([
            {
                "chain": str(chain), "kind": chain.kind, "source": chain.source, "writer": head_name(*chain.writer),
                "middle": chain.middle, "reader": head_name(*chain.reader), "value": value,
            }
            for chain, value in self.ranked()
        ])  # fmt: skip

    def __repr__(self) -> str:
        return f"{self._heading}\n{self.to_frame()[['chain', 'value']].head(10).to_string(index=False)}"

    def _repr_html_(self) -> str:
        return f"<p>{self._heading}</p>{self.to_frame()[['chain', 'value']].head(10).to_html(index=False)}"

    @property
    def _heading(self) -> str:
        return (
            f"{len(self.chains)} two-hop chains on {len(self.clean)} examples, answer − foil {self.clean.mean():.2f}. "
            f"V add up; Q and K do not: together {self.together.mean():.2f}, of that interaction {self.interaction:.2f}"
        )


def two_hops(
    model: Any,
    prompts: Examples | Int[Tensor, "1 position"],
    position: int | None = None,
    answer: int | None = None,
    foil: int | None = None,
) -> TwoHops:
    """All chains through two heads to the answer.

    `prompts`: Examples, or tokens [1, position] with the position the answer is said at and the token ids of answer and
    foil. Sources and middles are all positions up to the answer, or the roles alone where these differ by example. Cut
    terms are taken away, nothing is put in their place. It takes (heads of a layer × positions)² / 2 forward passes an
    example: for small models.

    Raises: ValueError for tokens without position, answer and foil; Undefined where path cuts or frozen-pattern
    decompositions are; NoSuchPart.
    """
    if not isinstance(prompts, Examples):
        if position is None or answer is None or foil is None:
            raise ValueError("tokens alone ask nothing; give position, answer and foil, or Examples")
        prompts = Examples(prompts, torch.tensor([answer]), torch.tensor([foil]), {ANSWER: position})
    check_paths(model, ())
    layers = [(a, b) for b in range(model.cfg.n_layers) for a in range(b)]
    with exclusive(model), torch.no_grad():
        clean = prompts.judge(model(prompts.tokens))[1]
        terms = _Terms(model, prompts)
        chains: list[Chain] = []
        values: list[Tensor] = [clean.new_zeros(0, len(prompts))]
        for first, second in layers:
            found = _v_chains(model, prompts, first, second)
            chains += [chain for chain, _ in found]
            values += [value[None] for _, value in found]
            edits = list(terms.edits(first, second))
            chains += [edit.chain for edit in edits]
            values.append(clean - _differences(model, prompts, edits))
        together = clean - terms.all_cut(clean)
    return TwoHops(tuple(chains), torch.cat(values).float(), clean.float(), together.float())


def _pairs(examples: Examples) -> list[tuple[Place, Place]]:
    """(source, middle): the middle is nowhere before the source, and nowhere behind the answer."""
    places = [p for p in examples.places() if bool((examples.at(p) <= examples.at(ANSWER)).all())]
    return [(s, m) for m in places for s in places if bool((examples.at(s) <= examples.at(m)).all())]


def _v_chains(model: Any, examples: Examples, first: int, second: int) -> list[tuple[Chain, Float[Tensor, "example"]]]:
    by_example = []
    for i in range(len(examples)):
        direction = torch.zeros(model.cfg.d_vocab)
        direction[examples.answers[i]] += 1
        direction[examples.foils[i]] -= 1
        at = int(examples.at(ANSWER)[i])
        by_example.append(chain_contributions(model, examples.tokens[i : i + 1], at, direction, (first, second)))
    contributions = torch.stack(by_example, -1)  # [first head, second head, source, middle, example]
    rows, found = torch.arange(len(examples)), []
    for source, middle in _pairs(examples):
        here = contributions[:, :, examples.at(source), examples.at(middle), rows]
        for one in range(here.shape[0]):
            for two in range(here.shape[1]):
                found.append((Chain("V", source, (first, one), middle, (second, two)), here[one, two]))
    return found


class _Edit(NamedTuple):
    """What to add to one head's query or key at one position of each example."""

    chain: Chain
    position: Int[Tensor, "example"]
    change: Float[Tensor, "example d_head"]


class _Terms:
    """What earlier heads wrote, term by term, in the run itself."""

    def __init__(self, model: Any, examples: Examples):
        self.model, self.examples, self.taken = model, examples, reference(model, examples)
        names = [f"blocks.{layer}.hook_resid_pre" for layer in range(model.cfg.n_layers)]
        _, cache = model.run_with_cache(examples.tokens, names_filter=names)
        self.streams = [cache[name] for name in names]
        self.rows = torch.arange(len(examples))

    def written(self, layer: int, source: Place, middle: Place) -> Float[Tensor, "example head d_model"]:
        """A[m,s] v_s W_O of each head."""
        s, m = self.examples.at(source), self.examples.at(middle)
        attention, value = self.taken.patterns[layer][self.rows, :, m, s], self.taken.values[layer][self.rows, s]
        return torch.einsum("nh, nhd, hdm -> nhm", attention, value, self.model.blocks[layer].attn.W_O)

    def edits(self, first: int, second: int) -> Iterator[_Edit]:
        """One for each K- and Q-chain between two layers."""
        block = self.model.blocks[second]
        for source, middle in _pairs(self.examples):
            at = self.examples.at(middle)
            stream = self.streams[second][self.rows, at][:, None]
            written = self.written(first, source, middle)
            change = what_is_read(self.model, block, stream - written) - what_is_read(self.model, block, stream)
            for kind in "KQ" if middle == ANSWER else "K":
                moved = torch.einsum("nam, bmd -> abnd", change, getattr(block.attn, f"W_{kind}"))
                for one in range(moved.shape[0]):
                    for two in range(moved.shape[1]):
                        chain = Chain(kind, source, (first, one), middle, (second, two))
                        yield _Edit(chain, at, moved[one, two])

    def all_cut(self, clean: Tensor) -> Float[Tensor, "example"]:
        """answer − foil with every term taken out of every key, and out of the answer's query."""
        written, streams, hooks = {}, {}, []
        for layer in range(1, self.model.cfg.n_layers):
            written[layer] = torch.zeros_like(self.streams[layer])
            for first in range(layer):
                for source, middle in _pairs(self.examples):
                    written[layer][self.rows, self.examples.at(middle)] += self.written(first, source, middle).sum(1)

        def note(stream: Tensor, hook: Any, layer: int) -> None:
            streams[layer] = stream

        def change(heads: Tensor, hook: Any, layer: int, kind: str) -> Tensor:
            block, heads = self.model.blocks[layer], heads.clone()
            after = what_is_read(self.model, block, streams[layer] - written[layer])
            moved = after - what_is_read(self.model, block, streams[layer])
            moved = torch.einsum("npm, hmd -> nphd", moved, getattr(block.attn, f"W_{kind}"))
            if kind == "K":
                return heads + moved
            at = self.examples.at(ANSWER)
            heads[self.rows, at] += moved[self.rows, at]
            return heads

        for layer in written:
            hooks.append(Hook(self.model, f"blocks.{layer}.hook_resid_pre", _bound(note, layer=layer)))
            for kind in "QK":
                name = f"blocks.{layer}.attn.hook_{kind.lower()}"
                hooks.append(Hook(self.model, name, _bound(change, layer=layer, kind=kind)))
        with on(hooks):
            return self.examples.judge(self.model(self.examples.tokens))[1]


def _bound(function: Any, **fixed: Any) -> Any:
    return lambda tensor, hook: function(tensor, hook, **fixed)


def _differences(model: Any, examples: Examples, edits: Sequence[_Edit]) -> Float[Tensor, "edit example"]:
    """answer − foil under each edit; many to a forward pass."""
    n, found = len(examples), []
    together = max(1, TOKENS // examples.tokens.numel())
    for start in range(0, len(edits), together):
        some = edits[start : start + together]
        layer = some[0].chain.reader[0]

        def change(heads: Tensor, hook: Any, kind: str, some: Sequence[_Edit] = some) -> Tensor:
            heads = heads.clone()
            for i, edit in enumerate(some):
                if edit.chain.kind == kind:
                    rows = torch.arange(i * n, (i + 1) * n)
                    heads[rows, edit.position, edit.chain.reader[1]] += edit.change
            return heads

        hooks = [Hook(model, f"blocks.{layer}.attn.hook_{kind.lower()}", _bound(change, kind=kind)) for kind in "QK"]
        with on(hooks):
            logits = model(examples.tokens.repeat(len(some), 1))
        at = examples.at(ANSWER).repeat(len(some))
        said = logits[torch.arange(len(logits)), at].unflatten(0, (len(some), n))
        answers, foils = (which.expand(len(some), n) for which in (examples.answers, examples.foils))
        found.append(judged(said, answers, foils)[1])
    return torch.cat(found) if found else torch.zeros(0, n)
