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

from collections.abc import Iterable, Iterator, Sequence
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
from circuits.surface import Head, head_name, head_of, read

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
    *,
    heads: Iterable[str | Head] | None = None,
    places: Iterable[Place] | None = None,
    kinds: str = "QKV",
) -> TwoHops:
    """All chains through two heads to the answer.

    `prompts`: Examples, or tokens [1, position] with the position the answer is said at and the token ids of answer and
    foil. Sources and middles are all positions up to the answer, or the roles alone where these differ by example. Cut
    terms are taken away, nothing is put in their place. It takes (heads of a layer × positions)² / 2 forward passes an
    example: a large model or a long prompt needs a choice. `heads`: writers and readers are among these alone;
    `places`: sources and middles are, and Q-chains need the answer's own; `kinds`: any of Q, K, V. A chain is worth the
    same whatever else is chosen; `together` and `interaction` are those of the chains chosen.

    Raises: ValueError for tokens without position, answer and foil; Undefined where path cuts or frozen-pattern
    decompositions are; NoSuchPart.
    """
    if not isinstance(prompts, Examples):
        if position is None or answer is None or foil is None:
            raise ValueError("tokens alone ask nothing; give position, answer and foil, or Examples")
        prompts = Examples(prompts, torch.tensor([answer]), torch.tensor([foil]), {ANSWER: position})
    check_paths(model, ())
    if not kinds or set(kinds) - set("QKV"):
        raise NoSuchPart(f"{kinds!r} are no kinds of chain; expected some of Q, K, V")
    chosen, pairs = _heads(model, heads), _pairs(prompts, places)
    layers = [(first, second) for second in chosen for first in chosen if first < second]
    with exclusive(model), torch.no_grad():
        clean = prompts.judge(model(prompts.tokens))[1]
        terms = _Terms(model, prompts, chosen, pairs, kinds)
        chains: list[Chain] = []
        values: list[Tensor] = [clean.new_zeros(0, len(prompts))]
        for first, second in layers:
            if "V" in kinds:
                contributions = _v_contributions(model, prompts, (first, second))
                found = [Chain("V", s, one, m, two) for s, m in pairs for one, two in terms.heads(first, second)]
                chains += found
                values += [contributions[_index(prompts, chain)][None] for chain in found]
            edits = list(terms.edits(first, second))
            chains += [edit.chain for edit in edits]
            values.append(clean - _differences(model, prompts, edits))
        together = clean - terms.all_cut()
    return TwoHops(tuple(chains), torch.cat(values).float(), clean.float(), together.float())


def _heads(model: Any, heads: Iterable[str | Head] | None) -> dict[int, list[int]]:
    """Layer → numbers of the heads chosen, in order. Raises: NoSuchPart."""
    if heads is None:
        return {layer: list(range(model.cfg.n_heads)) for layer in range(model.cfg.n_layers)}
    weights, chosen = read(model, inside=False), {}
    for layer, head in sorted({head_of(head, weights) for head in heads}):
        chosen.setdefault(layer, []).append(head)
    return chosen


def _pairs(examples: Examples, places: Iterable[Place] | None) -> list[tuple[Place, Place]]:
    """(source, middle): the middle is nowhere before the source, and nowhere behind the answer. Raises: NoSuchPart."""
    known = [p for p in examples.places() if bool((examples.at(p) <= examples.at(ANSWER)).all())]
    wanted = set(known)
    if places is not None:
        names = {int(examples.at(p)[0]): p for p in known if len(examples.at(p).unique()) == 1}
        wanted = {names.get(p, p) if isinstance(p, int) else p for p in places}
        if unknown := wanted - set(known):
            raise NoSuchPart(f"{min(map(str, unknown))!r} is no place here; there are {', '.join(map(str, known))}")
    chosen = [p for p in known if p in wanted]
    return [(s, m) for m in chosen for s in chosen if bool((examples.at(s) <= examples.at(m)).all())]


def _v_contributions(
    model: Any, examples: Examples, layers: tuple[int, int]
) -> Float[Tensor, "first second source middle example"]:
    by_example = []
    for i in range(len(examples)):
        direction = torch.zeros(model.cfg.d_vocab)
        direction[examples.answers[i]] += 1
        direction[examples.foils[i]] -= 1
        at = int(examples.at(ANSWER)[i])
        by_example.append(chain_contributions(model, examples.tokens[i : i + 1], at, direction, layers))
    return torch.stack(by_example, -1)


