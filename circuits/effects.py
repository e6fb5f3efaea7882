"""What every edge is worth: accuracy and answer − foil when it is cut, alone, in pairs, and all at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from scipy.special import stdtrit
from torch import Tensor

from circuits.attention import exclusive
from circuits.cuts import cut
from circuits.edges import Edge, Reference, reference
from circuits.errors import NoSuchPart
from circuits.examples import ANSWER, Examples, clustered_error

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class EdgeEffects:
    """Accuracy (0 to 1) and logit difference (answer − foil, in nats) under each cut, example by example."""

    edges: tuple[Edge, ...]
    what: str
    replacement: str
    clean_right: Bool[Tensor, "example"]
    clean_difference: Float[Tensor, "example"]
    right: Bool[Tensor, "edge example"]
    """Whether the answer is said when that edge is cut."""
    difference: Float[Tensor, "edge example"]
    joint_right: Bool[Tensor, "example"]
    """When all of them are cut at once."""
    joint_difference: Float[Tensor, "example"]
    strongest: tuple[int, ...]
    """The edges, as indices, that were cut in pairs: those whose cut changes the logit difference most."""
    pair_right: Bool[Tensor, "strong strong example"]
    """When two are cut at once; on the diagonal, one."""
    pair_difference: Float[Tensor, "strong strong example"]
    cluster: Int[Tensor, "example"]

    @property
    def accuracy(self) -> Float[Tensor, "edge"]:
        return self.right.double().mean(1)

    @property
    def accuracy_change(self) -> Float[Tensor, "edge"]:
        """Accuracy with the cut minus that without."""
        return self._changes("right").mean(1)

    @property
    def difference_change(self) -> Float[Tensor, "edge"]:
        return self._changes("difference").mean(1)

    @property
    def accuracy_error(self) -> Float[Tensor, "edge"]:
        """Standard error of `accuracy_change`, paired by example and clustered.

        It is 0 where the cut changes no answer (or every answer), which bounds nothing.
        """
        return clustered_error(self._changes("right"), self.cluster)

    @property
    def difference_error(self) -> Float[Tensor, "edge"]:
        return clustered_error(self._changes("difference"), self.cluster)

    def interval(self, of: str = "right") -> Float[Tensor, "two edge"]:
        """95 % interval of the change of accuracy ("right") or of the logit difference ("difference"), from Student's t
        with as many degrees of freedom as clusters less one. No wider than its standard error allows: where that is 0,
        it says nothing. Raises: NoSuchPart for anything else."""
        _check_measure(of)
        changes = self._changes(of)
        error = clustered_error(changes, self.cluster)
        half = float(stdtrit(max(len(self.cluster.unique()) - 1, 1), 0.975)) * error
        return torch.stack([changes.mean(1) - half, changes.mean(1) + half])

    def interaction(self, of: str = "right") -> Float[Tensor, "strong strong"]:
        """What cutting two costs beyond what each costs alone: change(both) − change(one) − change(other).

        `of`: "right" (accuracy) or "difference". Negative where one backs the other up: both together cost more. 0 on
        the diagonal. Raises: NoSuchPart for anything else.
        """
        _check_measure(of)
        both = (getattr(self, f"pair_{of}").double() - getattr(self, f"clean_{of}").double()).mean(2)
        alone = both.diagonal()
        return (both - alone[:, None] - alone[None]).fill_diagonal_(0)

    def to_frame(self) -> "DataFrame":
        """One row for each edge, the largest change of the logit difference first, then all edges together."""
        from pandas import DataFrame

        columns = {
            "accuracy": self.accuracy, "accuracy_change": self.accuracy_change, "accuracy_error": self.accuracy_error,
            "difference": self.difference.double().mean(1), "difference_change": self.difference_change,
            "difference_error": self.difference_error,
        }  # fmt: skip
        frame = DataFrame({"edge": [repr(edge) for edge in self.edges]} | {k: v.tolist() for k, v in columns.items()})
        frame = frame.sort_values("difference_change", key=lambda x: -x.abs(), kind="stable").reset_index(drop=True)
        right, difference = (
            (getattr(self, f"joint_{of}").double() - getattr(self, f"clean_{of}").double())[None]
            for of in ("right", "difference")
        )
        frame.loc[len(frame)] = [
            "all of them", self.joint_right.double().mean().item(), right.mean().item(),
            clustered_error(right, self.cluster).item(), self.joint_difference.double().mean().item(),
            difference.mean().item(), clustered_error(difference, self.cluster).item(),
        ]  # fmt: skip
        return frame.assign(what=self.what, replacement=self.replacement)

    def pairs_frame(self) -> "DataFrame":
        """One row for each pair: accuracy and logit difference with both cut, and their interactions."""
        from pandas import DataFrame

        interactions, rows = {of: self.interaction(of) for of in ("right", "difference")}, []
        for i, one in enumerate(self.strongest):
            for j, other in enumerate(self.strongest[:i]):
                rows.append({
                    "edge": repr(self.edges[other]), "with": repr(self.edges[one]),
                    "accuracy": self.pair_right[i, j].double().mean().item(),
                    "difference": self.pair_difference[i, j].mean().item(),
                    "accuracy_interaction": interactions["right"][i, j].item(),
                    "difference_interaction": interactions["difference"][i, j].item(),
                })  # fmt: skip
        return DataFrame(rows)

    def __repr__(self) -> str:
        shown = (
            self.to_frame().drop(columns=["what", "replacement"]).to_string(index=False, float_format="{:.3f}".format)
        )
        return f"{self._heading}\n{shown}"

    def _repr_html_(self) -> str:
        shown = self.to_frame().drop(columns=["what", "replacement"]).to_html(index=False, float_format="{:.3f}".format)
        return f"<p>{self._heading}</p>{shown}"

    @property
    def _heading(self) -> str:
        how = self.what if self.what == "knock-out" else f"{self.what}, {self.replacement}"
        n, clusters = len(self.cluster), len(self.cluster.unique())
        return (
            f"Each edge cut ({how}) on {n} examples in {clusters} clusters; without a cut accuracy "
            f"{self.clean_right.double().mean():.3f}, answer − foil {self.clean_difference.mean():.2f}"
        )

    def _changes(self, of: str) -> Float[Tensor, "edge example"]:
        return getattr(self, of).double() - getattr(self, f"clean_{of}").double()


def edges_between(
    examples: Examples,
    layers: Sequence[int],
    heads: Sequence[int | None] = (None,),
    destinations: Sequence[Any] = (ANSWER,),
) -> tuple[Edge, ...]:
    """Every edge into these destinations from every place that is never behind it.

    `heads`: None for all of a layer together, numbers for each on its own. `destinations`: by default the answer;
    `examples.places()` for all.
    """
    found = []
    for layer in layers:
        for head in heads:
            for destination in destinations:
                at = examples.at(destination)
                sources = [place for place in examples.places() if bool((examples.at(place) <= at).all())]
                found += [Edge(layer, head, destination, source) for source in sources]
    return tuple(found)


def edge_effects(
    model: Any,
    examples: Examples,
    *,
    what: str = "contribution",
    replacement: str = "mean",
    edges: Sequence[Edge] | None = None,
    reference: Examples | Reference | None = None,
    pairs: int = 6,
) -> EdgeEffects:
    """Cut every edge alone, the strongest ones in pairs, and all at once.

    `edges`: by default all heads of every layer together, from every place to the answer. `reference`: what the mean is
    taken over (by default the examples), or the other prompt of each for "resample" (by default another example).
    `pairs`: how many of the strongest edges are cut in pairs. Raises: what `cut` raises.
    """
    chosen = edges_between(examples, range(model.cfg.n_layers)) if edges is None else tuple(edges)
    if not chosen:
        raise NoSuchPart("no edges to cut; give at least one")
    taken_from = _taken_from(model, examples, replacement, reference)

    def under(gone: Sequence[Edge]) -> tuple[Tensor, Tensor]:
        with cut(model, gone, replacement if gone else "mean", what=what, reference=taken_from, roles=examples.roles):
            return examples.judge(model(examples.tokens))

    with exclusive(model), torch.no_grad():
        clean, joint = under(()), under(chosen)
        right, difference = (torch.stack(each) for each in zip(*(under((edge,)) for edge in chosen), strict=True))
        size = (difference - clean[1]).double().mean(1).abs()
        strongest = size.argsort(descending=True, stable=True)[:pairs].tolist()
        pair_right = right[strongest].repeat(len(strongest), 1, 1)
        pair_difference = difference[strongest].repeat(len(strongest), 1, 1)
        for i, one in enumerate(strongest):
            for j, other in enumerate(strongest[:i]):
                both = under((chosen[one], chosen[other]))
                for at in ((i, j), (j, i)):
                    pair_right[at], pair_difference[at] = both
    names = {name: i for i, name in enumerate(dict.fromkeys(examples.clusters))}
    cluster = torch.tensor([names[name] for name in examples.clusters])
    return EdgeEffects(
        chosen, what, replacement, *clean, right, difference, *joint, tuple(strongest), pair_right, pair_difference,
        cluster,
    )  # fmt: skip


def _check_measure(of: str) -> None:
    if of not in ("right", "difference"):
        raise NoSuchPart(f"{of!r} is no measure; expected right or difference")


def _taken_from(model: Any, examples: Examples, replacement: str, given: Examples | Reference | None) -> Reference:
    if isinstance(given, Reference):
        return given
    if given is None:
        given = examples.shuffled() if replacement == "resample" else examples
    return reference(model, given)
