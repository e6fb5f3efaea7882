"""Skip-trigrams equal brute force, a hand-built head's rules and forced bug are found, and so are trained models'."""

from typing import Any

import pytest
import torch
from support import build, from_native, gpt2_bridge, native_bridge
from torch import Tensor

import workbench as wb
from circuits import canonical
from circuits.canonical import Context
from circuits.errors import BadModel, NoSuchPart, NoSurface, Undefined
from circuits.trigrams import factoring_bugs, head_skip_trigrams, skip_trigrams, source_table
from workbench.recipes import ModelConfig
from workbench.transformer import Transformer

KEEP, IN, AT, MIND, BAY, HOLD, ON, TIGHT = range(8)
NAMES = ["keep", "in", "at", "mind", "bay", "hold", "on", "tight", *(f"filler{i}" for i in range(8))]
RULES = {(KEEP, IN): MIND, (KEEP, AT): BAY, (HOLD, ON): TIGHT}
REPAIRED = {(IN, BAY): -9.0, (AT, MIND): -9.0}  # direct path


def by_hand(direct: dict[tuple[int, int], float] | None = None) -> Transformer:
    """One head, one-hot tokens: keep is looked at from in and at and says mind (12) and bay (14), hold says tight."""
    v = len(NAMES)
    model: Any = Transformer(
        ModelConfig(
            n_layers=1, n_heads=1, d_model=2 * v, d_head=v, d_mlp=0, n_ctx=8, d_vocab=v, norm="none", positions="none"
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E[:, :v] = torch.eye(v)
        attn = model.blocks[0].attn
        attn.W_K[0, :v] = attn.W_V[0, :v] = torch.eye(v)
        attn.W_Q[0, :v, [KEEP, HOLD]] = -10 * v**0.5  # nothing else looks at them
        for source, destination in RULES:
            attn.W_Q[0, destination, source] = 10 * v**0.5
        for source, out, logit in ((KEEP, MIND, 12), (KEEP, BAY, 14), (HOLD, TIGHT, 12)):
            attn.W_O[0, source, v + out] = logit
        model.unembed.W_U[v:] = torch.eye(v)
        for (destination, out), logit in (REPAIRED if direct is None else direct).items():
            model.unembed.W_U[destination, out] = logit
    return model


def one_layer(seed: int = 0, **options) -> Transformer:
    sizes = {"n_layers": 1, "n_heads": 2, "d_model": 16, "d_mlp": 0, "n_ctx": 7, "d_vocab": 9}
    return build(seed, **sizes | options)


def triples(found) -> list[tuple[int, ...]]:
    return [tuple(row) for row in found.tokens.tolist()]


# A head whose rules and bug are known


def test_the_rules_of_a_hand_built_head_are_found_and_nothing_else():
    found = skip_trigrams(by_hand(), names=NAMES)
    said = {row for row, p in zip(triples(found), found.p.tolist(), strict=True) if p > 0.5}
    assert said == {(s, d, o) for (s, d), o in RULES.items()} == set(triples(found)[:3])  # precision and recall 1
    assert found.p[:3].min() > 0.99 and found.p_without_source[:3].max() < 0.1
    assert (found.p[3:] - found.p_other_sources[3:]).max() < 0.01
    assert found.attention[:3, 0].min() > 0.99 and found.uniform == 1 / 7
    frame = found.to_frame()
    assert frame.loc[0, ["source_name", "destination_name", "out_name"]].tolist() in [
        ["keep", "in", "mind"],
        ["keep", "at", "bay"],
        ["hold", "on", "tight"],
    ]
    assert "keep" in repr(found) and "keep" in found._repr_html_()
    assert frame["attended"].tolist()[:3] == [True] * 3 and found.attended.tolist() == frame["attended"].tolist()


def test_a_default_is_told_apart_from_what_a_head_reads():
    """tight is said after in unless keep is looked at: for hold it gains, though nothing looks at hold from there."""
    model = by_hand({(IN, TIGHT): 9.0, (IN, BAY): -9.0})
    found = skip_trigrams(model, source=[KEEP, HOLD], n=2, names=NAMES)
    rows = found.to_frame().set_index("source_name")
    assert triples(found) == [(KEEP, IN, MIND), (HOLD, IN, TIGHT)]
    default = rows.loc["hold"].to_dict()
    assert default["out_name"] == "tight" and default["p"] == pytest.approx(default["p_without_source"], abs=1e-3)
    assert (default["attended"], default["head"]) == (False, "") and default["contribution"] != default["contribution"]
    assert default["attention"] < default["uniform_attention"]
    assert "1 are defaults: no head attends to the source above uniform" in repr(found)
    assert "nan" not in (repr(found) + found._repr_html_()).lower()


def test_its_head_lists_the_bug_beside_the_rules():
    found = head_skip_trigrams(by_hand(), "0.0", n=5, names=NAMES)
    bugs = {(KEEP, IN, BAY), (KEEP, AT, MIND)}
    assert set(triples(found)) == {(s, d, o) for (s, d), o in RULES.items()} | bugs
    assert found.typical == pytest.approx(0, abs=1e-5)  # most sources move nothing
    # attention by hand: e^10 for keep, e^0 for each of six others; OV less the filler's 0 and its mean over 16 outs
    assert found.attention[0].item() == pytest.approx(1 / (1 + 6 * torch.tensor(-10.0).exp().item()), abs=1e-5)
    assert found.ov[0].item() == pytest.approx(14 - 26 / 16, abs=1e-4)
    assert min(found.to_frame()["times_typical"].tolist()) > 1e6
    assert "keep" in repr(found) and "keep" in found._repr_html_()


def test_the_forced_bug_is_head_level_and_behavioural_only_where_the_direct_path_does_not_repair_it():
    repaired, bare = (factoring_bugs(by_hand(direct), RULES, names=NAMES) for direct in (REPAIRED, {}))
    rows = [(KEEP, IN, MIND, BAY), (KEEP, AT, BAY, MIND)]
    for bugs in (repaired, bare):
        assert triples(bugs) == rows  # hold has one rule and invites nothing
        assert bugs.head_level.all() and not bugs.control.any()
        assert bugs.ov[:, 0].flatten().tolist() == pytest.approx([x - 26 / 16 for x in (12, 14, 14, 12)], abs=1e-4)
    assert repaired.behavioural.tolist() == [False, False]
    assert bare.behavioural.tolist() == [True, False]  # bay is louder than mind, whatever the destination
    assert bare.p[0].tolist() == pytest.approx([0.119, 0.881], abs=0.003)  # softmax of 12 and 14
    frame = bare.to_frame()
    assert frame.loc[0, "wrong_name"] == "bay" and frame["head"].tolist() == ["0.0", "0.0"]
    assert "2 head-level (0.0% of other tokens meet the same criterion), 1 behavioural" in repr(bare)
    assert "1 behavioural" in bare._repr_html_()


def test_an_out_raised_less_than_half_as_much_is_no_head_level_bug():
    model = by_hand()
    with torch.no_grad():
        model.blocks[0].attn.W_O[0, KEEP, len(NAMES) + MIND] = 6.0  # less its mean of 20/16: .37 of bay's
    bugs = factoring_bugs(model, RULES)
    assert bugs.head_level.tolist() == [True, False]  # in → bay is louder still; at → mind is not comparable


def test_a_head_that_looks_elsewhere_is_no_head_level_bug():
    model = by_hand()
    with torch.no_grad():
        model.blocks[0].attn.W_Q.zero_()
    bugs = factoring_bugs(model, RULES)
    assert not bugs.head_level.any() and torch.allclose(bugs.attention, torch.tensor(1 / 7))


# Brute force


def brute_force(model, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p [source, destination, out], p without source, attention [head, source, destination], OV [head, source, out]."""
    attn, V, at = model.blocks[0].attn, model.cfg.d_vocab, (length - 1) // 2
    normed = model.config.norm == "pre"
    ln = model.blocks[0].ln1 if normed else torch.nn.Identity()
    W_E, W_pos = model.W_E.detach(), model.W_pos.detach()[:length]
    written = torch.einsum("vm, hmd, hdn -> vhn", ln(W_E + W_pos[at]), attn.W_V, attn.W_O)
    if normed:
        written = written - written.mean(-1, keepdim=True)
    size = (written - written.mean(0)).pow(2).sum((1, 2))
    filler = W_E[size <= size.median()].mean(0)
    p, patterns = torch.zeros(V + 1, V, V), torch.zeros(model.cfg.n_heads, V, V)
    for s in range(V + 1):
        for d in range(V):
            x = filler.expand(length, -1).clone()
            x[at] = filler if s == V else W_E[s]
            x[-1] = W_E[d]
            stream = x + W_pos
            read, out = ln(stream), stream[-1] + attn.b_O
            for h in range(model.cfg.n_heads):
                q = read[-1] @ attn.W_Q[h] + attn.b_Q[h]
                k, v = read @ attn.W_K[h] + attn.b_K[h], read @ attn.W_V[h] + attn.b_V[h]
                a = (k @ q / model.cfg.d_head**0.5).softmax(0)
                out = out + a @ v @ attn.W_O[h]
                if s < V:
                    patterns[h, s, d] = a[at]
            p[s, d] = (model.ln_final(out) @ model.W_U + model.unembed.b_U).softmax(0)
    moved = ln(W_E + W_pos[at]) - ln(filler + W_pos[at])
    W_U = model.ln_final.w[:, None] * model.W_U if normed else model.W_U
    ov = torch.einsum("vm, hmd, hdn -> hvn", moved, attn.W_V, attn.W_O)
    ov = (ov - ov.mean(-1, keepdim=True) if normed else ov) @ W_U
    return p[:V], p[V], patterns, ov - ov.mean(-1, keepdim=True)


@pytest.mark.parametrize("norm", ["none", "pre"])
@pytest.mark.parametrize("budget", [1, 5_000, 2**26])
def test_everything_streamed_equals_brute_force(norm, budget, monkeypatch):
    monkeypatch.setattr(canonical, "BUDGET", budget)
    model = one_layer(norm=norm, init_scale=1.5)
    with torch.no_grad():
        p, without, patterns, ov = brute_force(model, 6)
    others = (p.sum(0) - p) / (len(p) - 1)
    found = skip_trigrams(model, n=40)
    gain, at = (p - others).flatten().topk(40)
    s, d, o = torch.unravel_index(at, p.shape)
    assert torch.allclose(found.p - found.p_other_sources, gain, atol=1e-5)
    assert set(triples(found)) == set(zip(s.tolist(), d.tolist(), o.tolist(), strict=True))
    s, d, o = found.tokens.T
    assert torch.allclose(found.p, p[s, d, o], atol=1e-5)
    assert torch.allclose(found.p_without_source, without[d, o], atol=1e-5)
    assert torch.allclose(found.attention, patterns[:, s, d].T, atol=1e-5)
    for head in range(2):
        found = head_skip_trigrams(model, (0, head), n=30)
        product = patterns[head][:, :, None] * ov[head][:, None]
        assert torch.allclose(found.product, product.flatten().topk(30).values, atol=1e-4)
        s, d, o = found.tokens.T
        assert torch.allclose(found.attention, patterns[head, s, d], atol=1e-5)
        assert torch.allclose(found.ov, ov[head, s, o], atol=1e-4)
        assert found.typical == pytest.approx(product.amax((1, 2)).median().item(), abs=1e-4)
        table = source_table(model, 4, n=3)
        for kind, truth in (("destination", patterns[head, 4]), ("out", ov[head, 4])):
            rows = table[(table["head"] == f"0.{head}") & (table["kind"] == kind)]
            assert rows["token"].tolist() == truth.topk(3).indices.tolist()
            assert rows["value"].tolist() == pytest.approx(truth.topk(3).values.tolist(), abs=1e-4)
            assert rows["rank"].tolist() == [1, 2, 3] and set(rows["of"]) == {9}
            assert rows["median"].tolist() == pytest.approx([truth.median().item()] * 3, abs=1e-4)


def test_contributions_sum_to_the_change_of_the_logit_difference():
    """log p(out) − log p(rival), with the source and without: exact without LayerNorm."""
    model = one_layer(norm="none", init_scale=1.5)
    with torch.no_grad():
        p, without, _, _ = brute_force(model, 6)
    found = skip_trigrams(model, n=15)
    for (s, d, o), parts in zip(found.tokens.tolist(), found.contributions, strict=True):
        rival = max((t for t in range(9) if t != o), key=lambda t: without[d, t].item())
        change = (p[s, d, o] / p[s, d, rival]).log() - (without[d, o] / without[d, rival]).log()
        assert parts.sum().item() == pytest.approx(change.item(), abs=1e-4)


def test_tiles_give_the_highest_entry_of_each_row():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(700, 5, generator=generator), torch.randn(5, 2500, generator=generator)
    assert torch.allclose(canonical._highest(left, right), (left @ right).amax(1), atol=1e-5)


def test_where_pairs_are_too_many_the_heads_choose_them(monkeypatch):
    """The hand-built rules are still found among fewer pairs than there are, in the same words."""
    full = skip_trigrams(by_hand(), n=3)
    monkeypatch.setattr("circuits.trigrams.PAIRS", 1)
    monkeypatch.setattr("circuits.trigrams.CHOSEN", 36)
    assert triples(skip_trigrams(by_hand(), n=3)) == triples(full)
    few = skip_trigrams(by_hand(), source=[KEEP, HOLD], n=3)
    assert set(triples(few)) == set(triples(full))
    monkeypatch.setattr("circuits.trigrams.CHOSEN", 2)
    assert triples(skip_trigrams(by_hand(), source=KEEP, n=1))[0] in {(KEEP, IN, MIND), (KEEP, AT, BAY)}


# TransformerLens' models


@pytest.mark.parametrize("norm", ["LN", None])
def test_a_bridge_with_the_same_weights_gives_the_same_tables(norm):
    native = native_bridge(n_layers=1, normalization_type=norm)
    model = from_native(native, n_layers=1, d_mlp=0, norm="pre" if norm else "none")
    ours, theirs = (skip_trigrams(m, n=10) for m in (model, native))
    assert triples(ours) == triples(theirs)
    for name in ("p", "p_without_source", "p_other_sources", "contributions", "attention"):
        assert torch.allclose(getattr(ours, name), getattr(theirs, name), atol=1e-5), name
    ours, theirs = (head_skip_trigrams(m, "0.1", n=10) for m in (model, native))
    assert triples(ours) == triples(theirs) and torch.allclose(ours.product, theirs.product, atol=1e-4)
    rules = {(1, 2): 3, (1, 4): 5}
    ours, theirs = (factoring_bugs(m, rules) for m in (model, native))
    assert torch.allclose(ours.ov, theirs.ov, atol=1e-4) and torch.allclose(ours.p, theirs.p, atol=1e-5)
    assert theirs.names is None


def test_heads_of_layer_0_are_read_in_a_gpt2():
    found = head_skip_trigrams(gpt2_bridge(), "0.1", n=5)
    context = Context(gpt2_bridge())
    assert torch.allclose(found.attention, context.heads(found.tokens)[1][:, 1], atol=1e-5)


@pytest.mark.parametrize("positions", ["rotary", "alibi", "shortformer", "none", "sinusoidal"])
def test_other_positions_are_the_models_own(positions):
    model = one_layer(norm="none", positions=positions)
    found = skip_trigrams(model, n=5)
    assert len(found) == 5 and found.p.isfinite().all()
    assert factoring_bugs(model, {(0, 1): 2, (0, 3): 4}).p.isfinite().all()
    if positions in ("none", "sinusoidal"):
        assert torch.allclose(
            head_skip_trigrams(model, "0.0").attention,
            Context(model).heads(head_skip_trigrams(model, "0.0").tokens)[1][:, 0],
            atol=1e-5,
        )
    else:
        for ask in (lambda: head_skip_trigrams(model, "0.0"), lambda: source_table(model, 0)):
            with pytest.raises(Undefined, match=f"with {positions} positions, attention between tokens"):
                ask()


def test_scores_that_are_not_divided_are_read_as_they_are():
    model = one_layer(norm="none", attention="softmax-unscaled")
    found = head_skip_trigrams(model, "0.0")
    assert torch.allclose(found.attention, Context(model).heads(found.tokens)[1][:, 0], atol=1e-5)


# Trained models


def shipped(name) -> tuple[Any, Any]:
    run = wb.load(name)
    return run.model, run.task


def precision(model, rules, sources) -> float:
    found = skip_trigrams(model, source=sources, n=len(rules))
    return len(set(triples(found)) & {(s, d, o) for (s, d), o in rules.items()}) / len(rules)


def test_a_trained_models_rules_are_read_from_its_weights():
    model, task = shipped("skip-trigram-1-attn")
    factorable = {rule: out for rule, out in task.rules.items() if rule not in task.latin}
    latin = {rule: out for rule, out in task.rules.items() if rule in task.latin}
    assert len(factorable) == 24
    assert precision(model, factorable, sorted({s for s, _ in factorable})) >= 0.9  # measured 1.00
    assert precision(model, latin, sorted({s for s, _ in latin})) >= 0.9  # measured .95
    assert precision(model, task.rules, None) >= 0.7  # measured .78: it also speaks after destinations never trained


def test_a_trained_models_heads_have_the_predicted_bugs_and_the_model_does_not():
    model, task = shipped("skip-trigram-1-attn")
    factorable = {rule: out for rule, out in task.rules.items() if rule not in task.latin}
    bugs = factoring_bugs(model, factorable)
    assert len(bugs.tokens) == 6 * 4 * 3
    assert bugs.head_level.float().mean() > 0.6  # measured .75
    assert bugs.control.mean() < 0.25  # measured .16
    assert not bugs.behavioural.any()


def test_one_head_says_the_latin_squares_bugs_and_four_do_not():
    counts = {}
    for name in ("latin-square-1-head", "latin-square-1-attn"):
        model, task = shipped(name)
        bugs = factoring_bugs(model, task.rules)
        assert len(bugs.tokens) == 12 * 12 * 11
        wrong = {tuple(row[:2]) for row in bugs.tokens[bugs.behavioural].tolist()}
        counts[name] = len(wrong) / len(task.rules)
        assert (bugs.p_control < bugs.p.amax(1)).float().mean() > 0.99  # what is said is always an out of the source
    assert counts["latin-square-1-head"] > 0.2
    assert counts["latin-square-1-attn"] == 0


def test_one_head_tells_destinations_apart_by_how_much_it_attends_and_by_nothing_else():
    """With every destination attending to a source alike, source and destination terms add: no Latin square."""
    model, task = shipped("latin-square-1-head")
    pairs, outs = torch.tensor(list(task.rules)), torch.tensor(list(task.rules.values()))

    def alike(pattern: Tensor, hook: Any) -> Tensor:
        rows = pattern[:, :, -1].unflatten(0, (12, 12))  # rules come source by source
        pattern[:, :, -1] = rows.mean(1, keepdim=True).expand_as(rows).flatten(0, 1)
        return pattern

    context = Context(model)
    as_it_is, _ = context.run(pairs[:, 0], pairs[:, 1])
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", alike)]):
        frozen, _ = context.run(pairs[:, 0], pairs[:, 1])
    right = [(logits.argmax(1) == outs).float().mean().item() for logits in (as_it_is, frozen)]
    assert right[0] > 0.5 and right[1] < 0.2  # measured .66 and .08, chance


# Bad input


def test_a_token_is_a_number_or_a_name():
    model = one_layer()
    assert source_table(model, torch.tensor(3)).equals(source_table(model, 3))
    assert source_table(model, "t3").equals(source_table(model, 3))
    for source in (["t1", "t3"], torch.tensor([1, 3]), torch.tensor([1, 3]).numpy(), range(1, 4, 2), ["t1", 3, 1]):
        assert triples(skip_trigrams(model, source=source)) == triples(skip_trigrams(model, source=[1, 3]))
    for source in ("t3", torch.tensor(3)):
        assert triples(skip_trigrams(model, source=source)) == triples(skip_trigrams(model, source=3))


def test_bad_questions_are_answered_in_one_line():
    model, rms = one_layer(), one_layer()
    rms.cfg.normalization_type = "RMS"
    for ask, error, message in (
        (lambda: skip_trigrams(model, source=9), NoSuchPart, "no token 9: this model's vocabulary goes from 0 to 8"),
        (lambda: skip_trigrams(model, source=[]), NoSuchPart, "no source tokens"),
        (lambda: skip_trigrams(model, length=1), NoSuchPart, "a context of 1 tokens: this model takes 2 to 7"),
        (lambda: skip_trigrams(model, length=8), NoSuchPart, "a context of 8 tokens"),
        (lambda: skip_trigrams(model, names=["a"]), NoSuchPart, "1 names, but token"),
        (lambda: source_table(model, -1), NoSuchPart, "no token -1"),
        (lambda: head_skip_trigrams(model, "0.2"), NoSuchPart, "no head 0.2"),
        (lambda: factoring_bugs(model, {(0, 1): 77}), NoSuchPart, "no token 77"),
        (lambda: skip_trigrams(build()), Undefined, "with 2 layers and MLPs, see head_skip_trigrams"),
        (lambda: factoring_bugs(build(d_mlp=0), {}), Undefined, "with 2 layers, see"),
        (lambda: skip_trigrams(build(n_layers=1)), Undefined, "with 1 layers and MLPs"),
        (lambda: head_skip_trigrams(build(), "1.0"), Undefined, "head 1.0 reads what layer 0 wrote"),
        (lambda: skip_trigrams(model, n=0), NoSuchPart, "n is 0; expected how many rows to show, at least 1"),
        (lambda: head_skip_trigrams(model, "0.0", n=-1), NoSuchPart, "n is -1"),
        (lambda: source_table(model, 0, n=0), NoSuchPart, "n is 0"),
        (lambda: skip_trigrams(model, source="x"), NoSuchPart, "no token 'x'; expected its number, or its name"),
        (lambda: skip_trigrams(from_native(native_bridge(n_layers=1), n_layers=1), source="t1"), NoSuchPart, "'t1'"),
        (lambda: source_table(model, torch.tensor(1.5)), NoSuchPart, r"no token tensor\(1.5000\)"),
        (lambda: source_table(model, torch.tensor([1, 2])), NoSuchPart, r"no token tensor\(\[1, 2\]\)"),
        (lambda: skip_trigrams(one_layer(norm="post")), Undefined, "undefined for LayerNorm after each addition"),
        (lambda: skip_trigrams(rms), Undefined, "undefined for normalisation RMS; expected"),
        (lambda: skip_trigrams(build(n_layers=0, norm="none")), Undefined, "no heads"),
        (lambda: skip_trigrams(object()), NoSurface, "object has no"),
    ):
        with pytest.raises(error, match=message) as caught:
            ask()
        assert "\n" not in str(caught.value)


def test_weights_that_are_not_finite_are_refused():
    model = one_layer()
    with torch.no_grad():
        model.blocks[0].attn.W_Q[0, 0, 0] = torch.nan
    with pytest.raises(BadModel, match="W_Q holds values that are not finite"):
        skip_trigrams(model)


def test_one_token_a_dead_head_and_no_rules_give_empty_tables():
    alone = one_layer(d_vocab=1)
    assert len(skip_trigrams(alone)) == 0 and skip_trigrams(alone).to_frame().empty
    assert head_skip_trigrams(alone, "0.0").to_frame().empty
    assert torch.tensor(source_table(alone, 0)[["value", "median"]].to_numpy()).isfinite().all()
    bugs = factoring_bugs(alone, {(0, 0): 0})
    assert bugs.to_frame().empty and "0 bugs" in repr(bugs)
    assert factoring_bugs(alone, {}).to_frame().empty
    dead = one_layer(norm="none")
    with torch.no_grad():
        dead.blocks[0].attn.W_O.zero_()
    assert len(head_skip_trigrams(dead, "0.0").tokens) == 0 and len(skip_trigrams(dead)) == 0


def test_half_precision_is_read_in_single():
    model = one_layer(norm="none").to(torch.bfloat16)
    found = skip_trigrams(model, n=3)
    assert found.p.dtype == torch.float32 and found.p.isfinite().all()
    assert head_skip_trigrams(model, "0.0", n=3).ov.dtype == torch.float32
