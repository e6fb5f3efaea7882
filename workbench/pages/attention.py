"""Attention on one prompt, or on two that differ in a word: next words, maps, each word shaded by what it gets."""

from functools import partial

import streamlit as st

from workbench.pages import attention_parts as parts
from workbench.pages import export, frame, show

view: frame.View = st.session_state.view
run, entry = view.run, view.entry
roles, vocabulary = view.roles, run.task.vocabulary.words

try:
    with st.spinner("Running the model …"):
        plain = parts.read(view)
except frame.Refusal as error:
    frame.refuse(error)
    st.stop()
sentence = st.empty()
parts.next_words(plain, vocabulary, roles)

if not plain[0].maps.n_layers:
    sentence.markdown(f"{entry.name} has no layers, so there is no attention to show: only what it says next.")
    parts.mistakes(view)
    parts.downloads(None, vocabulary, plain)
    st.stop()

target, what = None, ""
with st.container(horizontal=True, gap="small", vertical_alignment="center"):
    direction, measure = parts.choose_measure()
    if measure == "logit":
        target, what = parts.choose_target(plain, vocabulary)
prompts = plain
if measure != "attention":
    try:
        prompts = parts.measured(plain, measure, target)
    except frame.Refusal as error:
        st.info(frame.prose(f"{error}. Shown is attention."))
        measure = "attention"
head, layers = parts.choose_head(prompts[0].maps)
look = parts.Look(head, layers, direction, measure, target, what, view.letters)
a, b = prompts[0], prompts[1] if len(prompts) > 1 else None
sentence.markdown(frame.literal(parts.sentence(prompts, look)))
figure = parts.figure(prompts, look, vocabulary, roles)
parts.chart(figure, direction)
if b and len(a.tokens) != len(b.tokens):
    st.caption(frame.literal(parts.no_difference(a, b)))
if a.maps.n_heads * a.maps.n_layers > 1:
    parts.heads(a, look, b is not None, partial(parts.choose_target, plain, vocabulary))
parts.shaded(prompts, look, roles)
parts.role_means(view, look)
parts.mistakes(view)
show.explanation(parts.EXPLANATION)
parts.downloads(figure, vocabulary, prompts)
show.python(export.snippet(view.sides, head, a.at, layers, direction, measure, target, what, view.letters, bool(roles)))
