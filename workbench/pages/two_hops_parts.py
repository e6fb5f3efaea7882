"""The parts of the page on two hops, top to bottom."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import streamlit as st

from workbench.figures import style
from workbench.figures.numbers import Head, head_name
from workbench.pages import cache, frame, show
from workbench.pages.cache import RunKey, Target
from workbench.pages.frame import View, literal, prose
from workbench.pages.two_hops_census import Census, asks, census
from workbench.pages.two_hops_cut import FORCE, KINDS, MEAN, OTHER, ZERO, Cut, Outcome, intervene
from workbench.pages.two_hops_scope import Asked, Scope, named_places, one_of
from workbench.wording import count, percent

if TYPE_CHECKING:
    from circuits.attention import AttentionMaps
    from circuits.chains import Chain, TwoHops
    from circuits.composition import CompositionScores, Kind
    from circuits.score_terms import ScoreTerms

BOTH = "both"
ONE_HEAD, ALL_HEADS = "this head", "all heads of the block"

EXPLANATION = """\
**A chain** is two hops: a head of the earlier block moves something from a source to a middle position (arc below the
words), and a head of the later block uses it at the position that is looked at (arc above). There are three ways to use
it, and two ways to measure them, in logits of answer − foil:

- **value** (green, solid): the later head moves it on. With the attention and LayerNorm's scales of this run held fixed
  that is an *exact contribution*. V-chains add up; the rest of the logit difference comes through one head or none.
- **key** (orange, dashed): the later head looks at the middle because of it. **query** (blue, dashed): the later head
  looks where it looks because of it. Both live in the softmax and have no exact share. So this path, and nothing else,
  is taken out of that key or query, the attention computed anew; what answer − foil loses is the *effect of the cut*.

**Effects of cuts are not summed.** Two paths that stand in for each other cost nothing each and everything together;
two that need each other cost the whole each. How far all of them together differ from the sum is given as interaction.
It belongs to no chain. A query-chain's upper arc comes from the word that its head looks at most.

**The button cuts edges**, which is more than the chain: everything that these heads move between these two words.
*contribution* replaces what is moved, *value* what is moved at the attention of this run, *pattern* the attention;
*knock-out* takes the source out of the softmax, so that the other words get its share, and sees what passes through the
denominator. Held-out accuracy is that of the next word at this position, the same positions cut in every sequence.

**The score table** splits one attention score into what the parts of the two words' streams make of each other. It is
exact; the size of a cell is not the effect of its loss.

**Composition maps** are of the weights alone, no prompt: z says how far writer and reader are from being turned against
each other at random. It does not say that they compose on any input; trained models leave the band nearly everywhere.

