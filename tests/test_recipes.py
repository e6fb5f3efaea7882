"""Recipes: what is refused and in which words, what a hash covers, what the schedules compute."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import BadRecipe, UnknownName
from workbench.recipes import (
    ModelConfig,
    Recipe,
    Seeds,
    TrainingConfig,
    grid,
    load_recipe,
    parse_recipe,
    recipe_names,
)
from workbench.runs import build_model
from workbench.tasks import load_task


def parse(**raw):
    return parse_recipe({"task": "winograd"} | raw, "mine", "mine.toml")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model": {"n_layer": 2}}, "unknown field 'n_layer'; nearest: n_layers"),
        ({"model": {"n_layers": "two"}}, 'n_layers = "two": expected a whole number'),
        ({"model": {"n_layers": True}}, "n_layers = true: expected a whole number"),
        ({"model": {"n_layers": -1}}, "n_layers = -1: expected 0 to 512"),
        ({"model": {"n_heads": 5}}, "n_heads = 5 does not divide d_model = 64"),
        ({"model": {"n_heads": 0}}, "n_heads = 0 does not divide d_model = 64"),
        ({"model": {"norm": "batch"}}, 'norm = "batch": expected one of none, pre, post'),
        ({"model": {"positions": "rotary", "d_head": 3}}, "d_head = 3 is odd"),
        ({"model": {"attention": "uniform", "positions": "alibi"}}, "no scores for positions"),
        ({"model": {"attention": "uniform", "query_key": "tied"}}, "no queries and keys"),
        ({"model": {"value_output": "value", "d_head": 8}}, "needs n_heads · d_head = d_model"),
        ({"model": {"dropout": 1.0}}, "dropout = 1.0: expected a rate"),
        ({"model": 3}, "model must be a section, [model]"),
        ({"training": {"lr": 0.0}}, "lr = 0.0: expected a learning rate above 0"),
        ({"training": {"lr": float("nan")}}, "lr = nan: expected a finite number"),
        ({"training": {"warmup": 2000}}, "warmup = 2000 is longer than the training, steps = 1500"),
        ({"seeds": {"split": -1}}, "seeds.split = -1: expected 0 to 4294967295"),
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"name": "mine"}, "named by its file or folder"),
    ],
)
def test_a_bad_field_is_named_in_one_line(raw, message):
    with pytest.raises(BadRecipe) as caught:
        parse(**raw)
    assert message in str(caught.value)
    assert str(caught.value).startswith("mine.toml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (ModelConfig, "positions", "rope"),
        (ModelConfig, "activation", "swish"),
        (ModelConfig, "n_layers", 2.0),
        (ModelConfig, "dropout", "0"),
        (ModelConfig, "n_ctx", 10**12),
        (TrainingConfig, "schedule", "expo"),
        (TrainingConfig, "lr", float("nan")),
        (TrainingConfig, "lr", 10**400),
        (TrainingConfig, "steps", 10.5),
        (Seeds, "batches", 2**32),
    ],
)
def test_python_is_refused_in_the_same_words_as_toml(kind, field, value):
    with pytest.raises(BadRecipe, match=rf"{field} = .*: expected"):
        kind(**{field: value})


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../evil", "a\\b", "x" * 101])
def test_a_name_that_is_no_folder_is_refused(name):
    with pytest.raises(BadRecipe, match="cannot name a run"):
        Recipe(name, "winograd")


def test_a_recipe_file_is_named_by_itself_or_by_its_folder(tmp_path, monkeypatch):
    home = tmp_path / "proj" / "sub"
    home.mkdir(parents=True)
    (home.parent / "recipe.toml").write_text('task = "winograd"')
    (home / "mine.toml").write_text('task = "winograd"')
    monkeypatch.chdir(home)
    assert load_recipe("mine.toml").name == "mine"
    assert load_recipe("../recipe.toml").name == "proj"
    monkeypatch.chdir(home.parent)
    assert load_recipe("recipe.toml").name == "proj"


def test_a_task_file_is_found_beside_its_recipe_and_does_not_change_the_hash(tmp_path, monkeypatch):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.toml").write_text('task = "my-task.toml"')
    one, other = (load_recipe(tmp_path / folder / "mine.toml") for folder in ("one", "other"))
    assert one.task == str(tmp_path / "one" / "my-task.toml") and one.sha256 == other.sha256
    assert 'task = "my-task.toml"' in one.to_toml()


def test_a_recipe_without_a_task_or_from_no_file_is_refused(tmp_path):
    with pytest.raises(BadRecipe, match="no task given"):
        parse_recipe({}, "mine", "mine.toml")
    with pytest.raises(BadRecipe, match="no such recipe file"):
        load_recipe(tmp_path / "absent.toml")
    (tmp_path / "torn.toml").write_text('task = "wino')
    with pytest.raises(BadRecipe, match="not a readable TOML file"):
        load_recipe(tmp_path / "torn.toml")


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(UnknownName, match="unknown model 'winograd2'; nearest: winograd-2"):
        load_recipe("winograd2")


def test_a_recipe_survives_being_written_and_read(tmp_path):
    recipe = parse(about='says "who"', model={"n_layers": 1, "d_mlp": 0}, training={"lr": 3e-3}, seeds={"batches": 7})
    (tmp_path / "mine.toml").write_text(recipe.to_toml())
    assert load_recipe(tmp_path / "mine.toml") == recipe


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_reads_and_says_what_it_is(name):
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.about
    assert ("attn" in name) <= recipe.model.attn_only  # attention-only as its name says


def test_the_hash_covers_what_changes_the_weights_and_nothing_else():
    recipe = load_recipe("winograd-2")
    renamed = Recipe("other", recipe.task, "another about", recipe.model, recipe.training, recipe.seeds)
    assert renamed.sha256 == recipe.sha256
    changed = [recipe.with_seed(1), recipe.with_steps(10), parse(model={"n_layers": 3}), parse(seeds={"split": 1})]
    assert len({recipe.sha256, *(r.sha256 for r in changed)}) == 5
    assert recipe.with_seed(1).experiment == recipe.experiment
    assert recipe.with_seed(1, split=True).experiment != recipe.experiment


@pytest.mark.parametrize("few", [32, 0])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.1}, {"positions": "rotary"}, {"positions": "shortformer"}])
def test_the_count_of_a_step_has_the_patterns_that_are_kept_and_no_others(monkeypatch, options, few):
    """Against the tensors that autograd packs away; with many narrow heads, whose patterns are most of it."""
    monkeypatch.setattr("workbench.transformer.FEW", few)
    task, kept = load_task("winograd"), {}
    sizes = {"n_layers": 2, "n_heads": 64, "d_head": 2, "d_model": 8, "d_mlp": 0}
    model = build_model(Recipe("small", "winograd", model=ModelConfig(**sizes | options)), task).train()
    tokens = task.train[:8].clone()

    def packed(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other comes to lie there
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        model.training_loss(tokens).backward()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = sum(t.untyped_storage().nbytes() for where, t in kept.items() if where not in weights)
    patterns = 4 * 8 * 2 * 64 * 17**2
    counted = 4 * model.config.numbers_of_step(8, 17, few)
    assert held / 3 <= counted <= held
    explicit = "dropout" in options or (few and not options)
    assert (counted >= patterns) == (held >= patterns) == bool(explicit)


def test_a_shorter_budget_shortens_the_warmup():
    assert parse(training={"steps": 1000, "warmup": 200}).with_steps(100).training.warmup == 20


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_the_learning_rate_warms_up_and_then_follows_its_schedule(schedule, expected):
    training = TrainingConfig(steps=8, warmup=4, lr=1.0, schedule=schedule)
    assert [training.learning_rate(step) for step in range(8)] == pytest.approx(expected, abs=1e-12)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=8), SCALARS, max_size=3)
FIELDS = st.sampled_from([*ModelConfig.__dataclass_fields__, *TrainingConfig.__dataclass_fields__, "x"])


@given(st.dictionaries(st.sampled_from(["task", "about", "model", "training", "seeds", "x"]),
                       VALUES | st.dictionaries(FIELDS, VALUES, max_size=3), max_size=4))  # fmt: skip
def test_any_plain_data_becomes_a_recipe_or_one_clear_line(raw):
    try:
        recipe = parse_recipe(raw, "mine", "mine.toml")
    except BadRecipe as error:
        assert str(error).startswith("mine.toml: ")
    else:
        assert recipe.model.d_model > 0 and len(recipe.sha256) == 64


def test_a_grid_has_every_combination_once_each_with_its_own_name():
    base = load_recipe("winograd-2")
    made = grid(base, ["lr=1e-3,3e-3", "d_model=32,64", "norm=post"])
    assert [said for said, _ in made] == [
        f"lr = {lr}, d_model = {width}, norm = post" for lr in (0.001, 0.003) for width in (32, 64)
    ]
    for (_, recipe), (lr, width) in zip(made, ((lr, width) for lr in (1e-3, 3e-3) for width in (32, 64)), strict=True):
        assert (recipe.training.lr, recipe.model.d_model, recipe.model.norm) == (lr, width, "post")
        assert (recipe.model.d_head, recipe.model.d_mlp) == (width // 4, 4 * width)  # they follow
        assert recipe.name == f"winograd-2-{recipe.experiment[:8]}"
    assert grid(base, []) == [("", base)]
    assert grid(base, ["lr=1e-3"]) == [("lr = 0.001", base)]  # what the recipe says already
    assert len(grid(base, ["lr=1e-3,1e-3"])) == 1


def test_sizes_that_were_chosen_stay_when_the_width_changes():
    recipe = parse(model={"d_model": 64, "n_heads": 4, "d_head": 8, "d_mlp": 0})
    changed = recipe.changed(d_model=32)
    assert (changed.model.d_head, changed.model.d_mlp) == (8, 0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lr", "--set lr: expected FIELD=VALUE"),
        ("lr=", "--set lr=: expected FIELD=VALUE"),
        ("rate=1", "unknown field 'rate'"),
        ("lr=fast", 'lr = "fast": expected a number'),
        ("d_model=", "expected FIELD=VALUE"),
        ("n_heads=5", "does not divide"),
        ("norm=" + "[" * 5000, "expected one of"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting, message):
    with pytest.raises((BadRecipe, UnknownName)) as error:
        grid(load_recipe("winograd-2"), [setting])
    assert message in str(error.value) and "\n" not in str(error.value)
