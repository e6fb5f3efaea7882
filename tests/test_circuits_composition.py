"""Composition against TransformerLens, Monte Carlo, and models in which nothing composes."""

import pytest
import torch
from support import build, fresh, from_native, gpt2_bridge, native_bridge

import circuits.composition
import circuits.nulls
from circuits.composition import KINDS, composed, composition_scores, compositions, virtual_heads
from circuits.errors import NoSuchPart, Undefined
from circuits.nulls import Beta, random_frames
from circuits.surface import folded, read

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9]])


@pytest.mark.parametrize("tile", [(3, 5), (5, 3), (64, 256)])
@pytest.mark.parametrize("make", [native_bridge, gpt2_bridge, lambda **o: native_bridge(normalization_type=None, **o)])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_transformer_lens(make, kind, tile, monkeypatch):
    monkeypatch.setattr(circuits.composition, "ROWS", tile[0])
    monkeypatch.setattr(circuits.composition, "COLUMNS", tile[1])
    model = make(n_layers=5)
    theirs = model.all_composition_scores(kind).scores
    ours = composition_scores(model, kind, fold=False)
    assert ours.basis == "raw"
    assert (ours.scores - theirs).abs().max() <= 1e-5
    assert int(ours.defined.sum()) == 5 * 4 // 2 * 4  # pairs of layers × pairs of heads
    assert torch.equal(ours.defined, theirs != 0)


def test_our_model_and_a_bridge_with_its_weights_have_the_same_scores_z_and_p():
    native = native_bridge(n_layers=3)
    for kind, theirs in compositions(native).items():
        ours = composition_scores(from_native(native), kind)
        assert ours.basis == theirs.basis == "folded"
        for name in ("scores", "null_mean", "null_sd", "p", "band"):
            assert torch.allclose(getattr(ours, name), getattr(theirs, name), atol=1e-4), name
        assert torch.allclose(ours.z, theirs.z, atol=0.02)


@pytest.mark.parametrize(("rank_a", "rank_b", "decay"), [(1, 1, 1.0), (4, 4, 1.0), (4, 2, 0.5), (8, 8, 0.6)])
def test_the_closed_null_is_that_of_random_rotations(rank_a, rank_b, decay):
    """Mean within 1 %, variance within 12 % (20,000 rotations, for a variance that is itself heavy-tailed), and never
    more than 5.6 % of them outside the band."""
    d, n = 16, 20_000
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, d, d, generator=generator)
    a = left[:, :rank_a] @ torch.diag(decay ** torch.arange(rank_a)) @ right[:rank_a]
    b = right[:, :rank_b] @ torch.diag(decay ** torch.arange(rank_b)) @ left[:rank_b]
    turn = random_frames(n, d, d, generator)
    drawn = (a @ turn @ b).pow(2).sum((1, 2)) / (a.pow(2).sum() * b.pow(2).sum())

    def unequal(gram):
        return (gram.pow(2).sum() / gram.trace() ** 2 - 1 / d).double()

    variance = 2 * unequal(a.T @ a) * unequal(b @ b.T) / ((d - 1) * (d + 2))
    null = Beta.of(1 / d, variance.expand(n))
    assert drawn.mean() == pytest.approx(1 / d, rel=0.01)
    assert drawn.var() == pytest.approx(variance.item(), rel=0.12)
    assert drawn.sqrt().mean() == pytest.approx(null.root_mean[0].item(), rel=0.05)
    assert 0.02 <= (null.p(drawn) <= 0.05).double().mean() <= 0.056


def test_the_null_of_a_pair_is_the_closed_form_of_its_own_spectra():
    model = build(n_layers=2)
    w = read(model, fold=True)
    scores = composition_scores(model, "K")
    a = (w.W_V[0, 1] @ w.W_O[0, 1]).double()
    b = (w.W_Q[1, 0] @ w.W_K[1, 0].T).double()  # its transpose's: both sides of the key
    ga, gb = a.T @ a, b.T @ b
    d, ta, tb = w.width, ga.trace(), gb.trace()
    spread = (ga.pow(2).sum() - ta**2 / d) * (gb.pow(2).sum() - tb**2 / d)
    null = Beta.of(1 / d, 2 * spread / ((d - 1) * (d + 2) * ta**2 * tb**2))
    one = scores["0.1", "1.0"]
    assert d == 15
    assert one.null_mean.item() == pytest.approx(null.root_mean.item(), rel=1e-4)
    assert one.null_sd.item() == pytest.approx(null.root_sd.item(), rel=1e-3)


def test_dead_heads_score_zero_and_say_so():
    model = build(n_layers=2, norm="none")
    with torch.no_grad():
        model.blocks[0].attn.W_V[1] = 0
        model.blocks[1].attn.W_Q[0] = 0
    scores = composition_scores(model, "Q")
    assert scores.dead[0, 1, 1].all()
    assert scores.dead[0, :, 1, 0].all()
    assert not scores.dead[0, 0, 1, 1]
    for name in ("scores", "z", "null_sd", "band", "null_mean"):
        assert getattr(scores, name).isfinite().all()
    assert (scores.z[0, 1], scores["0.1", "1.1"].value, scores["0.1", "1.1"].p) == (pytest.approx(0), 0, 1)
    assert scores.to_frame()["dead"].tolist().count(True) == 3


