"""The parts of the page step by step, top to bottom."""

import json
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import streamlit as st

from workbench.figures import plane_figure, scaling_figure, step_records, steps_html, style, told_html, words
from workbench.figures.steps import columns_of
from workbench.pages import cache, frame, show
from workbench.pages.cache import RunKey, Target
from workbench.pages.frame import View, literal
from workbench.wording import percent

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from jaxtyping import Float
    from torch import Tensor

    from circuits.scaling import RandomScores
    from circuits.steps import Steps
    from workbench.recipes import ModelConfig

MANY_HEADS = 24
WIDTHS = (4, 16, 64, 256, 1024)
KEYS = 64
LONGEST_EDIT = 64
"""Numbers of a query, or sources, that can be changed."""
STRENGTHS = {
    "steps_size": ("Δ ×", "what the head writes here, times this: 0 is the model without it at this position"),
    "steps_gain": ("γ ×", "the gain of the last LayerNorm times this: how sharp the prediction is"),
    "steps_bias": ("β ×", "the bias of the last LayerNorm times this: what it says whatever it has read"),
}
LETTERS = {
    "n_layers": "L blocks", "n_heads": "h heads", "d_head": "k width of a head", "d_model": "d width",
    "d_mlp": "m neurons", "n_ctx": "n positions", "d_vocab": "V words",
}  # fmt: skip

EXPLANATION = """\
**One head, one destination, one equation a line.** The numbers are those of this run. A column is a source: follow a
word downwards from its key to what it gives. Touch a cell, or go to a word by Tab, and all that it is computed from
lights up; choose a word under *follow* to keep it lit and have its arithmetic spelled out. Vectors of more than 16
numbers are strips: teal below 0, brown above, on a scale of their own; the tooltip has the numbers.

**Without scale, without mask** is what this head, trained with them, would do: q·k undivided, or later words seen with
the keys and values that they have in this run. All other heads stay as they were. The division keeps scores of random
vectors at a variance of 1 (*Why divide by √d_k?*).

**Other numbers.** Change entries of the query or a product q·k, and everything after follows, next words too: the model
goes on with what the head now writes at this position, every later block computed anew. Changed numbers are not in the
page's link.

**Δ ×, γ ×, β ×.** Δ is what the head adds to the residual stream at this position. γ and β are the gain and bias of the
last LayerNorm, before the unembedding: larger γ spreads the logits and so sharpens the prediction; β adds the same to
the logits in every sentence.

**The plane of the two answers.** Two words' unembedding directions span a plane; Δ is projected onto it, one arrow a
source. To the right is towards the answer and away from the foil, in logits that go straight to the output with the
last LayerNorm's scale held fixed. What later blocks make of it is not in it: that is in the next words.

Nothing here is a statistic, so there is no null: a number says what was computed, not that the answer depends on it.
"""


@dataclass(frozen=True)
class Outcome:
    """Logits at the destination, the position's own answer and its foil."""

    own: "Float[Tensor, 'd_vocab']"
    without: "Float[Tensor, 'd_vocab']"
    """The head writes nothing here."""
    changed: "Float[Tensor, 'd_vocab'] | None"
    """With what was changed on the page; None where nothing was."""
    target: Target


def choose_head(view: View) -> str:
    """The head that is taken apart; at first the one that writes most at the destination."""
    heads = list(view.entry.heads)
    usual = _writes_most(view.entry.at(), view.prompt, view.destination)
    if st.session_state.get("steps_head") not in (None, *heads):
        del st.session_state.steps_head
    helps = "at first the head that writes most at this position"
    if len(heads) <= MANY_HEADS:
        chosen = st.pills("Head", heads, default=usual, required=True, key="steps_head", bind="query-params",
                          help=helps, label_visibility="collapsed")  # fmt: skip
    else:
        chosen = st.selectbox("Head", heads, index=heads.index(usual), key="steps_head", bind="query-params",
                              width=120, help=helps, label_visibility="collapsed")  # fmt: skip
    return chosen or usual


@st.cache_data(max_entries=64, show_spinner=False)
def _writes_most(key: RunKey, prompt: str, destination: int) -> str:
    """The head with the largest ‖Δ‖ here; of all blocks, since a last block need not be where things happen."""
    import torch

    from circuits.attention import exclusive

    run = cache.run_of(key)
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(run.model.cfg.n_layers)]
    with exclusive(run.model), torch.no_grad():
        _, kept = run.model.run_with_cache(run.encode(prompt), names_filter=names, return_type=None)
    z = torch.stack([kept[name][0, destination] for name in names])  # [layer, head, d_head]
    sizes = torch.einsum("lhd, lhdm -> lhm", z, run.model.W_O).norm(dim=-1)
    layer, head = divmod(int(sizes.argmax()), sizes.shape[1])
    return f"{layer}.{head}"


