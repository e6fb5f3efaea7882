"""A cut equals the forward pass written out by hand without the path."""

import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuts_by_hand import PATHS, TOKENS, build, by_hand, gpt2, n_hooks, native
from paths_by_hand import distance
from support import from_native
from torch import Tensor
from transformer_lens import patching

from circuits.attention import exclusive
from circuits.cuts import Path, cut, every_path, path_effects
from circuits.errors import NoSuchPart, Undefined

# The cut itself


@pytest.mark.parametrize("replacement", ["zero", "mean"])
@pytest.mark.parametrize("options", [
    {}, {"norm": "none"}, {"d_mlp": 0}, {"norm": "none", "d_mlp": 0}, {"positions": "rotary"}, {"positions": "alibi"},
    {"positions": "shortformer"}, {"positions": "shortformer", "norm": "none"}, {"d_head": 6, "value_output": "value"},
    {"query_key": "tied"},
])  # fmt: skip
@torch.no_grad()
def test_a_cut_is_the_forward_pass_without_the_path(options: dict[str, Any], replacement: str) -> None:
    model = build(**options)
    clean = model(TOKENS)
    assert distance(clean, by_hand(model, TOKENS, [], replacement)) <= 1e-9
    for paths in ([PATHS[0]], [PATHS[1]], [PATHS[3]], [PATHS[6]], PATHS[1:3], PATHS):
        with cut(model, paths, replacement):
            logits = model(TOKENS)
        assert distance(logits, by_hand(model, TOKENS, paths, replacement)) <= 1e-9
        assert distance(logits, clean) > 1e-3
    assert torch.equal(model(TOKENS), clean)


@pytest.mark.parametrize("normalization", ["LN", None])
@pytest.mark.parametrize(("theirs", "positions"), [("standard", "learned"), ("rotary", "rotary")])
@torch.no_grad()
def test_a_bridge_with_the_same_weights_gives_the_same(normalization: str | None, theirs: str, positions: str) -> None:
    bridge = native(normalization_type=normalization, positional_embedding_type=theirs)
    model = from_native(bridge, positions=positions, bias_unembed=True)
    assert distance(model(TOKENS), bridge(TOKENS)) <= 1e-9
    for replacement in ("zero", "mean"):
        for paths in ([path] for path in PATHS):
            with cut(bridge, paths, replacement), cut(model, paths, replacement):
                assert distance(bridge(TOKENS), model(TOKENS)) <= 1e-9
    ours, others = (path_effects(m, TOKENS, PATHS) for m in (model, bridge))
    assert distance(ours.changes, others.changes) <= 1e-9
    assert distance(ours.moved, others.moved) <= 1e-5


@torch.no_grad()
def test_a_cut_in_gpt2_is_what_its_parts_give() -> None:
    model: Any = gpt2()
    path = Path("0.2", "K", "2.1")
    _, cache = model.run_with_cache(TOKENS)
    written = cache["blocks.0.attn.hook_z"][:, :, 2] @ model.W_O[0, 2]
    stream = cache["blocks.2.hook_resid_pre"] - written
    normed = F.layer_norm(stream, (12,), model.blocks[2].ln1.w, model.blocks[2].ln1.b, 1e-5)
    with cut(model, path, "zero"):
        _, inside = model.run_with_cache(TOKENS)
    keys = inside["blocks.2.attn.hook_k"]
    assert distance(keys[:, :, 1], normed @ model.W_K[2, 1] + model.b_K[2, 1]) <= 1e-5
    assert distance(keys[:, :, 1], cache["blocks.2.attn.hook_k"][:, :, 1]) > 1e-2
    assert distance(keys[:, :, [0, 2]], cache["blocks.2.attn.hook_k"][:, :, [0, 2]]) == 0
    q, k = inside["blocks.2.attn.hook_q"][:, :, 1], keys[:, :, 1]
    scores = (q @ k.mT / 2).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    assert distance(inside["blocks.2.attn.hook_pattern"][:, 1], scores.softmax(-1)) <= 1e-5
    assert torch.equal(model(TOKENS), model.run_with_cache(TOKENS)[0])
    assert n_hooks(model) == 0


