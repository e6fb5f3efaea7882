"""Patterns and probabilities equal the model's own, on ours and on a bridge; threads do not see each other's hooks."""

import threading

import pytest
import torch
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.sources import boot_native

import workbench as wb
from circuits import attention_maps, exclusive
from circuits.attention import contribution_maps, head_effects, moved_maps, role_attention
from circuits.errors import CircuitError
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


def by_hand(model, tokens):
    """What every head writes from every source to every destination, [layer, head, destination, source, d_model]."""
    _, cache = model.run_with_cache(tokens)
    written = []
    for layer in range(model.cfg.n_layers):
        value, pattern = cache[f"blocks.{layer}.attn.hook_v"][0], cache[f"blocks.{layer}.attn.hook_pattern"][0]
        heads = [
            [
                [pattern[h, i, j] * (value[j, h] @ model.W_O[layer, h]) for j in range(len(value))]
                for i in range(len(value))
            ]
            for h in range(model.cfg.n_heads)
        ]
        written.append(torch.stack([torch.stack([torch.stack(row) for row in rows]) for rows in heads]))
    return torch.stack(written).detach(), cache


@pytest.mark.parametrize("make", [ours, lambda: ours(norm="post"), lambda: ours(value_output="value"), bridge])
def test_weighted_by_value_norm_is_the_norm_of_what_is_written(make):
    model = make()
    maps = moved_maps(model, TOKENS)
    written, _ = by_hand(model, TOKENS)
    assert maps.measure == "moved"
    assert torch.allclose(maps.patterns, written.norm(dim=-1), atol=1e-5)
    assert torch.equal(maps.together, maps.patterns.mean(dim=1))


@pytest.mark.parametrize("make", [ours, lambda: ours(norm="none"), lambda: ours(positions="shortformer"), bridge])
@pytest.mark.parametrize("foil", [None, 7])
def test_contributions_are_the_direct_logits_of_transformer_lens(make, foil):
    model = make()
    maps = contribution_maps(model, TOKENS, 2, foil)
    written, cache = by_hand(model, TOKENS)
    direction = model.W_U[:, 2] - (model.W_U.mean(1) if foil is None else model.W_U[:, foil])
    with torch.no_grad():
        if model.cfg.normalization_type is not None:
            scale = cache["ln_final.hook_scale"][0][:, None]
            gain = dict(model.named_parameters()).get("ln_final.w", torch.ones(16))
            written = (written - written.mean(-1, keepdim=True)) / scale * gain
        assert torch.allclose(maps.patterns, written @ direction, atol=1e-5)
    assert torch.equal(maps.together, maps.patterns.sum(dim=1))