**What it does not say.** The worth of a chain is that on this one prompt. And chains through two heads are not all:
a path through one head, or none, may be worth more.
"""


# Cached computations


@st.cache_data(max_entries=48, show_spinner=False)
def hops_of(
    key: RunKey,
    prompt: str,
    position: int,
    target: Target,
    heads: tuple[Head, ...],
    places: tuple[int, ...],
    kinds: str,
) -> "TwoHops":
    """Raises: CircuitError."""
    from circuits.chains import two_hops

    run = cache.run_of(key)
    tokens = run.encode(prompt)[:, : position + 1]
    return two_hops(run.model, tokens, position, target.answer, target.foil, heads=heads, places=places, kinds=kinds)


@st.cache_data(max_entries=48, show_spinner=False)
def outcome(key: RunKey, prompt: str, position: int, target: Target, cut: Cut, other: str | None) -> Outcome:
    """Raises: WorkbenchError, CircuitError."""
    return intervene(cache.run_of(key), prompt, position, target, cut, other)


@st.cache_data(max_entries=32, show_spinner=False)
def score_terms(key: RunKey, prompt: str, head: Head, destination: int) -> "ScoreTerms":
    """Raises: CircuitError."""
    from circuits.score_terms import decompose_attention_scores

    run = cache.run_of(key)
    return decompose_attention_scores(run.model, run.encode(prompt), head, destination)


@st.cache_data(max_entries=32, show_spinner=False)
def composition(key: RunKey) -> "dict[Kind, CompositionScores]":
    """Raises: CircuitError."""
    from circuits.composition import compositions

    return compositions(cache.run_of(key).model)


@st.cache_data(max_entries=32, show_spinner=False)
def mechanism_label(key: RunKey) -> str:
    """Raises: WorkbenchError, CircuitError."""
    from workbench.tables.mechanisms import mechanism

    return mechanism(cache.run_of(key)).label


# What is said


def sentence(asked: Asked, hops: "TwoHops", tokens: Sequence[str], v_sum: float) -> str:
    """What is asked, the chain that is worth most, and what all of them are."""
    from workbench.figures.arcs import chain_words, one_decimal

    clean = float(hops.clean.mean())
    said = (
        f"At {asked.position} ‘{style.visible(tokens[asked.position])}’, {asked.answer} − {asked.foil} = "
        f"{one_decimal(clean)} logits."
    )
    if not hops.chains:
        return said
    chain, value = hops.ranked()[0]
    how = "its exact contribution" if chain.kind == "V" else "the effect of its cut"
    said += f" The largest chain is {chain_words(chain, tokens, asked.position)}: {one_decimal(value)}, {how}."
    return f"{said} V-chains sum to {one_decimal(v_sum)}."


def interaction(hops: "TwoHops") -> str:
    """What cutting all Q- and K-chains at once costs, and how that differs from the sum, in words."""
    from workbench.figures.arcs import one_decimal

    n = sum(chain.kind != "V" for chain in hops.chains)
    if not n:
        return "Q- and K-chains are not measured."
    together, extra, clean = float(hops.together.mean()), hops.interaction, abs(float(hops.clean.mean()))
    said = f"Effects of cuts do not add up: all {n:,} Q- and K-chains cut at once cost {one_decimal(together)} logits"
    if abs(extra) < max(0.05 * clean, 0.05):
        return f"{said}, which hardly differs from one by one (interaction {one_decimal(extra)})."
    if extra > 0:
        how, why = f"{one_decimal(extra)} more", "chains stand in for each other"
    else:
        how, why = f"{one_decimal(-extra)[1:]} less", "chains need each other, and each alone costs what they share"
    return f"{said}, {how} than one by one (interaction {one_decimal(extra)}): so it is where {why}."


def left_out(
    hops: "TwoHops", tokens: Sequence[str], position: int, shown: "Sequence[Chain]", scope: Scope, kinds: str
) -> str:
    """How many chains are not drawn, the largest of them, and what was not measured."""
    from workbench.figures.arcs import chain_words, one_decimal

    others = [(chain, value) for chain, value in hops.ranked() if chain not in shown and chain.kind in kinds]
    said = f"Drawn: {len(shown)} of {count(len(hops.chains), 'chain')}."
    if hops.chains and not shown:
        said += " Lower ‘worth at least’ to see smaller ones."
    if others:
        said += (
            f" The largest that is not: {chain_words(others[0][0], tokens, position)} ({one_decimal(others[0][1])})."
        )
    if not scope.all_heads:
        said += f" Heads measured: {', '.join(map(head_name, scope.heads))}."
    if not scope.all_places:
        said += f" Positions measured: {', '.join(map(str, scope.places))}."
    if not (scope.all_heads and scope.all_places):
        said += " The sum of V-chains is of all heads and positions of the two blocks."
    return said


# The cut


def choose_chain(shown: "Sequence[Chain]", tokens: Sequence[str], position: int) -> "Chain | None":
    """The chain that is cut: by default the largest."""
    from workbench.figures.arcs import chain_words

    if not shown:
        return None
    names = {chain_words(chain, tokens, position): chain for chain in shown}
    return names[one_of("Chain", list(names), "hops_chain", 0, width="stretch", help="or click the top of its arc")]


def click(shown: "Sequence[Chain]", tokens: Sequence[str], position: int) -> None:
    """A callback: the chain whose arc was clicked."""
    from workbench.figures.arcs import chain_words

    points = st.session_state.arcs.selection.points
    for chain in shown:
        if points and str(chain) == points[0]["customdata"]:
            st.session_state.hops_chain = chain_words(chain, tokens, position)


def experiment(view: View, asked: Asked, chain: "Chain", maps: "AttentionMaps", tokens: Sequence[str]) -> None:
    """Cut the chain's edges, or force attention elsewhere: prediction and held-out accuracy before and after."""
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        cut = _choose_cut(view, asked, chain, maps, tokens)
        doing = "force it" if cut.kind == FORCE else "cut it"
        if st.session_state.get("hops_cut") not in (None, doing):
            st.session_state.hops_cut = doing
        pressed = st.pills("Button", [doing], key="hops_cut", bind="query-params", label_visibility="collapsed")
    other = _resampled_from(view)
    edges = " and ".join(_edge_words(edge, tokens) for edge in cut.edges)
    if not pressed:
        how = f"make it look elsewhere than in {edges}" if cut.kind == FORCE else f"cut {edges}"
        st.caption(literal(f"Press to {how}, and see prediction and held-out accuracy before and after."))
        return
    try:
        with st.spinner("Running the model on the held-out sequences …"):
            found = outcome(*asked.plain, cut, other)
    except frame.Refusal as error:
        frame.refuse(error)
        return
    st.markdown(result(found, asked, view.run.task.vocabulary.words))
    st.caption(literal(_about_cut(found, cut, edges, view, asked, tokens)))


