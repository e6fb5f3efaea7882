"""A stranger's recipe and weights: taken whole, or refused in one line with nothing written anywhere."""

import json
import os
import pickle
import random
import resource
import struct
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import HANG, assert_one_line, quick_folder, spoilt
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load as read
from safetensors.torch import save
from support import counted

from workbench import uploads
from workbench.content import content
from workbench.errors import WorkbenchError
from workbench.runs import list_runs
from workbench.uploads import LARGEST_WEIGHTS, add_run

MODEL = content("models") / "winograd-average"
RECIPE, WEIGHTS = ((MODEL / name).read_bytes() for name in ("recipe.toml", "model.safetensors"))
LENGTH = int.from_bytes(WEIGHTS[:8], "little")
HEADER: dict[str, Any] = json.loads(WEIGHTS[8 : 8 + LENGTH])
DATA = WEIGHTS[8 + LENGTH :]
FIRST = next(name for name in HEADER if name != "__metadata__")


@pytest.fixture
def home(monkeypatch):
    with quick_folder() as path:
        (path / "runs").mkdir()
        (path / "beside").mkdir()
        monkeypatch.setenv("WORKBENCH_RUNS", str(path / "runs"))
        monkeypatch.chdir(path / "beside")
        yield path


def tree(folder: Path) -> dict[str, int]:
    """Everything in a folder, with when it was last changed."""
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def refused(home: Path, name: str = "mine", recipe: bytes = RECIPE, weights: bytes = WEIGHTS) -> str:
    before = tree(home)
    with pytest.raises(WorkbenchError) as caught:
        add_run(name, recipe, weights)
    assert tree(home) == before
    return assert_one_line(caught.value, home)


def file_of(header: bytes, data: bytes = DATA, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def lying(**said: Any) -> bytes:
    """The weights with something else said of the first tensor."""
    return file_of(json.dumps(HEADER | {FIRST: HEADER[FIRST] | said}).encode())


def zipped(data: bytes) -> bytes:
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data.pkl", data)
    return archive.getvalue()


LIES = {
    "a header of 2⁶³ bytes": file_of(b"{}", length=2**63),
    "of 2⁶⁴ − 1": file_of(b"{}", length=2**64 - 1),
    "longer than the file": file_of(b"{}", b"", length=3),
    "of no bytes": file_of(b"", b""),
    "no file at all": b"",
    "seven bytes": b"\x01" * 7,
    "a shape without end": lying(shape=[1] * 200_000),
    "a shape that overflows": lying(shape=[2**62, 2**62]),
    "a negative shape": lying(shape=[-1, -36]),
    "a shape of an infinity": lying(shape=[float("inf")]),
    "of a million digits": file_of(json.dumps(HEADER).replace('"shape": [', '"shape": [' + "9" * 10**6, 1).encode()),
    "of texts": lying(shape=["36", "64"]),
    "of truths": lying(shape=[True, True]),
    "that is none": lying(shape={"x": 1}),
    "a type of code": lying(dtype="\x1b[2J; import os"),
    "a type that is a list": lying(dtype=[["F32"]]),
    "an unknown type": lying(dtype="F1024"),
    "numbers of one byte": lying(dtype="U8"),
    "offsets beyond the file": lying(data_offsets=[0, 2**60]),
    "offsets before it": lying(data_offsets=[-8, 8]),
    "offsets the wrong way round": lying(data_offsets=[8, 0]),
    "offsets that overlap": file_of(json.dumps({name: entry | {"data_offsets": HEADER[FIRST]["data_offsets"]}
                                                for name, entry in HEADER.items()}).encode()),
    "no offsets": file_of(json.dumps(HEADER | {FIRST: {"dtype": "F32", "shape": [1]}}).encode()),
    "a name with escape codes": file_of(json.dumps(HEADER | {"\x1b]0;owned\x07\n": HEADER[FIRST]}).encode()),
    "a name without end": file_of(json.dumps(HEADER | {"x" * 500_000: HEADER[FIRST]}).encode()),
    "a name twice": file_of(json.dumps(HEADER).encode()[:-1] + b"," + json.dumps({FIRST: HEADER[FIRST]}).encode()[1:]),
    "metadata that are numbers": file_of(json.dumps(HEADER | {"__metadata__": {"x": 10**300}}).encode()),
    "a header in lists": file_of(b"[" * 500_000 + b"]" * 500_000),
    "a header that is a list": file_of(b"[1, 2]"),
    "a header in UTF-16": file_of(json.dumps(HEADER).encode("utf-16")),
    "a header too large": file_of(json.dumps(HEADER | {"__metadata__": {"x": "x" * 2**21}}).encode()),
    "a hole": WEIGHTS + bytes(1_000),
    "half a file": WEIGHTS[: len(WEIGHTS) // 2],
    "a file too large": bytes(LARGEST_WEIGHTS + 1),
    "a pickle": pickle.dumps({"x": [1.0]}),
    "a zip": zipped(pickle.dumps({"x": [1.0]})),
    "weights and a zip": WEIGHTS + zipped(b"cos\nsystem\n(S'true'\ntR."),
    "a zip bomb": zipped(bytes(2**26)),
}  # fmt: skip


@pytest.mark.parametrize("weights", LIES.values(), ids=LIES)
def test_a_lying_file_is_refused_and_nothing_is_written(home, weights):
    assert "mine" in refused(home, weights=weights)


def scaled(factor: float, kind: torch.dtype) -> bytes:
    return save({name: (weight.double() * factor).to(kind) for name, weight in read(WEIGHTS).items()})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (scaled(float("nan"), torch.float32), "holds numbers that are not finite"),
        (scaled(float("inf"), torch.float64), "holds numbers that are not finite"),
        (
            scaled(1e60, torch.float64),
            "holds numbers that are not finite",
        ),  # finite in the file, not as the model holds them
        (scaled(1e37, torch.float32), "give scores that are not finite"),
    ],
)
def test_numbers_that_are_none_are_refused_and_nothing_is_written(home, weights, message):
    assert message in refused(home, weights=weights)