def test_contributions_add_up_to_the_logit_with_the_rest():
    """Heads of all layers, embedding, positions, output biases: without feed-forward layers that is everything."""
    model = ours(d_mlp=0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    maps, at = contribution_maps(model, TOKENS, 4, 9), 3
    logits, cache = model.run_with_cache(TOKENS)
    rest = (
        cache["hook_embed"][0, at]
        + cache["hook_pos_embed"][0, at]
        + model.blocks[0].attn.b_O
        + model.blocks[1].attn.b_O
    )
    rest = (rest - rest.mean()) / cache["ln_final.hook_scale"][0, at] * model.ln_final.w + model.ln_final.b
    direct = (rest @ (model.W_U[:, 4] - model.W_U[:, 9]) + model.b_U[4] - model.b_U[9]).detach()
    logits, total = logits.detach(), float(maps.patterns[:, :, at].sum() + direct)
    assert total == pytest.approx(float(logits[0, at, 4] - logits[0, at, 9]), abs=1e-4)


def test_contributions_need_a_sum_of_paths_and_a_token():
    with pytest.raises(CircuitError, match="LayerNorm after each addition"):
        contribution_maps(ours(norm="post"), TOKENS, 0)
    with pytest.raises(CircuitError, match="no token 11: the vocabulary has 11"):
        contribution_maps(ours(), TOKENS, 11)


def test_a_heads_effect_is_what_the_logit_loses_without_it():
    model, reference = ours(), torch.randint(11, (6, 7), generator=torch.Generator().manual_seed(1))
    effects = head_effects(model, TOKENS, -2, 2, 7, reference=reference)
    clean = model(TOKENS)[0, -2]
    _, usual = model.run_with_cache(reference[:, :5])
    for layer in range(2):
        for head in range(2):

            def cut(z, hook, layer=layer, head=head):
                z[:, :, head] = usual[f"blocks.{layer}.attn.hook_z"][:, :, head].mean(0)
                return z

            without = model.run_with_hooks(TOKENS, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", cut)])[0, -2]
            expected = ((clean - without)[2] - (clean - without)[7]).detach()
            assert float(effects.scores[layer, head]) == pytest.approx(float(expected), abs=1e-5)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())
    assert bool((effects.band[0] <= effects.band[1]).all()) and bool((effects.null_sd > 0).all())


def test_without_a_reference_a_head_writes_nothing_and_a_dead_one_loses_nothing():
    model = ours(norm="none", d_mlp=0)
    with torch.no_grad():
        for name in ("W_V", "b_V"):
            getattr(model.blocks[1].attn, name)[0] = 0
    effects = head_effects(model, TOKENS, 4, 3)
    _, cache = model.run_with_cache(TOKENS)
    last = cache["blocks.1.attn.hook_z"][0, 4, 1] @ model.W_O[1, 1]  # nothing comes after it
    expected = (last @ (model.W_U[:, 3] - model.W_U.mean(1))).detach()
    assert float(effects.scores[1, 1]) == pytest.approx(float(expected), abs=1e-5)
    assert bool(effects.dead[1, 0]) and float(effects.scores[1, 0]) == 0 and float(effects.p[1, 0]) == 1


def test_under_its_null_an_effect_on_the_last_layer_is_even():
    """With no norm behind it, a change turned at random adds to a logit: mean 0, variance |Δ|² |u|² / d_model."""
    model = ours(norm="none", d_mlp=0, n_layers=1)
    effects = head_effects(model, TOKENS, 4, 3, 5, draws=999)
    _, cache = model.run_with_cache(TOKENS)
    for head in range(2):
        change = (cache["blocks.0.attn.hook_z"][0, 4, head] @ model.W_O[0, head]).norm()
        sd = (change * (model.W_U[:, 3] - model.W_U[:, 5]).norm() / 16**0.5).detach()
        assert float(effects.null_sd[0, head]) == pytest.approx(float(sd), rel=0.1)  # 999 draws: 2.2 %
        assert abs(float(effects.null_mean[0, head])) < 4 * float(sd) / 999**0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": 5}, "no position 5: the prompt has 5 tokens"),
        ({"answer": 11}, "no token 11"),
        ({"reference": torch.zeros(2, 4, dtype=torch.int64)}, "reference prompts of 4 tokens; expected at least 5"),
        ({"draws": 10}, "10 draws do not reach"),
    ],
)
def test_effects_of_what_is_not_there(options, message):
    with pytest.raises(ValueError, match=message):
        head_effects(ours(), TOKENS, **{"position": 0, "answer": 0} | options)


def test_role_means_are_means_of_the_models_patterns():
    model, tokens = ours(), torch.randint(11, (40, 6), generator=torch.Generator().manual_seed(0))
    roles, clusters = {"b": 3, "a": 1, "answer": 5, "last": 5}, [str(i % 8) for i in range(40)]
    found = role_attention(model, tokens, roles, clusters)
    assert found.roles == ("a", "b", "answer = last") and found.sources[-1] == "other words"
    _, cache = model.run_with_cache(tokens)
    for layer in range(2):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        for head in (None, 1):
            mean, error = found.mean(layer, head)
            rows = pattern.mean(1) if head is None else pattern[:, head]
            for i, destination in enumerate((1, 3, 5)):
                for j, source in enumerate((1, 3, 5)):
                    assert float(mean[i, j]) == pytest.approx(float(rows[:, destination, source].mean()), abs=1e-6)
            assert torch.allclose(mean.sum(1), torch.ones(3), atol=1e-6)
            values = rows[:, 5, 3].double()
            sums = torch.stack([(values - values.mean())[c::8].sum() for c in range(8)])
            assert float(error[2, 1]) == pytest.approx(float((sums.square().sum() * 8 / 7).sqrt() / 40), rel=1e-5)
    expected = torch.tensor([[1 / 2, 0, 0, 1 / 2], [1 / 4, 1 / 4, 0, 1 / 2], [1 / 6, 1 / 6, 1 / 6, 1 / 2]])
    assert torch.allclose(found.even, expected)


def test_role_means_need_roles():
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(CircuitError, match="expected at least one, each at one of 0 … 3"):
        role_attention(ours(), tokens, {})
    with pytest.raises(CircuitError, match="'x': 4"):
        role_attention(ours(), tokens, {"x": 4})
    with pytest.raises(ValueError, match=r"shape \[0, 4\]"):
        role_attention(ours(), tokens[:0], {"x": 1})
