"""The loss of each order against sums of paths written out by hand; each head and pair on its own."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from paths_by_hand import ByHand, distance
from scipy import stats
from support import build, from_native, gpt2_bridge, native_bridge
from torch import Tensor

import workbench as wb
from circuits.errors import Undefined
from circuits.terms import TermImportance, term_importance

TOKENS = torch.tensor([[3, 17, 4, 1, 5, 0, 4], [2, 6, 5, 3, 5, 1, 19], [0, 0, 2, 6, 4, 4, 11], [9, 8, 7, 9, 8, 7, 9]])
KINDS: list[dict[str, Any]] = [
    {}, {"norm": "none"}, {"n_layers": 3}, {"n_layers": 3, "norm": "none"}, {"positions": "rotary"},
    {"positions": "shortformer"}, {"n_layers": 1, "n_heads": 4}, {"tied_unembedding": True, "positions": "alibi"},
]  # fmt: skip


def double(**options: Any) -> Any:
    """In float64; attention-only unless it says otherwise."""
    return build(**{"d_mlp": 0} | options).double()


def losses(logits: Tensor, tokens: Tensor = TOKENS, positions: slice = slice(None)) -> Tensor:
    """[sequence]"""
    surprises = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return surprises[:, positions].mean(1)


def by_paths(model: Any) -> list[dict[str, Tensor]]:
    """All paths of each sequence: name → [position, d_vocab]."""
    return [ByHand(model, row[None]).terms() for row in TOKENS]


def summed(found: list[dict[str, Tensor]], keep: Any) -> Tensor:
    """Logits of the paths kept by name."""
    return torch.stack([torch.stack([v for name, v in terms.items() if keep(name)]).sum(0) for terms in found])


@pytest.mark.parametrize("options", KINDS)
@torch.no_grad()
def test_orders_are_sums_over_all_paths_of_so_many_heads(options: dict[str, Any]) -> None:
    model = double(**options)
    importance, found = term_importance(model, TOKENS), by_paths(model)
    assert importance.orders.shape == (model.config.n_layers + 1, 4)
    for order, value in enumerate(importance.orders):
        assert distance(value, losses(summed(found, lambda name, n=order: name.count("→") <= n))) <= 1e-10
    assert distance(importance.orders[-1], losses(model(TOKENS))) <= 1e-10
    assert distance(importance.model, losses(model(TOKENS))) <= 1e-10
    assert importance.orders.diff(dim=0).abs().min() > 1e-6


@pytest.mark.parametrize("options", [{}, {"norm": "none"}, {"n_layers": 3}])
@torch.no_grad()
def test_heads_and_pairs_are_paths_added_and_taken_away(options: dict[str, Any]) -> None:
    model = double(**options)
    importance, found = term_importance(model, TOKENS), by_paths(model)
    sums = [summed(found, lambda name, n=n: name.count("→") <= n) for n in range(2)]
    sources = ("embed", "pos", "bias")
    layers = model.config.n_layers
    assert importance.heads == tuple((layer, head) for layer in range(layers) for head in range(2))
    pairs = [(a, b) for a in importance.heads for b in importance.heads if a[0] < b[0]]
    assert sorted(importance.pairs) == sorted(pairs)
    for base, parts, added, removed in (
        (sums[0], [[head] for head in importance.heads], importance.head_added, importance.head_removed),
        (sums[1], importance.pairs, importance.pair_added, importance.pair_removed),
    ):
        for i, part in enumerate(parts):
            path = "".join(f" → {layer}.{head}" for layer, head in part)
            names = {f"{source}{path}" for source in sources}
            term = summed(found, lambda name, names=names: name in names)
            assert distance(added[i], losses(base + term) - losses(base)) <= 1e-10
            assert distance(removed[i], losses(model(TOKENS) - term) - losses(model(TOKENS))) <= 1e-10


@pytest.mark.parametrize("norm", ["pre", "none"])
@torch.no_grad()
def test_feed_forward_layers_read_what_has_come_through_so_many_heads(norm: str) -> None:
    """Written as cumulative streams: what came through at most n heads, in each sequence."""
    model = double(n_layers=3, d_mlp=9, norm=norm)
    importance = term_importance(model, TOKENS)
    for at, row in enumerate(TOKENS):
        hand = ByHand(model, row[None])
        start = hand.cache["hook_embed"][0] + hand.cache["hook_pos_embed"][0]
        streams = [start] * 4
        for layer, block in enumerate(model.blocks):
            new = []
            for n in range(4):
                moved = sum(hand.head(streams[n - 1], layer, h) for h in range(2)) if n else 0
                middle = streams[n] + hand.bias(layer) + moved
                read = hand.norm(middle, f"blocks.{layer}.hook_resid_mid", getattr(block, "ln2", None))
                read = read + (block.ln2.b if norm == "pre" else 0)
                new.append(middle + F.gelu(read @ block.mlp.W_in + block.mlp.b_in) @ block.mlp.W_out + block.mlp.b_out)
            streams = new
        shift = model.ln_final.b @ model.W_U if norm == "pre" else 0
        for n, stream in enumerate(streams):
            logits = hand.end(stream) + shift + model.unembed.b_U
            assert distance(importance.orders[n, at], losses(logits[None], row[None])) <= 1e-10
    assert distance(importance.orders[-1], importance.model) <= 1e-10
    assert importance.orders.diff(dim=0).abs().min() > 1e-6


@pytest.mark.parametrize("options", [{"d_mlp": 24}, {"normalization_type": None}])
@torch.no_grad()
def test_a_bridge_gives_what_the_same_model_of_ours_gives(options: dict[str, Any]) -> None:
    bridge = native_bridge(**options)
    theirs, ours = (term_importance(model, TOKENS, [2, 4]) for model in (bridge, from_native(bridge)))
    for name in ("orders", "model", "head_added", "head_removed", "pair_added", "pair_removed"):
        assert distance(getattr(theirs, name), getattr(ours, name)) <= 1e-5


@torch.no_grad()
def test_gpt2_comes_out_as_itself() -> None:
    model = gpt2_bridge(n_layers=3)
    importance = term_importance(model, TOKENS)
    assert distance(importance.orders[-1], losses(model(TOKENS))) <= 1e-5
    assert distance(importance.orders[0], importance.orders[-1]) > 1e-2


@torch.no_grad()
def test_only_the_chosen_positions_count() -> None:
    model = double()
    part = term_importance(model, TOKENS, slice(4, None))
    every = summed(by_paths(model), lambda name: name.count("→") <= 1)
    assert distance(part.orders[1], losses(every, positions=slice(4, None))) <= 1e-10
    assert distance(part.orders, term_importance(model, TOKENS, [4, 5]).orders) <= 1e-12
    alone = term_importance(model, TOKENS, slice(4, None), pairs=False)
    assert alone.pairs == () and alone.pair_added.shape == (0, 4)
    assert torch.equal(alone.head_removed, part.head_removed)


@torch.no_grad()
def test_a_model_without_heads_is_its_direct_path() -> None:
    model = build(n_layers=0)
    importance = term_importance(model, TOKENS)
    assert importance.orders.shape == (1, 4) and importance.heads == ()
    assert distance(importance.orders[0], losses(model(TOKENS))) <= 1e-6


@torch.no_grad()
def test_the_frame_has_means_and_paired_errors() -> None:
    importance = term_importance(double(), TOKENS)
    frame = importance.to_frame()
    assert list(frame.columns) == ["kind", "part", "measure", "nats", "standard_error", "low", "high"]
    assert len(frame) == 3 + 2 + 1 + 2 * 4 + 2 * 4 + 1
    change = (importance.orders[2] - importance.orders[1]).numpy()
    row = frame[(frame.kind == "order") & (frame.part == "2") & (frame.measure == "change")].iloc[0]
    assert abs(row.nats - change.mean()) <= 1e-12
    assert abs(row.standard_error - stats.sem(change)) <= 1e-12
    low, high = stats.t.interval(0.95, 3, change.mean(), stats.sem(change))
    assert abs(row.low - low) <= 1e-12 and abs(row.high - high) <= 1e-12
    row = frame[(frame.kind == "pair") & (frame.part == "0.1 → 1.0") & (frame.measure == "removed")].iloc[0]
    assert abs(row.nats - importance.pair_removed[importance.pairs.index(((0, 1), (1, 0)))].mean().item()) <= 1e-12
    assert frame[frame.kind == "uniform"].nats.item() == math.log(20)
    assert "Q- and K-composition hide" in repr(importance) and "<table" in importance._repr_html_()
    assert "uniform" in repr(importance) and len(repr(importance).splitlines()) <= 20


@torch.no_grad()
def test_in_the_shipped_induction_model_virtual_heads_add_next_to_nothing() -> None:
    """REFERENCE: order 0 3.97 nats with frozen scales, uniform 3.93 to 3.91; the pairs "add" .005."""
    run = wb.load("induction-2-attn")
    importance = term_importance(run.model, run.task.held_out[:64], slice(24, None))
    order = importance.orders.mean(1)
    assert 3.9 <= order[0] <= 4.05
    assert order[1] <= 0.02 and 0 < order[1] - order[2] <= 0.01
    assert distance(order[2], importance.model.mean()) <= 1e-4
    assert importance.head_added.mean(1)[4:].max() < -1.0  # layer 1's heads do it,
    assert importance.head_added.mean(1)[:4].abs().max() < 0.1  # those they depend on hide in their patterns


def test_bad_questions_get_one_clear_line() -> None:
    model = build()
    for tokens in (TOKENS[:1], TOKENS[:, :1], TOKENS[0]):
        with pytest.raises(ValueError, match="at least two sequences of two tokens"):
            term_importance(model, tokens)
    with pytest.raises(ValueError, match=r"none of 0 … 5"):
        term_importance(model, TOKENS, slice(6, None))
    with pytest.raises(ValueError, match="whole numbers"):
        term_importance(model, TOKENS.float())
    undefined: list[dict[str, Any]] = [{"norm": "post"}, {"residual": False}]
    for options in undefined:
        with pytest.raises(Undefined, match="do not add up"):
            term_importance(build(**options), TOKENS)
    assert isinstance(term_importance(model, TOKENS), TermImportance)
