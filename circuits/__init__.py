"""The mathematics: tensors in, tensors out, on any model with TransformerLens' surface.

    from circuits import composition_scores, head_scores

    head_scores(model).roles()            # which heads look where, against chance and against a control
    composition_scores(model, "K").top()  # which earlier head a key reads, as z against the null of random rotations

Every formula, its convention and its source: docs/circuits.md. Names are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from circuits.attention import (
        AttentionMaps,
        RoleAttention,
        attention_maps,
        contribution_maps,
        exclusive,
        head_effects,
        moved_maps,
        role_attention,
    )
    from circuits.chains import two_hops
    from circuits.claims import Claim
    from circuits.composition import composed, composition_scores, compositions, virtual_heads
    from circuits.cuts import Edge, Path, cut, every_path, force, path_effects
    from circuits.decompose import chain_contributions, decompose_attention_scores, decompose_logits
    from circuits.effects import edge_effects
    from circuits.errors import CircuitError
    from circuits.examples import Examples
    from circuits.heads import head_scores, qk_trace
    from circuits.lens import attribution, neurons, patching, stream_words
    from circuits.matrices import W_OV, W_QK, direct_path, ov_circuit, qk_circuit, virtual_weights
    from circuits.memory import bandwidth, memory_management
    from circuits.scaling import layer_costs, random_scores
    from circuits.scores import Scores
    from circuits.scrubbing import induction_explained
    from circuits.sequences import in_context_learning_score
    from circuits.smallest import smallest_circuit
    from circuits.spectra import composition_spectrum, copying_score, eigenvalues, positivity, singular_directions
    from circuits.steps import answer_plane, predicted, step_by_step
    from circuits.surface import folded
    from circuits.terms import term_importance
    from circuits.trigrams import factoring_bugs, head_skip_trigrams, skip_trigrams, source_table

_HOME = {
    "attention": (
        "AttentionMaps",
        "RoleAttention",
        "attention_maps",
        "contribution_maps",
        "exclusive",
        "head_effects",
        "moved_maps",
        "role_attention",
    ),
    "composition": ("composed", "composition_scores", "compositions", "virtual_heads"),
    "chains": ("two_hops",),
    "claims": ("Claim",),
    "cuts": ("Edge", "Path", "cut", "every_path", "force", "path_effects"),
    "decompose": ("chain_contributions", "decompose_attention_scores", "decompose_logits"),
    "effects": ("edge_effects",),
    "errors": ("CircuitError",),
    "examples": ("Examples",),
    "heads": ("head_scores", "qk_trace"),
    "matrices": ("W_OV", "W_QK", "direct_path", "ov_circuit", "qk_circuit", "virtual_weights"),
    "memory": ("bandwidth", "memory_management"),
    "scores": ("Scores",),
    "scrubbing": ("induction_explained",),
    "sequences": ("in_context_learning_score",),
    "trigrams": ("factoring_bugs", "head_skip_trigrams", "skip_trigrams", "source_table"),
    "smallest": ("smallest_circuit",),
    "spectra": ("composition_spectrum", "copying_score", "eigenvalues", "positivity", "singular_directions"),
    "lens": ("attribution", "neurons", "patching", "stream_words"),
    "scaling": ("layer_costs", "random_scores"),
    "steps": ("answer_plane", "predicted", "step_by_step"),
    "surface": ("folded",),
    "terms": ("term_importance",),
}
_MODULE = {name: f"circuits.{module}" for module, names in _HOME.items() for name in names}
__all__ = [
    "W_OV",
    "W_QK",
    "AttentionMaps",
    "CircuitError",
    "Claim",
    "Edge",
    "Examples",
    "Path",
    "RoleAttention",
    "Scores",
    "answer_plane",
    "attention_maps",
    "attribution",
    "bandwidth",
    "chain_contributions",
    "composed",
    "composition_scores",
    "composition_spectrum",
    "compositions",
    "contribution_maps",
    "copying_score",
    "cut",
    "decompose_attention_scores",
    "decompose_logits",
    "direct_path",
    "edge_effects",
    "eigenvalues",
    "every_path",
    "exclusive",
    "factoring_bugs",
    "folded",
    "force",
    "head_effects",
    "head_scores",
    "head_skip_trigrams",
    "in_context_learning_score",
    "induction_explained",
    "layer_costs",
    "memory_management",
    "moved_maps",
    "neurons",
    "ov_circuit",
    "patching",
    "path_effects",
    "positivity",
    "predicted",
    "qk_circuit",
    "qk_trace",
    "random_scores",
    "role_attention",
    "singular_directions",
    "skip_trigrams",
    "smallest_circuit",
    "source_table",
    "step_by_step",
    "stream_words",
    "term_importance",
    "two_hops",
    "virtual_heads",
    "virtual_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'circuits' has no attribute {name!r}")
    return getattr(import_module(_MODULE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE])
