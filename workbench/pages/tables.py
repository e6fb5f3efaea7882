"""The tables of held-out figures, committed and yours: as a journal prints them, and every seed as a dot."""

import streamlit as st

from workbench.pages import frame, results, show
from workbench.pages import tables_parts as parts

sentence = st.empty()
with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
    source, shown, columns, faults = parts.choose()
if source is None:
    sentence.markdown("There is nothing of this table that today's code made; a line below says how to make it.")
elif shown is None:
    sentence.markdown("This table cannot be shown; a line below says why.")
else:
    sentence.markdown(frame.literal(parts.sentence(source, shown)))
    parts.table(source, shown, columns)
    figure, measure = parts.dots(source, shown)
    parts.comparison(shown)
    parts.provenance(source, shown)
    show.explanation(parts.EXPLANATION)
    parts.downloads(source, figure)
    if measure is not None:
        show.python(parts.snippet(source, measure, shown.clusters))
for fault in faults:
    st.caption(frame.prose(fault))
parts.not_made(results.names(results.files()[0]))
