"""Every model's weights by one way in: what is read, what folding keeps, what is refused."""

import copy
from typing import Any

import pytest
import torch
from support import biases_in_a_dimension, build, from_native, gpt2_bridge, native_bridge
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import LlamaConfig, LlamaForCausalLM

import workbench as wb
from circuits import (
    attention_maps,
    bandwidth,
    composed,
    composition_spectrum,
    compositions,
    copying_score,
    direct_path,
    eigenvalues,
    memory_management,
    qk_trace,
    virtual_heads,
    virtual_weights,
)  # fmt: skip
from circuits.errors import BadModel, NoSuchPart, NoSurface, Undefined
from circuits.scores import from_draws
from circuits.surface import basis, folded, head_of, read

TOKENS = torch.arange(40).reshape(4, 10) % 20


def log_probs(model):
    """In double precision: at a log-probability of −20, two float32 passes of one model differ by 3e-5 themselves."""
    with torch.no_grad():
        return copy.deepcopy(model).double()(TOKENS).log_softmax(-1)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "alibi", "none"])
@pytest.mark.parametrize("options", [
    {}, {"d_mlp": 0}, {"norm": "none"}, {"norm": "none", "d_mlp": 0, "bias_qkv": False}, {"tied_unembedding": True},
    {"query_key": "tied"}, {"value_output": "value"}, {"attention": "uniform"}, {"n_layers": 0},
])  # fmt: skip
def test_folding_keeps_the_log_probabilities_and_leaves_the_model_alone(options, positions):
    if positions in ("rotary", "alibi") and ("attention" in options or "n_layers" in options):
        positions = "learned"  # recipes refuse that pair
    model = build(positions=positions, **options)
    before = copy.deepcopy(model.state_dict())
    same = folded(model)
    assert (log_probs(same) - log_probs(model)).abs().max() <= 1e-5
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    w = read(same)
    assert (basis(model), w.basis, read(model).basis) == ("raw", "folded", "raw")
    assert folded(same) is same
    assert w.b_V.abs().max() <= 1e-6 if w.b_V.numel() else True
    if model.config.norm == "pre":
        assert w.W_O.mean(-1).abs().max() <= 1e-6 if w.W_O.numel() else True
        assert w.W_E.mean(-1).abs().max() <= 1e-6


@pytest.mark.parametrize("make", [native_bridge, gpt2_bridge])
def test_folding_a_bridge(make):
    model = make()
    with torch.no_grad():
        before = model(TOKENS).log_softmax(-1)
        same = folded(model)
        assert (same(TOKENS).log_softmax(-1) - before).abs().max() <= 1e-5
        assert torch.equal(model(TOKENS).log_softmax(-1), before)
    assert (read(model).basis, read(same).basis) == ("raw", "folded")
    assert read(same).W_E.mean(-1).abs().max() <= 1e-6


@pytest.mark.parametrize(
    "name", ["winograd-2", "induction-2-attn", "skip-trigram-1-attn", "winograd-1-hand", "bigram-0"]
)
def test_folding_shipped_models(name):
    run = wb.load(name)
    tokens = run.task.held_out[:8]
    exact = copy.deepcopy(run.model).double()
    with torch.no_grad():
        same = folded(exact)
        assert (same(tokens).log_softmax(-1) - exact(tokens).log_softmax(-1)).abs().max() <= 1e-5


@pytest.mark.parametrize(("options", "reason"), [
    ({"norm": "post"}, "LayerNorm after each addition"), ({"residual": False}, "replace the token"),
    ({"positions": "shortformer"}, "shortformer"),
])  # fmt: skip
def test_what_cannot_be_folded_says_so_and_can_be_read_raw(options, reason):
    model = build(**options)
    with pytest.raises(Undefined, match=f"{reason}.*fold=False"):
        folded(model)
    assert read(model).basis == "raw"


@pytest.mark.parametrize("d_mlp", [None, 24])
def test_a_bridge_and_our_model_with_its_weights_read_the_same(d_mlp):
    native = native_bridge(d_mlp=d_mlp)
    for fold in (False, True):
        theirs, ours = read(native, fold), read(from_native(native), fold)
        for name in ("W_E", "W_pos", "W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "W_U", "W_in", "W_out"):
            a, b = getattr(theirs, name), getattr(ours, name)
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, atol=1e-5), name


def test_the_written_subspace_is_what_varies():
    assert read(build()).width == 16
    assert read(folded(build())).width == 15  # centred
    assert read(build(norm="none", n_layers=0, d_vocab=5, positions="none")).width == 4  # five tokens, less their mean
    wide = biases_in_a_dimension(build(norm="none", positions="learned"))
    assert (wide.config.d_model, read(wide).width) == (17, 16)


def test_readers_seen_from_inside_give_the_same_queries():
    """Two tokens and one position span little of the stream, yet queries, keys and values come out the same."""
    model = build(norm="none", d_vocab=2, n_layers=1, n_heads=1, d_head=4, d_mlp=0, positions="none")
    w = read(model)
    assert w.width == 5  # one direction between the two tokens, four of the head
    assert not torch.allclose(w.W_Q, model.W_Q)
    for kind in "QKV":
        W, b = getattr(model, f"W_{kind}"), getattr(model, f"b_{kind}")
        inside = w.W_E @ getattr(w, f"W_{kind}") + getattr(w, f"b_{kind}")[:, :, None]
        assert torch.allclose(inside, model.W_E @ W + b[:, :, None], atol=1e-5)


