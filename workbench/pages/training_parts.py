"""The parts of the training page, top to bottom."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import streamlit as st

from workbench.dynamics import EDGES, EFFECTS, PROBES, Dynamics, PhaseChange, phase_changes, read_dynamics
from workbench.dynamics_report import DynamicsReport
from workbench.errors import WorkbenchError
from workbench.figures import attention_figure
from workbench.figures.dynamics import PANELS, dynamics_figure
from workbench.figures.journal import STYLE, journal_html
from workbench.figures.training import PANELS as METRICS
from workbench.figures.training import metrics_curves, metrics_figure
from workbench.pages import attention_parts, cache, show
from workbench.pages.attention_parts import Look, Shown
from workbench.pages.cache import Entry, Side
from workbench.pages.frame import Refusal, View, literal, prose, refuse
from workbench.recipes import load_recipe, read_recipe, recipe_names
from workbench.runs import Run, load, read_metrics, runs_folder
from workbench.wording import percent

if TYPE_CHECKING:
    import plotly.graph_objects as go

SEEDS = 5  # shown together unless others are chosen
HELD_OUT = ("held_out_loss", "held_out_accuracy")
TOLD = ("prefix_matching", "composition.K", "previous_token")
"""Of these the sentence gives the first that was probed."""
SHORT = {
    "held_out_loss": "loss", "held_out_accuracy": "accuracy", "in_context": "in-context",
    "copying.eigenvalue": "copying: eigenvalues", "copying.argmax": "copying: arg-max",
}  # fmt: skip
WATCH = """\
[training]
checkpoints = 16
probes = ["heads", "composition", "copying", "in-context", "edges"]
"""

EXPLANATION = """\
**One axis.** All panels share the steps of training, on a logarithmic scale; step 0 has no place on it and stands at
the left edge. Thin lines are seeds, the thick one is their median. The vertical line is the step that is chosen above.

**A score** of heads or pairs is at each step that of the highest one, and the dotted line is what chance allows the
highest of so many: 97.5 % of the time it stays below. The null is drawn anew from the very weights of each step, since
that of a trained model is another than that of a fresh one.

**Shaded** is a phase change: where a curve leaves its null for good until it comes to a plateau, medians over the
seeds; fainter, as far as the intervals of begin and end reach. A rise that is sure but small does not count; what
does is in `workbench.dynamics.EFFECTS`. Steps are those looked at, so a change may have begun since the look before.

**K-composition** is z less the mean z of the same pair's Q and V, where that is above 0: whatever is trained comes to
read and write a few common directions, and only what one kind has beyond the others is its own.

