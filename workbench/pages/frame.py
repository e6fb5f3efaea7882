"""The side bar, the same on every page: model, prompt, its pair, position. All of it is in the URL."""

import logging
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st

import workbench
from circuits.errors import CircuitError
from workbench.errors import BadPrompt, UnknownName, WorkbenchError
from workbench.figures import style
from workbench.pages import cache, pairs, upload
from workbench.pages.cache import Entry, Side
from workbench.runs import Run

if TYPE_CHECKING:
    from workbench.tasks import Task

Refusal = (WorkbenchError, CircuitError)
"""What a user can put right: said in one line, never a traceback."""
OPENS_ON = "winograd-2"
LONGEST = 300
"""Characters of either end of a refusal."""
MEAN = "mean"
"""The state `head` where no single head is chosen."""
LOOK = """<style>
.stMainBlockContainer { max-width: 68rem; padding: 3.2rem 2.5rem 4rem; }
.stMainBlockContainer .stVerticalBlock { gap: .8rem; }
.stSidebar .stVerticalBlock { gap: .7rem; }
[data-testid=stWidgetLabelRequired] { display: none; }
.stPlotlyChart :is(.cartesianlayer, .infolayer) text { fill: currentColor !important; }
[class*=st-key-wide-] { overflow-x: auto; }
[class*=st-key-wide-] .stElementContainer { min-width: 54rem; }
:is(.st-key-heads, .st-key-heads_table) svg g.scatterlayer { cursor: pointer; }
.st-key-heads_tall [class*=st-key-wide-] { overflow: visible; }
[data-testid=stLayoutWrapper]:has(> .st-key-wide-heads_headings) {
  position: sticky; top: 0; z-index: 9; min-width: 54rem; background: light-dark(#fdfdfc, #16171a);
}
:root { --ring: 2px solid light-dark(#5457d6, #8b8ef5); }
[role=option][data-focus-visible] { outline: var(--ring); outline-offset: -2px; }
.stApp :focus-visible { outline: var(--ring) !important; outline-offset: 1px; }
.stApp :is(main, canvas, [role=region], [data-testid=stSidebarNavLink]):focus-visible { outline-offset: -2px; }
.stApp :is(input, textarea):focus-visible { outline: none !important; }
:is([role=group], [data-testid$=RootElement]):has(> :is(input, textarea):focus-visible) {
  outline: var(--ring); outline-offset: -2px;
}
:is(label:has(> * > input), [data-rac]:has(> * > [type=range])):has(input:focus-visible) {
  outline: var(--ring); outline-offset: 2px; border-radius: .3rem;
}
.stApp :is(.modebar, [data-testid=stElementToolbar]):focus-within { opacity: 1 !important; }
.stSidebar .stMarkdownBadge { background: light-dark(#e9e9e4, #2b2d32) !important; color: inherit !important; }
.st-key-mistakes button { min-height: 1.7rem; padding: 0; }
.st-key-mistakes button p { font: .84rem/1.3 "Source Code Pro", monospace; text-align: left; }
.st-key-training_step { position: sticky; top: 3.75rem; z-index: 9; background: light-dark(#fdfdfc, #16171a); }
@media (min-width: 641px) {
  .wb-journal tr > :first-child { position: sticky; left: 0; background: light-dark(#fdfdfc, #16171a); }
}
@media (max-width: 640px) { .stMainBlockContainer { padding: 3.2rem 1rem 3rem; } }
</style>"""


@dataclass(frozen=True)
class View:
    """What the frame is set to. Prompts are ones that the task can encode."""

    entry: Entry
    run: Run
    prompt: str
    other: Side | None
    """What it is compared with: another prompt, or another model on the same one."""
    destination: int
    seeds: tuple[Entry, ...]
    """Every seed of this model, itself among them."""
    unread: Exception | None = None
    """Why the prompt that stands in the side bar is not the one here, which is the task's first."""
    unread_b: Exception | None = None
    """Why there is no second prompt."""

    @property
    def sides(self) -> list[Side]:
        a = Side(self.entry, self.prompt)
        return [a] if self.other is None else [a, self.other]

    @property
    def against(self) -> str | None:
        """The second prompt."""
        return None if self.other is None else self.other.text

    @property
    def roles(self) -> dict[str, int]:
        """The named places of the prompts; none unless all of them are of the task's form."""
        places = [pairs.roles(self.run.task, side.text) for side in self.sides]
        return places[0] if all(places) else {}

    @property
    def letters(self) -> tuple[str, str]:
        """A and B, with what sets two models apart."""
        if self.other is None or (self.other.step is None and self.other.entry == self.entry):
            return "A", "B"
        if self.other.step is not None:
            return "A · end", f"B · step {self.other.step}"
        return f"A · seed {self.entry.seed}", f"B · seed {self.other.entry.seed}"