def _index(examples: Examples, chain: Chain) -> tuple[Any, ...]:
    """Where a V-chain's values [example] stand."""
    rows = torch.arange(len(examples))
    return chain.writer[1], chain.reader[1], examples.at(chain.source), examples.at(chain.middle), rows


class _Edit(NamedTuple):
    """What to add to one head's query or key at one position of each example."""

    chain: Chain
    position: Int[Tensor, "example"]
    change: Float[Tensor, "example d_head"]


class _Terms:
    """What earlier heads wrote, term by term, in the run itself."""

    def __init__(
        self, model: Any, examples: Examples, chosen: dict[int, list[int]], pairs: list[tuple[Place, Place]], kinds: str
    ):
        self.model, self.examples, self.taken = model, examples, reference(model, examples)
        self.chosen, self.pairs, self.kinds = chosen, pairs, kinds
        names = [f"blocks.{layer}.hook_resid_pre" for layer in range(model.cfg.n_layers)]
        _, cache = model.run_with_cache(examples.tokens, names_filter=names)
        self.streams = [cache[name] for name in names]
        self.rows = torch.arange(len(examples))

    def heads(self, first: int, second: int) -> list[tuple[Head, Head]]:
        """Writers and readers between two layers."""
        return [((first, one), (second, two)) for one in self.chosen[first] for two in self.chosen[second]]

    def written(self, layer: int, source: Place, middle: Place) -> Float[Tensor, "example head d_model"]:
        """A[m,s] v_s W_O of each head chosen."""
        s, m, chosen = self.examples.at(source), self.examples.at(middle), self.chosen[layer]
        attention = self.taken.patterns[layer][self.rows, :, m, s][:, chosen]
        value = self.taken.values[layer][self.rows, s][:, chosen]
        return torch.einsum("nh, nhd, hdm -> nhm", attention, value, self.model.blocks[layer].attn.W_O[chosen])

    def edits(self, first: int, second: int) -> Iterator[_Edit]:
        """One for each K- and Q-chain between two layers."""
        block = self.model.blocks[second]
        for source, middle in self.pairs:
            kinds = [kind for kind in ("KQ" if middle == ANSWER else "K") if kind in self.kinds]
            if not kinds:
                continue
            at = self.examples.at(middle)
            stream = self.streams[second][self.rows, at][:, None]
            written = self.written(first, source, middle)
            change = what_is_read(self.model, block, stream - written) - what_is_read(self.model, block, stream)
            for kind in kinds:
                weights = getattr(block.attn, f"W_{kind}")[self.chosen[second]]
                moved = torch.einsum("nam, bmd -> abnd", change, weights).flatten(0, 1)
                for (writer, reader), change_of in zip(self.heads(first, second), moved, strict=True):
                    yield _Edit(Chain(kind, source, writer, middle, reader), at, change_of)

    def all_cut(self) -> Float[Tensor, "example"]:
        """answer − foil with every term chosen taken out of every key, and out of the answer's query."""
        written, streams, hooks = {}, {}, []
        for layer in sorted(self.chosen):
            written[layer] = torch.zeros_like(self.streams[layer])
            for first in (earlier for earlier in self.chosen if earlier < layer):
                for source, middle in self.pairs:
                    written[layer][self.rows, self.examples.at(middle)] += self.written(first, source, middle).sum(1)

        def note(stream: Tensor, hook: Any, layer: int) -> None:
            streams[layer] = stream

        def change(heads: Tensor, hook: Any, layer: int, kind: str) -> Tensor:
            block, heads, chosen = self.model.blocks[layer], heads.clone(), self.chosen[layer]
            after = what_is_read(self.model, block, streams[layer] - written[layer])
            moved = after - what_is_read(self.model, block, streams[layer])
            moved = torch.einsum("npm, hmd -> nphd", moved, getattr(block.attn, f"W_{kind}")[chosen])
            at = self.examples.at(ANSWER)
            for i, head in enumerate(chosen):
                if kind == "K":
                    heads[:, :, head] += moved[:, :, i]
                else:
                    heads[self.rows, at, head] += moved[self.rows, at, i]
            return heads

        for layer in written:
            hooks.append(Hook(self.model, f"blocks.{layer}.hook_resid_pre", _bound(note, layer=layer)))
            for kind in (kind for kind in "QK" if kind in self.kinds):
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
