"""`workbench check`: does the library find what is there, and nothing where nothing is?

Power: models built by hand, whose circuits are known (`workbench.known_answers`). Each finding is one line: what was
expected, what was found. Nulls: freshly initialised models, in which there is nothing to find; one score in twenty
should leave its 95 % band, and no head should get a role. The shares are clustered by model: heads of one model share
its sequences, so that the standard error goes by models.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from circuits import (
    bandwidth,
    composition_spectrum,
    compositions,
    copying_score,
    direct_path,
    every_path,
    factoring_bugs,
    head_scores,
    memory_management,
    path_effects,
    qk_trace,
    skip_trigrams,
)
from circuits.composition import KINDS
from circuits.heads import HeadScores
from circuits.scores import Scores
from workbench.known_answers import KnownModel, known_models
from workbench.recipes import ModelConfig
from workbench.transformer import Transformer

DRAWS = 39  # of each drawn null on fresh models: the fewest for which leaving the band is exactly one in twenty


@dataclass(frozen=True)
class Finding:
    """One claim about one hand-built model."""

    model: str
    what: str
    expected: str
    found: str
    right: bool


@dataclass(frozen=True)
class Share:
    """How many scores of fresh models leave their 95 % band."""

    measure: str
    share: float
    standard_error: float
    """Over models."""
    n: int
    """Scores in all."""


def findings() -> Iterator[Finding]:
    """What the library says of every hand-built model, one claim at a time."""
    for known in known_models():
        yield from _CLAIMS[known.name](known)


def nulls(models: int, watch: Callable[[int], object] = lambda done: None) -> tuple[list[Share], int]:
    """(share outside the band for each measure, heads that got a role) on freshly initialised models.

    Two layers of four heads of width 8 in a stream of 32, with a feed-forward layer, 20 tokens, seeds 0 … models − 1.
    Raises: ValueError for fewer than two models, which have no spread.
    """
    if models < 2:
        raise ValueError(f"{models} fresh models; give at least 2, so that they have a spread")
    outside: dict[str, list[tuple[float, int]]] = {}
    roles = 0
    config = ModelConfig(n_layers=2, n_heads=4, d_model=32, d_mlp=64, n_ctx=16, d_vocab=20)
    for seed in range(models):
        model = Transformer(config, seed=seed).eval()
        heads = head_scores(model, draws=DRAWS, seed=seed)
        roles += sum(len(named) for named in heads.roles().values())
        copying = copying_score(model, draws=DRAWS, seed=seed)
        memory = memory_management(model, heads=heads, draws=DRAWS, seed=seed)
        scores = {f"{kind}-composition": s for kind, s in compositions(model).items()}
        scores |= {"OV spectrum": copying.eigenvalue, "OV diagonal z": copying.diagonal, "OV arg-max": copying.argmax}
        scores |= {"erasing": memory.erasing, "QK trace": qk_trace(model, seed=seed)}
        scores |= {name.replace("_", " "): heads[name] for name in heads.measures}
        if memory.neurons is not None:
            scores["neuron in · out"] = memory.neurons
        scores["overlap"] = bandwidth(model).overlap.every
        counts = {name: (int(score.outside.sum()), int(score.defined.sum())) for name, score in scores.items()}
        for kind in KINDS:
            signs = [composition_spectrum(model, kind, (0, h), (1, h), draws=DRAWS, seed=seed) for h in range(4)]
            counts[f"{kind} positivity"] = sum(bool(s.positivity.outside) for s in signs), len(signs)
        for name, (out, n) in counts.items():
            outside.setdefault(name, []).append((out / n, n))
        watch(seed + 1)
    shares = []
    for name, each in outside.items():
        values = torch.tensor([share for share, _ in each], dtype=torch.float64)
        spread = values.std().item() / math.sqrt(models)
        shares.append(Share(name, values.mean().item(), spread, sum(n for _, n in each)))
    return shares, roles


def _bigrams(known: KnownModel) -> Iterator[Finding]:
    assert known.table is not None
    apart = (direct_path(known.model).dense().log_softmax(-1) - known.table).abs().max().item()
    yield Finding(known.name, "direct path against the table", "≤ 1e-4", f"{apart:.0e}", apart <= 1e-4)


def _copying(known: KnownModel) -> Iterator[Finding]:
    copying = copying_score(known.model)
    yield _is_one(known, "OV spectrum", copying.eigenvalue[known.head or ""])
    yield _is_one(known, "OV arg-max", copying.argmax[known.head or ""])
    yield _is_one(known, "copying on data", head_scores(known.model)["copying"][known.head or ""])


def _previous(known: KnownModel) -> Iterator[Finding]:
    heads = head_scores(known.model)
    yield _is_one(known, "previous token", heads["previous_token"][known.head or ""])
    yield _roles(known, heads, {"previous-token": (known.head,)})


def _erasing(known: KnownModel) -> Iterator[Finding]:
    memory = memory_management(known.model)
    found = memory.erasing[known.head or ""]
    yield Finding(known.name, "eigenvalues of W_OV", "−1.00 ± 0.01", _with_band(found), abs(found.value + 1) <= 0.01)
    yield Finding(
        known.name, "heads that erase", str(known.head), ", ".join(memory.erasers), memory.erasers == [known.head]
    )


def _impostor(known: KnownModel) -> Iterator[Finding]:
    heads = head_scores(known.model)
    raw = heads["prefix_matching_raw"][known.head or ""].value
    left = heads["prefix_matching"][known.head or ""]
    yield Finding(known.name, "prefix matching before the control", "> 0.05", f"{raw:.2f}", raw > 0.05)
    yield Finding(known.name, "prefix matching", "< 0.05", _with_band(left), abs(left.value) < 0.05)
    yield _roles(known, heads, {})


def _induction(known: KnownModel) -> Iterator[Finding]:
    assert known.pair is not None
    writer, reader = known.pair
    heads = head_scores(known.model)
    yield _is_one(known, "prefix matching", heads["prefix_matching"][reader])
    yield _is_one(known, "previous token", heads["previous_token"][writer])
    yield _roles(known, heads, {"previous-token": (writer,), "current-token": ("0.1",), "induction": (reader,)})
    first = compositions(known.model)["K"].top(1).iloc[0]
    pair = f"{first['writer']} → {first['reader']}"
    right = (first["writer"], first["reader"]) == known.pair
    yield Finding(known.name, "highest K-composition", f"{writer} → {reader}", f"{pair}, z {first['z']:+.1f}", right)
    effects = path_effects(known.model, known.tokens, every_path(known.model), positions=slice(12, None))
    confirmed = [repr(paths[0]) for paths, yes in zip(effects.cuts, effects.confirmed(), strict=True) if yes]
    only = [f"{writer}→K→{reader}"]
    yield Finding(known.name, "confirmed by its cut, of 12 paths", only[0], ", ".join(confirmed), confirmed == only)


def _trigrams(known: KnownModel) -> Iterator[Finding]:
    rules = {(s, d): out for s, d, out in known.rules}
    said = {tuple(row) for row in skip_trigrams(known.model, n=len(rules)).tokens.tolist()}
    # what the model says is its rules, but for those in whose place it says a bug
    meant = {(s, d, o) for s, d, o in known.rules if (s, d) not in {(a, b) for a, b, _ in known.bugs}} | set(known.bugs)
    hits = len(said & meant)
    found = f"precision {hits / max(len(said), 1):.2f}, recall {hits / len(meant):.2f}"
    yield Finding(
        known.name, f"the {len(meant)} trigrams that it says", "precision 1.00, recall 1.00", found, said == meant
    )
    bugs = factoring_bugs(known.model, rules)
    for name, flags, truth in (
        ("head-level", bugs.head_level, known.head_bugs), ("behavioural", bugs.behavioural, known.bugs),
    ):  # fmt: skip
        listed = {(s, d, wrong) for s, d, _, wrong in bugs.tokens[flags].tolist()}
        right = listed == set(truth)
        yield Finding(known.name, f"{name} bugs", f"these {len(truth)}", f"{len(listed & set(truth))} of them, "
                      f"{len(listed - set(truth))} others", right)  # fmt: skip


_CLAIMS: dict[str, Callable[[KnownModel], Iterator[Finding]]] = {
    "bigram-table": _bigrams, "copying-head": _copying, "previous-token-head": _previous, "erasing-head": _erasing,
    "positional-impostor": _impostor, "induction-pair": _induction, "repaired-skip-trigrams": _trigrams,
    "broken-skip-trigrams": _trigrams,
}  # fmt: skip


def _is_one(known: KnownModel, what: str, score: Scores) -> Finding:
    return Finding(known.name, what, "1.00 ± 0.01", _with_band(score), abs(score.value - 1) <= 0.01)


def _roles(known: KnownModel, heads: HeadScores, expected: dict[str, tuple[str | None, ...]]) -> Finding:
    named = {role: found for role, found in heads.roles().items() if found}
    return Finding(known.name, "heads with a role", _text(expected), _text(named), named == expected)


def _text(roles: Mapping[str, tuple[str | None, ...]]) -> str:
    return "; ".join(f"{role}: {', '.join(map(str, heads))}" for role, heads in roles.items()) or "none"


def _with_band(score: Scores) -> str:
    low, high = score.band.tolist()
    return f"{score.value:.2f} (by chance {low:.2f} … {high:.2f})"
