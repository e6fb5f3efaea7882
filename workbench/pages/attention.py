"""Attention on one prompt, or on two that differ in a word: next words, maps, each word shaded by what it gets."""

import streamlit as st

from workbench.figures import attention_figure
from workbench.pages import attention_parts as parts
from workbench.pages import cache, export, frame

view: frame.View = st.session_state.view
run, entry = view.run, view.entry
roles, vocabulary = run.task.roles, run.task.vocabulary.words

with st.spinner("Running the model …"):
    prompts = [
        parts.Shown(letter, text, run.str_tokens(run.encode(text)), cache.maps(entry, text), view.destination)
        for letter, text in zip("AB", view.texts, strict=False)
    ]
sentence = st.empty()
parts.next_words(prompts, vocabulary, roles)

if not prompts[0].maps.n_layers:
    sentence.markdown(f"{entry.name} has no layers, so there is no attention to show: only what it says next.")
    parts.downloads(None, entry, vocabulary, prompts)
    st.stop()

head, layers = parts.choose(prompts[0].maps)
a, b = prompts[0], prompts[1] if len(prompts) > 1 else None
sentence.markdown(frame.literal(parts.sentence(a, b, head, layers)))
figure = attention_figure(
    a.maps, a.tokens, b and b.maps, b and b.tokens, head, a.at,
    vocabulary=vocabulary, roles=roles, layers=layers, clickable=True,
)  # fmt: skip
parts.chart(figure)
if b and len(a.tokens) != len(b.tokens):
    st.caption(frame.literal(parts.no_difference(a, b)))
parts.shaded(prompts, head, layers, roles)
with st.expander("What am I looking at?"):
    st.markdown(parts.EXPLANATION)
parts.downloads(figure, entry, vocabulary, prompts)
with st.expander("The Python that makes this figure"):
    st.code(export.snippet(entry, view.texts, head, a.at, layers), language="python")
