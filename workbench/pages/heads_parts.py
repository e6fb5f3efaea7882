"""The parts of the page on heads: the table of all of them, one head in full, and what is claimed and was checked."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st

from workbench.figures import attention_figure, style
from workbench.figures.listing import STYLE, Cell, listing, number, side_by_side, token
from workbench.pages import cache, frame, show
from workbench.pages.cache import RunKey
from workbench.pages.frame import View, literal, prose
from workbench.wording import percent

if TYPE_CHECKING:
    from circuits.entries import Which
    from workbench.head_table import HeadTable

PAGES = Path(__file__).parent
ALL = "all heads"
FEW = 24  # heads up to which chips choose one
TALL = 16  # heads after which the table scrolls
MOST = 5  # tokens, pairs and partners that are listed
IN_ORDER = "block by block"
RANKS = {
    IN_ORDER: None, "previous token": "previous_token", "its own token": "current_token",
    "duplicate token": "duplicate_token", "induction": "prefix_matching", "copying": "copying",
    "OV spectrum": "copying.eigenvalue", "entropy": "entropy_share", "what it is worth": "cost",
}  # fmt: skip
EXPLANATION = """\
**Where a head looks** is measured on 12 sequences of random tokens that repeat after a period of their own: mean
attention to the token before, to the destination's own token, to earlier occurrences of that token (*duplicate*), to
what followed those (*induction*, the prefix-matching score of the 2022 paper). From the last two the attention at the
same distances on sequences that do not repeat is subtracted.

**Copying** is the share of what the head moves that raises the attended token itself; **spectrum** is Σ Re λ / Σ |λ| of
its OV circuit between tokens, +1 where it only copies. **Entropy** is that of a row of attention as a share of even
attention: 0 looks at one place, 1 everywhere.

**The null** of each (grey bar: its middle 95 %) is the same head with its queries, or what it writes, turned at random;
39 draws. A dot inside it is hollow; one in twenty leaves it by chance.

**Without it** is what the held-out loss rises by (nats, at the scored positions) when what the head writes is replaced
by its mean over those sequences; the thin line is its 95 % interval, hollow where that includes 0. Heads back each
other up: one whose work another takes over shows little.

**A role** (previous-token, induction …) needs a score of at least 0.3 above every draw of its null. It says where a
head looks, not what it is used for. **A claim** names the cut that could refute it: ✓ confirmed, ✗ refuted, – untested.
"""


@dataclass(frozen=True)
class Said:
    """A claim in plain values."""

    text: str
    test: str
    heads: tuple[str, ...]
    """That it speaks of."""
    holds: bool | None
    """None: not tested."""
    found: str

    @property
    def mark(self) -> str:
        return "–" if self.holds is None else "✓" if self.holds else "✗"


@dataclass(frozen=True)
class Partner:
    """A head that this one reads, or is read by."""

    other: str
    kind: str
    reads: bool
    """Whether this head is the reader."""
    score: float
    low: float
    high: float
    z: float
    outside: bool


def table(key: RunKey, cut: bool) -> "HeadTable":
    """Every head in numbers; what each is worth, if it is to be cut."""
    found = _table(key, cut)
    if cut:
        _cut_before().add(key)
    return found


@st.cache_data(max_entries=32, show_spinner=False)
def _table(key: RunKey, cut: bool) -> "HeadTable":
    from workbench.claims import defined
    from workbench.head_table import read_heads

    return read_heads(cache.run_of(key), defined(lambda: cache.all_scores(key)), cut=cut)


def known(key: RunKey) -> bool:
    """Whether its heads were cut before, so that there is nothing to wait for."""
    return key in _cut_before()


@st.cache_resource(show_spinner=False)
def _cut_before() -> set[RunKey]:
    return set()


def preview(table: "HeadTable", head: str | None) -> None:
    """What there is to see while every head is cut."""
    from workbench.figures import heads_figure, scores_figure

    figure = heads_figure(table) if head is None else scores_figure(table, head)
    show.chart(figure, "heads_early", buttons=False)
    st.caption("What each head is worth follows: every head is cut on held-out sequences.")


@st.cache_data(max_entries=32, show_spinner=False)
def said(key: RunKey, checked: bool) -> list[Said]:
    """What is claimed of the run; its cuts made if they are to be checked. Raises: CircuitError, WorkbenchError."""
    from circuits import compositions
    from workbench.claims import deciding_claim, defined, scored_claims

    run = cache.run_of(key)
    scores, composition = defined(lambda: cache.all_scores(key)), defined(lambda: compositions(run.model))
    found = scored_claims(
        run, None if isinstance(scores, str) else scores, None if isinstance(composition, str) else composition
    )
    if checked and run.recipe.model.n_layers == 2:
        deciding = defined(lambda: deciding_claim(run))
        found += [] if isinstance(deciding, str) else [deciding]
    return [
        Said(
            c.text,
            c.test,
            _spoken_of(c.circuit),
            c.holds if checked else None,
            _minus(c.verdict.found) if checked else "",
        )
        for c in found
    ]


def _minus(text: str) -> str:
    return text.replace(" -", " −").replace("[-", "[−")


def _spoken_of(circuit: tuple) -> tuple[str, ...]:
    """The heads of a claim's circuit; edges of a whole block name none."""
    heads = []
    for part in circuit:
        if isinstance(part, str):
            heads.append(part)
        elif hasattr(part, "writer"):
            heads += [f"{layer}.{head}" for layer, head in (part.writer, part.reader)]
    return tuple(dict.fromkeys(heads))


