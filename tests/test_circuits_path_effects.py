"""What cutting a path does to loss and attention is what the forward pass written out by hand says."""

import pytest
import torch
from cuts_by_hand import PATHS, TOKENS, build, by_hand
from einops import rearrange
from paths_by_hand import distance
from scipy import stats
from torch import Tensor

import workbench as wb
from circuits.cuts import LOSS, Path, PathEffects, cut, every_path, path_effects
from circuits.errors import NoSuchPart, Undefined
from workbench.known_answers import induction_pair


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
