"""A cut edge equals the forward pass written out by hand, term by term; effects are those of that forward pass."""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cuts_by_hand import build, gpt2, n_hooks, native
from paths_by_hand import distance
from scipy import stats
from support import from_native
from torch import Tensor

from circuits.cuts import Edge, Path, cut, force
from circuits.edges import WHAT, reference
from circuits.effects import edge_effects, edges_between
from circuits.errors import NoSuchPart, Undefined
from circuits.examples import Examples, clustered_error
from workbench.positions import alibi, rotate

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 0], [2, 6, 5, 3, 5, 1], [0, 0, 2, 6, 4, 4]])
OTHERS = torch.tensor([[1, 1, 0, 2, 6, 6], [4, 2, 3, 3, 0, 5], [6, 5, 4, 3, 2, 1]])
ROLES = {"here": torch.tensor([1, 0, 2]), "there": torch.tensor([3, 4, 2]), "end": 5}
OTHER_ROLES = {"here": torch.tensor([2, 0, 1]), "there": torch.tensor([2, 3, 4]), "end": 5}
EDGES = [Edge(0, 1, "end", "here"), Edge(0, 0, "there", "here"), Edge(1, "all", "end", 2), Edge(2, 0, "end", "end")]
EDGES += [Edge(1, 1, 4, 0), Edge(2, None, "there", "here")]


Sums = Callable[[int, int, Tensor, Tensor], Tensor]
"""(layer, head, scores [example, destination, source], values [example, source, d_head]) → sums over sources."""


def plain(layer: int, head: int, scores: Tensor, values: Tensor) -> Tensor:
    return scores.softmax(-1) @ values


def by_hand(model: Any, tokens: Tensor, sums: Sums = plain) -> Tensor:
    """Logits of one of our models from its weights, where `sums` says what a head sums up."""
    config = model.config

    def normed(x: Tensor, norm: Any, where: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], norm.w, norm.b, norm.eps) if config.norm == where else x

    def written(x: Tensor, out: Tensor, norm: Any) -> Tensor:
        return normed(x + out if config.residual else out, norm, "post")

    x = model.W_E[tokens]
    if config.positions == "learned":
        x = x + model.pos_embed.W_pos[: tokens.shape[1]]
    for layer, block in enumerate(model.blocks):
        attention, stream = block.attn, normed(x, getattr(block, "ln1", None), "pre")
        apart = model.pos_embed.W_pos if config.positions == "shortformer" else 0
        q, k, v = (
            torch.einsum("bpm, hmd -> bphd", stream + (0 if kind == "V" else apart), getattr(attention, f"W_{kind}"))
            + getattr(attention, f"b_{kind}")
            for kind in "QKV"
        )
        if config.positions == "rotary":
            q, k = rotate(q), rotate(k)
        out = attention.b_O
        for head in range(config.n_heads):
            scores = q[:, :, head] @ k[:, :, head].mT / math.sqrt(config.d_head)
            if config.positions == "alibi":
                scores = scores + alibi(config.n_heads, tokens.shape[1])[head]
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -math.inf)
            out = out + sums(layer, head, scores, v[:, :, head]) @ attention.W_O[head]
        x = written(x, out, getattr(block, "ln1", None))
        if config.d_mlp:
            hidden = F.gelu(normed(x, getattr(block, "ln2", None), "pre") @ block.mlp.W_in + block.mlp.b_in)
            x = written(x, hidden @ block.mlp.W_out + block.mlp.b_out, getattr(block, "ln2", None))
    return normed(x, model.ln_final, "pre") @ model.W_U + model.unembed.b_U


def at(place: Any, roles: Any, example: int) -> int:
    position = roles[place] if isinstance(place, str) else place
    return int(position[example]) if isinstance(position, Tensor) else position


def noted(model: Any, tokens: Tensor) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Every head's pattern and values in the run itself."""
    found = {}

    def note(layer: int, head: int, scores: Tensor, values: Tensor) -> Tensor:
        found[layer, head] = scores.softmax(-1), values
        return plain(layer, head, scores, values)

    by_hand(model, tokens, note)
    return found