@pytest.mark.parametrize("component", ["q", "k", "v"])
@torch.no_grad()
def test_it_agrees_with_direct_path_patching(component: Any) -> None:
    """TransformerLens puts a clean run's write into a corrupted one: here, the mean write, as "mean" does."""
    model = build()
    _, corrupted = model.run_with_cache(TOKENS)
    mean = {"blocks.0.attn.hook_z": corrupted["blocks.0.attn.hook_z"].mean(0, keepdim=True).expand(3, -1, -1, -1)}

    def metric(logits: Tensor) -> Tensor:
        return (logits[:, -1, 2] - logits[:, -1, 4]).mean()

    patch: Any = patching.get_act_patch_direct_path
    theirs = patch(model, TOKENS, mean, corrupted, metric, 0, 1, component, verbose=False)
    for layer in (1, 2):
        for head in (0, 1):
            with cut(model, Path("0.1", component.upper(), (layer, head))):
                assert abs(metric(model(TOKENS)) - theirs[layer, head]) <= 1e-6  # theirs are float32
    assert (theirs[1:] - metric(model(TOKENS))).abs().min() > 1e-4


@torch.no_grad()
def test_cuts_within_cuts_add_up() -> None:
    model = build()
    for outer, inner in ((PATHS[1], PATHS[2]), (PATHS[0], PATHS[3])):
        with cut(model, outer):
            with cut(model, [inner], "zero"):
                nested = model(TOKENS)
                assert torch.equal(model(TOKENS), nested)  # nothing is left over from the pass before
            alone = model(TOKENS)
        with cut(model, outer):
            assert torch.equal(alone, model(TOKENS))
        with cut(model, outer, "zero"), cut(model, inner, "zero"):
            assert distance(model(TOKENS), by_hand(model, TOKENS, [outer, inner], "zero")) <= 1e-9
        assert distance(nested, alone) > 1e-3
    with cut(model, PATHS[:2]), pytest.raises(Undefined, match=r"0\.0→Q→2\.1 is cut already"), cut(model, PATHS[1]):
        pass
    assert n_hooks(model) == 0


@torch.no_grad()
def test_a_dead_writer_or_reader_has_nothing_to_cut() -> None:
    model = build()
    model.blocks[0].attn.W_O[1] = 0
    model.blocks[2].attn.W_Q[0] = 0
    clean = model(TOKENS)
    dead = [Path("0.1", kind, "1.0") for kind in "QKV"] + [Path("1.1", "Q", "2.0")]
    for path in dead:
        with cut(model, path):
            assert torch.equal(model(TOKENS), clean)
    effects = path_effects(model, TOKENS, [*dead, Path("1.1", "Q", "2.1")])
    assert not effects.changes[:4].any()
    assert effects.z[:4].tolist() == [0] * 4
    assert effects.p[:4].tolist() == [1] * 4
    assert not effects.moved[:4].any()
    assert effects.changes[4].any()


# Hooks


@pytest.mark.parametrize("make", [build, native])
@torch.no_grad()
def test_other_hooks_stay_and_those_of_the_cut_go(make: Any) -> None:
    model, seen = make(), []
    _, clean = model.run_with_cache(TOKENS)
    for name in ("blocks.1.attn.hook_k", "blocks.1.ln1.hook_scale", "blocks.1.hook_resid_pre"):
        model.hook_dict[name].add_hook(lambda tensor, *, hook, name=name: seen.append((name, tensor)))
    before = n_hooks(model)
    with pytest.raises(KeyError, match="stop"), cut(model, PATHS):
        model(TOKENS)
        raise KeyError("stop")
    assert n_hooks(model) == before
    assert sorted(name for name, _ in seen) == [
        "blocks.1.attn.hook_k",
        "blocks.1.hook_resid_pre",
        "blocks.1.ln1.hook_scale",
    ]
    for name, value in seen:  # before the cut, and what was kept has not been written into
        assert torch.equal(value, clean[name])
    with pytest.raises(Undefined), cut(model, PATHS):
        model(TOKENS[:1])
    assert n_hooks(model) == before
    model.reset_hooks()
    with cut(model, PATHS):
        expected = model(TOKENS)
        model.reset_hooks()
        assert torch.equal(model(TOKENS), expected)
    assert n_hooks(model) == 0


