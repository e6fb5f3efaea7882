"""What every page shows things with: a chart, the files to take away, the Python that makes it, what it all means."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import streamlit as st

from workbench.figures import figure_html
from workbench.pages.cache import RunKey

if TYPE_CHECKING:
    import plotly.graph_objects as go

Records = Iterable[Mapping[str, Any]]


def chart(
    figure: "go.Figure",
    key: str,
    touched: Callable[[], None] | None = None,
    *,
    wide: bool = True,
    buttons: bool = True,
    height: int | None = None,
) -> None:
    """A figure that takes the page's colours. On a narrow screen a `wide` one keeps its width and scrolls.

    `touched` is called after a click on a point, which then is in `st.session_state[key].selection.points`. `buttons`:
    Plotly's own, the picture as PNG among them. `height`: pixels after which it scrolls.
    """
    with st.container(key=f"{'wide' if wide else 'slim'}-{key}", height=height or "content", border=False):
        st.plotly_chart(
            figure,
            key=key,
            on_select=touched or "ignore",
            selection_mode="points",
            config={
                "displaylogo": False, "displayModeBar": "hover" if buttons else False,
                "toImageButtonOptions": {"filename": key, "scale": 2},
            },
        )  # fmt: skip


def downloads(
    name: str,
    figure: "go.Figure | None" = None,
    records: Callable[[], Records] | None = None,
    data: Callable[[], Any] | None = None,
    **more: tuple[str, str, Callable[[], str]],
) -> None:
    """Buttons for the figure as a page of its own, its numbers as CSV (`records`) and JSON (`data`, else `records`).

    Files are made when asked for. `more`: title=(ending, MIME type, function).
    """
    files: dict[str, tuple[str, str, Callable[[], str]]] = {}
    if figure is not None:
        files["figure (HTML)"] = ("html", "text/html", partial(figure_html, figure, name))
    if records is not None:
        files["numbers (CSV)"] = ("csv", "text/csv", lambda: as_csv(records()))
    if data is not None:
        files["numbers (JSON)"] = ("json", "application/json", lambda: as_json(data()))
    elif records is not None:
        files["numbers (JSON)"] = ("json", "application/json", lambda: as_json(list(records())))
    with st.container(horizontal=True, gap="small"):
        for title, (ending, kind, make) in (files | more).items():
            st.download_button(title, make, f"{name}.{ending}", kind, on_click="ignore", key=f"{name} {title}")


def explanation(text: str) -> None:
    with st.expander("What am I looking at?"):
        st.markdown(text)


def python(code: str, title: str = "The Python that makes this figure") -> None:
    """It runs as it stands, in a notebook or a script; its last line is the figure.

    Only when it is opened: the browser fetches a megabyte and a half to colour it.
    """
    box = st.expander(title, key="python", on_change="rerun", bind="query-params")
    if box.open:
        with box:
            st.code(code, language="python")


def load_call(key: RunKey) -> str:
    """The call that loads this run: wb.load("winograd-2", seed=3, step=400)."""
    seed = f", seed={key.seed}" if key.seed else ""
    step = f", step={key.step}" if key.step is not None else ""
    return f"wb.load({json.dumps(key.name)}{seed}{step})"


def as_csv(records: Records) -> str:
    """One line a record, the keys of the first as a heading."""
    file, writer = io.StringIO(), None
    for record in records:
        if writer is None:
            writer = csv.DictWriter(file, list(record), lineterminator="\n")
            writer.writeheader()
        writer.writerow(record)
    return file.getvalue()


def as_json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False)