def without(edges: list[Edge], what: str, replacement: str, given: Any, roles: Any, own: bool = False) -> Sums:
    """Sums with these edges cut, by loops over edges and examples. `given`: `noted` of other prompts, and roles."""

    def sums(layer: int, head: int, scores: Tensor, values: Tensor) -> Tensor:
        mine = [edge for edge in edges if edge.layer == layer and edge.head in (None, head)]
        if what == "knock-out":
            scores = scores.clone()
            for edge in mine:
                for i in range(len(scores)):
                    scores[i, at(edge.destination, roles, i), at(edge.source, roles, i)] = -math.inf
            return scores.softmax(-1).nan_to_num(0) @ values
        pattern = scores.softmax(-1)
        terms = pattern[..., None] * values[:, None]
        (others, other_values), other_roles = (
            ((pattern, values), roles) if own else (given[0][layer, head], given[1])
        )  # fmt: skip
        for edge in mine:
            found = []
            for i in range(len(others)):
                t, s = at(edge.destination, other_roles, i), at(edge.source, other_roles, i)
                found.append((others[i, t, s], other_values[i, s]))
            for i in range(len(terms)):
                t, s = at(edge.destination, roles, i), at(edge.source, roles, i)
                a, v = pattern[i, t, s], values[i, s]
                zero = 0 * a, 0 * v
                one = found[i] if replacement == "resample" else zero
                if what == "contribution":
                    mean = torch.stack([x * y for x, y in found]).mean(0)
                    terms[i, t, s] = mean if replacement == "mean" else one[0] * one[1]
                elif what == "value":
                    mean = torch.stack([y for _, y in found]).mean(0)
                    terms[i, t, s] = a * (mean if replacement == "mean" else one[1])
                else:
                    mean = torch.stack([x for x, _ in found]).mean(0)
                    terms[i, t, s] = (mean if replacement == "mean" else one[0]) * v
        return terms.sum(2)

    return sums


@pytest.mark.parametrize("replacement", ["mean", "zero", "resample"])
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("options", [
    {}, {"norm": "none", "d_mlp": 0}, {"positions": "rotary"}, {"positions": "alibi"}, {"positions": "shortformer"},
    {"query_key": "tied", "bias_unembed": True}, {"norm": "post"}, {"residual": False},
])  # fmt: skip
@torch.no_grad()
def test_a_cut_is_the_forward_pass_without_the_edge(options: dict[str, Any], what: str, replacement: str) -> None:
    model = build(**options)
    clean = model(TOKENS)
    assert distance(clean, by_hand(model, TOKENS)) <= 1e-9
    given = noted(model, OTHERS), OTHER_ROLES
    taken_from = reference(model, OTHERS, OTHER_ROLES)
    for edges in ([EDGES[0]], [EDGES[2]], EDGES):
        expected = by_hand(model, TOKENS, without(edges, what, replacement, given, ROLES))
        with cut(model, edges, replacement, what=what, reference=taken_from, roles=ROLES):
            logits = model(TOKENS)
        assert distance(logits, expected) <= 1e-9
        assert distance(logits, clean) > 1e-4
    assert torch.equal(model(TOKENS), clean)


@pytest.mark.parametrize("what", WHAT)
@torch.no_grad()
def test_without_a_reference_the_mean_is_over_this_batch(what: str) -> None:
    model = build()
    expected = by_hand(model, TOKENS, without(EDGES, what, "mean", None, ROLES, own=True))
    with cut(model, EDGES, what=what, roles=ROLES):
        assert distance(model(TOKENS), expected) <= 1e-9
    if what != "knock-out":
        with pytest.raises(Undefined, match="a batch of one"), cut(model, EDGES[4], what=what):
            model(TOKENS[:1])
    assert n_hooks(model) == 0


