"""What a circuit does on its own: eigenvalues, copying, and the directions that it reads and writes.

The token-space circuit W_E W_OV W_U has rank d_head. Its eigenvalues that can differ from zero are those of the small
matrix (W_O W_U)(W_E W_V), [d_head, d_head]; counting signs on the dense matrix instead is wrong (0.61 for a perfectly
copying head of rank 16). A head copies if attending to a token raises that token: positive eigenvalues. Three measures
stand side by side, because none is robust alone (*A Mathematical Framework for Transformer Circuits*):

    eigenvalues   Σ Re λ / Σ |λ|, −1 … 1
    arg-max       share of source tokens whose own logit is raised most of all
    diagonal      how many standard deviations, within its row, a token's own logit stands out; mean over source tokens

The null turns what the head writes, W_O, at random within the written subspace; every spectrum stays as it is. At
d_head 8 it reaches ±.67, so z cannot exceed 4.9 there however well the head copies: look at the band and p.
"""

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Complex, Float, Int
from scipy.special import pdtr
from torch import Tensor

from circuits.composition import KINDS, Kind
from circuits.errors import NoSuchPart, Undefined
from circuits.matrices import CHUNK, Circuit
from circuits.nulls import turned_writes
from circuits.scores import DRAWS, LEVEL, Scores, from_draws, without_dead
from circuits.surface import Basis, Head, Weights, check_stream, head_name, head_of, pair_of, read

if TYPE_CHECKING:
    from pandas import DataFrame

NULL = "what the head writes, turned at random in the written subspace; spectra kept; {draws} draws"
LARGE = 2048  # tokens; beyond, a dense circuit a draw is too much
PERMUTED = "source tokens matched with output tokens at random; closed form"


def eigenvalues(
    model: Any, circuit: Literal["OV", "QK"] = "OV", *, fold: bool = True
) -> Complex[Tensor, "layer head d_head"]:
    """Eigenvalues of every head's circuit between tokens that can differ from zero: W_E W_OV W_U or W_E W_QK W_Eᵀ.

    Complex doubles, no order. Without biases. `fold` as in `composition_scores`. Raises: NoSuchPart, Undefined.
    """
    w = read(model, fold)
    if circuit == "OV":
        return torch.linalg.eigvals(w.W_O.double() @ (_moved(w) @ w.W_V.double()))
    if circuit == "QK":
        return torch.linalg.eigvals(w.W_K.double().mT @ (_matched(w) @ w.W_Q.double()))
    raise NoSuchPart(f"{circuit!r} has no eigenvalues here; expected OV or QK")


def positivity(values: Complex[Tensor, "*axes d_head"]) -> Float[Tensor, "*axes"]:
    """Σ Re λ / Σ |λ|, from −1 to 1; 0 where all are zero."""
    total = values.abs().sum(-1)
    return torch.where(total > 0, values.real.sum(-1) / total.clamp(min=1e-300), 0.0)


@dataclass(frozen=True, repr=False)
class CopyingScores:
    """Three measures of copying for every head, [layer, head] each."""

    eigenvalue: Scores
    argmax: Scores
    diagonal: Scores

    def to_frame(self) -> "DataFrame":
        """One row for each head and measure."""
        from pandas import concat

        return concat([s.to_frame() for s in (self.eigenvalue, self.argmax, self.diagonal)], ignore_index=True)

    def __repr__(self) -> str:
        return "\n".join(map(repr, (self.eigenvalue, self.argmax, self.diagonal)))

    def _repr_html_(self) -> str:
        return "".join(s._repr_html_() for s in (self.eigenvalue, self.argmax, self.diagonal))


def copying_score(model: Any, *, fold: bool = True, draws: int = DRAWS, seed: int = 0) -> CopyingScores:
    """How far every head raises the token that it attends to, by three measures.

    Above a vocabulary of 2,048 the null of the two measures on the diagonal matches tokens at random instead, in closed
    form; that holds where W_U is not tied to W_E. Raises: Undefined for a vocabulary of one token.
    """
    w = read(model, fold)
    if w.d_vocab < 2:
        raise Undefined("copying is undefined for a vocabulary of one token: there is no other to raise instead")
    generator = torch.Generator().manual_seed(seed)
    shape = (w.n_layers, w.n_heads)
    kinds: list[list[Scores]] = [[], [], []]
    for at in _heads(w):
        turned = turned_writes(w, w.W_O[at], draws, generator)
        moved = (_moved(w) @ w.W_V[at].double()).to(w.W_E)
        kinds[0].append(_positivity_score("copying, eigenvalues", w.W_O[at], moved, turned, w.basis))
        circuit = Circuit(w.W_E @ w.W_V[at], w.W_O[at] @ w.W_U, "source token", "output token", w.basis)
        for kind, one in zip(kinds[1:], _on_diagonal(circuit, w, turned), strict=True):
            kind.append(one)
    names = ("copying, eigenvalues", "copying, diagonal arg-max", "copying, diagonal z")
    return CopyingScores(*(_stack(name, kind, shape, ("head",), w) for name, kind in zip(names, kinds, strict=True)))


