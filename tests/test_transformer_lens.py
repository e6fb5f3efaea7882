"""TransformerLens' tools on `Transformer`: what they compute here is what they would on a model of their own."""

from collections.abc import Callable
from typing import Any, Literal, cast

import pytest
import torch
from support import from_native
from torch import Tensor
from transformer_lens import patching
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.head_detector import detect_head
from transformer_lens.model_bridge.sources import boot_native
from transformer_lens.tools.analysis import logit_lens
from transformer_lens.weight_processing import ProcessWeights

from workbench.errors import Undefined
from workbench.recipes import ModelConfig
from workbench.transformer import LayerNorm, Transformer
from workbench.vocabulary import Vocabulary

SMALL: dict[str, Any] = {"n_layers": 2, "n_heads": 2, "d_model": 8, "n_ctx": 6, "d_vocab": 7, "init_scale": 0.5}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 0], [2, 6, 5, 3, 5, 1]])
CORRUPTED = torch.tensor([[3, 2, 4, 1, 5, 0], [2, 0, 5, 3, 5, 1]])


def build(seed: int = 0, **options: Any) -> Transformer:
    """A small model in eval mode, its LayerNorms' weights random too."""
    model = Transformer(ModelConfig(**SMALL | options), Vocabulary(tuple("abcdefg")), seed=seed).eval()
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, LayerNorm):
            torch.nn.init.normal_(module.w, 1, 0.3, generator=generator)
            torch.nn.init.normal_(module.b, 0, 0.3, generator=generator)
    return model


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


# The same logits as TransformerLens' own model


@pytest.mark.parametrize("norm", ["pre", "none"])
@pytest.mark.parametrize(("d_mlp", "activation", "act_fn"), [
    (0, "gelu", "gelu"), (10, "gelu", "gelu"), (10, "gelu-tanh", "gelu_new"), (10, "relu", "relu"),
])  # fmt: skip
@pytest.mark.parametrize(("positions", "theirs"), [("learned", "standard"), ("rotary", "rotary")])
def test_logits_are_those_of_the_native_model(
    norm: str, d_mlp: int, activation: str, act_fn: str, positions: str, theirs: str
) -> None:
    native = boot_native(TransformerBridgeConfig(
        d_model=12, d_head=4, n_layers=2, n_ctx=6, n_heads=2, d_vocab=7, d_mlp=d_mlp or None, attn_only=not d_mlp,
        act_fn=act_fn, normalization_type="LN" if norm == "pre" else None, positional_embedding_type=theirs,
        architecture="TransformerLensNative",
    )).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for parameter in native.parameters():  # biases and LayerNorms too, which start at zero and one
        torch.nn.init.normal_(parameter, 0.05, 0.25, generator=generator)
    assert distance(from_native(native, positions=positions, activation=activation)(TOKENS), native(TOKENS)) <= 1e-5


# ActivationCache


@pytest.mark.parametrize("positions", ["learned", "rotary", "shortformer"])
@pytest.mark.parametrize("options", [{}, {"d_mlp": 0}, {"norm": "none"}, {"value_output": "identity"}])
@pytest.mark.parametrize("apply_ln", [True, False])
def test_every_decomposition_sums_to_the_residual_stream(
    options: dict[str, Any], positions: str, apply_ln: bool
) -> None:
    model = build(positions=positions, **options)
    _, cache = model.run_with_cache(TOKENS)
    for layer, mlp_input, stream, norm in (
        (0, False, "blocks.0.hook_resid_pre", "blocks.0.ln1"), (0, True, "blocks.0.hook_resid_mid", "blocks.0.ln2"),
        (1, False, "blocks.1.hook_resid_pre", "blocks.1.ln1"), (1, True, "blocks.1.hook_resid_mid", "blocks.1.ln2"),
        (None, False, "blocks.1.hook_resid_post", "ln_final"),
    ):  # fmt: skip
        if mlp_input and model.config.attn_only:
            continue
        # With apply_ln, what arrives is the normalised stream, before w and b.
        normalised = apply_ln and model.config.norm == "pre"
        expected = cache[f"{norm}.hook_normalized" if normalised else stream]
        where: dict[str, Any] = {"layer": layer, "mlp_input": mlp_input, "apply_ln": apply_ln}
        for stack in (
            cache.decompose_resid(**where),
            cache.get_full_resid_decomposition(**where, expand_neurons=True),
            cache.get_full_resid_decomposition(**where, expand_neurons=False),
        ):
            assert distance(stack.sum(0), expected) <= 1e-5
            assert distance(stack[1:].sum(0), expected) > 1e-3 or len(stack) == 1


