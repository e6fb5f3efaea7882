"""Recipes and tasks from a stranger: a valid object that survives being written and read, or one line on why not."""

import dataclasses
import os
import random
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hostile import HANG, assert_one_line, quick_folder, spoilt
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import counted

from workbench.content import content
from workbench.errors import BadRecipe, WorkbenchError
from workbench.recipes import ModelConfig, Recipe, TrainingConfig, grid, load_recipe, read_recipe
from workbench.runs import build_model
from workbench.short import FEW
from workbench.tasks import load_task, task_names, task_sha256
from workbench.training import checkpoint_steps, probed_steps, train
from workbench.untrusted import parse_toml

RECIPES = [load_recipe(name).to_toml().encode() for name in ("winograd-2", "induction-2-attn", "winograd-1-hand")]
RECIPES.append((content("models") / "shakespeare-12" / "recipe.toml").read_bytes())
TASKS = [(content("datasets") / f"{name}.toml").read_bytes() for name in task_names()]
SMALLER = [(rb"^(train|held_out|states) = \d+", rb"\1 = 8"), (rb'"street", .*, "market"', b'"street", "market"')]
for before, after in SMALLER:  # as good for spoiling, and soon made
    TASKS = [re.sub(before, after, task, flags=re.MULTILINE) for task in TASKS]
DEEP = "a" + ".a" * 30_000
BOMBS = {
    "lists in lists": 'task = "winograd"\nabout = ' + "[" * 60_000,
    "sections in sections": 'task = "winograd"\nabout = ' + "{a=" * 20_000,
    "a key of many parts": f"{DEEP} = 1",
    "a heading of many parts": f"[{DEEP}]",
    "a deep value where a text belongs": "task = 'winograd'\nabout" + ".a" * 99 + " = [" * 99 + "]" * 99,
    "a number of many digits": 'task = "winograd"\n[training]\nsteps = ' + "9" * 60_000,
    "and in base 16": 'task = "winograd"\n[training]\nsteps = 0x' + "f" * 60_000,
    "in a list": 'task = "winograd"\n[training]\nprobes = [0x' + "f" * 60_000 + "]",
    "a text without an end": 'about = """' + "x\\\n" * 15_000,
    "many keys": "\n".join(f"k{i} = 1" for i in range(6_000)),
    "many sections": "[[model]]\n" * 6_000,
    "a file too large": "#" * 2**26,
    "bytes that are no text": "task = '\udcff\udcfe'",
    "a byte order mark": "\ufefftask = 'winograd'",
    "a NUL": "task = 'wino\0grad'",
    "escape codes": 'task = "winograd"\nabout = "\\u001b]0;owned\\u0007"',
    "a text that runs backwards": 'task = "winograd"\nabout = "\\u202eevil"',
    "many layers": 'task = "winograd"\n[model]\nn_layers = 1000000000',
    "many heads": 'task = "winograd"\n[model]\nn_heads = 1000000\nd_head = 1',
    "many steps": 'task = "winograd"\n[training]\nsteps = 1000000000000000000',
    "many checkpoints": 'task = "winograd"\n[training]\ncheckpoints = 1000000000000',
    "large batches": 'task = "winograd"\n[training]\nbatch = 1000000000000',
    "many probes": 'task = "winograd"\n[training]\nprobes = [' + '"heads",' * 7_000 + "]",
}


@pytest.fixture
def folder(monkeypatch):
    with quick_folder() as path:
        monkeypatch.chdir(path)
        yield path


def test_any_bytes_are_a_recipe_that_survives_or_one_line(folder):
    rng, taken, file = random.Random(0), 0, folder / "mine.toml"
    cases = counted(2_000, 90_000)
    for _ in range(cases):
        data = spoilt(rng, rng.choice(RECIPES), RECIPES)
        file.write_bytes(data)
        try:
            recipe = read_recipe(file)
        except WorkbenchError as error:
            assert_one_line(error, file)
            continue
        taken += 1
        file.write_text(recipe.to_toml(), encoding="utf-8")
        again = read_recipe(file)
        assert dataclasses.replace(again, task=recipe.task) == recipe, data
        assert again.sha256 == recipe.sha256 and again.to_toml() == recipe.to_toml()
    assert cases / 20 < taken < cases  # both happen


