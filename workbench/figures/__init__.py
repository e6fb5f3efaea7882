"""Numbers → Plotly figures and text. Nothing here knows Streamlit or a model: all of it works in a notebook.

Names are imported on first use: some figures need torch, and the app's first page must be there before it is.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.figures.arcs import arcs_figure, chain_records, chains_that_matter
    from workbench.figures.attention import attention_figure, figure_html
    from workbench.figures.composition import composition_figure, composition_records
    from workbench.figures.heads import headings_figure, heads_figure, scores_figure
    from workbench.figures.lens import attribution_figure, lens_figure, patching_figure, patching_records
    from workbench.figures.matrix import matrix_figure, next_figure, tables_figure
    from workbench.figures.numbers import attention_records, attention_rows, next_words
    from workbench.figures.plane import plane_figure
    from workbench.figures.positivity import positivity_figure
    from workbench.figures.roles import roles_figure
    from workbench.figures.scaling import scaling_figure
    from workbench.figures.score_terms import score_records, score_terms_figure
    from workbench.figures.seeds import seeds_figure
    from workbench.figures.spectrum import spectrum_figure
    from workbench.figures.steps import step_records, steps_html, told_html
    from workbench.figures.thumbnails import thumbnails_figure

_HOME = {
    "arcs": (
        "arcs_figure",
        "chain_records",
        "chains_that_matter",
    ),
    "attention": (
        "attention_figure",
        "figure_html",
    ),
    "composition": (
        "composition_figure",
        "composition_records",
    ),
    "heads": (
        "headings_figure",
        "heads_figure",
        "scores_figure",
    ),
    "lens": (
        "attribution_figure",
        "lens_figure",
        "patching_figure",
        "patching_records",
    ),
    "matrix": (
        "matrix_figure",
        "next_figure",
        "tables_figure",
    ),
    "numbers": (
        "attention_records",
        "attention_rows",
        "next_words",
    ),
    "plane": ("plane_figure",),
    "positivity": ("positivity_figure",),
    "roles": ("roles_figure",),
    "scaling": ("scaling_figure",),
    "score_terms": (
        "score_records",
        "score_terms_figure",
    ),
    "seeds": ("seeds_figure",),
    "spectrum": ("spectrum_figure",),
    "steps": (
        "step_records",
        "steps_html",
        "told_html",
    ),
    "thumbnails": ("thumbnails_figure",),
}
_MODULE = {name: f"workbench.figures.{module}" for module, names in _HOME.items() for name in names}
__all__ = [
    "arcs_figure",
    "attention_figure",
    "attention_records",
    "attention_rows",
    "attribution_figure",
    "chain_records",
    "chains_that_matter",
    "composition_figure",
    "composition_records",
    "figure_html",
    "headings_figure",
    "heads_figure",
    "lens_figure",
    "matrix_figure",
    "next_figure",
    "next_words",
    "patching_figure",
    "patching_records",
    "plane_figure",
    "positivity_figure",
    "roles_figure",
    "scaling_figure",
    "score_records",
    "score_terms_figure",
    "scores_figure",
    "seeds_figure",
    "spectrum_figure",
    "step_records",
    "steps_html",
    "tables_figure",
    "thumbnails_figure",
    "told_html",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'workbench.figures' has no attribute {name!r}")
    return getattr(import_module(_MODULE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE])