@torch.no_grad()
def test_kinds_of_cut_coincide_and_differ_where_they_should() -> None:
    """Zero: the same three. Head 1's value at 2 made constant: no value to cut, but a contribution and a pattern."""
    model = build(norm="none", d_mlp=0, n_layers=1)
    edge, results = Edge(0, 1, 5, 2), {}
    for what in WHAT[:3]:
        with cut(model, edge, "zero", what=what):
            results[what] = model(TOKENS)
    assert distance(results["contribution"], results["value"]) <= 1e-12
    assert distance(results["contribution"], results["pattern"]) <= 1e-12
    cast(Any, model).blocks[0].attn.W_V[1] = 0  # all values of head 1 are its bias
    clean = model(TOKENS)
    for what in WHAT[:3]:
        with cut(model, edge, what=what):
            results[what] = model(TOKENS)
    assert distance(results["value"], clean) <= 1e-12
    assert distance(results["contribution"], clean) > 1e-3
    assert distance(results["contribution"], results["pattern"]) <= 1e-12


@torch.no_grad()
def test_knocking_out_every_source_leaves_nothing_to_read() -> None:
    model = build()
    row = [Edge(1, 0, 3, source) for source in range(4)]
    with cut(model, row, what="knock-out"):
        _, cache = model.run_with_cache(TOKENS)
    assert not cache["blocks.1.attn.hook_pattern"][:, 0, 3].any()
    assert not cache["blocks.1.attn.hook_z"][:, 3, 0].any()
    assert cache["blocks.1.attn.hook_pattern"][:, 0, 4].sum(-1).tolist() == pytest.approx([1] * 3)


@pytest.mark.parametrize("what", WHAT)
@torch.no_grad()
def test_a_bridge_with_the_same_weights_gives_the_same(what: str) -> None:
    bridge = native()
    model = from_native(bridge, bias_unembed=True)
    for replacement in ("mean", "zero", "resample"):
        results = []
        for one in (bridge, model):
            taken_from = reference(one, OTHERS, OTHER_ROLES)
            with cut(one, EDGES, replacement, what=what, reference=taken_from, roles=ROLES):
                results.append(one(TOKENS))
        assert distance(*results) <= 1e-9
        assert distance(results[0], bridge(TOKENS)) > 1e-3
    with force(bridge, 1, 0, "end", "here", ROLES), force(model, 1, 0, "end", "here", ROLES):
        assert distance(bridge(TOKENS), model(TOKENS)) <= 1e-9
    assert n_hooks(bridge) == 0


@torch.no_grad()
def test_a_cut_in_gpt2_is_what_its_parts_give() -> None:
    model: Any = gpt2()
    _, clean = model.run_with_cache(TOKENS)
    with cut(model, Edge(1, 2, 4, 1), "zero"):
        _, inside = model.run_with_cache(TOKENS)
    term = clean["blocks.1.attn.hook_pattern"][:, 2, 4, 1, None] * clean["blocks.1.attn.hook_v"][:, 1, 2]
    expected = clean["blocks.1.hook_attn_out"].clone()
    expected[:, 4] -= term @ model.W_O[1, 2]
    assert distance(inside["blocks.1.hook_attn_out"], expected) <= 1e-5
    assert distance(term @ model.W_O[1, 2], torch.zeros(3, 12)) > 1e-2
    with cut(model, Edge(1, 2, 4, 1), what="knock-out"):
        _, inside = model.run_with_cache(TOKENS)
    row = clean["blocks.1.attn.hook_pattern"][:, 2, 4].clone()
    row[:, 1] = 0
    assert distance(inside["blocks.1.attn.hook_pattern"][:, 2, 4], row / row.sum(-1, keepdim=True)) <= 1e-6
    with force(model, 0, "all", 4, 1):
        _, inside = model.run_with_cache(TOKENS)
    assert distance(inside["blocks.0.attn.hook_z"][:, 4], clean["blocks.0.attn.hook_v"][:, 1]) <= 1e-6
    assert n_hooks(model) == 0


