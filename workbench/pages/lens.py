"""Through TransformerLens' tools: what the stream says on its way, what each component adds, what a patch restores."""

import streamlit as st

from workbench.pages import frame, show
from workbench.pages import lens_parts as parts

view: frame.View = st.session_state.view

sentence = st.empty()
with st.container(horizontal=True, gap="small", vertical_alignment="center"):
    target, what = parts.choose_answers(view)
figure = parts.stream(view)
attributed = parts.components(view, target, what)
sentence.markdown(frame.literal(parts.sentence(view, target, what, attributed)))
parts.neurons(view, target, what)
patched = parts.patching(view, target, what)
show.explanation(parts.EXPLANATION)
parts.downloads(view, figure, attributed, patched)
show.python(parts.snippet(view))
