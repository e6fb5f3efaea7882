"""Every table on a tiny budget: killed in a training and between two rows it goes on; all its forms say the same."""

import csv
import dataclasses
import importlib
import json

import pytest
from support import interrupted

from workbench.tables import TABLES, engine, order
from workbench.tables.engine import Quick

KEPT = 1
"""Rows that are written before the second kill, where there are more."""


@pytest.mark.parametrize("name", [name for name in TABLES if name != "attention-cost"])  # by the clock: its own test
def test_a_table_that_was_killed_goes_on(name, runs, made_up_text, monkeypatch):
    module = importlib.import_module(f"workbench.tables.{name.replace('-', '_')}")
    monkeypatch.setattr(module, "QUICK", Quick(0.002, 0.1))
    few = dataclasses.replace(asked := order(name, 1, "quick"), plans=asked.plans[:2])
    if few.untrained:
        with interrupted(before=1):
            few.make(jobs=1)
        assert few.untrained

    write, written = engine.write_atomic, []

    def write_or_stop(path, data):
        if len(written) == min(KEPT, len(few.plans) - 1):
            raise KeyboardInterrupt
        written.append(path)
        write(path, data)

    monkeypatch.setattr(engine, "write_atomic", write_or_stop)
    with pytest.raises(KeyboardInterrupt):
        few.make(jobs=1)
    assert not few.untrained  # what was trained is kept
    kept = {path: path.read_bytes() for path in written}

    monkeypatch.setattr(engine, "write_atomic", lambda path, data: (written.append(path), write(path, data)))
    table = few.make(jobs=1)
    assert len(written) == len(set(written)) == len(few.plans)  # no row was measured twice
    assert all(path.read_bytes() == data for path, data in kept.items())
    assert few.make(jobs=1).json() == table.json() and len(written) == len(few.plans)

    data = json.loads(table.json())
    assert data["command"] == f"workbench table {name} --seeds 1 --budget quick" and "workbench" in data["versions"]
    for row, plan in zip(data["rows"], few.plans, strict=True):
        assert row["budget"] == ("quick" if plan.recipes else "exact") and plan.label.items() <= row.items()
        assert not plan.recipes or (row["seeds"] == [0] and row["seconds"] >= 0 and row["steps"] > 0)
    for line, row in zip(csv.DictReader(table.csv().splitlines()), data["rows"], strict=True):
        assert line["budget"] == row["budget"]
    ends = [row["budget"] for row in data["rows"]]
    shown = [line.strip("| ").rpartition("| ")[2] for line in table.markdown().splitlines() if line.startswith("| ")]
    assert shown[2:] == ends  # after the headings and the rule
    assert [line.rpartition("& ")[2] for line in table.tex().splitlines() if line.endswith(r" \\")][1:] == [
        rf"{end} \\" for end in ends
    ]
