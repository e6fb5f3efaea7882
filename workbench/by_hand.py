"""Weights written by hand: what a model can do, whether or not training finds it.

One layer of two heads, without LayerNorm or feed-forward layer, answers every sentence of the closed Winograd task.
The residual stream is one-hot: [word | position | noun to say].

- Head 0.0 looks from the answer position to x and copies it with strength 2. An adjective that speaks of y has a key
  twice as long as x's and drains the attention away; what it carries says nothing.
- Head 0.1 looks from the answer position to y and copies it with strength 1.

So y wins exactly when the adjective has drained head 0.0.
"""

import math

import torch

from workbench.errors import BadRecipe
from workbench.tasks.task import Task
from workbench.tasks.winograd import Winograd
from workbench.transformer import Transformer

SCORE = 20.0  # attention score of the noun; e⁻²⁰ is what the other positions get
LOGIT = 10.0  # per unit of copying strength


def write_weights(model: Transformer, task: Task) -> None:
    """Write the one-layer Winograd model into `model`. Raises: BadRecipe if its shape does not fit."""
    if not isinstance(task, Winograd):
        raise BadRecipe(f'init = "by-hand" knows only Winograd tasks, not {task.name}')
    config, n_words, n_ctx = model.config, len(task.vocabulary), task.n_ctx
    nouns = sorted(set(task.train[:, [task.role("x"), task.role("y")]].flatten().tolist()))
    word, position, say = 0, n_words, n_words + n_ctx  # first dimension of each part of the stream
    shape = {"n_layers": (config.n_layers, 1), "n_heads": (config.n_heads, 2), "d_head": (config.d_head, len(nouns)),
             "d_model": (config.d_model, say + len(nouns)), "d_mlp": (config.d_mlp, 0)}  # fmt: skip
    for field, (given, needed) in shape.items():
        if given != needed:
            raise BadRecipe(f'init = "by-hand" needs {field} = {needed} for {task.name}, not {given}')
    if config.norm != "none" or config.positions != "learned" or config.attention != "softmax":
        raise BadRecipe('init = "by-hand" needs norm = "none", positions = "learned" and attention = "softmax"')

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.W_E[:, word : word + n_words] = torch.eye(n_words)
        model.W_pos[:, position : position + n_ctx] = torch.eye(n_ctx)
        attention = model.blocks[0].attn
        length = math.sqrt(SCORE * math.sqrt(config.d_head))  # of query and key: their product over √d_head is SCORE
        attention.W_Q[:, position + task.answer_position, 0] = length
        for head, role, strength in ((0, "x", 2.0), (1, "y", 1.0)):
            attention.W_K[head, position + task.role(role), 0] = length
            for i, noun in enumerate(nouns):
                attention.W_V[head, word + noun, i] = 1.0
                attention.W_O[head, i, say + i] = strength
        for adjective, role in task.answer_of.items():
            if role == "y":
                attention.W_K[0, word + task.vocabulary.token(adjective), 0] = 2 * length
        for i, noun in enumerate(nouns):
            model.W_U[say + i, noun] = LOGIT
