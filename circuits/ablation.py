"""What every head is worth to a task: loss and accuracy with the head replaced by its mean, sequence by sequence.

Mean ablation: in place of what a head writes at a position stands the mean of what it writes there over all sequences
given; everything behind it is computed anew. A head that writes the same in every sequence costs nothing, however
large it is; so does one whose work others take over (cut those together: `circuits.cuts`). There is no null but 0; the
interval is that of the mean over sequences, or over clusters of them that err together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from scipy.special import stdtrit
from torch import Tensor

from circuits.attention import exclusive
from circuits.examples import clustered_error
from circuits.hooks import Hook, check_heads, on
from circuits.sequences import predicted
from circuits.surface import Head, check_surface, head_name

if TYPE_CHECKING:
    from pandas import DataFrame

AT_ONCE = 2**23  # logits in one forward pass


@dataclass(frozen=True)
class Ablations:
    """Every head cut alone, each sequence scored with it and without."""

    clean_loss: Float[Tensor, "sequence"]
    """Mean next-token loss at the chosen positions, in nats."""
    clean_right: Float[Tensor, "sequence"]
    """Share of the chosen positions whose likeliest next token is the right one, 0 to 1."""
    loss: Float[Tensor, "layer head sequence"]
    """With that head at its mean."""
    right: Float[Tensor, "layer head sequence"]
    cluster: Int[Tensor, "sequence"]

    @property
    def cost(self) -> Float[Tensor, "layer head"]:
        """By how many nats the loss rises without the head: positive where it helps."""
        return (self.loss - self.clean_loss).mean(-1)

    @property
    def cost_interval(self) -> Float[Tensor, "two layer head"]:
        """95 %, from Student's t with as many degrees of freedom as clusters less one."""
        return self._interval(self.loss - self.clean_loss)

    @property
    def accuracy_change(self) -> Float[Tensor, "layer head"]:
        """Accuracy without the head minus that with it, −1 to 1."""
        return (self.right - self.clean_right).mean(-1)

    @property
    def accuracy_interval(self) -> Float[Tensor, "two layer head"]:
        """As `cost_interval`; of no width where no answer changes, which bounds nothing."""
        return self._interval(self.right - self.clean_right)

    def to_frame(self) -> "DataFrame":
        """One row a head: cost in nats with its interval, change of accuracy with its own."""
        from pandas import DataFrame

        layers, heads = self.cost.shape
        columns: dict[str, Any] = {"head": [head_name(i, j) for i in range(layers) for j in range(heads)]}
        values = {
            "cost": self.cost, "cost_low": self.cost_interval[0], "cost_high": self.cost_interval[1],
            "accuracy_change": self.accuracy_change, "accuracy_low": self.accuracy_interval[0],
            "accuracy_high": self.accuracy_interval[1],
        }  # fmt: skip
        return DataFrame(columns | {name: value.flatten().tolist() for name, value in values.items()})

    def _interval(self, changes: Float[Tensor, "layer head sequence"]) -> Float[Tensor, "two layer head"]:
        mean = changes.mean(-1)
        error = clustered_error(changes.flatten(0, 1), self.cluster).unflatten(0, mean.shape) if mean.numel() else mean
        half = float(stdtrit(max(int(self.cluster.max()), 1), 0.975)) * error
        return torch.stack([mean - half, mean + half])


def head_ablations(
    model: Any,
    tokens: Int[Tensor, "sequence position"],
    *,
    positions: slice | Sequence[int] | None = None,
    clusters: Sequence[str] | None = None,
) -> Ablations:
    """Every head's mean ablation on these sequences, scored at `positions` (whose *next* token is predicted; all by
    default). `clusters`: a name for each sequence; those of one name err together.

    The cost is that of heads + 2 passes over the sequences. Raises: ValueError for fewer than two sequences or tokens,
    no positions, or another number of clusters; Undefined while dropout is active; NoSurface.
    """
    check_surface(model)
    chosen = predicted(tokens, positions)
    names = [str(i) for i in range(len(tokens))] if clusters is None else list(clusters)
    if len(names) != len(tokens):
        raise ValueError(f"{len(names)} clusters for {len(tokens)} sequences; expected one for each")
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    layers, heads = model.cfg.n_layers, model.cfg.n_heads
    every = [(layer, head) for layer in range(layers) for head in range(heads)]
    check_heads(model, set(every))
    seen = tokens[:, : int(chosen.max()) + 1]
    batches = torch.arange(len(tokens)).split(max(1, AT_ONCE // (seen.shape[1] * int(model.cfg.d_vocab))))
    at = [f"blocks.{layer}.attn.hook_z" for layer in range(layers)]
    with exclusive(model), torch.no_grad():
        means = _means(model, seen, at, batches)
        clean = _scored(model, tokens, seen, chosen, batches)
        cut = []
        for layer, head in every:
            with on([_at_mean(model, (layer, head), means[at[layer]])]):
                cut.append(torch.stack(_scored(model, tokens, seen, chosen, batches)))
    found = torch.stack(cut, 1) if cut else torch.zeros(2, 0, len(tokens), dtype=torch.float64)
    loss, right = found.unflatten(1, (layers, heads))
    return Ablations(*clean, loss, right, torch.tensor([number[name] for name in names]))


def _means(model: Any, tokens: Tensor, at: list[str], batches: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """What every head writes at each position (before W_O), mean over the sequences."""
    sums: dict[str, Tensor] = {}
    for rows in batches:
        _, cache = model.run_with_cache(tokens[rows], names_filter=at, return_type=None)
        for name in at:
            sums[name] = sums.get(name, 0) + cache[name].double().sum(0)
    return {name: total / len(tokens) for name, total in sums.items()}


def _at_mean(model: Any, head: Head, mean: Float[Tensor, "position head d_head"]) -> Hook:
    layer, index = head

    def put(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, :, index] = mean[:, index].to(z)
        return z

    return Hook(model, f"blocks.{layer}.attn.hook_z", put)


def _scored(
    model: Any, tokens: Tensor, seen: Tensor, chosen: Tensor, batches: tuple[Tensor, ...]
) -> tuple[Float[Tensor, "sequence"], Float[Tensor, "sequence"]]:
    """(mean loss, share right) of every sequence at the chosen positions."""
    losses, right = [], []
    for rows in batches:
        logits, answers = model(seen[rows])[:, chosen].float(), tokens[rows][:, chosen + 1]
        losses.append(F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none").view(answers.shape))
        right.append(logits.argmax(-1) == answers)
    return torch.cat(losses).double().mean(1), torch.cat(right).double().mean(1)
