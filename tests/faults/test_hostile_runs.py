"""Run folders from a stranger, whose hashes are right: what can be read is sound, the rest is refused in one line."""

import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from breaking import contents, finish, unfinished
from hostile import BITS, HANG, assert_one_line, quick_folder, spoilt
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load as tensors_in
from safetensors.torch import save
from support import counted

import workbench as wb
from workbench import runs as module
from workbench.content import content
from workbench.dynamics import read_dynamics
from workbench.errors import WorkbenchError
from workbench.recipes import read_recipe, shipped_names
from workbench.runs import Run, json_of, list_runs, load
from workbench.unfinished import SEAL, UNSEALED

MODELS = content("models")
PARTS = ("recipe.toml", "run.json", "metrics.jsonl")
VALUES: list[Any] = [
    None, True, False, 0, -1, 0.5, 2, 10**30, 10**400, 1e308, float("nan"), float("inf"), "", "x", "\x1b[2J", "\ud800",
    "x" * 2_000, [], [[]], {}, {"x": 1}, [1, "2", None], "../../etc/passwd",
]  # fmt: skip


@pytest.fixture
def home(monkeypatch):
    """An empty folder of runs, with no shipped ones beside it."""
    with quick_folder() as path:
        monkeypatch.setenv("WORKBENCH_RUNS", str(path))
        monkeypatch.setattr(module, "shipped_names", list)
        yield path


def placed(home: Path, model: str, name: str = "mine") -> Path:
    """A copy of a shipped run among yours."""
    return shutil.copytree(MODELS / model, home / name / "seed-0")


