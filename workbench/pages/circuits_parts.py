"""The parts of the page on circuits: what can be chosen, and those that are figures, each with its null."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import streamlit as st

from workbench.figures import style
from workbench.figures.listing import STYLE, listing, number, side_by_side, token
from workbench.pages import cache, show
from workbench.pages.cache import RunKey
from workbench.pages.circuits_text import BIGRAMS, DIRECTIONS, EIGENVALUES, EXPLANATIONS, OV, PLANE, QK, TRIGRAMS
from workbench.pages.frame import View, literal
from workbench.wording import percent

if TYPE_CHECKING:
    from jaxtyping import Complex
    from streamlit.delta_generator import DeltaGenerator
    from torch import Tensor

    from circuits.entries import TokenCircuit, Which
    from circuits.scores import Scores
    from workbench.positivity import Point

FEW_HEADS = 24  # up to which chips choose one
MOST = 8  # rows of a short list
ANY = "the largest of all"
NAMES = {
    OV: ("source", "output", "logits"),
    QK: ("destination", "source", "score"),
}  # fmt: skip
ENDS = {"source": ("Raised most", "Lowered most"), "destination": ("Looked for most", "Avoided most")}


@st.cache_data(max_entries=16, show_spinner=False)
def circuit(key: RunKey, head: str, which: "Which") -> tuple["TokenCircuit", float]:
    """A head's circuit with the null of its entries, and the share of those outside. Raises: CircuitError."""
    from circuits.entries import token_circuit

    found = token_circuit(cache.run_of(key).model, head, which)
    return found, found.share_outside()


@st.cache_data(max_entries=32, show_spinner=False)
def spectrum(
    key: RunKey, head: str, which: "Which"
) -> tuple["Complex[Tensor, 'd_head']", "Complex[Tensor, 'draw d_head']", "Scores"]:
    """One head's eigenvalues, those of its null, and every head's positivity. Raises: CircuitError."""
    from circuits import eigenvalues
    from circuits.scores import LEAST_DRAWS
    from circuits.turned import spectrum_scores, turned_eigenvalues

    model = cache.run_of(key).model
    layer, index = (int(part) for part in head.split("."))
    drawn = turned_eigenvalues(model, head, which, draws=LEAST_DRAWS)
    return eigenvalues(model, which)[layer, index], drawn, spectrum_scores(model, which, draws=LEAST_DRAWS)


@st.cache_data(max_entries=32, show_spinner=False)
def points(key: RunKey) -> tuple[list["Point"], bool]:
    """Pairs of heads, or the heads of a model of one layer; and which of the two. Raises: CircuitError."""
    from workbench.positivity import head_points, pair_points

    run = cache.run_of(key)
    pairs = run.recipe.model.n_layers > 1
    return (pair_points if pairs else head_points)(run.model), pairs


def choose_what(view: View) -> str:
    """Which part is shown."""
    options = [OV, QK, EIGENVALUES, PLANE, TRIGRAMS, BIGRAMS, DIRECTIONS] if view.entry.heads else [BIGRAMS]
    if st.session_state.get("circuits_what", options[0]) not in options:
        st.session_state.circuits_what = options[0]
    what = st.pills("Show", options, default=options[0], required=True, key="circuits_what", bind="query-params",
                    label_visibility="collapsed")  # fmt: skip
    return what or options[0]


def choose_head(heads: Sequence[str]) -> str:
    if st.session_state.get("circuits_head", heads[0]) not in heads:
        st.session_state.circuits_head = heads[0]
    if len(heads) <= FEW_HEADS:
        name = st.pills("Head", heads, default=heads[0], required=True, key="circuits_head", bind="query-params",
                        label_visibility="collapsed")  # fmt: skip
    else:
        name = st.selectbox("Head", heads, key="circuits_head", bind="query-params", width=160,
                            label_visibility="collapsed")  # fmt: skip
    return name or heads[0]


def choose_side() -> "Which":
    name = st.segmented_control("Circuit", ["OV", "QK"], default="OV", required=True, key="circuits_side",
                                bind="query-params", label_visibility="collapsed")  # fmt: skip
    return "QK" if name == "QK" else "OV"


def choose_token(words: Sequence[str], none: str | None = ANY, usual: int = 0) -> int | None:
    """A token of the vocabulary, found by typing; None where none is chosen."""
    labels = style.plain_labels(words)
    options = labels if none is None else [none, *labels]
    if st.session_state.get("circuits_token", options[0]) not in options:
        st.session_state.pop("circuits_token", None)
    index = usual if none is None else 0
    name = st.selectbox("Token", options, index=index, key="circuits_token", bind="query-params", width=220,
                        label_visibility="collapsed", help="type to search the vocabulary")  # fmt: skip
    return None if name in (None, none) else labels.index(name)