def choose_switches() -> tuple[bool, bool]:
    """Whether scores are divided and later positions hidden."""
    scaled = st.toggle("÷ √d_k", True, key="steps_scale", bind="query-params",
                       help="off: what this head would do with q·k undivided")  # fmt: skip
    masked = st.toggle("mask", True, key="steps_mask", bind="query-params",
                       help="off: what it would do if it saw later words, where there are any")  # fmt: skip
    return scaled, masked


def steps_of(view: View, head: str) -> "Steps":
    """Raises: CircuitError where the equations are not those of this model."""
    return _steps(view.entry.at(), view.prompt, head, view.destination)


@st.cache_data(max_entries=64, show_spinner=False)
def _steps(key: RunKey, prompt: str, head: str, destination: int) -> "Steps":
    from circuits.steps import step_by_step

    run = cache.run_of(key)
    return step_by_step(run.model, run.encode(prompt), head, destination)


def choose_source(view: View) -> int | None:
    """The word that is followed, or none."""
    tokens = _tokens(view)
    labels = dict(enumerate(style.plain_labels(tokens)))
    if st.session_state.get("steps_follow") not in (None, *labels):
        del st.session_state.steps_follow
    if len(tokens) <= style.MAX_TOUCH:
        return st.pills("Follow a word through the steps", list(labels), key="steps_follow", bind="query-params",
                        format_func=lambda i: literal(labels[i]))  # fmt: skip
    return st.selectbox("Follow a word through the steps", list(labels), index=None, key="steps_follow", width=320,
                        bind="query-params", format_func=labels.__getitem__)  # fmt: skip


def edited(view: View, own: "Steps", scaled: bool, masked: bool) -> "Steps":
    """The steps with what the switches say and the numbers that were typed, which the expander asks for."""
    steps = replace(own, scaled=scaled, masked=masked)
    box = st.expander("Change the numbers", key="steps_edit", on_change="rerun", bind="query-params")
    if not box.open:
        return steps
    with box:
        if max(len(own.query), own.destination + 1) > LONGEST_EDIT:
            st.caption(f"Up to {LONGEST_EDIT} numbers can be changed; this head has a query of {len(own.query)} "
                       f"numbers and {own.destination + 1} words to look at.")  # fmt: skip
            return steps
        st.caption("Type other numbers: everything on the page follows. Esc leaves a cell as it was.")
        return _other_scores(view, _other_query(view, steps))


def _other_query(view: View, steps: "Steps") -> "Steps":
    import torch

    table = {f"q{i}": [value] for i, value in enumerate(steps.query.tolist())}
    config: dict[str, Any] = {name: st.column_config.NumberColumn(format="%.2f", required=True) for name in table}
    st.markdown("The query")
    typed = st.data_editor(table, key=_key(view, steps, "q"), column_config=config, hide_index=True)
    query = torch.tensor([float(typed[name][0]) for name in table]).to(steps.query)
    return steps if torch.allclose(query, steps.query) else replace(steps, query=query)


def _other_scores(view: View, steps: "Steps") -> "Steps":
    """Products that were typed are kept; the others follow the query."""
    import torch

    tokens, products = _tokens(view), steps.products
    names = [f"{i} {style.visible(token)}" for i, token in enumerate(tokens)]
    shown = range(len(tokens) if not steps.masked else steps.destination + 1)
    table = {names[i]: [float(products[i])] for i in shown}
    config: dict[str, Any] = {name: st.column_config.NumberColumn(format="%.2f", required=True) for name in table}
    st.markdown("The products q·k of each source")
    key = _key(view, steps, f"k {hash(tuple(steps.query.tolist()))}")
    typed = st.data_editor(table, key=key, column_config=config, hide_index=True)
    given = torch.tensor([float(typed[names[i]][0]) for i in shown]).to(products)
    if torch.allclose(given, products[: len(given)]):
        return steps
    return replace(steps, other_products=torch.cat([given, products[len(given) :]]))


def _key(view: View, steps: "Steps", what: str) -> str:
    """Numbers that were typed belong to one head at one position of one prompt."""
    return f"steps {what} {view.entry.key} {view.prompt} {steps.head} {steps.destination} {steps.masked}"


