"""Your own model: two files of a run, taken as data."""

from collections.abc import Callable
from pathlib import PurePath

import streamlit as st

from workbench.errors import WorkbenchError
from workbench.uploads import LARGEST_WEIGHTS

WHAT = f"""\
Two files of a run, of one of the tasks here: `recipe.toml`, and `model.safetensors` of at most {LARGEST_WEIGHTS >> 20}
MB. They are read as data, never executed. The model is scored on the held-out sequences and kept in the folder of runs.
"""


def offer(added: Callable[[str, int], None]) -> None:
    """The place where files are dropped. `added` is called with the name and seed of the run that they became."""
    with st.expander("Your own model"):
        st.caption(WHAT)
        taken = st.session_state.setdefault("files_taken", 0)
        files = st.file_uploader(
            "Recipe and weights", ["toml", "safetensors"], accept_multiple_files=True,
            max_upload_size=LARGEST_WEIGHTS >> 20, key=f"files {taken}", label_visibility="collapsed",
        )  # fmt: skip
        named = {PurePath(file.name).suffix.lower(): file for file in files}
        if len(files) != 2 or set(named) != {".toml", ".safetensors"}:
            if files:
                st.caption("Give one .toml and one .safetensors.")
            return
        recipe, weights = named[".toml"], named[".safetensors"]
        name = st.text_input("Call it", _name(recipe.name, weights.name), key="upload_name")

        def add() -> None:
            from workbench.uploads import add_run

            try:
                run = add_run(name.strip(), recipe.getvalue(), weights.getvalue())
            except WorkbenchError as error:
                st.session_state.refused = str(error)
                return
            st.session_state.files_taken += 1  # an empty place for the next ones
            added(run.name, run.seed)

        st.button("Add it", on_click=add)


def _name(recipe: str, weights: str) -> str:
    """What the files are called, where that says something."""
    stems = [PurePath(file).stem for file in (recipe, weights)]
    return next((stem for stem in stems if stem not in ("recipe", "model")), "mine")
