"""The table of costs: kernels against each other, formula against tensors, fits against made-up data, refusals."""

import json
import sys

import pytest
import torch
from support import committed_rows

from workbench import cli
from workbench.errors import WorkbenchError
from workbench.recipes import ModelConfig
from workbench.tables import attention_cost, order
from workbench.tables.attention_cost import (
    GIB,
    HEADS,
    LENGTHS,
    UNFIT,
    exponent,
    fitted,
    fused,
    needed_bytes,
    peak_bytes,
    score_bytes,
    written_out,
)
from workbench.transformer import Transformer


def heads(n: int):
    return torch.randn(3, 1, HEADS, n, attention_cost.D_HEAD, generator=torch.Generator().manual_seed(0))


def test_the_score_matrix_is_as_large_as_the_formula_says():
    assert score_bytes(16_384) == 8 * GIB  # published
    for n in (16, 64):
        q, k, _ = heads(n)
        assert (q @ k.mT).nbytes == score_bytes(n)
        assert 2 * (q @ k.mT).nbytes + torch.ones(n, n, dtype=torch.bool).nbytes == needed_bytes(n)


def test_what_is_timed_is_attention():
    """Against torch's kernel, and against the transformer's own with W_Q, W_K, W_V and W_O that pass heads through."""
    q, k, v = heads(48)
    torch.testing.assert_close(written_out(q, k, v), fused(q, k, v), rtol=0, atol=1e-5)
    config = ModelConfig(
        n_layers=1, n_heads=HEADS, d_model=attention_cost.WIDTH, d_mlp=0, n_ctx=48, d_vocab=2, norm="none",
        query_key="identity", value_output="identity",
    )  # fmt: skip
    ours = Transformer(config).blocks[0].attn
    flat = [of.transpose(1, 2).flatten(2) for of in (q, k, v)]
    expected = written_out(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(ours(*flat), expected, rtol=0, atol=1e-5)


def test_the_measured_peak_is_what_is_predicted():
    """In a process of its own, as the system counts it: two score matrices and the mask; the fused kernel, far less."""
    assert peak_bytes("attention", 1024) == pytest.approx(needed_bytes(1024), rel=0.1)
    assert peak_bytes("fused", 1024) < needed_bytes(1024) / 5


@pytest.mark.parametrize("power", [1.0, 1.9, 2.0])
def test_exponents_of_made_up_figures(power):
    slope, error = exponent(LENGTHS, [3e-7 * n**power for n in LENGTHS])
    assert slope == pytest.approx(power, abs=1e-9) and error == pytest.approx(0, abs=1e-9)
    noisy = [n**power * factor for n, factor in zip(LENGTHS, (1.1, 0.9, 1.1, 0.9, 1.1, 0.9), strict=True)]
    slope, error = exponent(LENGTHS, noisy)
    assert abs(slope - power) < 2 * error < 0.2
    assert exponent([1, 2], [5, 20]) == (pytest.approx(2), 0)


def row(n: int, memory: float = 8, power: float = 2.0) -> dict:
    fits = needed_bytes(n) <= memory * GIB
    time = {"projections": 1e-6 * n, "fused": 1e-10 * n**2} | ({"attention": 1e-9 * n**power} if fits else {})
    return {
        "n": n, "budget": "exact", "score_bytes": score_bytes(n), "needed_bytes": needed_bytes(n),
        "memory_bytes": int(memory * GIB), "attention": "measured" if fits else UNFIT,
        "peak_bytes": {"fused": 100 * n} | ({"attention": needed_bytes(n)} if fits else {}),
        "time": {name: {"median": t, "min": t, "max": t, "repeats": 3} for name, t in time.items()},
    }  # fmt: skip


def test_what_agrees_and_what_is_said():
    rows = [row(n) for n in LENGTHS]
    assert [r["attention"] for r in rows] == ["measured"] * 5 + [UNFIT]
    assert {what: round(slope, 6) for what, (slope, _) in fitted(rows).items()} == {
        "attention, time": 2, "attention, peak memory": 2, "projections, time": 1, "fused, time": 2,
    }  # fmt: skip
    assert [each.agrees for each in attention_cost.compared(rows)] == [True, True, True, None, True]
    linear = attention_cost.compared([row(n, power=1.0) for n in LENGTHS])
    assert [each.agrees for each in linear][:2] == [False, True]
    said = " ".join(attention_cost.discussion(rows))
    assert "exponents 2.00 and 1.00" in said and "n = 16,384. Scores, pattern and mask would take 16.2 GiB" in said
    assert "a row may take 8." in said
    assert attention_cost.summary([]) == [] == attention_cost.discussion([]) == attention_cost.compared([])
    assert "Not tried" not in " ".join(attention_cost.discussion(rows[:2]))
    for some in (rows[:1], rows[-1:], rows[-2:]):
        assert len(attention_cost.discussion(some)) + len(attention_cost.summary(some)) >= 1
        attention_cost.compared(some)


@pytest.fixture
def tiny(monkeypatch):
    """Without processes for the peaks and without patience."""
    monkeypatch.setattr(attention_cost, "LENGTHS", (32, 64, 128))
    monkeypatch.setattr(attention_cost, "PATIENCE", 0.0)
    monkeypatch.setattr(attention_cost, "peak_bytes", lambda kernel, n: needed_bytes(n) if kernel == "attention" else n)


def test_a_row_that_would_need_more_is_not_tried_and_says_so(tiny):
    asked = order("attention-cost", options={"memory": needed_bytes(64) / GIB})
    made = asked.make(jobs=1)
    assert [row["attention"] for row in made.data["rows"]] == ["measured", "measured", UNFIT]
    for r in made.data["rows"]:
        assert r["budget"] == "exact" and r["score_bytes"] == 8 * r["n"] ** 2 * 4
        assert all(t["repeats"] >= 3 and 0 < t["min"] <= t["median"] <= t["max"] for t in r["time"].values())
        assert ("attention" in r["time"]) == ("attention" in r["peak_bytes"]) == (r["n"] < 128)
        assert {"projections", "fused"} <= r["time"].keys()
    assert made.data["command"].startswith("workbench table attention-cost --seeds 1 --budget full --memory 0.0002")
    for face in (made.json(), made.csv(), made.markdown(), made.tex()):
        assert UNFIT in face
    assert json.loads(made.json()) == made.data
    assert "--memory" not in order("attention-cost").command()


def test_stopped_in_the_middle_it_goes_on(tiny, monkeypatch):
    """What was measured is kept, and the rest comes with the same command; another memory measures anew."""
    measured, kernel = [], attention_cost.peak_bytes

    def stops(name: str, n: int) -> int:
        if n == 128:
            raise KeyboardInterrupt
        return kernel(name, n)

    monkeypatch.setattr(attention_cost, "peak_bytes", stops)
    with pytest.raises(KeyboardInterrupt):
        order("attention-cost").make(jobs=1)
    monkeypatch.setattr(attention_cost, "peak_bytes", lambda name, n: (measured.append(n), kernel(name, n))[1])
    assert len(order("attention-cost").make(jobs=1).data["rows"]) == 3 and set(measured) == {128}
    order("attention-cost", options={"memory": 0.5}).make(jobs=1)
    assert set(measured) == {32, 64, 128}


@pytest.mark.parametrize(("arguments", "message"), [
    (["attention-cost", "--memory", "0.001"], "--memory 0.001: expected GiB; the shortest row, n = 512, needs 0.016"),
    (["attention-cost", "--memory", "-1"], "--memory -1: expected GiB"),
    (["attention-cost", "--memory", "nan"], "--memory nan: expected GiB"),
    (["attention-cost", "--memory", "1e9"], "--memory 1e+09: this machine has"),
    (["averages", "--memory", "4"], "--memory: the table averages has no such option; leave it out"),
    (["all", "--memory", "4"], "--memory is for `workbench table attention-cost`, not for `all`"),
])  # fmt: skip
def test_what_cannot_be_asked_is_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["workbench", "table", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(message) and said.count("\n") == 1


def test_a_machine_without_the_memory_says_so(monkeypatch):
    def killed(*_, **__):
        return type("Done", (), {"returncode": -9, "stdout": "", "stderr": ""})()

    monkeypatch.setattr(attention_cost.subprocess, "run", killed)
    with pytest.raises(WorkbenchError, match=r"n = 8,192 needs 4\.1 GiB, which the machine did not have; close other"):
        peak_bytes("attention", 8192)


def test_the_committed_table_quadruples_and_its_memory_is_the_formulas():
    rows = committed_rows("attention-cost")
    fits = attention_cost.fitted(rows)
    assert 1.8 <= fits["attention, time"][0] <= 2.1 and 0.8 <= fits["projections, time"][0] <= 1.2
    assert {row["n"]: row["score_bytes"] for row in rows} == {row["n"]: 8 * 4 * row["n"] ** 2 for row in rows}
    for row in rows:
        if "attention" in row["peak_bytes"] and row["n"] >= 2048:
            assert row["peak_bytes"]["attention"] == pytest.approx(row["needed_bytes"], rel=0.1)
