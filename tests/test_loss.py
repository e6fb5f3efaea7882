"""The training loss against torch's own, in value and gradient, whole and in pieces."""

import math

import pytest
import torch
import torch.nn.functional as F
from support import build

from workbench import loss
from workbench.loss import next_token_loss

ROWS, WIDTH, WORDS = 50, 6, 11


def parts(seed: int = 0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    residual, W_U, b_U = (
        torch.randn(shape, generator=generator, dtype=dtype) for shape in ((ROWS, WIDTH), (WIDTH, WORDS), (WORDS,))
    )
    return residual, W_U, b_U, torch.randint(WORDS, (ROWS,), generator=generator)


@pytest.mark.parametrize("rows_at_once", [ROWS, 7, 1])
def test_value_and_gradients_are_torchs(monkeypatch, rows_at_once):
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", rows_at_once * WORDS)
    *weights, targets = parts()
    ours = residual, W_U, b_U = [weight.clone().requires_grad_() for weight in weights]
    mine = next_token_loss(residual, W_U, b_U, targets)
    theirs = residual, W_U, b_U = [weight.clone().requires_grad_() for weight in weights]
    expected = F.cross_entropy(residual @ W_U + b_U, targets)
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=0)
    (3 * mine).backward()
    (3 * expected).backward()
    for weight, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-10, atol=1e-14)


def test_a_word_held_impossible_costs_its_distance_and_not_infinity(monkeypatch):
    """exp(−200) is 0 in float32; the loss is 200 all the same."""
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", 1)
    residual, W_U = torch.ones(2, 1), torch.tensor([[0.0, 200.0]])
    assert next_token_loss(residual, W_U, torch.zeros(2), torch.tensor([0, 0])).item() == 200


def test_a_fixed_bias_and_weights_that_need_no_gradient():
    assert next_token_loss(*parts()).requires_grad is False


@pytest.mark.parametrize("options", [{}, {"tied_unembedding": True}, {"norm": "post"}, {"n_layers": 0}])
def test_a_model_is_trained_on_the_loss_that_its_logits_have(monkeypatch, options):
    """In pieces of three rows; a tied unembedding collects both of its gradients."""
    model, other = build(**options).double(), build(**options).double()
    tokens = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", 3 * 20)
    mine = model.training_loss(tokens)
    mine.backward()
    expected = F.cross_entropy(other(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    expected.backward()
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=0)
    for (name, parameter), twin in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad, rtol=1e-9, atol=1e-13, msg=name)


def test_a_uniform_guess_costs_the_logarithm_of_the_vocabulary():
    *_, targets = parts()
    guess = next_token_loss(torch.zeros(ROWS, WIDTH), torch.zeros(WIDTH, WORDS), torch.zeros(WORDS), targets)
    assert guess.item() == pytest.approx(math.log(WORDS), rel=1e-6)


def test_autocast_and_torchs_transforms_take_torchs_own_loss(monkeypatch):
    """They cannot enter an operation with a gradient of its own."""
    model = build().train()
    tokens = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", 3 * 20)
    expected = model.training_loss(tokens)
    expected.backward()
    weights = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}

    class Lossy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model.training_loss(tokens)

    slopes = torch.func.grad(lambda given: torch.func.functional_call(Lossy(), given, tokens))(weights)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(slopes[f"model.{name}"], weight.grad, rtol=1e-4, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        low = model.training_loss(tokens)
    low.backward()
    torch.testing.assert_close(low.item(), expected.item(), rtol=0.02, atol=0)
