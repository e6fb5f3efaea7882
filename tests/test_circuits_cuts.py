"""A cut equals the forward pass written out by hand without the path; effects are those of that forward pass."""

import math
import threading
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from scipy import stats
from torch import Tensor, nn
from transformer_lens import patching
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import boot_native, build_bridge_from_module

import workbench as wb
from circuits.attention import exclusive
from circuits.cuts import LOSS, Path, PathEffects, cut, every_path, path_effects
from circuits.errors import NoSuchPart, Undefined
from workbench.known_answers import induction_pair
from workbench.positions import alibi, rotate
from workbench.recipes import ModelConfig
from workbench.transformer import LayerNorm, Transformer

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 0], [2, 6, 5, 3, 5, 1], [0, 0, 2, 6, 4, 4]])
PATHS = [Path("0.1", "K", "1.0"), Path("0.0", "Q", "2.1"), Path("0.1", "Q", "2.1"), Path("1.0", "V", "2.1")]
PATHS += [Path("0.0", "K", "2.0"), Path("1.1", "K", "2.0"), Path("0.0", "V", "1.1")]


def build(**options: Any) -> Transformer:
    """Three layers of two heads in float64, every weight and bias random and large enough to matter."""
    small: dict[str, Any] = {
        "n_layers": 3,
        "n_heads": 2,
        "d_model": 12,
        "d_head": 4,
        "d_mlp": 7,
        "n_ctx": 6,
        "d_vocab": 7,
    }
    model = Transformer(ModelConfig(**small | options)).eval().double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.4, generator=generator)
    for module in model.modules():
        if isinstance(module, LayerNorm):
            nn.init.normal_(module.w, 1, 0.3, generator=generator)
    return model


def by_hand(model: Transformer, tokens: Tensor, paths: list[Path], replacement: str) -> Tensor:
    """Logits of the model with these paths cut, from its weights."""
    config: Any = model.config

    def read(x: Tensor, norm: Any) -> Tensor:
        if config.norm == "none":
            return x
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.w + norm.b

    x, written, blocks = model.W_E[tokens], {}, cast(Any, model.blocks)
    positions = cast(Any, model).pos_embed.W_pos[: tokens.shape[1]] if hasattr(model, "pos_embed") else 0
    if config.positions == "learned":
        x = x + positions
    for layer, block in enumerate(blocks):
        attention, parts, out = block.attn, {}, torch.zeros_like(x)
        for kind in "QKV":
            heads = []
            for head in range(config.n_heads):
                stream = x
                for path in paths:
                    if (path.reader, path.kind) == ((layer, head), kind):
                        old = written[path.writer]
                        stream = stream - old + (old.mean(0) if replacement == "mean" else 0)
                stream = read(stream, getattr(block, "ln1", None))
                if config.positions == "shortformer" and kind != "V":
                    stream = stream + positions
                heads.append(stream @ getattr(attention, f"W_{kind}")[head] + getattr(attention, f"b_{kind}")[head])
            parts[kind] = torch.stack(heads, dim=2)
        if config.positions == "rotary":
            parts["Q"], parts["K"] = rotate(parts["Q"]), rotate(parts["K"])
        for head in range(config.n_heads):
            q, k, v = (parts[kind][:, :, head] for kind in "QKV")
            scores = q @ k.mT / math.sqrt(config.d_head)
            if config.positions == "alibi":
                scores = scores + alibi(config.n_heads, tokens.shape[1])[head]
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -math.inf)
            written[layer, head] = scores.softmax(-1) @ v @ attention.W_O[head]
            out = out + written[layer, head]
        x = x + out + attention.b_O
        if config.d_mlp:
            hidden = F.gelu(read(x, getattr(block, "ln2", None)) @ block.mlp.W_in + block.mlp.b_in)
            x = x + hidden @ block.mlp.W_out + block.mlp.b_out
    return read(x, model.ln_final) @ model.W_U


def native(**options: Any) -> TransformerBridge:
    """A bridge with random weights, in float64."""
    config: dict[str, Any] = {
        "d_model": 12, "d_head": 4, "n_layers": 3, "n_ctx": 6, "n_heads": 2, "d_vocab": 7, "d_mlp": 7,
        "act_fn": "gelu", "normalization_type": "LN", "architecture": "TransformerLensNative",
    }  # fmt: skip
    bridge = boot_native(TransformerBridgeConfig(**config | options)).eval().double()
    generator = torch.Generator().manual_seed(0)
    for parameter in bridge.parameters():
        nn.init.normal_(parameter, 0.05, 0.4, generator=generator)
    return bridge


