"""Two hops on one prompt: which chains of heads make the answer, what cutting them does, and which mechanism it is."""

from functools import partial

import streamlit as st

from workbench.figures import arcs_figure
from workbench.figures.arcs import chains_that_matter
from workbench.pages import cache, frame, pairs, show
from workbench.pages import two_hops_parts as parts
from workbench.pages import two_hops_scope as scopes

view: frame.View = st.session_state.view
run, at = view.run, view.destination
if run.recipe.model.n_layers < 2:
    st.markdown(frame.literal(parts.one_block(view)))
    st.stop()

tokens, roles = run.str_tokens(run.encode(view.prompt)), pairs.roles(run.task, view.prompt)
if not at:
    st.markdown(frame.literal(parts.one_word(view, tokens)))
    parts.compositions(view, None)
    show.explanation(parts.EXPLANATION)
    st.stop()
maps = cache.maps(view.sides[0])
sentence = st.empty()
with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
    asked = scopes.choose_words(view, maps, cache.maps(view.other) if view.other else None)
    kinds, share = scopes.choose_shown()
    layers = scopes.choose_layers(maps.n_layers)
chain = None
try:
    scope, v_sum = scopes.choose_scope(view, asked, layers, tokens)
    with st.spinner(f"Cutting {scope.cuts():,} paths …" if scope.kinds != "V" else "Adding up V-chains …"):
        hops = parts.hops_of(*asked.plain, scope.heads, scope.places, scope.kinds)
except frame.Refusal as error:
    frame.refuse(error)
else:
    sentence.markdown(frame.literal(parts.sentence(asked, hops, tokens, v_sum)))
    shown = [one for one, _ in chains_that_matter(hops, share, kinds)]
    place, about = st.container(), st.container()
    chain = parts.choose_chain(shown, tokens, at)
    figure = arcs_figure(
        hops, tokens, maps, at, answer=asked.answer, foil=asked.foil, share=share, kinds=kinds, chosen=chain,
        roles=roles, v_sum=v_sum,
    )  # fmt: skip
    with place:
        show.chart(figure, "arcs", partial(parts.click, shown, tokens, at))
    with about:
        st.caption(frame.literal(f"{parts.interaction(hops)} {parts.left_out(hops, tokens, at, shown, scope, kinds)}"))
    if chain is not None:
        parts.experiment(view, asked, chain, maps, tokens)
    parts.mechanism(view)
    show.explanation(parts.EXPLANATION)
    parts.downloads(view, figure, hops, tokens, shown)
    show.python(parts.snippet(asked, scope, share, kinds, chain, v_sum, bool(roles)))
parts.scores(view, maps, chain, tokens)
parts.compositions(view, chain)
