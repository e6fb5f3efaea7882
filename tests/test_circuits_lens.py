"""TransformerLens' tools as this project asks them: sums that close, and patches that a loop of hooks makes too."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import build, gpt2_bridge, native_bridge
from torch import Tensor

from circuits.attention import contribution_maps
from circuits.decompose import decompose_logits
from circuits.errors import NoSuchPart
from circuits.errors import Undefined as NotDefined
from circuits.lens import MOST_RUNS, attribution, neurons, patching, stream_words
from circuits.surface import folded
from workbench.errors import Undefined

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
OTHER = torch.tensor([[3, 1, 7, 1, 5, 9, 2, 6]])
OPTIONS: list[dict[str, Any]] = [
    {}, {"positions": "rotary"}, {"positions": "shortformer"}, {"positions": "alibi"}, {"norm": "none"}, {"d_mlp": 0},
    {"bias_unembed": True}, {"query_key": "identity", "value_output": "identity"}, {"attention": "uniform"},
    {"tied_unembedding": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_components_sum_to_the_difference_of_logits(options: dict[str, Any]) -> None:
    model, at = build(**options), 5
    found = attribution(model, TOKENS, at, 3, 7)
    logits = model(TOKENS)[0, at]
    assert abs(found.total - float(logits[3] - logits[7])) <= 1e-5
    assert abs(float(found.values.sum()) - found.total) <= 1e-5
    paths = decompose_logits(model, TOKENS, at)  # another way to the same sum
    assert abs(float(paths.toward(3, 7).sum()) - float(found.values.sum())) <= 1e-4
    maps = contribution_maps(model, TOKENS, 3, 7).patterns[:, :, at].sum(-1)  # what heads write, source by source
    heads = {name: float(value) for name, value in zip(found.components, found.values, strict=True)}
    for layer in range(2):
        for head in range(2):
            assert abs(heads[f"{layer}.{head}"] - float(maps[layer, head])) <= 1e-5


@pytest.mark.parametrize("make", [gpt2_bridge, lambda: native_bridge(d_mlp=32)], ids=["GPT-2", "native"])
@torch.no_grad()
def test_bridges_too(make: Any) -> None:
    model = make()
    found, logits = attribution(model, TOKENS, -1, 3, 7), model(TOKENS)[0, -1]
    assert abs(float(found.values.sum()) - float(logits[3] - logits[7])) <= 1e-4
    assert torch.allclose(stream_words(model, TOKENS).probabilities[-1], model(TOKENS)[0].softmax(-1), atol=1e-5)


@torch.no_grad()
def test_folded_weights_give_what_transformer_lens_attributes() -> None:
    model = build()
    own = folded(model)
    _, cache = own.run_with_cache(TOKENS)
    stack, _ = cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True)
    theirs = cache.logit_attrs(stack, torch.tensor([3]), incorrect_tokens=torch.tensor([7]))[:, 0, 5]
    found = attribution(own, TOKENS, 5, 3, 7)
    named = dict(zip(found.components, found.values.tolist(), strict=True))
    for label, value in (("L0H1", "0.1"), ("L1H0", "1.0")):
        i = cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True)[1].index(label)
        assert abs(float(theirs[i]) - named[value]) <= 1e-5
    assert abs(found.total - attribution(model, TOKENS, 5, 3, 7).total) <= 1e-4


@pytest.mark.parametrize("options", [{}, {"norm": "none"}, {"positions": "shortformer"}], ids=str)
def test_neurons_sum_to_what_their_layer_writes(options: dict[str, Any]) -> None:
    model = build(**options, bias_out=False)
    found = neurons(model, TOKENS, 5, 3, 7, n=10_000)
    whole = attribution(model, TOKENS, 5, 3, 7)
    named = dict(zip(whole.components, whole.values.tolist(), strict=True))
    for layer in range(2):
        assert abs(sum(n.adds for n in found if n.layer == layer) - named[f"{layer}.mlp"]) <= 1e-5
    assert [abs(n.adds) for n in found] == sorted((abs(n.adds) for n in found), reverse=True)
    first = found[0]
    out = model.W_out[first.layer, first.index].detach()
    if not options.get("norm"):
        out = (out - out.mean()) * model.get_parameter("ln_final.w").detach()
    order = (out @ model.W_U.detach()).argsort(descending=True).tolist()
    assert list(first.raises) == order[:4] and list(first.lowers) == order[::-1][:4]
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    assert abs(first.activation - float(cache[f"blocks.{first.layer}.mlp.hook_post"][0, 5, first.index])) <= 1e-6
    assert neurons(build(d_mlp=0), TOKENS, 5, 3, 7) == neurons(build(n_layers=0), TOKENS, 5, 3, 7) == []


@pytest.mark.parametrize("options", [{}, {"d_mlp": 0}, {"norm": "post"}, {"residual": False}, {"n_layers": 0}], ids=str)
@torch.no_grad()
def test_the_stream_ends_at_the_models_prediction(options: dict[str, Any]) -> None:
    model = build(**options)
    found = stream_words(model, TOKENS)
    assert torch.allclose(found.probabilities[-1], model(TOKENS)[0].softmax(-1), atol=1e-5)
    first = model.unembed(model.ln_final(model(TOKENS, stop_at_layer=0)))[0].softmax(-1)
    assert torch.allclose(found.probabilities[0], first, atol=1e-5)
    layers = options.get("n_layers", 2)
    assert len(found.places) == 1 + layers * (1 if "d_mlp" in options else 2)


@pytest.mark.parametrize("options", [{}, {"d_mlp": 0}, {"norm": "post"}, {"residual": False}], ids=str)
@torch.no_grad()
def test_the_grid_is_what_a_loop_of_hooks_makes(options: dict[str, Any]) -> None:
    model, at = build(**options), 6
    found = patching(model, TOKENS, OTHER, at, 3, 7)
    _, clean = model.run_with_cache(TOKENS)

    def difference(logits: Tensor) -> float:
        return float(logits[0, at, 3] - logits[0, at, 7])

    def patched(name: str, where: Any) -> float:
        def put(x: Tensor, hook: Any) -> Tensor:
            x = x.clone()
            x[where] = clean[name][where]
            return x

        return difference(model.run_with_hooks(OTHER, fwd_hooks=[(name, put)]))

    assert abs(found.clean - difference(model(TOKENS))) <= 1e-6
    assert abs(found.corrupted - difference(model(OTHER))) <= 1e-6
    assert ("mlp_out" in found.parts) == ("d_mlp" not in options)
    for part, values in found.parts.items():
        for layer in range(2):
            for position in (0, 2, 6, 7):
                expected = patched(f"blocks.{layer}.hook_{part}", (slice(None), position))
                assert abs(float(values[layer, position]) - expected) <= 1e-5
    for layer in range(2):
        for head in range(2):
            for position in (2, 6):
                where = (slice(None), position, head)
                expected = patched(f"blocks.{layer}.attn.hook_z", where)
                assert abs(float(found.heads[layer, head, position]) - expected) <= 1e-5
    stream = found.parts["resid_pre"]
    assert abs(float(stream[0, 2]) - found.clean) <= 1e-5  # the only word that differs, before all blocks
    assert float((stream[:, :2] - found.corrupted).abs().max()) <= 1e-5  # before it both runs are the same
    assert abs(found.clean - found.corrupted) > 1e-3 and abs(float(found.restored(stream)[0, 2]) - 1) <= 1e-2


def test_long_prompts_take_heads_at_all_positions_at_once(monkeypatch) -> None:
    monkeypatch.setattr("circuits.lens.MOST_RUNS", 31)
    model = build()
    found = patching(model, TOKENS, OTHER, 6, 3, 7)
    assert found.heads.shape == (2, 2, 1) and MOST_RUNS > 31
    assert found.parts["resid_pre"].shape == (2, 8)


def test_what_there_is_not_is_refused_in_one_line() -> None:
    model = build()
    for other, why in ((build(norm="post"), "LayerNorm after"), (build(residual=False), "replace the token")):
        for ask in (attribution, neurons):
            with pytest.raises(Undefined, match=why) as caught:
                ask(other, TOKENS, 5, 3, 7)
            assert "\n" not in str(caught.value)
    with pytest.raises(NotDefined, match=r"one length; these have 8 and 7 words"):
        patching(model, TOKENS, TOKENS[:, :7], 3, 3, 7)
    with pytest.raises(NotDefined, match="without layers"):
        patching(build(n_layers=0), TOKENS, OTHER, 3, 3, 7)
    for ask in (attribution, neurons):
        with pytest.raises(NoSuchPart, match="no token 20"):
            ask(model, TOKENS, 3, 20, 1)
        with pytest.raises(NoSuchPart, match="no position 8"):
            ask(model, TOKENS, 8, 2, 1)
    with pytest.raises(NoSuchPart, match="no token 20"):
        patching(model, TOKENS, OTHER, 3, 20, 1)
    same = patching(model, TOKENS, TOKENS, 3, 3, 7)
    with pytest.raises(NotDefined, match="nothing to restore"):
        same.restored(same.heads)
    assert replace(same, clean=same.clean + 1).restored(same.heads).isfinite().all()
    with pytest.raises(NotDefined, match="training mode"):
        patching(build(dropout=0.1).train(), TOKENS, OTHER, 3, 3, 7)
