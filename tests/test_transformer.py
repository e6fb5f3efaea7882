"""The mathematics of `Transformer`: what every option computes, checked against torch, brute force and symmetries."""

import math
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from workbench.errors import BadRecipe
from workbench.positions import alibi, sinusoids
from workbench.recipes import ModelConfig
from workbench.short import FEW, attend_to_few
from workbench.transformer import LayerNorm, Transformer

SMALL: dict[str, Any] = {"n_layers": 2, "n_heads": 2, "d_model": 8, "n_ctx": 6, "d_vocab": 7, "init_scale": 0.5}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 0], [2, 6, 5, 3, 5, 1]])


def build(seed: int = 0, **options: Any) -> Transformer:
    """A small model in eval mode, its LayerNorms' weights random too."""
    return randomised(Transformer(ModelConfig(**SMALL | options), seed=seed).eval(), seed)


def randomised(model: Transformer, seed: int = 0) -> Transformer:
    generator = torch.Generator().manual_seed(seed + 100)
    for module in model.modules():
        if isinstance(module, LayerNorm):
            nn.init.normal_(module.w, 1, 0.3, generator=generator)
            nn.init.normal_(module.b, 0, 0.3, generator=generator)
    return model


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# Attention against torch's


@pytest.mark.parametrize("bias", [True, False])
def test_attention_is_multi_head_attention_of_torch(bias: bool) -> None:
    config = ModelConfig(n_heads=4, d_model=32, n_ctx=9, d_vocab=5, bias_qkv=bias, bias_out=bias)
    ours = Transformer(config).blocks[0].attn
    theirs = nn.MultiheadAttention(32, 4, bias=bias, batch_first=True)
    with torch.no_grad():
        inward = [W.transpose(1, 2).flatten(0, 1) for W in (ours.W_Q, ours.W_K, ours.W_V)]  # [head · d_head, d_model]
        theirs.in_proj_weight.copy_(torch.cat(inward))
        theirs.out_proj.weight.copy_(ours.W_O.flatten(0, 1).T)
        if bias:
            theirs.in_proj_bias.copy_(torch.cat([ours.b_Q.flatten(), ours.b_K.flatten(), ours.b_V.flatten()]))
            theirs.out_proj.bias.copy_(ours.b_O)
        x = noise(3, 9, 32)
        expected, _ = theirs(x, x, x, attn_mask=nn.Transformer.generate_square_subsequent_mask(9), need_weights=False)
        assert distance(ours(x, x, x), expected) <= 1e-6


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_block_is_a_transformer_layer_of_torch(norm: Literal["pre", "post"]) -> None:
    ours = build(n_layers=1, norm=norm).blocks[0]
    theirs = nn.TransformerEncoderLayer(8, 2, 32, 0.0, F.gelu, batch_first=True, norm_first=norm == "pre")
    attn, mlp, x = ours.attn, ours.mlp, noise(3, 6, 8)
    inward = [W.transpose(1, 2).flatten(0, 1) for W in (attn.W_Q, attn.W_K, attn.W_V)]
    copied = {
        "self_attn.in_proj_weight": torch.cat(inward),
        "self_attn.in_proj_bias": torch.cat([attn.b_Q.flatten(), attn.b_K.flatten(), attn.b_V.flatten()]),
        "self_attn.out_proj.weight": attn.W_O.flatten(0, 1).T, "self_attn.out_proj.bias": attn.b_O,
        "linear1.weight": mlp.W_in.T, "linear1.bias": mlp.b_in,
        "linear2.weight": mlp.W_out.T, "linear2.bias": mlp.b_out,
        "norm1.weight": ours.ln1.w, "norm1.bias": ours.ln1.b, "norm2.weight": ours.ln2.w, "norm2.bias": ours.ln2.b,
    }  # fmt: skip
    theirs.load_state_dict(copied)
    expected = theirs(x, src_mask=nn.Transformer.generate_square_subsequent_mask(6), is_causal=True)
    assert distance(ours(x, None), expected) <= 1e-5


def test_attention_is_scaled_dot_product_attention_of_torch() -> None:
    model = build(d_model=16, norm="none")
    _, cache = model.run_with_cache(TOKENS)
    q, k, v = (cache[f"blocks.0.attn.hook_{name}"].transpose(1, 2) for name in "qkv")
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    assert distance(cache["blocks.0.attn.hook_z"], expected) <= 1e-6