def begin(title: str) -> None:
    """The page's measure and its title."""
    st.html(LOOK)
    st.title(title, anchor=False)


def choose(reads_prompt: bool = True) -> View:
    """Draw the frame and return what it is set to; where there is nothing to show, say why and stop.

    A page that can do without the prompt is shown whatever stands there, and says where it would be read why it is not.
    """
    with st.sidebar:
        entry, seeds = _model()
    run = _load(entry)
    if "refused" in st.session_state:
        st.error(prose(st.session_state.pop("refused")))
    other = refused = unread = None
    with st.sidebar:
        prompt = _prompt(run)
        try:
            other = _pair(run, entry, seeds, prompt)
        except Refusal as error:
            refused = error
    try:
        tokens = run.str_tokens(run.encode(prompt))
    except Refusal as error:
        if reads_prompt:
            refuse(error)
            st.stop()
        tokens = run.str_tokens(run.encode(prompt := pairs.first_prompt(run.task)))
        other, refused, unread = None, None, error
    with st.sidebar:
        destination = _position(run, tokens) if unread is None else _usual(run, tokens)
        upload.offer(_added)
    if other is not None:
        try:
            cache.loaded(other.entry, other.step).encode(other.text)
        except Refusal as error:
            refused = error
    if refused is not None and reads_prompt:
        refuse(refused, "B: ")
    other = None if refused else other
    return View(entry, run, pairs.normal(run.task, prompt), other, destination, tuple(seeds), unread, refused)


def run_page(page: Callable[[], None], title: str) -> None:
    """The page; if it fails it says why in its place, and the frame and the other pages stand."""
    try:
        page()
    except Refusal as error:
        refuse(error)
    except Exception as error:
        logging.getLogger(__name__).exception("the page %s failed", title)
        what = literal(f"{type(error).__name__}: {error}")
        st.error(f"This page could not be computed ({what}). The other pages still work; the server's log has more.")


def literal(text: str) -> str:
    """Text as Markdown that shows it unchanged."""
    return re.sub(r"([\\`*_\[\]#~$<>&]|:(?=\w))", r"\\\1", text)


def prose(text: str) -> str:
    """As `literal`, but what stands between backticks is set as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0 or "" in parts[1::2]:
        return literal(text)
    return "".join(f"`{part}`" if i % 2 else literal(part) for i, part in enumerate(parts))


def refuse(error: Exception, where: str = "") -> None:
    """In one line; of an endless word that it quotes both ends."""
    text, said = str(error), literal if isinstance(error, (UnknownName, BadPrompt)) else prose  # two quote the prompt
    st.error(where + said(text if len(text) <= 2 * LONGEST else f"{text[:LONGEST]} … {text[-LONGEST:]}"))


def show(task: "Task", prompt: str) -> None:
    """A callback: this prompt, read where the task's answer is said."""
    st.session_state.prompt = prompt
    length = len(task.vocabulary.encode(prompt))
    st.session_state.at = min(task.answer_position, length - 1)


def _model() -> tuple[Entry, list[Entry]]:
    """The model that is chosen, and all seeds of its name."""
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
                        on_change=_fit_model, args=(entries,))  # fmt: skip
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
    return entry, [other for other in entries if other.name == name]


def _name_faults(faults: list[str]) -> None:
    """Runs that cannot be read, quietly."""
    if faults:
        with st.expander("1 run cannot be read" if len(faults) == 1 else f"{len(faults)} runs cannot be read"):
            for fault in faults:
                st.caption(prose(fault))


def _added(name: str, seed: int) -> None:
    """A callback: show the run that was just added."""
    cache.forget_entries()
    entries, _ = cache.entries()
    _go_to(next(entry for entry in entries if (entry.name, entry.seed) == (name, seed)))
    st.session_state.seed = seed


def _change_task(entries: list[Entry]) -> None:
    """A prompt of another task means nothing: go to the task's first model and its own example."""
    _go_to(min((e for e in entries if e.task == st.session_state.task), key=lambda e: (e.name, e.seed)))


