"""Hand-built heads are found, fresh and positional ones are not; every draw is the model with turned weights."""

import math

import pytest
import torch
from support import biases_in_a_dimension, build, fresh, from_native, gpt2_bridge, native_bridge, refactored, rotated
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import LlamaConfig, LlamaForCausalLM

import workbench as wb
from circuits import heads
from circuits.errors import BadModel, NoSuchPart, Undefined
from circuits.heads import head_scores, qk_trace
from circuits.sequences import repeated_sequences
from circuits.surface import folded, read

FEW = {"sequences": 4, "draws": 39}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def by_hand(vocabulary=12, length=24, n_layers=1):
    """One head a layer, no LayerNorm; one-hot tokens, positions, and a place for the token before. All else is 0."""
    width = 2 * vocabulary + length
    model = fresh(
        n_layers=n_layers, n_heads=1, d_model=width, d_head=length, d_mlp=0, n_ctx=length, d_vocab=vocabulary,
        norm="none", init="by-hand",
    )  # fmt: skip
    model.W_E.data[:, :vocabulary] = torch.eye(vocabulary)
    model.W_pos.data[:, vocabulary : vocabulary + length] = torch.eye(length)
    model.W_U.data[:vocabulary] = torch.eye(vocabulary)
    return model


def looks_back(model, layer, distance, sharpness=200.0):
    vocabulary, length = model.config.d_vocab, model.config.n_ctx
    attn = model.blocks[layer].attn
    at = torch.arange(length)
    attn.W_Q.data[0, vocabulary + at, at] = sharpness
    attn.W_K.data[0, vocabulary + at[:-distance], at[distance:]] = 1.0


def moves_token(model, layer, to):
    """Copies the token to the dimensions from `to` on."""
    at = torch.arange(model.config.d_vocab)
    model.blocks[layer].attn.W_V.data[0, at, at] = 1.0
    model.blocks[layer].attn.W_O.data[0, at, to + at] = 1.0


def induction_pair():
    model = by_hand(n_layers=2)
    vocabulary, before = model.config.d_vocab, model.config.d_vocab + model.config.n_ctx
    at = torch.arange(vocabulary)
    looks_back(model, 0, 1)
    moves_token(model, 0, before)
    model.blocks[1].attn.W_Q.data[0, at, at] = 200.0
    model.blocks[1].attn.W_K.data[0, before + at, at] = 1.0
    model.blocks[1].attn.W_K.data[0, vocabulary, at] = -1.0  # position 0 has no token before it and looked at itself
    moves_token(model, 1, 0)
    return model


# Known answers


def test_a_hand_built_induction_pair_is_found():
    model = induction_pair()
    found = head_scores(model)
    assert found.roles() == {
        "previous-token": ("0.0",),
        "current-token": (),
        "duplicate-token": (),
        "induction": ("1.0",),
    }
    assert found["previous_token"]["0.0"].value == pytest.approx(1, abs=0.01)
    assert found["prefix_matching_raw"]["1.0"].value == pytest.approx(1, abs=0.01)
    assert 0.8 < found["prefix_matching"]["1.0"].value < 1  # without a match it looks everywhere
    assert found["copying"]["1.0"].value == pytest.approx(1, abs=0.01)
    assert found["copying"]["1.0"].p.item() == pytest.approx(2 / 200)
    assert found["copying"]["0.0"].value == 0  # it writes where W_U does not read
    trace = qk_trace(model, fold=False)
    assert trace["1.0"].value == pytest.approx(200 * 12, rel=0.01)  # tr of 200 × the identity over 12 tokens
    assert trace["1.0"].z.item() > 5


def test_a_positional_look_back_is_no_induction_head():
    model = by_hand()
    looks_back(model, 0, 3)
    found = head_scores(model)
    assert found["prefix_matching_raw"].scores.item() > 0.05
    assert abs(found["prefix_matching"].scores.item()) < 0.05
    assert abs(found["duplicate_token"].scores.item()) < 0.05
    assert found["distance"].scores.item() == pytest.approx((3 * 21 + 0.5 + 1) / 23, abs=0.01)  # 1 and 2 look evenly
    assert not any(found.roles().values())