def equations(view: View, steps: "Steps", follow: int | None) -> None:
    st.html(steps_html(steps, _tokens(view), follow))
    notes = []
    columns = len(columns_of(steps, _tokens(view), follow))
    if len(steps.keys) > columns:
        notes.append(f"Columns: the {columns} words with most attention, of {len(steps.keys)}.")
    config = view.run.recipe.model
    kinds = {
        "W_Q and W_K are 0: this model averages uniformly.": config.attention == "uniform",
        "No W_Q and W_K: query and key are this head's slice of what is read.": config.query_key == "identity",
        "W_Q and W_K are one matrix.": config.query_key == "tied",
        "No W_V and W_O: the head averages its own slice of what is read.": config.value_output == "identity",
        "No W_O: heads are written side by side.": config.value_output == "value",
    }
    notes += [note for note, applies in kinds.items() if applies]
    if notes:
        st.caption(literal(" ".join(notes)))


def told(view: View, steps: "Steps", follow: int | None) -> None:
    if follow is not None:
        st.html(told_html(steps, _tokens(view), follow))


def choose_strengths(own: "Steps") -> tuple[float, float, float]:
    """How much Δ, and the last LayerNorm's gain and bias, are multiplied by."""
    normed = bool(own.constant.isfinite().all())
    values = []
    with st.container(horizontal=True, gap="large"):
        for key, (label, helps) in STRENGTHS.items():
            off = key != "steps_size" and not normed
            value = st.slider(label, 0.0, 3.0, 1.0, 0.05, key=key, bind="query-params", help=helps, disabled=off)
            values.append(1.0 if off else float(value))
    if not normed:
        st.caption("γ and β do not apply: this model has no LayerNorm before its unembedding.")
    return values[0], values[1], values[2]


def outcome(view: View, own: "Steps", steps: "Steps", size: float, gain: float, bias: float) -> Outcome:
    """What the model says with and without the head, and with what was changed."""
    from circuits.steps import predicted

    model, tokens = view.run.model, view.run.encode(view.prompt)
    changed, touched = None, steps.other_products is not None or size != 1 or not (steps.scaled and steps.masked)
    if touched or bool((steps.query != own.query).any()):
        changed = predicted(model, tokens, steps, size)
    if (gain, bias) != (1, 1):
        changed = own.stretched(own.logits if changed is None else changed, gain, bias)
    without = predicted(model, tokens, own, 0.0)
    return Outcome(own.logits, without, changed, _target(view, own))


def _target(view: View, own: "Steps") -> Target:
    """The likeliest word here, against the other side's likeliest where that is another word, else the second."""
    first, second = own.logits[: len(view.run.task.vocabulary)].topk(2).indices.tolist()
    side = view.other
    if side is not None:
        maps = cache.maps(side)
        at = min(view.destination, len(maps.probabilities) - 1)
        there = int(maps.probabilities[at, : len(view.run.task.vocabulary)].argmax())
        second = there if there != first else second
    return Target(first, second)


def sentence(view: View, own: "Steps", steps: "Steps", outcome: Outcome) -> str:
    """Where the head looks, what it writes, and what the answer is with and without it."""
    tokens, at = _tokens(view), steps.destination
    best = int(steps.pattern.argmax())
    answer = outcome.target.answer
    now = outcome.own if outcome.changed is None else outcome.changed
    said = _shares(now)[answer], _shares(outcome.without)[answer]
    layer, number = own.head
    changed = "" if outcome.changed is None else ", as changed here,"
    words = view.run.task.vocabulary.words
    return (
        f"At {at} ‘{style.visible(tokens[at])}’ head {layer}.{number}{changed} looks most at {best} "
        f"‘{style.visible(tokens[best])}’ ({float(steps.pattern[best]):.2f}) and writes a vector of norm "
        f"{float(steps.result.norm()):.2f}: ‘{style.visible(words[answer])}’ comes next with {percent(said[0])}, "
        f"and with {percent(said[1])} if the head writes nothing here."
    )