@dataclass(frozen=True, repr=False)
class CompositionSpectrum:
    """What one composed pair does on its own."""

    eigenvalues: Complex[Tensor, "d_head"]
    """Of the composed matrix between tokens, see `circuits.composition.composed`."""
    positivity: Scores
    """One number. Near 1: K-composition that matches equal tokens, or V-composition that copies."""
    kind: Kind
    writer: Head
    reader: Head

    def to_frame(self) -> "DataFrame":
        """One row: the pair, its positivity with its null, and its largest eigenvalue by size."""
        largest = self.eigenvalues[self.eigenvalues.abs().argmax()]
        pair = {"writer": head_name(*self.writer), "kind": self.kind, "reader": head_name(*self.reader)}
        return self.positivity.to_frame().assign(**pair, largest_eigenvalue=complex(largest))

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>"

    def __repr__(self) -> str:
        s, pair = self.positivity, f"{head_name(*self.writer)} → {self.kind} of {head_name(*self.reader)}"
        low, high = s.band.tolist()
        return f"{pair}: positivity {s.value:+.2f} (by chance {low:+.2f} … {high:+.2f}, p {s.p.item():.3f})"


def composition_spectrum(
    model: Any,
    kind: Kind,
    writer: str | Head,
    reader: str | Head,
    *,
    fold: bool = True,
    draws: int = DRAWS,
    seed: int = 0,
) -> CompositionSpectrum:
    """Sign and spectrum of one composed matrix: large composition need not be positive.

    The null turns what the writer writes. Raises: NoSuchPart.
    """
    check_stream(model)
    w = read(model, fold)
    if kind not in KINDS:
        raise NoSuchPart(f"{kind!r} is no kind of composition; expected one of Q, K, V")
    first, second = pair_of(writer, reader, w)
    q, k = w.W_Q[second], w.W_K[second]
    reads = {"Q": lambda: q @ k.T, "K": lambda: k @ q.T, "V": lambda: w.W_V[second] @ w.W_O[second]}[kind]()
    back = _moved(w) if kind == "V" else _matched(w)
    rest = (reads.double() @ back @ w.W_V[first].double()).to(w.W_E)
    turned = turned_writes(w, w.W_O[first], draws, torch.Generator().manual_seed(seed))
    score = _positivity_score(f"{kind}-composition positivity", w.W_O[first], rest, turned, w.basis)
    values = torch.linalg.eigvals((w.W_O[first] @ rest).double())
    return CompositionSpectrum(values, score, kind, first, second)


@dataclass(frozen=True, repr=False)
class SingularDirections:
    """The directions of a head's circuit, strongest first, each with the tokens at both of its ends."""

    values: Float[Tensor, "direction"]
    """Singular values of W_OV or W_QK."""
    share: Float[Tensor, "direction"]
    """Of the sum of all squared singular values."""
    share_by_chance: Float[Tensor, "direction two"]
    """The middle 95 % of that for random Gaussian factors of these shapes."""
    reads: Int[Tensor, "direction two token"]
    """Tokens (ids) whose embeddings lie furthest along the input direction: positive end, negative end."""
    writes: Int[Tensor, "direction two token"]
    """Tokens that the output direction raises and lowers most (OV), or whose keys lie furthest along it (QK)."""
    circuit: str
    basis: Basis

    def to_frame(self, names: Iterable[str] | None = None) -> "DataFrame":
        """One row for each direction and end; `names` are the vocabulary's words, else ids are shown."""
        from pandas import DataFrame

        words = None if names is None else list(names)

        def text(tokens: Tensor) -> str:
            return " ".join(str(t) if words is None else words[t] for t in tokens.tolist())

        rows = []
        for i, value in enumerate(self.values.tolist()):
            by_chance = "{:.3f} … {:.3f}".format(*self.share_by_chance[i].tolist())
            for end in (0, 1):
                rows.append({
                    "direction": i, "singular value": value, "share": self.share[i].item(), "by chance": by_chance,
                    "end": "+−"[end], "reads": text(self.reads[i, end]), "writes": text(self.writes[i, end]),
                })  # fmt: skip
        return DataFrame(rows)

    def __repr__(self) -> str:
        return f"{self.circuit} circuit, {self.basis} weights\n{self.to_frame().to_string(index=False)}"

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(index=False)