@pytest.mark.parametrize("name, previous, induction", [("induction-2-attn", "0", "1"), ("induction-1-attn", "", "")])
def test_trained_models(name, previous, induction):
    found = head_scores(wb.load(name).model, sequences=8).roles()
    assert {head[0] for head in found["previous-token"]} == set(previous)
    assert {head[0] for head in found["induction"]} == set(induction)


def test_a_uniform_head_is_dead_but_measured():
    found = head_scores(fresh(attention="uniform"), **FEW)
    rows = range(1, 12)
    expected = {
        "previous_token": sum(1 / (i + 1) for i in rows) / 11, "prefix_matching": 0, "duplicate_token": 0,
        "entropy": sum(math.log(i + 1) for i in rows) / 11, "entropy_share": 1,
        "distance": sum(i / 2 for i in rows) / 11,
    }  # fmt: skip
    for name, value in expected.items():
        scores = found[name]
        assert torch.allclose(scores.scores, torch.full((2, 2), float(value)), atol=1e-5), name
        assert scores.dead.all() and (scores.p == 1).all() and not scores.z.any() and not scores.outside.any()
        assert torch.equal(scores.band[0], scores.scores)
    assert found["prefix_matching_raw"].scores.min() > 0.05
    assert not found["copying"].dead.any()
    assert not any(found.roles().values())


def test_a_head_that_moves_nothing_is_dead_for_copying_only():
    model = build()
    model.blocks[1].attn.W_O.data[0] = 0
    found = head_scores(model, **FEW)
    assert found["copying"].dead.tolist() == [[False, False], [True, False]]
    assert found["copying"]["1.0"].value == 0 and found["copying"]["1.0"].p == 1
    assert not found["previous_token"].dead.any()


# The null


