"""Two-hop chains against forward passes and sums written out by hand, and on a pair of heads built by hand."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuts_by_hand import build, gpt2, n_hooks, native
from paths_by_hand import distance
from support import from_native
from test_circuits_edges import some_examples
from test_circuits_smallest import repeats
from torch import Tensor

from circuits.chains import Chain, TwoHops, two_hops
from circuits.errors import NoSuchPart, Undefined
from circuits.examples import Examples
from workbench.known_answers import induction_pair


def by_hand(
    model: Any, examples: Examples, cuts: list[tuple[str, int, tuple[int, int], int, tuple[int, int]]]
) -> Tensor:
    """answer − foil with these chains cut: (kind, source, writer, middle, reader), from the model's weights. What the
    writer wrote is that of the run without cuts."""
    written: dict[tuple[tuple[int, int], int, int], Tensor] = {}

    def run(taken: list[Any]) -> Tensor:
        config, tokens = model.config, examples.tokens

        def read(x: Tensor, norm: Any) -> Tensor:
            return x if config.norm == "none" else F.layer_norm(x, x.shape[-1:], norm.w, norm.b, norm.eps)

        x = model.W_E[tokens] + model.pos_embed.W_pos[: tokens.shape[1]]
        for layer, block in enumerate(model.blocks):
            attention, out = block.attn, block.attn.b_O
            for head in range(config.n_heads):
                parts = {}
                for kind in "QKV":
                    stream = x.clone()
                    for one, source, writer, middle, reader in taken:
                        if (one, reader) == (kind, (layer, head)):
                            stream[:, middle] -= written[writer, source, middle]
                    weight, bias = (getattr(attention, f"{letter}_{kind}")[head] for letter in "Wb")
                    parts[kind] = read(stream, getattr(block, "ln1", None)) @ weight + bias
                scores = parts["Q"] @ parts["K"].mT / math.sqrt(config.d_head)
                pattern = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -math.inf).softmax(-1)
                out = out + pattern @ parts["V"] @ attention.W_O[head]
                if not taken:
                    for m in range(tokens.shape[1]):
                        for s in range(m + 1):
                            term = pattern[:, m, s, None] * parts["V"][:, s] @ attention.W_O[head]
                            written[(layer, head), s, m] = term
            x = x + out
            if config.d_mlp:
                hidden = F.gelu(read(x, getattr(block, "ln2", None)) @ block.mlp.W_in + block.mlp.b_in)
                x = x + hidden @ block.mlp.W_out + block.mlp.b_out
        return examples.judge(read(x, model.ln_final) @ model.W_U)[1]

    clean = run([])
    return run(cuts) if cuts else clean


def places(examples: Examples, chain: Chain) -> tuple[str, int, tuple[int, int], int, tuple[int, int]]:
    return (
        chain.kind,
        int(examples.at(chain.source)[0]),
        chain.writer,
        int(examples.at(chain.middle)[0]),
        chain.reader,
    )


@pytest.mark.parametrize("options", [{"n_layers": 2}, {"n_layers": 3}, {"n_layers": 2, "norm": "none", "d_mlp": 0}])
@torch.no_grad()
def test_query_and_key_chains_are_what_cutting_them_costs(options: dict[str, Any]) -> None:
    model, examples = build(**options), some_examples(3)
    hops, clean = two_hops(model, examples), by_hand(model, examples, [])
    assert distance(hops.clean, clean.float()) <= 1e-5
    composed = [chain for chain in hops.chains if chain.kind != "V"]
    pairs = {2: 1, 3: 3}[options["n_layers"]] * 4
    assert len(composed) == pairs * (15 + 5)  # K: five positions into each other; Q: into the answer
    assert len(hops.chains) == pairs * (15 + 15 + 5)
    generator = torch.Generator().manual_seed(0)
    for i in torch.randperm(len(composed), generator=generator)[:24].tolist():
        cost = clean - by_hand(model, examples, [places(examples, composed[i])])
        assert distance(hops.values[hops.chains.index(composed[i])], cost.float()) <= 1e-5
    cost = clean - by_hand(model, examples, [places(examples, chain) for chain in composed])
    assert distance(hops.together, cost.float()) <= 1e-5
    singles = sum(hops.mean[hops.chains.index(chain)].item() for chain in composed)
    assert hops.interaction == pytest.approx(cost.mean().item() - singles, abs=1e-4)
    assert abs(hops.interaction) > 1e-4
    assert n_hooks(model) == 0


@torch.no_grad()
def test_a_choice_of_heads_and_places_gives_those_chains_and_cuts_them_together() -> None:
    model, examples = build(n_layers=3), some_examples(3)
    whole = two_hops(model, examples)
    some = two_hops(model, examples, heads=["2.1", (0, 1), "1.0", "1.0"], places=[4, 1, "x"])
    assert {(chain.writer, chain.reader) for chain in some.chains} == {
        ((0, 1), (1, 0)), ((0, 1), (2, 1)), ((1, 0), (2, 1)),
    }  # fmt: skip
    answer = int(examples.roles["answer"])
    named = {int(examples.at(place)[0]): place for place in examples.places()}
    wanted = {named[4], named[1], "x"}
    assert {place for chain in some.chains for place in (chain.source, chain.middle)} == wanted
    expected = [chain for chain in whole.chains if {chain.writer, chain.reader} <= {(2, 1), (0, 1), (1, 0)}]
    expected = [chain for chain in expected if {chain.source, chain.middle} <= wanted]
    assert set(some.chains) == set(expected) and len(some.chains) == len(expected) > 9
    for chain, values in zip(some.chains, some.values, strict=True):
        assert distance(values, whole.values[whole.chains.index(chain)]) <= 1e-6
    clean = by_hand(model, examples, [])
    for kinds in ("QK", "K", "Q"):
        few = two_hops(model, examples, heads=["0.1", "1.0", "2.1"], places=wanted, kinds=kinds)
        assert {chain.kind for chain in few.chains} == set(kinds)
        cost = clean - by_hand(model, examples, [places(examples, chain) for chain in few.chains])
        assert distance(few.together, cost.float()) <= 1e-5
        assert few.together.abs().max() > 1e-3
    only = two_hops(model, examples, kinds="V")
    assert {chain.kind for chain in only.chains} == {"V"} and only.together.tolist() == [0, 0, 0]
    assert answer == 4 and n_hooks(model) == 0


@pytest.mark.parametrize("norm", ["pre", "none"])
@torch.no_grad()
def test_value_chains_are_exact_and_add_up(norm: str) -> None:
    """A²[t,m] A¹[m,s] x_s W_OV¹ W_OV² with scales frozen, by loops; what they add up to, by one product."""
    model: Any = build(n_layers=2, d_mlp=0, norm=norm)
    examples = some_examples(2)
    _, cache = model.run_with_cache(examples.tokens)
    rows, t, hops = torch.arange(2), 4, two_hops(model, examples)
    direction = model.W_U[:, examples.answers].T - model.W_U[:, examples.foils].T

    def turned(x: Tensor, name: str, position: int) -> Tensor:
        if norm == "none":
            return x
        return (x - x.mean(-1, keepdim=True)) / cache[f"{name}.hook_scale"][:, position] * model.get_submodule(name).w

    total = torch.zeros(2, dtype=torch.float64)
    for chain, value in zip(hops.chains, hops.values, strict=True):
        if chain.kind != "V":
            continue
        _, s, (_, one), m, (_, two) = places(examples, chain)
        x = turned(cache["blocks.0.hook_resid_pre"][:, s], "blocks.0.ln1", s) @ model.W_V[0, one] @ model.W_O[0, one]
        x = cache["blocks.0.attn.hook_pattern"][:, one, m, s, None] * x
        x = turned(x, "blocks.1.ln1", m) @ model.W_V[1, two] @ model.W_O[1, two]
        x = turned(cache["blocks.1.attn.hook_pattern"][:, two, t, m, None] * x, "ln_final", t)
        assert distance(value, (x * direction).sum(-1).float()) <= 1e-5
        total += value
    first = torch.zeros(2, 5, 12, dtype=torch.float64)
    for m in range(5):  # everything that heads of layer 0 wrote of the stream, biases apart
        for head in (0, 1):
            read = torch.stack([turned(cache["blocks.0.hook_resid_pre"][:, s], "blocks.0.ln1", s) for s in range(5)], 1)
            pattern = cache["blocks.0.attn.hook_pattern"][:, head, m, :5]
            first[:, m] += torch.einsum("bs, bsm -> bm", pattern, read) @ model.W_V[0, head] @ model.W_O[0, head]
    moved = torch.stack([turned(first[:, m], "blocks.1.ln1", m) for m in range(5)], 1)
    second = sum(
        torch.einsum("bm, bmd -> bd", cache["blocks.1.attn.hook_pattern"][:, head, t, :5], moved)
        @ model.W_V[1, head] @ model.W_O[1, head] for head in (0, 1)
    )  # fmt: skip
    assert distance(total[rows], (turned(second, "ln_final", t) * direction).sum(-1)) <= 1e-4  # pyright: ignore[reportArgumentType]
    assert total.abs().max() > 0.1


@torch.no_grad()
def test_a_bridge_with_the_same_weights_gives_the_same() -> None:
    bridge, examples = native(), some_examples(2)
    model = from_native(bridge, bias_unembed=True)
    theirs, ours = two_hops(bridge, examples), two_hops(model, examples)
    assert theirs.chains == ours.chains
    assert distance(theirs.values, ours.values) <= 1e-5
    assert distance(theirs.together, ours.together) <= 1e-5
    assert ours.values.abs().max() > 0.01
    small = two_hops(gpt2(), examples.tokens[:1, :3], 2, 1, 4)
    assert len(small.clean) == 1
    assert len(small.chains) == 3 * 9 * (6 + 6 + 3)
    assert n_hooks(bridge) == 0


def test_the_pair_built_by_hand_is_named_and_nothing_else() -> None:
    known, examples = induction_pair(), repeats()
    hops = two_hops(known.model, examples)
    (best, value), (_, next_value) = hops.ranked()[:2]
    assert best == Chain("K", "earlier", (0, 0), "middle", (1, 0))
    assert str(best) == "earlier→0.0→middle→K→1.0→answer"
    assert value > 9
    assert abs(next_value) < 0.02 * value
    assert hops.together.mean().item() == pytest.approx(value, rel=0.01)
    assert abs(hops.interaction) < 0.01 * value
    assert hops.to_frame()["chain"].tolist()[0] == str(best)
    assert str(best) in repr(hops)
    assert str(best) in hops._repr_html_()
    assert {chain.kind for chain, _ in hops.ranked("Q")} == {"Q"}
    # one prompt, all positions: the same chain, by position
    one = examples.take(torch.tensor([0]))
    earlier, middle, answer = (int(one.at(place)) for place in ("earlier", "middle", "answer"))
    alone = two_hops(known.model, one.tokens, answer, int(one.answers), int(one.foils))
    assert alone.ranked()[0][0] == Chain("K", earlier, (0, 0), middle, (1, 0))


def test_single_chains_are_not_summed() -> None:
    """Two keys that stand in for each other: nothing each, everything together."""
    chains = (
        Chain("K", "x", (0, 0), "y", (1, 0)),
        Chain("K", "x", (0, 1), "y", (1, 0)),
        Chain("V", 0, (0, 0), 0, (1, 0)),
    )
    hops = TwoHops(chains, torch.tensor([[0.0], [0.5], [3.0]]), torch.tensor([4.0]), torch.tensor([4.0]))
    assert hops.interaction == 3.5
    assert hops.ranked()[0] == (chains[2], 3.0)


def test_questions_that_make_no_sense_are_refused() -> None:
    model, examples = build(), some_examples(2)
    with pytest.raises(ValueError, match="tokens alone ask nothing; give position, answer and foil"):
        two_hops(model, examples.tokens[:1])
    for options in ({"norm": "post"}, {"residual": False}):
        with pytest.raises(Undefined):
            two_hops(build(**options), examples)
    with pytest.raises(NoSuchPart, match="'X' is no kind of chain"):
        two_hops(build(n_layers=2), examples).ranked("X")
    with pytest.raises(NoSuchPart, match="'QX' are no kinds of chain"):
        two_hops(build(n_layers=2), examples, kinds="QX")
    with pytest.raises(NoSuchPart, match=r"no head 2\.0: this model has 2 layers"):
        two_hops(build(n_layers=2), examples, heads=["2.0"])
    with pytest.raises(NoSuchPart, match="'9' is no place here; there are"):
        two_hops(build(n_layers=2), examples, places=[1, 9])
    assert two_hops(build(n_layers=1), examples).chains == ()
