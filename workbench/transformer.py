"""The transformer: one module with every option that a recipe names, on TransformerLens' hook points.

Read it top to bottom: `Transformer` is the whole model, then the block, attention, feed-forward layer, LayerNorm and
embeddings it is made of. What TransformerLens' tools ask of a model is in lens.py, computed positions are in
positions.py, initial weights in initialise.py.

Vectors are rows, `x @ W`, as in TransformerLens; weights carry TransformerLens' classic names and per-head shapes
(`blocks.0.attn.W_Q` is [head, d_model, d_head]), so that checkpoints of its former HookedTransformer load by name, and
its tools (ActivationCache, patching, logit lens, head detector, ProcessWeights, FactoredMatrix) run on it.

Axes, one word each: batch, position (destination where it attends, source where it is attended to), head, d_model
(the residual stream), d_head, d_mlp, d_vocab, layer.

A weight that an option takes away is not absent but fixed: a zero bias, or the identity in place of W_Q or W_V. It is
then a buffer that is not saved and not trained. So every formula about W_Q … W_O holds for every model, and uniform
attention is simply the softmax of scores that are all zero.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.utilities.typed_module_list import TypedModuleList

from workbench.errors import BadPrompt, BadRecipe, BadWeights
from workbench.initialise import initialise
from workbench.lens import HookedConfig, Lens, Point, watched
from workbench.loss import next_token_loss
from workbench.positions import alibi, rotate, sinusoids
from workbench.recipes import ModelConfig
from workbench.short import FEW, attend_to_few, fusible, packed
from workbench.vocabulary import Vocabulary


class Transformer(Lens):
    """Tokens [batch, position] → logits [batch, position, d_vocab].

    `config` must give n_ctx and d_vocab. `vocabulary` is needed only to pass text instead of tokens. `seed` decides
    the initial weights; the global random state is neither read nor changed.
    """

    def __init__(self, config: ModelConfig, vocabulary: Vocabulary | None = None, seed: int = 0):
        super().__init__()
        if not config.n_ctx or not config.d_vocab:
            raise BadRecipe("a model needs n_ctx and d_vocab; a recipe takes them from its task")
        self.config = config
        self.vocabulary = vocabulary
        self.cfg = HookedConfig.of(config)

        self.embed = Embed(config)
        self.hook_embed = Point()
        if config.positions in ("learned", "sinusoidal", "shortformer"):
            self.pos_embed = PosEmbed(config)
        if config.positions in ("learned", "sinusoidal"):
            self.hook_pos_embed = Point()
        elif config.positions == "shortformer":  # not part of the residual stream: caches must not list it as such
            self.hook_shortformer_pos = Point()
        self.dropout = Dropout(config.dropout)
        self.blocks = TypedModuleList([Block(config, self.cfg) for _ in range(config.n_layers)])
        self.ln_final = LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()
        self.unembed = TiedUnembed(config, self.embed) if config.tied_unembedding else Unembed(config)

        initialise(self, config, seed)
        self.setup()

    def setup(self) -> None:
        """Name the hook points; per-head inputs of attention answer to TransformerLens' two names for them."""
        super().setup()
        for layer, block in enumerate(self.blocks):
            for name in ("hook_q_input", "hook_k_input", "hook_v_input"):
                self.mod_dict[f"blocks.{layer}.{name}"] = getattr(block.attn, name)

    def forward(
        self,
        input: Int[Tensor, "batch position"] | Int[Tensor, "position"] | str | list[str],
        return_type: Literal["logits", "loss", "both"] | None = "logits",
        loss_per_token: bool = False,
        stop_at_layer: int | None = None,
    ) -> Any:
        """Logits, the mean next-token loss in nats, both, or with `stop_at_layer` the residual stream before it.

        Raises: BadPrompt where the tokens are none, too many for the positions, or outside the vocabulary.
        """
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(f"return_type = {return_type!r}: expected logits, loss, both or None")
        tokens = self.to_tokens(input)
        residual, positions = self.input_to_embed(tokens)
        for block in self.blocks[:stop_at_layer]:
            residual = block(residual, positions)
        if stop_at_layer is not None or return_type is None:
            return residual if stop_at_layer is not None else None
        logits = self.unembed(self.ln_final(residual))
        if return_type == "logits":
            return logits
        loss = self.loss_fn(logits, tokens, loss_per_token)
        return loss if return_type == "loss" else (logits, loss)

    def input_to_embed(
        self, tokens: Int[Tensor, "batch position"]
    ) -> tuple[Float[Tensor, "batch position d_model"], Float[Tensor, "position d_model"] | None]:
        """The residual stream before block 1, and the positions that shortformer adds to queries and keys."""
        length = tokens.shape[1]
        if self.config.positions in ("learned", "shortformer") and length > self.config.n_ctx:
            raise BadPrompt(
                f"{length} tokens, but this model has positions for {self.config.n_ctx}; shorten the prompt"
            )
        residual = self.hook_embed(self.embed(tokens))
        positions = None
        if self.config.positions in ("learned", "sinusoidal"):
            rows = self.pos_embed(length)
            if not unwatched(self, self.hook_pos_embed):
                rows = self.hook_pos_embed(repeat(rows, "p m -> b p m", b=len(tokens)).clone())  # hooks may write
            residual = residual + rows
        elif self.config.positions == "shortformer":
            positions = self.hook_shortformer_pos(self.pos_embed(length).clone())
        return self.dropout(residual), positions

    def training_loss(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, ""]:
        """Mean next-token loss in nats over all positions but the last, which is only an answer; made to be trained on.

        `forward` gives the same where somebody looks at the logits, a little slower.
        """
        residual = self.ln_final(self(tokens[:, :-1], stop_at_layer=len(self.blocks)))
        answers = tokens[:, 1:].flatten()
        return next_token_loss(residual.flatten(0, 1), self.W_U, self.b_U, answers)

    def loss_fn(
        self, logits: Float[Tensor, "batch position d_vocab"], tokens: Int[Tensor, "batch position"], per_token: bool
    ) -> Float[Tensor, ""] | Float[Tensor, "batch position-1"]:
        """Next-token cross-entropy in nats."""
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return loss.view(len(tokens), -1) if per_token else loss.mean()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights by name; buffers of TransformerLens' former HookedTransformer are passed over.

        Raises: BadWeights naming the weight that is missing, unknown, of another shape, or that this model's options
        fix or tie at another value.
        """
        own, kept, others = self.state_dict(), {}, {}
        for name, weight in state_dict.items():
            if name.rpartition(".")[2] in ("mask", "IGNORE", "rotary_sin", "rotary_cos"):
                continue
            expected = own.get(name, self._weight_at(name))
            if expected is None and strict:
                raise BadWeights(f"{name} has no place in this model; check the options it was trained with")
            if expected is not None and weight.shape != expected.shape:
                raise BadWeights(f"{name} is {list(weight.shape)}, but this model has {list(expected.shape)}")
            (kept if name in own else others)[name] = weight
        missing = [name for name in own if name not in kept]
        if missing and strict:
            raise BadWeights(f"{missing[0]} is missing from the weights ({len(missing)} of {len(own)} are)")
        result = super().load_state_dict(kept, strict, assign)
        for name, weight in others.items():  # after loading, when what is tied has the values of what it is tied to
            expected = self._weight_at(name)
            if expected is not None and not torch.allclose(weight.to(expected), expected):
                raise BadWeights(f"{name} is fixed by this model's options, but the weights set it to other values")
        return result

    def expanded(self) -> "Transformer":
        """The same function with every weight free: all biases there, nothing tied, nothing fixed.

        Weight processing (folding LayerNorm, centring) needs a place to put what it folds:
        `m = model.expanded(); m.load_state_dict(ProcessWeights.process_weights(m.state_dict(), m.cfg))`.
        Not with shortformer positions: they enter after LayerNorm, which TransformerLens' folding does not know.
        Sinusoidal positions become learned ones, so the copy ends at n_ctx.
        """
        config = replace(
            self.config, query_key="separate", value_output="value-output", tied_unembedding=False,
            bias_qkv=True, bias_out=True, bias_unembed=True,
            attention="softmax" if self.config.attention == "uniform" else self.config.attention,
            positions="learned" if self.config.positions == "sinusoidal" else self.config.positions,
        )  # fmt: skip
        free = Transformer(config, self.vocabulary).to(self.W_E)
        free.load_state_dict({name: self._weight_at(name) for name in free.state_dict()})
        return free.train(self.training)

    def _home(self, name: str) -> tuple[nn.Module, str]:
        module, _, attribute = name.rpartition(".")
        return self.get_submodule(module), attribute

    def _weight_at(self, name: str) -> Tensor | None:
        """The weight of that name, be it trained, fixed or tied; None where this model has no place for it."""
        try:
            return getattr(*self._home(name)).detach()
        except AttributeError:
            return None

    def _stack(self, part: str, name: str) -> Tensor:
        """One weight of every layer, [layer, …]; for a model without layers, the empty stack of the right shape."""
        blocks = list(self.blocks) or [Block(replace(self.config, n_layers=1), self.cfg)]
        return torch.stack([getattr(getattr(block, part), name) for block in blocks])[: len(self.blocks)]

    @property
    def n_parameters(self) -> int:
        """Trained numbers; shared and fixed ones count once and not at all."""
        return sum(p.numel() for p in self.parameters())


class Dropout(nn.Dropout):
    """One that costs nothing where the probability is 0."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) if self.p or watched(self) else x


