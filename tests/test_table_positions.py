"""The table of positions: losses against brute force, lengths on the same tokens, on a made-up text; the rules."""

import itertools
import json
import math

import pytest
import torch
from support import committed_rows

from workbench.errors import BadPrompt, WorkbenchError
from workbench.recipes import load_recipe
from workbench.runs import build_model, load, run_folder
from workbench.tables import order, positions
from workbench.tables.engine import Asked, Quick
from workbench.tables.positions import KINDS, LENGTHS, losses_at
from workbench.tasks import load_task
from workbench.tasks.text import Text
from workbench.training import train


@pytest.fixture
def tiny(made_up_text, monkeypatch):
    """Three of the kinds, three steps each."""
    monkeypatch.setattr(positions, "QUICK", Quick(steps=0.001, batch=0.03))
    monkeypatch.setattr(positions, "KINDS", {kind: KINDS[kind] for kind in ("learned", "rotary", "alibi")})
    return order("positions", 2, "quick")


def text() -> Text:
    task = load_task("shakespeare-64")
    assert isinstance(task, Text)
    return task


def model_of(kind: str):
    recipe = Asked(1, "full", Quick()).recipes("shakespeare-positions", positions=kind)[0]
    return build_model(recipe, load_task("shakespeare-64")).eval()


def test_every_row_is_that_of_its_runs(tiny):
    made = tiny.make(jobs=1)
    assert [row["positions"] for row in made.data["rows"]] == ["learned", "rotary", "alibi"]
    tokens = text().parts[1]
    for row, plan in zip(made.data["rows"], tiny.plans, strict=True):
        assert row["budget"] == "quick" and row["seeds"] == [0, 1] and row["steps"] == 3
        assert row["tokens"] == (len(tokens) - 1) // 256 * 256
        runs = [load(run_folder(recipe)) for recipe in plan.recipes]
        for length in LENGTHS:
            losses = [losses_at(run.model, tokens, length, 256).mean().item() for run in runs]
            found = row["perplexity"][str(length)]
            assert found["per_seed"] == pytest.approx([math.exp(loss) for loss in losses])
            assert found["mean"] == pytest.approx(math.exp(sum(losses) / 2))
            assert found["interval"][0] < found["mean"] < found["interval"][1]
        long, short = (row["perplexity"][str(length)]["per_seed"] for length in (256, 64))
        assert row["change"]["per_seed"] == pytest.approx([math.log(a / b) for a, b in zip(long, short, strict=True)])
    for face in (made.json(), made.csv(), made.markdown(), made.tex()):
        assert all(kind in face for kind in positions.KINDS)
    assert json.loads(made.json()) == made.data
    assert len(positions.compared(made.data["rows"])) == 2 + 1 + 3
    for rows in ([], made.data["rows"][:1], made.data["rows"][1:], made.data["rows"]):
        assert all(isinstance(said, str) for said in positions.discussion(rows))
        positions.compared(rows)


def test_rows_of_a_table_that_are_never_read_stay_but_for_weight_decay(tiny):
    """AdamW multiplies a weight without gradient by 1 − rate · decay at every step."""
    learned, _, alibi = (train(plan.recipes[0]) for plan in tiny.plans)
    rest = positions.untrained_rows(learned, 64)
    assert rest is not None and rest["rows"] == 192 and rest["cosine"] == pytest.approx(1, abs=1e-6)
    assert rest["relative_size"] == pytest.approx((1 - 1e-3 * 0.01) ** 3, abs=1e-6)
    before = build_model(learned.recipe, learned.task)
    assert (before.W_pos[:64] - learned.model.W_pos[:64]).abs().max() > 1e-3  # these were read
    assert positions.untrained_rows(alibi, 64) is None


@pytest.mark.parametrize("kind", ["learned", "alibi"])
def test_losses_are_those_of_windows_read_one_by_one(made_up_text, kind):
    model, tokens = model_of(kind), text().parts[1][:520]
    for length in LENGTHS:
        expected = []
        for start in range(0, 512, length):
            window = tokens[start : start + length]
            log_probs = model(window[None])[0].double().log_softmax(-1)
            expected += [-log_probs[i, tokens[start + i + 1]].item() for i in range(length)]
        torch.testing.assert_close(
            losses_at(model, tokens, length, 256), torch.tensor(expected).double(), rtol=0, atol=1e-5
        )


