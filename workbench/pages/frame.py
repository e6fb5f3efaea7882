"""The side bar, the same on every page: model, prompt, its pair, position. All of it is in the URL."""

import random
import re
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

import workbench
from workbench.errors import WorkbenchError
from workbench.figures import style
from workbench.pages import cache, pairs
from workbench.pages.cache import Entry
from workbench.runs import Run

OPENS_ON = "winograd-2"
MEAN = "mean"
"""The state `head` where no single head is chosen."""
LOOK = """<style>
.stMainBlockContainer { max-width: 68rem; padding: 3.2rem 2.5rem 4rem; }
.stMainBlockContainer .stVerticalBlock { gap: .8rem; }
.stSidebar .stVerticalBlock { gap: .7rem; }
[data-testid=stWidgetLabelRequired] { display: none; }
.st-key-attention { overflow-x: auto; }
.st-key-attention :is(.cartesianlayer, .infolayer) text { fill: currentColor !important; }
.st-key-attention > div { min-width: 54rem; }
@media (max-width: 640px) { .stMainBlockContainer { padding: 3.2rem 1rem 3rem; } }
</style>"""


@dataclass(frozen=True)
class View:
    """What the frame is set to. Prompts are ones that the task can encode."""

    entry: Entry
    run: Run
    prompt: str
    against: str | None
    destination: int

    @property
    def texts(self) -> list[str]:
        return [self.prompt] if self.against is None else [self.prompt, self.against]


def begin(title: str) -> None:
    """The page's measure and its title."""
    st.html(LOOK)
    st.title(title, anchor=False)


def choose() -> View:
    """Draw the frame and return what it is set to; where there is nothing to show, say why and stop."""
    with st.sidebar:
        entry = _model()
    run = _load(entry)
    with st.sidebar:
        prompt = _prompt(run)
        against = _pair(run, prompt)
    try:
        tokens = run.str_tokens(run.encode(prompt))
    except WorkbenchError as error:
        _refuse(error)
        st.stop()
    with st.sidebar:
        destination = _position(run, tokens)
    if against is not None:
        try:
            run.encode(against)
        except WorkbenchError as error:
            _refuse(error, "B: ")
            against = None
    return View(entry, run, prompt, against, destination)


def literal(text: str) -> str:
    """Text as Markdown that shows it unchanged."""
    return re.sub(r"([\\`*_\[\]#~$<>&]|:(?=\w))", r"\\\1", text)


def _refuse(error: WorkbenchError, where: str = "") -> None:
    st.error(where + literal(str(error)))


def _model() -> Entry:
    entries, faults = cache.entries()
    if not entries:
        _name_faults(faults)
        st.info("No trained models yet. Train one: `workbench train winograd-2`, then reload.")
        st.stop()
    by_name = {entry.name: entry for entry in reversed(entries)}
    opening = OPENS_ON if OPENS_ON in by_name else entries[0].name
    if "model" not in st.session_state:
        wanted = st.query_params.get("model", opening)
        if wanted not in by_name:
            st.warning(f"No model is called {literal(repr(wanted))} here; this is {opening}.")
        st.session_state.model = wanted if wanted in by_name else opening
    elif st.session_state.model not in by_name:
        st.session_state.model = opening
    task = st.session_state.task = by_name[st.session_state.model].task
    tasks = sorted({entry.task for entry in entries})
    st.selectbox("Task", tasks, key="task", format_func=lambda task: Path(task).stem,
                 on_change=_change_task, args=(entries,))  # fmt: skip
    names = sorted({entry.name for entry in entries if entry.task == task})
    name = st.selectbox("Model", names, index=None, key="model", bind="query-params", required=True,
                        on_change=_fit_head, args=(entries,))  # fmt: skip
    seeds = sorted(entry.seed for entry in entries if entry.name == name)
    seed = seeds[0]
    if len(seeds) > 1:
        seed = st.selectbox("Seed", seeds, key="seed", bind="query-params")
    entry = next(entry for entry in entries if (entry.name, entry.seed) == (name, seed))
    with st.container(horizontal=True, gap="xsmall"):
        st.badge(entry.score, color="gray", help="on sequences it was not trained on")
        st.badge("shipped" if entry.shipped else "yours", color="gray")
        if len(seeds) == 1:
            st.badge(f"seed {seed}", color="gray")
    st.caption(literal(entry.about))
    _name_faults(faults)
    return entry