**The map** is that of the weights at the chosen step, on the prompt of the side bar. It shows where heads look, not
whether the answer depends on it.
"""


@dataclass(frozen=True)
class Curves:
    """What is known of the training of the seeds that were chosen."""

    runs: list[Dynamics]
    probed: bool
    """Whether they are probes, or only the losses that were logged."""
    changes: list[PhaseChange]
    told: list[str]
    """What is left out, and why."""

    def of(self, seed: int) -> Dynamics:
        """That seed; else the first."""
        return next((run for run in self.runs if run.seed == seed), self.runs[0])


def choose_seeds(view: View) -> list[Entry]:
    """Which seeds are drawn: five at most unless chosen, this one among them."""
    by_seed = {entry.seed: entry for entry in sorted(view.seeds, key=lambda entry: entry.seed)}
    if len(by_seed) == 1:
        return [view.entry]
    usual = sorted([view.entry.seed, *[seed for seed in by_seed if seed != view.entry.seed][: SEEDS - 1]])
    if not set(st.session_state.get("training_seeds") or usual) <= set(by_seed):
        del st.session_state["training_seeds"]
    chosen = st.pills("Seeds", list(by_seed), default=usual, selection_mode="multi", key="training_seeds",
                      bind="query-params", help="thin lines are seeds, the thick one is their median")  # fmt: skip
    return [by_seed[seed] for seed in sorted(chosen)] or [view.entry]


def read(entries: Sequence[Entry]) -> Curves:
    """The probes of those that have any; if none has, what was logged. Raises: WorkbenchError if a run is gone."""
    runs = [load(entry.name, entry.seed) for entry in entries]
    probed = [run for run in runs if (run.path / PROBES).exists()]
    if probed:
        hashes = tuple((str(run.path), run.results["files"].get(PROBES, "")) for run in probed)
        found, faults = _probes(hashes)
        if found:
            return Curves(found, True, [], [*faults, *_without(runs, [run.seed for run in found])])
        told = faults
    else:
        told = []
    curves = []
    for run in runs:
        try:
            curves.append(metrics_curves(run.name, run.seed, run.metrics))
        except WorkbenchError as error:
            told.append(str(error))
    curves = [each for each in curves if len(each.steps) and each.steps[-1]]
    missing = [run.seed for run in runs if run.seed not in [each.seed for each in curves]]
    if missing and curves:
        told.append(f"Nothing was logged of seed {_and(missing)}.")
    return Curves(curves, False, [], told)


@st.cache_data(max_entries=32, show_spinner=False)
def _probes(hashes: tuple[tuple[str, str], ...]) -> tuple[list[Dynamics], list[str]]:
    """Of run folders with the hashes of their probes; and lines on those that cannot be read."""
    found, faults = [], []
    for folder, _ in hashes:
        try:
            found.append(read_dynamics(load(folder)))
        except WorkbenchError as error:
            faults.append(str(error))
    return found, [*faults, *(fault for run in found for fault in run.faults)]


def _without(runs: Sequence[Run], probed: Sequence[int]) -> list[str]:
    """The seeds that have no probes, and how they get them."""
    without = [run for run in runs if run.seed not in probed]
    said = []
    for kept in (True, False):
        seeds = [run.seed for run in without if bool(run.checkpoints) == kept]
        if seeds:
            how = (f"`workbench dynamics {shlex.quote(without[0].name)} --all-seeds --probe` reads them from their "
                   "checkpoints" if kept else "they kept no checkpoints to read them from")  # fmt: skip
            said.append(f"Without probes, not drawn: seed {_and(seeds)}; {how}.")
    return said


def choose_panels(curves: Curves) -> list[str]:
    """Which scores are drawn."""
    there = [name for run in curves.runs for name in (*HELD_OUT, *run.series)]
    options = [name for name in dict.fromkeys((*HELD_OUT, *PANELS, *there)) if name in there]
    usual = [name for name in options if name in (*HELD_OUT, *PANELS) or name.startswith(EDGES)]
    if not set(st.session_state.get("training_panels") or usual) <= set(options):
        del st.session_state["training_panels"]
    chosen = st.pills("Panels", options, default=usual, selection_mode="multi", key="training_panels",
                      bind="query-params", format_func=short)  # fmt: skip
    return [panel for panel in options if panel in chosen] or usual


def short(panel: str) -> str:
    """A score's name in a word or two."""
    if panel.startswith(EDGES):
        return f"cut {panel.removeprefix(EDGES).replace('→', ' → ')}"
    if panel.startswith("composition."):
        return f"{panel.removeprefix('composition.')}-composition"
    return SHORT.get(panel, panel.replace("_", " "))


def with_changes(curves: Curves, panels: Sequence[str]) -> Curves:
    """With the phase changes of what is drawn."""
    return Curves(curves.runs, True, phase_changes(curves.runs, measures_of(panels)), curves.told)


def measures_of(panels: Sequence[str]) -> list[str]:
    """Those whose phase change is defined."""
    return [name for name in panels if name in EFFECTS or name.startswith(EDGES)]


def choose_step(view: View, curves: Curves) -> int:
    """One of the checkpoints of this run, the last step among them; without any, one of the steps that were read."""
    last = view.run.results["steps"]
    if view.run.checkpoints:
        options = sorted({*view.run.checkpoints, last})
    else:
        options = curves.of(view.entry.seed).steps.tolist()
    if len(options) == 1:
        return options[0]
    begin = min((change.begins for change in curves.changes if change.begins is not None), default=last)
    usual = next((step for step in options if step >= begin), options[-1])
    if st.session_state.get("training_step", usual) not in options:
        del st.session_state["training_step"]
    help_ = "moves the line through all panels" + (", and the map is that of these weights" if view.run.checkpoints
                                                   else "; no weights were kept, so there is no map")  # fmt: skip
    return st.select_slider("Checkpoint" if view.run.checkpoints else "Step", options, usual, format_func="{:,}".format,
                            key="training_step", bind="query-params", help=help_)  # fmt: skip


def sentence(view: View, curves: Curves, step: int) -> str:
    """What is read at this step, beside the end."""
    run = curves.of(view.entry.seed)
    at, last = int(np.abs(run.steps - step).argmin()), view.run.results["steps"]
    who = f"{run.model} seed {run.seed}"
    over = at == len(run.steps) - 1
    loss = run.held_out_loss
    said = [f"held-out loss {_plain(loss[at])} nats" + f" ({_plain(loss[-1])} at the end)" * (not over)]
    score = next((name for name in TOLD if name in run.series and not np.isnan(run.curve(name).values[at])), None)
    if score is not None:
        curve = run.curve(score)
        value, bound = curve.values[at], curve.bound[at]
        where = "above" if value > bound else "within"
        unit = "z " if score.startswith("composition") else ""
        parts = "head" if curve.parts < 2 else f"highest of {curve.parts} {'pairs' if unit else 'heads'}"
        said.append(f"{short(score)}, the {parts}, {unit}{_plain(value)}, {where} what chance allows ({_plain(bound)})")
    else:
        accuracy, chance = run.held_out_accuracy, percent(view.run.task.chance)
        later = f"{_rate(accuracy[-1])} at the end, " * (not over)
        said.append(f"held-out accuracy {_rate(accuracy[at])} ({later}{chance} by chance)")
    return f"At step {int(run.steps[at]):,} of {last:,}, {who}: {'; '.join(said)}."