def _go_to(entry: Entry) -> None:
    task = workbench.load_task(entry.task_file)
    st.session_state.model = entry.name
    st.session_state.pair = pairs.ways(task)[0]
    st.session_state.head = MEAN
    show(task, pairs.first_prompt(task))


def _fit_model(entries: list[Entry]) -> None:
    """Keep the chosen head and comparison where the new model has them."""
    seeds = [entry for entry in entries if entry.name == st.session_state.model]
    if st.session_state.get("head", MEAN) not in seeds[0].heads:
        st.session_state.head = MEAN
    ways = pairs.ways(workbench.load_task(seeds[0].task_file), len(seeds), len(seeds[0].checkpoints))
    if st.session_state.get("pair") not in ways:
        st.session_state.pair = ways[0]


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
    except Refusal as error:
        refuse(error)
        st.stop()
    finally:
        waiting.empty()


def _prompt(run: Run) -> str:
    prompt = st.text_area("Prompt", pairs.first_prompt(run.task), height=96, key="prompt", bind="query-params",
                          on_change=_fit_position, args=(run,))  # fmt: skip
    with st.container(horizontal=True, gap="xsmall"):
        st.button("example", on_click=show, args=(run.task, pairs.first_prompt(run.task)))
        st.button("shuffle", icon=":material/shuffle:", on_click=_shuffle, args=(run,), help="a held-out example")
    return prompt


def _shuffle(run: Run) -> None:
    try:
        show(run.task, random.choice(pairs.examples(run.task)))
    except Refusal as error:
        st.session_state.refused = str(error)


def _fit_position(run: Run) -> None:
    """Keep the chosen position where the new prompt has it; one that was not chosen stays the usual one."""
    state = st.session_state
    try:
        length = run.encode(state.prompt).shape[1]
    except Refusal:
        return  # the page says what is wrong with the prompt
    if state.get("at") in (None, state.get("usual")) or state.at >= length:
        state.at = max(0, min(run.task.answer_position, length - 1))


def _pair(run: Run, entry: Entry, seeds: list[Entry], prompt: str) -> Side | None:
    """The other side, its prompt unchecked. Raises: NoCorpus."""
    ways = pairs.ways(run.task, len(seeds), len(entry.checkpoints))
    way = st.pills("Compared with", ways, default=ways[0], required=True, key="pair", bind="query-params",
                   on_change=_change_way)  # fmt: skip
    if way == pairs.TEXT:
        text = st.text_area("Prompt B", prompt, height=96, key="against", bind="query-params")
        return Side(entry, pairs.normal(run.task, text))
    if way == pairs.SEED:
        others = {other.seed: other for other in sorted(seeds, key=lambda e: e.seed) if other.seed != entry.seed}
        chosen = _one_of("Seed of B", list(others), "seed_b", 0)
        return Side(others[chosen], pairs.normal(run.task, prompt))
    if way == pairs.CHECKPOINT:
        step = _one_of("B after this many steps", list(entry.checkpoints), "step_b", len(entry.checkpoints) // 2)
        return Side(entry, pairs.normal(run.task, prompt), step)
    against = pairs.counterpart(run.task, prompt, way or pairs.NONE)
    if way in (pairs.ADJECTIVE, pairs.NOUNS) and against is None:
        what = "adjective" if way == pairs.ADJECTIVE else "two nouns in their places"
        st.caption(f"This prompt has no {what} to swap.")
    st.session_state.last_pair = against or prompt
    return None if against is None else Side(entry, against)


def _one_of(label: str, options: list[int], key: str, index: int) -> int:
    """A choice that falls back where a model has no such number."""
    if key in st.session_state and st.session_state[key] not in options:
        del st.session_state[key]
    chosen = st.selectbox(label, options, index=index, key=key, bind="query-params")
    return options[index] if chosen is None else chosen


def _change_way() -> None:
    """Free text begins with the pair that was shown."""
    st.session_state.against = st.session_state.get("last_pair", st.session_state.prompt)


def _position(run: Run, tokens: list[str]) -> int:
    labels = [literal(label) for label in style.plain_labels(tokens)]
    default = st.session_state.usual = _usual(run, tokens)
    with st.container(height=260 if len(tokens) > 48 else "content", border=False):
        at = st.pills("Position", range(len(tokens)), default=default, format_func=labels.__getitem__,
                      required=True, key="at", bind="query-params")  # fmt: skip
    return default if at is None else at


def _usual(run: Run, tokens: list[str]) -> int:
    """Where the task's answer is said, or the prompt ends before."""
    return min(run.task.answer_position, len(tokens) - 1)
