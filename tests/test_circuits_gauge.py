"""No score depends on how a model is written down.

A model without LayerNorm computes the same function when its residual stream is rotated, when W_Q and W_K (or W_V and
W_O) are split differently, and when its biases live in a dimension that holds the constant 1. Every score must be the
same number then (drawn nulls are other draws, so only closed ones are compared).
"""

import pytest
import torch
from support import biases_in_a_dimension, build, refactored, rotated

from circuits.composition import KINDS, composition_scores
from circuits.heads import head_scores, in_context_learning_score, qk_trace
from circuits.matrices import direct_path, ov_circuit, qk_circuit
from circuits.memory import bandwidth, memory_management
from circuits.spectra import composition_spectrum, copying_score, eigenvalues, positivity, singular_directions
from circuits.trigrams import head_skip_trigrams, skip_trigrams

GAUGES = {"rotated": rotated, "refactored": refactored, "biases in a dimension": biases_in_a_dimension}
TOKENS = torch.randint(20, (6, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def original():
    return build(norm="none", d_vocab=20)


@pytest.fixture(scope="module", params=list(GAUGES))
def other(original, request):
    model = GAUGES[request.param](original)
    with torch.no_grad():
        assert torch.allclose(model(TOKENS), original(TOKENS), atol=1e-4)  # the same function …
    assert any(  # … written down differently
        a.shape != b.shape or not torch.allclose(a, b)
        for a, b in zip(model.parameters(), original.parameters(), strict=False)
    )
    return model


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_composition(original, other, kind, fold):
    a, b = (composition_scores(model, kind, fold=fold) for model in (original, other))
    for name in ("scores", "null_mean", "null_sd", "band", "p"):
        assert torch.allclose(getattr(a, name), getattr(b, name), atol=1e-4), name


@pytest.mark.parametrize("fold", [True, False])
def test_spectra_and_copying(original, other, fold):
    for kind in ("OV", "QK"):
        a, b = (positivity(eigenvalues(model, kind, fold=fold)) for model in (original, other))
        assert torch.allclose(a, b, atol=1e-4)
    a, b = (copying_score(model, fold=fold, draws=39) for model in (original, other))
    for name in ("eigenvalue", "argmax", "diagonal"):
        assert torch.allclose(getattr(a, name).scores, getattr(b, name).scores, atol=1e-4), name
    for kind in KINDS:
        a, b = (composition_spectrum(m, kind, "0.1", "1.0", fold=fold, draws=39) for m in (original, other))
        assert a.positivity.value == pytest.approx(b.positivity.value, abs=1e-4)
    a, b = (singular_directions(model, "1.0", fold=fold) for model in (original, other))
    assert torch.allclose(a.values, b.values, rtol=1e-3)


@pytest.mark.parametrize("fold", [True, False])
def test_memory_and_bandwidth(original, other, fold):
    a, b = (memory_management(model, fold=fold, draws=39) for model in (original, other))
    assert torch.allclose(a.erasing.scores, b.erasing.scores, atol=1e-4)
    assert a.neurons is not None and b.neurons is not None
    assert torch.allclose(a.neurons.scores, b.neurons.scores, atol=1e-4)
    a, b = (bandwidth(model, fold=fold) for model in (original, other))
    assert a.width == b.width
    for part, (rank, effective) in a.used.items():
        if fold or part != "unembed":  # raw W_U reads the constant too
            assert b.used[part] == (rank, pytest.approx(effective, rel=1e-3)), part
    for pair, overlap in a.overlap.items():
        assert overlap.value == pytest.approx(b.overlap[pair].value, abs=1e-4)
        assert overlap.null_sd.item() == pytest.approx(b.overlap[pair].null_sd.item(), abs=1e-4)


def test_scores_on_data(original, other):
    a, b = (head_scores(model, draws=39) for model in (original, other))
    for measure in a.measures:
        assert torch.allclose(a[measure].scores, b[measure].scores, atol=1e-3), measure
    a, b = (qk_trace(model) for model in (original, other))
    assert torch.allclose(a.scores, b.scores, rtol=1e-3, atol=1e-2)
    assert torch.allclose(a.null_sd, b.null_sd, rtol=1e-3, atol=1e-2)
    a, b = (in_context_learning_score(model, TOKENS, early=(1, 4), late=(6, 11)) for model in (original, other))
    assert a.value == pytest.approx(b.value, abs=1e-4)


def test_circuits_between_tokens(original, other):
    for head in ("0.0", "1.1"):
        a, b = (qk_circuit(model, head).dense() for model in (original, other))
        assert torch.allclose(a, b, atol=1e-3)
        a, b = (ov_circuit(model, head).dense() for model in (original, other))
        assert torch.allclose(a, b, atol=1e-3)
    a, b = (direct_path(model).dense() for model in (original, other))
    assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("gauge", GAUGES)
def test_skip_trigrams(gauge):
    model = build(norm="none", n_layers=1, d_mlp=0)
    same = GAUGES[gauge](model)
    a, b = skip_trigrams(model, n=10), skip_trigrams(same, n=10)
    assert torch.allclose(a.p, b.p, atol=1e-4)
    a, b = head_skip_trigrams(model, "0.1", n=5), head_skip_trigrams(same, "0.1", n=5)
    assert torch.allclose(a.product, b.product, atol=1e-3)