@torch.no_grad()
def test_forcing_moves_one_source_only() -> None:
    model = build()

    def sums(layer: int, head: int, scores: Tensor, values: Tensor) -> Tensor:
        z = plain(layer, head, scores, values)
        if (layer, head) == (1, 0):
            for i in range(3):
                z[i, 5] = values[i, ROLES["here"][i]]
        return z

    with force(model, 1, 0, "end", "here", ROLES):
        assert distance(model(TOKENS), by_hand(model, TOKENS, sums)) <= 1e-9
    assert n_hooks(model) == 0


@torch.no_grad()
def test_edges_and_paths_are_cut_together_and_within_each_other() -> None:
    """0.1's edge away, and 0.1 → K → 1.0: the path's contribution is what 0.1 writes without the edge."""
    model: Any = build()
    edge, path = Edge(0, 1, 4, 1), Path("0.1", "K", "1.0")
    with cut(model, [edge, path], "zero"):
        together, cache = model.run_with_cache(TOKENS)
    stream = cache["blocks.1.hook_resid_pre"] - cache["blocks.0.attn.hook_z"][:, :, 1] @ model.W_O[0, 1]
    norm = model.blocks[1].ln1
    keys = F.layer_norm(stream, (12,), norm.w, norm.b, norm.eps) @ model.W_K[1, 0] + model.b_K[1, 0]
    assert distance(cache["blocks.1.attn.hook_k"][:, :, 0], keys) <= 1e-9
    for outer, inner in ((edge, path), (path, edge)):
        with cut(model, outer, "zero"), cut(model, inner, "zero"):
            assert distance(model(TOKENS), together) <= 1e-12
    with cut(model, EDGES[0], what="knock-out", roles=ROLES), cut(model, EDGES[4], "zero"):
        nested = model(TOKENS)
    with cut(model, EDGES[4], "zero"), cut(model, EDGES[0], what="knock-out", roles=ROLES):
        assert distance(model(TOKENS), nested) <= 1e-12
    with (
        cut(model, Edge(1, "all", 5, 2)),
        pytest.raises(Undefined, match=r"2→1\.0→end is cut already"),
        cut(model, Edge(1, 0, "end", 2), roles=ROLES),
    ):
        pass
    assert n_hooks(model) == 0


@pytest.mark.parametrize("make", [build, native])
@torch.no_grad()
def test_nothing_leaks_after_an_exception(make: Any) -> None:
    model = make()
    clean = model(TOKENS)
    for context in (lambda: cut(model, EDGES, roles=ROLES), lambda: force(model, 0, "all", 4, 1)):
        with pytest.raises(KeyError), context():
            model(TOKENS)
            raise KeyError("stop")
        with pytest.raises(NoSuchPart, match=r"this prompt has 0 … 2"), context():
            model(TOKENS[:, :3])
        assert n_hooks(model) == 0
        assert torch.equal(model(TOKENS), clean)
        with context():
            assert distance(model(TOKENS), clean) > 1e-3
            model.reset_hooks()
            assert distance(model(TOKENS), clean) > 1e-3


