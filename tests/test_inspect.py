"""`workbench inspect`: one screen, every number with its null, and what is undefined says why."""

import json

import pytest

import workbench as wb
from workbench.cli import app
from workbench.inspect_report import inspect_report


@pytest.fixture(scope="module")
def induction():
    return inspect_report(wb.load("induction-2-attn"), draws=39)


def test_heads_have_scores_bands_and_roles(induction):
    headings, rows, notes = induction.head_table()
    assert headings[0] == "head"
    assert headings[-1] == "where it looks"
    assert [row[0] for row in rows] == [f"{layer}.{head}" for layer in (0, 1) for head in range(4)]
    assert rows[0][-1] == "previous-token"
    assert [row[-1] for row in rows[4:]] == ["induction"] * 4
    assert all("[" in cell for row in rows for cell in row[1:-1])  # no bare number
    assert any("one in twenty" in note for note in notes)


def test_pairs_stand_beside_their_sign_and_the_cost_of_their_cut(induction):
    headings, rows, notes = induction.pair_table()
    assert headings == ["path", "score", "z", "p", "positivity", "attention moved", "cutting it costs"]
    assert {row[0] for row in rows[:4]} == {f"0.0→K→1.{head}" for head in range(4)}
    joint = [row for row in rows if row[0].endswith("K paths together")]
    assert "confirmed" in joint[0][-1]
    assert "confirmed" not in rows[0][-1]  # the four heads back each other up
    assert any("never “composes”" in note for note in notes)
    assert "erasing heads: none" in induction.memory_line()


def test_json_has_everything(induction):
    data = json.loads(json.dumps(induction.data))
    assert data["roles"]["induction"] == ["1.0", "1.1", "1.2", "1.3"]
    assert len(data["composition"]) == 3 * 16
    assert {"score", "null_mean", "null_sd", "z", "p", "low", "high", "basis"} <= set(data["composition"][0])
    assert len([row for row in data["heads"] if row["measure"] == "prefix_matching"]) == 8
    assert data["undefined"] == []


def test_one_layer_composes_nothing_and_the_control_has_no_roles():
    report = inspect_report(wb.load("induction-1-attn"), draws=39)
    _, rows, _ = report.head_table()
    assert [row[-1] for row in rows] == [""] * len(rows)
    assert report.pair_table() == ([], [], ["composition: no head reads another here"])


def test_what_is_undefined_for_a_model_says_why_and_the_rest_is_shown(capsys):
    app(["inspect", "winograd-average", "--draws", "39"], standalone_mode=False)
    text = capsys.readouterr().out
    assert "composition: undefined where sub-layers replace the token" in text
    assert "previous token" in text
    app(["inspect", "bigram-0", "--draws", "39"], standalone_mode=False)
    assert "0 layers" in capsys.readouterr().out


def test_the_command_prints_one_screen_or_json(capsys):
    app(["inspect", "winograd-1-hand", "--draws", "39"], standalone_mode=False)
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 50
    assert "head" in text
    app(["inspect", "winograd-1-hand", "--draws", "39", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["model"] == "winograd-1-hand"