def next_words(view: View, outcome: Outcome) -> None:
    """The likeliest words, as they are, without the head and as changed."""
    vocabulary = view.run.task.vocabulary.words
    rows = {"as it is": outcome.own, "this head writes nothing here": outcome.without}
    if outcome.changed is not None:
        rows["as changed on this page"] = outcome.changed
    n = len(vocabulary)
    most = {token for logits in rows.values() for token in logits[:n].topk(min(2, n)).indices.tolist()}
    shown = sorted(most | {t for t in outcome.target if t is not None}, key=lambda t: -float(outcome.own[t]))[:6]
    lines = []
    for name, logits in rows.items():
        shares = _shares(logits)
        said = "".join(f"<span><b>{style.escaped(str(vocabulary[t]))}</b> {percent(shares[t])}</span>" for t in shown)
        lines.append(f'<div class="wb-line"><div class="wb-case">{name}</div><div class="wb-next">{said}</div></div>')
    css = "<style>.wb-case { flex: 0 0 14.5rem; font-size: .88rem; }</style>"
    key = f'<div class="wb-key"><span>% = probability of the next word after {view.destination}</span></div>'
    st.html(words.STYLE + css + words.title("What comes next") + "".join(lines) + key)


def plane(view: View, own: "Steps", steps: "Steps", outcome: Outcome) -> "go.Figure | None":
    """The head's arrows between the two answers, or why there are none."""
    from circuits.steps import answer_plane

    vocabulary, target = view.run.task.vocabulary.words, outcome.target
    assert target.foil is not None
    answer, foil = str(vocabulary[target.answer]), str(vocabulary[target.foil])
    st.html(words.title(f"What it moves between ‘{style.visible(answer)}’ and ‘{style.visible(foil)}’"))
    try:
        found = answer_plane(view.run.model, view.run.encode(view.prompt), steps, target.answer, target.foil)
    except frame.Refusal as error:
        frame.refuse(error)
        return None
    figure = plane_figure(found, _tokens(view), answer, foil)
    show.chart(figure, "steps_plane", wide=False)
    before, moved = float(found.stream[0]), float(found.total[0])
    st.caption(literal(
        f"Straight to {style.visible(answer)} − {style.visible(foil)}: the stream before this block stands at "
        f"{style.signed(before)} logits, this head moves it by {style.signed(moved)}, the rest of the block by "
        f"{style.signed(float(found.others[0]))}. Solid arrows: one a source, the largest first; grey: all of Δ."
    ))  # fmt: skip
    return figure


def without_a_model(view: View) -> None:
    """What needs no run: why scores are scaled, how many numbers a transformer has, what a layer costs."""
    _random_vectors()
    _parameters(view.run.recipe.model)
    _costs(view.run.recipe.model)


def _random_vectors() -> None:
    box = st.expander("Why divide by √d_k? Random queries and keys", key="steps_random", on_change="rerun",
                      bind="query-params")  # fmt: skip
    if not box.open:
        return
    with box:
        with st.spinner("Drawing 20,000 pairs at each width …"):
            found = _random()
        last = found[-1]
        st.markdown(literal(
            f"At d_k = {last.width:,} q·k of random vectors varies by {last.variance:,.0f}. Undivided, a query of "
            f"{KEYS} keys sees {last.unscaled.effective_tokens:.1f} of them and {percent(last.unscaled.frozen)} of the "
            f"rows are frozen; divided by √d_k it sees {last.scaled.effective_tokens:.1f}, and "
            f"{percent(last.scaled.frozen)} are."
        ))  # fmt: skip
        show.chart(scaling_figure(found, KEYS), "steps_scaling", buttons=False)
        st.caption(
            "Indigo: divided by √d_k; grey: not. Entries N(0, 1); variance over 20,000 pairs, the rest means over 500 "
            "queries. Effective tokens: exp(entropy of the softmax). Jacobian: 1 − Σp², through which queries and "
            "keys learn; a row below 0.01 counts as frozen."
        )


@st.cache_data(max_entries=2, show_spinner=False)
def _random() -> "list[RandomScores]":
    from circuits.scaling import random_scores

    return random_scores(WIDTHS, KEYS)


