"""Every number of a head's steps is the model's own, and a changed step is what the model does when it is changed."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import build, gpt2_bridge, native_bridge
from torch import Tensor

from circuits.attention import contribution_maps
from circuits.errors import NoSuchPart, Undefined
from circuits.steps import answer_plane, predicted, step_by_step

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
OPTIONS: list[dict[str, Any]] = [
    {}, {"attention": "softmax-unscaled"}, {"attention": "uniform"}, {"query_key": "identity"}, {"query_key": "tied"},
    {"positions": "rotary"}, {"positions": "alibi"}, {"positions": "alibi", "n_heads": 3, "d_model": 18},
    {"positions": "shortformer"}, {"positions": "sinusoidal"}, {"positions": "none"}, {"norm": "post"},
    {"norm": "post", "d_mlp": 0}, {"norm": "none"}, {"residual": False}, {"d_mlp": 0}, {"value_output": "identity"},
    {"value_output": "value"}, {"bias_qkv": False},
]  # fmt: skip
MODELS = [*(lambda options=options: build(**options) for options in OPTIONS), gpt2_bridge, native_bridge,
          lambda: native_bridge(positional_embedding_type="rotary"), lambda: native_bridge(d_mlp=32)]  # fmt: skip
NAMES = [*map(str, OPTIONS), "GPT-2 bridge", "native bridge", "native, rotary", "native with neurons"]


def near(a: Tensor, b: Tensor, within: float = 1e-5) -> bool:
    return a.shape == b.shape and float((a - b).detach().abs().max()) <= within


def cache_of(model: Any) -> Any:
    with torch.no_grad():
        return model.run_with_cache(TOKENS)[1]


def hooked(model: Any, name: str, put: Any) -> Tensor:
    """Logits with an activation edited by `put(activation)`."""

    def hook_function(x: Tensor, hook: Any) -> Tensor:
        x = x.clone()
        put(x)
        return x

    with torch.no_grad():
        return model.run_with_hooks(TOKENS, fwd_hooks=[(name, hook_function)])[0]


@pytest.mark.parametrize("make", MODELS, ids=NAMES)
@torch.no_grad()
def test_every_step_is_what_the_models_hooks_hold(make: Any) -> None:
    model = make()
    cache, logits = cache_of(model), model(TOKENS)[0]
    for head, at in (("0.1", 7), ("1.0", 4), ("1.1", 0)):
        steps = step_by_step(model, TOKENS, head, at)
        layer, h = steps.head
        here = f"blocks.{layer}."
        assert near(steps.stream, cache[here + "hook_resid_pre"][0])
        query, keys = (steps.query, steps.keys) if steps.unturned is None else steps.unturned
        assert near(query, cache[here + "attn.hook_q"][0, at, h])
        assert near(keys, cache[here + "attn.hook_k"][0, :, h])
        assert near(steps.values, cache[here + "attn.hook_v"][0, :, h])
        assert near(steps.pattern, cache[here + "attn.hook_pattern"][0, h, at])
        assert near(steps.z, cache[here + "attn.hook_z"][0, at, h])
        assert near(steps.by_source.sum(0), steps.result)
        assert near(steps.result + steps.others, cache[here + "hook_attn_out"][0, at])
        after = "hook_resid_mid" if here + "hook_resid_mid" in cache.cache_dict else "hook_resid_post"
        assert near(steps.after(), cache[here + after][0, at])
        assert near(steps.logits, logits[at])
        assert near(predicted(model, TOKENS, steps), logits[at])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_scores_and_turned_queries_are_those_before_the_softmax(options: dict[str, Any]) -> None:
    model = build(**options)
    steps, cache = step_by_step(model, TOKENS, "1.1", 5), cache_of(model)
    scores = cache["blocks.1.attn.hook_attn_scores"][0, 1, 5]
    assert near(steps.scores[:6], scores[:6]) and bool((steps.scores[6:] == -torch.inf).all())
    if options.get("positions") == "rotary":
        assert near(steps.query, cache["blocks.1.attn.hook_rot_q"][0, 5, 1])
        assert near(steps.keys, cache["blocks.1.attn.hook_rot_k"][0, :, 1])
        assert steps.unturned is not None and not near(steps.query, steps.unturned[0], 0.01)
    if options.get("positions") == "alibi":
        assert steps.slope > 0
        assert near(steps.penalty[:6], -steps.slope * torch.tensor([5.0, 4, 3, 2, 1, 0]))


def test_layer_norm_as_it_acts_here() -> None:
    model = build()
    steps, cache = step_by_step(model, TOKENS, "1.0"), cache_of(model)
    norm = steps.norm_before
    assert norm is not None and steps.norm_after is None
    assert near(norm.scale(steps.stream)[:, None], cache["blocks.1.ln1.hook_scale"][0])
    assert near(steps.read, model.blocks[1].ln1(cache["blocks.1.hook_resid_pre"])[0])
    assert step_by_step(build(norm="none"), TOKENS, "1.0").norm_before is None
    post = step_by_step(build(norm="post"), TOKENS, "1.0")
    assert post.norm_before is None and post.norm_after is not None


def test_without_the_scale_it_is_the_unscaled_model_of_the_same_weights() -> None:
    model, unscaled = build(), build(attention="softmax-unscaled")
    unscaled.load_state_dict(model.state_dict())
    without, theirs = replace(step_by_step(model, TOKENS, "0.1"), scaled=False), step_by_step(unscaled, TOKENS, "0.1")
    assert near(without.pattern, theirs.pattern)
    assert not near(without.pattern, step_by_step(model, TOKENS, "0.1").pattern, 1e-3)
    pattern = cache_of(unscaled)["blocks.0.attn.hook_pattern"]

    def put(x: Tensor) -> None:
        x[0, 1, 7] = pattern[0, 1, 7]

    expected = hooked(model, "blocks.0.attn.hook_pattern", put)[7]
    assert near(predicted(model, TOKENS, without), expected)


def test_without_the_mask_it_sees_later_words() -> None:
    model, at = build(), 3
    steps = replace(step_by_step(model, TOKENS, "1.0", at), masked=False)
    cache = cache_of(model)
    q, k, v = (cache[f"blocks.1.attn.hook_{x}"][0, :, 0] for x in "qkv")
    pattern = (q[at] @ k.T / k.shape[1] ** 0.5).softmax(-1)
    assert near(steps.pattern, pattern) and float(pattern[at + 1 :].sum()) > 0.1

    def put(z: Tensor) -> None:
        z[0, at, 0] = pattern @ v

    assert near(predicted(model, TOKENS, steps), hooked(model, "blocks.1.attn.hook_z", put)[at])


@pytest.mark.parametrize("options", [{}, {"norm": "post"}, {"residual": False}, {"positions": "alibi"}], ids=str)
def test_another_query_another_product_and_another_size_go_through_the_rest_of_the_model(options: Any) -> None:
    model, at = build(**options), 5
    steps = step_by_step(model, TOKENS, "0.1", at)
    query = torch.linspace(-2, 2, len(steps.query))

    def put_query(q: Tensor) -> None:
        q[0, at, 1] = query

    def put_product(scores: Tensor) -> None:
        scores[0, 1, at, 2] += 3 / steps.divisor

    def no_head(z: Tensor) -> None:
        z[0, at, 1] = 0

    changed = predicted(model, TOKENS, replace(steps, query=query))
    assert near(changed, hooked(model, "blocks.0.attn.hook_q", put_query)[at])
    assert not near(changed, steps.logits, 1e-3)
    products = steps.products.clone()
    products[2] += 3
    changed = predicted(model, TOKENS, replace(steps, other_products=products))
    assert near(changed, hooked(model, "blocks.0.attn.hook_attn_scores", put_product)[at])
    assert near(predicted(model, TOKENS, steps, 0.0), hooked(model, "blocks.0.attn.hook_z", no_head)[at])
    twice = steps.after(2.0)
    if options.get("norm") != "post":
        assert near(twice - steps.after(), steps.result)


@pytest.mark.parametrize("options", [{}, {"bias_unembed": True}, {"norm": "post"}, {"norm": "post", "d_mlp": 0}])
def test_gain_and_bias_of_the_last_layer_norm(options: dict[str, Any]) -> None:
    model = build(**options)
    steps, other = step_by_step(model, TOKENS, "1.1"), copy.deepcopy(model)
    last = (
        other.ln_final
        if not options.get("norm")
        else other.blocks[1].ln1
        if "d_mlp" in options
        else other.blocks[1].ln2
    )
    with torch.no_grad():
        last.w *= 1.7  # pyright: ignore
        last.b *= 0.4  # pyright: ignore
    assert near(steps.stretched(steps.logits, 1.7, 0.4), other(TOKENS)[0, -1])
    assert not near(steps.logits, other(TOKENS)[0, -1], 1e-2)
    with pytest.raises(Undefined, match="no LayerNorm before its unembedding"):
        plain = step_by_step(build(norm="none"), TOKENS, "1.1")
        plain.stretched(plain.logits, 2.0)


@pytest.mark.parametrize("options", [{}, {"norm": "none"}, {"positions": "rotary"}, {"d_mlp": 0}], ids=str)
def test_the_plane_holds_the_contributions_to_the_two_answers(options: dict[str, Any]) -> None:
    model = build(**options)
    steps = step_by_step(model, TOKENS, "0.1", 6)
    plane = answer_plane(model, TOKENS, steps, 3, 7)
    expected = contribution_maps(model, TOKENS, 3, 7).patterns[0, 1, 6]  # an own path through frozen scales
    assert near(plane.sources[:, 0], expected)
    u = model.W_U[:, [3, 7]].T.detach()
    if not options.get("norm"):
        u = u * model.get_parameter("ln_final.w").detach()
        u = u - u.mean(-1, keepdim=True)
    cosine = torch.cosine_similarity(u[0], u[1], dim=0)
    assert abs(float(plane.answer @ plane.foil - cosine)) <= 1e-5
    assert near(plane.answer.norm() + plane.foil.norm(), torch.tensor(2.0))
    assert float(plane.answer[0]) > float(plane.foil[0])  # the answer lies to the right
    # in the plane: the projection's length is that of Δ onto the two directions
    basis = torch.linalg.qr(u.T).Q
    ratio = plane.total.norm() / (steps.result @ basis).norm()
    assert abs(float(ratio - plane.sources[2].norm() / (steps.by_source[2] @ basis).norm())) <= 1e-4


def test_what_there_is_not_is_refused_in_one_line() -> None:
    model = build()
    for head, destination, why in (("2.0", 1, "no head 2.0"), ("x", 1, "is no head"), ("0.0", 99, "no position 99")):
        with pytest.raises(NoSuchPart, match=why):
            step_by_step(model, TOKENS, head, destination)
    steps = step_by_step(model, TOKENS, "0.0")
    with pytest.raises(NoSuchPart, match="no token 20"):
        answer_plane(model, TOKENS, steps, 20, 1)
    with pytest.raises(Undefined, match="span no plane"):
        answer_plane(model, TOKENS, steps, 2, 2)
    cases = (build(norm="post"), "LayerNorm after"), (build(residual=False), "replace the token")
    for other, why in cases:
        with pytest.raises(Undefined, match=why):
            answer_plane(other, TOKENS, step_by_step(other, TOKENS, "0.0"), 1, 2)
    dropping = build(dropout=0.5).train()
    with pytest.raises(Undefined, match=r"do not give what head 1\.0 did"):
        torch.manual_seed(0)
        step_by_step(dropping, TOKENS, "1.0")
    with pytest.raises(ValueError, match="one prompt"):
        step_by_step(model, TOKENS[0], "0.0")