@st.cache_data(max_entries=64, show_spinner=False)
def partners(key: RunKey, head: str) -> list[Partner]:
    """Its strongest partners by composition: of each kind whom it reads and who reads it. Raises: CircuitError."""
    from circuits import compositions

    found = []
    for kind, scores in compositions(cache.run_of(key).model).items():
        for reads in (True, False):
            pairs = [p for p in scores.ranked() if f"{p[reads][0]}.{p[reads][1]}" == head]
            for writer, reader in pairs[:2]:
                one = scores[writer, reader]
                other = writer if reads else reader
                low, high = one.band.tolist()
                found.append(Partner(f"{other[0]}.{other[1]}", kind, reads, one.value, low, high, float(one.z),
                                     bool(one.outside)))  # fmt: skip
    return sorted(found, key=lambda partner: -partner.z)


@st.cache_data(max_entries=64, show_spinner=False)
def strongest(key: RunKey, head: str, which: "Which") -> tuple[list[tuple[int, int, float, float, float]], float]:
    """The largest entries of a head's circuit, (row, column, value, low, high) each, and the share of all entries
    outside their band. Raises: CircuitError."""
    from circuits.entries import token_circuit

    found = token_circuit(cache.run_of(key).model, head, which)
    rows, columns, _ = found.circuit.top(MOST)
    entries = [found.at([row], [column]) for row, column in zip(rows.tolist(), columns.tolist(), strict=True)]
    numbers = [tuple(float(x[0, 0]) for x in (e.values, e.low, e.high)) for e in entries]
    listed = [(int(r), int(c), *n) for r, c, n in zip(rows, columns, numbers, strict=True)]
    return listed, found.share_outside()  # pyright: ignore[reportReturnType]


def choose_cuts(heads: tuple[str, ...]) -> bool:
    """Whether every head is cut: of a few at once, of many when it is asked for."""
    if len(heads) <= FEW:
        return True
    return st.toggle("cut every head", key="heads_cut", bind="query-params",
                     help="what each is worth to the held-out loss: a minute or two for a hundred heads")  # fmt: skip


def choose_head(heads: tuple[str, ...]) -> str | None:
    """The head whose page is shown, None for the table."""
    options = [ALL, *heads]
    if st.session_state.get("head_page", ALL) not in options:
        st.session_state.head_page = ALL
    if len(heads) <= FEW:
        name = st.pills("Page of", options, default=ALL, required=True, key="head_page", bind="query-params",
                        label_visibility="collapsed")  # fmt: skip
    else:
        name = st.selectbox("Page of", options, key="head_page", bind="query-params", width=220,
                            label_visibility="collapsed")  # fmt: skip
    return None if name in (None, ALL) else name


def summary(table: "HeadTable") -> str:
    """What the table shows, in one sentence."""
    named: dict[str, list[str]] = {}
    for name, role in table.roles.items():
        for each in filter(None, role.split(", ")):
            named.setdefault(each, []).append(name)
    roles = "; ".join(f"{', '.join(heads)} {role}" for role, heads in named.items()) or "none with a role"
    text = f"{len(table.names)} heads: {roles}."
    costs = next((column for column in table.columns if column.interval), None)
    if costs is None:
        return text
    best = int(costs.values.argmax())
    if not costs.sure[best]:
        return f"{text} No head alone is surely worth anything to the held-out loss."
    return f"{text} Worth most alone is {table.names[best]}: {_without(table, best)}."


