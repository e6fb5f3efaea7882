"""Patterns and probabilities equal the model's own, on ours and on a bridge; threads do not see each other's hooks."""

import threading

import pytest
import torch
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.sources import boot_native

import workbench as wb
from circuits import attention_maps, exclusive
from workbench.recipes import ModelConfig
from workbench.transformer import Transformer

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


def ours(n_layers=2, **options):
    return Transformer(ModelConfig(n_layers=n_layers, n_heads=2, d_model=16, n_ctx=8, d_vocab=11, **options)).eval()


def bridge():
    config = TransformerBridgeConfig(
        d_model=16, d_head=8, n_heads=2, n_layers=2, n_ctx=8, d_vocab=11, d_mlp=32, act_fn="gelu",
        normalization_type="LN", seed=0, architecture="TransformerLensNative",
    )  # fmt: skip
    return boot_native(config).eval()


@pytest.mark.parametrize("make", [ours, bridge])
def test_maps_are_the_models_own(make):
    model = make()
    maps = attention_maps(model, TOKENS)
    logits, cache = model.run_with_cache(TOKENS)
    assert (maps.n_layers, maps.n_heads) == (2, 2)
    for layer in range(2):
        assert torch.equal(maps.patterns[layer], cache[f"blocks.{layer}.attn.hook_pattern"][0])
    assert torch.equal(maps.probabilities, logits[0].softmax(dim=-1))
    assert torch.allclose(maps.patterns.sum(dim=-1), torch.ones(2, 2, 5))
    assert not maps.patterns.triu(1).any()
    assert torch.equal(maps.mean, (maps.patterns[:, 0] + maps.patterns[:, 1]) / 2)
    assert not maps.patterns.requires_grad


def test_a_model_without_layers_has_probabilities_only():
    maps = attention_maps(ours(n_layers=0), TOKENS)
    assert maps.patterns.shape == (0, 2, 5, 5)
    assert maps.mean.shape == (0, 5, 5)
    assert torch.allclose(maps.probabilities.sum(dim=-1), torch.ones(5))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([3, 1]), r"shape \[2\]; expected one prompt, \[1, position\]"),
        (torch.tensor([[3, 1], [1, 3]]), r"shape \[2, 2\]"),
        (torch.zeros(1, 0, dtype=torch.int64), r"shape \[1, 0\]"),
        (torch.tensor([[0.5, 1.0]]), "expected whole numbers"),
        (torch.tensor([[True]]), "expected whole numbers"),
    ],
)
def test_other_tokens_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        attention_maps(ours(), tokens)


def test_too_long_a_prompt_is_the_models_own_error():
    with pytest.raises(wb.WorkbenchError, match="9 tokens"):
        attention_maps(ours(), torch.zeros(1, 9, dtype=torch.int64))


def test_threads_that_share_a_model_get_what_they_would_get_alone():
    model = ours()
    prompts = [torch.tensor([[i, i + 1, i + 2]]) for i in range(8)]
    alone = [attention_maps(model, prompt) for prompt in prompts]
    wrong, start = [], threading.Barrier(2)

    def hammer(order):
        start.wait()
        for _ in range(25):
            for i in order:
                maps = attention_maps(model, prompts[i])
                if not (
                    torch.equal(maps.patterns, alone[i].patterns)
                    and torch.equal(maps.probabilities, alone[i].probabilities)
                ):
                    wrong.append(i)

    threads = [threading.Thread(target=hammer, args=(order,)) for order in (range(8), range(7, -1, -1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_a_forward_pass_waits_for_anothers_hooks():
    model = ours()
    alone = attention_maps(model, TOKENS)
    results, started = [], threading.Event()

    def other():
        started.set()
        results.append(attention_maps(model, TOKENS))

    thread = threading.Thread(target=other)
    zeroed = ("blocks.0.attn.hook_z", lambda z, hook: z * 0)
    with exclusive(model), model.hooks(fwd_hooks=[zeroed]):
        thread.start()
        started.wait()
        thread.join(0.2)
        assert thread.is_alive()  # it waits
        assert not torch.equal(attention_maps(model, TOKENS).patterns[1], alone.patterns[1])  # the same thread need not
    thread.join()
    assert torch.equal(results[0].patterns, alone.patterns)