def test_grouped_keys_and_values_are_repeated():
    llama: Any = LlamaForCausalLM(LlamaConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, vocab_size=20,
        intermediate_size=32, max_position_embeddings=12,
    )).eval()  # fmt: skip
    config = TransformerBridgeConfig(
        d_model=16, d_head=4, n_layers=1, n_ctx=12, n_heads=4, n_key_value_heads=2, d_vocab=20, d_mlp=32,
        act_fn="silu", normalization_type="RMS", positional_embedding_type="rotary", gated_mlp=True,
        architecture="LlamaForCausalLM",
    )  # fmt: skip
    w = read(build_bridge_from_module(llama, "LlamaForCausalLM", tl_config=config).eval())
    keys = llama.model.layers[0].self_attn.k_proj.weight.detach()  # [2 · 4, 16]
    assert w.W_K.shape == (1, 4, 16, 4)
    for head in range(4):
        assert torch.allclose(w.W_K[0, head], keys[4 * (head // 2) : 4 * (head // 2) + 4].T, atol=1e-6)


@pytest.mark.parametrize("make", [build, native_bridge])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_low_precision_is_folded_in_single(make, precision):
    """Centred in half precision, the dimension that LayerNorm takes away would still look written."""
    model = make().to(precision)
    w = read(model, fold=True)
    assert (w.width, w.W_Q.dtype) == (15, torch.float32)
    assert model.W_Q.dtype == precision
    assert torch.allclose(w.W_Q, read(make(), fold=True).W_Q, atol=0.05)


def test_a_bridge_that_was_processed_before_is_folded_or_refused_but_not_believed():
    for options, width in (({"no_processing": True}, 15), ({}, 15)):
        bridge = native_bridge()
        bridge.enable_compatibility_mode(disable_warnings=True, **options)
        assert read(bridge, fold=True).width == width
        assert read(bridge).basis == "raw"
    for options in ({"fold_ln": False}, {"center_writing_weights": False}):
        bridge = native_bridge()
        bridge.enable_compatibility_mode(disable_warnings=True, **options)
        with pytest.raises(Undefined, match="processed by halves before"):
            folded(bridge)


def test_without_a_residual_stream_nothing_passes_a_layer_by():
    model = build(residual=False)
    for ask in (
        direct_path, lambda m: virtual_weights(m, "embed", "unembed"), lambda m: compositions(m, fold=False),
        lambda m: composed(m, "K", "0.0", "1.0", fold=False), lambda m: list(virtual_heads(m, TOKENS[:1])),
        lambda m: composition_spectrum(m, "K", "0.0", "1.0", fold=False), lambda m: bandwidth(m, fold=False),
        lambda m: memory_management(m, fold=False), qk_trace,
    ):  # fmt: skip
        with pytest.raises(Undefined, match="replace the token"):
            ask(model)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("draws", [39, 199])
def test_outside_means_beyond_the_band(precision, draws):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(draws, 400, 1, generator=generator).to(precision)
    scores = torch.randn(400, 1, generator=generator).to(precision)
    made = from_draws("x", scores, drawn, parts=("head",), null="", basis="raw")
    assert torch.equal(made.outside, (scores < made.band[0]) | (scores > made.band[1]))
    assert 0.02 < made.outside.double().mean() < 0.09


def test_low_precision_is_read_in_single_and_double_stays():
    model = build()
    half = copy.deepcopy(model).bfloat16()
    assert read(half).W_Q.dtype == torch.float32
    assert torch.allclose(read(half).W_Q, model.W_Q, atol=0.02)
    assert read(copy.deepcopy(model).double()).W_Q.dtype == torch.float64


def test_bad_models_and_names_are_one_clear_line():
    model = build()
    with torch.no_grad():
        model.blocks[1].attn.W_V[0, 0, 0] = torch.nan
    with pytest.raises(BadModel, match=r"W_V holds values that are not finite"):
        read(model)
    for ask in (read, folded, compositions, eigenvalues, copying_score, lambda m: attention_maps(m, TOKENS[:1])):
        with pytest.raises(NoSurface, match=r"Linear has no cfg; expected a model with TransformerLens' surface"):
            ask(torch.nn.Linear(3, 3))
    with pytest.raises(BadModel, match=r"W_V holds values that are not finite"):
        folded(model)
    with pytest.raises(BadModel, match=r"logits are not finite"):
        attention_maps(model, TOKENS[:1])
    huge = build()
    with torch.no_grad():
        huge.W_U.mul_(1e12)
    with pytest.raises(BadModel, match=r"W_U holds values beyond 1e8"):
        read(huge)
    for name in ("7.0", "1.2", "x", "1", "1.1.1", 1, (0.5, 0), (0, 1, 2)):
        with pytest.raises(NoSuchPart):
            head_of(name, read(build()))
    assert head_of("1.0", read(build())) == head_of((1, 0), read(build())) == (1, 0)