def matrix(which: "Which", view: View, sentence: "DeltaGenerator") -> None:
    """A head's circuit between tokens: all of it where the vocabulary is small, and its largest entries."""
    from workbench.figures import matrix_figure
    from workbench.figures.heads import plus
    from workbench.figures.matrix import LARGEST

    key, words = view.entry.at(), view.run.task.vocabulary.words
    names = NAMES[which]
    head = choose_head(view.entry.heads)
    with st.container(horizontal=True, gap="medium", vertical_alignment="center"):
        chosen = choose_token(words)
        small = len(words) <= LARGEST
        every = small and st.toggle("all entries", key="circuits_all", bind="query-params",
                                    help="also those inside the band that chance gives")  # fmt: skip
    found, share = circuit(key, head, which)
    (row,), (column,), (value,) = found.circuit.top(1)
    best = found.at([int(row)], [int(column)])
    source, other = (f"‘{style.visible(words[int(i)])}’" for i in (row, column))
    band = f"by chance {plus(float(best.low))} … {plus(float(best.high))}"
    does = (
        f"Attending to {source}, head {head} raises {other} most of all: by {plus(float(value))} logits ({band})"
        if which == OV
        else f"From {source}, head {head} looks for {other} most of all: score {plus(float(value))} ({band})"
    )
    sentence.markdown(literal(
        f"{does}. {percent(share)} of all {len(words):,} × {len(words):,} entries leave their band; 5 % would by "
        "chance."
    ))  # fmt: skip
    figure = None
    if small:
        figure = matrix_figure(found.at(), words, words, names[:2], names[2], all_entries=bool(every))
        show.chart(figure, "circuits_matrix")
        st.caption("Blank: inside the middle 95 % of its null. In the hover: the number and its band.")
    else:
        st.caption(f"{len(words):,} tokens: the largest entries are listed; type a token for its row and its column.")
    st.html(STYLE + side_by_side(*_lists(found, words, names, chosen)))
    show.explanation(EXPLANATIONS[which])
    show.downloads(f"{which}-{view.entry.name}-{head}", figure, lambda: _entries(found, words, names, chosen))
    kind = "figure" if small else "table"
    show.python(matrix_code(key, head, which, small, bool(every)), f"The Python that makes this {kind}")


def _lists(found: "TokenCircuit", words: Sequence[str], names: tuple[str, str, str], chosen: int | None) -> list[str]:
    """The largest and smallest entries: of all, or of one token's row and column."""
    from workbench.figures.heads import plus

    listed = []
    for title, places in _places(found, names, words, chosen):
        rows = []
        for row, column in places:
            entry = found.at([row], [column])
            low, high = float(entry.low), float(entry.high)
            rows.append([
                token(words[row]), token(words[column]), number(plus(float(entry.values)), not bool(entry.outside)),
                number(f"{plus(low)} … {plus(high)}", True),
            ])  # fmt: skip
        listed.append(listing((*names, "by chance"), rows, title))
    return listed


def _places(
    found: "TokenCircuit", names: tuple[str, str, str], words: Sequence[str], chosen: int | None
) -> list[tuple[str, list[tuple[int, int]]]]:
    if chosen is None:
        ends = [found.circuit.top(MOST, largest=largest)[:2] for largest in (True, False)]
        pairs = [list(zip(rows.tolist(), columns.tolist(), strict=True)) for rows, columns in ends]
        return list(zip(ENDS[names[0]], pairs, strict=True))
    row, column = found.at([chosen]).values[0], found.at(columns=[chosen]).values[:, 0]
    shown, n = style.visible(words[chosen]), min(MOST, len(words))
    return [
        (f"‘{shown}’ as {names[0]}: most", [(chosen, int(i)) for i in row.topk(n).indices]),
        (f"‘{shown}’ as {names[0]}: fewest", [(chosen, int(i)) for i in (-row).topk(n).indices]),
        (f"‘{shown}’ as {names[1]}: most", [(int(i), chosen) for i in column.topk(n).indices]),
    ]


def _entries(
    found: "TokenCircuit", words: Sequence[str], names: tuple[str, str, str], chosen: int | None
) -> list[dict[str, Any]]:
    """As a table: all entries of a small vocabulary, else those that are listed."""
    from workbench.figures.matrix import LARGEST

    n = range(len(words))
    places = [(i, j) for i in n for j in n] if len(words) <= LARGEST else [
        place for _, some in _places(found, names, words, chosen) for place in some
    ]  # fmt: skip
    rows, columns = (list(axis) for axis in zip(*places, strict=True))
    values = (found.circuit.left[rows] * found.circuit.right[:, columns].T).sum(1)
    half = found.reach * found.row_size[rows] * found.column_size[columns]
    mean = found.null_mean[columns]
    return [
        {names[0]: words[i], names[1]: words[j], names[2]: float(v), "low": float(m - h), "high": float(m + h)}
        for i, j, v, m, h in zip(rows, columns, values, mean, half, strict=True)
    ]


