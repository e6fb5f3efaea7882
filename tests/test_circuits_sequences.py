"""Sequences and their controls; pattern scores equal loops and TransformerLens; the in-context learning score."""

import math

import pytest
import torch
from scipy.stats import ttest_1samp
from support import build, fresh, gpt2_bridge, native_bridge
from transformer_lens.head_detector import detect_head

import workbench as wb
from circuits.errors import BadModel, Undefined
from circuits.heads import head_scores, in_context_learning_score, pattern_scores
from circuits.sequences import default_length, repeated_sequences


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# Sequences


@pytest.mark.parametrize(("vocabulary", "length"), [(50, 48), (12, 48), (5, 12), (3, 6), (1000, 7)])
def test_sequences_repeat_and_controls_do_not_at_the_same_places(vocabulary, length):
    tokens, controls = repeated_sequences(vocabulary, 30, length, generator())
    assert tokens.shape == controls.shape == (30, length)
    periods = set()
    for row, control in zip(tokens.tolist(), controls.tolist(), strict=True):
        period = next(p for p in range(1, length) if row[p] == row[0])
        periods.add(period)
        assert 3 <= period <= length / 2
        assert len(set(row[:period])) == period
        assert row == [row[i % period] for i in range(length)]
        for i in range(length):
            for j in range(i):
                assert row[i] != row[j] or control[i] != control[j]
    assert len(periods) > 1 or vocabulary == 3 or length == 7
    if vocabulary >= length:
        assert all(len(set(control)) == length for control in controls.tolist())


@pytest.mark.parametrize(("vocabulary", "n_ctx"), [(1, 12), (2, 12), (20, 5)])
def test_too_small_a_vocabulary_or_context_is_said(vocabulary, n_ctx):
    with pytest.raises(Undefined, match=r"at least 6 tokens, a vocabulary of at least 3"):
        head_scores(fresh(d_vocab=vocabulary, n_ctx=n_ctx))


def test_default_length_leaves_several_periods():
    assert default_length(1024, 50257) == 64
    assert default_length(48, 50) == 48
    assert default_length(1024, 4) == 8
    for vocabulary in range(3, 20):
        repeated_sequences(vocabulary, 2, default_length(1024, vocabulary), generator())


# Pattern scores


def random_patterns(tokens, layers=2, count=3):
    length = tokens.shape[1]
    scores = torch.randn(len(tokens), layers, count, length, length, generator=generator())
    return (scores + torch.full((length, length), -torch.inf).triu(1)).softmax(-1)


def test_pattern_scores_are_those_of_a_loop():
    tokens = torch.tensor([[0, 1, 2, 0, 1, 2, 0], [3, 3, 1, 0, 3, 2, 1]])
    patterns = random_patterns(tokens)
    found = pattern_scores(patterns, tokens)
    for b, row in enumerate(tokens.tolist()):
        rows = patterns[b, 1, 2].tolist()
        earlier = {i: [j for j in range(i) if row[j] == row[i]] for i in range(7) if row[i] in row[:i]}
        expected = {
            "previous_token": sum(rows[i][i - 1] for i in range(1, 7)) / 6,
            "current_token": sum(rows[i][i] for i in range(1, 7)) / 6,
            "duplicate_token": sum(rows[i][j] for i in earlier for j in earlier[i]) / len(earlier),
            "prefix_matching": sum(rows[i][j + 1] for i in earlier for j in earlier[i]) / len(earlier),
            "distance": sum(rows[i][j] * (i - j) for i in range(1, 7) for j in range(i)) / 6,
            "entropy": -sum(x * math.log(x) for i in range(1, 7) for x in rows[i][: i + 1]) / 6,
            "entropy_share": -sum(
                x * math.log(x) / math.log(i + 1) for i in range(1, 7) for x in rows[i][: i + 1]
            ) / 6,
        }  # fmt: skip
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name][b, 1, 2].item() == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize("make", [build, native_bridge, gpt2_bridge])
def test_pattern_scores_are_those_of_transformer_lens(make, monkeypatch):
    """Its "mul" measure divides by all destinations, ours by those that have such a place."""
    model = make()
    monkeypatch.setattr(model, "to_tokens", lambda tokens: tokens)  # no tokenizer
    tokens = torch.tensor([[4, 7, 1, 4, 7, 1, 4, 7, 1, 4], [5, 5, 3, 9, 5, 3, 2, 0, 9, 11]])
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    patterns = torch.stack([cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(2)], 1)
    found = pattern_scores(patterns, tokens)
    for b, row in enumerate(tokens):
        again = sum(int(token in row[:i]) for i, token in enumerate(row))
        names = {"previous_token": 9, "duplicate_token": again, "prefix_matching": again}
        theirs = ("previous_token_head", "duplicate_token_head", "induction_head")
        for (name, destinations), their in zip(names.items(), theirs, strict=True):
            expected = detect_head(model, row[None], their, error_measure="mul")  # pyright: ignore[reportArgumentType]
            assert torch.allclose(found[name][b] * destinations / 10, expected, atol=1e-5), name


