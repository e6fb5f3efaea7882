"""Spectra against dense eigenvalues, copying against hand-built heads, nulls against draws of their own."""

import pytest
import torch
from support import build, fresh, from_native, gpt2_bridge, native_bridge

import circuits.spectra
import workbench as wb
from circuits.composition import composed
from circuits.errors import NoSuchPart, Undefined
from circuits.matrices import Circuit, ov_circuit
from circuits.nulls import random_frames
from circuits.spectra import composition_spectrum, copying_score, eigenvalues, positivity, singular_directions
from circuits.surface import folded


def largest(dense, n):
    values = torch.linalg.eigvals(dense.double())
    return values[values.abs().argsort(descending=True)[:n]]


def same_set(a, b, tolerance):
    """Every value of a lies by one of b and the other way round."""
    distance = (a[:, None] - b[None]).abs()
    return max(distance.min(0).values.max(), distance.min(1).values.max()) <= tolerance


@pytest.mark.parametrize("make", [build, native_bridge, gpt2_bridge, lambda: build(norm="none", bias_qkv=False)])
@pytest.mark.parametrize("kind", ["OV", "QK"])
def test_factored_eigenvalues_are_the_dense_ones_that_are_not_zero(make, kind):
    model = folded(make())
    for layer in range(2):
        for head in range(2):
            name = f"{layer}.{head}"
            if kind == "OV":
                dense = ov_circuit(model, name).dense()
            else:
                dense = model.W_E @ model.W_Q[layer, head] @ model.W_K[layer, head].T @ model.W_E.T
            mine = eigenvalues(model, kind)[layer, head]
            assert mine.shape == (8,)
            assert same_set(mine, largest(dense, 8), 1e-4 * dense.abs().max())


def test_counting_signs_on_the_dense_matrix_would_be_wrong():
    """A perfectly copying head of rank 16 in 64 dimensions."""
    model = copier(d_model=64, d_head=16, d_vocab=64, share=16)
    dense = torch.linalg.eigvals(ov_circuit(model, "0.0").dense().double())
    assert (dense.real > 1e-6).double().mean() < 0.65
    assert (eigenvalues(model)[0, 0].real > 0).all()
    assert positivity(eigenvalues(model)[0, 0]) == pytest.approx(1, abs=1e-9)


def copier(d_model=24, d_head=8, d_vocab=24, share=8, sign=1.0):
    """One head that writes back (or erases) the first `share` dimensions of one-hot embeddings; W_U = W_Eᵀ."""
    model = fresh(n_layers=1, n_heads=1, d_model=d_model, d_head=d_head, d_vocab=d_vocab, d_mlp=0, norm="none",
                  positions="none", bias_qkv=False)  # fmt: skip
    with torch.no_grad():
        model.W_E.copy_(torch.eye(d_vocab, d_model))
        model.W_U.copy_(torch.eye(d_model, d_vocab))
        model.blocks[0].attn.W_V[0] = torch.eye(d_model, d_head) * (torch.arange(d_model) < share)[:, None]
        model.blocks[0].attn.W_O[0] = sign * torch.eye(d_head, d_model)
    return model


def test_a_copying_head_scores_one_and_an_erasing_one_minus_one():
    full = {"d_model": 8, "d_head": 8, "d_vocab": 8, "share": 8}
    copying, erasing = copying_score(copier(**full)), copying_score(copier(**full, sign=-1.0))
    assert copying.eigenvalue["0.0"].value == pytest.approx(1, abs=1e-6)
    assert copying.argmax["0.0"].value == 1
    # one entry of 1 among seven of 0 stands √7 standard deviations above their mean
    assert copying.diagonal["0.0"].value == pytest.approx(7**0.5, abs=1e-5)
    assert erasing.eigenvalue["0.0"].value == pytest.approx(-1, abs=1e-6)
    assert erasing.argmax["0.0"].value == 0
    assert erasing.diagonal["0.0"].value == pytest.approx(-(7**0.5), abs=1e-5)
    assert copying.eigenvalue["0.0"].p <= 0.05
    assert set(copying.to_frame()["measure"]) == {
        "copying, eigenvalues", "copying, diagonal arg-max", "copying, diagonal z",
    }  # fmt: skip


def test_at_a_head_width_of_eight_chance_reaches_far():
    """A bare .5 means nothing there, and no z can be large: 199 draws for each of 8 fresh heads."""
    score = copying_score(fresh(n_layers=2, n_heads=4, d_model=32)).eigenvalue
    assert (score.null_sd > 0.1).all()
    assert (score.band[1] > 0.2).all()
    assert ((1 - score.null_mean) / score.null_sd < 10).all()


