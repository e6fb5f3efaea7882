"""The parts of the page Lens, top to bottom."""

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import streamlit as st

from workbench.figures import attribution_figure, lens_figure, listing, patching_figure, patching_records, style, words
from workbench.figures.lens import PARTS, attribution_records, component_words, stream_records
from workbench.pages import cache, frame, show
from workbench.pages.cache import RunKey, Target
from workbench.pages.frame import View, literal, prose
from workbench.wording import percent

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from circuits.lens import Attribution, Neuron, Patching, StreamWords

HOW = ("restored (0 … 1)", "in logits")

EXPLANATION = """\
**What the stream would say.** At each place of the residual stream, from the embedding (bottom) to the output (top),
the last LayerNorm and the unembedding are applied as if the model ended there. The top row is the model's prediction.
Lower rows need not make sense: nothing forces an early stream to be written in the language of the output.

**What each component adds** goes straight to *answer − foil*, the last LayerNorm's scale held fixed. The bars add up to
the model's own difference of logits. It is a sum of what was written, not an effect: if a later head reads an earlier
one, what it makes of it is in its own bar, and without the one the other would change.

**Neurons.** Activation times output weights, straight to answer − foil; the words are those that the output weights
raise and lower most when the neuron is active, read from weights alone.

**Patching** runs B with one activation of A in the place of B's own: 0 restores nothing of the difference between the
two prompts, 1 all of it. Left of the first word that differs both runs are the same, so a patch there is 0, but
for rounding: that is the null. Single patches do not add up, and one that restores little may be backed up by another.

All of it is one prompt or one pair, read by TransformerLens' own tools.
"""


def choose_answers(view: View) -> tuple[Target, str]:
    """Answer and foil: at first what A says and what B says, or what A says next to that."""
    vocabulary = view.run.task.vocabulary.words
    names = {style.visible(str(word)): token for token, word in reversed(list(enumerate(vocabulary)))}
    names = dict(sorted(names.items(), key=lambda pair: pair[1]))
    usual = _usual(view)
    chosen = []
    for key, label, token in (("lens_answer", "Answer", usual.answer), ("lens_foil", "Foil", usual.foil)):
        name = style.visible(str(vocabulary[token or 0]))
        state, kept = st.session_state, f"usual_{key}"
        before, state[kept] = state.get(kept, name), name
        if key in state and (state[key] not in names or (state[key] == before and before != name)):
            state[key] = name  # one that was not chosen follows the prompt, so that a link shows the same
        found = st.selectbox(label, list(names), index=list(names).index(name), key=key, bind="query-params", width=180,
                             help="numbers below are about the logit of the answer minus that of the foil")  # fmt: skip
        chosen.append(names.get(found or name, token))
    target = Target(chosen[0], chosen[1])
    return target, " − ".join(f"‘{style.visible(str(vocabulary[token]))}’" for token in chosen)


def _usual(view: View) -> Target:
    sides = [cache.maps(side).probabilities for side in view.sides]
    at = [min(view.destination, len(probabilities) - 1) for probabilities in sides]
    n = len(view.run.task.vocabulary)
    first, second = sides[0][at[0], :n].topk(2).indices.tolist()
    there = int(sides[-1][at[-1], :n].argmax())
    return Target(first, there if there != first else second)


def stream(view: View) -> "go.Figure":
    """What the stream would say at each place."""
    tokens = _tokens(view)
    st.html(words.STYLE + words.title("What the stream would say at each place"))
    figure = lens_figure(_stream(view.entry.at(), view.prompt), tokens, view.run.task.vocabulary.words,
                         view.destination)  # fmt: skip
    show.chart(figure, "lens_stream")
    return figure


@st.cache_data(max_entries=32, show_spinner=False)
def _stream(key: RunKey, prompt: str) -> "StreamWords":
    from circuits.lens import stream_words

    run = cache.run_of(key)
    return stream_words(run.model, run.encode(prompt))


def components(view: View, target: Target, what: str) -> "Attribution | None":
    """A bar for each component, or why there is none."""
    st.html(words.title(f"What each component adds straight to {what}, at {_here(view)}"))
    try:
        found = _attribution(view.entry.at(), view.prompt, view.destination, target)
    except frame.Refusal as error:
        frame.refuse(error)
        return None
    show.chart(attribution_figure(found, what), "lens_components", wide=False)
    added = float(found.values.sum())
    st.caption(literal(f"Together {style.signed(added)} logits; the model's own difference is "
                       f"{style.signed(found.total)}."))  # fmt: skip
    return found


