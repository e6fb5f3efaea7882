"""Around the mathematics of `Transformer`: dropout, tied and initial weights, prompts, and weights that do not fit."""

import copy
from typing import Any

import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from workbench.errors import BadPrompt, BadRecipe, BadWeights, UnknownName
from workbench.recipes import ModelConfig
from workbench.transformer import Transformer
from workbench.vocabulary import Vocabulary

SMALL: dict[str, Any] = {"n_layers": 2, "n_heads": 2, "d_model": 8, "n_ctx": 6, "d_vocab": 7}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 0], [2, 6, 5, 3, 5, 1]])


def build(seed: int = 0, **options: Any) -> Transformer:
    return Transformer(ModelConfig(**SMALL | options), seed=seed).eval()


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


# Training: dropout, tied weights, initial values


def test_dropout_acts_in_training_alone() -> None:
    dropping, plain = build(dropout=0.5), build()
    assert torch.equal(dropping(TOKENS), plain(TOKENS))
    dropping.train()
    assert distance(dropping(TOKENS), dropping(TOKENS)) > 0.01
    _, cache = dropping.run_with_cache(TOKENS)
    for name in ("blocks.0.hook_resid_pre", "blocks.1.hook_attn_out", "blocks.1.hook_mlp_out"):
        assert 0.2 < (cache[name] == 0).float().mean() < 0.8, name
    assert distance(cache["z", 1], torch.einsum("bhqk, bkhd -> bqhd", cache["pattern", 1], cache["v", 1])) > 0.01
    plain.train()
    assert torch.equal(plain(TOKENS), plain(TOKENS))


def test_tied_weights_are_one_weight_also_in_a_copy() -> None:
    original = build(tied_unembedding=True, query_key="tied")
    assert "unembed.W_U" not in original.state_dict()
    assert "blocks.0.attn.W_K" not in original.state_dict()
    before, model = original(TOKENS), copy.deepcopy(original)
    with torch.no_grad():
        model.W_E.mul_(2)
        model.blocks[0].attn.W_Q.mul_(2)
    assert torch.equal(model.W_U, model.W_E.T)
    assert torch.equal(model.blocks[0].attn.W_K, model.blocks[0].attn.W_Q)
    assert torch.equal(model.W_E, 2 * original.W_E)
    assert torch.equal(original(TOKENS), before)


@pytest.mark.parametrize(("init", "expected"), [
    ("gpt2", {"W_E": 0.02, "W_Q": 0.02, "W_in": 0.02, "W_O": 0.01, "W_out": 0.01, "W_U": 0.02, "b_Q": 0, "b_O": 0}),
    ("normal", {"W_E": 0.1, "W_Q": 0.1, "W_in": 0.1, "W_O": 0.1, "W_out": 0.1, "W_U": 0.1, "b_Q": 0, "b_O": 0}),
    # U(±1/√fan-in) has a standard deviation of 1/√(3 · fan-in), and 256 inputs make W_out's half of the others'.
    ("torch", {"W_E": 1, "W_pos": 1, "W_Q": 192**-0.5, "W_O": 192**-0.5, "W_out": 768**-0.5, "b_in": 192**-0.5}),
])  # fmt: skip
def test_initial_weights_have_the_spread_of_their_scheme(init: str, expected: dict[str, float]) -> None:
    model = build(init=init, init_scale=1.0, d_model=64, n_ctx=64, d_vocab=200)  # √(2 · 2 layers) halves gpt2's writers
    halved = build(init=init, init_scale=0.5, d_model=64, n_ctx=64, d_vocab=200)
    for name, spread in expected.items():
        assert getattr(model, name).std().item() == pytest.approx(spread, rel=0.05), name
        assert distance(getattr(halved, name), getattr(model, name) / 2) <= 1e-6, name