def test_pattern_scores_refuse_what_has_none():
    tokens = torch.tensor([[0, 1, 2, 0], [0, 1, 2, 3]])
    with pytest.raises(Undefined, match="no token of sequence 1 occurs twice"):
        pattern_scores(random_patterns(tokens), tokens)
    with pytest.raises(Undefined, match="at least 2"):
        pattern_scores(random_patterns(tokens[:, :1]), tokens[:, :1])
    with pytest.raises(BadModel, match="not finite"):
        pattern_scores(random_patterns(tokens[:1]) * torch.nan, tokens[:1])


# In-context learning


def test_in_context_learning_score_is_a_difference_of_mean_losses():
    model = fresh()
    tokens = torch.randint(20, (5, 12), generator=generator())
    found = in_context_learning_score(model, tokens, early=(1, 3), late=(6, 12))
    each = []
    for row in tokens:
        with torch.no_grad():
            log_p = model(row[None])[0].log_softmax(-1)
        losses = {i: -log_p[i - 1, row[i]].item() for i in range(1, 12)}
        each.append(sum(losses[i] for i in range(6, 12)) / 6 - (losses[1] + losses[2]) / 2)
    each = torch.tensor(each)
    assert found.value == pytest.approx(each.mean().item(), abs=1e-5)
    assert found.null_sd.item() == pytest.approx(each.std().item() / 5**0.5, abs=1e-5)
    test = ttest_1samp(each.numpy(), 0)
    assert found.p.item() == pytest.approx(test[1], abs=1e-4)
    low, high = test.confidence_interval()  # pyright: ignore[reportAttributeAccessIssue]
    assert found.band.tolist() == pytest.approx([-(high - low) / 2, (high - low) / 2], abs=1e-4)


def test_in_context_learning_is_seen_where_it_is():
    learns = in_context_learning_score(
        wb.load("induction-2-attn").model, repeated_sequences(50, 40, 48, generator())[0]
    )
    assert learns.value < -1 and learns.p < 1e-6
    even = in_context_learning_score(fresh(init="by-hand"), torch.randint(20, (8, 12)), early=(1, 3))
    assert even.value == pytest.approx(0, abs=1e-6) and even.p == 1 and even.z == 0


def test_in_context_learning_score_refuses_what_it_cannot_tell():
    model = fresh(n_ctx=24)
    tokens = torch.randint(20, (3, 15), generator=generator())
    with pytest.raises(Undefined, match=r"early = 0 … 1 in sequences of 15 tokens; .* at least 16"):
        in_context_learning_score(model, tokens)
    with pytest.raises(Undefined, match=r"late = 4 … 16"):
        in_context_learning_score(model, tokens, early=(1, 3), late=(4, 16))
    with pytest.raises(Undefined, match="give at least 2"):
        in_context_learning_score(model, tokens[:1], early=(1, 3))
    model.W_U.data[0] = torch.inf
    with pytest.raises(BadModel, match="not finite"):
        in_context_learning_score(model, tokens, early=(1, 3))
