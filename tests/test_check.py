"""Power and nulls: everything that was built by hand is found, and nothing on models in which nothing is."""

import json

import pytest

from workbench.check import findings, nulls
from workbench.cli import app
from workbench.known_answers import known_models


def test_every_finding_on_every_hand_built_model_is_right():
    found = list(findings())
    assert {finding.model for finding in found} == {known.name for known in known_models()}
    assert len(found) == 22
    assert [finding for finding in found if not finding.right] == []


def test_on_fresh_models_one_score_in_twenty_leaves_its_band_and_no_head_has_a_role():
    """200 models, shares clustered by model. Pairs and heads together 3.5–6.5 %; single measures within 3 standard
    errors of that."""
    shares, roles = nulls(200)
    assert roles == 0
    scores = {share.measure: share for share in shares}
    assert len(scores) == 25
    for kinds in (
        ["Q-composition", "K-composition", "V-composition"],
        ["OV spectrum", "OV diagonal z", "erasing", "copying"],
        ["previous token", "current token", "duplicate token", "prefix matching", "distance", "entropy"],
        ["neuron in · out"],
        ["Q positivity", "K positivity", "V positivity"],
        ["QK trace"],
        ["overlap"],
    ):
        together = sum(scores[kind].share for kind in kinds) / len(kinds)
        assert 0.035 <= together <= 0.065, kinds
    for share in shares:
        least = 0.0 if share.measure == "OV arg-max" else 0.035  # hits are counts: no band holds exactly 95 % of them
        assert least - 3 * share.standard_error <= share.share <= 0.065 + 3 * share.standard_error, share


def test_a_spread_needs_two_models():
    with pytest.raises(ValueError, match="give at least 2"):
        nulls(1)


def test_the_command_prints_power_beside_nulls(capsys):
    app(["check", "--fresh", "2"], standalone_mode=False)
    text = capsys.readouterr().out
    assert "22 of 22 findings on hand-built models are right" in text
    assert "on 2 freshly initialised models, 5 % by chance; heads with a role: 0" in text


def test_the_command_as_json_and_its_exit_code(capsys, monkeypatch):
    import workbench.check

    real = workbench.check.findings

    def one_wrong():
        from dataclasses import replace

        first, *rest = real()
        yield from (replace(first, right=False), *rest)

    monkeypatch.setattr(workbench.check, "findings", one_wrong)
    code = app(["check", "--fresh", "2", "--json"], standalone_mode=False)
    data = json.loads(capsys.readouterr().out)
    assert [f["right"] for f in data["hand_built"]].count(False) == 1
    assert data["fresh"]["models"] == 2
    assert code == 1
