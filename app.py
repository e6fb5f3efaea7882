"""The workbench in a browser: `workbench app`, or `streamlit run app.py`."""

from pathlib import Path

import streamlit as st

import workbench
from workbench.pages import frame

ICON = (
    """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 3 3"><path fill="#6366f1" d="M0 0h1v1h1v1h1v1H0z"/></svg>"""
)
PAGES = Path(workbench.__file__).parent / "pages"

st.set_page_config(page_title="Circuit workbench", page_icon=ICON, layout="wide")
page = st.navigation([st.Page(PAGES / "attention.py", title="Attention", default=True)])
frame.begin(page.title)
st.session_state.view = frame.choose()
page.run()
