"""Numbers → Plotly figures and text. Nothing here knows Streamlit or a model: all of it works in a notebook."""

from workbench.figures.attention import attention_figure, figure_html
from workbench.figures.numbers import attention_records, attention_rows, next_words
from workbench.figures.roles import roles_figure
from workbench.figures.thumbnails import thumbnails_figure

__all__ = [
    "attention_figure",
    "attention_records",
    "attention_rows",
    "figure_html",
    "next_words",
    "roles_figure",
    "thumbnails_figure",
]
