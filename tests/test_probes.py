"""Probes: what a run writes while it trains is what its checkpoints say afterwards, and training does not notice."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from support import interrupted

from circuits import composition_scores, copying_score, head_scores, in_context_learning_score
from circuits.composition import KINDS
from circuits.edges import Edge
from circuits.effects import edge_effects
from workbench.dynamics import PROBES, read_dynamics, read_lines
from workbench.errors import BadRecipe, BadRun
from workbench.evidence import examples
from workbench.probes import probe, probe_checkpoints
from workbench.recipes import ModelConfig, Recipe, TrainingConfig, load_recipe, parse_recipe
from workbench.runs import load
from workbench.tasks import load_task
from workbench.tasks.generated import Induction
from workbench.training import Trainer, probed_steps, train

ALL = ("heads", "composition", "copying", "in-context")
INDUCTION = Recipe(
    name="tiny", task="induction", model=ModelConfig(n_heads=2, d_model=16, d_mlp=0, dropout=0.1),
    training=TrainingConfig(steps=20, batch=8, lr=1e-2, save_every=8, checkpoints=3, probes=ALL),
)  # fmt: skip
WINOGRAD = dataclasses.replace(
    INDUCTION, task="winograd", training=dataclasses.replace(INDUCTION.training, probes=("edges", "copying"))
)


def without_probes(recipe):
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, probes=()))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(INDUCTION, tmp_path_factory.mktemp("probed") / "run")


@pytest.mark.parametrize("recipe", [INDUCTION, WINOGRAD])
def test_what_was_probed_in_training_is_what_the_checkpoints_give_afterwards(tmp_path, recipe):
    run = train(recipe, tmp_path / "run")
    lines = {line["step"]: line for line in read_lines(run.path)[0]}
    assert len(run.checkpoints) >= 3 and set(run.checkpoints) < set(lines) and max(lines) == 20
    for step in [*run.checkpoints, None]:
        model = load(run.path, step=step).model
        again = probe(model, run.task, recipe.training.probes, 2 * recipe.training.batch)
        line = dict(lines[20 if step is None else step])
        assert line.pop("step") >= 0 and (line.pop("loss") is None) == (step == 0)
        assert again == line


def test_a_line_holds_what_the_circuits_library_says_of_the_model(run):
    line, model, tokens = read_lines(run.path)[0][-1]["series"], run.model, run.task.held_out[::32]

    def held(name):
        return torch.tensor(line[name]["score"])

    heads = head_scores(model, sequences=4, length=32, draws=39)
    for name in ("previous_token", "prefix_matching", "copying", "entropy_share"):
        torch.testing.assert_close(held(name), heads[name].scores, rtol=1e-4, atol=0)
    for kind in KINDS:
        scores = composition_scores(model, kind)
        torch.testing.assert_close(held(f"composition.{kind}"), scores.scores, rtol=1e-4, atol=0)
    torch.testing.assert_close(
        held("copying.eigenvalue"), copying_score(model, draws=39).eigenvalue.scores, rtol=1e-4, atol=0
    )
    assert len(tokens) == 16
    assert line["in_context"]["score"] == pytest.approx(in_context_learning_score(model, tokens).value, rel=1e-4)
    z = read_dynamics(run)["composition.K"].z[-1]
    np.testing.assert_allclose(z, composition_scores(model, "K").z.numpy(), atol=2e-3)


def test_the_loss_by_position_is_that_of_each_prediction(run):
    line, tokens = read_lines(run.path)[0][-1], run.task.held_out[::32]
    with torch.no_grad():
        log_probs = run.model(tokens).log_softmax(-1)
    by_hand = [-log_probs[range(16), at, tokens[:, at + 1]].mean().item() for at in range(47)]
    assert line["loss_by_position"] == pytest.approx(by_hand, rel=1e-4)
    assert line["held_out_loss"] == pytest.approx(np.mean(by_hand[24:]), rel=1e-4)


def test_edges_are_those_into_the_answer_by_role(tmp_path):
    run = train(WINOGRAD, tmp_path / "run")
    series = read_lines(run.path)[0][-1]["series"]
    prompts = examples(run, n=32)
    edge = Edge(1, None, "answer", "adjective")
    effect = edge_effects(run.model, prompts, edges=[edge], pairs=0).difference_change.item()
    assert series[f"edges.{edge}"]["score"] == pytest.approx(effect, rel=1e-4)
    assert sum(name.startswith("edges.") for name in series) == 2 * 4


def test_probing_changes_no_weight_and_no_hash(tmp_path, run):
    plain = train(without_probes(INDUCTION), tmp_path / "plain")
    assert (plain.path / "model.safetensors").read_bytes() == (run.path / "model.safetensors").read_bytes()
    assert plain.recipe.sha256 == run.recipe.sha256 and plain.recipe.training.probes != run.recipe.training.probes
    assert not (plain.path / PROBES).exists()
    assert train(INDUCTION, tmp_path / "plain").results == plain.results  # it is trained already


def test_the_shipped_recipes_ask_for_probes_and_their_runs_still_load():
    for name in ("induction-2-attn", "induction-1-attn", "winograd-2"):
        assert load_recipe(name).training.probes and load(name).recipe.sha256 == load_recipe(name).sha256


@pytest.mark.parametrize("stop", [1, 8, 9, 16, 19])
def test_a_run_that_was_stopped_has_the_probes_of_one_that_was_not(tmp_path, run, stop):
    with interrupted(before=stop):
        train(INDUCTION, tmp_path / "run")
    with (tmp_path / "run" / PROBES).open("a") as file:
        file.write('{"step": 19, "ser')
    resumed = train(INDUCTION, tmp_path / "run", resume=True)
    assert (resumed.path / PROBES).read_bytes() == (run.path / PROBES).read_bytes()


def test_an_unfinished_run_can_go_on_with_probes(tmp_path, run):
    with interrupted():
        train(without_probes(INDUCTION), tmp_path / "run")
    resumed = train(INDUCTION, tmp_path / "run", resume=True)
    assert resumed.recipe.training.probes == ALL
    every = read_lines(run.path)[0]
    assert read_lines(resumed.path)[0] == [line for line in every if line["step"] > 16]


def test_probed_steps_hold_the_checkpoints_and_the_last_step():
    training = dataclasses.replace(INDUCTION.training, steps=2000, checkpoints=16)
    steps = probed_steps(training)
    assert {0, 116, 299, 1244, 2000} <= set(steps) and len(steps) == 31 and steps == sorted(set(steps))
    ratios = [after / before for before, after in itertools.pairwise(steps[15:])]
    assert max(ratios) < 1.28 and min(ratios) > 1.2  # 2000 ** (1 / 32) is 1.268
    assert probed_steps(dataclasses.replace(training, probes=())) == []
    assert probed_steps(dataclasses.replace(training, steps=0)) == [0]


def test_checkpoints_are_probed_afterwards_where_training_did_not(tmp_path, run):
    plain = train(without_probes(INDUCTION), tmp_path / "plain")
    probe_checkpoints(plain)
    during = {line["step"]: line["series"] for line in read_lines(run.path)[0]}
    after = {line["step"]: line["series"] for line in read_lines(plain.path)[0]}
    assert list(after) == [*plain.checkpoints, 20] and all(during[step] == after[step] for step in after)
    bare = dataclasses.replace(INDUCTION.training, checkpoints=0, probes=())
    bare = train(dataclasses.replace(INDUCTION, training=bare), tmp_path / "bare")
    with pytest.raises(BadRun, match="has no checkpoints to probe; train it with probes"):
        probe_checkpoints(bare)


def test_what_is_undefined_is_a_reason(run):
    one = Trainer.build(dataclasses.replace(INDUCTION, model=ModelConfig(n_layers=1, d_mlp=0)), run.path).model
    line = probe(one, run.task, ("composition", "edges", "heads"), 4)
    assert line["undefined"]["composition"] == "no head stands behind another"
    assert "names no foil" in line["undefined"]["edges"] and "prefix_matching" in line["series"]


@pytest.mark.parametrize(
    ("probes", "message"),
    [("heads", 'probes = "heads": expected a list'), (["head"], 'probes = "head": expected one of heads, composition')],
)
def test_a_bad_probe_is_named(probes, message):
    with pytest.raises(BadRecipe, match=message):
        parse_recipe({"task": "winograd", "training": {"probes": probes}}, "mine", "mine.toml")


def test_probes_survive_being_written_and_read(run):
    assert load_recipe(run.path / "recipe.toml").training.probes == ALL
    assert json.loads(json.dumps(run.recipe.to_dict()))["training"]["probes"] == list(ALL)


# What order adds: the null of in-context learning on induction


def test_the_order_blind_loss_counts_the_tokens_that_can_still_come():
    task = load_task("induction")
    assert isinstance(task, Induction)
    losses = task.order_blind_losses(task.held_out).exp().round().int()
    for row, counted in zip(task.held_out[:64].tolist(), losses.tolist(), strict=False):
        segment = row[: row.index(row[0], 1)]
        for at in range(1, 48):
            seen = {token: row[:at].count(token) for token in range(50)}
            turn = [token for token in segment if seen[token] == at // len(segment)]
            can = turn if at >= len(segment) else [token for token in range(50) if not seen[token]]
            assert row[at] in can and len(can) == counted[at - 1]


def test_the_null_of_in_context_learning_is_what_the_order_blind_reach(run):
    line, tokens = read_lines(run.path)[0][0]["series"]["in_context"], run.task.held_out[::32]
    assert isinstance(run.task, Induction)
    losses = run.task.order_blind_losses(tokens)
    # places i of REFERENCE, T = 48: late 24 … 47, early 3 … 5; loss j predicts token j + 1
    assert line["null_mean"] == pytest.approx((losses[:, 23:47].mean() - losses[:, 2:5].mean()).item(), rel=1e-4)
    assert -2.3 < line["null_mean"] < -1.6 and abs(line["score"]) < 0.5


def test_the_shuffled_control_deals_out_the_same_tokens_and_foretells_nothing():
    plain, shuffled = load_task("induction"), load_task("induction-shuffled")
    assert isinstance(plain, Induction) and isinstance(shuffled, Induction)
    one, other = (task.draw(np.random.default_rng(3), 400) for task in (plain, shuffled))
    assert (np.sort(one, axis=0) == np.sort(other, axis=0)).all() and (one != other).any()
    tokens = shuffled.held_out
    for back in range(1, 25):  # 512 · (48 − back) pairs at chance 1 / 50, clusters of columns: within 5 standard errors
        same = (tokens[:, back:] == tokens[:, :-back]).double().mean().item()
        assert abs(same - 0.02) < 5 * (0.02 / (512 * 24)) ** 0.5
    assert shuffled.order_blind_losses(tokens).unique().tolist() == pytest.approx([np.log(50)])