def test_the_seed_alone_decides_the_initial_weights() -> None:
    state = torch.get_rng_state()
    first = build(seed=3).state_dict()
    torch.rand(5)
    second, other = build(seed=3).state_dict(), build(seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embed.W_E"], other["embed.W_E"])
    torch.set_rng_state(state)
    Transformer(ModelConfig(**SMALL), seed=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_configuration_follows_the_weights_to_another_type_or_device() -> None:
    model = build(positions="alibi").double()
    assert (model.cfg.dtype, model(TOKENS).dtype) == (torch.float64, torch.float64)
    assert model.accumulated_bias(2).dtype == torch.float64
    assert model.expanded()(TOKENS).dtype == torch.float64
    assert model.to("meta").cfg.device == "meta"


# Prompts

WORDS = Vocabulary(("a", "b", "c"))


def test_text_is_tokens() -> None:
    model = Transformer(ModelConfig(n_ctx=4, d_vocab=3), WORDS).eval()
    assert torch.equal(model("a c b"), model(torch.tensor([[0, 2, 1]])))
    assert torch.equal(model(["a c", "b b"]), model(torch.tensor([[0, 2], [1, 1]])))
    assert model.to_str_tokens("a c b") == ["a", "c", "b"]
    assert model.to_string(torch.tensor([2, 0])) == "c a"


@pytest.mark.parametrize(("prompt", "error", "words"), [
    ("", BadPrompt, "empty"),
    ([], BadPrompt, "no prompts"),
    ("a d", UnknownName, "'d'"),
    ("a b c a b", BadPrompt, "5 tokens, but this model has positions for 4"),
    (["a", "a b"], BadPrompt, "1, 2 tokens"),
    (torch.zeros(1, 0, dtype=torch.long), BadPrompt, "no tokens"),
    (torch.tensor([[0, 3]]), BadPrompt, "0 … 2"),
    (torch.tensor([[-1]]), BadPrompt, "0 … 2"),
])  # fmt: skip
def test_a_bad_prompt_is_refused_in_one_line(
    prompt: str | list[str] | Int[Tensor, "batch position"], error: type[Exception], words: str
) -> None:
    model = Transformer(ModelConfig(n_ctx=4, d_vocab=3), WORDS)
    with pytest.raises(error, match=words) as caught:
        model(prompt)
    assert "\n" not in str(caught.value)


def test_text_needs_a_vocabulary() -> None:
    with pytest.raises(BadPrompt, match="without a vocabulary"):
        build()("a")


def test_sizes_are_needed() -> None:
    with pytest.raises(BadRecipe, match="n_ctx and d_vocab"):
        Transformer(ModelConfig())


# Weights from elsewhere


OLD = {"blocks.0.attn.mask": torch.ones(6, 6).tril().bool(), "blocks.0.attn.IGNORE": torch.tensor(-1e5)}


def test_weights_of_a_former_hooked_transformer_load_by_name() -> None:
    model, other = build(bias_unembed=False), build(bias_unembed=False, seed=1)
    other.load_state_dict(model.state_dict() | OLD | {"unembed.b_U": torch.zeros(7)})
    assert torch.equal(other(TOKENS), model(TOKENS))


def test_weights_that_only_repeat_what_is_tied_load() -> None:
    model, other = (build(seed=seed, tied_unembedding=True, query_key="tied") for seed in (0, 1))
    repeated = {"unembed.W_U": model.W_U.clone(), "blocks.0.attn.W_K": model.W_Q[0].clone()}
    other.load_state_dict(model.state_dict() | repeated)
    assert torch.equal(other(TOKENS), model(TOKENS))


@pytest.mark.parametrize(("options", "weights", "words"), [
    ({}, {"unembed.b_U": torch.ones(7)}, "unembed.b_U is fixed"),
    ({"query_key": "tied"}, {"blocks.0.attn.W_K": torch.ones(2, 8, 4)}, "blocks.0.attn.W_K is fixed"),
    ({"tied_unembedding": True}, {"unembed.W_U": torch.ones(8, 7)}, "unembed.W_U is fixed"),
    ({}, {"unembed.b_U": torch.zeros(8)}, r"unembed.b_U is \[8\], but this model has \[7\]"),
    ({}, {"embed.W_E": torch.zeros(6, 8)}, r"embed.W_E is \[6, 8\], but this model has \[7, 8\]"),
    ({}, {"blocks.2.attn.W_Q": torch.zeros(2, 8, 4)}, "blocks.2.attn.W_Q has no place"),
    ({"norm": "none"}, {"ln_final.w": torch.ones(8)}, "ln_final.w has no place"),
    ({}, {"embed.W_E": None}, r"embed.W_E is missing .*\(1 of 37 are\)"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_refused_by_name(
    options: dict[str, Any], weights: dict[str, Tensor | None], words: str
) -> None:
    model = build(**options)
    state = {name: weight for name, weight in (model.state_dict() | weights).items() if weight is not None}
    with pytest.raises(BadWeights, match=words) as caught:
        model.load_state_dict(state)
    assert "\n" not in str(caught.value)
