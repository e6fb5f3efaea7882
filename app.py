"""The workbench in a browser: `workbench app`, or `streamlit run app.py`."""

import os
from pathlib import Path

import streamlit as st

import workbench
from workbench.pages import cache, frame

ICON = (
    """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 3 3"><path fill="#6366f1" d="M0 0h1v1h1v1h1v1H0z"/></svg>"""
)
PAGES = {
    "Attention": "attention.py",
    "Two hops": "two_hops.py",
    "Heads": "heads.py",
    "Tables": "tables.py",
    "Training": "training.py",
    "Circuits": "circuits.py",
    "Step by step": "step_by_step.py",
    "Lens": "lens.py",
}
NEED_NO_PROMPT = ("Heads", "Tables", "Training", "Circuits")

st.set_page_config(page_title="Circuit workbench", page_icon=ICON, layout="wide")
os.environ.setdefault("TQDM_DISABLE", "1")  # TransformerLens' patching would draw bars on the server's terminal
folder = Path(workbench.__file__).parent / "pages"
pages = [st.Page(folder / file, title=title, default=title == "Attention") for title, file in PAGES.items()]
page = st.navigation(pages)
frame.begin(page.title)
st.session_state.view = frame.choose(page.title not in NEED_NO_PROMPT)
frame.run_page(page.run, page.title)
cache.prepare()