def singular_directions(
    model: Any,
    head: str | Head,
    circuit: Literal["OV", "QK"] = "OV",
    *,
    n: int = 4,
    tokens: int = 6,
    fold: bool = True,
    seed: int = 0,
) -> SingularDirections:
    """The n strongest directions that a head reads and writes, with the tokens at both ends of each.

    A direction and its opposite are the same: what matters is that positive goes with positive. Raises: NoSuchPart.
    """
    if n < 1 or tokens < 1:
        raise NoSuchPart(f"{n} directions with {tokens} tokens at each end; expected at least one of both")
    w = read(model, fold)
    at = head_of(head, w)
    if circuit not in ("OV", "QK"):
        raise NoSuchPart(f"{circuit!r} has no singular directions here; expected OV or QK")
    left, right = (w.W_V[at], w.W_O[at]) if circuit == "OV" else (w.W_Q[at], w.W_K[at].T)
    q1, r1 = torch.linalg.qr(left.double())
    q2, r2 = torch.linalg.qr(right.T.double())
    u, s, vh = torch.linalg.svd(r1 @ r2.T)
    n = min(n, len(s))
    inputs = (w.W_E - w.W_E.mean(0)).double() @ (q1 @ u[:, :n])
    outputs = (
        (vh[:n] @ q2.T) @ w.W_U.double() if circuit == "OV" else ((w.W_E - w.W_E.mean(0)).double() @ (q2 @ vh[:n].T)).T
    )
    ends = [
        torch.stack([m.topk(min(tokens, m.shape[1])).indices, (-m).topk(min(tokens, m.shape[1])).indices], 1)
        for m in (inputs.T, outputs)
    ]
    share = s**2 / s.pow(2).sum().clamp(min=1e-300)
    chance = _shares_by_chance(w, seed)[:, :n].T.to(w.W_E)
    return SingularDirections(s[:n].to(w.W_E), share[:n].to(w.W_E), chance, ends[0], ends[1], circuit, w.basis)


def _shares_by_chance(w: Weights, seed: int) -> Float[Tensor, "two direction"]:
    """Middle 95 % of each direction's share of the squared singular values, for Gaussian factors of a head's shape."""
    left, right = torch.randn(2, DRAWS, w.width, w.d_head, generator=torch.Generator().manual_seed(seed))
    s = torch.linalg.svdvals(torch.linalg.qr(left).R @ torch.linalg.qr(right).R.mT).pow(2)
    return torch.quantile(s / s.sum(1, keepdim=True), torch.tensor([LEVEL / 2, 1 - LEVEL / 2]), dim=0)


def _moved(w: Weights) -> Float[Tensor, "d_model d_model"]:
    """W_U W_E: from output tokens back to embeddings."""
    return _summed(w.W_U.T, w.W_E)


def _matched(w: Weights) -> Float[Tensor, "d_model d_model"]:
    """W_Eᵀ W_E."""
    return _summed(w.W_E, w.W_E)


def _summed(left: Float[Tensor, "d_vocab left"], right: Float[Tensor, "d_vocab right"]) -> Float[Tensor, "left right"]:
    """leftᵀ right in double precision, without a copy of all of them in it."""
    total = left.new_zeros(left.shape[1], right.shape[1], dtype=torch.float64)
    for a, b in zip(left.split(4096), right.split(4096), strict=True):
        total += a.double().T @ b.double()
    return total


def _heads(w: Weights) -> list[Head]:
    return [(layer, head) for layer in range(w.n_layers) for head in range(w.n_heads)]


def _positivity_score(
    measure: str, W_O: Tensor, rest: Float[Tensor, "d_model d_head"], turned: Tensor, basis: Basis
) -> Scores:
    """Of the eigenvalues of W_O rest, against those with W_O turned."""
    score = positivity(torch.linalg.eigvals((W_O @ rest).double())).to(W_O)
    null = positivity(torch.linalg.eigvals((turned @ rest).double())).to(W_O)
    dead = torch.as_tensor(not (bool(W_O.any()) and bool(rest.any())))
    return from_draws(measure, score, null, parts=(), null=NULL.format(draws=len(turned)), basis=basis, dead=dead)


def _on_diagonal(circuit: Circuit, w: Weights, turned: Tensor) -> tuple[Scores, Scores]:
    """Share of diagonal arg-max and mean diagonal z of one head, each with its null."""
    dead = torch.as_tensor(not (bool(circuit.left.any()) and bool(circuit.right.any())))
    share, mean_z, moments = _diagonal_measures(circuit)
    if w.d_vocab <= LARGE:
        null = _drawn_diagonals(circuit.left, turned, w.W_U)
        text = NULL.format(draws=len(turned))
        made = [
            from_draws("", torch.tensor(value).to(null), null[:, i], parts=(), null=text, basis=w.basis, dead=dead)
            for i, value in enumerate((share, mean_z))
        ]
        return made[0], made[1]
    return _hits(share, moments[0], len(circuit.left), w.basis, dead), _normal(mean_z, *moments[1], w.basis, dead)


