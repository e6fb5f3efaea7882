"""From a name or a TOML file to a task."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.content import content
from workbench.errors import BadRecipe, UnknownName
from workbench.recipes import LONGEST_TEXT
from workbench.untrusted import LARGEST_TOML, is_plain, parse_toml, plain, read_file, short

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
    try:
        sha256 = hashlib.sha256(read_file(path, LARGEST_TOML)).hexdigest()
    except OSError:
        sha256 = ""  # reading it again says why
    return _load(path, sha256, split_seed)


def task_sha256(name_or_path: str | Path) -> str:
    """The hash of what a task's file says, its `about` and its comments apart: other sentences, another hash."""
    raw = {key: value for key, value in _read(_file(name_or_path)).items() if key != "about"}
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def _file(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.suffix != ".toml":
        if str(name_or_path) not in task_names():
            raise UnknownName("task", short(str(name_or_path), 100), task_names())
        path = content("datasets") / f"{name_or_path}.toml"
    if len(str(path)) > LONGEST_TEXT or not is_plain(path.name):
        raise BadRecipe(f"{plain(path, 80)}: no such task file")
    try:
        return path.resolve()
    except (RuntimeError, ValueError):  # a link to itself, a NUL
        raise BadRecipe(f"{plain(path, 80)}: no such task file") from None


@lru_cache(maxsize=32)
def _load(path: Path, _sha256: str, split_seed: int) -> "Task":
    from workbench.tasks.fields import Fields
    from workbench.tasks.generated import read_bigram, read_induction, read_skip_trigram
    from workbench.tasks.text import read_text
    from workbench.tasks.winograd import read_winograd

    raw = _read(path)
    by_kind = (read_winograd, read_bigram, read_skip_trigram, read_induction, read_text)
    readers = dict(zip(KINDS, by_kind, strict=True))
    return readers[raw.pop("kind")](path.stem, raw.pop("about"), Fields(raw, short(path.name, 80)), split_seed)


def _read(path: Path) -> dict[str, Any]:
    name = short(path.name, 80)
    try:
        raw = parse_toml(read_file(path, LARGEST_TOML))
        json.dumps(raw)
    except FileNotFoundError:
        raise BadRecipe(f"{plain(path)}: no such task file") from None
    except (ValueError, RecursionError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else short(str(error), 100)
        raise BadRecipe(f"{plain(path)}: not a readable TOML file ({reason})") from None
    except TypeError:
        raise BadRecipe(f"{name}: a date or a time; expected texts, numbers, lists and sections") from None
    about, kind = raw.get("about"), raw.get("kind")
    if not isinstance(about, str) or len(about) > LONGEST_TEXT or not is_plain(about):
        raise BadRecipe(f"{name}: about is missing; expected a text of one line, at most {LONGEST_TEXT} characters")
    if kind not in KINDS:
        raise BadRecipe(f"{name}: kind = {short(repr(kind), 60)}; expected one of {', '.join(KINDS)}")
    return raw