def test_unscaled_scores_are_root_d_head_times_the_scaled_ones() -> None:
    scores = {}
    for attention in ("softmax", "softmax-unscaled"):
        model = build(attention=attention, n_heads=1, d_head=9)
        scores[attention] = model.run_with_cache(TOKENS)[1]["blocks.0.attn.hook_attn_scores"].tril()
    assert distance(scores["softmax-unscaled"], 3 * scores["softmax"]) <= 1e-5
    assert distance(scores["softmax-unscaled"], scores["softmax"]) > 0.01


def test_options_that_take_weights_away_leave_the_slices_of_each_head() -> None:
    model = build(query_key="identity", value_output="identity", norm="none", n_layers=1)
    _, cache = model.run_with_cache(TOKENS)
    slices = cache["resid_pre", 0].unflatten(-1, (2, 4)).transpose(1, 2)  # [batch, head, position, d_head]
    expected = F.scaled_dot_product_attention(slices, slices, slices, is_causal=True).transpose(1, 2).flatten(2)
    assert distance(cache["attn_out", 0], expected) <= 1e-6
    concatenated = build(value_output="value").run_with_cache(TOKENS)[1]
    assert distance(concatenated["attn_out", 1], concatenated["z", 1].flatten(2)) <= 1e-6
    tied = build(query_key="tied").run_with_cache(TOKENS)[1]
    assert torch.equal(tied["q", 1], tied["k", 1])


def test_without_residual_connections_sub_layers_replace_the_token() -> None:
    model = build(residual=False)
    _, cache = model.run_with_cache(TOKENS)
    block = model.blocks[1]
    assert torch.equal(cache["resid_mid", 1], cache["attn_out", 1])
    assert torch.equal(cache["resid_post", 1], block.mlp(block.ln2(cache["attn_out", 1])))


UNIFORM = {"attention": "uniform", "value_output": "identity", "n_layers": 1, "n_heads": 1, "norm": "none",
           "residual": False, "d_mlp": 0, "positions": "none"}  # fmt: skip


def test_the_uniform_average_is_the_mean_of_all_earlier_tokens_and_oneself() -> None:
    model = build(**UNIFORM)
    _, cache = model.run_with_cache(TOKENS)
    embedded, average = cache["hook_embed"], cache["blocks.0.hook_resid_post"]
    for row in range(len(TOKENS)):
        for position in range(6):
            mean = sum(model.W_E[TOKENS[row, source]] for source in range(position + 1)) / (position + 1)
            assert distance(average[row, position], torch.as_tensor(mean)) <= 1e-6
    lower_triangle = torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None]
    assert distance(average, lower_triangle @ embedded) <= 1e-6
    assert distance(cache["blocks.0.attn.hook_pattern"], lower_triangle.expand(2, 1, 6, 6)) <= 1e-6


def test_the_uniform_average_forgets_order() -> None:
    model = build(**UNIFORM)
    last, shuffled = model(TOKENS)[:, -1], model(TOKENS[:, [4, 2, 0, 3, 1, 5]])[:, -1]
    assert distance(last, shuffled) <= 1e-6
    assert distance(last, model(TOKENS[:, [4, 2, 0, 3, 3, 5]])[:, -1]) > 1e-3  # another token does not go unnoticed