def _diagonal_measures(circuit: Circuit) -> tuple[float, float, tuple[tuple[float, float], tuple[float, float]]]:
    """(arg-max share, mean diagonal z, their (mean, s.d.) if rows and columns are matched at random).

    With c_j rows whose largest entry is in column j, the number of hits of a random matching has mean 1 and variance
    (n² − Σ c_j²) / (n(n − 1)). The sum Σ Z[i, π(i)] over row-standardised Z has variance (n² − n Σ_j m_j²) / (n − 1),
    m_j the column means (Hoeffding's combinatorial central limit theorem).
    """
    n = circuit.shape[0]
    hits, diagonal = 0, 0.0
    counts = torch.zeros(circuit.shape[1], dtype=torch.float64)
    columns = torch.zeros(circuit.shape[1], dtype=torch.float64)
    for start, dense in circuit.chunks():
        best = dense.argmax(1)
        own = torch.arange(start, start + len(dense), device=dense.device)
        hits += int((best == own).sum())
        sd, mean = torch.std_mean(dense, dim=1, correction=0, keepdim=True)
        standard = (dense - mean) / sd.clamp(min=1e-30)
        diagonal += standard.gather(1, own[:, None]).sum().item()
        counts += best.bincount(minlength=circuit.shape[1]).double().cpu()
        columns += standard.sum(0).double().cpu()
    pairs = (n**2 - counts.pow(2).sum().item()) / (n * (n - 1))
    spread = (n**2 - n * (columns / n).pow(2).sum().item()) / (n - 1)
    return hits / n, diagonal / n, ((1 / n, math.sqrt(max(pairs, 0)) / n), (0.0, math.sqrt(max(spread, 0)) / n))


def _drawn_diagonals(
    left: Float[Tensor, "token d_head"], turned: Float[Tensor, "draw d_head d_model"], W_U: Tensor
) -> Float[Tensor, "draw two"]:
    """Arg-max share and mean diagonal z of left W_O W_U, for many W_O at once."""
    n, drawn = len(left), []
    for some in turned.split(max(1, CHUNK // n**2)):
        dense = left @ (some @ W_U)
        own = dense.diagonal(dim1=1, dim2=2)
        sd, mean = torch.std_mean(dense, dim=2, correction=0)
        hits = (dense.argmax(2) == torch.arange(n, device=dense.device)).to(dense).mean(1)
        drawn.append(torch.stack([hits, ((own - mean) / sd.clamp(min=1e-30)).mean(1)], 1))
    return torch.cat(drawn)


def _hits(share: float, moments: tuple[float, float], n: int, basis: Basis, dead: Tensor) -> Scores:
    """A share of hits against a matching at random, whose number of hits is close to Poisson with mean 1."""
    hits = round(share * n)
    at_most, at_least = float(pdtr(hits, 1.0)), 1 - (float(pdtr(hits - 1, 1.0)) if hits else 0.0)
    most = next(k for k in range(n + 1) if 1 - pdtr(k, 1.0) <= LEVEL / 2)
    return without_dead(Scores(
        "", torch.tensor(share), torch.tensor(moments[0]), torch.tensor(moments[1]), torch.tensor([0.0, most / n]),
        torch.tensor(min(1.0, 2 * min(at_most, at_least))), (), PERMUTED, basis, torch.ones((), dtype=torch.bool), dead,
    ))  # fmt: skip


def _normal(value: float, mean: float, sd: float, basis: Basis, dead: Tensor) -> Scores:
    """A number against a normal null."""
    p = math.erfc(abs(value - mean) / max(sd, 1e-300) / math.sqrt(2))
    band = torch.tensor([mean - 1.96 * sd, mean + 1.96 * sd])
    return without_dead(Scores(
        "", torch.tensor(value), torch.tensor(mean), torch.tensor(sd), band, torch.tensor(p), (), PERMUTED, basis,
        torch.ones((), dtype=torch.bool), dead,
    ))  # fmt: skip


def _stack(measure: str, scores: list[Scores], shape: tuple[int, ...], parts: tuple[str, ...], w: Weights) -> Scores:
    """Single numbers as one Scores of the given shape."""
    fields = ("scores", "null_mean", "null_sd", "p", "defined", "dead")
    if not scores:
        empty = w.W_E.new_zeros(shape)
        blank = torch.zeros(shape, dtype=torch.bool)
        return Scores(
            measure, empty, empty, empty, w.W_E.new_zeros(2, *shape), empty, parts, NULL, w.basis, blank, blank
        )
    values = {name: torch.stack([getattr(s, name) for s in scores]).reshape(shape) for name in fields}
    band = torch.stack([s.band for s in scores], 1).reshape(2, *shape)
    return Scores(measure=measure, **values, band=band, parts=parts, null=scores[0].null, basis=w.basis)
