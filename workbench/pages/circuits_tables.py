"""The parts of the page on circuits that are tables: skip-trigrams with their bugs, bigrams, singular directions."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import streamlit as st

from workbench.figures import style
from workbench.figures.listing import STYLE, Cell, listing, number, token
from workbench.pages import cache, show
from workbench.pages.cache import RunKey
from workbench.pages.circuits_parts import choose_head, choose_side, choose_token
from workbench.pages.circuits_text import BIGRAMS, DIRECTIONS, EXPLANATIONS, OV, TRIGRAMS
from workbench.pages.frame import View, literal
from workbench.wording import percent

if TYPE_CHECKING:
    from streamlit.delta_generator import DeltaGenerator
    from torch import Tensor

    from circuits.entries import Which
    from circuits.spectra import SingularDirections
    from workbench.bigrams import Bigrams

MOST = 8  # rows of a short list
TRIGRAM_ROWS = 24


@st.cache_data(max_entries=32, show_spinner=False)
def trigrams(key: RunKey, source: int | None) -> list[dict[str, Any]]:
    """The best skip-trigrams of a model of one layer. Raises: CircuitError."""
    from circuits import skip_trigrams

    run = cache.run_of(key)
    asked = source if source is not None else _sources(run.task)
    words = run.task.vocabulary.words
    return skip_trigrams(run.model, source=asked, n=TRIGRAM_ROWS, names=words).to_frame().to_dict("records")


def _sources(task: Any) -> list[int] | None:
    """The sources of the task's rules, where it has rules; all tokens otherwise."""
    return sorted({source for source, _ in task.rules}) if hasattr(task, "rules") else None


@st.cache_data(max_entries=32, show_spinner=False)
def bugs(key: RunKey) -> list[dict[str, Any]]:
    """What the factored form of the task's rules raises beside them. Raises: CircuitError."""
    from circuits import factoring_bugs

    run = cache.run_of(key)
    found = factoring_bugs(run.model, getattr(run.task, "rules"), names=run.task.vocabulary.words)  # noqa: B009
    return found.to_frame().to_dict("records")


@st.cache_data(max_entries=32, show_spinner=False)
def head_trigrams(key: RunKey, head: str) -> list[dict[str, Any]]:
    """A head's own skip-trigrams by attention × OV. Raises: CircuitError."""
    from circuits import head_skip_trigrams

    run = cache.run_of(key)
    return head_skip_trigrams(run.model, head, TRIGRAM_ROWS, names=run.task.vocabulary.words).to_frame().to_dict(
        "records"
    )  # fmt: skip


@st.cache_data(max_entries=8, show_spinner=False)
def bigram_table(key: RunKey) -> "Bigrams":
    """Raises: CircuitError, WorkbenchError."""
    from workbench.bigrams import bigrams

    return bigrams(cache.run_of(key))


@st.cache_data(max_entries=32, show_spinner=False)
def directions(key: RunKey, head: str, which: "Which") -> "SingularDirections":
    """Raises: CircuitError."""
    from circuits import singular_directions

    return singular_directions(cache.run_of(key).model, head, which)


def skip_trigram_table(view: View, sentence: "DeltaGenerator") -> None:
    model = view.run.recipe.model
    if model.n_layers > 1 or model.d_mlp:
        _head_trigrams(view, sentence)
        return
    words = view.run.task.vocabulary.words
    chosen = choose_token(words, "all sources")
    key = view.entry.at()
    found = trigrams(key, chosen)
    rules = getattr(view.run.task, "rules", {})
    known = {(source, destination, out) for (source, destination), out in rules.items()}
    marks = [_mark(row, known, rules) for row in found]
    if not found:
        sentence.markdown("No source gains any out against the others: there is no skip-trigram to list.")
        return
    right = f"{marks.count('rule')} are rules of the task, " if rules else ""
    defaults = sum(not row["attended"] for row in found)
    sentence.markdown(literal(
        f"Of the {len(found)} best skip-trigrams {right}{len(found) - defaults} are read by a head and {defaults} are "
        f"what the model says by default.{_bug_sentence(key) if rules else ''}"
    ))  # fmt: skip
    rows = [
        [
            token(row["source_name"]), Cell("…"), token(row["destination_name"]), Cell("→"), token(row["out_name"]),
            number(f"{row['p']:.2f}"), number(f"{row['p_other_sources']:.2f}", True),
            Cell(row["head"] or "default", "token", not row["attended"]),
            number(f"{row['attention']:.2f}", not row["attended"]), number(f"{row['uniform_attention']:.2f}", True),
            Cell(mark),
        ]
        for row, mark in zip(found, marks, strict=True)
    ]  # fmt: skip
    headings = ("source", "", "destination", "", "out", "p(out)", "other sources", "head", "attention", "even", "")
    st.html(STYLE + listing(headings, rows))
    if rules:
        _bug_table(key)
    show.explanation(EXPLANATIONS[TRIGRAMS])
    show.downloads(f"skip-trigrams-{view.entry.name}", records=lambda: found)
    asked = chosen if chosen is not None else _sources(view.run.task)
    show.python(
        f"""\
import workbench as wb
from circuits import {"factoring_bugs, " if rules else ""}skip_trigrams

run = {show.load_call(key)}
{"print(factoring_bugs(run.model, run.task.rules))" if rules else ""}
skip_trigrams(run.model, source={asked}, n={TRIGRAM_ROWS}, names=run.task.vocabulary.words).to_frame()
""",
        "The Python that makes this table",
    )


