"""GPT-2 on the workbench: copy Hugging Face's weights into a `Transformer`, so that every tool here runs on it."""

from einops import rearrange
from torch import Tensor
from transformers import GPT2LMHeadModel

from workbench.errors import BadWeights
from workbench.recipes import Activation, ModelConfig
from workbench.transformer import Transformer

ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "gelu": "gelu", "relu": "relu",
}  # fmt: skip


def from_gpt2(model: GPT2LMHeadModel) -> Transformer:
    """The same function as `model`, in the same mode (train or eval), on the CPU.

    Hugging Face keeps one matrix [d_model, 3 · head · d_head] for queries, keys and values of a layer; here they are
    three, [head, d_model, d_head] each, with biases [head, d_head]. Its output matrix [head · d_head, d_model] becomes
    W_O, [head, d_head, d_model]. Embeddings [d_vocab, d_model] and [n_ctx, d_model] and the feed-forward layer's
    matrices [d_model, d_mlp] and [d_mlp, d_model] are copied as they are; W_U is W_Eᵀ.

    Raises: BadWeights for a variant of GPT-2 that `Transformer` has no option for.
    """
    given = model.config
    if given.activation_function not in ACTIVATIONS:
        raise BadWeights(f"activation {given.activation_function} is none of {', '.join(ACTIVATIONS)}")
    if not given.tie_word_embeddings or given.scale_attn_by_inverse_layer_idx or given.layer_norm_epsilon != 1e-5:
        raise BadWeights("expected GPT-2 with a tied unembedding, scores divided by √d_head alone, and ε = 1e-5")
    if not given.resid_pdrop == given.attn_pdrop == given.embd_pdrop:
        raise BadWeights("expected GPT-2 with one dropout rate for attention, embedding and outputs")
    config = ModelConfig(
        n_layers=given.n_layer, n_heads=given.n_head, d_model=given.n_embd, d_mlp=given.n_inner or 4 * given.n_embd,
        n_ctx=given.n_positions, d_vocab=given.vocab_size, tied_unembedding=True, dropout=given.resid_pdrop,
        activation=ACTIVATIONS[given.activation_function],
        attention="softmax" if given.scale_attn_weights else "softmax-unscaled",
    )  # fmt: skip
    theirs = {name.removeprefix("transformer."): weight for name, weight in model.state_dict().items()}
    ours = {"embed.W_E": theirs["wte.weight"], "pos_embed.W_pos": theirs["wpe.weight"]}
    ours |= _layer_norm(theirs, "ln_f", "ln_final")
    for layer in range(config.n_layers):
        mine, its = f"blocks.{layer}", f"h.{layer}"
        W_QKV = rearrange(theirs[f"{its}.attn.c_attn.weight"], "m (qkv h d) -> qkv h m d", qkv=3, h=config.n_heads)
        b_QKV = rearrange(theirs[f"{its}.attn.c_attn.bias"], "(qkv h d) -> qkv h d", qkv=3, h=config.n_heads)
        for letter, W, b in zip("QKV", W_QKV, b_QKV, strict=True):
            ours |= {f"{mine}.attn.W_{letter}": W, f"{mine}.attn.b_{letter}": b}
        W_O = rearrange(theirs[f"{its}.attn.c_proj.weight"], "(h d) m -> h d m", h=config.n_heads)
        ours |= {
            f"{mine}.attn.W_O": W_O,
            f"{mine}.attn.b_O": theirs[f"{its}.attn.c_proj.bias"],
            f"{mine}.mlp.W_in": theirs[f"{its}.mlp.c_fc.weight"],
            f"{mine}.mlp.b_in": theirs[f"{its}.mlp.c_fc.bias"],
            f"{mine}.mlp.W_out": theirs[f"{its}.mlp.c_proj.weight"],
            f"{mine}.mlp.b_out": theirs[f"{its}.mlp.c_proj.bias"],
        }
        ours |= _layer_norm(theirs, f"{its}.ln_1", f"{mine}.ln1") | _layer_norm(theirs, f"{its}.ln_2", f"{mine}.ln2")
    copy = Transformer(config)
    copy.load_state_dict(ours)
    return copy.train(model.training)


def _layer_norm(theirs: dict[str, Tensor], its: str, mine: str) -> dict[str, Tensor]:
    return {f"{mine}.w": theirs[f"{its}.weight"], f"{mine}.b": theirs[f"{its}.bias"]}