def _plain(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.2f}".replace("-", "−")


def _rate(value: float) -> str:
    return "–" if np.isnan(value) else percent(value)


def nothing(view: View) -> str:
    """Why there is nothing to draw."""
    if not view.run.results["steps"]:
        how = "written by hand" if view.run.recipe.model.init == "by-hand" else "those that it was begun with"
        return f"{view.entry.name} was not trained: its weights are {how}, so there are no curves to show."
    there = ["its weights at the end", *(["checkpoints"] if view.run.checkpoints else [])]
    return f"Of the training of {view.entry.name} seed {view.entry.seed} nothing was logged; here are {_and(there)}."


def draw(view: View, curves: Curves, panels: list[str], step: int) -> "go.Figure":
    """The panels with the cursor, and in words where phases change."""
    if curves.probed:
        figure = dynamics_figure(curves.runs, curves.changes, panels=panels, cursor=step)
    else:
        figure = metrics_figure(view.entry.name, _logged(curves), chance=view.run.task.chance, cursor=step)
    show.chart(figure, "training_panels_chart", wide=curves.probed)
    if curves.changes:
        st.html(STYLE + journal_html(*changes_table(curves.changes), {1, 2, 3}))
    undefined = {f"No {probe} here: {why}." for run in curves.runs for probe, why in run.undefined.items()}
    for line in [*sorted(undefined), *curves.told]:
        st.caption(prose(line))
    return figure


def changes_table(changes: Sequence[PhaseChange]) -> tuple[list[str], list[list[str]]]:
    """When each score changes phase: medians over the seeds that do, with the interval of the median."""

    def at(median: float | None, ends: tuple[int, int] | None) -> str:
        return "–" if median is None or ends is None else f"{median:,.0f} [{ends[0]:,} … {ends[1]:,}]"

    rows = [
        [short(each.measure), at(each.begins, each.begin_interval), at(each.ends, each.end_interval),
         f"{each.found} of {each.seeds}"]
        for each in changes
        if each.seeds
    ]  # fmt: skip
    return ["phase change", "begins at step", "ends at step", "seeds"], rows


def _logged(curves: Curves) -> dict[int, list[dict[str, Any]]]:
    """The lines of metrics.jsonl that the curves were read from."""
    return {run.seed: load(run.model, run.seed).metrics for run in curves.runs}


def attention(view: View, step: int) -> None:
    """The maps of the prompt at this checkpoint, and all heads as thumbnails."""
    final = step == view.run.results["steps"]
    st.markdown(f"**Attention {'at the end' if final else f'at step {step:,}'}**")
    if view.unread is not None:
        refuse(view.unread)
        return
    if view.unread_b is not None:
        refuse(view.unread_b, "B: ")
    sides = [side for side in view.sides if side.entry == view.entry and side.step is None]
    letters = ("A", "B")
    try:
        run, prompts = view.run, []
        for letter, side in zip(letters, sides, strict=False):
            tokens = run.str_tokens(run.encode(side.text))
            at = Side(side.entry, side.text, None if final else step)
            prompts.append(Shown(letter, at, tokens, cache.maps(at), view.destination))
    except Refusal as error:
        refuse(error)
        return
    vocabulary, roles = run.task.vocabulary.words, view.roles
    attention_parts.next_words(prompts, vocabulary, roles)
    if not prompts[0].maps.n_layers:
        st.caption("This model has no layers, so there is no map: only what it says next.")
        return
    head, layers = attention_parts.choose_head(prompts[0].maps)
    look = Look(head, layers, "from", "attention", None, "", letters)
    a, b = prompts[0], prompts[1] if len(prompts) > 1 else None
    st.caption(literal(attention_parts.sentence(prompts, look)))
    figure = attention_figure(
        a.maps, a.tokens, b and b.maps, b and b.tokens, head, a.at, vocabulary=vocabulary, roles=roles, layers=layers,
        clickable=True,
    )  # fmt: skip
    attention_parts.chart(figure, "from")
    if a.maps.n_heads * a.maps.n_layers > 1:
        target = partial(attention_parts.choose_target, prompts, vocabulary)
        attention_parts.heads(a, look, b is not None, target)


