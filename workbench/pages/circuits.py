"""What the weights say: a head's circuits between tokens, its spectrum, skip-trigrams and bigrams."""

from functools import partial

import streamlit as st

from workbench.pages import circuits_parts as parts
from workbench.pages import circuits_tables as tables
from workbench.pages import circuits_text as text
from workbench.pages import frame

PARTS = {
    text.OV: partial(parts.matrix, "OV"), text.QK: partial(parts.matrix, "QK"), text.EIGENVALUES: parts.eigenvalues,
    text.PLANE: parts.plane, text.TRIGRAMS: tables.skip_trigram_table, text.BIGRAMS: tables.bigram_part,
    text.DIRECTIONS: tables.direction_part,
}  # fmt: skip

view: frame.View = st.session_state.view
sentence = st.empty()
what = parts.choose_what(view)
try:
    with st.spinner("Reading the weights …"):
        PARTS[what](view, sentence)
except frame.Refusal as error:
    frame.refuse(error)
