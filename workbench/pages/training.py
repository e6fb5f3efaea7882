"""Training that can be watched: what was learned when, the map at every checkpoint, and how to train it again."""

import streamlit as st

from workbench.pages import frame, show
from workbench.pages import training_parts as parts

view: frame.View = st.session_state.view

sentence, panels = st.empty(), []
curves = parts.read(parts.choose_seeds(view))
if curves.probed:
    panels = parts.choose_panels(curves)
    curves = parts.with_changes(curves, panels)
figure, step = None, view.run.results["steps"]
if curves.runs:
    step = parts.choose_step(view, curves)
    sentence.markdown(frame.literal(parts.sentence(view, curves, step)))
    figure = parts.draw(view, curves, panels, step)
else:
    sentence.markdown(frame.literal(parts.nothing(view)))
    for line in curves.told:
        st.caption(frame.prose(line))
if view.run.checkpoints:
    parts.attention(view, step)
parts.train_it(view.run)
parts.unfinished()
show.explanation(parts.EXPLANATION)
if figure is not None:
    parts.downloads(view, curves, panels, figure)
    show.python(parts.snippet(view, curves, panels, step))