def commands(run: Run) -> str:
    """The command lines that train this model."""
    name, steps = train_name(run), run.recipe.training.steps
    first = f"workbench train {name} --seeds 0-4"
    if name != run.name or not steps:
        return first
    width = len(first) + len(f" --steps {max(1, steps // 10)}")
    return (
        f"{first.ljust(width)}  # {steps:,} steps each, side by side\n"
        f"{first} --steps {max(1, steps // 10)}  # a tenth of them, kept under a name of its own"
    )


def train_name(run: Run) -> str:
    """What `workbench train` knows its recipe by: a shipped name, or the file."""
    shipped = run.name in recipe_names() and load_recipe(run.name).experiment == run.recipe.experiment
    return run.name if shipped else shlex.quote(str(run.path / "recipe.toml"))


def train_it(run: Run) -> None:
    """The command, and the recipe."""
    st.markdown("**Train it**")
    st.code(commands(run), language="bash")
    if not run.recipe.training.probes and run.recipe.training.steps:
        st.caption("Its recipe asks for no probes. To watch heads and composition form, train it from a copy with")
        st.code(WATCH, language="toml")
    with st.expander("Its recipe"):
        st.code((run.path / "recipe.toml").read_text(encoding="utf-8"), language="toml")


def unfinished() -> None:
    """Runs that are still training, or were stopped."""
    rows = _unfinished(str(runs_folder()))
    if rows:
        st.markdown("**Not finished**")
        head = ["model", "seed", "step", "of", "training loss", "held-out loss", "held-out accuracy"]
        st.html(STYLE + journal_html(head, rows, range(1, len(head))))
        st.caption("Still training, or stopped: `workbench train NAME --seeds N --resume` goes on with it.")


@st.cache_data(ttl=5, max_entries=4, show_spinner=False)
def _unfinished(folder: str) -> list[list[str]]:
    """What the last line of each says that logged anything; those that cannot be read are named in the side bar."""
    rows = []
    for run in sorted(Path(folder).glob("*/seed-*")):
        if (run / "run.json").exists() or not (run / "metrics.jsonl").exists():
            continue
        try:
            recipe, lines = read_recipe(run / "recipe.toml"), read_metrics(run)
        except (WorkbenchError, OSError):
            continue
        if lines:
            curves = metrics_curves(recipe.name, recipe.seeds.initialisation, lines)
            losses = [_plain(values[-1]) for values in (curves.loss, curves.held_out_loss)]
            accuracy = curves.held_out_accuracy[-1]
            rows.append([
                recipe.name, str(curves.seed), f"{curves.steps[-1]:,}", f"{recipe.training.steps:,}", *losses,
                _rate(accuracy),
            ])  # fmt: skip
    return rows


def downloads(view: View, curves: Curves, panels: Sequence[str], figure: "go.Figure") -> None:
    drawn = panels if curves.probed else METRICS
    report = DynamicsReport(curves.runs, curves.changes, curves.told)
    show.downloads(f"training-{view.entry.name}", figure, partial(records, curves.runs, drawn), lambda: report.data)


def records(runs: Sequence[Dynamics], panels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every number that is drawn: one dict a seed, score and step; `chance` is empty where there is no null."""
    for run in runs:
        for panel in (panel for panel in panels if run.has(panel)):
            curve = run.curve(panel)
            for step, value, bound in zip(run.steps.tolist(), curve.values, curve.bound, strict=True):
                yield {
                    "model": run.model, "seed": run.seed, "score": panel, "step": step,
                    "value": _known(value), "chance": _known(bound),
                }  # fmt: skip


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def snippet(view: View, curves: Curves, panels: list[str], step: int) -> str:
    """The Python that makes the page's figure. It runs as it stands, in a notebook or a script."""
    name, seeds = json.dumps(view.entry.name), [run.seed for run in curves.runs]
    if curves.probed:
        return f"""\
from workbench.dynamics import phase_changes, read_dynamics
from workbench.figures.dynamics import dynamics_figure

runs = [read_dynamics({name}, seed) for seed in {seeds}]
changes = phase_changes(runs, {json.dumps(measures_of(panels), ensure_ascii=False)})
dynamics_figure(runs, changes, panels={json.dumps(panels, ensure_ascii=False)}, cursor={step})
"""
    return f"""\
import workbench as wb
from workbench.figures.training import metrics_figure

metrics = {{seed: wb.load({name}, seed=seed).metrics for seed in {seeds}}}
metrics_figure({name}, metrics, chance={view.run.task.chance}, cursor={step})
"""


def _and(parts: Sequence[Any]) -> str:
    words = [str(part) for part in parts]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
