"""The mathematics: tensors in, tensors out, on any model with TransformerLens' surface."""

from circuits.attention import AttentionMaps, attention_maps, exclusive

__all__ = ["AttentionMaps", "attention_maps", "exclusive"]