def _choose_cut(view: View, asked: Asked, chain: "Chain", maps: "AttentionMaps", tokens: Sequence[str]) -> Cut:
    from workbench.figures.arcs import at_position, looks_at

    middle = at_position(chain.middle, asked.position)
    hops = {
        f"block {chain.writer[0] + 1}": (*chain.writer, middle, at_position(chain.source, asked.position)),
        f"block {chain.reader[0] + 1}": (*chain.reader, asked.position, looks_at(maps, chain, asked.position)),
    }
    which = one_of("Hop", [*hops, BOTH], "hops_hop", 0, width=110,
                 help="the arc below the words, the arc above them, or both")  # fmt: skip
    wide = one_of("Heads", [ONE_HEAD, ALL_HEADS], "hops_wide", 0, width=190, help="heads back each other up")
    kind = one_of("Kind of cut", list(KINDS), "hops_kind", 0, width=150)
    edges = tuple(
        (layer, None if wide == ALL_HEADS else head, destination, source)
        for name, (layer, head, destination, source) in hops.items()
        if which in (name, BOTH)
    )
    if kind == FORCE:
        last = min(destination for _, _, destination, _ in edges)
        places = named_places(tokens, last)
        away = [name for name, i in places.items() if i not in {edge[3] for edge in edges}] or list(places)
        return Cut(edges, kind, ZERO, places[one_of("onto", away, "hops_onto", 0, width=140)])
    if kind == "knock-out":
        return Cut(edges, kind, ZERO)
    puts = [MEAN, ZERO, *([OTHER] if _resampled_from(view) else [])]
    put = one_of("in its place", puts, "hops_put", 0, width=160,
               help="the mean over held-out sequences at these positions, nothing, or what B has there")  # fmt: skip
    return Cut(edges, kind, put)


def _resampled_from(view: View) -> str | None:
    """The second prompt, where it is read by the same model and reaches the position."""
    b = view.other
    if b is None or b.run != view.entry.at():
        return None
    return b.text if view.run.encode(b.text).shape[1] > view.destination else None


def _edge_words(edge: tuple[int, int | None, int, int], tokens: Sequence[str]) -> str:
    words = [f"{i} ‘{style.visible(tokens[i])}’" for i in (edge[3], edge[2])]
    return f"{words[0]} → {_heads_of(edge)} → {words[1]}"


def _heads_of(edge: tuple[int, int | None, int, int]) -> str:
    layer, head = edge[:2]
    return f"all heads of block {layer + 1}" if head is None else f"head {head_name((layer, head))}"


def result(found: Outcome, asked: Asked, words: Sequence[str]) -> str:
    """One line of Markdown: prediction, answer − foil and held-out accuracy, before and after."""
    from workbench.figures.arcs import one_decimal

    before, after = found.before, found.after
    said = [
        f"prediction: {_said(words[before.word], before.probability)} → {_said(words[after.word], after.probability)}",
        f"{literal(f'{asked.answer} − {asked.foil}')}: {one_decimal(before.difference)} → "
        f"**{one_decimal(after.difference)}**",
    ]
    if found.accuracy is not None:
        first, second = found.accuracy
        said.append(f"held-out: {percent(first)} → **{percent(second)}** (n = {found.n})")
    return " &nbsp;·&nbsp; ".join(said)


def _said(word: str, probability: float) -> str:
    return f"**{literal(style.visible(word))} {percent(probability)}**"


def _about_cut(found: Outcome, cut: Cut, edges: str, view: View, asked: Asked, tokens: Sequence[str]) -> str:
    if cut.kind == FORCE:
        onto = cut.forced or 0
        at = " and ".join(f"{_heads_of(edge)} at {edge[2]} ‘{style.visible(tokens[edge[2]])}’" for edge in cut.edges)
        said = f"Forced: {at} look at {onto} ‘{style.visible(tokens[onto])}’ alone."
    else:
        put = {MEAN: ", the mean over held-out sequences in its place", ZERO: "", OTHER: ", B's in its place"}[cut.put]
        said = f"Cut ({cut.kind}{put}): {edges}. All that comes after is computed anew."
    if found.accuracy is None:
        return f"{said} No held-out accuracy: {found.why}."
    at = f"the next word at position {asked.position}"
    other = " B's stands for another held-out sequence there." if cut.put == OTHER else ""
    said += f" Held-out: {at}, {found.n} sequences in {count(found.clusters, 'cluster')}.{other}"
    if asked.position == view.run.task.answer_position and view.run.task.chance:
        said += f" Chance: {percent(view.run.task.chance)}."
    return said


