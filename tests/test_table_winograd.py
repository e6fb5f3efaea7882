"""The Winograd table's comparison: the published wrong noun, and agreements that rest on a wide interval."""

import pytest

from workbench.tables import winograd


def row(model: str, mean: float, low: float, high: float, wrong_noun: float = 0.0):
    accuracy = {"mean": mean, "min": mean, "max": mean, "interval": [low, high], "per_seed": [mean, mean]}
    return {"model": model, "held_out_accuracy": accuracy, "wrong_noun": wrong_noun, "other_word": 0.0}


@pytest.mark.parametrize(("wrong", "agrees"), [(0.5, True), (0.46, True), (0.44, False), (0.56, False)])
def test_the_wrong_noun_is_compared_with_the_published_half(wrong, agrees):
    right, noun = winograd.compared([row("winograd-average", 0.279, 0.2, 0.4, wrong)])
    assert right.agrees and (noun.what, noun.source) == ("winograd-average, the wrong noun", "50.0")
    assert noun.agrees is agrees and noun.ours == f"{100 * wrong:.1f}"


@pytest.mark.parametrize(
    ("mean", "low", "high", "wide"),
    [
        (0.85, 0.655, 1.0, True),  # published: 92.7 %; 7.7 points off, and in the interval
        (0.93, 0.655, 1.0, False),  # the mean itself is near
        (0.85, 0.80, 0.90, False),  # not in the interval: it differs
    ],
)
def test_an_agreement_that_rests_on_a_wide_interval_says_so(mean, low, high, wide):
    said = " ".join(winograd.discussion([row("winograd-1", mean, low, high)]))
    assert ("**winograd-1 agrees because its interval is wide**: 65.5–100.0 holds 92.7" in said) is wide
    assert ("the mean, 85.0, is 7.7 points below it" in said) is wide
