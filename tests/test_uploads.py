"""A stranger's recipe and weights: taken if they fit, refused in one line if not, and then nothing is kept."""

import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as read
from safetensors.torch import save

import workbench as wb
from workbench import uploads
from workbench.content import content
from workbench.errors import WorkbenchError
from workbench.training import evaluate
from workbench.uploads import add_run

MODELS = content("models")
RECIPE = (MODELS / "winograd-1" / "recipe.toml").read_bytes()
WEIGHTS = (MODELS / "winograd-1" / "model.safetensors").read_bytes()


def refused(name="mine", recipe=RECIPE, weights=WEIGHTS):
    with pytest.raises(WorkbenchError) as error:
        add_run(name, recipe, weights)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    return str(error.value)


def with_header(change):
    """The weights with another header."""
    length = int.from_bytes(WEIGHTS[:8], "little")
    header = json.loads(WEIGHTS[8 : 8 + length])
    change(header)
    data = json.dumps(header).encode()
    return len(data).to_bytes(8, "little") + data + WEIGHTS[8 + length :]


def test_a_good_pair_becomes_a_run_with_its_own_score(runs):
    run = add_run("mine", RECIPE, WEIGHTS)
    shipped = wb.load("winograd-1")
    assert run.path == runs / "mine" / "seed-0" and not run.shipped
    ours, theirs = run.results["held_out"], shipped.results["held_out"]
    assert ours["by_cluster"] == theirs["by_cluster"] and ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert run.weights_sha256 == shipped.weights_sha256
    assert run.results["made_by"] == "trained elsewhere"
    again = wb.load("mine")
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), shipped.model.parameters(), strict=True))
    assert evaluate(again.model, again.task).accuracy == shipped.held_out_accuracy
    assert [path.name for path in runs.iterdir()] == ["mine"]
    assert "already; choose another name" in refused()


def test_half_precision_is_taken(runs):
    half = save({name: weight.half() for name, weight in read(WEIGHTS).items()})
    run = add_run("half", RECIPE, half)
    assert run.model.W_E.dtype == torch.float32
    torch.testing.assert_close(run.model.W_E, wb.load("winograd-1").model.W_E, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "winograd-2"}, "a model of the project is called winograd-2"),
        ({"name": "../out"}, "cannot name a run"),
        ({"name": ""}, "cannot name a run"),
        ({"name": ".hidden"}, "begins with a dot"),
        ({"recipe": b"\xff\xfe"}, "is not readable TOML"),
        ({"recipe": b"a = " + b"[" * 60_000}, "is not readable TOML"),
        ({"recipe": b"x" * 70_000}, "expected at most 65,536"),
        ({"recipe": b"[model]\nn_layers = 1"}, "no task given"),
        ({"recipe": b'task = "/etc/passwd"'}, "'/etc/passwd': expected a task's name"),
        ({"recipe": b'task = "../winograd.toml"'}, "is none of"),
        ({"recipe": b'task = "winograd"\n[model]\nn_layers = 512'}, "expected at most 128"),
        ({"recipe": b'task = "winograd"\n[model]\nn_ctx = 1000000'}, "expected at most 16384"),
        ({"recipe": b'task = "winograd"\n[model]\nd_model = 40000\nd_mlp = 900000'}, "bytes; expected at most"),
        ({"recipe": b'task = "winograd"'}, "where the recipe has"),
        ({"weights": b""}, "no safetensors file"),
        ({"weights": pickle.dumps(["code that must not run"])}, "no safetensors file"),
        ({"weights": (2**62).to_bytes(8, "little") + b"{}"}, "no safetensors file"),
        ({"weights": (2).to_bytes(8, "little") + b"[]"}, "the header is damaged"),
        ({"weights": (2).to_bytes(8, "little") + b"{}"}, "is missing, where the recipe has"),
        ({"weights": WEIGHTS[:-4]}, "are damaged"),
        ({"weights": WEIGHTS + b"1234"}, "are damaged"),
        ({"weights": with_header(lambda h: h["embed.W_E"].update(shape=[2**40, 2**40]))}, "where the recipe has"),
        ({"weights": with_header(lambda h: h["embed.W_E"].update(dtype="I32"))}, "is of type I32"),
        ({"weights": with_header(lambda h: h["embed.W_E"].update(data_offsets=[0, 2**60]))}, "are damaged"),
        ({"weights": with_header(lambda h: h.update(extra=h["embed.W_E"]))}, "no such tensor"),
        ({"weights": save({n: w * float("nan") for n, w in read(WEIGHTS).items()})}, "not finite"),
    ],
)  # fmt: skip
def test_what_is_refused_and_why(runs, change, message):
    assert message in refused(**change)
    assert not runs.exists() or list(runs.iterdir()) == []


def test_a_file_too_large_is_refused_before_it_is_read(monkeypatch, runs):
    monkeypatch.setattr(uploads, "LARGEST_WEIGHTS", len(WEIGHTS) - 1)
    assert "expected at most" in refused()


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "file"))
    assert "cannot keep mine in" in refused()


@settings(max_examples=150)
@given(st.integers(0, 8_000), st.binary(min_size=1, max_size=6))
def test_a_damaged_header_is_refused_or_harmless(at, damage):
    """Whatever stands in the header: one line, or the same weights."""
    weights = WEIGHTS[:at] + damage + WEIGHTS[at + len(damage) :]
    recipe = uploads._recipe("mine", RECIPE)
    try:
        uploads._check_header(recipe, weights)
        uploads._scored(recipe, weights)
    except WorkbenchError as error:
        assert "\n" not in str(error)