def sign(folder: Path) -> None:
    """Have run.json say the hashes of what lies there, as far as it still can."""
    try:
        results = json.loads((folder / "run.json").read_bytes())
        results["files"] = {name: module.hashlib.sha256((folder / name).read_bytes()).hexdigest()
                            for name in results["files"] if os.path.isfile(folder / name)}  # fmt: skip
        results["recipe_sha256"] = read_recipe(folder / "recipe.toml").sha256
    except (WorkbenchError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
    (folder / "run.json").write_bytes(json_of(results))


def change(rng: random.Random, data: Any) -> Any:
    """The same with one value, somewhere in it, exchanged, taken away or moved to another name."""
    inside = [(at, data[at]) for at in (data if isinstance(data, dict) else range(len(data)))]
    deeper = [(at, value) for at, value in inside if isinstance(value, dict | list) and value]
    if deeper and rng.random() < 0.7:
        at, value = rng.choice(deeper)
        data[at] = change(rng, value)
        return data
    at, value = rng.choice(inside)
    if isinstance(data, dict) and rng.random() < 0.3:
        del data[at]
        if rng.random() < 0.5:
            data[str(rng.choice(VALUES))] = value
    else:
        data[at] = rng.choice(VALUES)
    return data


def read_all() -> bool:
    """Whether the one run here can be listed; every part of it is as it should be, or refused in one line."""
    runs, faults = list_runs()
    assert len(runs) + len(faults) == 1
    for fault in faults:
        assert_one_line(fault, module.runs_folder())
    for run in runs:
        assert run.score and run.key and run.seed >= 0
        assert all(type(step) is int for step in run.checkpoints)
        refusal(lambda run: run.metrics, run)
    return bool(runs)


def refusal(read: Callable[[Run], Any], run: Run) -> str | None:
    """Why this cannot be read of the run, in one line."""
    try:
        read(run)
    except WorkbenchError as error:
        return assert_one_line(error, run.path, run.path)


def few_lines(folder: Path) -> dict[str, bytes]:
    """The parts of a run, the longest cut so that it is soon read; its hashes are right."""
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
    sign(folder)
    return {name: (folder / name).read_bytes() for name in PARTS}


def test_any_bytes_in_a_run_are_read_soundly_or_refused(home):
    rng, taken = random.Random(0), 0
    folder = placed(home, "induction-2-attn")
    kept = few_lines(folder)
    cases = counted(150, 4_000)
    for case in range(cases):
        name = rng.choice(PARTS)
        (folder / name).write_bytes(spoilt(rng, kept[name], list(kept.values())))
        if case % 4:
            sign(folder)
        taken += read_all()
        for written in (name, "run.json"):
            (folder / written).write_bytes(kept[written])
    assert cases / 10 < taken < cases


def test_any_value_in_a_run_is_read_soundly_or_refused(home):
    """Deeper than bytes lead: well-formed JSON with right hashes that says what it should not."""
    rng, taken = random.Random(1), 0
    folder = placed(home, "induction-2-attn")
    kept = few_lines(folder)
    cases = counted(150, 4_000)
    for _ in range(cases):
        name = rng.choice(PARTS[1:])
        lines = kept[name].splitlines() if name != "run.json" else [kept[name]]
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(change(rng, json.loads(lines[at]))).encode()
        (folder / name).write_bytes(b"\n".join(lines) + b"\n")
        if name == "run.json":
            (folder / name).write_bytes(json_of(json.loads(lines[at])))
        else:
            sign(folder)
        taken += read_all()
        for written in (name, "run.json"):
            (folder / written).write_bytes(kept[written])
    assert cases / 10 < taken < cases


def test_any_value_of_probes_is_a_curve_or_left_out_and_named(home):
    rng, taken = random.Random(3), 0
    folder = placed(home, "induction-2-attn")
    kept = (folder / "probes.jsonl").read_bytes().splitlines()[:3]
    cases = counted(100, 3_000)
    for case in range(cases):
        lines, at = list(kept), rng.randrange(3)
        lines[at] = (
            json.dumps(change(rng, json.loads(lines[at]))).encode() if case % 2 else spoilt(rng, lines[at], kept)
        )
        (folder / "probes.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        sign(folder)
        (run,), faults = list_runs()
        assert not faults
        try:
            curves = read_dynamics(run)
        except WorkbenchError as error:
            assert_one_line(error, folder, folder)
            continue
        taken += 1
        assert 0 < len(curves.steps) <= 3 and curves.loss.dtype == curves.loss_by_position.dtype == float
        for fault in curves.faults:
            assert_one_line(Exception(fault), folder)
    assert cases / 10 < taken <= cases


def test_any_bytes_of_weights_are_a_model_or_one_line(home):
    rng, taken = random.Random(2), 0
    folder = placed(home, "winograd-average")
    kept = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(kept[:8], "little")
    cases = counted(40, 1_000)
    for case in range(cases):
        part = kept[: 8 + length] if case % 2 else kept
        (folder / "model.safetensors").write_bytes(spoilt(rng, part, [kept]) + kept[len(part) :])
        sign(folder)
        try:
            model = load("mine").model
        except WorkbenchError as error:
            assert_one_line(error, folder, folder)
            continue
        taken += 1
        assert model.n_parameters == load("mine").results["parameters"]
    assert 0 < taken < cases


@pytest.mark.parametrize(
    "name", [*PARTS, "probes.jsonl", "model.safetensors", "checkpoints/step-000400.safetensors", "trainer.safetensors"]
)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "link out", "hole", "deep"])
def test_what_is_no_plain_file_is_refused_without_waiting(home, name, kind):
    folder = placed(home, "induction-2-attn")
    file = folder / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "hole":
        with file.open("wb") as opened:
            opened.truncate(2**36)
    elif kind == "deep":
        file.write_bytes(b"[" * 100_000)
    else:
        file.symlink_to({"device": "/dev/zero", "loop": file.name, "link out": "/etc/passwd"}[kind])
    runs, faults = list_runs()
    assert len(runs) + len(faults) == 1
    for fault in faults:
        assert_one_line(fault, folder, folder, home)
    for run in runs:
        assert (refusal(lambda run: run.model, run) is not None) == (name == "model.safetensors")
        for read in (lambda run: run.metrics, read_dynamics, lambda run: load(run.path, step=400).model):
            refusal(read, run)


