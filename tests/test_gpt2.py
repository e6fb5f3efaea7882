"""GPT-2 of Hugging Face, with random weights, and its copy on the workbench."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from workbench.errors import BadWeights
from workbench.gpt2 import from_gpt2

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


def gpt2(**options: Any) -> GPT2LMHeadModel:
    """A tiny one; biases and LayerNorms, which start at zero and one, random too."""
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 12, "n_layer": 3, "n_head": 3}
    model = GPT2LMHeadModel(GPT2Config(**sizes | options)).eval()  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3, generator=generator)
    return model


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("options", [
    {}, {"activation_function": "relu"}, {"activation_function": "gelu"}, {"scale_attn_weights": False}, {"n_inner": 7},
])  # fmt: skip
@torch.no_grad()
def test_the_copy_computes_the_same_logits_and_loss(options: dict[str, Any]) -> None:
    theirs = gpt2(**options)
    logits, loss = from_gpt2(theirs)(TOKENS, return_type="both")
    expected = theirs(TOKENS, labels=TOKENS)
    assert distance(logits, expected.logits) <= 1e-5
    assert abs(loss.item() - expected.loss.item()) <= 1e-5


@torch.no_grad()
def test_the_copy_has_the_same_residual_stream_and_attention() -> None:
    theirs = gpt2()
    theirs.set_attn_implementation("eager")  # the others do not return their attention
    expected = theirs(TOKENS, output_hidden_states=True, output_attentions=True)
    _, cache = from_gpt2(theirs).run_with_cache(TOKENS)
    for layer in range(3):
        assert distance(cache["resid_pre", layer], expected.hidden_states[layer]) <= 1e-5
        assert distance(cache["pattern", layer], expected.attentions[layer]) <= 1e-6


@torch.no_grad()
def test_the_copy_shares_no_memory_and_no_parameter_is_left_out() -> None:
    theirs = gpt2()
    ours = from_gpt2(theirs)
    before = ours(TOKENS)
    assert ours.n_parameters == sum(p.numel() for p in theirs.parameters())
    for parameter in theirs.parameters():
        parameter.zero_()
    assert torch.equal(ours(TOKENS), before)


@pytest.mark.parametrize("training", [True, False])
def test_the_copy_is_in_the_same_mode_with_the_same_dropout(training: bool) -> None:
    ours = from_gpt2(gpt2().train(training))
    assert ours.training == training
    assert ours.config.dropout == 0.1
    assert torch.equal(ours(TOKENS), ours(TOKENS)) != training


@pytest.mark.parametrize(("options", "words"), [
    ({"activation_function": "silu"}, "silu"),
    ({"tie_word_embeddings": False}, "tied unembedding"),
    ({"scale_attn_by_inverse_layer_idx": True}, "divided by √d_head alone"),
    ({"layer_norm_epsilon": 1e-6}, "ε = 1e-5"),
    ({"attn_pdrop": 0.2}, "one dropout rate"),
])  # fmt: skip
def test_variants_without_an_option_here_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadWeights, match=words) as caught:
        from_gpt2(gpt2(**options))
    assert "\n" not in str(caught.value)