def about(table: "HeadTable", head: str) -> str:
    """One head in a sentence: where it looks, and what it is worth."""
    i = table.names.index(head)
    role = table.roles[head]
    looks = (
        f"called {role} for where it looks"
        if role
        else "of no role: no attention score is at least 0.3 and above its null"
    )
    text = f"Head {head} (block {int(head.split('.')[0]) + 1}) is {looks}."
    costs = next((column for column in table.columns if column.interval), None)
    if costs is None:
        return text
    return f"{text} {_without(table, i).capitalize()}."


def _without(table: "HeadTable", i: int) -> str:
    """What the task loses without a head."""
    from workbench.figures.heads import plus

    costs = table.column("cost")
    value, low, high = (plus(float(x[i]), 3) for x in (costs.values, costs.low, costs.high))
    sure = "" if costs.sure[i] else ", which includes 0"
    return (
        f"without it the held-out loss changes by {value} nats (95 % interval {low} … {high}{sure}) and accuracy by "
        f"{plus(100 * table.accuracy_change[i], 1)} points from {percent(table.clean[1])}"
    )


def all_heads(view: View, table: "HeadTable") -> None:
    """The table, sorted; a click on a line opens that head's page."""

    def touched() -> None:
        points = st.session_state.heads_table.selection.points
        if points:
            st.session_state.head_page = str(points[0]["customdata"])

    from workbench.figures import headings_figure, heads_figure

    rank = choose_rank(table)
    if len(table.names) > TALL:
        with st.container(key="heads_tall", height=46 + 30 * TALL, border=False, gap=None):
            show.chart(headings_figure(table), "heads_headings", buttons=False)
            show.chart(heads_figure(table, rank, headings=False), "heads_table", touched, buttons=False)
    else:
        show.chart(heads_figure(table, rank), "heads_table", touched)
    worth = f"; cut on {table.cut_on} held-out sequences in {table.clusters} clusters" if table.cut_on else ""
    trained = ", at the right the score of its role (else induction) over training" if table.histories else ""
    st.caption(literal(f"Grey bar: the middle 95 % of the null; hollow: inside it{worth}{trained}. Click a line for "
                       "its page."))  # fmt: skip


def choose_rank(table: "HeadTable") -> str | None:
    """The column that the table is sorted by."""
    known = [name for name, key in RANKS.items() if key is None or any(c.key == key for c in table.columns)]
    if st.session_state.get("heads_sort") not in known:
        st.session_state.pop("heads_sort", None)
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        st.markdown("**Sorted by**")
        name = st.selectbox("Sorted by", known, key="heads_sort", bind="query-params", width=220,
                            label_visibility="collapsed",
                            help="the highest first; by entropy the sharpest first")  # fmt: skip
    return RANKS[name or IN_ORDER]


def one_head(view: View, table: "HeadTable", head: str) -> None:
    """Scores with their nulls, what it moves and matches, whom it reads, and its map."""
    from workbench.figures import scores_figure

    show.chart(scores_figure(table, head), "head_scores", buttons=False)
    st.html(STYLE)
    key, words = view.entry.at(), view.run.task.vocabulary.words
    parts = []
    for which, title, headings in (
        ("OV", "What it moves: attending to … raises …", ("source", "output", "logits", "by chance")),
        ("QK", "What it matches: from … it looks at …", ("destination", "source", "score", "by chance")),
    ):
        try:
            parts.append(_entries(strongest(key, head, which), words, title, headings))  # pyright: ignore[reportArgumentType]
        except frame.Refusal as error:
            st.caption(prose(f"{title.partition(':')[0]}: {error}"))
    try:
        parts.append(_partners(partners(key, head)))
    except frame.Refusal as error:
        st.caption(prose(f"composition: {error}"))
    st.html(side_by_side(*parts))
    _map(view, head)


def _entries(
    found: tuple[list[tuple[int, int, float, float, float]], float],
    words: tuple[str, ...],
    title: str,
    headings: tuple[str, ...],
) -> str:
    listed, share = found
    rows = [
        [
            token(words[row]),
            token(words[column]),
            number(style.signed(value), low <= value <= high),
            number(f"{style.signed(low)} … {style.signed(high)}", True),
        ]
        for row, column, value, low, high in listed
        if row < len(words) and column < len(words)
    ]
    note = (
        f"The {len(rows)} largest of {len(words):,} × {len(words):,}; {percent(share)} leave their band, 5 % by chance."
    )
    return listing(headings, rows, title, note)


