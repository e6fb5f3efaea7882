"""One head, one destination, one equation a line; what would be without scale or mask, or with other numbers."""

import streamlit as st

from workbench.pages import frame, show
from workbench.pages import step_by_step_parts as parts

view: frame.View = st.session_state.view
run, entry = view.run, view.entry

if not entry.heads:
    st.markdown(f"{frame.literal(entry.name)} has no layers, so it has no head whose steps could be shown.")
    parts.without_a_model(view)
    show.explanation(parts.EXPLANATION)
    st.stop()

sentence = st.empty()
head = parts.choose_head(view)
with st.container(horizontal=True, gap="medium", vertical_alignment="center"):
    scaled, masked = parts.choose_switches()
try:
    with st.spinner("Running the model …"):
        own = parts.steps_of(view, head)
except frame.Refusal as error:
    frame.refuse(error)
    parts.without_a_model(view)
    st.stop()
follow = parts.choose_source(view)
equations, told = st.container(), st.container()
steps = parts.edited(view, own, scaled, masked)
with equations:
    parts.equations(view, steps, follow)
with told:
    parts.told(view, steps, follow)
size, gain, bias = parts.choose_strengths(own)
outcome = parts.outcome(view, own, steps, size, gain, bias)
sentence.markdown(frame.literal(parts.sentence(view, own, steps, outcome)))
parts.next_words(view, outcome)
figure = parts.plane(view, own, steps, outcome)
parts.without_a_model(view)
show.explanation(parts.EXPLANATION)
parts.downloads(view, steps, figure)
show.python(parts.snippet(view, head, outcome))