# Every combination of options


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any model that the options allow, small; contradictory ones are drawn again."""
    values: dict[str, st.SearchStrategy[Any]] = {
        "n_layers": st.integers(0, 2), "n_heads": st.sampled_from([1, 2, 4]), "d_model": st.sampled_from([4, 8]),
        "d_head": st.sampled_from([0, 0, 0, 2, 3]), "d_mlp": st.sampled_from([-1, 0, 17]), "n_ctx": st.just(6),
        "d_vocab": st.just(7), "dropout": st.sampled_from([0.0, 0.3]), "init_scale": st.sampled_from([0.5, 1.0]),
        "init": st.sampled_from(["torch", "gpt2", "normal"]),  # by-hand starts from zero: nothing to see
    }  # fmt: skip
    for field in fields(ModelConfig):
        if field.name not in values:
            if get_origin(field.type) is Literal:
                values[field.name] = st.sampled_from(get_args(field.type))
            else:
                assert field.type is bool, f"{field.name} is an option that these tests do not draw"
                values[field.name] = st.booleans()
    try:
        return ModelConfig(**{name: draw(strategy) for name, strategy in values.items()})
    except BadRecipe:
        return reject()


every_model = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.filter_too_much],
)


@every_model
@given(configs(), st.integers(1, 5))
def test_a_later_token_never_changes_an_earlier_logit(config: ModelConfig, first_changed: int) -> None:
    model = randomised(Transformer(config).eval())
    changed = TOKENS.clone()
    changed[:, first_changed:] = (changed[:, first_changed:] + 3) % 7
    before, after = model(TOKENS), model(changed)
    assert distance(before[:, :first_changed], after[:, :first_changed]) <= 1e-5
    if config.residual:  # without it, a layer of dead ReLUs says the same of every token
        assert distance(before[:, first_changed:], after[:, first_changed:]) > 0


@every_model
@given(configs())
def test_weights_survive_a_round_trip_by_name(config: ModelConfig) -> None:
    model, other = randomised(Transformer(config).eval()), Transformer(config, seed=1).eval()
    assert not torch.equal(model(TOKENS), other(TOKENS))
    other.load_state_dict({name: weight.clone() for name, weight in model.state_dict().items()})
    assert torch.equal(model(TOKENS), other(TOKENS))


@every_model
@given(configs())
def test_the_expanded_model_computes_the_same_with_every_weight_free(config: ModelConfig) -> None:
    model = randomised(Transformer(config).eval())
    expanded = model.expanded()
    assert distance(expanded(TOKENS), model(TOKENS)) <= 1e-4
    assert not list(expanded.buffers())
    assert len(expanded.state_dict()) == len(list(expanded.parameters()))  # none shared


@every_model
@given(configs())
def test_watching_changes_nothing(config: ModelConfig) -> None:
    model = randomised(Transformer(config).eval())
    logits, cache = model.run_with_cache(TOKENS)
    assert torch.equal(logits, model(TOKENS))
    assert set(cache.keys()) == set(model.hook_dict) - {
        name for name in model.hook_dict if name.endswith(("_input", "hook_attn_in", "hook_result"))
    }


@every_model
@given(configs())
def test_gradients_reach_every_parameter(config: ModelConfig) -> None:
    # Shortformer's positions enter by queries and keys alone, and neither of these models has any.
    assume(config.positions != "shortformer" or (config.n_layers and config.attention != "uniform"))
    model = randomised(Transformer(config))
    direction = noise(2, 6, 7)
    (model(TOKENS) * direction).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        # A key bias adds the same to all scores of a query, which softmax ignores: its true gradient is zero.
        assert name.endswith("b_K") or parameter.grad.any(), name


# Positions


@pytest.mark.parametrize("positions", ["rotary", "alibi", "none", "learned", "sinusoidal", "shortformer"])
def test_scores_of_equal_tokens_depend_on_distance_alone_only_where_positions_are_relative(positions: str) -> None:
    model = build(positions=positions, d_model=16)
    scores = model.run_with_cache(torch.full((1, 6), 2))[1]["blocks.0.attn.hook_attn_scores"][0]
    shift = distance(scores[:, 1:, 1:].tril(), scores[:, :-1, :-1].tril())
    nearer = distance(scores[:, 5, :5], scores[:, 5, 1:])
    if positions in ("rotary", "alibi"):
        assert shift <= 1e-5
        assert nearer > 0.01
    elif positions == "none":
        assert max(shift, nearer) <= 1e-5
    else:
        assert shift > 0.01


def test_shortformer_adds_positions_to_queries_and_keys_alone() -> None:
    model = build(positions="shortformer")
    _, cache = model.run_with_cache(TOKENS)
    assert torch.equal(cache["resid_pre", 0], cache["hook_embed"])
    attn, x = model.blocks[1].attn, model.blocks[1].ln1(cache["resid_pre", 1])
    expected = {"q": x + model.W_pos, "k": x + model.W_pos, "v": x}
    for name, read in expected.items():
        W, b = getattr(attn, f"W_{name.upper()}"), getattr(attn, f"b_{name.upper()}")
        for head in range(2):
            assert distance(cache[name, 1][:, :, head], read @ W[head] + b[head]) <= 1e-6


@pytest.mark.parametrize("n_heads", [1, 2, 3, 4, 6, 8, 12, 16])
def test_alibi_has_the_slopes_of_bloom(n_heads: int) -> None:
    expected = build_alibi_tensor(torch.ones(1, 7), n_heads, torch.float32).view(n_heads, 7)  # slope · source
    last = alibi(n_heads, 7)[:, -1]  # −slope · (6 − source)
    assert distance(last - last[:, :1], expected) <= 1e-6


def test_sinusoids_are_those_of_attention_is_all_you_need() -> None:
    for p in range(20):
        for i in range(7):
            angle = p / 10_000 ** (2 * (i // 2) / 7)
            assert abs(sinusoids(20, 7)[p, i].item() - (math.cos(angle) if i % 2 else math.sin(angle))) <= 1e-5


@pytest.mark.parametrize("d_mlp", [0, 12])
@pytest.mark.parametrize(("positions", "layers", "order_matters"), [
    ("none", 1, False), ("none", 2, True), ("learned", 1, True), ("rotary", 1, True), ("alibi", 1, True),
])  # fmt: skip
def test_one_layer_without_positions_cannot_see_the_order(
    positions: str, layers: int, order_matters: bool, d_mlp: int
) -> None:
    # Two layers can: the causal mask shows the second one which tokens had seen which.
    model = build(positions=positions, n_layers=layers, d_mlp=d_mlp, init_scale=1.0)
    moved = distance(model(TOKENS)[:, -1], model(TOKENS[:, [3, 0, 4, 2, 1, 5]])[:, -1])
    assert moved > 1e-3 if order_matters else moved <= 1e-5


@pytest.mark.parametrize("positions", ["none", "sinusoidal", "rotary", "alibi"])
def test_positions_without_a_table_go_on_beyond_n_ctx(positions: str) -> None:
    model = build(positions=positions)
    long = torch.cat([TOKENS, TOKENS.flip(1)], dim=1)
    assert model(long).shape == (2, 12, 7)
    assert distance(model(long)[:, :6], model(TOKENS)) <= 1e-5


# Symmetries and sizes


def test_heads_summed_one_by_one_are_heads_concatenated() -> None:
    model = build(n_heads=4)
    concatenated = model.run_with_cache(TOKENS)[1]["blocks.1.hook_attn_out"]
    model.set_use_attn_result(True)
    _, cache = model.run_with_cache(TOKENS)
    result = cache["blocks.1.attn.hook_result"]
    assert result.shape == (2, 6, 4, 8)
    assert distance(result.sum(dim=2) + model.b_O[1], concatenated) <= 1e-6
    assert distance(cache["blocks.1.hook_attn_out"], concatenated) <= 1e-6


@torch.no_grad()
def test_turning_the_residual_stream_changes_no_logit() -> None:
    model = build(norm="none")
    Q, _ = torch.linalg.qr(noise(8, 8))
    turned = {}
    for name, weight in model.state_dict().items():
        match name.rpartition(".")[2]:
            case "W_Q" | "W_K" | "W_V" | "W_in" | "W_U":  # readers
                turned[name] = Q.T @ weight
            case "W_E" | "W_pos" | "W_O" | "b_O" | "W_out" | "b_out":  # writers
                turned[name] = weight @ Q
            case _:
                turned[name] = weight
    other = build(norm="none")
    other.load_state_dict(turned)
    assert distance(other(TOKENS), model(TOKENS)) <= 1e-5
    other.load_state_dict(turned | {"unembed.W_U": model.W_U})  # one reader left behind
    assert distance(other(TOKENS), model(TOKENS)) > 0.01


@pytest.mark.parametrize("layers", [0, 1, 2, 12])
def test_any_number_of_layers_works(layers: int) -> None:
    model = build(n_layers=layers)
    logits, cache = model.run_with_cache(TOKENS)
    assert logits.shape == (2, 6, 7)
    stacks = {"W_Q": (2, 8, 4), "W_O": (2, 4, 8), "b_Q": (2, 4), "b_O": (8,), "W_in": (8, 32), "b_out": (8,)}
    for name, shape in stacks.items():
        assert getattr(model, name).shape == (layers, *shape)
    assert model.QK.shape == model.OV.shape == (layers, 2, 8, 8)
    residual = cache.decompose_resid()
    assert len(residual) == 2 + 2 * layers
    assert distance(model.unembed(model.ln_final(residual.sum(0))), logits) <= 1e-5


def test_the_loss_is_the_mean_surprise_at_the_next_token() -> None:
    model = build()
    p = model(TOKENS).softmax(-1).detach()
    surprise = torch.tensor([[-math.log(p[b, i, TOKENS[b, i + 1]]) for i in range(5)] for b in range(2)])
    assert distance(model(TOKENS, return_type="loss", loss_per_token=True), surprise) <= 1e-5
    logits, loss = model(TOKENS, return_type="both")
    assert abs(loss.item() - surprise.mean().item()) <= 1e-5
    assert torch.equal(logits, model(TOKENS))


@pytest.mark.parametrize("layer", [0, 1, -1])
def test_a_run_can_stop_before_any_layer(layer: int) -> None:
    model = build()
    assert torch.equal(model(TOKENS, stop_at_layer=layer), model.run_with_cache(TOKENS)[1]["resid_pre", layer])


def test_gpt2_small_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = Transformer(
            ModelConfig(n_layers=12, n_heads=12, d_model=768, n_ctx=1024, d_vocab=50257, tied_unembedding=True)
        )
        assert model(torch.zeros(1, 1024, dtype=torch.long)).shape == (1, 1024, 50257)
    assert model.n_parameters == 124_439_808
    assert sum(p.numel() for p in model.blocks[3].parameters()) == 12 * 768**2 + 13 * 768


@pytest.mark.parametrize("options", [{}, {"norm": "post"}, {"positions": "alibi"}, {"positions": "rotary"},
                                     {"attention": "softmax-unscaled"}, {"query_key": "tied"}, {"n_layers": 0},
                                     {"positions": "shortformer"}, {"value_output": "identity"}])  # fmt: skip
@pytest.mark.parametrize("few", [FEW, 0])
def test_training_fuses_what_nobody_watches_and_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, few: int, options: dict[str, Any]
) -> None:
    """Values and gradients, with attention of few words as one operation and without."""
    calls = []
    monkeypatch.setattr("workbench.transformer.attend_to_few", lambda *given: calls.append(1) or attend_to_few(*given))
    monkeypatch.setattr("workbench.transformer.FEW", few)
    model = build(**options).double()
    weights = list(model.parameters())
    expected = model(TOKENS)
    slopes = torch.autograd.grad(expected.square().sum(), weights)
    model.train()
    found = model(TOKENS)
    plain = few and options.get("positions") not in ("rotary", "alibi", "shortformer")
    assert len(calls) == (len(model.blocks) if plain else 0)
    assert distance(found, expected) <= 1e-12
    for slope, other in zip(torch.autograd.grad(found.square().sum(), weights), slopes, strict=True):
        torch.testing.assert_close(slope, other, rtol=1e-9, atol=1e-9)
    seen: dict[str, Tensor] = {}
    names = list(model.mod_dict)
    with model.hooks(fwd_hooks=[(name, lambda value, hook: seen.update({hook.name: value})) for name in names
                                if "hook" in name]):  # fmt: skip
        assert distance(model(TOKENS), expected) <= 1e-12
    _, cache = model.eval().run_with_cache(TOKENS)
    assert seen.keys() == cache.keys()


@pytest.mark.parametrize("name", ["q", "k", "v", "attn_scores", "pattern", "z"])
@pytest.mark.parametrize("way", ["fwd_hooks", "bwd_hooks"])
def test_one_hook_alone_is_called_in_training(name: str, way: str) -> None:
    seen: list[str] = []

    def look(value: Any, hook: Any) -> None:
        seen.append(hook.name)

    point = f"blocks.1.attn.hook_{name}"
    model = build().train()
    with model.hooks(**{way: [(point, look)]}):  # pyright: ignore[reportArgumentType]
        model(TOKENS).sum().backward()
    assert seen == [point]


def test_torchs_own_hooks_transforms_and_autocast_go_on_in_training() -> None:
    model, names = build().train(), set()
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: names.add(module.name) if isinstance(module, HookPoint) else None
    )
    try:
        expected = model(TOKENS)
    finally:
        handle.remove()
    assert "blocks.0.attn.hook_pattern" in names
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    slopes = torch.func.grad(lambda given: torch.func.functional_call(model, given, TOKENS).square().sum())(weights)
    expected.square().sum().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(slopes[name], weight.grad, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(TOKENS).square().sum()
    loss.backward()


def test_a_dropout_of_nothing_is_passed_by_but_for_its_hooks() -> None:
    model, seen = build(), []
    handle = model.blocks[0].dropout.register_forward_hook(lambda *_: seen.append("called"))
    model(TOKENS)
    assert seen == ["called", "called"]  # after attention and after the feed-forward layer
    handle.remove()


def test_a_hook_may_write_into_what_it_gets_while_gradients_are_wanted() -> None:
    model = build()
    untouched = model(TOKENS)

    def doubled(value: Tensor, hook: object) -> Tensor:
        value[:, 1] *= 2
        return value

    for name in ("q", "k", "v", "z"):
        with model.hooks(fwd_hooks=[(f"blocks.0.attn.hook_{name}", doubled)]):
            written = model.train()(TOKENS)
            written.sum().backward()
            assert distance(written, model.eval()(TOKENS)) <= 1e-6 < distance(written, untouched)