def llama_bridge():
    """Rotary positions, RMSNorm, and two query heads for each key and value head."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        llama = LlamaForCausalLM(LlamaConfig(
            hidden_size=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, vocab_size=20,
            intermediate_size=32, max_position_embeddings=12,
        ))  # fmt: skip
    config = TransformerBridgeConfig(
        d_model=16, d_head=4, n_layers=2, n_ctx=12, n_heads=4, n_key_value_heads=2, d_vocab=20, d_mlp=32, act_fn="silu",
        gated_mlp=True, normalization_type="RMS", positional_embedding_type="rotary", architecture="LlamaForCausalLM",
    )  # fmt: skip
    return build_bridge_from_module(llama, "LlamaForCausalLM", tl_config=config).eval()


NARROW = {"d_model": 48, "d_head": 3, "d_mlp": 0, "d_vocab": 6, "n_ctx": 10}  # much of the stream is never written
MODELS = {
    "pre": lambda: build(), "none": lambda: build(norm="none"), "post": lambda: build(norm="post"),
    "rotary": lambda: build(positions="rotary"), "alibi": lambda: build(positions="alibi"),
    "shortformer": lambda: build(positions="shortformer"), "replaces": lambda: build(residual=False),
    "one dimension more": lambda: biases_in_a_dimension(build(norm="none", d_mlp=0)),
    "folded": lambda: folded(build()), "native": lambda: native_bridge(),
    "folded native": lambda: folded(native_bridge()),
    "narrow": lambda: build(**NARROW), "narrow post": lambda: build(**NARROW, norm="post"),
    "narrow, no norm": lambda: build(**NARROW, norm="none"), "narrow folded": lambda: folded(build(**NARROW)),
    "native rotary": lambda: native_bridge(positional_embedding_type="rotary"),
    "native without norm": lambda: native_bridge(normalization_type=None), "gpt2": lambda: gpt2_bridge(),
    "llama": lambda: llama_bridge(),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_without_a_turn_every_draw_is_the_score(kind, monkeypatch):
    monkeypatch.setattr(heads, "_turned", lambda matrices, frame, n, _: matrices.expand(n, *matrices.shape))
    found = head_scores(MODELS[kind](), **FEW)
    for name, scores in found.measures.items():
        assert torch.allclose(scores.null_mean, scores.scores, atol=1e-4), name
        assert scores.null_sd.max() < 1e-4, name


@pytest.mark.parametrize("kind", ["pre", "rotary", "native", "gpt2", "llama"])
def test_turning_one_layer_leaves_the_next_ones_draws_alone(kind, monkeypatch):
    def turned(matrices, frame, n, random):
        result = matrices.expand(n, *matrices.shape).clone()
        result[:, 0] = torch.randn(result[:, 0].shape, generator=random)
        return result

    monkeypatch.setattr(heads, "_turned", turned)
    scores = head_scores(MODELS[kind](), **FEW)["entropy"]
    assert scores.null_sd[0].min() > 1e-3
    assert scores.null_sd[1].max() < 1e-5
    assert torch.allclose(scores.null_mean[1], scores.scores[1], atol=1e-4)


def test_a_draw_is_the_model_with_turned_weights(monkeypatch):
    model = fresh(n_layers=1, d_mlp=0, norm="none")
    turns = iter(torch.randn(2, 39, 1, 2, 16, 8, generator=generator()).unbind())
    kept = []
    monkeypatch.setattr(heads, "_turned", lambda *_: kept.append(next(turns)) or kept[-1])
    found = head_scores(model, **FEW)
    tokens, controls = repeated_sequences(20, 4, 12, generator())
    drawn, copied = [], []
    for w_q in kept[0]:
        model.blocks[0].attn.W_Q.data = w_q[0]
        with torch.no_grad():
            patterns = torch.stack(
                [model.run_with_cache(x)[1]["blocks.0.attn.hook_pattern"] for x in (tokens, controls)]
            )
        again = tokens[:, :, None] == tokens[:, None, :]
        follows = again.tril(-1).roll(1, 2)[:, None]
        per = (patterns * follows).sum((3, 4)) / again.tril(-1).any(2).sum(1)[:, None]
        drawn.append((per[0] - per[1]).mean(0))
    assert torch.allclose(found["prefix_matching"].null_mean[0], torch.stack(drawn).mean(0), atol=1e-5)
    assert torch.allclose(found["prefix_matching"].null_sd[0], torch.stack(drawn).std(0), atol=1e-5)

    model = fresh(n_layers=1, d_mlp=0, norm="none")
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    pattern, v = cache["blocks.0.attn.hook_pattern"], cache["blocks.0.attn.hook_v"] - model.b_V[0]
    for w_o in kept[1].mT:
        logits = torch.einsum("bphd, hdm, mv -> bhpv", v, w_o[0], model.W_U)
        raised = (logits - logits.mean(-1, keepdim=True)).relu()
        share = raised.gather(3, tokens[:, None, :, None].expand(-1, 2, -1, 1))[..., 0] / raised.sum(-1)
        copied.append((pattern[:, :, 1:] * share[:, :, None]).sum(3).mean(2).mean(0))
    assert torch.allclose(found["copying"].null_mean[0], torch.stack(copied).mean(0), atol=1e-5)
    assert torch.allclose(found["copying"].null_sd[0], torch.stack(copied).std(0), atol=1e-5)


def test_turned_weights_keep_their_spectrum_and_stay_inside():
    model = biases_in_a_dimension(build(norm="none", d_mlp=0))
    w = read(model)
    assert w.written.shape == (17, 16)
    narrow = build(**NARROW)  # LayerNorm's gain lets heads read outside what is written
    assert read(narrow).width == 48
    assert read(narrow, fold=True).width < 30
    turned = heads._turned(w.W_Q, w.written, 500, generator())
    assert torch.allclose(turned.mT @ turned, (w.W_Q.mT @ w.W_Q).expand(500, -1, -1, -1, -1), atol=1e-4)
    assert torch.allclose(w.written @ (w.written.T @ turned), turned, atol=1e-5)
    assert turned.mean(0).abs().max() < 5 * turned.std() / 500**0.5
    overlap = torch.einsum("nlhmd, lhmd -> nlh", turned, w.W_Q).var(0)  # tr(X R) has variance ‖X‖²_F / width
    expected = (w.W_Q.mT @ w.W_Q).pow(2).sum((2, 3)) / 16
    assert torch.allclose(overlap / expected, torch.ones(2, 2), atol=0.3)


def test_fresh_models_leave_the_band_by_chance_and_have_no_roles():
    outside, names = [], ("previous_token", "current_token", "duplicate_token", "prefix_matching", "copying", "entropy")
    for seed in range(30):
        norm = ("pre", "none")[seed % 2]
        found = head_scores(fresh(seed, n_heads=4, d_mlp=0, norm=norm), sequences=2, draws=39, seed=seed)
        outside.append(torch.stack([found[name].outside for name in names]).float().mean().item())
        assert not found["prefix_matching"].dead.any()
        assert not any(found.roles().values())
    rate = torch.tensor(outside)  # one figure a model: heads and measures of one model are not independent
    assert 0.02 < rate.mean() < 0.08


# Gauge, precision, the way in


@pytest.mark.parametrize("change", [rotated, refactored, biases_in_a_dimension])
def test_scores_do_not_depend_on_the_gauge(change):
    model = build(norm="none", d_mlp=0)
    before, after = head_scores(model, **FEW), head_scores(change(model), **FEW)
    for name, scores in before.measures.items():
        assert torch.allclose(scores.scores, after[name].scores, atol=1e-4), name
        difference = (scores.null_mean - after[name].null_mean).abs()  # other draws, the same distribution
        assert (difference <= 5 * (scores.null_sd + after[name].null_sd) / 39**0.5 + 1e-6).all(), name
    first, second = qk_trace(model, fold=False), qk_trace(change(model), fold=False)
    assert torch.allclose(first.scores, second.scores, rtol=1e-3, atol=1e-3)
    assert torch.allclose(first.null_sd, second.null_sd, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("make", [build, native_bridge, lambda: build(**NARROW)])
def test_folding_changes_no_score(make):
    model = make()
    before, after = head_scores(model, **FEW), head_scores(folded(model), **FEW)
    for name, scores in before.measures.items():
        assert torch.allclose(scores.scores, after[name].scores, atol=1e-4), name


@pytest.mark.parametrize("options", [{}, {"normalization_type": None}])
def test_ours_and_a_bridge_with_the_same_weights_agree(options):
    native = native_bridge(**options)
    theirs, ours = head_scores(native, **FEW), head_scores(from_native(native), **FEW)
    for name, scores in ours.measures.items():
        for field in ("scores", "null_mean", "null_sd", "p"):
            assert torch.allclose(getattr(scores, field), getattr(theirs[name], field), atol=1e-4), (name, field)


def test_bfloat16_is_read_as_what_it_is():
    rough = build().bfloat16()
    exact = build()
    exact.load_state_dict({name: weight.float() for name, weight in rough.state_dict().items()})
    found, expected = head_scores(rough, **FEW), head_scores(exact, **FEW)
    for name in ("previous_token", "prefix_matching", "copying"):
        assert found[name].scores.dtype == torch.float32
        assert torch.allclose(found[name].scores, expected[name].scores, atol=0.03), name


def test_copying_is_estimated_from_a_part_of_a_large_vocabulary(monkeypatch):
    model = fresh(d_vocab=800)
    full = head_scores(model, **FEW)["copying"].scores
    monkeypatch.setattr(heads, "VOCABULARY", 400)
    part = head_scores(model, **FEW)["copying"].scores
    assert not torch.equal(part, full)
    assert torch.allclose(part, full, rtol=0.15)


def test_a_model_without_layers_has_no_scores():
    model = fresh(n_layers=0)
    found = head_scores(model, **FEW)
    assert all(scores.scores.shape == (0, 2) for scores in found.measures.values())
    assert len(found.to_frame()) == len(found.table()) == 0
    assert "no roles" in repr(found)
    assert qk_trace(model).scores.shape == (0, 2)


def test_bad_models_and_questions_are_refused():
    model = build()
    with pytest.raises(Undefined, match="13 tokens, but this model has a context of 12"):
        head_scores(model, length=13)
    with pytest.raises(Undefined, match="1 sequences and 199 draws"):
        head_scores(model, sequences=1)
    with pytest.raises(Undefined, match="at least 2 and 39"):
        head_scores(model, draws=10)
    with pytest.raises(NoSuchPart, match="no measure 'inductive'; expected one of previous_token"):
        head_scores(model, **FEW)["inductive"]
    model.blocks[1].attn.W_Q.data *= 1e30
    model.blocks[1].attn.W_K.data *= 1e30
    with pytest.raises(BadModel, match="W_Q holds values beyond 1e8"):
        head_scores(model, **FEW)


def test_the_same_seed_gives_the_same_and_leaves_no_hooks():
    model = build()
    first, second = head_scores(model, **FEW), head_scores(model, **FEW)
    assert all(torch.equal(first[name].null_mean, second[name].null_mean) for name in first.measures)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_frames_and_printing():
    found = head_scores(build(), **FEW)
    frame = found.to_frame()
    assert len(frame) == 4 * len(found.measures)
    row = frame[(frame["measure"] == "copying") & (frame["head"] == "1.0")].iloc[0]
    assert row["score"] == pytest.approx(found["copying"]["1.0"].value)
    assert row["se"] == pytest.approx(found.standard_error["copying"][1, 0].item())
    table = found.table().set_index("head")
    assert table.loc["1.0", "entropy z"] == pytest.approx(found["entropy"]["1.0"].z.item())
    assert "4 repeated sequences of 12 tokens" in repr(found)
    assert "<table" in found._repr_html_()


# QK trace


@pytest.mark.parametrize(("make", "fold"), [(build, True), (build, False), (native_bridge, True)])
def test_qk_trace_is_that_of_dense_matrices(make, fold):
    model = make(n_layers=3)
    previous = torch.rand(3, 2, generator=generator())
    found, w = qk_trace(model, previous=previous, fold=fold), read(model, fold)
    assert found.basis == ("folded" if fold else "raw")
    assert not found.defined[0].any() and found.defined[1:].all()
    for layer in (1, 2):
        for head in range(2):
            qk = w.W_Q[layer, head] @ w.W_K[layer, head].T
            expected, variance = 0.0, 0.0
            for l1 in range(layer):
                for h1 in range(2):
                    ov = w.W_V[l1, h1] @ w.W_O[l1, h1]
                    expected += previous[l1, h1] * (w.W_E @ qk @ ov.T @ w.W_E.T).trace()
                    turned = ov.T @ w.W_E.T @ w.W_E @ qk  # tr(Rᵀ X)
                    variance += previous[l1, h1] ** 2 * turned.pow(2).sum() / w.width
            assert found.scores[layer, head].item() == pytest.approx(float(expected), rel=1e-3, abs=1e-3)
            assert found.null_sd[layer, head].item() == pytest.approx(float(variance) ** 0.5, rel=1e-3)


def test_the_null_of_the_qk_trace_is_what_turned_writers_give():
    w = read(build(), fold=True)
    previous = torch.tensor([[0.7, 0.2], [0.0, 0.0]])
    found = qk_trace(build(), previous=previous)
    qk = torch.einsum("hmd, hnd -> hmn", w.W_Q[1], w.W_K[1])
    turns = torch.linalg.qr(torch.randn(2, 2000, w.width, w.width, generator=generator()))
    turns = turns.Q * turns.R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    gram = w.W_E.T @ w.W_E
    drawn = torch.zeros(2000, 2)
    for head in range(2):
        ov = w.W_V[0, head] @ (w.W_O[0, head] @ w.written) @ turns[head] @ w.written.T
        drawn += previous[0, head] * torch.einsum("rmn, nkm -> kr", gram @ qk, ov.permute(2, 0, 1))
    assert torch.allclose(drawn.std(0), found.null_sd[1], rtol=0.08)
    assert (drawn.mean(0).abs() < 4 * found.null_sd[1] / 2000**0.5).all()
    outside = (drawn < found.band[0, 1]) | (drawn > found.band[1, 1])
    assert 0.03 < outside.float().mean() < 0.07


def test_qk_trace_measures_previous_token_scores_itself():
    model = wb.load("induction-2-attn").model
    found = qk_trace(model)
    assert (found.z[1] > 10).all()
    measured = head_scores(model, **FEW | {"sequences": 12})["previous_token"].scores
    assert torch.allclose(found.scores, qk_trace(model, previous=measured).scores, rtol=1e-4)
    with pytest.raises(Undefined, match="replace the token"):
        qk_trace(fresh(residual=False))
