"""Attention of few words as one operation: its value against torch's attention, its gradient against differences."""

import torch
import torch.nn.functional as F

from workbench.short import attend_to_few

BATCH, WORDS, HEADS, WIDTH, D_HEAD, SCALE = 3, 7, 2, 12, 5, 0.4


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, WORDS, WIDTH), *3 * [(HEADS, WIDTH, D_HEAD)], *3 * [(HEADS, D_HEAD)]]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def test_the_value_is_torchs():
    x, *given = inputs()
    weights, biases = given[:3], given[3:]
    q, k, v = (torch.einsum("bpm, hmd -> bhpd", x, W) + b[:, None] for W, b in zip(weights, biases, strict=True))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE).transpose(1, 2)
    torch.testing.assert_close(attend_to_few(x, weights, biases, SCALE), expected, rtol=1e-12, atol=1e-12)


def test_the_gradient_is_that_of_finite_differences():
    assert torch.autograd.gradcheck(lambda x, *given: attend_to_few(x, given[:3], given[3:], SCALE), inputs())
