"""Every model built by hand does what it says of itself: plain forward passes, nothing of the circuits library."""

import pytest
import torch
from torch import Tensor

from workbench.known_answers import BUILDERS, KnownModel, known_models, repeated
from workbench.transformer import Transformer

MODELS = {known.name: known for known in known_models()}


def run(known: KnownModel, tokens: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = known.tokens if tokens is None else tokens
    logits, cache = known.model.run_with_cache(tokens, return_cache_object=False)
    return logits, {name[7]: value for name, value in cache.items() if name.endswith("hook_pattern")}


def accuracy(known: KnownModel, tokens: Tensor, start: int = 0) -> float:
    said = run(known, tokens)[0].argmax(-1)
    return (said[:, start:-1] == tokens[:, start + 1 :]).float().mean().item()


def without(known: KnownModel, head: int, layer: int) -> Tensor:
    """Logits without a head's output."""

    def silence(z: Tensor, hook: object) -> Tensor:
        z = z.clone()
        z[:, :, head] = 0
        return z

    return known.model.run_with_hooks(known.tokens, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", silence)])


def permutations(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.stack([torch.randperm(24, generator=generator) for _ in range(n)])


def test_there_is_one_of_every_kind_and_it_is_the_same_every_time() -> None:
    assert list(MODELS) == list(BUILDERS)
    for known, again in zip(known_models(), known_models(), strict=True):
        assert known.about in repr(known)
        assert torch.equal(known.tokens, again.tokens)
        for mine, others in zip(known.model.parameters(), again.model.parameters(), strict=True):
            assert torch.equal(mine, others)
            assert mine.isfinite().all()


def test_the_bigram_table_is_what_the_model_predicts() -> None:
    known = MODELS["bigram-table"]
    assert known.table is not None
    assert torch.allclose(known.table.exp().sum(-1), torch.ones(24), atol=1e-6)
    said = run(known)[0].log_softmax(-1)
    assert (said - known.table[known.tokens]).abs().max() <= 1e-4
    assert known.table.std() > 1  # worth finding


def test_the_copying_head_says_what_it_has_seen_in_proportion() -> None:
    known = MODELS["copying-head"]
    logits, patterns = run(known)
    seen = torch.nn.functional.one_hot(known.tokens, 24).float().cumsum(1) / torch.arange(1, 25)[:, None]
    assert (logits - 10 * seen).abs().max() <= 1e-4
    assert (patterns["0"][:, 0] - torch.ones(24, 24).tril() / torch.arange(1, 25)[:, None]).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("name", "back"), [("previous-token-head", 1), ("erasing-head", 0), ("positional-impostor", 5)]
)
def test_heads_that_look_back_look_where_they_say(name: str, back: int) -> None:
    known = MODELS[name]
    assert known.look_back == back
    pattern = run(known)[1]["0"][:, 0]
    assert pattern.diagonal(-back, 1, 2).min() > 0.999
    early = torch.ones(back, back).tril() / torch.arange(1, back + 1)[:, None]
    assert (pattern[:, :back, :back] - early).abs().max() <= 1e-6 if back else True


def test_the_previous_token_head_makes_the_model_say_the_letter_after_it() -> None:
    known = MODELS["previous-token-head"]
    said = run(known)[0].argmax(-1)
    assert torch.equal(said[:, 1:], (known.tokens[:, :-1] + 1) % 24)
    assert known.model.to_string(torch.tensor([24 - 1])) == "x"  # whose next one is a, token 0


def test_the_erasing_head_takes_away_nine_tenths() -> None:
    known = MODELS["erasing-head"]
    logits = run(known)[0].gather(2, known.tokens[..., None])
    assert (logits - 1).abs().max() <= 1e-4
    assert (without(known, 0, 0).gather(2, known.tokens[..., None]) - 10).abs().max() <= 1e-4


def test_the_impostor_repeats_with_a_period_of_six_and_no_other() -> None:
    known = MODELS["positional-impostor"]
    assert accuracy(known, repeated(32, (6, 6)), start=6) == 1
    for period in (4, 5, 7, 8):
        assert accuracy(known, repeated(32, (period, period)), start=period) < 0.3
    repeating, shuffled = (run(known, tokens)[1]["0"] for tokens in (repeated(24, (6, 6)), permutations(24)))
    assert torch.equal(repeating, shuffled)  # the tokens do not matter


def test_repeated_sequences_repeat_with_periods_of_their_own() -> None:
    tokens = repeated(200, (4, 12))
    assert tokens.shape == (200, 24)
    periods = [next(p for p in range(1, 25) if bool((row[p:] == row[:-p]).all())) for row in tokens]
    assert set(periods) == set(range(4, 13))
    for row, period in zip(tokens, periods, strict=True):
        assert len(row[:period].unique()) == period


def test_the_induction_pair_does_induction() -> None:
    known = MODELS["induction-pair"]
    assert known.pair == ("0.0", "1.0")
    for period in range(2, 13):
        tokens = repeated(32, (period, period), seed=1)
        assert accuracy(known, tokens, start=period) >= 0.99
    assert accuracy(known, permutations(64)) < 0.1  # nothing to repeat
    tokens = repeated(64, (5, 12), seed=2)
    logits, patterns = run(known, tokens)
    assert logits[:, 12:-1].log_softmax(-1).gather(2, tokens[:, 13:, None]).exp().min() > 0.99
    place = torch.arange(24)
    for row, pattern in zip(tokens, patterns["1"][:, 0], strict=True):
        matches = torch.zeros(24, 24)
        matches[:, 1:] = (row[:, None] == row[None, :-1]).float()
        matches = matches * (place[:, None] >= place)
        found = matches.any(1)
        assert ((pattern * matches).sum(1)[found] - 1).abs().max() <= 0.001
        assert (pattern[~found, 0] - 1).abs().max() <= 0.001  # it rests
    unrepeated = run(known, permutations(64))[1]["1"][:, 0]
    assert unrepeated[:, :, 0].min() > 0.999


def test_induction_takes_both_heads_of_the_pair_and_no_other() -> None:
    known = MODELS["induction-pair"]
    clean, patterns = run(known)
    assert patterns["0"][:, 0].diagonal(-1, 1, 2).min() > 0.999
    assert patterns["0"][:, 1].diagonal(0, 1, 2).min() > 0.999

    def right(logits: Tensor) -> float:
        return (logits[:, 12:-1].argmax(-1) == known.tokens[:, 13:]).float().mean().item()

    assert right(clean) == 1
    assert right(without(known, 0, 0)) < 0.2
    assert right(without(known, 0, 1)) < 0.2
    for layer in (0, 1):  # the others do something, but nothing that matters
        logits = without(known, 1, layer)
        assert right(logits) == 1
        assert (logits - clean).abs().max() > 0.05


@pytest.mark.parametrize("name", ["repaired-skip-trigrams", "broken-skip-trigrams"])
def test_skip_trigrams_are_said_where_the_direct_path_decides(name: str) -> None:
    known = MODELS[name]
    assert len(known.rules) == len(known.head_bugs) == 8
    assert not set(known.rules) & set(known.head_bugs)
    assert {(s, d) for s, d, _ in known.head_bugs} == {(s, d) for s, d, _ in known.rules}
    assert set(known.bugs) <= set(known.head_bugs)
    filler = known.model.to_tokens("w")[0, 0]
    model = known.model
    replaced = {(s, d) for s, d, _ in known.bugs}
    assert len(replaced) == (0 if name.startswith("repaired") else 4)
    for trigrams, said in ((known.rules, True), (known.head_bugs, False)):
        for source, destination, out in trigrams:
            for at in (0, 3, 9):
                context = filler.repeat(1, 12)
                context[0, at], context[0, -1] = source, destination
                p = model(context)[0, -1].softmax(-1)
                swapped = (source, destination) in replaced
                assert (p[out] > 0.85) == (said != swapped)
                if name.startswith("repaired"):
                    assert p[out] > 0.99 or p[out] < 0.01


def test_the_skip_trigram_head_raises_rules_and_bugs_and_nothing_else() -> None:
    for name in ("repaired-skip-trigrams", "broken-skip-trigrams"):
        known = MODELS[name]
        model: Transformer = known.model
        for source, destination, _ in known.rules:
            tokens = torch.tensor([[source, 17, destination]])
            with_head = model(tokens)[0, -1]
            silent = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: z * 0)])[0, -1]
            raised = (with_head - silent > 5).nonzero().flatten().tolist()
            every = {out for s, d, out in (*known.rules, *known.head_bugs) if (s, d) == (source, destination)}
            assert set(raised) == every
            assert run(known, tokens)[1]["0"][0, 0, -1, 0] > 0.999
    assert MODELS["repaired-skip-trigrams"].rules == MODELS["broken-skip-trigrams"].rules


def test_example_sequences_of_skip_trigrams_end_in_what_is_said() -> None:
    known = MODELS["repaired-skip-trigrams"]
    assert (run(known)[0][:, -2].argmax(-1) == known.tokens[:, -1]).all()
    found = {tuple(row[[3, 10, 11]].tolist()) for row in known.tokens}
    assert found == set(known.rules)