def test_decompositions_are_labelled_by_component() -> None:
    _, cache = build(d_mlp=3).run_with_cache(TOKENS)
    heads, neurons = ["L0H0", "L0H1", "L1H0", "L1H1"], [f"L{layer}N{n}" for layer in (0, 1) for n in range(3)]
    _, labels = cache.get_full_resid_decomposition(return_labels=True)
    assert labels == [*heads, *neurons, "embed", "pos_embed", "bias"]
    results, labels = cache.stack_head_results(return_labels=True)
    assert labels == heads
    z, W_O = cache["z", 1], cache.model.blocks[1].attn.W_O
    assert distance(results[3], z[:, :, 1] @ W_O[1]) <= 1e-6


def test_the_residual_stream_accumulates_layer_by_layer() -> None:
    _, cache = build().run_with_cache(TOKENS)
    stack, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "final_post"]
    steps = [cache["hook_embed"] + cache["hook_pos_embed"], cache["attn_out", 0], cache["mlp_out", 0],
             cache["attn_out", 1], cache["mlp_out", 1]]  # fmt: skip
    assert distance(stack, torch.stack(steps).cumsum(0)) <= 1e-5


def test_logit_attributions_are_products_with_columns_of_the_unembedding() -> None:
    model = build()
    logits, cache = model.run_with_cache(TOKENS)
    stack = cache.decompose_resid()
    right, wrong = torch.tensor([2, 5]), torch.tensor([0, 1])
    attributed = cache.logit_attrs(stack, right, incorrect_tokens=wrong)
    for row in (0, 1):
        direction = model.W_U[:, right[row]] - model.W_U[:, wrong[row]]
        centred = stack[:, row] - stack[:, row].mean(-1, keepdim=True)
        expected = centred / cache["ln_final.hook_scale"][row] @ direction
        assert distance(attributed[:, row], expected) <= 1e-5
    # Without the final LayerNorm's w and b, attributions sum to the difference of logits.
    with torch.no_grad():
        model.ln_final.w.fill_(1)  # pyright: ignore[reportCallIssue]
        model.ln_final.b.zero_()  # pyright: ignore[reportCallIssue]
    logits, cache = model.run_with_cache(TOKENS)
    total = cache.logit_attrs(cache.decompose_resid(), "c", incorrect_tokens="a").sum(0)
    assert distance(total, logits[..., 2] - logits[..., 0]) <= 1e-5


DECOMPOSITIONS: dict[str, Callable[[Any], Any]] = {
    "decompose_resid": lambda cache: cache.decompose_resid(),
    "stack_head_results": lambda cache: cache.stack_head_results(),
    "stack_neuron_results": lambda cache: cache.stack_neuron_results(2),
    "get_full_resid_decomposition": lambda cache: cache.get_full_resid_decomposition(),
    "logit_attrs": lambda cache: cache.logit_attrs(cache["resid_post", 1][None], 3),
}


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_decompositions_are_refused_where_the_stream_is_no_sum(name: str) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"norm": "post"}, "LayerNorm after each addition"),
        ({"residual": False}, "replace the token"),
    ]
    for options, why in cases:
        with pytest.raises(Undefined, match=f"{name} is undefined .*{why}") as caught:
            DECOMPOSITIONS[name](build(**options).run_with_cache(TOKENS)[1])
        assert "\n" not in str(caught.value)
    assert DECOMPOSITIONS[name](build().run_with_cache(TOKENS)[1]).isfinite().all()


def test_a_cache_can_be_a_plain_dictionary_or_lose_its_batch_axis() -> None:
    model = build()
    _, plain = model.run_with_cache(TOKENS[:1], return_cache_object=False)
    assert type(plain) is dict
    _, cache = model.run_with_cache(TOKENS[:1], remove_batch_dim=True)
    assert torch.equal(cache["z", 1], plain["blocks.1.attn.hook_z"][0])
    assert distance(cache.get_full_resid_decomposition().sum(0), cache["resid_post", 1]) <= 1e-5


# Hooks


def run(model: Transformer, name: str, edit: Callable[[Tensor], Any], tokens: Tensor = TOKENS) -> dict[str, Tensor]:
    """The activations of a run in which `edit` changes one of them in place, as patching does."""

    def hook_function(activation: Tensor, hook: Any) -> None:
        edit(activation)

    with torch.no_grad(), model.hooks([(name, hook_function)]):
        return model.run_with_cache(tokens, return_cache_object=False)[1]


def test_edits_of_attention_take_effect_where_they_are_made() -> None:
    model, here = build(), "blocks.1.attn.hook_"
    scores = run(model, here + "attn_scores", lambda scores: scores[:, 1, 4, 0].fill_(100.0))
    assert distance(scores[here + "pattern"][:, 1, 4], torch.eye(6)[0].expand(2, 6)) <= 1e-6
    pattern = run(model, here + "pattern", lambda pattern: pattern.copy_(torch.eye(6).expand(2, 2, 6, 6)))
    assert distance(pattern[here + "z"], pattern[here + "v"]) <= 1e-6
    z = run(model, here + "z", lambda z: z.zero_())
    assert distance(z["blocks.1.hook_attn_out"], model.b_O[1].expand(2, 6, 8)) <= 1e-6