def test_edges_that_cannot_be_are_refused() -> None:
    model = build()
    assert repr(Edge(1, "all", "answer", "x")) == "x→1.all→answer"
    assert Edge(1, "all", 3, 2) == Edge(1, None, 3, 2)
    with pytest.raises(NoSuchPart, match="no edge from 4 to 3: attention looks back"):
        Edge(0, 0, 3, 4)
    with pytest.raises(NoSuchPart, match="'every' is no head of layer 0; expected a number or all"):
        Edge(0, "every", 3, 2)
    with pytest.raises(NoSuchPart, match="-1 is no position"):
        Edge(0, 0, -1, -2)
    cases: list[tuple[Any, dict[str, Any], Any, str]] = [
        (Edge(0, 2, 3, 1), {}, NoSuchPart, r"no head 0\.2: this model has 3 layers of 2 heads"),
        (Edge(3, "all", 3, 1), {}, NoSuchPart, r"no head 3\.0"),
        (Edge(0, 0, "end", "verb"), {"roles": ROLES}, NoSuchPart, "'verb' is no role here; there are here, there, end"),
        (Edge(0, 0, "here", "there"), {"roles": ROLES}, NoSuchPart, "its source stands behind its destination"),
        ([Edge(0, 0, 5, 1), Edge(0, "all", "end", 1)], {"roles": ROLES}, Undefined, "share a term; cut it once"),
        (Edge(0, 0, 3, 1), {"what": "score"}, NoSuchPart, "'score' is no kind of cut; expected one of contribution"),
        (Edge(0, 0, 3, 1), {"replacement": "noise"}, NoSuchPart, "'noise' is no replacement; expected one of mean"),
        (Edge(0, 0, 3, 1), {"replacement": "resample"}, Undefined, "give reference, a prompt of this shape"),
        ([Edge(0, 0, 3, 1), Path("0.0", "K", "1.0")], {"replacement": "resample", "reference": OTHERS}, NoSuchPart,
         "'resample' is no replacement; expected mean or zero"),
    ]  # fmt: skip
    for edges, options, error, message in cases:
        with pytest.raises(error, match=message), cut(model, edges, **options):
            pass
    with (
        pytest.raises(Undefined, match="there are 2 for 3"),
        cut(model, Edge(0, 0, 3, 1), "resample", reference=OTHERS[:2]),
    ):
        model(TOKENS)
    with pytest.raises(NoSuchPart, match="positions for 3 examples, the batch has 2"), cut(model, EDGES, roles=ROLES):
        model(TOKENS[:2])
    with pytest.raises(Undefined, match="training mode with dropout"), cut(build(dropout=0.1).train(), EDGES[4]):
        pass
    assert n_hooks(model) == 0


# Examples and effects


def some_examples(n: int = 12) -> Examples:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(7, (n, 6), generator=generator)
    answers, foils = torch.randint(7, (n,), generator=generator), torch.randint(7, (n,), generator=generator)
    clusters = tuple("abcd"[i % 4] for i in range(n))
    return Examples(tokens, answers, foils, {"x": 1, "y": 3, "answer": 4}, clusters)


def test_examples_know_their_places() -> None:
    examples = some_examples()
    assert examples.places() == (0, "x", 2, "y", "answer")
    assert examples.at("y").tolist() == [3] * 12
    some = examples.take(torch.tensor([3, 1]))
    assert torch.equal(some.tokens, examples.tokens[[3, 1]])
    assert some.clusters == ("d", "b")
    moved = Examples(TOKENS, TOKENS[:, 0], TOKENS[:, 1], {"here": ROLES["here"], "answer": 5})
    assert moved.places() == ("here", "answer")
    assert moved.clusters == ("0", "1", "2")
    other = moved.shuffled()
    assert sorted(map(tuple, other.tokens.tolist())) == sorted(map(tuple, TOKENS.tolist()))
    for i in range(3):
        assert not torch.equal(other.tokens[i], TOKENS[i])
        [was] = [j for j in range(3) if torch.equal(other.tokens[i], TOKENS[j])]
        assert other.at("here")[i] == ROLES["here"][was]
        assert other.answers[i] == TOKENS[was, 0]


def test_examples_that_make_no_sense_are_refused() -> None:
    with pytest.raises(NoSuchPart, match="the roles x lack 'answer'"):
        Examples(TOKENS, TOKENS[:, 0], TOKENS[:, 1], {"x": 1})
    with pytest.raises(NoSuchPart, match=r"role 'answer' is at 6; expected one of 0 … 5"):
        Examples(TOKENS, TOKENS[:, 0], TOKENS[:, 1], {"answer": 6})
    with pytest.raises(ValueError, match="2 clusters for 3 examples"):
        Examples(TOKENS, TOKENS[:, 0], TOKENS[:, 1], {"answer": 5}, ("a", "b"))
    with pytest.raises(ValueError, match=r"shape \[0, 6\]"):
        Examples(TOKENS[:0], TOKENS[:0, 0], TOKENS[:0, 1], {"answer": 5})


