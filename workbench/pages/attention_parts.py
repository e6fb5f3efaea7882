"""The parts of the attention page, top to bottom."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import streamlit as st

from workbench.figures import attention_figure, numbers, roles_figure, style, thumbnails_figure, words
from workbench.figures.numbers import Direction, Head
from workbench.pages import cache, export, frame, show
from workbench.pages.cache import Side, Target
from workbench.pages.frame import MEAN, View, literal, prose
from workbench.wording import percent

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from circuits.attention import AttentionMaps, Measure
    from circuits.scores import Scores

MANY_BLOCKS, BLOCKS_AT_ONCE = 4, 3
MANY_HEADS = 24
"""More are chosen from a list instead of chips."""
LINES = 4
"""Lines of thumbnails; more scroll."""
DEAREST = 4_096
"""Heads × tokens up to which the effect of every head on a prompt is offered: it takes 40 passes a head."""
MEASURES: dict[str, "Measure"] = {"attention": "attention", "× value norm": "moved", "→ a logit": "logit"}
DIRECTIONS: dict[str, Direction] = {"what it looks at": "from", "who looks at it": "to"}
IN_ORDER = "block by block"
RANKS = [IN_ORDER, *cache.MEASURES, cache.EFFECT]

EXPLANATION = """\
**A map** shows where a head looks. A row is the position that looks (the destination), a column the position that is
looked at (the source), the colour the weight from 0 to 1 after the softmax. A row sums to 1: what one word gains,
others lose. A position sees itself and what came before it; the rest is a gap, not a zero.

**The mean of the heads** of a block hides heads that disagree: choose a head to see it alone.

**× value norm** weighs each cell by how much it moves: attention times the norm of what the head would write from that
source. A head that rests on a word with nothing to say goes pale.

**→ a logit** is what each cell adds straight to one logit of its row, or to the difference of two; what later blocks
make of it is not in it. The heads of a block are added up.

**B − A** is the change of each cell when A becomes B: brown more, teal less. Rows before the first word that differs
show none. If the lengths differ, positions do not correspond, and there is no difference to show.

**Scores of heads** are measured on 12 random sequences that repeat, entropy (in nats) too; *effect here* is what the
logit loses when the head writes its mean over held-out sentences instead. Each has its null: the same head turned at
random. One head in twenty leaves a 95 % band by chance.