def as_ours(bridge: Any, **options: Any) -> Transformer:
    """Our model with its weights."""
    model: Any = build(**options)
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            theirs = bridge.blocks[layer]
            for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
                getattr(block.attn, name).copy_(getattr(bridge, name)[layer])
            for name in ("W_in", "W_out", "b_in", "b_out"):
                getattr(block.mlp, name).copy_(getattr(bridge, name)[layer])
            for name in ("ln1", "ln2") if model.config.norm == "pre" else ():
                getattr(block, name).w.copy_(getattr(theirs, name).w)
                getattr(block, name).b.copy_(getattr(theirs, name).b)
        if model.config.norm == "pre":
            model.ln_final.w.copy_(bridge.ln_final.w)
            model.ln_final.b.copy_(bridge.ln_final.b)
        model.embed.W_E.copy_(bridge.W_E)
        model.unembed.W_U.copy_(bridge.W_U)
        model.unembed.b_U.copy_(bridge.unembed.b_U)
        if hasattr(model, "pos_embed"):
            model.pos_embed.W_pos.copy_(bridge.W_pos)
    return model


def gpt2() -> TransformerBridge:
    """GPT-2 in small, from a configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    inner = GPT2LMHeadModel(GPT2Config(
        n_embd=12, n_layer=3, n_head=3, n_positions=6, vocab_size=7, n_inner=7, initializer_range=0.4
    )).eval()  # fmt: skip
    config = TransformerBridgeConfig(
        d_model=12, d_head=4, n_layers=3, n_ctx=6, n_heads=3, d_vocab=7, d_mlp=7, act_fn="gelu_new",
        normalization_type="LN", architecture="GPT2LMHeadModel",
    )  # fmt: skip
    return build_bridge_from_module(inner, "GPT2LMHeadModel", tl_config=config).eval()


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def n_hooks(model: Any) -> int:
    points = [module for module in model.modules() if hasattr(module, "fwd_hooks")]
    return sum(len(point.fwd_hooks) + len(point._forward_hooks) for point in points)


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
    model = as_ours(bridge, norm="pre" if normalization else "none", positions=positions, bias_unembed=True)
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


# Effects


@torch.no_grad()
def test_effects_are_differences_of_losses_paired_by_sequence() -> None:
    model = build()
    tokens = torch.randint(7, (9, 6), generator=torch.Generator().manual_seed(1))
    effects = path_effects(model, tokens, PATHS, positions=slice(2, None))

    def losses(logits: Tensor) -> Tensor:
        loss = -logits[:, 2:-1].log_softmax(-1).gather(2, tokens[:, 3:, None])
        return rearrange(loss, "b p 1 -> b p").mean(1)

    clean = losses(model(tokens))
    assert distance(effects.clean, clean) <= 1e-6
    for i, path in enumerate(PATHS):
        change = losses(by_hand(model, tokens, [path], "mean")) - clean
        assert distance(effects.changes[i], change) <= 1e-7
        expected = stats.ttest_1samp(effects.changes[i].double().numpy(), 0)
        low, high = expected.confidence_interval(0.95)
        assert effects.z[i].item() == pytest.approx(expected.statistic, rel=1e-3)  # pyright: ignore[reportAttributeAccessIssue]
        assert effects.p[i].item() == pytest.approx(expected.pvalue, rel=1e-2)  # pyright: ignore[reportAttributeAccessIssue]
        assert effects.interval[:, i].tolist() == pytest.approx([low, high], rel=1e-3, abs=1e-6)
    joint = path_effects(model, tokens, PATHS, together=True, positions=[2, 3, 4])
    assert joint.cuts == (tuple(PATHS),)
    assert distance(joint.changes[0], losses(by_hand(model, tokens, PATHS, "mean")) - clean) <= 1e-7
    assert torch.equal(path_effects(model, tokens, [PATHS], positions=[2, 3, 4]).changes, joint.changes)
    own = path_effects(model, tokens, PATHS[:1], measure=lambda logits, _: logits[:, -1, 3])
    assert distance(own.changes[0], by_hand(model, tokens, PATHS[:1], "mean")[:, -1, 3] - own.clean[0]) <= 1e-6


@torch.no_grad()
def test_attention_moved_is_the_total_variation_of_the_readers_pattern() -> None:
    model = build()
    paths = [Path("0.1", "K", "1.0"), Path("0.1", "V", "1.0")]
    moved = path_effects(model, TOKENS, paths).moved
    clean = model.run_with_cache(TOKENS)[1]["blocks.1.attn.hook_pattern"][:, 0, :5]
    with cut(model, paths[0]):
        other = model.run_with_cache(TOKENS)[1]["blocks.1.attn.hook_pattern"][:, 0, :5]
    overlap = torch.minimum(clean, other).sum(-1)
    assert moved[0].item() == pytest.approx((1 - overlap).mean().item(), abs=1e-6)
    assert moved[0] > 0.01
    assert moved[1] == 0


@torch.no_grad()
def test_the_readers_own_attention_can_be_the_measure() -> None:
    """By loops over places: attention from a token to those that followed its earlier occurrences."""
    model = build()
    tokens = torch.tensor([[3, 1, 3, 1, 3, 0], [2, 6, 2, 3, 2, 6]])
    group = [Path("0.1", "K", "1.0"), Path("0.0", "K", "1.1")]
    effects = path_effects(model, tokens, [group, group[0]], measure="prefix_matching", positions=slice(2, None))

    def score(heads: list[int]) -> list[float]:
        patterns = model.run_with_cache(tokens)[1]["blocks.1.attn.hook_pattern"]
        found = []
        for row, pattern in zip(tokens.tolist(), patterns, strict=True):
            by_place = []
            for i in range(2, 5):
                after = [j + 1 for j in range(i) if row[j] == row[i]]
                if after:
                    by_place.append(sum(pattern[h, i, j].item() for h in heads for j in after) / len(heads))
            found.append(sum(by_place) / len(by_place))
        return found

    assert effects.clean[0].tolist() == pytest.approx(score([0, 1]), abs=1e-6)
    assert effects.clean[1].tolist() == pytest.approx(score([0]), abs=1e-6)
    for i, (paths, heads) in enumerate(((group, [0, 1]), (group[:1], [0]))):
        with cut(model, paths):
            assert (effects.clean[i] + effects.changes[i]).tolist() == pytest.approx(score(heads), abs=1e-6)
    assert effects.changes.abs().min() > 1e-4
    with pytest.raises(ValueError, match="a sequence has no place for prefix_matching at these positions"):
        path_effects(model, tokens, group, measure="prefix_matching", positions=[0, 1])
    with pytest.raises(NoSuchPart, match=r"'entropy' is no measure; expected one of previous_token"):
        path_effects(model, tokens, group, measure="entropy")


OWN = torch.arange(100)  # each sequence a cluster of its own


def test_confirmed_wants_a_significant_rise_of_some_size() -> None:
    """Made-up changes: significant and large, significant and small, large and noisy, significant and downwards."""
    noise = torch.tensor([-1.0, 1.0]).repeat(50)
    changes = torch.stack([0.5 + 0.1 * noise, 0.01 + 0.001 * noise, 0.5 + 9 * noise, -0.5 + 0.1 * noise])
    cuts = tuple((path,) for path in PATHS[:4])
    clean = torch.full((4, 100), 1.0)
    effects = PathEffects("mean next-token loss (nats)", cuts, clean, changes, torch.zeros(4), OWN, 20, "mean")
    assert effects.confirmed().tolist() == [True, False, False, False]
    assert effects.confirmed(share=0.001).tolist() == [True, True, False, False]
    assert effects.confirmed(share=0.3).tolist() == [False] * 4  # 0.5 is a quarter of ln 20 − 1 = 2.0
    assert effects.to_frame().confirmed.tolist() == [True, False, False, False]
    few = PathEffects(LOSS, cuts[:1], clean[:1], 0.5 + 2.3 * noise[None], torch.zeros(1), OWN, 20, "mean")
    many = PathEffects(LOSS, cuts, clean, few.changes.expand(4, -1), torch.zeros(4), OWN, 20, "mean")
    assert 0.05 / 4 < few.p[0] < 0.05
    assert few.confirmed().tolist() == [True]
    assert many.confirmed().tolist() == [False] * 4  # four are tested, so each must meet a quarter of the level
    assert "0.1→K→1.0" in repr(effects)
    assert "0.0→Q→2.1" in effects._repr_html_()
    other = PathEffects("margin", cuts, clean, changes, torch.zeros(4), OWN, 20, "mean")
    with pytest.raises(Undefined, match="what can be lost, which margin lacks; read its p"):
        other.confirmed()
    assert "confirmed" not in other.to_frame()
    attention = PathEffects("prefix_matching", cuts, clean, -changes, torch.zeros(4), OWN, 20, "mean")
    assert attention.confirmed().tolist() == [True, False, False, False]  # it must fall by a twentieth of 1
    assert attention.confirmed(share=0.6).tolist() == [False] * 4
    assert "prefix-matching attention of the readers" in repr(attention)


@pytest.mark.parametrize("replacement", ["mean", "zero"])
def test_the_pair_built_by_hand_is_confirmed_and_no_other(replacement: str) -> None:
    known = induction_pair()
    every = every_path(known.model)
    for measure in (LOSS, "prefix_matching"):
        effects = path_effects(
            known.model, known.tokens, every, positions=slice(12, None), replacement=replacement, measure=measure
        )
        assert [path for path, yes in zip(every, effects.confirmed(), strict=True) if yes] == [Path("0.0", "K", "1.0")]
    assert effects.mean[every.index(Path("0.0", "K", "1.0"))] < -0.9


def test_trained_induction_heads_back_each_other_up() -> None:
    """One previous-token head, four induction heads: the loss misses single paths, not the readers' own attention."""
    run = wb.load("induction-2-attn")
    tokens, every = run.task.held_out[:64], every_path(run.model, ["Q", "K"])
    half = slice(24, None)
    single = path_effects(run.model, tokens, every, positions=half)
    assert not single.confirmed().any()
    groups = [[path for path in every if path.writer == (0, h) and path.kind == "K"] for h in range(4)]
    joint = path_effects(run.model, tokens, groups, positions=half)
    assert joint.confirmed().tolist() == [True, False, False, False]
    assert joint.mean[0] > 1 > 5 * single.mean.max()
    readers = path_effects(run.model, tokens, every, measure="prefix_matching", positions=half)
    found = {path for path, yes in zip(every, readers.confirmed(), strict=True) if yes}
    assert found == {Path("0.0", "K", (1, head)) for head in range(4)}
    assert every_path(wb.load("induction-1-attn").model) == []