def _parameters(config: "ModelConfig") -> None:
    box = st.expander("How many numbers has a transformer?", key="steps_count", on_change="rerun", bind="query-params")
    if not box.open:
        return
    with box:
        from workbench.errors import BadRecipe
        from workbench.tables.parameters import GPT2_SMALL, GPT3, sizes_of, transformer_formula, value, wording

        shapes = {"this model": _full(config), "GPT-2 small": GPT2_SMALL, "GPT-3": GPT3}
        shape = st.pills("Shape", list(shapes), default="this model", required=True, key="steps_shape",
                         bind="query-params") or "this model"  # fmt: skip
        base = shapes[shape]
        sizes: dict[str, int] = {}
        with st.container(horizontal=True, gap="small"):
            for name, label in LETTERS.items():
                least = 0 if name in ("n_layers", "d_mlp") else 1
                sizes[name] = st.number_input(label, least, 1_000_000, getattr(base, name), width=118,
                                              key=f"steps {name} {shape} {base}")  # fmt: skip
        try:
            chosen = replace(base, **sizes)
        except BadRecipe as error:
            frame.refuse(error)
            return
        formula, letters = transformer_formula(chosen), sizes_of(chosen)
        st.markdown(f"**{value(formula, letters):,}** = {literal(wording(formula))}")
        of_block = [term for term in formula if term[0] == "L"]
        parts = {"one block": [term[1:] for term in of_block], "all blocks": of_block,
                 "outside blocks": [term for term in formula if term[0] != "L"]}  # fmt: skip
        rows = [{"part": part, "numbers": f"{value(tuple(terms), letters):,}", "formula": wording(tuple(terms))}
                for part, terms in parts.items() if terms]  # fmt: skip
        st.dataframe(rows, hide_index=True)
        st.caption(
            "Trained numbers; tied or fixed ones count once or not at all. GPT-2 small has 124,439,808. GPT-3 (Brown "
            "et al. 2020, table 2.1) is counted without biases in attention and feed-forward layers. Typed sizes are "
            "not in the link."
        )


def _full(config: "ModelConfig") -> "ModelConfig":
    """The task's sizes where the recipe leaves them to it."""
    task = st.session_state.view.run.task
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values |= {"n_ctx": config.n_ctx or task.n_ctx, "d_vocab": config.d_vocab or len(task.vocabulary)}
    return type(config)(**values)


def _costs(config: "ModelConfig") -> None:
    box = st.expander("What does attention cost, against recurrence and convolution?", key="steps_cost",
                      on_change="rerun", bind="query-params")  # fmt: skip
    if not box.open:
        return
    with box:
        from circuits.scaling import layer_costs

        with st.container(horizontal=True, gap="small"):
            n, d, k, r = (
                int(st.number_input(label, least, 1_000_000, usual, key=key, bind="query-params", width=150))
                for key, label, least, usual in (
                    ("steps_n", "n positions", 1, 1_024), ("steps_d", "d width", 1, config.d_model),
                    ("steps_kernel", "k kernel", 2, 3), ("steps_window", "r neighbours", 1, 64),
                )
            )  # fmt: skip
        rows = [
            {
                "layer": cost.kind, "operations": f"{cost.operations:,}", "O(…)": cost.formulas[0],
                "steps in sequence": f"{cost.sequential:,}", "O(…) ": cost.formulas[1],
                "longest path": f"{cost.path:,}", "O(…)  ": cost.formulas[2],
            }
            for cost in layer_costs(n, d, k, r)
        ]  # fmt: skip
        st.dataframe(rows, hide_index=True)
        cheaper = "fewer" if n < d else "more" if n > d else "as many"
        than = "as" if n == d else "than"
        st.caption(
            f"Vaswani et al. 2017, table 1, a layer, with every constant taken as 1: orders of growth, not times. "
            f"Self-attention needs {cheaper} operations {than} recurrence here, as n is "
            f"{'below' if n < d else 'above' if n > d else 'equal to'} d."
        )


def downloads(view: View, steps: "Steps", figure: "go.Figure | None") -> None:
    tokens = _tokens(view)
    page = partial(steps_html, steps, tokens)
    show.downloads(f"steps-{view.entry.name}", figure, partial(step_records, steps, tokens), None,
                   **{"equations (HTML)": ("equations.html", "text/html", page)})  # fmt: skip


def snippet(view: View, head: str, outcome: Outcome) -> str:
    """The Python of the figure, or of the steps where there is no plane."""
    answer, foil = outcome.target
    return f"""\
import workbench as wb
from circuits.steps import answer_plane, step_by_step
from workbench.figures import plane_figure

run = {show.load_call(view.entry.at())}
tokens = run.encode({json.dumps(view.prompt, ensure_ascii=False)})
steps = step_by_step(run.model, tokens, {head!r}, {view.destination})
print(steps.scores, steps.pattern, steps.z)
words = run.task.vocabulary.words
plane = answer_plane(run.model, tokens, steps, {answer}, {foil})
plane_figure(plane, run.str_tokens(tokens), words[{answer}], words[{foil}])
"""


def _tokens(view: View) -> list[str]:
    return view.run.str_tokens(view.run.encode(view.prompt))


def _shares(logits: "Float[Tensor, 'd_vocab']") -> list[float]:
    return logits.softmax(-1).tolist()
