"""One training step: ours, with all its hook points, against a plain model in the form of nanoGPT.

    python benchmarks/training_step.py

Both do the same work in the same process on one thread, ten steps and ten steps about, since in training a step follows
one of its own kind: the same sizes, options and number of tokens, each with its own way to draw a batch, then forward,
loss, backward and AdamW (fused). Printed are means of CPU seconds, which other work on the machine disturbs less than
seconds by the clock, and where they go.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from workbench.memory import keep_freed
from workbench.recipes import Recipe, load_recipe
from workbench.training import Trainer

CASES = {
    "winograd-2": "2 layers, 64 wide, 17 tokens",
    "shakespeare-1": "1 layer, 128 wide, 128 tokens, vocabulary 1,024",
}
TURNS, STEPS, PROFILED = 8, 10, 30
OPERATORS = {
    "matrix products": ("aten::mm", "aten::addmm"),
    "attention": ("scaled_dot_product", "_Attend"),
    "GELU": ("aten::gelu",),
    "LayerNorm": ("native_layer_norm",),
    "cross-entropy": ("log_softmax", "nll_loss", "_NextTokenLoss"),
    "optimizer": ("Optimizer.",),
    "indexing of data and embeddings": ("aten::index", "aten::embedding", "aten::slice", "aten::stack"),
}
"""Parts of their names, or of those that they are a part of."""


class Peer(nn.Module):
    """Embeddings, pre-norm blocks of fused attention and a feed-forward layer, a final norm, a linear layer."""

    def __init__(self, recipe: Recipe, n_ctx: int, d_vocab: int):
        super().__init__()
        model = recipe.model
        self.tokens, self.positions = nn.Embedding(d_vocab, model.d_model), nn.Embedding(n_ctx, model.d_model)
        blocks = [PeerBlock(model.d_model, model.n_heads, model.bias_qkv) for _ in range(model.n_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(model.d_model)
        self.head = nn.Linear(model.d_model, d_vocab, bias=model.bias_unembed)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class PeerBlock(nn.Module):
    def __init__(self, width: int, n_heads: int, bias: bool):
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.n_heads, width // self.n_heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@dataclass
class PeerTrainer:
    """The plain model with its own batches: slices of one long row of 16-bit tokens, widened and stacked."""

    model: Peer
    optimizer: torch.optim.Optimizer
    row: np.ndarray
    length: int
    batch: int

    def update(self) -> None:
        starts = torch.randint(len(self.row) - self.length - 1, (self.batch,)).tolist()
        tokens, targets = (
            torch.stack([torch.from_numpy(self.row[i + by : i + by + self.length].astype(np.int64)) for i in starts])
            for by in (0, 1)
        )
        loss = self.model(tokens, targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        loss.item()


def pair(name: str) -> tuple[Trainer, PeerTrainer]:
    recipe = load_recipe(name)
    recipe = replace(recipe, training=replace(recipe.training, probes=()))
    ours = Trainer.build(recipe, Path("unused"))
    peer = Peer(recipe, ours.task.n_ctx, len(ours.task.vocabulary))
    assert sum(p.numel() for p in peer.parameters()) == ours.model.n_parameters
    groups = [
        {"params": [p for p in peer.parameters() if p.ndim >= 2], "weight_decay": recipe.training.weight_decay},
        {"params": [p for p in peer.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.training.lr, fused=True)
    tokens = ours.task.batch(0, 0, 4 * recipe.training.batch)
    return ours, PeerTrainer(
        peer, optimizer, tokens.flatten().numpy().astype(np.uint16), tokens.shape[1] - 1, recipe.training.batch
    )


def cpu_seconds(step: Callable[[], None]) -> float:
    """Of a step, in the mean of ten."""
    started = time.process_time()
    for _ in range(STEPS):
        step()
    return (time.process_time() - started) / STEPS


def where_it_goes(update: Callable[[], None]) -> str:
    """The share of each kind of operator in the CPU time of a step, by torch's profiler (which costs some itself)."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED):
            update()
    times = dict.fromkeys([*OPERATORS, "all else"], 0.0)
    for event in profiled.events() or ():
        part, kind = event, None
        while part is not None and kind is None:
            kind = next((kind for kind, names in OPERATORS.items() if any(name in part.name for name in names)), None)
            part = part.cpu_parent
        times[kind or "all else"] += event.self_cpu_time_total
    return ", ".join(f"{kind} {100 * taken / sum(times.values()):.0f} %" for kind, taken in times.items())


def main() -> None:
    torch.set_num_threads(1)
    keep_freed()  # as training does; the plain model has it too
    for name, sizes in CASES.items():
        ours, peer = pair(name)
        times: dict[str, list[float]] = {"ours": [], "peer": []}
        for turn in range(1 + TURNS):
            for who, update in (("ours", ours._update), ("peer", peer.update)):
                taken = cpu_seconds(update)
                if turn:  # the first warms up
                    times[who].append(taken)
        mine, theirs = (statistics.mean(times[who]) for who in ("ours", "peer"))
        ratios = np.quantile(np.array(times["peer"]) / np.array(times["ours"]), [0.25, 0.75])
        print(f"{name} ({sizes}, batch {ours.recipe.training.batch})")
        print(f"  ours {1000 * mine:.1f} ms, nanoGPT's form {1000 * theirs:.1f} ms of CPU time a step")
        print(f"  ours is {theirs / mine:.2f} × as fast (quartiles of turns {ratios[0]:.2f}–{ratios[1]:.2f})")
        for who, update in (("ours", ours._update), ("nanoGPT's form", peer.update)):
            print(f"  {who}: {where_it_goes(update)}")


if __name__ == "__main__":
    main()