**What it does not say.** A weight tells how much is read, not what is read nor whether the answer depends on it. A map
suggests a mechanism; only cutting the edge and watching the answer confirms it.
"""


@dataclass(frozen=True)
class Shown:
    """One side of the page."""

    letter: str
    side: Side
    tokens: list[str]
    maps: "AttentionMaps"
    destination: int

    @property
    def at(self) -> int:
        """The destination, or the last position of a prompt that is shorter."""
        return min(self.destination, len(self.tokens) - 1)


@dataclass(frozen=True)
class Look:
    """What is shown of the maps."""

    head: Head | None
    layers: list[int] | None
    direction: Direction
    measure: "Measure"
    target: Target | None
    what: str
    """The logit, in words."""
    letters: tuple[str, str]

    def rows(self, p: Shown) -> list[tuple[str, list[float]]]:
        return numbers.attention_rows(p.maps, p.tokens, self.head, p.at, self.layers, self.direction)


def read(view: View) -> list[Shown]:
    """Both sides with their attention."""
    run, shown = view.run, []
    for letter, side in zip(view.letters, view.sides, strict=False):
        tokens = run.str_tokens(run.encode(side.text))
        shown.append(Shown(letter, side, tokens, cache.maps(side), view.destination))
    return shown


def label(prompt: Shown, prompts: list[Shown]) -> str:
    """A or B where there are two."""
    return prompt.letter if len(prompts) > 1 else ""


def other(prompt: Shown, prompts: list[Shown]) -> list[str] | None:
    """The tokens of the prompt that this one is compared with."""
    return next((p.tokens for p in prompts if p is not prompt), None)


def next_words(prompts: list[Shown], vocabulary: Sequence[str], roles: Mapping[str, int]) -> None:
    """Each prompt with the words that the model gives most to, at the destination."""
    first = [numbers.next_words(p.maps, vocabulary, p.at, n=1)[0][0] for p in prompts]
    lines = []
    for p in prompts:
        likely = numbers.next_words(p.maps, vocabulary, p.at, n=3, also=first)
        lines.append(words.prompt_line(p.tokens, p.at, likely, label(p, prompts), other(p, prompts), roles))
    st.html(words.STYLE + "".join(lines) + words.key(prompts[0].at, prompts[0].tokens, roles))


def measured(prompts: list[Shown], measure: "Measure", target: Target | None) -> list[Shown]:
    """The same with maps of another measure. Raises: CircuitError where the model has none."""
    return [Shown(p.letter, p.side, p.tokens, cache.maps(p.side, measure, target), p.destination) for p in prompts]


def choose_measure() -> tuple[Direction, "Measure"]:
    """Which way to look, and what the cells hold."""
    ways = list(DIRECTIONS)
    way = st.segmented_control("Direction", ways, default=ways[0], required=True, key="way", bind="query-params",
                               label_visibility="collapsed")  # fmt: skip
    kinds = list(MEASURES)
    kind = st.segmented_control("Cells", kinds, default=kinds[0], required=True, key="cells", bind="query-params",
                                label_visibility="collapsed")  # fmt: skip
    return DIRECTIONS[way or ways[0]], MEASURES[kind or kinds[0]]


def choose_target(prompts: list[Shown], vocabulary: Sequence[str]) -> tuple[Target, str]:
    """The logit that contributions and effects are about, and its name: by default what sets the two answers apart."""
    likely = [int(p.maps.probabilities[p.at, : len(vocabulary)].argmax()) for p in prompts]
    targets: dict[str, Target] = {}
    if len(set(likely)) == 2:
        a, b = likely
        targets[f"{style.visible(vocabulary[a])} − {style.visible(vocabulary[b])}"] = Target(a, b)
    for token in dict.fromkeys([*likely, *range(len(vocabulary))]):
        targets.setdefault(style.visible(vocabulary[token]), Target(token, None))
    state, usual = st.session_state, next(iter(targets))
    before, state.usual_logit = state.get("usual_logit", usual), usual
    if "logit" in state and (state.logit not in targets or (state.logit == before and before != usual)):
        state.logit = usual  # one that was not chosen follows the prompt, so that a link shows the same
    name = st.selectbox("Logit of", list(targets), key="logit", bind="query-params", label_visibility="collapsed",
                        width=220, help="a single word is taken minus the mean of all words")  # fmt: skip
    target = targets.get(name or "", next(iter(targets.values())))
    words = [f"‘{style.visible(vocabulary[token])}’" for token in target if token is not None]
    return target, " − ".join(words)


def choose_head(maps: "AttentionMaps") -> tuple[Head | None, list[int] | None]:
    """The head to show, None for all of a block; and then, of a deep model, the blocks to show, None for all."""
    how = "sum" if maps.measure == "logit" else "mean"
    mean = "the only head" if maps.n_heads == 1 else f"{how} of {maps.n_heads} heads"
    heads = [(layer, head) for layer in range(maps.n_layers) for head in range(maps.n_heads)]
    named = {numbers.head_name(head): head for head in heads} if maps.n_heads > 1 else {}
    if st.session_state.get("head", MEAN) not in (MEAN, *named):
        st.session_state.head = MEAN
    if len(heads) <= MANY_HEADS:
        name = st.pills(
            "Head", [MEAN, *named], default=MEAN, required=True, key="head", bind="query-params",
            format_func=lambda name: mean if name == MEAN else name, label_visibility="collapsed",
        )  # fmt: skip
    else:
        name = st.selectbox("Head", [MEAN, *named], key="head", bind="query-params", width=220)
    head = named.get(name or MEAN)
    return head, None if head or maps.n_layers <= MANY_BLOCKS else _blocks(maps.n_layers)


def _blocks(n_layers: int) -> list[int]:
    firsts = range(0, n_layers, BLOCKS_AT_ONCE)
    parts = {f"blocks {i + 1}–{min(i + BLOCKS_AT_ONCE, n_layers)}": i for i in firsts}
    part = st.pills("Blocks", list(parts), default=next(iter(parts)), required=True, key="blocks", bind="query-params",
                    label_visibility="collapsed")  # fmt: skip
    first = parts.get(part or "", 0)
    return list(range(first, min(first + BLOCKS_AT_ONCE, n_layers)))


def sentence(prompts: list[Shown], look: Look) -> str:
    """What the destination looks at most."""
    pairs = [part for p in prompts for part in (look.rows(p), p.tokens)]
    letters = ("A", "B")
    what = f"the logit of {look.what}" if "−" not in look.what else look.what
    return numbers.summary(*pairs, direction=look.direction, measure=look.measure, what=what, letters=letters)  # pyright: ignore


def no_difference(a: Shown, b: Shown) -> str:
    """Why there is no B − A, and where B is read."""
    why = f"A has {len(a.tokens)} words and B {len(b.tokens)}: their positions do not correspond, so there is no B − A."
    return why if a.at == b.at else f"{why} B is shown at its last position, {b.at} ‘{style.visible(b.tokens[b.at])}’."


def figure(prompts: list[Shown], look: Look, vocabulary: tuple[str, ...], roles: Mapping[str, int]) -> "go.Figure":
    """The maps of one prompt or two. Drawn once for all sessions that look at the same."""
    sides = tuple((p.side.run, p.side.text) for p in prompts)
    return _figure((sides, prompts[0].at, *astuple(look)), prompts, look, vocabulary, roles)


@st.cache_resource(max_entries=64, show_spinner=False)
def _figure(
    key: tuple[Any, ...], _prompts: list[Shown], _look: Look, _vocabulary: tuple[str, ...], _roles: Mapping[str, int]
) -> "go.Figure":
    a, b = _prompts[0], _prompts[1] if len(_prompts) > 1 else None
    return attention_figure(
        a.maps, a.tokens, b and b.maps, b and b.tokens, _look.head, a.at, vocabulary=_vocabulary, roles=_roles,
        layers=_look.layers, direction=_look.direction, what=_look.what, letters=_look.letters, clickable=True,
    )  # fmt: skip


def chart(figure: "go.Figure", direction: Direction) -> None:
    """The maps; a click on a cell takes its row for the position, or its column where that is what is framed."""

    def touched() -> None:
        points = st.session_state.maps.selection.points
        if points:
            st.session_state.at = points[0]["y" if direction == "from" else "x"]

    show.chart(figure, "maps", touched)


def heads(p: Shown, look: Look, both: bool, target: Callable[[], tuple[Target, str]]) -> None:
    """A thumbnail of every head, ranked; a click on one shows it alone."""

    def touched() -> None:
        points = st.session_state.heads.selection.points
        if points:
            name = str(points[0]["customdata"])
            st.session_state.head = MEAN if st.session_state.get("head") == name else name

    n = p.maps.n_layers * p.maps.n_heads
    ranks = RANKS if n * len(p.tokens) <= DEAREST else RANKS[:-1]
    if st.session_state.get("rank") not in ranks:
        st.session_state.pop("rank", None)
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        st.markdown(f"**All heads{f' of {p.letter}' if both else ''}**")
        rank = st.selectbox("Ranked by", ranks, key="rank", bind="query-params", width=220,
                            label_visibility="collapsed", help="ranks the heads by a score") or IN_ORDER  # fmt: skip
        about, what = (look.target, look.what) if look.target or rank != cache.EFFECT else target()
    scores = None
    if rank != IN_ORDER:
        try:
            with st.spinner(f"Scoring {n} heads and their nulls …"):
                scores = cache.scores(p.side, rank, p.at, about)
        except frame.Refusal as error:
            st.info(prose(str(error)))
    order = numbers.ranked(p.maps, scores, ascending=rank == "entropy")
    figure = thumbnails_figure(
        p.maps, p.tokens, p.at, direction=look.direction, scores=scores, order=order, chosen=look.head
    )
    height = int(figure.layout.height)  # pyright: ignore
    lines = -(-n // 12)
    show.chart(figure, "heads", touched, buttons=False, height=round(height / lines * LINES) if lines > LINES else None)
    st.caption(literal(_about_heads(p, look, rank if scores is not None else IN_ORDER, what, scores)))


def _about_heads(p: Shown, look: Look, rank: str, what: str, scores: "Scores | None") -> str:
    at = f"{p.at} ‘{style.visible(p.tokens[p.at])}’"
    pale = f"Pale: hardly any of it {'from' if look.direction == 'from' else 'to'} {at}, itself left out."
    if scores is None:
        return f"Click a head to see it alone. Colours here go by the square root, so that faint heads show. {pale}"
    how = {
        "entropy": "the sharpest first (nats, on repeated random sequences)",
        cache.EFFECT: f"most helpful first: what {what} loses at {at} without the head (logits)",
    }.get(rank, "the highest first (on repeated random sequences)")
    band = "Under each score the 95 % band of its null; the frame is solid outside it, dotted inside."
    return f"By {rank}, {how}. {band} {pale}"


def shaded(prompts: list[Shown], look: Look, roles: Mapping[str, int]) -> None:
    """Row by row of the figure: each word shaded by its value."""
    html, every = [], [look.rows(p) for p in prompts]
    values = [abs(value) for rows in every for _, row in rows for value in row]
    top = 1.0 if look.measure == "attention" else max(values, default=1.0)
    for together in zip(*every, strict=True):
        html.append(words.title(together[0][0]))
        for p, (_, row) in zip(prompts, together, strict=True):
            options = {"direction": look.direction, "measure": look.measure, "top": top}
            html.append(words.shaded_words(p.tokens, row, label(p, prompts), roles, other(p, prompts), **options))
    st.html("".join(html))


def role_means(view: View, look: Look) -> None:
    """Mean attention between the task's roles, when it is asked for."""
    if not view.run.task.roles:
        return
    box = st.expander("Mean over the task: which roles look at which", key="roles", on_change="rerun",
                      bind="query-params")  # fmt: skip
    if not box.open:
        return
    with box:
        try:
            with st.spinner("Reading the held-out sequences …"):
                attention = cache.role_means(view.entry.at())
        except frame.Refusal as error:
            frame.refuse(error)
            return
        n, clusters = len(attention.cluster), len(attention.cluster.unique())
        st.caption(
            f"Attention of A, mean over {n} held-out sequences; each row sums to 1. In the hover: ± its standard error "
            f"over {clusters} clusters, and what attention would give that is spread evenly."
        )
        show.chart(roles_figure(attention, look.head, look.layers), "role_maps", wide=False, buttons=False)


