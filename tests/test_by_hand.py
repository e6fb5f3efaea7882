"""One layer of attention can answer the closed Winograd task: here are the weights."""

import dataclasses

import pytest
import torch

import workbench as wb
from workbench.errors import BadRecipe
from workbench.recipes import load_recipe
from workbench.runs import build_model
from workbench.tasks import load_task
from workbench.training import evaluate


def test_the_hand_built_layer_is_always_right_on_all_1920_sentences():
    run = wb.load("winograd-1-hand")
    task = run.task
    assert run.model.config.n_layers == 1 and run.model.config.attn_only
    scores = evaluate(run.model, task, torch.cat([task.train, task.held_out]))
    assert len(scores.right) == 1920 and scores.accuracy == 1.0
    assert scores.loss < 1e-3  # and it is sure


def test_it_reads_x_unless_the_adjective_drains_the_head():
    run = wb.load("winograd-1-hand")
    sentence = "the animal did not cross the street because it was too {} , so the"
    for adjective, source in (("tired", 1), ("wet", 11)):
        _, cache = run.model.run_with_cache(run.encode(sentence.format(adjective)))
        pattern = cache["pattern", 0][0, :, 14]
        assert pattern[0].argmax() == source and pattern[0, source] > 0.99
        assert pattern[1, 6] > 0.99  # the second head always reads y


def test_without_the_drain_it_is_wrong_on_every_sentence_about_y():
    """The control: the rule lies in the adjectives' keys, not in the copying."""
    run = wb.load("winograd-1-hand")
    model = build_model(run.recipe, run.task)
    with torch.no_grad():
        model.blocks[0].attn.W_K[0, : len(run.task.vocabulary)] = 0
    assert evaluate(model, run.task).accuracy == 0.5


@pytest.mark.parametrize(
    ("field", "value"), [("n_layers", 2), ("n_heads", 3), ("d_head", 8), ("d_model", 64), ("d_mlp", 8), ("norm", "pre")]
)
def test_a_shape_that_does_not_fit_is_refused_by_name(field, value):
    recipe = load_recipe("winograd-1-hand")
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, **{field: value}))
    with pytest.raises(BadRecipe, match=f'"by-hand" needs {field} ='):
        build_model(recipe, load_task("winograd"))


def test_other_tasks_are_refused():
    with pytest.raises(BadRecipe, match="knows only Winograd tasks, not bigram"):
        build_model(load_recipe("winograd-1-hand"), load_task("bigram"))
