"""Numbers → Plotly figures and text. Nothing here knows Streamlit or a model: all of it works in a notebook."""

from workbench.figures.attention import attention_figure, figure_html
from workbench.figures.numbers import attention_records, attention_rows, next_words

__all__ = ["attention_figure", "attention_records", "attention_rows", "figure_html", "next_words"]
