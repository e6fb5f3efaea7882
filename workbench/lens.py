"""What TransformerLens' tools ask of a model, beside its hook points: text, weights by layer, a cache, a configuration.

`Transformer` inherits from `Lens`; the mathematics is all in workbench/transformer.py.
"""

from typing import Any, cast

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformer_lens import ActivationCache, FactoredMatrix
from transformer_lens.config import TransformerLensConfig
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedRootModule import HookedRootModule
from transformer_lens.utilities.typed_module_list import TypedModuleList

from workbench.errors import BadPrompt, Undefined
from workbench.recipes import ModelConfig
from workbench.vocabulary import Vocabulary


def watched(module: nn.Module) -> bool:
    """Whether a hook hangs on it, or on every module."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own or _has_any_global_hook())


class Point(HookPoint):
    """A hook point that costs nothing while nobody looks: torch's way of calling a module takes some microseconds."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) if watched(self) else x


class Lens(HookedRootModule):
    """The part of a `Transformer` that faces TransformerLens."""

    config: ModelConfig
    cfg: "HookedConfig"
    vocabulary: Vocabulary | None
    embed: nn.Module
    pos_embed: nn.Module
    blocks: TypedModuleList[Any]
    unembed: nn.Module

    def run_with_cache(
        self, *args: Any, return_cache_object: bool = True, remove_batch_dim: bool = False, **kwargs: Any
    ) -> tuple[Any, Any]:
        """As TransformerLens': the output, and an ActivationCache (or a plain dict if asked)."""
        out, cache = super().run_with_cache(*args, remove_batch_dim=remove_batch_dim, **kwargs)
        return out, Cache(cache, self, has_batch_dim=not remove_batch_dim) if return_cache_object else cache

    # Text, for callers that pass prompts instead of tokens.

    def to_tokens(self, input: Any, **_ignored: Any) -> Int[Tensor, "batch position"]:
        """Tokens [batch, position] from text, a list of texts of one length, or tokens. No BOS token is added."""
        if isinstance(input, Tensor):
            return input if input.ndim == 2 else input[None]
        texts = [input] if isinstance(input, str) else list(input)
        if not texts:
            raise BadPrompt("no prompts; give at least one")
        rows = [self._vocabulary.encode(text) for text in texts]
        if len({len(row) for row in rows}) > 1:
            raise BadPrompt(f"prompts of {', '.join(str(len(r)) for r in rows)} tokens; a batch needs one length")
        return torch.tensor(rows, device=self.cfg.device)

    def to_str_tokens(self, input: Any, **_ignored: Any) -> list[str]:
        """The tokens of one prompt, each as text."""
        return self._vocabulary.str_tokens(self.to_tokens(input)[0].tolist())

    def to_string(self, tokens: Any) -> str:
        return self._vocabulary.decode(torch.as_tensor(tokens).flatten().tolist())

    def to_single_token(self, string: str) -> int:
        return self._vocabulary.token(string)

    def to_single_str_token(self, token: int) -> str:
        return self._vocabulary.words[token]

    @property
    def _vocabulary(self) -> Vocabulary:
        if self.vocabulary is None:
            raise BadPrompt("this model was built without a vocabulary; pass tokens instead of text")
        return self.vocabulary

    # What the tools call.

    def tokens_to_residual_directions(self, tokens: Any) -> Float[Tensor, "... d_model"]:
        """Columns of W_U: the residual directions that raise these tokens' logits."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        tokens = torch.as_tensor(tokens, device=self.cfg.device)
        return rearrange(self.W_U[:, tokens.squeeze() if tokens.numel() == 1 else tokens], "m ... -> ... m")

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, "d_model"]:
        """The sum of the output biases written before `layer` (with `mlp_input`, its attention's b_O too)."""
        total = self.W_E.new_zeros(self.config.d_model)
        for block in self.blocks[:layer]:
            total = total + block.attn.b_O
            if include_mlp_biases and not self.config.attn_only:
                total = total + block.mlp.b_out
        return total + self.blocks[layer].attn.b_O if mlp_input else total

    def blocks_with(self, submodule: str) -> list[tuple[int, nn.Module]]:
        return [(i, block) for i, block in enumerate(self.blocks) if hasattr(block, submodule)]

    def set_use_attn_result(self, on: bool) -> None:
        """Compute every head's own write to the residual stream, [batch, position, head, d_model]."""
        self.cfg.use_attn_result = on

    def set_use_split_qkv_input(self, on: bool) -> None:
        """Give each head's query, key and value input a copy of the residual stream of its own, before LayerNorm."""
        self.cfg.use_split_qkv_input = on

    def set_use_attn_in(self, on: bool) -> None:
        """Give each head a copy of the residual stream of its own, before LayerNorm."""
        self.cfg.use_attn_in = on

    def set_use_hook_mlp_in(self, on: bool) -> None:
        """Kept for callers' sake: `hook_mlp_in` is always there."""
        self.cfg.use_hook_mlp_in = on

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What to(), cuda(), double() and their like go through: `cfg` follows the weights."""
        super()._apply(fn, recurse)
        self.cfg.device, self.cfg.dtype = str(self.W_E.device), self.W_E.dtype
        return self

    # Weights of all layers at once.

    W_E = property(lambda self: self.embed.W_E, doc="[d_vocab, d_model]")
    W_pos = property(lambda self: self.pos_embed.W_pos, doc="[n_ctx, d_model]")
    W_U = property(lambda self: self.unembed.W_U, doc="[d_model, d_vocab]")
    b_U = property(lambda self: self.unembed.b_U, doc="[d_vocab]")
    W_Q = property(lambda self: self._stack("attn", "W_Q"), doc="[layer, head, d_model, d_head]")
    W_K = property(lambda self: self._stack("attn", "W_K"), doc="[layer, head, d_model, d_head]")
    W_V = property(lambda self: self._stack("attn", "W_V"), doc="[layer, head, d_model, d_head]")
    W_O = property(lambda self: self._stack("attn", "W_O"), doc="[layer, head, d_head, d_model]")
    b_Q = property(lambda self: self._stack("attn", "b_Q"), doc="[layer, head, d_head]")
    b_K = property(lambda self: self._stack("attn", "b_K"), doc="[layer, head, d_head]")
    b_V = property(lambda self: self._stack("attn", "b_V"), doc="[layer, head, d_head]")
    b_O = property(lambda self: self._stack("attn", "b_O"), doc="[layer, d_model]")
    W_in = property(lambda self: self._stack("mlp", "W_in"), doc="[layer, d_model, d_mlp]; not on attention-only")
    W_out = property(lambda self: self._stack("mlp", "W_out"), doc="[layer, d_mlp, d_model]; not on attention-only")
    b_in = property(lambda self: self._stack("mlp", "b_in"), doc="[layer, d_mlp]; not on attention-only")
    b_out = property(lambda self: self._stack("mlp", "b_out"), doc="[layer, d_model]; not on attention-only")

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_Kᵀ of every head, [layer, head, d_model, d_model]; scores divide it by √d_head."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of every head, [layer, head, d_model, d_model]."""
        return FactoredMatrix(self.W_V, self.W_O)


class Cache(ActivationCache):
    """TransformerLens' cache, which refuses to split a residual stream that is not a sum of what was written to it."""


def _refusing(name: str) -> Any:
    def method(self: Cache, *args: Any, **kwargs: Any) -> Any:
        config = cast(Lens, self.model).config
        if config.norm == "post" or not config.residual:
            why = "LayerNorm after each addition" if config.norm == "post" else "sub-layers that replace the token"
            raise Undefined(f"{name} is undefined for a model with {why}: its residual stream is no sum of components")
        return getattr(ActivationCache, name)(self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = getattr(ActivationCache, name).__doc__
    return method


for _name in (
    "decompose_resid", "stack_head_results", "stack_neuron_results", "get_full_resid_decomposition", "logit_attrs",
):  # fmt: skip
    setattr(Cache, _name, _refusing(_name))


class HookedConfig(TransformerLensConfig):
    """A model's configuration in TransformerLens' words."""

    use_attn_in = False
    use_hook_mlp_in = False

    @classmethod
    def of(cls, config: ModelConfig) -> "HookedConfig":
        positions = {"learned": "standard", "sinusoidal": "standard"}.get(config.positions, config.positions)
        return cls(
            d_model=config.d_model, d_head=config.d_head, n_layers=config.n_layers, n_ctx=config.n_ctx,
            n_heads=config.n_heads, d_mlp=config.d_mlp, d_vocab=config.d_vocab, device="cpu",
            default_prepend_bos=False, positional_embedding_type=positions, attn_only=config.attn_only,
            act_fn={"gelu-tanh": "gelu_new"}.get(config.activation, config.activation),
            # LayerNorm can be folded, and undone by a cached scale, only where it reads the stream
            normalization_type="LN" if config.norm == "pre" else None,
        )  # fmt: skip