@st.cache_data(max_entries=64, show_spinner=False)
def _attribution(key: RunKey, prompt: str, position: int, target: Target) -> "Attribution":
    from circuits.lens import attribution

    run = cache.run_of(key)
    return attribution(run.model, run.encode(prompt), position, target.answer, _foil(target))


def sentence(view: View, target: Target, what: str, found: "Attribution | None") -> str:
    """What the model says, from which place on, and which component adds most."""
    at, words = view.destination, view.run.task.vocabulary.words
    lens = _stream(view.entry.at(), view.prompt)
    probabilities = lens.probabilities[:, at, : len(words)]
    said = probabilities.argmax(-1).tolist()
    same = len(said) - next((i for i, token in enumerate(reversed(said)) if token != said[-1]), len(said))
    since = f"as the stream does from “{lens.places[same]}” on" if len(said) > 1 else "as the embedding does"
    text = (
        f"At {_here(view)} {view.entry.name} says ‘{style.visible(str(words[said[-1]]))}’ "
        f"({percent(float(probabilities[-1, said[-1]]))}), {since}"
    )
    if found is None:
        return f"{text}."
    best = int(found.values.abs().argmax())
    most = f"{component_words(found.components[best])} adds {style.signed(float(found.values[best]))}"
    return f"{text}; of the {style.signed(found.total)} logits of {what}, {most}, the largest part."


def neurons(view: View, target: Target, what: str) -> None:
    """The neurons that add most, with the words that they raise and lower."""
    if not view.entry.heads or view.run.recipe.model.attn_only:
        return
    box = st.expander("Neurons that add most, and their words", key="lens_neurons", on_change="rerun",
                      bind="query-params")  # fmt: skip
    if not box.open:
        return
    with box:
        try:
            found = _neurons(view.entry.at(), view.prompt, view.destination, target)
        except frame.Refusal as error:
            frame.refuse(error)
            return
        vocabulary = view.run.task.vocabulary.words

        def listed(tokens: tuple[int, ...]) -> str:
            return "  ".join(style.visible(str(vocabulary[t])) for t in tokens if t < len(vocabulary))

        rows = [
            [
                listing.Cell(f"{neuron.layer}.{neuron.index}", "token"),
                listing.number(style.signed(neuron.activation)),
                listing.number(style.signed(neuron.adds)),
                listing.Cell(listed(neuron.raises), "token"),
                listing.Cell(listed(neuron.lowers), "token"),
            ]
            for neuron in found
        ]
        headings = ("neuron", "activation", f"adds to {what}, logits", "raises", "lowers")
        st.html(listing.STYLE + listing.listing(headings, rows))
        st.caption(literal(f"A neuron is called layer.number. Activations after the non-linearity at {_here(view)}; "
                           "words by its output weights alone."))  # fmt: skip


@st.cache_data(max_entries=64, show_spinner=False)
def _neurons(key: RunKey, prompt: str, position: int, target: Target) -> "list[Neuron]":
    from circuits.lens import neurons

    run = cache.run_of(key)
    return neurons(run.model, run.encode(prompt), position, target.answer, _foil(target))


def patching(view: View, target: Target, what: str) -> "Patching | None":
    """Grids of what one activation of A restores in B, when they are asked for; or why there are none."""
    box = st.expander("Patching: what one activation of A restores in B", key="lens_patching", on_change="rerun",
                      bind="query-params")  # fmt: skip
    if not box.open:
        return None
    with box:
        why = _no_patching(view)
        if why:
            st.info(prose(why))
            return None
        how = st.segmented_control("Cells", HOW, default=HOW[0], required=True, key="lens_cells", bind="query-params",
                                   label_visibility="collapsed", help="0 is B as it is, 1 is A")  # fmt: skip
        normalised = how != HOW[1]
        assert view.against is not None
        try:
            with st.spinner("Running B once for each cell …"):
                found = _patching(view.entry.at(), view.prompt, view.against, view.destination, target)
            tokens, other = _tokens(view), view.run.str_tokens(view.run.encode(view.against))
            figure = patching_figure(found, tokens, other, normalised=normalised, clickable=True)
        except frame.Refusal as error:
            frame.refuse(error)
            return None
        st.caption(literal(f"{what} at {_here(view)}: {style.signed(found.clean)} logits in A, "
                           f"{style.signed(found.corrupted)} in B. Dotted: the words that differ. Click a cell to read "
                           "it."))  # fmt: skip
        show.chart(figure, "lens_grid", touched=_touched)
        _touched_cell(view, found, what)
        if found.heads.shape[-1] != len(tokens):
            st.caption("Heads are patched one position at a time only in prompts that are shorter, or smaller models.")
        return found