class Block(nn.Module):
    """Attention, then a feed-forward layer (unless attention-only), each added to the residual stream."""

    hook_out_is_single_residual_stream = True  # the logit lens asks

    def __init__(self, config: ModelConfig, cfg: HookedConfig):
        super().__init__()
        self.config, self.cfg = config, cfg
        self.attn = (TiedAttention if config.query_key == "tied" else Attention)(config, cfg)
        self.dropout = Dropout(config.dropout)
        self.hook_attn_in = Point()
        self.hook_attn_out = Point()
        self.hook_resid_pre = Point()
        self.hook_resid_post = Point()
        if config.norm != "none":
            self.ln1 = LayerNorm(config.d_model)
        if not config.attn_only:
            if config.norm != "none":
                self.ln2 = LayerNorm(config.d_model)
            self.mlp = MLP(config)
            self.hook_mlp_in = Point()
            self.hook_mlp_out = Point()
            self.hook_resid_mid = Point()

    def forward(
        self, resid_pre: Float[Tensor, "batch position d_model"], positions: Float[Tensor, "position d_model"] | None
    ) -> Float[Tensor, "batch position d_model"]:
        resid_pre = self.hook_resid_pre(resid_pre)
        attn_out = self.hook_attn_out(self.dropout(self.attn(*self._attention_inputs(resid_pre, positions))))
        resid_mid = self._write(resid_pre, attn_out, "ln1")
        if self.config.attn_only:
            return self.hook_resid_post(resid_mid)
        resid_mid = self.hook_resid_mid(resid_mid)
        mlp_in = resid_mid if unwatched(self, self.hook_mlp_in) else self.hook_mlp_in(resid_mid.clone())
        mlp_out = self.hook_mlp_out(self.dropout(self.mlp(self._read(mlp_in, "ln2"))))
        return self.hook_resid_post(self._write(resid_mid, mlp_out, "ln2"))

    def _attention_inputs(self, resid_pre: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """What queries, keys and values are computed from: one shared tensor, or [batch, position, head, d_model]."""
        if self.cfg.use_split_qkv_input:
            forks = (self.attn.hook_q_input, self.attn.hook_k_input, self.attn.hook_v_input)
            query, key, value = (self._read(fork(self._copies(resid_pre)), "ln1") for fork in forks)
        else:
            shared = self.hook_attn_in(self._copies(resid_pre)) if self.cfg.use_attn_in else resid_pre
            query = key = value = self._read(shared, "ln1")
        if positions is not None:
            positions = positions[:, None] if query.ndim == 4 else positions
            query, key = query + positions, key + positions
        return query, key, value

    def _copies(self, residual: Tensor) -> Tensor:
        """One for every head, in memory of its own: hooks may write into it."""
        return repeat(residual, "b p m -> b p h m", h=self.config.n_heads).clone()

    def _read(self, residual: Tensor, norm: str) -> Tensor:
        return getattr(self, norm)(residual) if self.config.norm == "pre" else residual

    def _write(self, residual: Tensor, out: Tensor, norm: str) -> Tensor:
        written = residual + out if self.config.residual else out
        return getattr(self, norm)(written) if self.config.norm == "post" else written


class Attention(nn.Module):
    """Heads in parallel: scores from the QK circuit, softmax over sources, the OV circuit for what they move."""

    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "head d_model d_head"]
    W_V: Float[Tensor, "head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    b_Q: Float[Tensor, "head d_head"]
    b_K: Float[Tensor, "head d_head"]
    b_V: Float[Tensor, "head d_head"]
    b_O: Float[Tensor, "d_model"]

    def __init__(self, config: ModelConfig, cfg: HookedConfig):
        super().__init__()
        self.config, self.cfg = config, cfg
        h, m, d = config.n_heads, config.d_model, config.d_head
        learns_qk = config.attention != "uniform" and config.query_key != "identity"
        zero, own_slice = torch.zeros(h, m, d), None
        if "identity" in (config.query_key, config.value_output) or config.value_output == "value":
            own_slice = rearrange(torch.eye(m), "m (h d) -> h m d", h=h)  # head h sees dimensions h·d … h·d + d − 1

        _weight(self, "W_Q", (h, m, d), None if learns_qk else zero if config.attention == "uniform" else own_slice)
        _weight(self, "b_Q", (h, d), None if learns_qk and config.bias_qkv else torch.zeros(h, d))
        if config.query_key != "tied":
            _weight(self, "W_K", (h, m, d), None if learns_qk else zero if config.attention == "uniform" else own_slice)
            _weight(self, "b_K", (h, d), None if learns_qk and config.bias_qkv else torch.zeros(h, d))
        learns_v, learns_o = config.value_output != "identity", config.value_output == "value-output"
        _weight(self, "W_V", (h, m, d), None if learns_v else own_slice)
        _weight(self, "b_V", (h, d), None if learns_v and config.bias_qkv else torch.zeros(h, d))
        _weight(self, "W_O", (h, d, m), None if learns_o or own_slice is None else own_slice.transpose(1, 2))
        _weight(self, "b_O", (m,), None if learns_o and config.bias_out else torch.zeros(m))

        self.dropout = Dropout(config.dropout)
        self.hook_q_input, self.hook_k_input, self.hook_v_input = Point(), Point(), Point()
        self.hook_q, self.hook_k, self.hook_v = Point(), Point(), Point()
        self.hook_attn_scores, self.hook_pattern = Point(), Point()
        self.hook_z, self.hook_result = Point(), Point()
        if config.positions == "rotary":
            self.hook_rot_q, self.hook_rot_k = Point(), Point()

    def forward(
        self,
        query_input: Float[Tensor, "batch position *head d_model"],
        key_input: Float[Tensor, "batch position *head d_model"],
        value_input: Float[Tensor, "batch position *head d_model"],
    ) -> Float[Tensor, "batch position d_model"]:
        shared = query_input is key_input is value_input and query_input.ndim == 3
        scale = 1.0 if self.config.attention == "softmax-unscaled" else math.sqrt(self.config.d_head)
        if shared and self._is_short(query_input):
            weights, biases = (self.W_Q, self.W_K, self.W_V), (self.b_Q, self.b_K, self.b_V)
            z = attend_to_few(query_input, weights, biases, 1 / scale)
        else:
            if shared and unwatched(self, self.hook_q, self.hook_k, self.hook_v):
                q, k, v = self._all_at_once(query_input)
            else:
                q = self.hook_q(_per_head(query_input, self.W_Q, self.b_Q))
                k = self.hook_k(_per_head(key_input, self.W_K, self.b_K))
                v = self.hook_v(_per_head(value_input, self.W_V, self.b_V))
            z = self.hook_z(self._mix(q, k, v, scale))
        if self.cfg.use_attn_result:
            result = self.hook_result(torch.einsum("bqhd, hdm -> bqhm", z, self.W_O))
            return result.sum(dim=2) + self.b_O
        return F.linear(z.flatten(2), self.W_O.flatten(0, 1).T, self.b_O)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Float[Tensor, "batch position head d_head"]:
        """What each head reads, by its pattern."""
        if self.config.positions == "rotary":
            q, k = self.hook_rot_q(rotate(q)), self.hook_rot_k(rotate(k))
        bias = alibi(self.config.n_heads, q.shape[1]).to(q) if self.config.positions == "alibi" else None
        if unwatched(self, self.hook_attn_scores, self.hook_pattern, self.hook_z) and not self.config.dropout:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            mask = None if bias is None else bias + _later(bias)
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=1 / scale)
            return z.transpose(1, 2)
        scores = torch.einsum("bqhd, bkhd -> bhqk", q, k) / scale
        scores = scores if bias is None else scores + bias
        scores = self.hook_attn_scores(scores + _later(scores))
        pattern = self.hook_pattern(scores.softmax(dim=-1))
        return torch.einsum("bhqk, bkhd -> bqhd", self.dropout(pattern), v)

    def _is_short(self, x: Float[Tensor, "batch position d_model"]) -> bool:
        """Whether all of it, from x to z, may be one operation."""
        plain = self.config.positions not in ("rotary", "alibi") and not self.config.dropout
        points = (self.hook_q, self.hook_k, self.hook_v, self.hook_attn_scores, self.hook_pattern, self.hook_z)
        return plain and x.shape[1] <= FEW and unwatched(self, *points) and fusible(x)

    def _all_at_once(self, x: Float[Tensor, "batch position d_model"]) -> tuple[Tensor, ...]:
        """Queries, keys and values [batch, position, head, d_head] by one product instead of three."""
        W, b = packed((self.W_Q, self.W_K, self.W_V), (self.b_Q, self.b_K, self.b_V))
        return F.linear(x, W.T, b).unflatten(-1, (3, *self.b_V.shape)).unbind(2)