def sealed(state: bytes) -> bytes:
    """With its own hash where it holds one, at the end if it holds none."""
    state = state if SEAL.search(state) else state + b'"sha256":"%s"' % UNSEALED
    found = SEAL.search(state)
    assert found
    state = state.replace(found[1], UNSEALED, 1)
    return state.replace(UNSEALED, hashlib.sha256(state).hexdigest().encode(), 1)


def as_state(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    return sealed(save(tensors, metadata | {"sha256": UNSEALED.decode()}))


def read_state(state: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    header = json.loads(state[8 : 8 + int.from_bytes(state[:8], "little")])
    return tensors_in(state), header["__metadata__"]


KINDS = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


def other_metadata(rng: random.Random, metadata: dict[str, str]) -> dict[str, str]:
    """With one value taken away, or another one: of another kind, or like it with something inside exchanged."""
    key = rng.choice([*metadata])
    if (blow := rng.randrange(4)) == 0:
        del metadata[key]
    elif blow == 1:
        metadata[key] = rng.choice([rng.choice(BITS).decode(errors="replace"), json.dumps(rng.choice(VALUES))])
    elif metadata[key][0] in "[{" and len(metadata[key]) > 2:
        metadata[key] = json.dumps(change(rng, json.loads(metadata[key])))
    else:
        metadata[key] = spoilt(rng, metadata[key].encode(), BITS).decode(errors="replace")
    return metadata


def other_tensors(rng: random.Random, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With one taken away, called otherwise, or of another shape, type or value."""
    name = rng.choice([*tensors])
    tensor, blow = tensors.pop(name), rng.randrange(6)
    if blow == 1:
        tensors[rng.choice(["x", "\x1b[2J", "x" * 500, f"model.{name}", name.rpartition(".")[2]])] = tensor
    elif blow == 2:
        sizes = [(), (0,), (1,), (*tensor.shape, 1), (*tensor.shape, 2), tensor.shape[::-1], tensor.shape[1:]]
        tensors[name] = torch.zeros(rng.choice(sizes))
    elif blow == 3:
        tensors[name] = tensor.to(rng.choice(KINDS))
    elif blow == 4:
        tensors[name] = torch.full_like(tensor, rng.choice([0.0, -1.0, 1e38, float("nan"), float("inf")]))
    elif blow == 5:
        other = rng.choice([*tensors])
        tensors[name], tensors[other] = tensors[other], tensor
    return tensors


def test_any_state_of_an_unfinished_run_is_gone_on_from_or_refused(pool, recipe, tmp_path):
    """Whatever it says, with the right hash; in a process of its own, for it might not be refused in one line. What is
    refused is left as it was."""
    rng, start = random.Random(4), tmp_path / "start" / "run"
    unfinished(recipe, start, tmp_path / "there")
    kept = (start / "trainer.safetensors").read_bytes()
    assert sealed(kept) == kept
    length, cases, taken, diverged = int.from_bytes(kept[:8], "little"), counted(200, 3_000), 0, 0
    with quick_folder() as home:
        for case in range(cases):
            tensors, metadata = read_state(kept)
            if case % 3 == 0:
                state = as_state(tensors, other_metadata(rng, metadata))
            elif case % 3 == 1:
                state = as_state(other_tensors(rng, tensors), metadata)
            else:
                part = rng.choice([kept, kept[: 8 + length], kept[8 + length :]])
                state = sealed(kept.replace(part, spoilt(rng, part, [kept, *BITS]), 1))
            folder = shutil.copytree(start, home / str(case) / "run")
            (folder / "trainer.safetensors").write_bytes(state)
            before = contents(folder)
            said = pool.submit(finish, recipe, folder).result(timeout=HANG)
            if not said:
                taken += 1
                assert read_sound(folder)
            else:
                assert_one_line(Exception(said), *[folder] * 3)
                diverged += "diverged" in said
                assert "diverged" in said or contents(folder) == before, said
            shutil.rmtree(folder.parent)
    assert cases / 20 < taken < cases / 2 and diverged


def read_sound(folder: Path) -> bool:
    """Whether a run is finished and every part of it is read, or refused in one line."""
    run = load(folder)
    refusal(lambda run: run.metrics, run)
    refusal(read_dynamics, run)
    return run.model.n_parameters == run.results["parameters"] and run.results["steps"] == 16


NO_STATES: dict[str, Callable[[dict[str, torch.Tensor], dict[str, str]], Any]] = {
    "no seconds": lambda tensors, metadata: metadata.pop("seconds"),
    "seconds without end": lambda tensors, metadata: metadata.update(seconds="Infinity"),
    "more steps": lambda tensors, metadata: metadata.update(step="17"),
    "steps undone": lambda tensors, metadata: metadata.update(step="-1"),
    "a step and a half": lambda tensors, metadata: metadata.update(step="1.5"),
    "losses that are none": lambda tensors, metadata: metadata.update(losses="[NaN]"),
    "losses without end": lambda tensors, metadata: metadata.update(losses="[1e308, 1e308]"),
    "files that are a list": lambda tensors, metadata: metadata.update(files="[]"),
    "a file elsewhere": lambda tensors, metadata: metadata.update(files='{"../../mine.txt": ""}'),
    "a file of another kind": lambda tensors, metadata: metadata.update(files='{"recipe.toml": ""}'),
    "a checkpoint never made": lambda tensors, metadata: metadata.update(
        files='{"checkpoints/step-000003.safetensors": ""}'
    ),
    "deep": lambda tensors, metadata: metadata.update(files="[" * 100_000),
    "sizes of other files": lambda tensors, metadata: metadata.update(sizes="{}"),
    "a size below nothing": lambda tensors, metadata: metadata.update(sizes='{"metrics.jsonl": -1, "probes.jsonl": 0}'),
    "moments of one number": lambda tensors, metadata: tensors.update({"exp_avg.embed.W_E": torch.zeros(1)}),
    "moments in double": lambda tensors, metadata: tensors.update(
        {"exp_avg_sq.embed.W_E": tensors["exp_avg_sq.embed.W_E"].double()}
    ),
    "steps of two": lambda tensors, metadata: tensors.update({"step.embed.W_E": torch.zeros(2)}),
    "no moments": lambda tensors, metadata: tensors.pop("exp_avg.embed.W_E"),
    "a weight too many": lambda tensors, metadata: tensors.update({"model.x": torch.zeros(1)}),
}


@pytest.mark.parametrize("kind", NO_STATES)
def test_a_state_that_no_trainer_writes_is_named_and_nothing_is_written(pool, recipe, tmp_path, kind):
    folder = tmp_path / "runs" / "run"
    unfinished(recipe, folder, tmp_path / "there")
    state = folder / "trainer.safetensors"
    tensors, metadata = read_state(state.read_bytes())
    NO_STATES[kind](tensors, metadata)
    state.write_bytes(as_state(tensors, metadata))
    before = contents(folder)
    said = pool.submit(finish, recipe, folder).result(timeout=HANG)
    assert said.startswith(f"{state} is no state of this training (its ")
    assert said.endswith(f"; delete {state} to start over") and contents(folder) == before


@pytest.mark.parametrize(
    "data", [b"", b"x", b"\xff" * 9, b"\x02" + bytes(7) + b"[]", b"\x0e" + bytes(7) + b'{"x": [1, 2]} ']
)
def test_a_state_of_any_bytes_is_refused(pool, recipe, tmp_path, data):
    folder = tmp_path / "runs" / "run"
    unfinished(recipe, folder, tmp_path / "there")
    state = folder / "trainer.safetensors"
    state.write_bytes(sealed(data))
    said = pool.submit(finish, recipe, folder).result(timeout=HANG)
    assert said == f"{state} is no safetensors file; delete {state} to start over"


NAMES = [
    "\x1b[2J", "a\nb", "\u202eevil", "a\u2028b", "x" * 200, "\udcff", "CON", "`x` <b>", "$(true)", "%s {0}", "-rf", "~",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:30])
def test_a_folder_of_any_name_is_listed_or_refused(home, name):
    folder = placed(home, "winograd-average", name)
    for path in ("run.json", "recipe.toml"):
        runs, faults = list_runs()
        assert len(runs) + len(faults) == 1
        for fault in faults:
            assert_one_line(fault, folder, folder, home)
        assert all(run.name == name for run in runs)
        with pytest.raises(WorkbenchError) as caught:
            load("mine")
        assert_one_line(caught.value)
        (folder / path).unlink()


@settings(max_examples=counted(100, 1_000))
@example("../../etc")
@example("/dev")
@example("a\0b")
@example("\ud800")
@example("x" * 100_000)
@example("/" * 5_000)
@example("\x1b[2J")
@given(st.text())
def test_any_name_is_a_run_or_one_line(name):
    try:
        run = load(name)
    except WorkbenchError as error:
        assert_one_line(error)
    else:
        assert run.name == name and name in shipped_names()


def test_a_run_that_is_a_link_is_what_it_leads_to_and_loops_are_none(home):
    folder = placed(home, "winograd-average")
    (home / "linked").symlink_to(folder.parent)
    (home / "loop").symlink_to("loop")
    (home / "up").symlink_to("..")
    (home / "file").write_text("")
    (home / "mine" / "seed-1").symlink_to("seed-1")
    (home / "mine" / "seed-2").write_text("")
    runs, faults = list_runs()
    assert sorted(run.name for run in runs) == ["mine", "mine"] and not faults


def test_a_crowd_of_runs_is_listed(home):
    n = counted(200, 10_000)
    for i in range(n):
        folder = home / f"run-{i}" / "seed-0"
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_bytes(BITS[i % len(BITS)])
    placed(home, "winograd-average")
    for i in range(n):
        (home / "mine" / "seed-0" / f"checkpoints-{i}").write_text("")
    runs, faults = list_runs()
    assert [run.name for run in runs] == ["mine"] and len(faults) == n


LIMITED = """
import resource
from workbench.errors import WorkbenchError
from workbench.runs import list_runs

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for run in list_runs()[0]:
    try:
        print(run.name, len(run.metrics))
    except WorkbenchError as error:
        print(run.name, error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_large_files_take_little_memory_and_come_to_an_end(home):
    """512 MiB above what Python has."""
    large = {
        "wide": ("run.json", b'{"x": [' + b"0," * (2**23 - 8) + b"0]}"),
        "wider": ("run.json", b" " * 2**24 + b"{}"),
        "full": ("metrics.jsonl", b'{"step":1}\n' * 2**18),
        "crowded": ("metrics.jsonl", b"{}\n" * 2**19),
    }
    for name, (file, data) in large.items():
        folder = placed(home, "winograd-average", name)
        (folder / file).write_bytes(data)
        if file != "run.json":
            sign(folder)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=HANG, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *told, taken = [line for line in done.stdout.splitlines() if line.split()[0] in {*large, line}]
    assert any(line == "full 262144" for line in told)
    assert any(line.startswith("crowded") and "has 524,288 lines; expected at most 262,144" in line for line in told)
    assert not any(line.startswith("wide") for line in told) and int(taken) < 512 * 2**10


def test_nothing_of_a_run_is_made_before_its_size_is_known(home, monkeypatch):
    """A recipe of a stranger's run that asks for more than there is."""
    folder = placed(home, "winograd-average")
    text = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(
        text.replace("n_layers = 1", "n_layers = 512").replace("d_mlp = 0", "d_mlp = 99999")
    )
    sign(folder)
    monkeypatch.setattr("workbench.transformer.Transformer.__init__", lambda *_, **__: pytest.fail("it was made"))
    with pytest.raises(wb.WorkbenchError, match="does not fit into memory") as caught:
        _ = load("mine").model
    assert_one_line(caught.value, folder)