def test_edits_in_place_stay_where_they_are_made() -> None:
    model, short, one = build(), build(positions="shortformer"), TOKENS[:1]
    weights = [weight.clone() for weight in (*model.parameters(), *short.parameters())]
    plain = run(model, "hook_embed", lambda activation: None, one)

    assert not run(model, "hook_pos_embed", lambda positions: positions.zero_(), one)["hook_pos_embed"].any()
    run(short, "hook_shortformer_pos", lambda positions: positions.zero_(), one)
    mlp = run(model, "blocks.0.hook_mlp_in", lambda residual: residual.zero_(), one)
    assert distance(mlp["blocks.0.hook_resid_mid"], plain["blocks.0.hook_resid_mid"]) == 0
    assert distance(mlp["blocks.0.hook_mlp_out"], plain["blocks.0.hook_mlp_out"]) > 0.01
    model.set_use_split_qkv_input(True)
    query = run(model, "blocks.0.attn.hook_q_input", lambda x: x[:, :, 1].zero_(), one)
    assert distance(query["blocks.0.attn.hook_q"][:, :, 0], plain["blocks.0.attn.hook_q"][:, :, 0]) <= 1e-6
    assert distance(query["blocks.0.attn.hook_q"][:, :, 1], plain["blocks.0.attn.hook_q"][:, :, 1]) > 0.01
    assert distance(query["blocks.0.attn.hook_k"], plain["blocks.0.attn.hook_k"]) <= 1e-6

    assert all(map(torch.equal, weights, (*model.parameters(), *short.parameters())))


@pytest.mark.parametrize("positions", ["learned", "shortformer", "rotary"])
@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_inputs_of_its_own_for_every_head_change_nothing(positions: str, norm: str) -> None:
    model = build(positions=positions, norm=norm)
    plain = model(TOKENS)
    model.set_use_attn_in(True)
    assert distance(model(TOKENS), plain) <= 1e-5
    model.set_use_attn_in(False)
    model.set_use_split_qkv_input(True)
    logits, cache = model.run_with_cache(TOKENS)
    assert distance(logits, plain) <= 1e-5
    assert cache["blocks.1.attn.hook_k_input"].shape == (2, 6, 2, 8)


# Patching


def metric(logits: Tensor) -> Tensor:
    return (logits[:, -1, 2] - logits[:, -1, 4]).mean().detach()


@pytest.mark.parametrize("sweep", [patching.get_act_patch_resid_pre, patching.get_act_patch_attn_head_out_all_pos])
@torch.no_grad()
def test_patching_one_by_one_is_what_a_loop_of_edits_does(sweep: Callable[..., Tensor]) -> None:
    model = build(init="normal", init_scale=3.0)
    clean_logits, clean = model.run_with_cache(TOKENS)
    effect = sweep(model, CORRUPTED, clean, metric)
    heads = sweep is patching.get_act_patch_attn_head_out_all_pos
    name = "blocks.{}.attn.hook_z" if heads else "blocks.{}.hook_resid_pre"
    for layer in range(2):
        for index in range(2 if heads else 6):
            where = (slice(None), slice(None), index) if heads else (slice(None), index)
            here = name.format(layer)

            def put(x: Tensor, hook: Any, where: Any = where, here: str = here) -> Tensor:
                x = x.clone()
                x[where] = clean[here][where]
                return x

            expected = metric(model.run_with_hooks(CORRUPTED, fwd_hooks=[(here, put)]))
            assert abs(effect[layer, index] - expected) <= 1e-5
    if not heads:  # the prompts differ at position 1 alone, so before layer 1 that restores the clean run
        assert abs(effect[0, 1] - metric(clean_logits)) <= 1e-5
        assert abs(effect[0, 0] - metric(model(CORRUPTED))) <= 1e-5
        assert abs(metric(clean_logits) - metric(model(CORRUPTED))) > 1e-3