def test_any_bytes_are_a_task_or_one_line(folder):
    rng, taken = random.Random(1), 0
    cases = counted(300, 4_000)
    for case in range(cases):
        file = folder / f"{case % 50}.toml"
        file.write_bytes(spoilt(rng, rng.choice(TASKS), TASKS))
        os.utime(file, ns=(case, case))  # a task that is read again is kept by its time
        try:
            assert len(task_sha256(file)) == 64
            task = load_task(file)
        except WorkbenchError as error:
            assert_one_line(error, file)
            continue
        taken += 1
        if not file.name.startswith("shakespeare") and hasattr(task, "answer_of"):
            assert torch.equal(task.encode(task.decode(task.train[0])), task.train[:1])
    assert cases / 40 < taken < cases


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_in_one_line(folder, bomb):
    (folder / "mine.toml").write_bytes(bomb.encode(errors="surrogateescape"))
    with pytest.raises(WorkbenchError) as caught:
        read_recipe(folder / "mine.toml")
    assert_one_line(caught.value, folder / "mine.toml")


@pytest.mark.parametrize("bomb", ["a key of many parts", "a heading of many parts", "a file too large"])
def test_what_would_take_long_to_parse_is_not_parsed(monkeypatch, bomb):
    """A key of 30,000 parts takes the standard library 40 seconds."""
    monkeypatch.setattr("workbench.untrusted.tomllib.loads", lambda text: pytest.fail("it was parsed"))
    with pytest.raises(ValueError, match="more than"):
        parse_toml(BOMBS[bomb].encode())