def _mark(row: dict[str, Any], known: set[tuple[int, int, int]], rules: dict[tuple[int, int], int]) -> str:
    """rule; bug: the out of another rule of this source; or nothing."""
    source, destination, out = row["source"], row["destination"], row["out"]
    if (source, destination, out) in known:
        return "rule"
    right = rules.get((source, destination))
    others = {o for (s, _), o in rules.items() if s == source}
    return "bug" if right is not None and out in others else ""


def _bug_sentence(key: RunKey) -> str:
    found = bugs(key)
    if not found:
        return ""
    control = sum(row["control"] for row in found) / len(found)
    return (
        f" Of {len(found)} bugs that the factored form invites, {sum(row['head_level'] for row in found)} are "
        f"head-level ({percent(control)} of other tokens meet the same criterion) and "
        f"{sum(row['behavioural'] for row in found)} behavioural."
    )


def _bug_table(key: RunKey) -> None:
    """Bugs, the behavioural first, then those that a head raises most."""
    found = bugs(key)
    if not found:
        return
    found.sort(key=lambda row: (not row["behavioural"], not row["head_level"], row["p_right"] - row["p_wrong"]))
    rows = [
        [
            token(row["source_name"]), Cell("…"), token(row["destination_name"]), Cell("→"), token(row["right_name"]),
            number(f"{row['p_right']:.2f}"), token(row["wrong_name"]), number(f"{row['p_wrong']:.2f}"),
            number(f"{row['p_control']:.2f}", True), Cell(row["head"], "token"), number(f"{row['ov_right']:+.1f}"),
            number(f"{row['ov_wrong']:+.1f}"),
            Cell("behavioural" if row["behavioural"] else "head-level" if row["head_level"] else "none",
                 inside=not row["head_level"]),
        ]
        for row in found[:TRIGRAM_ROWS]
    ]  # fmt: skip
    headings = ("source", "", "destination", "", "right", "p", "wrong", "p", "other tokens", "head", "OV right",
                "OV wrong", "bug")  # fmt: skip
    note = "p: probability; other tokens: the highest p of a token that is no out of this source; OV in logits."
    st.html(listing(headings, rows, f"Bugs: the first {len(rows)} of {len(found)}", note))


def _head_trigrams(view: View, sentence: "DeltaGenerator") -> None:
    """A head of block 1 by attention × OV: deeper heads read other heads."""
    key, heads = view.entry.at(), [head for head in view.entry.heads if head.startswith("0.")]
    head = choose_head(heads)
    found = head_trigrams(key, head)
    if not found:
        sentence.markdown(literal(f"Head {head} moves nothing: it has no skip-trigrams."))
        return
    best = found[0]
    sentence.markdown(literal(
        f"By attention × OV alone, head {head} does most for ‘{style.visible(best['source_name'])}’ … "
        f"‘{style.visible(best['destination_name'])}’ → ‘{style.visible(best['out_name'])}’: {best['product']:.2f} "
        f"logits, {best['times_typical']:.1f} times the best of the median source. What the whole model says of it is "
        "another question: only in one layer of attention alone is that read from weights."
    ))  # fmt: skip
    rows = [
        [
            token(row["source_name"]), Cell("…"), token(row["destination_name"]), Cell("→"), token(row["out_name"]),
            number(f"{row['attention']:.2f}", row["attention"] <= row["uniform_attention"]),
            number(f"{row['uniform_attention']:.2f}", True), number(f"{row['ov']:+.2f}"),
            number(f"{row['product']:+.2f}"), number(f"{row['times_typical']:.1f} ×", row["times_typical"] <= 1),
        ]
        for row in found
    ]  # fmt: skip
    headings = ("source", "", "destination", "", "out", "attention", "even", "OV, logits", "product", "typical")
    st.html(STYLE + listing(headings, rows))
    show.explanation(EXPLANATIONS[TRIGRAMS])
    show.downloads(f"skip-trigrams-{view.entry.name}-{head}", records=lambda: found)
    show.python(
        f"""\
import workbench as wb
from circuits import head_skip_trigrams

run = {show.load_call(key)}
head_skip_trigrams(run.model, "{head}", {TRIGRAM_ROWS}, names=run.task.vocabulary.words).to_frame()
""",
        "The Python that makes this table",
    )


