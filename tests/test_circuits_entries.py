"""Entries of token circuits against dense products and forward passes, their closed null against drawn rotations."""

import pytest
import torch
from support import build, fresh

from circuits import copying_score, eigenvalues, folded, ov_circuit, qk_circuit
from circuits.entries import Which, token_circuit
from circuits.errors import CircuitError, NoSuchPart
from circuits.nulls import random_frames
from circuits.spectra import positivity
from circuits.surface import read
from circuits.turned import spectrum_scores, turned_eigenvalues


@pytest.mark.parametrize("norm", ["none", "pre"])
def test_entries_are_the_folded_circuits_less_their_row_means(norm):
    model = build(norm=norm)
    same = folded(model)
    pairs: list[tuple[Which, torch.Tensor]] = [
        ("OV", ov_circuit(same, "1.1").dense()),
        ("QK", qk_circuit(same, "1.1").dense() / 8**0.5),
    ]
    for circuit, dense in pairs:
        found = token_circuit(model, "1.1", circuit)
        torch.testing.assert_close(
            found.at().values, dense - dense.mean(1, keepdim=True), atol=1e-4, rtol=1e-4, check_dtype=False
        )
        torch.testing.assert_close(found.at([3], slice(0, 5)).values, found.at().values[[3], :5])
        everything = found.at()
        assert found.share_outside() == pytest.approx(everything.outside.float().mean().item())


def test_qk_differences_are_those_of_the_models_own_scores():
    """Without norm and positions, scores before the softmax differ between two sources as the entries say."""
    model = build(n_layers=1, norm="none", positions="none", d_mlp=0)
    tokens = torch.tensor([[4, 9, 13, 2]])
    _, cache = model.run_with_cache(tokens)
    scores = cache["blocks.0.attn.hook_attn_scores"][0, 0, 3]
    entries = token_circuit(model, "0.0", "QK").at([2], [4, 9, 13]).values[0]
    torch.testing.assert_close((scores[:3] - scores[0]).float(), entries - entries[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("circuit", ["OV", "QK"])
def test_the_null_is_that_of_drawn_rotations(circuit):
    model = build(d_head=4)
    w = read(model, fold=True)
    n = 4000
    turn = random_frames(n, w.width, w.width, torch.Generator().manual_seed(0))
    turn = w.written @ turn @ w.written.T
    i, j = 3, 11
    if circuit == "OV":
        outs = w.W_U - w.W_U.mean(1, keepdim=True)
        drawn = (w.W_E[i] @ w.W_V[0, 1] @ w.W_O[0, 1]) @ turn @ outs[:, j]
    else:
        keys = w.W_E @ w.W_K[0, 1] + w.b_K[0, 1]
        key = (keys - keys.mean(0))[j] / 2  # √4
        drawn = (w.W_E[i] @ turn @ w.W_Q[0, 1] + w.b_Q[0, 1]) @ key
    found = token_circuit(model, "0.1", circuit)
    low, high = (x[0, 0].item() for x in (found.at([i], [j]).low, found.at([i], [j]).high))
    error = drawn.std().item() / n**0.5
    assert drawn.mean().item() == pytest.approx((low + high) / 2, abs=4 * error)
    share = ((drawn < low) | (drawn > high)).float().mean().item()
    assert share == pytest.approx(0.05, abs=0.014)  # four standard errors of a share of 5 % of 4,000


def test_a_fresh_model_leaves_the_bands_in_one_entry_of_twenty():
    """The embedding's length is not that of the unembedding's, nothing is aligned, and heads are many."""
    model = fresh(n_layers=2, n_heads=4, d_model=32, d_head=8, d_vocab=60, norm="none")
    shares = [token_circuit(model, (i, j), which).share_outside() for i in (0, 1) for j in range(4)
              for which in ("OV", "QK")]  # fmt: skip
    assert sum(shares) / len(shares) == pytest.approx(0.05, abs=0.01)


def test_a_copying_head_is_outside_on_the_diagonal():
    from workbench.known_answers import copying_head

    found = token_circuit(copying_head().model, "0.0", "OV").at()
    assert found.outside.diagonal().all() and (found.values.argmax(1) == torch.arange(len(found.values))).all()
    dead = build(d_mlp=0)
    dead.blocks[0].attn.W_O.data[0] = 0
    assert not token_circuit(dead, "0.0", "OV").at().outside.any()


def test_what_is_not_there():
    with pytest.raises(NoSuchPart, match=r"no head 5\.0"):
        token_circuit(build(), "5.0")
    with pytest.raises(NoSuchPart, match="20 × 20 tokens"):
        token_circuit(build(), "0.0").at([77])
    with pytest.raises(CircuitError, match="LayerNorm after each addition"):
        token_circuit(build(norm="post"), "0.0")
    with pytest.raises(NoSuchPart, match=r"no head 5\.0"):
        turned_eigenvalues(build(), "5.0")


def test_turned_spectra_are_the_nulls_of_the_scores():
    model = build(d_head=4)
    drawn = turned_eigenvalues(model, "0.0", "OV", draws=199)
    assert drawn.shape == (199, 4)
    copying = copying_score(model, draws=199).eigenvalue["0.0"]  # the same seed and order for the first head
    assert positivity(drawn).mean().item() == pytest.approx(copying.null_mean.item(), abs=1e-4)
    matching = spectrum_scores(model, "QK", draws=199)
    own = positivity(eigenvalues(model, "QK"))
    torch.testing.assert_close(matching.scores.double(), own, atol=1e-5, rtol=1e-5)
    first = positivity(turned_eigenvalues(model, "0.0", "QK", draws=199))
    assert first.mean().item() == pytest.approx(matching["0.0"].null_mean.item(), abs=1e-4)
    moving = spectrum_scores(model, "OV", draws=199)
    torch.testing.assert_close(moving.scores, copying_score(model, draws=39).eigenvalue.scores, atol=1e-5, rtol=1e-5)
    assert moving["0.0"].null_mean.item() == pytest.approx(copying.null_mean.item(), abs=1e-4)
    # of a fresh head the eigenvalues are one more draw: a trace against those of the draws
    trace = eigenvalues(model, "OV")[0, 0].sum().real
    assert abs(trace) < 5 * drawn.sum(1).real.std()


def test_matching_of_no_heads_and_of_a_head_that_matches_itself():
    assert spectrum_scores(build(n_layers=0), "QK").scores.shape == (0, 2)
    model = build(n_layers=1, norm="none", d_mlp=0)
    model.blocks[0].attn.W_K.data[0] = model.blocks[0].attn.W_Q.data[0]
    found = spectrum_scores(model, "QK")
    assert found["0.0"].value == pytest.approx(1, abs=1e-4) and bool(found["0.0"].outside)
