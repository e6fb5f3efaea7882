"""What all browser sessions share, keyed by plain values: the hash of the weights and the text of the prompt.

A loaded model is one object for all sessions, which are threads: whoever puts hooks on it does so inside
`circuits.exclusive`. Arrays are copied for each caller.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st

from workbench.errors import BadRun
from workbench.runs import Run, list_runs, load, runs_folder

if TYPE_CHECKING:
    from circuits.attention import AttentionMaps


@dataclass(frozen=True)
class Entry:
    """A finished run by what `wb.load` knows it by."""

    name: str
    seed: int
    task: str
    """Its name; with a piece of its hash where two tasks of one name differ."""
    task_file: str
    about: str
    score: str
    """How good it is, in words."""
    shipped: bool
    key: str
    heads: tuple[str, ...]
    """As they are called: 0.0, 0.1 …"""


def entries() -> tuple[list[Entry], list[str]]:
    """Every run that loads, and one line on each that does not. Of one name and seed yours hides the shipped one."""
    return _entries(str(runs_folder()))


@st.cache_data(ttl=5, max_entries=4, show_spinner=False)
def _entries(folder: str) -> tuple[list[Entry], list[str]]:
    runs, faults = list_runs()
    found: dict[tuple[str, int], Entry] = {}
    versions: dict[str, set[str]] = {}
    for run in runs:
        versions.setdefault(Path(run.recipe.task).stem, set()).add(run.results["task_sha256"])
    for run in runs:
        config = run.recipe.model
        heads = tuple(f"{layer}.{head}" for layer in range(config.n_layers) for head in range(config.n_heads))
        stem = Path(run.recipe.task).stem
        task = stem if len(versions[stem]) == 1 else f"{stem} {run.results['task_sha256'][:6]}"
        entry = Entry(
            run.name, run.seed, task, run.recipe.task, run.recipe.about, run.score, run.shipped, run.key, heads
        )
        found.setdefault((run.name, run.seed), entry)
    return list(found.values()), [str(fault) for fault in faults]


def warm() -> bool:
    """Whether TransformerLens is imported; it takes seconds, once."""
    return "workbench.transformer" in sys.modules


@st.cache_resource(show_spinner=False)
def warm_up() -> None:
    """Import TransformerLens: one session does, the others wait for it."""
    import workbench.transformer  # noqa: F401


def loaded(entry: Entry) -> Run:
    """The run with its model and task in memory. Raises: WorkbenchError where it cannot be read."""
    return _loaded(entry.name, entry.seed, entry.key)


def maps(entry: Entry, prompt: str) -> "AttentionMaps":
    """The attention of a prompt that this run's task can encode."""
    return _maps(entry.name, entry.seed, entry.key, " ".join(prompt.split()))


@st.cache_resource(max_entries=16, show_spinner=False)
def _loaded(name: str, seed: int, key: str) -> Run:
    run = load(name, seed)
    if run.key != key:
        raise BadRun(f"{name} was trained again just now; reload the page")
    _ = run.task, run.model
    return run


@st.cache_data(max_entries=64, show_spinner=False)
def _maps(name: str, seed: int, key: str, prompt: str) -> "AttentionMaps":
    from circuits.attention import attention_maps

    run = _loaded(name, seed, key)
    return attention_maps(run.model, run.encode(prompt))