def _partners(found: list[Partner]) -> str:
    rows = [
        [
            Cell("reads" if p.reads else "is read by", p.kind),
            Cell(p.other, "token"),
            number(f"{p.z:+.1f}".replace("-", "−"), not p.outside),
            number(f"{p.score:.2f}", not p.outside),
            number(f"{p.low:.2f} … {p.high:.2f}", True),
        ]
        for p in found[:MOST]
    ]
    return listing(
        ("composition", "head", "z", "score", "by chance"),
        rows,
        "Whom it composes with",
        "By z above chance; what it is worth only a cut can say.",
    )


def _map(view: View, head: str) -> None:
    """Its attention on the prompt, and where to see more of it."""
    if view.unread is not None:
        frame.refuse(view.unread)
        return
    side = view.sides[0]
    tokens = view.run.str_tokens(view.run.encode(side.text))
    layer, index = (int(part) for part in head.split("."))
    at = min(view.destination, len(tokens) - 1)
    figure = attention_figure(
        cache.maps(side), tokens, head=(layer, index), destination=at, roles=view.roles,
        vocabulary=view.run.task.vocabulary.words,
    )  # fmt: skip
    show.chart(figure, "head_map")
    query = {"model": view.entry.name, "seed": str(view.entry.seed), "prompt": side.text}
    with st.container(horizontal=True, gap="small"):
        st.page_link(PAGES / "attention.py", label="On Attention", icon=":material/grid_on:",
                     query_params=query | {"head": head})  # fmt: skip
        st.page_link(PAGES / "circuits.py", label="On Circuits", icon=":material/hub:",
                     query_params=query | {"circuits_what": "OV", "circuits_head": head})  # fmt: skip


def claims(view: View, head: str | None) -> None:
    """What is claimed of the model, or of one head of it, with its checks; they are made when asked for."""
    checked = st.session_state.get("heads_check", False)
    with st.container(horizontal=True, gap="medium", vertical_alignment="center"):
        st.markdown("**What is claimed**")
        checked = st.toggle("check by cutting", checked, key="heads_check", bind="query-params",
                            help="makes the cut that could refute each sentence: up to ten seconds")  # fmt: skip
    try:
        with st.spinner("Cutting what each sentence speaks of …" if checked else "Reading scores …"):
            found = said(view.entry.at(), checked)
    except frame.Refusal as error:
        frame.refuse(error)
        return
    shown = [claim for claim in found if head is None or head in claim.heads]
    if not shown:
        st.caption("Nothing: no score stands out far enough to suggest a sentence.")
        return
    rows = [[Cell(c.mark), Cell(c.text), Cell(f"{c.test}{': ' + c.found if c.found else ''}")] for c in shown]
    st.html(STYLE + listing(("", "claim", "the test and what it found"), rows))


def take_away(view: View, table: "HeadTable", head: str | None) -> None:
    """Files, and the Python of the figure shown."""
    from workbench.figures import heads_figure, scores_figure

    rank = RANKS.get(st.session_state.get("heads_sort", IN_ORDER))
    figure = heads_figure(table, rank) if head is None else scores_figure(table, head)
    name = view.entry.name if head is None else f"{view.entry.name}-{head}"
    show.downloads(f"heads-{name}", figure, lambda: records(table), lambda: asdict(table) | {"columns": records(table)})
    show.python(snippet(view.entry.at(), rank, head))


def records(table: "HeadTable") -> list[dict]:
    """One line a head and column."""
    return [
        {
            "head": name, "role": table.roles.get(name, ""), "measure": column.key, "unit": column.unit,
            "value": float(column.values[i]), "low": float(column.low[i]), "high": float(column.high[i]),
            "of": "its interval" if column.interval else "its null", "outside": bool(column.sure[i]),
        }
        for i, name in enumerate(table.names)
        for column in table.columns
    ]  # fmt: skip


def snippet(key: RunKey, rank: str | None, head: str | None) -> str:
    call = f"heads_figure(table, {json.dumps(rank)})" if rank else "heads_figure(table)"
    call = call if head is None else f"scores_figure(table, {json.dumps(head)})"
    return f"""\
import workbench as wb
from workbench.figures import {call.partition("(")[0]}
from workbench.head_table import read_heads

table = read_heads({show.load_call(key)})
{call}
"""
