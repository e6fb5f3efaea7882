"""The workbench: train tiny transformers on tasks with known answers, and look inside them.

    import workbench as wb

    run = wb.load("winograd-2")
    logits, cache = run.model.run_with_cache(run.encode("the animal did not cross the street"))

The names below are imported on first use: torch and TransformerLens take seconds, `workbench --help` must not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.errors import WorkbenchError
    from workbench.recipes import ModelConfig, Recipe, load_recipe, recipe_names
    from workbench.runs import Run, list_runs, load
    from workbench.tasks import load_task, task_names
    from workbench.tasks.task import Task
    from workbench.training import train
    from workbench.transformer import Transformer

__version__ = "0.7.0"

_HOME = {
    "ModelConfig": "workbench.recipes",
    "Recipe": "workbench.recipes",
    "Run": "workbench.runs",
    "Task": "workbench.tasks.task",
    "Transformer": "workbench.transformer",
    "WorkbenchError": "workbench.errors",
    "list_runs": "workbench.runs",
    "load": "workbench.runs",
    "load_recipe": "workbench.recipes",
    "load_task": "workbench.tasks",
    "recipe_names": "workbench.recipes",
    "task_names": "workbench.tasks",
    "train": "workbench.training",
}
__all__ = [
    "ModelConfig",
    "Recipe",
    "Run",
    "Task",
    "Transformer",
    "WorkbenchError",
    "list_runs",
    "load",
    "load_recipe",
    "load_task",
    "recipe_names",
    "task_names",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
