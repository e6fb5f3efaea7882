"""Sets of edges: the fast row equals the cut model, the search equals brute force, hand-built circuits are found."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuts_by_hand import build, gpt2, n_hooks, native
from paths_by_hand import distance
from torch import Tensor

from circuits.cuts import Edge, cut
from circuits.edges import reference
from circuits.effects import edges_between
from circuits.errors import NoSuchPart
from circuits.examples import Examples
from circuits.rows import Rows, Slow, keeper
from circuits.smallest import _Search, smallest_circuit
from workbench.known_answers import induction_pair


def own_answers(model: Any, n: int = 24, moving: bool = False, seed: int = 0) -> Examples:
    """The model's own answers at one position of random prompts, so that without a cut all are right."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(7, (n, 6), generator=generator)
    roles: dict[str, Any] = {"x": 1, "answer": 4}
    if moving:
        roles = {"x": torch.arange(n) % 2 + 1, "y": 3, "answer": torch.arange(n) % 2 + 4}
    examples = Examples(tokens, tokens[:, 0], tokens[:, 1], roles)
    with torch.no_grad():
        said = model(tokens)[torch.arange(n), examples.at("answer")]
    best = said.topk(2).indices
    return replace(examples, answers=best[:, 0], foils=best[:, 1])


def by_cutting(model: Any, examples: Examples, universe: Any, kept: Tensor, replacement: str, source: Any) -> Tensor:
    """At the answer, [set, example, d_vocab], one forward pass a set."""
    found = []
    for row in kept.tolist():
        gone = [edge for edge, keeps in zip(universe, row, strict=True) if not keeps]
        with cut(model, gone, replacement if gone else "mean", reference=source, roles=examples.roles):
            found.append(model(examples.tokens)[torch.arange(len(examples)), examples.at("answer")])
    return torch.stack(found)


@pytest.mark.parametrize("replacement", ["mean", "zero", "resample"])
@pytest.mark.parametrize("make", [
    build, native, gpt2, lambda: build(norm="none"), lambda: build(d_mlp=0), lambda: native(normalization_type=None),
    lambda: native(d_mlp=None, attn_only=True), lambda: build(n_layers=2, bias_unembed=True),
])  # fmt: skip
@torch.no_grad()
def test_the_row_is_what_the_cut_model_says(make: Any, replacement: str) -> None:
    model = make()
    for moving in (False, True):
        examples = own_answers(model, moving=moving)
        universe = edges_between(examples, range(model.cfg.n_layers))
        universe = universe if moving else tuple(edge for edge in universe if edge.layer != 1)
        universe += (Edge(0, 1, "answer", 0), Edge(1, 0, "answer", 0)) if moving else ()
        source = reference(model, examples.shuffled(1))
        rows = keeper(model, examples, universe, replacement, source)
        assert isinstance(rows, Rows)
        kept = torch.rand(9, len(universe), generator=torch.Generator().manual_seed(0)) < 0.5
        kept[0], kept[1], kept[2] = True, False, kept[3]
        expected = by_cutting(model, examples, universe, kept, replacement, source)
        found = rows.logits(kept, torch.arange(24))
        tolerance = 1e-9 if expected.dtype == torch.float64 else 1e-4
        assert distance(found, expected) <= tolerance
        assert distance(expected[0], expected[1]) > 0.1
        some = torch.tensor([7, 3, 22])
        assert distance(rows.logits(kept, some), expected[:, some]) <= tolerance
    assert n_hooks(model) == 0


@pytest.mark.parametrize("options", [{"positions": "rotary"}, {"positions": "alibi"}, {"positions": "shortformer"}])
@torch.no_grad()
def test_where_the_row_does_not_describe_the_model_the_whole_model_runs(options: Any) -> None:
    model = build(**options)
    examples = own_answers(model, moving=True)
    universe = edges_between(examples, range(3))
    source = reference(model, examples.shuffled(1))
    for replacement in ("mean", "resample"):
        slow = keeper(model, examples, universe, replacement, source)
        assert isinstance(slow, Slow)
        kept = torch.rand(3, len(universe), generator=torch.Generator().manual_seed(0)) < 0.5
        some = torch.tensor([7, 3, 22])
        expected = by_cutting(model, examples, universe, kept, replacement, source)[:, some]
        assert distance(slow.logits(kept, some), expected) <= 1e-9
    plain = build()
    between = (Edge(0, None, "x", "x"), Edge(1, None, "answer", "x"))
    assert isinstance(keeper(plain, own_answers(plain), between, "zero", source), Slow)


def accuracies(model: Any, examples: Examples, universe: Any, kept: Tensor) -> Tensor:
    said = by_cutting(model, examples, universe, kept, "mean", reference(model, examples)).argmax(-1)
    return (said == examples.answers).float().mean(1)


def sets_of(size: int, of: int) -> Tensor:
    rows = [[i in chosen for i in range(of)] for chosen in itertools.combinations(range(of), size)]
    return torch.tensor(rows).reshape(len(rows), of)