def bigram_part(view: View, sentence: "DeltaGenerator") -> None:
    from workbench.bigrams import rows_of
    from workbench.figures import next_figure, tables_figure
    from workbench.figures.matrix import LARGEST

    key, words = view.entry.at(), view.run.task.vocabulary.words
    found = bigram_table(key)
    truth = "the true matrix" if found.exact else "training"
    alone = "" if not view.entry.heads else ", without its heads,"
    sentence.markdown(literal(
        f"What {view.entry.name}{alone} says after a token is {found.mean_kl:.4f} nats a token (KL) from "
        f"{'the task’s transition matrix' if found.exact else 'how often each token followed in training'}; who knows "
        f"only how often each token comes is {found.null_kl:.4f} nats from it."
    ))  # fmt: skip
    if len(words) <= LARGEST:
        tables = tables_figure([(truth, found.truth), ("model", found.model)], words)
        show.chart(tables, "circuits_bigrams")
    at = choose_token(words, None, int(found.share.argmax()))
    at = int(found.share.argmax()) if at is None else at
    rows = [(words[i], model, true) for i, model, true in rows_of(found, at)]
    figure = next_figure(rows, truth)
    show.chart(figure, "circuits_next")
    worst = [i for i in found.kl.argsort(descending=True).tolist() if bool(found.seen[i])][:MOST]
    seen = f"{percent(float(found.share[at]))} of all tokens, KL {float(found.kl[at]):.4f} nats" if (
        bool(found.seen[at])) else "never seen in training"  # fmt: skip
    st.caption(literal(f"After ‘{style.visible(words[at])}’ ({seen}): the {len(rows)} likeliest, truth as a ring."))
    listed = [[token(words[i]), number(f"{float(found.kl[i]):.4f}"), number(percent(float(found.share[i])))]
              for i in worst]  # fmt: skip
    st.html(STYLE + listing(("token", "KL, nats", "of all tokens"), listed, "Where it is furthest from the truth"))
    show.explanation(EXPLANATIONS[BIGRAMS])
    show.downloads(
        f"bigrams-{view.entry.name}", figure,
        lambda: [{"token": words[at], "next": word, "model": model, "truth": true} for word, model, true in rows],
    )  # fmt: skip
    show.python(f"""\
import workbench as wb
from workbench.bigrams import bigrams, rows_of
from workbench.figures import next_figure

run = {show.load_call(key)}
found, words = bigrams(run), run.task.vocabulary.words
next_figure([(words[i], model, true) for i, model, true in rows_of(found, {at})], {json.dumps(truth)})
""")


def direction_part(view: View, sentence: "DeltaGenerator") -> None:
    head, which = choose_head(view.entry.heads), choose_side()
    key, words = view.entry.at(), view.run.task.vocabulary.words
    found = directions(key, head, which)
    first = float(found.share[0])
    low, high = found.share_by_chance[0].tolist()
    sentence.markdown(literal(
        f"The strongest direction of head {head}’s W_{which} holds {percent(first)} of its squared singular values (by "
        f"chance {percent(low)} … {percent(high)}); from + to + it goes {_ends(found, words, 0)}."
    ))  # fmt: skip
    rows = []
    for i, share in enumerate(found.share.tolist()):
        low, high = found.share_by_chance[i].tolist()
        for end in (0, 1):
            about = [number(str(i + 1)), number(f"{float(found.values[i]):.2f}"),
                     number(percent(share), low <= share <= high),
                     number(f"{percent(low)} … {percent(high)}", True)]  # fmt: skip
            rows.append([
                *(about if not end else [number("")] * 4), Cell("+−"[end]), token(_some(found.reads[i, end], words)),
                token(_some(found.writes[i, end], words)),
            ])  # fmt: skip
    ends = ("reads from source", "raises output") if which == OV else ("destination", "looks for source")
    st.html(STYLE + listing(("", "σ", "of σ²", "by chance", "", *ends), rows))
    show.explanation(EXPLANATIONS[DIRECTIONS])
    show.downloads(f"directions-{view.entry.name}-{head}-{which}",
                   records=lambda: found.to_frame(words).to_dict("records"))  # fmt: skip
    show.python(
        f"""\
import workbench as wb
from circuits import singular_directions

run = {show.load_call(key)}
singular_directions(run.model, "{head}", "{which}").to_frame(run.task.vocabulary.words)
""",
        "The Python that makes this table",
    )


def _some(tokens: "Tensor", words: Sequence[str]) -> str:
    return "  ".join(style.visible(words[int(t)]) for t in tokens)


def _ends(found: "SingularDirections", words: Sequence[str], i: int) -> str:
    read, write = (style.visible(words[int(side[i, 0, 0])]) for side in (found.reads, found.writes))
    return f"from ‘{read}’ to ‘{write}’"