def test_a_token_with_the_same_words_before_it_has_the_same_loss_at_every_length(made_up_text):
    model, tokens = model_of("rotary"), text().parts[1]
    by_length = [losses_at(model, tokens, length, 256).view(-1, 256) for length in LENGTHS]
    for one, other in itertools.pairwise(by_length):
        torch.testing.assert_close(one[:, :64], other[:, :64], rtol=0, atol=1e-5)
    assert (by_length[0][:, 64:] - by_length[2][:, 64:]).abs().max() > 1e-3  # and others see more


def test_a_length_beyond_the_positions_and_a_text_that_is_too_short_are_refused(made_up_text):
    tokens = text().parts[0]
    for kind in ("learned", "shortformer"):
        with pytest.raises(BadPrompt, match="512 tokens, but this model has positions for 256"):
            losses_at(model_of(kind), tokens, 512, 512)
    assert losses_at(model_of("alibi"), tokens, 512, 512).isfinite().all()
    with pytest.raises(WorkbenchError, match="the held-out text has 512 tokens; windows of 256 need 513"):
        losses_at(model_of("alibi"), tokens[:512], 256, 256)


def made_up(figures: dict[str, tuple[float, float]], half: float = 0.001) -> list[dict]:
    """Rows with these perplexities at 64 and 256."""
    return [
        {
            "positions": kind, "steps": 3000, "beyond": [long], "budget": "full",
            "perplexity": {str(n): {"mean": p} for n, p in ((64, short), (128, (short + long) / 2), (256, long))},
            "change": {"mean": math.log(long / short),
                       "interval": [math.log(long / short) - half, math.log(long / short) + half]},
            "untrained_rows": {"rows": 192, "cosine": 1.0, "relative_size": 0.97},
        }
        for kind, (short, long) in figures.items()
    ]  # fmt: skip


PUBLISHED = {
    "none": (46, 46), "learned": (44, 80), "sinusoidal": (45, 60), "rotary": (44.5, 47), "alibi": (44.95, 42.49),
    "shortformer": (45, 70),
}  # fmt: skip


def test_what_the_source_says_agrees_with_itself_and_the_opposite_does_not():
    rows = made_up(PUBLISHED)
    agrees = {each.what: each.agrees for each in positions.compared(rows)}
    assert [each for each in agrees.values() if each is not None] == [True] * 7
    said = " ".join(positions.discussion(rows))
    assert "ALiBi improves with length" in said and "lie between" in said and "Levels" not in said
    upside_down = made_up({kind: (long, short) for kind, (short, long) in PUBLISHED.items()})
    assert [each.agrees for each in positions.compared(upside_down) if each.agrees is not None] == [False] * 7
    said = " ".join(positions.discussion(upside_down))
    assert "ALiBi loses with length" in said and "not between" in said and "Levels" in said
    unsure = made_up(PUBLISHED, half=10.0)
    assert {each.what: each.agrees for each in positions.compared(unsure)}["alibi, from 64 to 256"] is False


def test_the_recipe_has_room_for_every_length_and_is_trained_on_the_first():
    recipe = load_recipe("shakespeare-positions")
    assert recipe.model.n_ctx == max(LENGTHS) and load_task(recipe.task).n_ctx == LENGTHS[0]
    hashes = {plan.recipes[0].experiment for plan in order("positions", 1).plans}
    assert len(hashes) == len(KINDS)


def test_the_committed_table_falls_off_where_positions_end():
    """As published: learned positions are a cliff beyond the length they were trained on, ALiBi does not get worse,
    rotary lies between."""
    rows = {row["positions"]: row for row in committed_rows("positions")}
    change = {kind: row["change"] for kind, row in rows.items()}
    assert change["learned"]["interval"][0] > 0.2
    assert change["alibi"]["mean"] <= 0.005
    assert change["alibi"]["mean"] < change["rotary"]["mean"] < change["learned"]["mean"]