def _name_faults(faults: list[str]) -> None:
    """Runs that cannot be read, quietly: in full when they are few."""
    few = len(faults) <= 2
    with st.container() if few else st.expander(f"{len(faults)} runs cannot be read"):
        for fault in faults:
            st.caption(literal(fault))


def _change_task(entries: list[Entry]) -> None:
    """A prompt of another task means nothing: go to the task's first model and its own example."""
    entry = min((e for e in entries if e.task == st.session_state.task), key=lambda e: (e.name, e.seed))
    task = workbench.load_task(entry.task_file)
    st.session_state.model = entry.name
    st.session_state.pair = pairs.ways(task)[0]
    st.session_state.head = MEAN
    _set_prompt(pairs.first_prompt(task), task.answer_position)


def _fit_head(entries: list[Entry]) -> None:
    """Keep the chosen head where the new model has it."""
    heads = next(entry.heads for entry in entries if entry.name == st.session_state.model)
    if st.session_state.get("head", MEAN) not in heads:
        st.session_state.head = MEAN


def _load(entry: Entry) -> Run:
    """The run, with a word on what is awaited, and an empty chart so that the browser fetches Plotly meanwhile."""
    waiting = st.empty()
    if not cache.warm():
        with waiting.container():
            st.caption("Starting PyTorch and TransformerLens: a few seconds, once …")
            st.plotly_chart(style.empty_figure(), key="waiting", config={"displayModeBar": False})
    try:
        cache.warm_up()
        return cache.loaded(entry)
    except WorkbenchError as error:
        _refuse(error)
        st.stop()
    finally:
        waiting.empty()


def _prompt(run: Run) -> str:
    prompt = st.text_area("Prompt", pairs.first_prompt(run.task), height=96, key="prompt", bind="query-params",
                          on_change=_fit_position, args=(run,))  # fmt: skip
    with st.container(horizontal=True, gap="xsmall"):
        st.button("example", on_click=_set_prompt, args=(pairs.first_prompt(run.task), run.task.answer_position))
        st.button("shuffle", icon=":material/shuffle:", on_click=_shuffle, args=(run,), help="a held-out example")
    return prompt


def _shuffle(run: Run) -> None:
    _set_prompt(random.choice(pairs.examples(run.task)), run.task.answer_position)


def _set_prompt(prompt: str, destination: int) -> None:
    st.session_state.prompt = prompt
    st.session_state.at = min(destination, len(prompt.split()) - 1)


def _fit_position(run: Run) -> None:
    """Keep the chosen position where the new prompt has it; one that was not chosen stays the usual one."""
    length, state = len(st.session_state.prompt.split()), st.session_state
    if state.get("at") in (None, state.get("usual")) or state.at >= length:
        state.at = max(0, min(run.task.answer_position, length - 1))


def _pair(run: Run, prompt: str) -> str | None:
    """The second prompt, unchecked."""
    ways = pairs.ways(run.task)
    way = st.pills("Compared with", ways, default=ways[0], required=True, key="pair", bind="query-params",
                   on_change=_change_way)  # fmt: skip
    if way == pairs.TEXT:
        return st.text_area("Prompt B", prompt, height=96, key="against", bind="query-params")
    against = pairs.counterpart(run.task, prompt, way or pairs.NONE)
    if way in (pairs.ADJECTIVE, pairs.NOUNS) and against is None:
        what = "adjective" if way == pairs.ADJECTIVE else "two nouns in their places"
        st.caption(f"This prompt has no {what} to swap.")
    st.session_state.last_pair = against or prompt
    return against


def _change_way() -> None:
    """Free text begins with the pair that was shown."""
    st.session_state.against = st.session_state.last_pair


def _position(run: Run, tokens: list[str]) -> int:
    labels = [literal(label) for label in style.plain_labels(tokens)]
    default = st.session_state.usual = min(run.task.answer_position, len(tokens) - 1)
    with st.container(height=260 if len(tokens) > 48 else "content", border=False):
        at = st.pills("Position that looks", range(len(tokens)), default=default, format_func=labels.__getitem__,
                      required=True, key="at", bind="query-params")  # fmt: skip
    return default if at is None else at
