"""What the page on two hops asks: answer and foil, which blocks, heads and positions, which chains are drawn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import streamlit as st

from workbench.figures import style
from workbench.figures.numbers import Head, head_name
from workbench.pages import cache
from workbench.pages.cache import RunKey, Target
from workbench.pages.frame import View

if TYPE_CHECKING:
    from circuits.attention import AttentionMaps
    from workbench.recipes import ModelConfig

SHARES = {"1 %": 0.01, "2 %": 0.02, "5 %": 0.05, "10 %": 0.10, "25 %": 0.25}
USUAL_SHARE = "10 %"
KIND_NAMES = {"query": "Q", "key": "K", "value": "V"}
FEW_HEADS, SOME_HEADS, SOME_PLACES = 4, 2, 4
"""Heads of a block up to which all are measured; else so many of each block, and at least so many positions."""
AT_ONCE, LONGEST = 1.0, 60.0
"""Seconds of cuts that are measured without being asked for, and when asked for."""
MOST_CHAINS = 50_000


@dataclass(frozen=True)
class Asked:
    """What the chains are of."""

    key: RunKey
    prompt: str
    position: int
    target: Target
    answer: str
    foil: str

    @property
    def plain(self) -> tuple[RunKey, str, int, Target]:
        return self.key, self.prompt, self.position, self.target


@dataclass(frozen=True)
class Scope:
    """Which of the chains are measured."""

    heads: tuple[Head, ...]
    places: tuple[int, ...]
    all_heads: bool
    all_places: bool
    kinds: str = "QKV"

    def cuts(self) -> int:
        """How many Q- and K-chains there are, each a forward pass."""
        layers = sorted({layer for layer, _ in self.heads})
        size = {layer: sum(of == layer for of, _ in self.heads) for layer in layers}
        pairs = sum(size[a] * size[b] for a in layers for b in layers if a < b)
        n = len(self.places)
        return pairs * (n * (n + 1) // 2 + n)


@st.cache_data(max_entries=48, show_spinner=False)
def screen(
    key: RunKey, prompt: str, position: int, target: Target, layers: tuple[int, int]
) -> tuple[float, list[int], list[int], list[int]]:
    """The sum of all V-chains between two blocks, and what has the largest ones: heads of the earlier block, heads of
    the later one, positions; these by turns with those from which the earlier block moves most to `position`.

    Raises: CircuitError.
    """
    import torch

    from circuits.attention import moved_maps
    from circuits.decompose import chain_contributions

    run = cache.run_of(key)
    tokens = run.encode(prompt)[:, : position + 1]
    direction = torch.zeros(run.model.cfg.d_vocab)
    direction[target.answer] += 1
    direction[target.answer if target.foil is None else target.foil] -= 1
    each = chain_contributions(run.model, tokens, position, direction, layers)
    size = each.abs()

    def order(values: Any) -> list[int]:
        return values.argsort(descending=True, stable=True).tolist()

    by_v = order(torch.maximum(size.amax((0, 1, 3)), size.amax((0, 1, 2))))
    by_moved = order(moved_maps(run.model, tokens).patterns[layers[0], :, position].amax(0))
    places = [position, *(place for two in zip(by_v, by_moved, strict=True) for place in two)]
    first, second = order(size.amax((1, 2, 3))), order(size.amax((0, 2, 3)))
    return float(each.double().sum()), first, second, list(dict.fromkeys(places))


def choose_words(view: View, maps: "AttentionMaps", second: "AttentionMaps | None") -> Asked:
    """Answer and foil: by default what sets the two prompts apart, else the two likeliest words of this one."""
    words = view.run.task.vocabulary.words
    at = view.destination
    likely = maps.probabilities[at, : len(words)].topk(min(2, len(words))).indices.tolist()
    answer, foil = likely[0], likely[-1]
    if second is not None:
        of_b = int(second.probabilities[min(at, len(second.probabilities) - 1), : len(words)].argmax())
        foil = of_b if of_b != answer else foil
    names: dict[str, int] = {}
    for token in dict.fromkeys([answer, foil, *range(len(words))]):
        names.setdefault(style.visible(words[token]), token)
    how = "numbers below are about the logit of the answer minus that of the foil"
    chosen = [
        one_of(label, list(names), key, list(names).index(style.visible(words[usual])), width=140, help=how)
        for label, key, usual in (("Answer", "hops_answer", answer), ("Foil", "hops_foil", foil))
    ]
    target = Target(names[chosen[0]], names[chosen[1]])
    return Asked(view.entry.at(), view.prompt, at, target, *chosen)


def choose_shown() -> tuple[str, float]:
    """Kinds of chains, and the least share of answer − foil that is drawn."""
    names = list(KIND_NAMES)
    kinds = st.pills("Into its", names, selection_mode="multi", default=names, key="hops_kinds", bind="query-params",
                     help="into what the later head takes what the earlier one moved")  # fmt: skip
    share = one_of("Worth at least", list(SHARES), "hops_share", list(SHARES).index(USUAL_SHARE), width=120,
                 help="of answer − foil; what is worth less is not drawn")  # fmt: skip
    return "".join(KIND_NAMES[k] for k in kinds) or "QKV", SHARES[share]


def choose_layers(n_layers: int) -> tuple[int, int]:
    """The two blocks; a model of two has no choice."""
    if n_layers == 2:
        return 0, 1
    names = {f"block {i + 1}": i for i in range(n_layers)}
    lower = one_of("Earlier block", list(names)[:-1], "hops_lower", n_layers - 2, width=110)
    later = list(names)[names[lower] + 1 :]
    return names[lower], names[one_of("Later block", later, "hops_upper", len(later) - 1, width=110)]


def one_of(label: str, options: list[str], key: str, index: int, *, width: Any = 150, help: str | None = None) -> str:
    """A choice that falls back where what was chosen is not there. One that was not chosen follows its default, so that
    a link shows the same."""
    state, usual = st.session_state, options[index]
    before, state[f"{key}_usual"] = state.get(f"{key}_usual", usual), usual
    if key in state and (state[key] not in options or (state[key] == before and before != usual)):
        state[key] = usual
    chosen = st.selectbox(label, options, index=index, key=key, bind="query-params", width=width, help=help)
    return usual if chosen is None else chosen


def choose_scope(view: View, asked: Asked, layers: tuple[int, int], tokens: Sequence[str]) -> tuple[Scope, float]:
    """Which heads and positions, and the sum of all V-chains between the blocks. Of a small model and prompt all."""
    model, everywhere = view.run.recipe.model, tuple(range(asked.position + 1))
    total, first, second, order = screen(*asked.plain, layers)
    some = model.n_heads if model.n_heads <= FEW_HEADS else SOME_HEADS
    usual = [
        sorted(head_name((layer, h)) for h in of[:some]) for layer, of in zip(layers, (first, second), strict=True)
    ]

    def scope(heads: Sequence[str], places: Sequence[int]) -> Scope:
        chosen = sorted((int(layer), int(number)) for layer, _, number in (head.partition(".") for head in heads))
        at = tuple(sorted({*places, asked.position}))
        whole = len(chosen) == model.n_heads * model.n_layers
        return Scope(tuple(chosen), at, whole, at == everywhere)

    def work(of: Scope) -> float:
        return seconds(of.cuts(), len(everywhere), model)

    everything = scope(usual[0] + usual[1], everywhere)
    if some == model.n_heads and work(everything) <= AT_ONCE:
        return everything, total
    n = len(everywhere)
    while n > SOME_PLACES and work(scope(usual[0] + usual[1], order[:n])) > AT_ONCE:
        n -= 1
    with st.expander("Which heads and positions are measured"):
        st.caption(
            "Every Q- and K-chain takes a forward pass, so of a large model or a long prompt some are measured: by "
            "default those with the largest V-chains (which are exact, and all of them summed), and the positions from "
            "which the earlier block moves most."
        )
        heads = []
        for layer, names, key in zip(layers, usual, ("hops_writers", "hops_readers"), strict=True):
            options = {head_name((layer, h)): head_name((layer, h)) for h in range(model.n_heads)}
            heads += _several(f"Heads of block {layer + 1}", options, names, key)
        places = named_places(tokens, asked.position)
        at = _several("Positions", places, [list(places)[i] for i in sorted(order[:n])], "hops_places")
    chosen = scope(heads, at)
    if chosen.cuts() > MOST_CHAINS:
        st.info(f"{chosen.cuts():,} chains are more than can be listed: choose fewer heads or positions. Shown are "
                "those of the default choice.")  # fmt: skip
        chosen = scope(usual[0] + usual[1], order[:n])
    return _affordable(chosen, work(chosen)), total


def named_places(tokens: Sequence[str], last: int) -> dict[str, int]:
    """Positions 0 … last by number and word."""
    labels = style.plain_labels(list(tokens[: last + 1]))
    return {label if label.startswith(f"{i} ") else f"{i} {label}": i for i, label in enumerate(labels)}


def seconds(cuts: int, tokens: int, model: "ModelConfig") -> float:
    """Roughly what these cuts take on one core, each a forward pass: measured at widths 24, 64 and 192."""
    return cuts * tokens * model.n_layers * (4e-6 + 4e-10 * model.d_model**2)


def _several(label: str, names: dict[str, Any], usual: list[str], key: str) -> list[Any]:
    """Choices; those that were not chosen follow the prompt, and what is not there is left out."""
    state = st.session_state
    before, state[f"{key}_usual"] = state.get(f"{key}_usual", usual), usual
    if key in state:
        kept = [name for name in state[key] if name in names]
        state[key] = usual if not kept or (state[key] == before and before != usual) else kept
    return [names[name] for name in st.multiselect(label, list(names), usual, key=key, bind="query-params") or usual]


def _affordable(scope: Scope, work: float) -> Scope:
    """With the V-chains alone where cuts take long and were not asked for."""
    if work <= AT_ONCE:
        return scope
    n = scope.cuts()
    if work > LONGEST:
        st.info(f"{n:,} cuts would take some {math.ceil(work / 60)} minutes: choose fewer heads or positions above. "
                "Shown are V-chains.")  # fmt: skip
    elif st.toggle(f"Measure Q- and K-chains too ({n:,} cuts, some {work:.0f} s)", key="hops_all",
                   bind="query-params"):  # fmt: skip
        return scope
    return Scope(scope.heads, scope.places, scope.all_heads, scope.all_places, "V")