def test_an_aligned_pair_stands_out_and_ranks_first():
    model = fresh(n_layers=3, norm="none")
    with torch.no_grad():
        model.blocks[2].attn.W_K[1] = model.blocks[0].attn.W_O[1].T
    scores = composition_scores(model, "K")
    assert scores.ranked()[0] == ((0, 1), (2, 1))
    assert scores.z[0, 1, 2, 1] > 5
    frame = scores.to_frame()
    assert len(frame) == 12
    assert set(frame.columns) >= {"writer", "reader", "score", "null_mean", "null_sd", "z", "p", "low", "high"}
    assert scores.top(1)[["writer", "reader"]].to_numpy().tolist() == [["0.1", "2.1"]]
    assert "0.1" in repr(scores).splitlines()[2]
    assert "<table" in scores._repr_html_()


@pytest.mark.parametrize("kind", KINDS)
def test_composed_factors_multiply_to_the_dense_product(kind):
    model = build(n_layers=2)
    w = read(folded(model))
    ov, qk = w.W_V @ w.W_O, w.W_Q @ w.W_K.mT
    expected = {
        "Q": w.W_E @ ov[0, 1] @ qk[1, 0] @ w.W_E.T,
        "K": w.W_E @ qk[1, 0] @ ov[0, 1].T @ w.W_E.T,
        "V": w.W_E @ ov[0, 1] @ ov[1, 0] @ w.W_U,
    }[kind]
    circuit = composed(model, kind, "0.1", "1.0")
    assert circuit.left.shape[1] == 8
    assert circuit.basis == "folded"
    assert torch.allclose(circuit.dense(), expected, atol=1e-4)


@pytest.mark.parametrize("make", [lambda: build(norm="none", d_mlp=0), native_bridge])
def test_virtual_heads_are_products_of_patterns_and_of_ov_circuits(make):
    model = make()
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    first, second = (cache[f"blocks.{layer}.attn.hook_pattern"][0] for layer in (0, 1))
    found = list(virtual_heads(model, TOKENS))
    assert [(v.writer, v.reader) for v in found] == [((0, a), (1, b)) for a in (0, 1) for b in (0, 1)]
    for v in found:
        assert torch.allclose(v.pattern, second[v.reader[1]] @ first[v.writer[1]], atol=1e-5)
        assert torch.allclose(v.pattern.sum(-1), torch.ones(6), atol=1e-5)
        expected = model.W_V[v.writer] @ model.W_O[v.writer] @ model.W_V[v.reader] @ model.W_O[v.reader]
        assert torch.allclose(v.ov.dense(), expected, atol=1e-4)
        assert len(repr(v)) < 100
        assert len(v.to_frame()) == 6 * 7 // 2
    assert [(v.writer, v.reader) for v in virtual_heads(model, TOKENS, ["0.1"], ["1.0"])] == [((0, 1), (1, 0))]


def test_what_is_undefined_says_so():
    with pytest.raises(Undefined, match="replace the token"):
        composition_scores(build(residual=False), "K")
    with pytest.raises(Undefined, match="fold=False"):
        composition_scores(build(norm="post"), "K")
    composition_scores(build(norm="post"), "K", fold=False)
    scores = composition_scores(build(), "V")
    with pytest.raises(NoSuchPart, match="the reader is not behind the writer"):
        scores["1.0", "0.0"]
    with pytest.raises(NoSuchPart, match=r"'5.0' is no writer here; they go from 0.0 to 1.1"):
        scores["5.0", "1.0"]
    with pytest.raises(NoSuchPart, match="got 1 names"):
        scores["0.0"]
    first = scores.ranked()[0]
    assert scores[first].z == scores.z.max()  # pairs index as they are ranked
    with pytest.raises(NoSuchPart, match="index it by name"):
        scores.value  # noqa: B018
    with pytest.raises(NoSuchPart, match="not in a later layer"):
        composed(build(), "K", "1.0", "0.0")
    one_layer = composition_scores(build(n_layers=1), "K")
    assert len(one_layer.to_frame()) == len(one_layer.ranked()) == 0
    assert composition_scores(build(n_layers=0), "K").scores.shape == (0, 2, 0, 2)
    for n_layers in (0, 1):
        for nothing in compositions(build(n_layers=n_layers)).values():
            assert len(nothing.to_frame()) == 0
            assert nothing.scores.shape == (n_layers, 2, n_layers, 2)


def test_bands_of_many_pairs_are_interpolated_to_a_thousandth(monkeypatch):
    null = Beta.of(1 / 64, torch.logspace(-9, -3.5, 2_000, dtype=torch.float64))
    quick = null.band()
    monkeypatch.setattr(circuits.nulls, "GRID", 10_000)
    assert torch.allclose(quick, null.band(), rtol=2e-3)


@pytest.mark.parametrize("make", [
    lambda: fresh(d_model=1, n_heads=1, norm="none"), lambda: fresh(d_model=2, n_heads=1), lambda: fresh(d_head=24),
])  # fmt: skip
def test_where_nothing_is_left_to_align_the_null_is_one_number(make):
    for scores in compositions(make()).values():
        for name in ("scores", "null_mean", "null_sd", "band", "p", "z"):
            assert getattr(scores, name).isfinite().all(), name
    one = Beta.of(1 / 8, torch.zeros(3))
    assert torch.allclose(one.band(), torch.full((2, 3), 1 / 8, dtype=torch.float64))
    assert (one.p(torch.full((3,), 1 / 8)) == 1).all()
    assert (one.root_sd == 0).all()
