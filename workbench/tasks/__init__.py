"""Tasks whose right answers are known. `load_task("winograd")` reads datasets/winograd.toml.

Importing this package is light; torch comes with the first task.
"""

from typing import TYPE_CHECKING, Any

from workbench.tasks.load import load_task, task_abouts, task_names, task_sha256

if TYPE_CHECKING:
    from workbench.tasks.task import Scores, Task

__all__ = ["Scores", "Task", "load_task", "task_abouts", "task_names", "task_sha256"]


def __getattr__(name: str) -> Any:
    if name not in ("Scores", "Task"):
        raise AttributeError(f"module 'workbench.tasks' has no attribute {name!r}")
    from workbench.tasks import task

    return getattr(task, name)