LIMITED = """
import resource, sys
from pathlib import Path
from workbench.errors import WorkbenchError
from workbench.recipes import read_recipe
from workbench.tasks.load import task_sha256

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in map(Path, sys.argv[1:]):
    for read in (read_recipe, task_sha256):
        try:
            sys.exit(f"{path.name} was taken as {read(path)}")
        except WorkbenchError:
            pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_bombs_take_little_memory_and_come_to_an_end(folder):
    """Recipes and tasks: 64 MiB above what Python has."""
    for i, bomb in enumerate(BOMBS.values()):
        (folder / f"{i}.toml").write_bytes(bomb.encode(errors="surrogateescape"))
    os.mkfifo(folder / "pipe.toml")
    (folder / "zeros.toml").symlink_to("/dev/zero")
    with (folder / "sparse.toml").open("wb") as file:
        file.truncate(2**40)
    paths = sorted(map(str, folder.glob("*.toml")))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *paths], capture_output=True, text=True, timeout=HANG, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2**16  # KiB


@pytest.mark.parametrize("read", [read_recipe, load_task, task_sha256])
@pytest.mark.parametrize(
    "name",
    ["pipe.toml", "zeros.toml", "folder.toml", "loop.toml", "dangling.toml", "sparse.toml", "absent.toml", "\0.toml",
     "\x1b[2J.toml", "a\nb.toml", "\ud800.toml", "x" * 300 + ".toml", "a/" * 3_000 + "b.toml"],
    ids=lambda name: ascii(name)[:30],
)  # fmt: skip
def test_what_is_no_plain_file_is_refused(folder, read, name):
    os.mkfifo(folder / "pipe.toml")
    (folder / "zeros.toml").symlink_to("/dev/zero")
    (folder / "folder.toml").mkdir()
    (folder / "loop.toml").symlink_to("loop.toml")
    (folder / "dangling.toml").symlink_to("nowhere")
    with (folder / "sparse.toml").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(BadRecipe) as caught:
        read(Path(name))
    assert_one_line(caught.value, folder)
    (folder / "mine.toml").write_text(f"task = {name!r}".replace("\\x", "\\u00"), errors="ignore")
    with pytest.raises(WorkbenchError) as caught:
        load_task(read_recipe(folder / "mine.toml").task)
    assert_one_line(caught.value, folder)


NAMES = [
    "", ".", "..", "...", "a/b", "../a", "/etc", "a\\b", "C:x", "a\0b", "a\nb", "\x1b[31m", "\u202ea", " a", "a ", "a.",
    "CON", "nul", "com1", "NUL.txt", "a*", "a?", "<b>", 'a"b', "a|b", "x" * 101, "\U0001f600" * 30, "\ud800",
    "a\u2028b",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:30])
def test_a_name_that_could_lead_elsewhere_or_steer_a_terminal_is_refused(name):
    with pytest.raises(BadRecipe, match="cannot name a run") as caught:
        Recipe(name, "winograd")
    assert_one_line(caught.value)


@settings(max_examples=counted(150, 3_000))
@example("~")
@example("~root")
@example("$HOME")
@example("-rf")
@example("%2e%2e")
@given(st.text(max_size=40))
def test_any_name_that_is_taken_is_a_folder_among_the_runs(tmp_path_factory, name):
    runs = tmp_path_factory.getbasetemp() / "names"
    try:
        Recipe(name, "winograd")
    except BadRecipe as error:
        assert_one_line(error)
        return
    (runs / name).mkdir(parents=True, exist_ok=True)
    assert (runs / name).resolve().parent == runs.resolve() and name in os.listdir(runs)


@settings(max_examples=counted(150, 3_000))
@example("lr=" + "9" * 5_000)
@example("lr=0x" + "f" * 9_000)
@example("norm=" + "[" * 9_000)
@example("\x1b[2J=1")
@example("d_model=1\nlr = 2")
@given(st.text(max_size=30) | st.builds("{}={}".format, st.sampled_from(["lr", "norm", "steps", "probes"]), st.text()))
def test_any_setting_is_a_grid_or_one_line(text):
    try:
        assert grid(load_recipe("winograd-2"), [text])
    except WorkbenchError as error:
        assert_one_line(error)


@pytest.mark.parametrize(
    "sizes",
    [
        {"d_model": 1_000_000, "n_heads": 1, "d_mlp": 0},
        {"d_mlp": 1_000_000, "d_model": 1_024},
        {"n_layers": 512, "d_model": 1_024},
        {"n_ctx": 1_000_000, "d_model": 1_024, "n_heads": 1},
        {"n_heads": 512, "d_head": 1_000_000},
    ],
)
def test_a_model_too_large_is_counted_not_made(monkeypatch, sizes):
    monkeypatch.setattr("workbench.transformer.Transformer.__init__", lambda *_, **__: pytest.fail("it was made"))
    recipe = Recipe("large", "winograd", model=ModelConfig(**sizes))
    with pytest.raises(BadRecipe, match=r"large does not fit into memory: it would hold [\d,]+ numbers"):
        build_model(recipe, load_task("winograd"))


def test_maps_too_large_are_counted_not_made():
    """By the task's sequences: a model that could read longer ones is fine."""
    assert ModelConfig(n_ctx=100_000).check_size("long", 11_585) is None
    with pytest.raises(
        BadRecipe, match="long does not fit into memory: a block's attention maps would hold 536,941,584 numbers"
    ):
        ModelConfig(n_ctx=100_000).check_size("long", 11_586)
    ModelConfig(n_layers=0).check_size("no maps", 1_000_000)


def test_a_step_too_large_is_counted_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.transformer.Transformer.__init__", lambda *_, **__: pytest.fail("it was made"))
    recipe = load_recipe("winograd-2").changed(batch=100_000, n_layers=500)
    with pytest.raises(BadRecipe, match=r"a step on batch = 100,000 holds at least [\d,.]+ GiB") as error:
        train(recipe, tmp_path / "large")
    assert_one_line(error.value)
    assert not (tmp_path / "large").exists()