def _touched() -> None:
    points = st.session_state.lens_grid.selection.points
    st.session_state.lens_cell = list(points[0]["customdata"]) if points else None


def _touched_cell(view: View, found: "Patching", what: str) -> None:
    """The cell that was clicked, in words."""
    cell = st.session_state.get("lens_cell")
    if not cell or int(cell[2]) >= len(_tokens(view)):
        return
    title, row, j = cell[0], str(cell[1]), int(cell[2])
    part = next((name for name, said in PARTS.items() if said == title), None)
    try:
        if part is None:
            layer, head = (int(number) for number in row.split("."))
            value = float(found.heads[layer, head, j])
        else:
            value = float(found.parts[part][int(row.removeprefix("block ")) - 1, j])
    except (KeyError, IndexError, ValueError):
        return  # of another model
    restored = float(found.restored(found.heads.new_tensor(value)))
    name = f"head {row}" if part is None else row
    st.markdown(literal(
        f"{title.capitalize()}, {name}, at {j} ‘{style.visible(_tokens(view)[j])}’, taken from A: B's {what} goes from "
        f"{style.signed(found.corrupted)} to {style.signed(value)} logits, {percent(restored)} of the way to A's "
        f"{style.signed(found.clean)}."
    ))  # fmt: skip


def _no_patching(view: View) -> str:
    """Why there is no grid, or nothing."""
    from circuits.lens import MOST_RUNS

    if not view.entry.heads:
        return f"{view.entry.name} has no layers, so there is no activation to patch."
    if view.other is None:
        return "Patching compares two prompts: choose a pair under “Compared with”."
    if view.other.entry != view.entry or view.other.step is not None:
        return "A and B are two models here: an activation of one means nothing in the other. Choose a pair of prompts."
    config, length = view.run.recipe.model, len(_tokens(view))
    other = len(view.run.str_tokens(view.run.encode(view.other.text)))
    if other != length:
        return f"A has {length} words and B {other}: their positions do not correspond, so there is no grid."
    runs = config.n_layers * length * (2 if config.attn_only else 3)
    if runs > MOST_RUNS:
        return f"This grid would take {runs:,} runs, more than {MOST_RUNS:,}: choose a shorter prompt."
    return ""


@st.cache_data(max_entries=32, show_spinner=False)
def _patching(key: RunKey, clean: str, corrupted: str, position: int, target: Target) -> "Patching":
    from circuits.lens import patching

    run = cache.run_of(key)
    return patching(run.model, run.encode(clean), run.encode(corrupted), position, target.answer, _foil(target))


def downloads(view: View, figure: "go.Figure", added: "Attribution | None", patched: "Patching | None") -> None:
    """The stream's figure and numbers; what components add, and the grids, where they are shown."""
    tokens, vocabulary = _tokens(view), view.run.task.vocabulary.words
    found = _stream(view.entry.at(), view.prompt)
    more: dict[str, Callable[[], show.Records]] = {}
    if added is not None:
        more["components"] = partial(attribution_records, added)
    if patched is not None:
        more["patching"] = partial(patching_records, patched, tokens)
    files = {
        f"{what} (CSV)": (f"{what}.csv", "text/csv", lambda records=records: show.as_csv(records()))
        for what, records in more.items()
    }
    show.downloads(f"lens-{view.entry.name}", figure, partial(stream_records, found, tokens, vocabulary), None,
                   **files)  # fmt: skip


def snippet(view: View) -> str:
    return f"""\
import workbench as wb
from circuits.lens import stream_words
from workbench.figures import lens_figure

run = {show.load_call(view.entry.at())}
tokens = run.encode({json.dumps(view.prompt, ensure_ascii=False)})
found = stream_words(run.model, tokens)
lens_figure(found, run.str_tokens(tokens), run.task.vocabulary.words, {view.destination})
"""


def _here(view: View) -> str:
    return f"{view.destination} ‘{style.visible(_tokens(view)[view.destination])}’"


def _tokens(view: View) -> list[str]:
    return view.run.str_tokens(view.run.encode(view.prompt))


def _foil(target: Target) -> int:
    return target.answer if target.foil is None else target.foil