def test_dead_heads_copy_nothing_and_say_so():
    model = copier()
    with torch.no_grad():
        model.blocks[0].attn.W_O[0] = 0
    for score in vars(copying_score(model)).values():
        assert (score["0.0"].value, score["0.0"].p.item(), bool(score["0.0"].dead)) == (0, 1, True)
        assert score.z.isfinite().all()
    assert positivity(torch.zeros(3, 4, dtype=torch.complex128)).tolist() == [0, 0, 0]


def test_the_diagonal_measures_are_those_of_the_dense_matrix(monkeypatch):
    circuit = Circuit(torch.randn(30, 5), torch.randn(5, 30), "row", "column", "raw")
    dense = circuit.dense()
    standard = (dense - dense.mean(1, keepdim=True)) / dense.std(1, correction=0, keepdim=True)
    for chunk in (40, 2**25):
        monkeypatch.setattr(circuits.matrices, "CHUNK", chunk)
        share, mean_z, _ = circuits.spectra._diagonal_measures(circuit)
        assert share == pytest.approx((dense.argmax(1) == torch.arange(30)).float().mean().item())
        assert mean_z == pytest.approx(standard.diagonal().mean().item(), abs=1e-5)


def test_the_permuted_null_has_the_moments_of_random_matchings():
    """20,000 permutations; means within 3 standard errors, standard deviations within 3 %."""
    generator = torch.Generator().manual_seed(0)
    circuit = Circuit(
        torch.randn(30, 5, generator=generator), torch.randn(5, 30, generator=generator), "row", "column", "raw"
    )
    dense = circuit.dense()
    standard = (dense - dense.mean(1, keepdim=True)) / dense.std(1, correction=0, keepdim=True)
    order = torch.rand(20_000, 30, generator=generator).argsort(1)
    hits = (order == dense.argmax(1)).double().mean(1)
    diagonal = standard[torch.arange(30), order].double().mean(1)
    _, _, moments = circuits.spectra._diagonal_measures(circuit)
    for drawn, (mean, sd) in zip((hits, diagonal), moments, strict=True):
        assert abs(drawn.mean().item() - mean) <= 3 * sd / 20_000**0.5
        assert drawn.std().item() == pytest.approx(sd, rel=0.03)


def test_a_large_vocabulary_has_the_permuted_null_and_the_same_values(monkeypatch):
    model = build(norm="none")
    small = copying_score(model)
    monkeypatch.setattr(circuits.spectra, "LARGE", 5)
    large = copying_score(model)
    for name in ("eigenvalue", "argmax", "diagonal"):
        assert torch.allclose(getattr(small, name).scores, getattr(large, name).scores, atol=1e-5)
    assert "matched" in large.diagonal.null
    assert "turned" in small.diagonal.null
    assert ((large.diagonal.p >= 0) & (large.diagonal.p <= 1)).all()


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
def test_the_composed_spectrum_is_that_of_the_dense_composed_matrix(kind):
    model = build(norm="none", bias_qkv=False)
    spectrum = composition_spectrum(model, kind, "0.1", "1.0", fold=False)
    expected = largest(composed(model, kind, "0.1", "1.0", fold=False).dense(), 8)
    assert same_set(spectrum.eigenvalues, expected, 1e-3 * expected.abs().max())
    assert spectrum.positivity.value == pytest.approx(positivity(expected).item(), abs=1e-3)
    assert f"0.1 → {kind} of 1.0: positivity" in repr(spectrum)


def test_the_drawn_null_of_positivity_is_that_of_whole_rotations():
    """Turning all of d_model, written out: mean and s.d. over 2,000 draws within 4 standard errors of the library's."""
    model = build(norm="none", bias_qkv=False, n_layers=1)
    score = copying_score(model, fold=False, draws=2_000).eigenvalue["0.0"]
    turn = random_frames(2_000, 16, 16, torch.Generator().manual_seed(9))
    small = model.W_O[0, 0] @ turn @ model.W_U @ model.W_E @ model.W_V[0, 0]
    drawn = positivity(torch.linalg.eigvals(small.detach().double()))
    assert score.null_mean.item() == pytest.approx(drawn.mean().item(), abs=4 * drawn.std().item() * (2 / 2_000) ** 0.5)
    assert score.null_sd.item() == pytest.approx(drawn.std().item(), rel=0.08)


