"""From a name or a TOML file to a task."""

import hashlib
import json
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.content import content
from workbench.errors import BadRecipe, UnknownName

if TYPE_CHECKING:
    from workbench.tasks.task import Task

KINDS = ("winograd", "bigram", "skip-trigram", "induction", "text")


def task_names() -> list[str]:
    """The tasks in datasets/."""
    return sorted(path.stem for path in content("datasets").glob("*.toml"))


def task_abouts() -> dict[str, str]:
    """Name → one line on each task, without building any."""
    return {name: _read(content("datasets") / f"{name}.toml")["about"] for name in task_names()}


def load_task(name_or_path: str | Path, split_seed: int = 0) -> "Task":
    """A task by name, or from any TOML file of the same form by path. `split_seed` decides what is held out.

    Raises: UnknownName with the nearest names; BadRecipe naming the field.
    """
    path = _file(name_or_path)
    if split_seed < 0:
        raise BadRecipe(f"split seed {split_seed}: expected 0 or more")
    return _load(path, path.stat().st_mtime_ns if path.is_file() else 0, split_seed)


def task_sha256(name_or_path: str | Path) -> str:
    """The hash of what a task's file says, its `about` and its comments apart: other sentences, another hash."""
    raw = {key: value for key, value in _read(_file(name_or_path)).items() if key != "about"}
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def _file(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if len(str(path)) > 1_000:
        raise BadRecipe(f"{str(path)[:60]}…: no such task file")
    if path.suffix != ".toml":
        if str(name_or_path) not in task_names():
            raise UnknownName("task", str(name_or_path), task_names())
        path = content("datasets") / f"{name_or_path}.toml"
    return path.resolve()


@lru_cache(maxsize=32)
def _load(path: Path, _modified: int, split_seed: int) -> "Task":
    from workbench.tasks.fields import Fields
    from workbench.tasks.generated import read_bigram, read_induction, read_skip_trigram
    from workbench.tasks.text import read_text
    from workbench.tasks.winograd import read_winograd

    raw = _read(path)
    by_kind = (read_winograd, read_bigram, read_skip_trigram, read_induction, read_text)
    readers = dict(zip(KINDS, by_kind, strict=True))
    return readers[raw.pop("kind")](path.stem, raw.pop("about"), Fields(raw, str(path.name)), split_seed)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadRecipe(f"{path}: no such task file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise BadRecipe(f"{path}: not a readable TOML file ({error})") from None
    if not isinstance(raw.get("about"), str):
        raise BadRecipe(f"{path.name}: about is missing; expected a text")
    if raw.get("kind") not in KINDS:
        raise BadRecipe(f"{path.name}: kind = {raw.get('kind')!r}; expected one of {', '.join(KINDS)}")
    return raw