# The mechanism


def mechanism(view: View) -> None:
    """The label of this seed and the census it belongs to: from the committed tables, else computed when asked for."""
    found, can = census(view.run), asks(view.run)
    if found is None and not can:
        return
    label = found.label(found.mine) if found is not None and found.mine is not None else None
    if label is None and can:
        where = "its recipe is in no committed census" if found is None else "this seed is not in the census"
        if st.toggle("Name this seed's mechanism", key="hops_name", bind="query-params",
                     help=f"{where}; cutting every edge into the answer takes some ten seconds"):  # fmt: skip
            try:
                with st.spinner("Cutting every edge into the answer, two ways …"):
                    label = mechanism_label(view.entry.at())
            except frame.Refusal as error:
                frame.refuse(error)
    if label is not None:
        st.markdown(literal(f"This seed: “{label}”") + _of_census(found, label))
    if found is not None:
        _table(found, view)


def _of_census(found: Census | None, label: str) -> str:
    if found is None:
        return " · computed now; the committed census has other recipes"
    n = sum(found.label(row) == label for row in found.rows)
    return f" · {n} of {len(found.rows)} seeds of the census"


def _table(found: Census, view: View) -> None:
    from workbench.tables.mechanisms import RULES

    with st.expander(f"The census: {len(found.rows)} seeds of {literal(view.entry.name)}"):
        lines = ["| | seeds | which | what the cuts say |", "|---|---|---|---|"]
        for label, seeds in found.counts:
            mine = found.mine is not None and found.label(found.mine) == label
            which = ", ".join(f"**{seed}**" if mine and seed == view.entry.seed else str(seed) for seed in seeds)
            lines.append(f"| {literal(label)} | {len(seeds)} | {which} | {literal(RULES.get(label, ''))} |")
        st.markdown("\n".join(lines))
        st.caption(prose(f"From the committed results of `{found.command}`."))
        for note in found.notes:
            if note.startswith(("a label counts", "feeds:")):
                st.caption(prose(note[0].upper() + note[1:] + "."))


# What makes a head look, and who reads whom