@pytest.mark.parametrize(
    "sizes",
    [
        "n_heads = 512\nd_head = 1\nd_model = 1\nd_mlp = 0",
        "n_heads = 1\nd_model = 1\nd_mlp = 1000000",
        "n_layers = 128\nn_heads = 512\nd_head = 1\nd_model = 2\nd_mlp = 0",
        "n_heads = 512\nd_model = 512\nd_mlp = 0\nquery_key = 'identity'\nvalue_output = 'identity'\nn_layers = 120",
        "d_model = 1000000\nn_heads = 1\nd_mlp = 0",
        "n_ctx = 16384\nd_model = 100000\nn_heads = 1\nd_mlp = 0",
    ],
)
def test_a_model_that_computes_more_than_its_weights_show_is_refused(home, sizes):
    recipe = f"task = 'shakespeare'\n[model]\nnorm = 'none'\n{sizes}".encode()
    assert "expected at most" in refused(home, recipe=recipe)


LIMITED = """
import resource, sys
from pathlib import Path
import workbench.transformer, workbench.training, safetensors.torch
from workbench.errors import WorkbenchError
from workbench.uploads import add_run

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
folder = Path(sys.argv[1])
for path in folder.glob("*.safetensors"):
    try:
        sys.exit(f"{add_run('mine', path.with_suffix('.toml').read_bytes(), path.read_bytes())} was taken")
    except WorkbenchError:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_lies_take_little_memory_and_come_to_an_end(home):
    """192 MiB above what Python has."""
    for i, weights in enumerate(LIES.values()):
        (home / "beside" / f"{i}.toml").write_bytes(RECIPE)
        (home / "beside" / f"{i}.safetensors").write_bytes(weights)
    bomb = "task = 'winograd'\n[model]\nn_layers = 128\nd_model = 1000000\nn_heads = 1\npositions = 'sinusoidal'"
    (home / "beside" / "bomb.toml").write_text(f"{bomb}\nn_ctx = 16384")
    (home / "beside" / "bomb.safetensors").write_bytes(WEIGHTS)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(home / "beside")], capture_output=True, text=True, timeout=HANG,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32)), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 192 * 2**10
    assert not any((home / "runs").iterdir())


def test_any_bytes_are_a_run_or_refused_with_nothing_written(home):
    rng, taken = random.Random(0), 0
    cases = counted(30, 800)
    for case in range(cases):
        recipe, header = RECIPE, WEIGHTS[: 8 + LENGTH]
        if case % 2:
            recipe = spoilt(rng, recipe, [recipe])
        else:
            header = spoilt(rng, header, [header])
        before = tree(home)
        try:
            run = add_run(f"mine-{case}", recipe, header + DATA)
        except WorkbenchError as error:
            assert tree(home) == before
            assert_one_line(error, home)
            continue
        taken += 1
        assert run.path == home / "runs" / f"mine-{case}" / f"seed-{run.seed}"
    runs, faults = list_runs()
    assert 0 < taken < cases and not faults
    assert sum(not run.shipped for run in runs) == taken
    assert not any((home / "beside").iterdir())


@pytest.fixture
def scored(monkeypatch):
    """Uploads are scored once for all."""
    results = uploads._scored(uploads._recipe("mine", RECIPE), WEIGHTS)
    monkeypatch.setattr(uploads, "_scored", lambda *_: results)


def test_any_name_is_a_run_in_its_folder_or_refused(home, scored):
    before = tree(home)

    @settings(max_examples=counted(50, 1_000), database=None)
    @example("../beside/x")
    @example("..")
    @example("/tmp/x")
    @example("x/../../beside/y")
    @example("~")
    @example("x" * 100)
    @example("x" * 101)
    @example("\U0001f600" * 30)
    @example("winograd-2")
    @example("a\0b")
    @example("\udcff")
    @example("\x1b[2J")
    @given(st.text(max_size=120))
    def tried(name):
        try:
            run = add_run(name, RECIPE, WEIGHTS)
        except WorkbenchError as error:
            assert_one_line(error, home)
            return
        assert run.name == name and run.path == home / "runs" / name / "seed-0"

    tried()
    assert {path: when for path, when in tree(home).items() if not path.startswith("runs")} == {
        path: when for path, when in before.items() if not path.startswith("runs")
    }


@pytest.mark.parametrize("kind", ["link", "link to a seed", "dangling link", "loop", "file"])
def test_what_stands_in_the_place_of_a_run_is_left_alone(home, scored, kind):
    place = home / "runs" / "mine"
    if kind == "link":
        place.symlink_to(home / "beside")
    elif kind == "link to a seed":
        place.mkdir()
        (place / "seed-0").symlink_to(home / "beside")
    elif kind == "dangling link":
        place.symlink_to(home / "nowhere")
    elif kind == "loop":
        place.symlink_to("mine")
    else:
        place.write_text("kept")
    assert refused(home)
    assert os.listdir(home / "beside") == []
