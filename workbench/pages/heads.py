"""All heads of the model in one table, or one head on a page of its own."""

import streamlit as st

from workbench.pages import frame, show
from workbench.pages import heads_parts as parts

view: frame.View = st.session_state.view
if not view.entry.heads:
    st.markdown(frame.literal(f"{view.entry.name} has no layers, so it has no heads: its bigrams are all there is."))
    st.page_link(parts.PAGES / "circuits.py", label="Its bigrams, against the truth", icon=":material/arrow_forward:",
                 query_params={"model": view.entry.name, "circuits_what": "bigrams"})  # fmt: skip
    st.stop()

sentence = st.empty()
head = parts.choose_head(view.entry.heads)
cut = parts.choose_cuts(view.entry.heads)
early = st.empty()
if cut and not parts.known(view.entry.at()):
    with st.spinner("Scoring heads …"):
        scored = parts.table(view.entry.at(), False)
    with early.container():
        parts.preview(scored, head)
with st.spinner(f"Scoring {'and cutting ' * cut}{len(view.entry.heads)} heads …"):
    table = parts.table(view.entry.at(), cut)
early.empty()
if head is None:
    sentence.markdown(frame.literal(parts.summary(table)))
    parts.all_heads(view, table)
else:
    sentence.markdown(frame.literal(parts.about(table, head)))
    parts.one_head(view, table, head)
for reason in table.missing:
    st.caption(frame.prose(reason))
parts.claims(view, head)
show.explanation(parts.EXPLANATION)
parts.take_away(view, table, head)