@pytest.mark.parametrize("few", [FEW, 0])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"d_mlp": 0}, {"d_mlp": 0, "norm": "none"}, {"norm": "none"}, {"norm": "post"}, {"activation": "relu"},
        {"value_output": "identity"}, {"query_key": "tied"}, {"dropout": 0.1}, {"positions": "rotary"},
    ],
)  # fmt: skip
def test_the_count_of_a_step_is_never_above_what_autograd_keeps(monkeypatch, options, few):
    """Against the tensors that it packs away; with one wide head, beside which patterns are small."""
    monkeypatch.setattr("workbench.transformer.FEW", few)
    kept: dict[int, int] = {}
    recipe = Recipe("small", "winograd", model=ModelConfig(**{"n_heads": 1, "d_model": 128} | options))
    task = load_task("winograd")
    model = build_model(recipe, task).train()
    tokens = task.train[:8].clone()

    def packed(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        loss = model.training_loss(tokens)
    loss.backward()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = sum(size for where, size in kept.items() if where not in weights)
    assert held / 3 <= 4 * model.config.numbers_of_step(8, tokens.shape[1] - 1) <= held


@pytest.mark.parametrize(
    "options",
    [
        {}, {"n_layers": 0, "norm": "none"}, {"d_mlp": 0, "norm": "none", "bias_qkv": False},
        {"tied_unembedding": True},
        {"positions": "sinusoidal", "query_key": "tied"}, {"value_output": "identity", "query_key": "identity"},
        {"positions": "rotary", "bias_unembed": True, "norm": "post"}, {"n_heads": 3, "d_head": 5},
    ],
)  # fmt: skip
def test_the_count_is_never_below_what_a_model_holds(options):
    """Against the tensors themselves."""
    recipe = Recipe("small", "winograd", model=ModelConfig(**{"n_heads": 4, "d_model": 16} | options))
    model = build_model(recipe, load_task("winograd"))
    held = sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()])
    assert held <= model.config.numbers <= 3 * held


def test_lists_made_from_the_largest_numbers_stay_short():
    most = TrainingConfig(steps=10**9, checkpoints=10_000, probes=("heads",))
    assert len(checkpoint_steps(most)) <= 10_000 and len(probed_steps(most)) <= 10_001


TOO_LARGE = {
    "bigram": ("states = 32", "states = 5000"),
    "induction": ("tokens = 50", "tokens = 5000\n#"),
    "skip-trigram": ("length = 16", "length = 1000\n#"),
    "winograd": ('x = ["animal"', "x = [" + ", ".join(f'"w{i}"' for i in range(5_000)) + ', "animal"'),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_task_that_would_not_fit_into_memory_is_refused(folder, name):
    text = (content("datasets") / f"{name}.toml").read_text()
    before, after = TOO_LARGE[name]
    assert before in text
    text = re.sub(r"^train = \d+", "train = 100000", text, flags=re.MULTILINE).replace(before, after)
    (folder / "mine.toml").write_text(text)
    with pytest.raises(BadRecipe, match=r"are over [0-9,]+; choose fewer") as caught:
        load_task(folder / "mine.toml")
    assert_one_line(caught.value, folder)


@pytest.mark.parametrize("word", ["\\u001b[31m", "\\u202e", "a\\u0000", "x" * 101, "\\u200b"])
def test_a_word_that_is_not_seen_is_none(folder, word):
    text = (content("datasets") / "winograd.toml").read_text()
    for changed in (text.replace('"tired"', f'"{word}"'), text.replace("the {x}", f"{word} {{x}}")):
        (folder / "mine.toml").write_text(changed)
        with pytest.raises(BadRecipe) as caught:
            load_task(folder / "mine.toml")
        assert_one_line(caught.value, folder)