def matrix_code(key: RunKey, head: str, which: str, small: bool, every: bool) -> str:
    names = NAMES[which]
    option = ", all_entries=True" if every else ""
    last = (
        f"matrix_figure(circuit.at(), words, words, {json.dumps(names[:2])}, {json.dumps(names[2])}{option})"
        if small
        else "circuit.circuit.to_frame()"
    ).replace('["', '("').replace('"]', '")')  # fmt: skip
    return f"""\
import workbench as wb
from circuits.entries import token_circuit
{"from workbench.figures import matrix_figure" if small else ""}
run = {show.load_call(key)}
words = run.task.vocabulary.words
circuit = token_circuit(run.model, {json.dumps(head)}, {json.dumps(which)})
{last}
"""


def eigenvalues(view: View, sentence: "DeltaGenerator") -> None:
    from workbench.figures import spectrum_figure
    from workbench.figures.heads import plus

    head, which = choose_head(view.entry.heads), choose_side()
    values, drawn, scores = spectrum(view.entry.at(), head, which)
    one = scores[head]
    low, high = (plus(float(end)) for end in one.band)
    does = {"OV": ("copies", "does the opposite of copying"), "QK": ("matches equal tokens", "avoids equal tokens")}
    says = "no more than chance does" if not bool(one.outside) else f"it mostly {does[which][one.value < 0]}"
    sentence.markdown(literal(
        f"Σ Re λ / Σ |λ| of head {head}’s {which} circuit is {plus(one.value)} (by chance {low} … {high}): {says}."
    ))  # fmt: skip
    figure = spectrum_figure(values, drawn, scores, head, view.entry.heads)

    def touched() -> None:
        picked = [point.get("customdata") for point in st.session_state.circuits_spectrum.selection.points]
        if picked and picked[0] in view.entry.heads:
            st.session_state.circuits_head = picked[0]

    show.chart(figure, "circuits_spectrum", touched, buttons=True)
    st.caption("Haze: the eigenvalues that chance gives, 39 draws. Bars: the middle 95 % of the null; hollow: inside.")
    show.explanation(EXPLANATIONS[EIGENVALUES])
    show.downloads(
        f"eigenvalues-{view.entry.name}-{head}-{which}", figure,
        lambda: [{"head": head, "real": float(v.real), "imaginary": float(v.imag)} for v in values],
    )  # fmt: skip
    layer, index = head.split(".")
    show.python(f"""\
import workbench as wb
from circuits import eigenvalues
from circuits.turned import spectrum_scores, turned_eigenvalues
from workbench.figures import spectrum_figure

model = {show.load_call(view.entry.at())}.model
values = eigenvalues(model, "{which}")[{layer}, {index}]
drawn, scores = turned_eigenvalues(model, "{head}", "{which}", draws=39), spectrum_scores(model, "{which}", draws=39)
spectrum_figure(values, drawn, scores, "{head}", {json.dumps(list(view.entry.heads))})
""")


def plane(view: View, sentence: "DeltaGenerator") -> None:
    from workbench.figures import positivity_figure

    found, pairs = points(view.entry.at())
    corner = [p for p in found if p.sure and p.ov > 0 and p.qk > 0 and min(p.ov, p.qk) > 0.5]
    of = "pairs of a head and a later one" if pairs else "heads"
    names = ", ".join(p.name for p in corner[:6]) + (" and others" if len(corner) > 6 else "")
    sentence.markdown(literal(
        f"{len(corner)} of {len(found)} {of} lie in the corner where induction heads do, both numbers above 0.5 and "
        f"outside their nulls{f': {names}' if names else ''}."
    ))  # fmt: skip
    kind = "K-composed pair" if pairs else "head itself"
    figure = positivity_figure(found, kind)

    def touched() -> None:
        picked = st.session_state.circuits_plane.selection.points
        if picked:
            st.session_state.circuits_head = str(picked[0]["customdata"])
            st.session_state.circuits_what = EIGENVALUES

    show.chart(figure, "circuits_plane", touched, wide=False)
    many = " The 64 with the highest K-composition." if pairs and len(found) == 64 else ""
    st.caption(f"Grey: the middle 95 % of the nulls; hollow: inside one of its own.{many} Click a dot for its head’s "
               "eigenvalues.")  # fmt: skip
    show.explanation(EXPLANATIONS[PLANE])
    show.downloads(f"positivity-{view.entry.name}", figure, lambda: [vars(p) for p in found])
    reader = "pair_points" if pairs else "head_points"
    show.python(f"""\
import workbench as wb
from workbench.figures import positivity_figure
from workbench.positivity import {reader}

positivity_figure({reader}({show.load_call(view.entry.at())}.model), {json.dumps(kind)})
""")
