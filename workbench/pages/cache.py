"""What all browser sessions share, keyed by plain values: the hash of the weights and the text of the prompt.

A loaded model is one object for all sessions, which are threads: whoever puts hooks on it does so inside
`circuits.exclusive`. Arrays are copied for each caller.
"""

import sys
import threading
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import streamlit as st

from workbench.errors import BadRun, NoCorpus
from workbench.runs import Run, list_runs, load, runs_folder

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from circuits.attention import AttentionMaps, Measure, RoleAttention
    from circuits.heads import HeadScores
    from circuits.scores import Scores
    from workbench.pages.errors import Mistakes

EFFECT = "effect here"
MEASURES = {
    "previous token": "previous_token", "induction": "prefix_matching", "copying": "copying", "entropy": "entropy",
}  # fmt: skip
"""What heads can be ranked by, as `head_scores` calls it."""
LATER = ("transformer_lens.weight_processing", "workbench.head_table")  # what folds weights, and what scores heads
REST = 3.0  # seconds after the first page, in which a browser draws it
MOST = 2_048  # held-out sequences that a mean or a list of errors is taken over


class Target(NamedTuple):
    """The logit of one token, minus that of another or the mean of all."""

    answer: int
    foil: int | None


class RunKey(NamedTuple):
    """A run, or its checkpoint, in plain values: what every cached function is keyed by."""

    name: str
    seed: int
    weights: str
    step: int | None = None


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
    checkpoints: tuple[int, ...] = ()
    """Steps whose weights were kept."""

    def at(self, step: int | None = None) -> RunKey:
        """Its end, or a checkpoint."""
        return RunKey(self.name, self.seed, self.key, step)


@dataclass(frozen=True)
class Side:
    """One prompt read by one model: a side of the page."""

    entry: Entry
    text: str
    step: int | None = None
    """A checkpoint of training; None is its end."""

    @property
    def run(self) -> RunKey:
        return self.entry.at(self.step)


def entries() -> tuple[list[Entry], list[str]]:
    """Every run that loads, and one line on each that does not. Of one name and seed yours hides the shipped one."""
    return _entries(str(runs_folder()))


def forget_entries() -> None:
    """There is a new run."""
    _entries.clear()


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
            run.name, run.seed, task, run.recipe.task, run.recipe.about, run.score, run.shipped, run.key, heads,
            tuple(run.checkpoints),
        )  # fmt: skip
        found.setdefault((run.name, run.seed), entry)
    return list(found.values()), [str(fault) for fault in faults]


def reference(run: Run, length: int) -> "Int[Tensor, 'example position'] | None":
    """Held-out sequences to take a mean over, at least as long as a prompt; None where the text is not here."""
    try:
        found = run.task.held_out[:MOST]
    except NoCorpus:
        return None
    return found if found.shape[1] >= length else None


def warm() -> bool:
    """Whether TransformerLens is imported; it takes seconds, once."""
    return "workbench.transformer" in sys.modules


@st.cache_resource(show_spinner=False)
def warm_up() -> None:
    """Import TransformerLens: one session does, the others wait for it."""
    import workbench.transformer  # noqa: F401


@st.cache_resource(show_spinner=False)
def prepare() -> None:
    """Import, once and when the first page stands, what others need: two seconds or more that they would else take."""
    later = threading.Timer(REST, lambda: [import_module(name) for name in LATER])
    later.daemon = True
    later.start()


def loaded(entry: Entry, step: int | None = None) -> Run:
    """The run, or its checkpoint, with its model and task in memory. Raises: WorkbenchError where it cannot be read."""
    return run_of(entry.at(step))


@st.cache_resource(max_entries=16, show_spinner=False)
def run_of(key: RunKey) -> Run:
    """As `loaded`, by key. Raises: WorkbenchError."""
    run = load(key.name, key.seed, key.step)
    if run.weights_sha256 != key.weights.partition("@")[0]:
        raise BadRun(f"{key.name} was trained again just now; reload the page")
    _ = run.task, run.model
    return run


def maps(side: Side, measure: "Measure" = "attention", target: Target | None = None) -> "AttentionMaps":
    """The maps of a prompt that the task can encode; of a logit, which `target` says. Raises: CircuitError."""
    return _maps(side.run, side.text, measure, target)


@st.cache_data(max_entries=24, show_spinner=False)
def _maps(key: RunKey, prompt: str, measure: "Measure", target: Target | None) -> "AttentionMaps":
    from circuits.attention import attention_maps, contribution_maps, moved_maps

    run = run_of(key)
    tokens = run.encode(prompt)
    if measure == "logit" and target is not None:
        return contribution_maps(run.model, tokens, target.answer, target.foil)
    return (moved_maps if measure == "moved" else attention_maps)(run.model, tokens)


def scores(side: Side, rank: str, position: int, target: Target | None) -> "Scores":
    """Every head's score of this kind, with its null. Raises: CircuitError where it is undefined."""
    if rank == EFFECT and target is not None:
        return _effects(side.run, side.text, position, target)
    return all_scores(side.run)[MEASURES[rank]]


@st.cache_data(max_entries=64, show_spinner=False)
def all_scores(key: RunKey) -> "HeadScores":
    """Every measure of every head. Raises: CircuitError."""
    from circuits.heads import head_scores
    from circuits.scores import LEAST_DRAWS

    return head_scores(run_of(key).model, draws=LEAST_DRAWS)


@st.cache_data(max_entries=64, show_spinner=False)
def _effects(key: RunKey, prompt: str, position: int, target: Target) -> "Scores":
    from circuits.attention import head_effects

    run = run_of(key)
    tokens = run.encode(prompt)
    return head_effects(
        run.model, tokens, position, target.answer, target.foil, reference=reference(run, tokens.shape[1])
    )


@st.cache_data(max_entries=32, show_spinner=False)
def role_means(key: RunKey) -> "RoleAttention":
    """Attention between the task's roles, on the held-out sequences. Raises: WorkbenchError without the text."""
    from circuits.attention import role_attention

    run = run_of(key)
    tokens = run.task.held_out[:MOST]
    return role_attention(run.model, tokens[:, : run.task.answer_position + 1], run.task.roles,
                          run.task.clusters(tokens))  # fmt: skip


@st.cache_data(max_entries=32, show_spinner=False)
def mistakes(key: RunKey) -> "Mistakes":
    """What the run gets wrong of the held-out sequences. Raises: WorkbenchError without the text."""
    from workbench.pages.errors import mistakes

    return mistakes(run_of(key), MOST)