@pytest.mark.parametrize("component", ["q", "k", "v"])
@torch.no_grad()
def test_a_direct_path_patch_changes_what_one_head_reads_from_another(component: Literal["q", "k", "v"]) -> None:
    model = build(positions="alibi", bias_qkv=False, init="normal", init_scale=3.0)
    (_, clean), (_, corrupted) = model.run_with_cache(TOKENS), model.run_with_cache(CORRUPTED)
    effect = patching.get_act_patch_direct_path(
        model, CORRUPTED, clean, corrupted, metric, src_layer=0, src_head=1, component=component, verbose=False
    )
    assert not effect[0].any()  # no head before the source reads it
    assert not model.cfg.use_split_qkv_input
    # By hand, for head 1.0: what it computes from the corrupted stream with the clean write of head 0.1 in it.
    W_O, attention, block = model.blocks[0].attn.W_O[1], model.blocks[1].attn, model.blocks[1]
    stream = corrupted["resid_pre", 1] + (clean["z", 0][:, :, 1] - corrupted["z", 0][:, :, 1]) @ W_O
    patched = block.ln1(stream) @ getattr(attention, f"W_{component.upper()}")[0]

    def put(x: Tensor, hook: Any) -> Tensor:
        x = x.clone()
        x[:, :, 0] = patched
        return x

    expected = metric(model.run_with_hooks(CORRUPTED, fwd_hooks=[(f"blocks.1.attn.hook_{component}", put)]))
    assert abs(effect[1, 0] - expected) <= 1e-5
    assert abs(effect[1, 0] - metric(model(CORRUPTED))) > 1e-3


# Logit lens, head detector, weight processing, circuits


@pytest.mark.parametrize("options", [{}, {"norm": "post"}, {"norm": "none"}, {"tied_unembedding": True}])
def test_the_logit_lens_ends_at_the_logits_of_the_model(options: dict[str, Any]) -> None:
    model = build(bias_unembed=True, **options)
    lens = logit_lens(model, TOKENS, positions=None)
    assert lens.labels == ["0_pre", "1_pre", "final_post"]
    assert distance(lens.values[-1], model(TOKENS)) <= 1e-5
    first = model.unembed(model.ln_final(model(TOKENS, stop_at_layer=0)))
    assert distance(lens.values[0], first) <= 1e-5


@torch.no_grad()
def test_the_head_detector_finds_a_head_that_looks_at_the_previous_token() -> None:
    model = build(norm="none", d_model=16, d_head=6, n_layers=2)
    attention = model.blocks[1].attn
    for weight in (model.pos_embed.W_pos, attention.W_Q[1], attention.W_K[1], attention.b_Q[1], attention.b_K[1]):
        weight.zero_()  # pyright: ignore[reportCallIssue]
    for block in model.blocks:  # nothing but the embedding may write to the dimensions of positions
        for weight in (block.attn.W_O, block.attn.b_O, block.mlp.W_out, block.mlp.b_out, model.W_E):
            weight[..., :6] = 0
    model.W_pos[:, :6] = torch.eye(6)
    attention.W_Q[1, :6] = 50 * torch.eye(6).roll(1, dims=0)  # the query of p is p − 1
    attention.W_K[1, :6] = torch.eye(6)
    scores = detect_head(model, "a b d c f", "previous_token_head")
    assert scores[1, 1] > 0.79  # 4 of 5 positions: the first has no previous token
    assert scores.flatten().argsort().tolist()[-1] == 3
    assert scores.flatten()[:3].max() < 0.6


@pytest.mark.parametrize("options", [
    {}, {"d_mlp": 0}, {"tied_unembedding": True}, {"positions": "sinusoidal"}, {"positions": "rotary"},
    {"positions": "alibi", "bias_qkv": False, "bias_out": False}, {"query_key": "identity", "value_output": "identity"},
    {"query_key": "tied"}, {"attention": "uniform"}, {"norm": "none"}, {"norm": "post"}, {"n_layers": 0},
])  # fmt: skip
def test_processed_weights_predict_the_same(options: dict[str, Any]) -> None:
    model = build(**options)
    processed = model.expanded()
    processed.load_state_dict(ProcessWeights.process_weights(processed.state_dict(), processed.cfg))
    assert distance(processed(TOKENS).log_softmax(-1), model(TOKENS).log_softmax(-1)) <= 1e-5
    if model.cfg.normalization_type == "LN":
        assert not any(
            weight.any() for name, weight in processed.state_dict().items() if name.endswith(("ln1.b", "ln_final.b"))
        )
        assert distance(processed.W_U.mean(0), torch.zeros(7)) <= 1e-6  # centred, so it had something to do


@pytest.mark.parametrize("options", [{}, {"query_key": "identity"}, {"attention": "uniform"}, {"n_layers": 0}])
def test_circuits_are_products_of_weights(options: dict[str, Any]) -> None:
    model = build(**options)
    QK, OV = (cast(Tensor, circuit.AB) for circuit in (model.QK, model.OV))
    assert QK.shape == OV.shape == (len(model.blocks), 2, 8, 8)
    for layer, block in enumerate(model.blocks):
        for head in range(2):
            assert distance(QK[layer, head], block.attn.W_Q[head] @ block.attn.W_K[head].T) <= 1e-6
            assert distance(OV[layer, head], block.attn.W_V[head] @ block.attn.W_O[head]) <= 1e-6