class TiedAttention(Attention):
    """One matrix for queries and keys."""

    W_K = property(lambda self: self.W_Q)  # pyright: ignore[reportAssignmentType]
    b_K = property(lambda self: self.b_Q)  # pyright: ignore[reportAssignmentType]


class MLP(nn.Module):
    """d_model → d_mlp → activation → d_model."""

    W_in: Float[Tensor, "d_model d_mlp"]
    b_in: Float[Tensor, "d_mlp"]
    W_out: Float[Tensor, "d_mlp d_model"]
    b_out: Float[Tensor, "d_model"]

    def __init__(self, config: ModelConfig):
        super().__init__()
        _weight(self, "W_in", (config.d_model, config.d_mlp))
        _weight(self, "b_in", (config.d_mlp,), None if config.bias_out else torch.zeros(config.d_mlp))
        _weight(self, "W_out", (config.d_mlp, config.d_model))
        _weight(self, "b_out", (config.d_model,), None if config.bias_out else torch.zeros(config.d_model))
        self.activation = {"gelu": nn.GELU(), "gelu-tanh": nn.GELU("tanh"), "relu": nn.ReLU()}[config.activation]
        self.hook_pre = Point()
        self.hook_post = Point()

    def forward(self, x: Float[Tensor, "batch position d_model"]) -> Float[Tensor, "batch position d_model"]:
        pre = self.hook_pre(F.linear(x, self.W_in.T, self.b_in))
        post = self.hook_post(self.activation(pre))
        return F.linear(post, self.W_out.T, self.b_out)