def test_effects_need_sequences_paths_and_positions() -> None:
    model = build()
    with pytest.raises(ValueError, match=r"shape \[1, 6\]; expected at least two sequences"):
        path_effects(model, TOKENS[:1], PATHS)
    with pytest.raises(ValueError, match="no paths to cut"):
        path_effects(model, TOKENS, [])
    with pytest.raises(ValueError, match=r"positions hold none of 0 … 4"):
        path_effects(model, TOKENS, PATHS, positions=slice(5, None))
    with pytest.raises(ValueError, match=r"measure gave shape \[\]; expected one number for each sequence"):
        path_effects(model, TOKENS, PATHS, measure=lambda logits, tokens: logits.mean())
    with pytest.raises(Undefined, match=r'mean over a batch of one .* or replacement="zero"'), cut(model, PATHS):
        model(TOKENS[:1])


def test_sequences_of_one_cluster_count_as_one() -> None:
    """Every sequence four times: as independent the error halves for nothing, by clusters it stays."""
    model, tokens, path = (
        build(d_mlp=0),
        torch.randint(7, (6, 6), generator=torch.Generator().manual_seed(0)),
        Path("0.0", "K", "1.1"),
    )
    once = path_effects(model, tokens, path, replacement="zero")
    names = [str(i) for i in range(6)] * 4
    fooled = path_effects(model, tokens.repeat(4, 1), [path], replacement="zero")
    honest = path_effects(model, tokens.repeat(4, 1), [path], replacement="zero", clusters=names)
    assert torch.allclose(honest.standard_error, once.standard_error, rtol=1e-3)
    assert torch.allclose(honest.p, once.p, rtol=1e-2)
    assert fooled.standard_error < 0.55 * once.standard_error
    assert "24 sequences in 6 clusters" in repr(honest)
    with pytest.raises(ValueError, match="5 clusters for 6 sequences"):
        path_effects(model, tokens, path, clusters=names[:5])
    with pytest.raises(NoSuchPart, match=r"no head 1.1: this model has 1 layers"):
        path_effects(build(d_mlp=0, n_layers=1), tokens, path)
