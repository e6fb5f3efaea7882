"""Every term against its path written out by hand; every sum against the model; every score against the model's own."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from paths_by_hand import ByHand, distance
from support import build, from_native, gpt2_bridge, native_bridge
from torch import Tensor
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import LlamaConfig, LlamaForCausalLM

import workbench as wb
from circuits.composition import virtual_heads
from circuits.cuts import Path, cut
from circuits.decompose import Term, chain_contributions, decompose_attention_scores, decompose_logits
from circuits.errors import CircuitError, NoSuchPart, Undefined
from circuits.surface import folded
from workbench.known_answers import induction_pair
from workbench.positions import alibi, rotate
from workbench.recipes import shipped_names

TOKENS = torch.tensor([[3, 17, 4, 1, 5, 0, 4]])
KINDS: list[dict[str, Any]] = [
    {"d_mlp": 7}, {"norm": "none", "d_mlp": 7}, {"d_mlp": 0}, {"d_mlp": 0, "norm": "none"}, {"positions": "rotary"},
    {"positions": "alibi", "d_mlp": 7}, {"positions": "shortformer"}, {"positions": "shortformer", "norm": "none"},
    {"positions": "sinusoidal"}, {"positions": "none"}, {"value_output": "value", "bias_unembed": True},
    {"value_output": "identity", "attention": "softmax-unscaled"}, {"query_key": "tied", "tied_unembedding": True},
    {"attention": "uniform"}, {"bias_qkv": False, "bias_out": False, "norm": "none"},
]  # fmt: skip
UNDEFINED: list[tuple[dict[str, Any], str]] = [
    ({"norm": "post"}, "LayerNorm after each addition"), ({"residual": False}, "replace the token"),
]  # fmt: skip


def three_layers(**options: Any) -> Any:
    """Three layers of two heads in float64."""
    return build(**{"n_layers": 3, "d_model": 12} | options).double()


# Logits


@pytest.mark.parametrize("options", KINDS)
@torch.no_grad()
def test_every_term_is_its_path_written_out(options: dict[str, Any]) -> None:
    model = three_layers(**options)
    hand = ByHand(model, TOKENS)
    expected = hand.terms()
    for position, at in ((-1, 6), (2, 2)):
        terms = decompose_logits(model, TOKENS, position, max_order=3)
        assert {term.name for term in terms.terms} == {
            name for name, value in expected.items() if not name.startswith("bias →") or bool(value.any())
        }
        for term, value in zip(terms.terms, terms.values, strict=True):
            assert distance(value, expected[term.name][at]) <= 1e-10
            assert torch.equal(terms[term], terms[term.name])
            assert distance(terms[term], value) <= 1e-12
        assert distance(terms.total, hand.logits[0, at]) <= 1e-10
        assert distance(terms.values.sum(0), hand.logits[0, at]) <= 1e-10


@pytest.mark.parametrize("options", [{"d_mlp": 7}, {"norm": "none"}])
@pytest.mark.parametrize("max_order", [0, 1, 2])
@torch.no_grad()
def test_what_is_longer_is_one_exact_term(options: dict[str, Any], max_order: int) -> None:
    model = three_layers(**options)
    terms = decompose_logits(model, TOKENS, max_order=max_order)
    longer = [value[-1] for name, value in ByHand(model, TOKENS).terms().items() if name.count("→") > max_order]
    assert terms.terms[-1] == Term("remainder")
    assert all(len(term.heads) <= max_order for term in terms.terms)
    assert distance(terms["remainder"], torch.stack(longer).sum(0)) <= 1e-10
    assert terms["remainder"].abs().max() > 1e-4
    assert distance(terms.total, model(TOKENS)[0, -1]) <= 1e-10


@pytest.mark.parametrize("name", shipped_names())
@torch.no_grad()
def test_terms_sum_to_the_logits_of_every_shipped_model(name: str) -> None:
    run = wb.load(name)
    tokens = run.task.held_out[:1]
    if not run.model.config.residual:
        with pytest.raises(Undefined, match="replace the token"):
            decompose_logits(run.model, tokens)
        return
    logits = run.model(tokens)[0]
    for position in (0, tokens.shape[1] // 2, -1):
        for max_order in (1, 2):
            terms = decompose_logits(run.model, tokens, position, max_order=max_order)
            assert distance(terms.total, logits[position]) <= 1e-4
            assert distance(terms.values.sum(0), logits[position]) <= 1e-4


@pytest.mark.parametrize("make", [
    lambda: gpt2_bridge(0, n_layers=3), lambda: gpt2_bridge(1, n_heads=4, d_model=32, d_vocab=50),
    lambda: folded(gpt2_bridge(2)), lambda: native_bridge(d_mlp=24), lambda: native_bridge(normalization_type=None),
    lambda: native_bridge(positional_embedding_type="rotary"), lambda: native_bridge(normalization_type="RMS"),
    lambda: folded(build(d_mlp=7)), lambda: wb.load("winograd-2").model,
])  # fmt: skip
@torch.no_grad()
def test_terms_sum_to_the_logits_of_bridges_and_folded_models(make: Any) -> None:
    model = make()
    for position in (1, -1):
        for max_order in (0, 1, 2, 5):
            terms = decompose_logits(model, TOKENS, position, max_order=max_order)
            assert distance(terms.total, model(TOKENS)[0, position]) <= 1e-4


@pytest.mark.parametrize("options", [{"d_mlp": 24}, {"normalization_type": None}])
@torch.no_grad()
def test_a_bridge_has_the_terms_of_the_same_model_of_ours(options: dict[str, Any]) -> None:
    bridge = native_bridge(**options)
    theirs, ours = (decompose_logits(model, TOKENS) for model in (bridge, from_native(bridge)))
    assert theirs.terms == ours.terms
    assert distance(theirs.values, ours.values) <= 1e-5


@pytest.mark.parametrize("options", [{"d_mlp": 7, "bias_unembed": True}, {"norm": "none"}])
@torch.no_grad()
def test_terms_split_by_where_their_source_stands(options: dict[str, Any]) -> None:
    model = three_layers(**options)
    hand, terms = ByHand(model, TOKENS), decompose_logits(model, TOKENS, 4)
    names = ["embed", "bias", "pos → 0.1", "embed → 0.1 → 2.0", "bias → 1.1 → 2.1"]
    split = terms.by_source(names)
    assert split.shape == (5, 7, 20)
    for name, value in zip(names, split, strict=True):
        assert distance(value.sum(0), terms[name]) <= 1e-10
    assert distance(split[0, 4], terms["embed"]) <= 1e-10
    for source in range(7):
        alone = torch.zeros_like(hand.cache["hook_embed"][0])
        alone[source] = hand.cache["hook_embed"][0, source]
        assert distance(split[3, source], hand.end(hand.head(hand.head(alone, 0, 1), 2, 0))[4]) <= 1e-10
    layers = decompose_logits(model, TOKENS, 4, heads=False)
    assert distance(layers.by_source(["embed → 0.all → 2.all"]).sum((0, 1)), layers["embed → 0.all → 2.all"]) <= 1e-10
    with pytest.raises(NoSuchPart, match="raise max_order"):
        terms.by_source(["remainder"])


@torch.no_grad()
def test_layers_are_the_sums_of_their_heads() -> None:
    model = three_layers(d_mlp=7)
    heads, layers = (decompose_logits(model, TOKENS, heads=each) for each in (True, False))
    expected = sum(heads[f"0.mlp → 1.{i} → 2.{j}"] for i in range(2) for j in range(2))
    assert distance(layers["0.mlp → 1.all → 2.all"], expected) <= 1e-12  # pyright: ignore[reportArgumentType]
    assert distance(layers.total, heads.total) <= 1e-12
    assert len(layers.terms) < len(heads.terms)


@torch.no_grad()
def test_pairs_are_the_virtual_heads_without_a_norm() -> None:
    model: Any = build(norm="none")
    terms = decompose_logits(model, TOKENS)
    for pair in virtual_heads(model, TOKENS):
        moved = pair.pattern[-1] @ model.W_E[TOKENS[0]] @ pair.ov.left @ pair.ov.right @ model.W_U
        assert distance(terms[Term("embed", (pair.writer, pair.reader))], moved) <= 1e-5


@torch.no_grad()
def test_frames_and_representations() -> None:
    model = three_layers(d_mlp=7)
    terms = decompose_logits(model, TOKENS, 3)
    frame = terms.to_frame([5, 7], answer=7, foil=5)
    logits = model(TOKENS)[0, 3]
    assert list(frame.columns) == ["term", "source", "heads", "order", "logit 5", "logit 7", "answer − foil"]
    assert abs(frame["logit 5"].sum() - logits[5].item()) <= 1e-10
    assert abs(frame["answer − foil"].sum() - (logits[7] - logits[5]).item()) <= 1e-10
    row = frame[frame.term == "embed → 0.1 → 1.0"].iloc[0]
    assert (row.source, row.heads, row.order) == ("embed", "0.1 → 1.0", 2)
    assert abs(row["logit 7"] - terms["embed → 0.1 → 1.0"][7].item()) <= 1e-12
    best, second = logits.topk(2).indices.tolist()
    assert f"for token {best} minus {second}" in repr(terms)
    assert "Q- and K-composition hide" in terms._repr_html_() and "<table" in terms._repr_html_()
    assert abs(terms.to_frame()["answer − foil"].sum() - (logits[best] - logits[second]).item()) <= 1e-10


# Chains of two hops


@pytest.mark.parametrize("options", [{"d_mlp": 7}, {"norm": "none"}, {"positions": "shortformer"}])
@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (0, 2)])
@torch.no_grad()
def test_chains_are_those_written_out(options: dict[str, Any], layers: tuple[int, int]) -> None:
    model = three_layers(**options)
    hand, position = ByHand(model, TOKENS), 5
    direction = torch.randn(20, generator=torch.Generator().manual_seed(1)).double()
    chains = chain_contributions(model, TOKENS, position, direction, layers)
    assert chains.shape == (2, 2, 7, 7)
    assert distance(chains, chain_contributions(model, TOKENS, -2, model.W_U @ direction, layers)) <= 1e-12
    stream = hand.cache[f"blocks.{layers[0]}.hook_resid_pre"][0]
    for first, second, source, middle in product(range(2), range(2), range(7), range(7)):
        alone, between = torch.zeros_like(stream), torch.zeros_like(stream)
        alone[source] = stream[source]
        between[middle] = hand.head(alone, layers[0], first)[middle]
        expected = hand.end(hand.head(between, layers[1], second))[position] @ direction
        assert abs(chains[first, second, source, middle] - expected) <= 1e-10
    if layers[0] == 0:
        terms = decompose_logits(model, TOKENS, position)
        heads = ((0, 1), (layers[1], 0))
        both = [terms[term] for term in terms.terms if term.heads == heads]
        assert abs(chains[1, 0].sum() - torch.stack(both).sum(0) @ direction) <= 1e-10


@torch.no_grad()
def test_chains_of_a_bridge_are_those_of_ours() -> None:
    bridge = native_bridge(d_mlp=24)
    direction = torch.eye(20)[3] - torch.eye(20)[4]
    theirs, ours = (chain_contributions(m, TOKENS, -1, direction) for m in (bridge, from_native(bridge)))
    assert distance(theirs, ours) <= 1e-5
    assert theirs.abs().max() > 1e-2


# Attention scores


@pytest.mark.parametrize("options", KINDS)
@torch.no_grad()
def test_score_terms_sum_to_the_models_scores(options: dict[str, Any]) -> None:
    model = build(**options | {"n_layers": 3, "d_model": 12})
    _, cache = model.run_with_cache(TOKENS)
    for head, destination in (("0.1", 4), ("1.0", 6), ("2.1", 5), ("2.0", 0)):
        layer, number = (int(part) for part in head.split("."))
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"][0, number, destination, : destination + 1]
        terms = decompose_attention_scores(model, TOKENS, head, destination)
        assert distance(terms.total, scores - scores.mean()) <= 1e-4
        assert distance(terms.values.mean(-1), torch.zeros(1)) <= 1e-5
        one = decompose_attention_scores(model, TOKENS, (layer, number), destination - 7, destination // 2)
        assert one.sources == (destination // 2,)
        assert torch.equal(one.values[:, :, 0], terms.values[:, :, destination // 2])


@pytest.mark.parametrize("positions", ["learned", "rotary", "alibi", "shortformer"])
@pytest.mark.parametrize("norm", ["pre", "none"])
@torch.no_grad()
def test_each_score_term_is_its_part_of_the_query_times_its_part_of_the_key(positions: str, norm: str) -> None:
    model: Any = build(n_layers=2, d_mlp=7, norm=norm, positions=positions).double()
    hand, attention = ByHand(model, TOKENS), model.blocks[1].attn
    terms = decompose_attention_scores(model, TOKENS, "1.1", 5)
    earlier = ["0.0", "0.1", "0.mlp", "bias"]
    start = {"learned": ["embed", "pos"], "shortformer": ["embed"]}.get(positions, ["embed"])
    end = {"shortformer": ["pos"], "alibi": ["alibi"]}.get(positions, [])
    assert list(terms.components) == start + earlier + end
    z, cache = hand.cache["blocks.0.attn.hook_z"][0], hand.cache
    parts = {"embed": cache["hook_embed"][0], "0.mlp": cache["blocks.0.hook_mlp_out"][0]}
    parts |= {f"0.{head}": z[:, head] @ model.blocks[0].attn.W_O[head] for head in range(2)}
    parts |= {"bias": model.blocks[0].attn.b_O.expand(7, -1)}
    parts |= {"pos": cache["hook_pos_embed"][0]} if positions == "learned" else {}
    norm_of = getattr(model.blocks[1], "ln1", None)
    parts = {name: hand.norm(part, "blocks.1.hook_resid_pre", norm_of) for name, part in parts.items()}
    parts["bias"] = parts["bias"] + (0 if norm_of is None else norm_of.b)
    parts |= {"pos": model.W_pos[:7]} if positions == "shortformer" else {}
    for first, second in product(parts, parts):
        q, k = parts[first] @ attention.W_Q[1], parts[second] @ attention.W_K[1]
        q, k = (q + attention.b_Q[1] * (first == "bias"), k + attention.b_K[1] * (second == "bias"))
        if positions == "rotary":
            q, k = rotate(q[None, :, None])[0, :, 0], rotate(k[None, :, None])[0, :, 0]
        scores = q[5] @ k[:6].T / math.sqrt(8)
        assert distance(terms[first, second], scores - scores.mean()) <= 1e-9
    if positions == "alibi":
        slope = alibi(2, 7)[1, 5, :6].double()
        assert distance(terms["alibi", "alibi"], slope - slope.mean()) <= 1e-9
        assert not terms["alibi", "embed"].any() and not terms["embed", "alibi"].any()


@pytest.mark.parametrize(("make", "rotary"), [
    (lambda: gpt2_bridge(n_layers=3), False), (lambda: native_bridge(d_mlp=24), False),
    (lambda: native_bridge(normalization_type=None), False),
    (lambda: native_bridge(positional_embedding_type="rotary"), True),
])  # fmt: skip
@torch.no_grad()
def test_score_terms_of_bridges_sum_to_queries_times_keys(make: Any, rotary: bool) -> None:
    model = make()
    _, cache = model.run_with_cache(TOKENS)
    for layer, destination in ((0, 6), (1, 4), (model.cfg.n_layers - 1, 5)):
        q, k = (cache[f"blocks.{layer}.attn.hook_{name}"] for name in "qk")
        q, k = (rotate(q), rotate(k)) if rotary else (q, k)
        scores = q[0, destination, 1] @ k[0, : destination + 1, 1].T / math.sqrt(8)
        terms = decompose_attention_scores(model, TOKENS, (layer, 1), destination)
        assert distance(terms.total, scores - scores.mean()) <= 1e-4
        assert terms.total.abs().max() > 0.1


@torch.no_grad()
def test_llama_with_shared_keys_and_rotations_of_its_own() -> None:
    """Keys and values shared by two heads each, RMSNorm, a gated feed-forward layer, pairs half a head apart."""
    torch.manual_seed(0)
    inner = LlamaForCausalLM(LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=20, max_position_embeddings=12, initializer_range=0.5,
    )).eval()  # fmt: skip
    config = TransformerBridgeConfig(
        d_model=16, d_head=4, n_layers=2, n_ctx=12, n_heads=4, n_key_value_heads=2, d_vocab=20, d_mlp=24,
        act_fn="silu", normalization_type="RMS", positional_embedding_type="rotary", gated_mlp=True,
        architecture="LlamaForCausalLM",
    )  # fmt: skip
    model: Any = build_bridge_from_module(inner, "LlamaForCausalLM", tl_config=config).eval()
    logits, cache = model.run_with_cache(TOKENS)
    for max_order in (0, 1, 2):
        assert distance(decompose_logits(model, TOKENS, max_order=max_order).total, logits[0, -1]) <= 1e-4
    for layer, head in ((0, 1), (1, 1), (1, 2)):
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"][0, head, 5, :6]
        terms = decompose_attention_scores(model, TOKENS, (layer, head), 5)
        assert distance(terms.total, scores - scores.mean()) <= 1e-4
        assert terms.total.abs().max() > 0.1


@torch.no_grad()
def test_the_hand_built_induction_head_matches_tokens_with_what_the_previous_token_head_wrote() -> None:
    known = induction_pair()
    tokens = known.tokens[:1] if isinstance(known.tokens, Tensor) else TOKENS
    attended = known.model.run_with_cache(tokens)[1]["blocks.1.attn.hook_pattern"][0, 0, -1]
    terms = decompose_attention_scores(known.model, tokens, "1.0", -1, int(attended.argmax()))
    at = int(terms.values[:, :, 0].argmax())
    assert (terms.components[at // len(terms.components)], terms.components[at % len(terms.components)]) == (
        "embed", "0.0",
    )  # fmt: skip


@torch.no_grad()
def test_score_frames_and_representations() -> None:
    model = build(d_mlp=7)
    terms = decompose_attention_scores(model, TOKENS, "1.0", 3)
    frame = terms.to_frame()
    assert list(frame.columns) == ["destination_component", "source_component", "source", "score"]
    assert len(frame) == terms.values.numel()
    row = frame[(frame.destination_component == "pos") & (frame.source_component == "0.1") & (frame.source == 2)]
    assert row.score.item() == terms["pos", "0.1"][2].item()
    assert "head 1.0 at position 3" in repr(terms) and "<table" in terms._repr_html_()
    with pytest.raises(NoSuchPart, match="expected one of embed"):
        terms["embed", "1.1"]


# What cannot be asked


@pytest.mark.parametrize(("options", "why"), UNDEFINED)
def test_no_decomposition_where_the_stream_is_no_sum(options: dict[str, Any], why: str) -> None:
    model = build(**options)
    for ask in (
        lambda: decompose_logits(model, TOKENS),
        lambda: decompose_attention_scores(model, TOKENS, "1.0", 3),
        lambda: chain_contributions(model, TOKENS, -1, torch.ones(20)),
    ):
        with pytest.raises(Undefined, match=why):
            ask()


def test_no_decomposition_under_active_dropout_or_a_cut() -> None:
    with pytest.raises(Undefined, match=r"call eval\(\)"):
        decompose_logits(build(dropout=0.5).train(), TOKENS)
    model = build()
    with cut(model, Path("0.0", "V", "1.0"), "zero"), pytest.raises(Undefined, match="do not add up"):
        decompose_logits(model, TOKENS)
    with cut(model, Path("0.0", "Q", "1.0"), "zero"), pytest.raises(Undefined, match="do not give the pattern"):
        decompose_attention_scores(model, TOKENS, "1.0", 6)
    decompose_logits(model, TOKENS)


def test_bad_questions_get_one_clear_line() -> None:
    model = build()
    questions: list[tuple[Any, type[Exception], str]] = [
        (lambda: decompose_logits(model, TOKENS, 7), NoSuchPart, "the prompt has 7 tokens"),
        (lambda: decompose_logits(model, TOKENS, -8), NoSuchPart, "the prompt has 7 tokens"),
        (lambda: decompose_logits(model, TOKENS, max_order=-1), ValueError, "0 or more"),
        (lambda: decompose_logits(model, TOKENS.repeat(2, 1)), ValueError, "one prompt"),
        (lambda: decompose_logits(model, TOKENS.float()), ValueError, "whole numbers"),
        (lambda: decompose_logits(model, TOKENS)["embed → 3.0"], NoSuchPart, "no term embed → 3.0"),
        (lambda: decompose_logits(model, TOKENS).toward(20, 0), NoSuchPart, "the vocabulary has 20"),
        (lambda: decompose_logits(model, TOKENS).to_frame([-1]), NoSuchPart, "the vocabulary has 20"),
        (lambda: decompose_attention_scores(model, TOKENS, "2.0", 1), NoSuchPart, "no head 2.0"),
        (lambda: decompose_attention_scores(model, TOKENS, "1.0", 7), NoSuchPart, "the prompt has 7 tokens"),
        (lambda: decompose_attention_scores(model, TOKENS, "1.0", 3, 4), NoSuchPart, "no position 4"),
        (lambda: chain_contributions(model, TOKENS, -1, torch.ones(3)), ValueError, "expected 20"),
        (lambda: chain_contributions(model, TOKENS, -1, torch.ones(20), (1, 1)), NoSuchPart, "no chain"),
        (lambda: chain_contributions(model, TOKENS, -1, torch.ones(20), (0, 2)), NoSuchPart, "no chain"),
        (lambda: decompose_logits(torch.nn.Linear(2, 2), TOKENS), CircuitError, "TransformerLens' surface"),
    ]
    for ask, error, message in questions:
        with pytest.raises(error, match=message):
            ask()