def test_trained_induction_heads_copy_and_match_what_a_previous_token_head_moved():
    """The published picture: positive OV spectra in layer 1, a positive K form for the pair; and for Q it is not."""
    model = wb.load("induction-2-attn").model
    copying = copying_score(model)
    assert (copying.eigenvalue.scores[1] > 0.9).all()
    assert copying.eigenvalue.outside[1].all()
    for head in range(4):
        assert composition_spectrum(model, "K", "0.0", (1, head)).positivity.value > 0.95
        assert composition_spectrum(model, "Q", "0.0", (1, head)).positivity.value < 0.5


@pytest.mark.parametrize("circuit", ["OV", "QK"])
def test_singular_directions_are_those_of_the_dense_matrix(circuit):
    model = build(norm="none", bias_qkv=False)
    found = singular_directions(model, "1.1", circuit, n=8, tokens=3, fold=False)
    dense = model.W_V[1, 1] @ model.W_O[1, 1] if circuit == "OV" else model.W_Q[1, 1] @ model.W_K[1, 1].T
    u, s, vh = torch.linalg.svd(dense)
    assert torch.allclose(found.values, s[:8], atol=1e-5)
    assert found.share.sum() == pytest.approx(1, abs=1e-5)
    low, high = found.share_by_chance[0]  # of the strongest of eight, for random factors: far above 1/8
    assert 0.15 < low < found.share[0] < high < 0.6
    centred = model.W_E - model.W_E.mean(0)
    for i in range(3):
        reads, writes = centred @ u[:, i], vh[i] @ model.W_U if circuit == "OV" else centred @ vh[i]
        ends = {tuple(reads.topk(3).indices.tolist()), tuple((-reads).topk(3).indices.tolist())}
        assert {tuple(e) for e in found.reads[i].tolist()} == ends
        first = 0 if tuple(reads.topk(3).indices.tolist()) == tuple(found.reads[i, 0].tolist()) else 1
        assert writes.topk(3).indices.tolist() == found.writes[i, first].tolist()  # positive goes with positive
    names = [f"w{i}" for i in range(20)]
    assert found.to_frame(names)["reads"].iloc[0].split()[0] == names[found.reads[0, 0, 0]]


def test_a_bridge_and_our_model_with_its_weights_have_the_same_spectra():
    native = native_bridge()
    ours = from_native(native)
    for kind in ("OV", "QK"):
        assert torch.allclose(positivity(eigenvalues(native, kind)), positivity(eigenvalues(ours, kind)), atol=1e-3)
    a, b = copying_score(native), copying_score(ours)
    assert torch.allclose(a.eigenvalue.scores, b.eigenvalue.scores, atol=1e-3)
    assert torch.allclose(a.diagonal.scores, b.diagonal.scores, atol=1e-3)


def test_what_is_undefined_says_so():
    with pytest.raises(Undefined, match="a vocabulary of one token"):
        copying_score(build(d_vocab=1))
    assert eigenvalues(build(d_vocab=1)).isfinite().all()
    with pytest.raises(NoSuchPart, match="not in a later layer"):
        composition_spectrum(build(), "K", "1.0", "0.0")
    empty = copying_score(build(n_layers=0))
    assert empty.eigenvalue.scores.shape == (0, 2)
    assert len(empty.to_frame()) == 0


def test_hits_of_a_large_vocabulary_are_a_count():
    """A normal null would call three hits extraordinary: they happen by chance in one of twelve."""
    dead = torch.tensor(False)
    three, four = (circuits.spectra._hits(k / 5_000, (1 / 5_000, 1 / 5_000), 5_000, "raw", dead) for k in (3, 4))
    assert three.p.item() == pytest.approx(2 * 0.0803, abs=1e-3)
    assert not three.outside
    assert four.outside
    assert four.band.tolist() == [0, pytest.approx(3 / 5_000)]


def test_spectra_are_tidy_and_few_draws_are_refused():
    frame = composition_spectrum(build(), "K", "0.0", "1.1").to_frame()
    assert frame[["writer", "kind", "reader"]].to_numpy().tolist() == [["0.0", "K", "1.1"]]
    with pytest.raises(Undefined, match="2 draws do not reach the ends"):
        copying_score(build(), draws=2)
    with pytest.raises(NoSuchPart, match="at least one of both"):
        singular_directions(build(), "0.0", n=0)