@pytest.mark.parametrize("make", [build, native])
@pytest.mark.parametrize("inside", [True, False])
@torch.no_grad()
def test_what_is_cut_is_what_was_written_after_edits(make: Any, inside: bool) -> None:
    """A writer whose output somebody sets to zero and a stream that somebody replaces, outside or inside the cut."""
    model: Any = make()
    path = Path("0.1", "K", "1.0")

    def keys(edits: list[Any]) -> tuple[Tensor, Tensor]:
        """Head 1.0's, without and with the cut."""
        results = []
        for paths in ([], [path]):
            contexts = [cut(model, paths, "zero"), model.hooks(fwd_hooks=edits)]
            with contexts.pop(0 if inside else 1), contexts.pop():
                results.append(model.run_with_cache(TOKENS)[1]["blocks.1.attn.hook_k"][:, :, 0])
        return results[0], results[1]

    def silence(z: Tensor, hook: Any) -> Tensor:
        return torch.cat([z[:, :, :1], torch.zeros_like(z[:, :, 1:])], dim=2)

    clean, without = keys([])
    assert distance(clean, without) > 1e-2
    silent, without = keys([("blocks.0.attn.hook_z", silence)])
    assert torch.equal(silent, without)
    assert distance(silent, clean) > 1e-2

    _, cache = model.run_with_cache(TOKENS)
    other = cache["blocks.1.hook_resid_pre"].roll(1, 0)
    _, without = keys([("blocks.1.hook_resid_pre", lambda x, hook: other)])
    stream, norm = other - cache["blocks.0.attn.hook_z"][:, :, 1] @ model.W_O[0, 1], model.blocks[1].ln1
    expected = F.layer_norm(stream, (12,), norm.w, norm.b, 1e-5) @ model.W_K[1, 0] + model.b_K[1, 0]
    assert distance(without, expected) <= 1e-9


@torch.no_grad()
def test_threads_that_share_a_model_get_what_they_would_get_alone() -> None:
    model = build()
    alone = [path_effects(model, TOKENS, [path]).changes for path in PATHS]
    wrong, start = [], threading.Barrier(2)

    def hammer(order: Any) -> None:
        start.wait()
        for _ in range(4):
            for i in order:
                if not torch.equal(path_effects(model, TOKENS, [PATHS[i]]).changes, alone[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=hammer, args=(order,)) for order in (range(7), range(6, -1, -1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    started, finished = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        with exclusive(model):
            finished.set()

    with cut(model, PATHS):
        thread = threading.Thread(target=wait)
        thread.start()
        started.wait()
        assert not finished.wait(0.1)
    thread.join()
    assert finished.is_set()


# Bad input


@pytest.mark.parametrize(("path", "message"), [
    (("0.0", "X", "1.0"), "'X' is no kind of path; expected one of Q, K, V"),
    (("1.0", "K", "1.1"), r"head 1.1 does not read head 1.0: it is not in a later layer"),
    (("first", "K", "1.1"), r"'first' is no head; a head is written layer.head"),
])  # fmt: skip
def test_a_path_that_cannot_be_is_refused(path: Any, message: str) -> None:
    with pytest.raises(NoSuchPart, match=message):
        Path(*path)


def test_a_path_has_one_name() -> None:
    assert Path("0.2", "K", "1.1") == Path((0, 2), "K", (1, 1))
    assert repr(Path("0.2", "K", "1.1")) == "0.2→K→1.1"
    assert len(every_path(build())) == 3 * (4 + 4 + 4)
    assert every_path(build(n_layers=1)) == []
    assert every_path(build(n_layers=2), ["K"])[1] == Path("0.0", "K", "1.1")


def test_models_without_the_formula_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"norm": "post"}, "LayerNorm after each addition"),
        ({"residual": False}, "replace the token"),
    ]
    for options, why in cases:
        with pytest.raises(Undefined, match=why), cut(build(**options), PATHS):
            pass
    dropping = build(dropout=0.1)
    with cut(dropping, PATHS):
        pass
    with pytest.raises(Undefined, match="training mode with dropout"), cut(dropping.train(), PATHS):
        pass
    absent = Path("0.2", "K", "1.0")
    with pytest.raises(NoSuchPart, match=r"no head 0\.2: this model has 3 layers of 2 heads"), cut(build(), absent):
        pass
    with (
        pytest.raises(NoSuchPart, match="'resample' is no replacement; expected mean"),
        cut(build(), PATHS, "resample"),
    ):
        pass