class LayerNorm(nn.Module):
    """(x − mean) / scale · w + b. `hook_scale` holds √(variance + ε); `hook_normalized` fires before w and b."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.w = nn.Parameter(torch.ones(width))
        self.b = nn.Parameter(torch.zeros(width))
        self.hook_scale = Point()
        self.hook_normalized = Point()

    def forward(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        if unwatched(self, self.hook_scale, self.hook_normalized):
            w = self.w
            return torch.layer_norm(x, w.shape, w, self.b, self.eps)
        x = x - x.mean(dim=-1, keepdim=True)
        scale = self.hook_scale((x.pow(2).mean(dim=-1, keepdim=True) + self.eps).sqrt())
        return self.hook_normalized(x / scale) * self.w + self.b


class Embed(nn.Module):
    W_E: Float[Tensor, "d_vocab d_model"]

    def __init__(self, config: ModelConfig):
        super().__init__()
        _weight(self, "W_E", (config.d_vocab, config.d_model))

    def forward(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_model"]:
        if not tokens.numel():
            raise BadPrompt("no tokens; give at least one")
        try:
            return F.embedding(tokens, self.W_E)
        except IndexError:
            raise BadPrompt(f"token ids must lie in 0 … {len(self.W_E) - 1}, the vocabulary of this model") from None


class PosEmbed(nn.Module):
    """Learned, or the sinusoids of *Attention Is All You Need*, which go on beyond n_ctx."""

    W_pos: Float[Tensor, "n_ctx d_model"]

    def __init__(self, config: ModelConfig):
        super().__init__()
        fixed = sinusoids(config.n_ctx, config.d_model) if config.positions == "sinusoidal" else None
        _weight(self, "W_pos", (config.n_ctx, config.d_model), fixed)

    def forward(self, length: int) -> Float[Tensor, "position d_model"]:
        if length > len(self.W_pos):
            return sinusoids(length, self.W_pos.shape[1]).to(self.W_pos)
        return self.W_pos[:length]


class Unembed(nn.Module):
    W_U: Float[Tensor, "d_model d_vocab"]
    b_U: Float[Tensor, "d_vocab"]

    def __init__(self, config: ModelConfig):
        super().__init__()
        _weight(self, "W_U", (config.d_model, config.d_vocab))
        _weight(self, "b_U", (config.d_vocab,), None if config.bias_unembed else torch.zeros(config.d_vocab))

    def forward(self, residual: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_vocab"]:
        return F.linear(residual, self.W_U.T, self.b_U)


class TiedUnembed(nn.Module):
    """W_U = W_Eᵀ: the embedding's own parameter, seen from the other side."""

    b_U: Float[Tensor, "d_vocab"]

    def __init__(self, config: ModelConfig, embed: Embed):
        super().__init__()
        self._embed = [embed]  # in a list, so that its parameter is not registered a second time
        _weight(self, "b_U", (config.d_vocab,), None if config.bias_unembed else torch.zeros(config.d_vocab))

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        return self._embed[0].W_E.T

    def forward(self, residual: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_vocab"]:
        return F.linear(residual, self.W_U.T, self.b_U)


def unwatched(module: nn.Module, *points: Point) -> bool:
    """Whether what stands between these hook points may be one fused operation: in training, where nobody looks.

    In evaluation it never is: there a hook that changes nothing changes no bit.
    """
    return module.training and not any(map(watched, points))


def _later(scores: Float[Tensor, "*axes destination source"]) -> Float[Tensor, "destination source"]:
    """What no position may look at: −∞ above the diagonal."""
    return scores.new_full(scores.shape[-2:], -torch.inf).triu(1)


def _weight(module: nn.Module, name: str, shape: tuple[int, ...], fixed: Tensor | None = None) -> None:
    """A parameter to be initialised, or a fixed value that is neither trained nor saved."""
    if fixed is None:
        setattr(module, name, nn.Parameter(torch.empty(shape)))
    else:
        module.register_buffer(name, fixed.contiguous(), persistent=False)


def _per_head(
    x: Float[Tensor, "batch position *head d_model"],
    W: Float[Tensor, "head d_model d_head"],
    b: Float[Tensor, "head d_head"],
) -> Float[Tensor, "batch position head d_head"]:
    """x W + b for every head; x is shared by the heads, or each has its own."""
    if x.ndim == 4:
        return torch.einsum("bphm, hmd -> bphd", x, W) + b
    return F.linear(x, rearrange(W, "h m d -> (h d) m"), b.flatten()).unflatten(-1, b.shape)
