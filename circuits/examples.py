"""What a circuit is judged by: prompts, the right and the wrong answer to each, and where in them things stand."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from circuits.errors import NoSuchPart

Place = int | str
"""A position, or the name of a role."""
ANSWER = "answer"


@dataclass(frozen=True, repr=False)
class Examples:
    """Prompts of one length. The answer is what the model says next at the role "answer"."""

    tokens: Int[Tensor, "example position"]
    answers: Int[Tensor, "example"]
    foils: Int[Tensor, "example"]
    """What somebody would say who got it wrong in the way that matters, such as the other noun."""
    roles: Mapping[str, int | Int[Tensor, "example"]]
    """Name → position, the same for all examples or one for each. "answer" must be among them."""
    clusters: tuple[str, ...] = field(default=())
    """Of each example: errors within a cluster are not independent. By default each is a cluster of its own."""

    def __post_init__(self) -> None:
        n, length = self.tokens.shape
        if not n or not length:
            raise ValueError(f"tokens have shape {list(self.tokens.shape)}; expected at least one example of one token")
        if ANSWER not in self.roles:
            raise NoSuchPart(f"the roles {', '.join(self.roles) or '(none)'} lack {ANSWER!r}, where the answer is said")
        for name, position in self.roles.items():
            at = torch.as_tensor(position)
            if at.shape not in ((), (n,)) or int(at.min()) < 0 or int(at.max()) >= length:
                raise NoSuchPart(f"role {name!r} is at {position}; expected one of 0 … {length - 1} for each example")
        if self.clusters and len(self.clusters) != n:
            raise ValueError(f"{len(self.clusters)} clusters for {n} examples; expected one for each")
        if not self.clusters:
            object.__setattr__(self, "clusters", tuple(str(i) for i in range(n)))

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        n, length = self.tokens.shape
        return f"Examples({n} of {length} tokens in {len(set(self.clusters))} clusters; roles {', '.join(self.roles)})"

    def at(self, place: Place) -> Int[Tensor, "example"]:
        """Where a place is in each example. Raises: NoSuchPart."""
        return position_of(place, self.roles).expand(len(self))

    def places(self) -> tuple[Place, ...]:
        """Every position up to the answer, by its role where it has one; only roles where these differ by example."""
        if any(isinstance(position, Tensor) and position.ndim for position in self.roles.values()):
            return tuple(self.roles)
        named: dict[int, Place] = {int(position): name for name, position in reversed(list(self.roles.items()))}
        return tuple(named.get(position, position) for position in range(int(self.roles[ANSWER]) + 1))

    def take(self, indices: Int[Tensor, "chosen"]) -> "Examples":
        """Some of them, in this order."""
        roles = {name: p[indices] if isinstance(p, Tensor) and p.ndim else p for name, p in self.roles.items()}
        clusters = tuple(self.clusters[i] for i in indices.tolist())
        return replace(
            self,
            tokens=self.tokens[indices], answers=self.answers[indices], foils=self.foils[indices],
            roles=roles, clusters=clusters,
        )  # fmt: skip

    def shuffled(self, seed: int = 0) -> "Examples":
        """The same in another order: for each example another one, to resample from."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        following = torch.empty_like(order)
        following[order] = order.roll(1)  # one cycle, so that no example stays where it is
        return self.take(following)

    def judge(
        self, logits: Float[Tensor, "example position d_vocab"]
    ) -> tuple[Bool[Tensor, "example"], Float[Tensor, "example"]]:
        """Whether each answer is the most likely next token, and its logit minus the foil's."""
        said = logits[torch.arange(len(self)), self.at(ANSWER)]
        return judged(said, self.answers, self.foils)


def judged(
    logits: Float[Tensor, "*axes d_vocab"], answers: Int[Tensor, "*axes"], foils: Int[Tensor, "*axes"]
) -> tuple[Bool[Tensor, "*axes"], Float[Tensor, "*axes"]]:
    """Whether the answer is the most likely token, and its logit minus the foil's."""
    answer, foil = (logits.gather(-1, which[..., None])[..., 0] for which in (answers, foils))
    return logits.argmax(-1) == answers, answer - foil


def position_of(place: Place, roles: Mapping[str, Any]) -> Int[Tensor, "_"]:
    """A position as a tensor: one for all examples, or one for each. Raises: NoSuchPart for a role that is not there.

    The name of a role that is a position, such as "3", is no position.
    """
    if isinstance(place, str) and place not in roles:
        raise NoSuchPart(f"{place!r} is no role here; there are {', '.join(roles) or 'none: give roles'}")
    position = torch.as_tensor(roles[place] if isinstance(place, str) else place)
    return position.reshape(-1)


def clustered_error(values: Float[Tensor, "row example"], cluster: Int[Tensor, "example"]) -> Float[Tensor, "row"]:
    """Standard error of the mean over examples whose errors go together within a cluster (Liang and Zeger 1986).

    √(G/(G − 1) Σ_g (Σ_{i in g} (x_i − mean))²) / n, for G clusters and n examples; infinite for a single cluster.
    """
    n_clusters, n = int(cluster.max()) + 1, values.shape[1]
    if n_clusters < 2:
        return torch.full_like(values[:, 0], math.inf)
    sums = torch.zeros(len(values), n_clusters, dtype=values.dtype)
    sums.index_add_(1, cluster, values - values.mean(1, keepdim=True))
    return (sums.pow(2).sum(1) * n_clusters / (n_clusters - 1)).sqrt() / n