@pytest.mark.parametrize(("keep", "leave"), [(0.6, 1.0), (0.8, 1.0), (0.5, 0.45)])
@torch.no_grad()
def test_the_search_is_exhaustive(keep: float, leave: float) -> None:
    """Every set of every size, one forward pass each, until some suffice."""
    model = build(n_layers=2)
    train, held_out = own_answers(model, 40), own_answers(model, 30, seed=1)
    universe = edges_between(train, range(2))
    found = smallest_circuit(model, train, held_out, keep=keep, leave=leave)
    assert found.universe == universe
    for size in range(4):
        kept = sets_of(size, len(universe))
        alone, without = accuracies(model, train, universe, kept), accuracies(model, train, universe, ~kept)
        enough = (alone >= keep - 1e-6) & (without <= leave + 1e-6)
        if enough.any():
            expected = {frozenset(e for e, k in zip(universe, row, strict=True) if k) for row in kept[enough].tolist()}
            assert found.smallest
            assert found.name == "smallest"
            assert {frozenset(tie) for tie in found.ties} == expected
            assert found.chosen_on[0] - found.chosen_on[1] == pytest.approx(float((alone - without)[enough].max()))
            break
    else:
        assert not found.smallest
        assert len(found.edges) > 3 or found.chosen_on[1] > leave
    assert found.edges == found.ties[0]
    others = [edge for edge in universe if edge not in found.edges]
    source = reference(model, train)
    for what in ("contribution", "value", "pattern", "knock-out"):
        for gone, told in ((others, found.kept), (found.edges, found.cut)):
            with cut(model, gone, what=what, reference=source, roles=held_out.roles):
                right, _ = held_out.judge(model(held_out.tokens))
            assert told[what] == pytest.approx(right.double().mean().item())
    assert found.clean == 1
    assert bool(found.failed) == (found.kept["contribution"] < keep or found.cut["contribution"] > leave)


@torch.no_grad()
def test_the_search_finds_sizes_of_every_kind() -> None:
    """The cases above are not all alike."""
    model = build(n_layers=2)
    train, held_out = own_answers(model, 40), own_answers(model, 30, seed=1)
    sizes = {len(smallest_circuit(model, train, held_out, keep=keep).edges) for keep in (0.0, 0.5, 0.6, 0.7, 0.8)}
    assert sizes == {0, 1, 2, 3, 6}


@torch.no_grad()
def test_what_is_pruned_is_minimal() -> None:
    """No edge can go; the accuracy of each set is that of one forward pass."""
    model = build(n_layers=3, d_mlp=0)
    train = own_answers(model, 40)
    universe = edges_between(train, range(3))
    search = _Search(keeper(model, train, universe, "mean", reference(model, train)), train, 0.8, 1.0)
    kept = search.pruned(torch.ones(1, len(universe), dtype=torch.bool))
    assert accuracies(model, train, universe, kept)[0] >= 0.8
    fewer = kept.repeat(int(kept.sum()), 1)
    fewer[torch.arange(len(fewer)), kept[0].nonzero()[:, 0]] = False
    assert accuracies(model, train, universe, fewer).max() < 0.8
    assert 3 < kept.sum() < len(universe)


def repeats() -> Examples:
    """One position of each of the induction pair's sequences, in their second period, where one answer is right."""
    tokens, roles = induction_pair().tokens, []
    for i, row in enumerate(tokens.tolist()):
        period = next(p for p in range(1, len(row)) if row[p] == row[0])
        earlier = 1 + i % (period - 2)
        roles.append((earlier, earlier + 1, earlier + period, (earlier + 2) % period))
    earlier, middle, answer, other = torch.tensor(roles).T
    rows = torch.arange(len(tokens))
    where = {"earlier": earlier, "middle": middle, "answer": answer}
    return Examples(tokens, tokens[rows, middle], tokens[rows, other], where)


def test_the_pair_built_by_hand_is_its_own_smallest_circuit() -> None:
    """Of all heads' edges between the three places that matter, exactly the two it was built of."""
    model, examples = induction_pair().model, repeats()
    universe = edges_between(examples, [0, 1], [0, 1], examples.places())
    assert len(universe) == 2 * 2 * 6
    train, held_out = examples.take(torch.arange(24)), examples.take(torch.arange(24, 64))
    for replacement, edges in (("mean", universe), ("resample", universe[:6] + universe[12:18])):
        found = smallest_circuit(model, train, held_out, universe=edges, replacement=replacement)
        assert found.smallest
        assert set(found.edges) == {Edge(0, 0, "middle", "earlier"), Edge(1, 0, "answer", "middle")}
        assert len(found.ties) == 1
        assert (found.clean, found.kept["contribution"], found.failed) == (1, 1, "")
        assert found.cut["contribution"] < 0.1
        assert found.cut["knock-out"] < 0.1
        assert f"smallest of {len(edges)} edges" in repr(found)


@torch.no_grad()
def test_it_says_when_there_is_no_circuit() -> None:
    model = build(n_layers=2)
    good, bad = own_answers(model), own_answers(model, seed=1)
    hopeless = smallest_circuit(model, replace(good, answers=good.foils), bad)
    assert hopeless.edges == ()
    assert "even with all 10 edges the accuracy is 0.0%, below 95%" in hopeless.failed
    assert repr(hopeless).startswith("No circuit: even with")
    misled = smallest_circuit(model, good, replace(bad, answers=bad.foils), keep=0.5)
    assert "but only" in misled.failed
    assert "FAILED: it keeps" in repr(misled)
    assert "FAILED" in misled._repr_html_()
    with pytest.raises(NoSuchPart, match="the universe holds no edge"):
        smallest_circuit(model, good, bad, universe=[])
    assert n_hooks(model) == 0


@torch.no_grad()
def test_a_circuit_that_is_not_needed_grows() -> None:
    """Where the smallest set leaves too much when it is cut, edges join it until it leaves little enough."""
    model = build(n_layers=2)
    train, held_out = own_answers(model, 40), own_answers(model, 30, seed=1)
    small = smallest_circuit(model, train, held_out, keep=0.5)
    assert small.chosen_on[1] > 0.45
    needed = smallest_circuit(model, train, held_out, keep=0.5, leave=0.45)
    assert needed.chosen_on[0] >= 0.5
    assert needed.chosen_on[1] <= 0.45
    assert len(needed.edges) > len(small.edges)
