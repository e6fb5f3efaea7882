"""The weights that training starts from."""

import math

import torch
from torch import nn

from workbench.recipes import ModelConfig


def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Write the initial weights by `config.init`, drawn from `seed` alone, parameter by parameter in their order."""
    if next(model.parameters()).is_meta:
        return
    if config.init == "by-hand":  # workbench.by_hand writes what is not zero: it needs the task's words
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        return
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            attribute = name.rpartition(".")[2]
            if attribute in ("w", "b"):  # LayerNorm's
                continue
            is_bias, is_embedding = attribute.startswith("b_"), attribute in ("W_E", "W_pos")
            if config.init == "torch":
                fan_in = {"W_O": config.n_heads * config.d_head, "W_out": config.d_mlp, "b_out": config.d_mlp,
                          "b_O": config.n_heads * config.d_head}.get(attribute, config.d_model)  # fmt: skip
                bound = 1 / math.sqrt(fan_in)
                if is_embedding:
                    parameter.normal_(generator=generator)
                else:
                    parameter.uniform_(-bound, bound, generator=generator)
            elif is_bias:
                parameter.zero_()
            elif config.init == "gpt2":
                writes = attribute in ("W_O", "W_out")
                parameter.normal_(0, 0.02 / math.sqrt(2 * config.n_layers) if writes else 0.02, generator=generator)
            else:
                parameter.normal_(0, 0.8 / math.sqrt(config.d_model), generator=generator)
            parameter.mul_(config.init_scale)