def mistakes(view: View) -> None:
    """The held-out sequences that the model gets wrong, when they are asked for; a click shows one."""
    box = st.expander("What it gets wrong", key="wrong", on_change="rerun", bind="query-params")
    if not box.open:
        return
    with box:
        try:
            with st.spinner("Reading the held-out sequences …"):
                found = cache.mistakes(view.entry.at())
        except frame.Refusal as error:
            frame.refuse(error)
            return
        if not found.wrong:
            st.caption(f"Nothing: it is right on all {found.n} held-out sequences.")
            return
        more = "" if len(found.listed) == found.wrong else f", {len(found.listed)} shown"
        share = percent(found.wrong / found.n)
        st.caption(f"A: {found.wrong} of {found.n} held-out sequences ({share}), its surest mistakes first{more}.")
        with st.container(key="mistakes", height=320 if len(found.listed) > 8 else "content", gap=None):
            for i, wrong in enumerate(found.listed):
                said = f"‘{style.visible(wrong.said)}’ {percent(wrong.said_probability)}"
                right = f"‘{style.visible(wrong.answer)}’ {percent(wrong.answer_probability)}"
                st.button(literal(f"{wrong.short}: says {said}, right is {right}"), key=f"mistake {i}", type="tertiary",
                          on_click=frame.show, args=(view.run.task, wrong.prompt))  # fmt: skip


def downloads(figure: "go.Figure | None", vocabulary: tuple[str, ...], prompts: list[Shown]) -> None:
    """Files are made when asked for."""
    data, sides = [(p.maps, p.tokens) for p in prompts], [p.side for p in prompts]
    show.downloads(f"attention-{sides[0].entry.name}", figure, partial(export.records, data) if figure else None,
                   partial(export.arrays, sides, vocabulary, data))  # fmt: skip