@pytest.mark.parametrize("make", [build, native])
@pytest.mark.parametrize("what", ["contribution", "knock-out"])
@torch.no_grad()
def test_effects_are_those_of_the_cuts(make: Any, what: str) -> None:
    model, examples = make(), some_examples()
    edges = [Edge(0, None, "answer", "x"), Edge(1, None, "answer", 2), Edge(2, 1, "answer", "answer")]
    effects = edge_effects(model, examples, what=what, edges=edges, pairs=2)
    rows = torch.arange(12)

    def judged(gone: list[Edge]) -> tuple[Tensor, Tensor]:
        with cut(model, gone, what=what, reference=examples):
            logits = model(examples.tokens)[:, 4]
        return logits.argmax(-1) == examples.answers, logits[rows, examples.answers] - logits[rows, examples.foils]

    logits = model(examples.tokens)[:, 4]
    clean = logits[rows, examples.answers] - logits[rows, examples.foils]
    assert distance(effects.clean_difference, clean) <= 1e-9
    for i, edge in enumerate(edges):
        right, difference = judged([edge])
        assert torch.equal(effects.right[i], right)
        assert distance(effects.difference[i], difference) <= 1e-9
        assert effects.difference_change[i].item() == pytest.approx((difference - clean).mean().item())
    right, difference = judged(edges)
    assert torch.equal(effects.joint_right, right)
    assert distance(effects.joint_difference, difference) <= 1e-9
    size = effects.difference_change.abs()
    assert effects.strongest == tuple(size.argsort(descending=True)[:2].tolist())
    one, two = effects.strongest
    both = (judged([edges[one], edges[two]])[1] - clean).mean()
    alone = effects.difference_change[one] + effects.difference_change[two]
    assert effects.interaction("difference")[0, 1].item() == pytest.approx((both - alone).item())
    assert effects.interaction("difference").diagonal().tolist() == [0, 0]
    assert effects.pairs_frame()["difference_interaction"].tolist() == pytest.approx([(both - alone).item()])
    for of, change, error in (
        ("right", effects.accuracy_change, effects.accuracy_error),
        ("difference", effects.difference_change, effects.difference_error),
    ):
        half = float(stats.t.ppf(0.975, 3)) * error
        assert distance(effects.interval(of), torch.stack([change - half, change + half])) <= 1e-6
    with pytest.raises(NoSuchPart, match="'loss' is no measure; expected right or difference"):
        effects.interaction("loss")
    frame = effects.to_frame()
    assert frame["edge"].tolist()[0] == repr(edges[one])
    assert frame["edge"].tolist()[-1] == "all of them"
    assert "12 examples in 4 clusters" in repr(effects)
    assert repr(edges[0]) in effects._repr_html_()


def test_every_edge_into_the_answer_and_between_roles() -> None:
    examples = some_examples()
    edges = edges_between(examples, range(2))
    assert len(edges) == 2 * 5
    assert edges[:2] == (Edge(0, None, "answer", 0), Edge(0, None, "answer", "x"))
    every = edges_between(examples, [0], [0, 1], examples.places())
    assert len(every) == 2 * (1 + 2 + 3 + 4 + 5)


def test_the_error_is_clustered() -> None:
    """Against the formula by loops, and the bootstrap over clusters."""
    rng = np.random.default_rng(0)
    cluster = np.repeat(np.arange(40), 8)
    values = rng.normal(size=40)[cluster] + 0.3 * rng.normal(size=320)
    mean = values.mean()
    sums = [sum(values[i] - mean for i in range(320) if cluster[i] == g) for g in range(40)]
    expected = math.sqrt(40 / 39 * sum(s * s for s in sums)) / 320
    found = clustered_error(torch.tensor(values)[None], torch.tensor(cluster))
    assert found.item() == pytest.approx(expected)
    by_cluster = np.array([values[cluster == g].mean() for g in range(40)])
    draws = by_cluster[rng.integers(40, size=(4000, 40))].mean(1)
    assert found.item() == pytest.approx(draws.std(), rel=0.1)
    assert found.item() > 2 * values.std() / math.sqrt(320)
    assert clustered_error(torch.tensor(values)[None], torch.zeros(320).long()).item() == math.inf