def scores(view: View, maps: "AttentionMaps", chain: "Chain | None", tokens: Sequence[str]) -> None:
    """Component × component of one head's score from the position to one source."""
    from workbench.figures.score_terms import score_records, score_terms_figure

    at = view.destination
    names = [head_name((layer, h)) for layer in range(maps.n_layers) for h in range(maps.n_heads)]
    usual = names.index(head_name(chain.reader)) if chain is not None else len(names) - 1
    st.subheader("What makes a head look there", anchor=False)
    line = st.empty()
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        name = one_of("Head", names, "hops_head", usual, width=110)
        head = (int(name.partition(".")[0]), int(name.partition(".")[2]))
        weights = maps.patterns[head][at, : at + 1]
        places = named_places(tokens, at)
        source = places[one_of("Source", list(places), "hops_source", int(weights.argmax()), width=170,
                             help="the word that is looked at")]  # fmt: skip
    try:
        terms = score_terms(view.entry.at(), view.prompt, head, at)
    except frame.Refusal as error:
        frame.refuse(error)
        return
    values = terms.values[:, :, source]
    most = int(values.flatten().argmax())
    a, b = (terms.components[i] for i in (most // len(terms.components), most % len(terms.components)))
    line.markdown(literal(
        f"Head {name} gives {float(weights[source]):.2f} of its attention at {at} ‘{style.visible(tokens[at])}’ to "
        f"{source} ‘{style.visible(tokens[source])}’: its score is {style.signed(float(terms.total[source]))} against "
        f"the mean of all sources, of which {a} in the query × {b} in the key is most "
        f"({style.signed(float(values.max()))})."
    ))  # fmt: skip
    figure = score_terms_figure(terms, source, tokens)
    show.chart(figure, "score_terms", buttons=False)
    st.caption(
        "Scores before the softmax, exact with the LayerNorm scales of this run; no statistic, so no null. "
        "Parts: embed, pos, what each earlier head (0.2) and feed-forward layer (0.mlp) wrote, bias."
    )
    show.downloads(f"score-{view.entry.name}-{name}", figure, partial(score_records, terms, tokens))


def compositions(view: View, chain: "Chain | None") -> None:
    """Who reads whom, from the weights: z against the null."""
    from workbench.figures.composition import composition_figure, composition_records

    st.subheader("Who reads whom, from the weights", anchor=False)
    try:
        with st.spinner("Composing all pairs of heads …"):
            found = composition(view.entry.at())
    except frame.Refusal as error:
        frame.refuse(error)
        return
    inside, pairs = {}, 0
    for kind, one in found.items():
        inside[kind], pairs = int(one.outside.sum()), int(one.defined.sum())
    outside = ", ".join(f"{kind} {n}" for kind, n in inside.items())
    st.markdown(literal(
        f"Of {count(pairs, 'pair')} of heads so many leave the 95 % band of their null (one in twenty does by chance): "
        f"{outside}."
    ))  # fmt: skip
    chosen = None if chain is None else (chain.kind, chain.writer, chain.reader)
    figure = composition_figure(found, chosen)
    show.chart(figure, "compositions", buttons=False)
    st.caption(
        "z of ‖W_OV of the writer × what the reader reads with‖ against writer and reader turned against each other at "
        "random; background: inside the 95 % band. Framed: the chain's pair. z ranks candidates; cuts decide."
    )
    show.downloads(f"composition-{view.entry.name}", figure, partial(composition_records, found))


# To take away


def snippet(
    asked: Asked, scope: Scope, share: float, kinds: str, chosen: "Chain | None", v_sum: float, roles: bool = True
) -> str:
    """The Python that makes the figure of arcs."""
    import json

    limits = "" if scope.all_heads else f", heads={[head_name(head) for head in scope.heads]}"
    limits += "" if scope.all_places else f", places={list(scope.places)}"
    limits += "" if scope.kinds == "QKV" else f", kinds={scope.kinds!r}"
    words = f"answer={json.dumps(asked.answer, ensure_ascii=False)}, foil={json.dumps(asked.foil, ensure_ascii=False)}"
    more = f", share={share}" + (f", kinds={kinds!r}" if kinds != "QKV" else "")
    more += f", v_sum={v_sum}" if limits else ""
    picked = "" if chosen is None else f"\nchosen = next(one for one in hops.chains if str(one) == {str(chosen)!r})"
    more += "" if chosen is None else ", chosen=chosen"
    more += ", roles=run.task.roles" * roles
    return f"""\
import workbench as wb
from circuits import attention_maps, two_hops
from workbench.figures import arcs_figure

run = {show.load_call(asked.key)}
tokens = run.encode({json.dumps(asked.prompt, ensure_ascii=False)})[:, :{asked.position + 1}]
hops = two_hops(run.model, tokens, {asked.position}, {asked.target.answer}, {asked.target.foil}{limits}){picked}
maps = attention_maps(run.model, tokens)
arcs_figure(hops, run.str_tokens(tokens), maps, {asked.position}, {words}{more})
"""


def one_block(view: View) -> str:
    """What to see where there are no two hops."""
    n = view.run.recipe.model.n_layers
    have = "one block: a path takes one hop at most" if n else "no layers: each word is predicted from the one before"
    others = sorted({e.name for e in cache.entries()[0] if e.task == view.entry.task and "1.0" in e.heads})
    instead = f"Models of this task with two blocks: {', '.join(others)}. " if others else ""
    here = "What its heads add to a logit in one hop: page Attention, cells → a logit." if n else ""
    return f"{view.entry.name} has {have}, so no head can use what another moved. {instead}{here}"


def one_word(view: View, tokens: Sequence[str]) -> str:
    """Why there are no hops at the first position, and where there are."""
    first = f"At 0 ‘{style.visible(tokens[0])}’ there is one word to look at: every head looks at it, whatever is cut"
    then = "choose a later position" if len(tokens) > 1 else "write a prompt of two words or more"
    return f"{first}, so nothing hops from word to word. To see chains, {then}. What weights alone say stands below."


def downloads(view: View, figure: Any, hops: "TwoHops", tokens: Sequence[str], shown: "Sequence[Chain]") -> None:
    from workbench.figures.arcs import chain_records

    show.downloads(f"two-hops-{view.entry.name}", figure,
                   partial(chain_records, hops, tokens, view.destination, shown))  # fmt: skip
