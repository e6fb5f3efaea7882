"""Training elsewhere than on the CPU: the same results to rounding, and nothing left behind on the wrong device."""

import dataclasses
from typing import Any

import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.recipes import load_recipe
from workbench.runs import build_model
from workbench.tasks import load_task
from workbench.training import train

STEPS = 100


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_another_device_gives_the_same_results_within_tolerance(device, tmp_path):
    """Rounding differs, and training magnifies it: after a hundred steps by less than a thousandth of a nat."""
    if not (torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()):
        pytest.skip(f"no {device} on this machine")
    recipe = load_recipe("winograd-1").with_steps(STEPS)
    here, there = train(recipe, tmp_path / "here"), train(recipe, tmp_path / "there", device=device)
    assert f"--device {device}" in there.results["made_by"]
    assert there.results["held_out"]["loss"] == pytest.approx(here.results["held_out"]["loss"], abs=1e-3)
    assert [line["step"] for line in there.metrics] == [line["step"] for line in here.metrics]
    assert {p.device.type for p in there.model.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    "options",
    [{}, {"norm": "post"}, {"positions": "alibi"}, {"positions": "rotary"}, {"positions": "sinusoidal"},
     {"positions": "shortformer"}, {"attention": "uniform"}, {"query_key": "tied"}, {"tied_unembedding": True},
     {"dropout": 0.1}],
)  # fmt: skip
def test_a_step_makes_nothing_on_another_device_than_the_models(options: dict[str, Any]):
    """On "meta", where tensors have a shape and no numbers, torch refuses to mix them with the CPU's."""
    recipe = load_recipe("winograd-2")
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, **options))
    task = load_task(recipe.task, 0)
    model = build_model(recipe, task).to("meta").train()
    tokens = task.batch(0, 0, 4).to("meta")
    model.training_loss(tokens).backward()
    assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"meta"}
    assert model.eval()(tokens[:, :-1]).device.type == "meta"


@pytest.mark.parametrize("device", ["cuda:99", "mps:3", "gpu", "", "cpu:1"])
def test_a_device_that_is_not_there_is_named_beside_those_that_are(device, runs):
    with pytest.raises(WorkbenchError, match=f"^no device '{device}' here; there is cpu"):
        train(load_recipe("winograd-1"), device=device)
    assert not runs.exists()
