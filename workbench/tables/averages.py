"""The causal mean, written four ways; what it cannot tell apart; and our attention against torch's.

    loop      a running sum, divided by how many words there are so far
    matrix    a lower-triangular matrix whose row t has 1 / t in its first t places
    softmax   attention over scores that are all equal, later words masked with −∞
    ours      a `Transformer` with attention = "uniform"

So an attention head is an average that departs from it as far as its scores depart from equality. Every figure is the
largest absolute difference over all numbers of a draw; each draw is standard normal. Beside it stands a control: the
same difference where something real was changed, so that it shows what a difference is that is no rounding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Generator, Tensor, nn

from workbench.recipes import Attention, ModelConfig
from workbench.runs import Run
from workbench.tables.engine import Asked, Plan, Quick
from workbench.tables.table import Column, Compared, Row
from workbench.transformer import Transformer

TITLE = "The causal mean as a loop, a matrix and a softmax"
SEEDS = 5
QUICK = Quick()

BATCH, LENGTH, WIDTH, HEADS = 4, 64, 64, 4
CONSTANT = -1e4
"""The large negative number that stands in for −∞ where softmax is asked for half precision."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}
PUBLISHED_MEAN, PUBLISHED_ATTENTION = 6e-8, 1.8e-7
FACTOR = 10
"""Two roundings agree if the larger is at most this many times the published one."""
ROUNDING = 1e-6
"""Differences up to this, of numbers of size 1 in float32, are rounding."""

NOTES = (
    f"largest absolute difference over {BATCH} windows of {LENGTH} positions, width {WIDTH}, {HEADS} heads; each draw "
    "(one a seed) is standard normal, drawn in float64 and rounded to float32; the maximum over draws, and in float32 "
    "each draw",
    "control: the same difference in float32, at its smallest over draws, after the real change that stands beside it",
    "on later words: the largest share of a row's attention that the constant lets through to words not yet there",
    "rounding: one unit in float32 is 1.2e-7 of a number's size, in float64 2.2e-16",
)

Batch = Float[Tensor, "batch position d_model"]
Differences = tuple[float, float | None, float | None]
"""The difference; its control; the share of a row that lies on later words (where it is asked)."""


def plans(asked: Asked) -> list[Plan]:
    seeds = list(range(asked.seeds))
    return [Plan({"what": what}, (), measure, (what, seeds)) for what in COMPARISONS]


def measure(runs: list[Run], what: str, seeds: list[int]) -> Row:
    """One comparison, in every draw and both precisions."""
    compare, control = COMPARISONS[what]
    found = {
        name: [compare(torch.Generator().manual_seed(seed), dtype) for seed in seeds] for name, dtype in DTYPES.items()
    }
    controls = [real for _, real, _ in found["float32"] if real is not None]
    later = [share for _, _, share in found["float32"] if share is not None]
    return {
        "seeds": seeds,
        **{
            name: {"max": max(d for d, _, _ in draws), "per_draw": [d for d, _, _ in draws]}
            for name, draws in found.items()
        },
        "control": {"change": control, "min": min(controls)} if controls else None,
        "on_later_words": max(later) if later else None,
    }


def loop(x: Batch) -> Batch:
    """The mean of the words up to each."""
    total, rows = torch.zeros_like(x[:, 0]), []
    for position in range(x.shape[1]):
        total = total + x[:, position]
        rows.append(total / (position + 1))
    return torch.stack(rows, dim=1)


def matrix(x: Batch) -> Batch:
    """The same by a lower-triangular matrix."""
    ones = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
    return ones / ones.sum(1, keepdim=True) @ x


def softmax(x: Batch, causal: bool = True) -> Batch:
    """The same by a softmax over equal scores."""
    scores = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
    return (masked(scores, -math.inf) if causal else scores).softmax(-1) @ x


def masked(scores: Float[Tensor, "*head destination source"], fill: float) -> Float[Tensor, "*head destination source"]:
    """Later words' scores replaced."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, fill)


def ours(x: Batch, attention: Attention) -> Batch:
    """A Transformer that does nothing but attend: its embedding holds the words of `x`, and each is a token."""
    config = ModelConfig(
        n_layers=1, n_heads=HEADS, d_model=x.shape[2], d_mlp=0, n_ctx=x.shape[1], d_vocab=x.shape[0] * x.shape[1],
        norm="none", positions="none", residual=False, attention=attention, value_output="identity",
    )  # fmt: skip
    model = Transformer(config).to(x.dtype).eval()
    tokens = torch.arange(config.d_vocab).view(x.shape[:2])
    with torch.no_grad():
        model.W_E.copy_(x.flatten(0, 1))
        return model(tokens, stop_at_layer=1)


def _largest(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def _draw(generator: Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def _windows(generator: Generator, dtype: torch.dtype) -> Batch:
    return _draw(generator, dtype, BATCH, LENGTH, WIDTH)


def loop_and_matrix(generator: Generator, dtype: torch.dtype) -> Differences:
    x = _windows(generator, dtype)
    return _largest(loop(x), matrix(x)), _largest(loop(x), softmax(x, causal=False)), None


def loop_and_softmax(generator: Generator, dtype: torch.dtype) -> Differences:
    x = _windows(generator, dtype)
    return _largest(loop(x), softmax(x)), _largest(loop(x), softmax(x, causal=False)), None


def loop_and_ours(generator: Generator, dtype: torch.dtype) -> Differences:
    x = _windows(generator, dtype)
    return _largest(loop(x), ours(x, "uniform")), _largest(loop(x), ours(x, "softmax")), None


def shuffled(generator: Generator, dtype: torch.dtype) -> Differences:
    """The last row has seen all words, in whatever order; a row half way has seen others."""
    x = _windows(generator, dtype)
    before, after = loop(x), loop(x[:, torch.randperm(LENGTH, generator=generator)])
    half = LENGTH // 2 - 1
    return _largest(before[:, -1], after[:, -1]), _largest(before[:, half], after[:, half]), None


def ours_and_multihead(generator: Generator, dtype: torch.dtype) -> Differences:
    x, model, unscaled = _windows(generator, dtype), *_attentions(generator, dtype)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=dtype).eval()
    W_QKV, b_QKV, W_O, b_O = _copied(model)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(W_QKV)
        theirs.in_proj_bias.copy_(b_QKV)
        theirs.out_proj.weight.copy_(W_O)
        theirs.out_proj.bias.copy_(b_O)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        out, _ = theirs(x, x, x, attn_mask=later, need_weights=False)
        return _largest(_attend(model, x), out), _largest(_attend(unscaled, x), out), None


def ours_and_fused(generator: Generator, dtype: torch.dtype) -> Differences:
    x, model, unscaled = _windows(generator, dtype), *_attentions(generator, dtype)
    W_QKV, b_QKV, W_O, b_O = _copied(model)
    with torch.no_grad():
        q, k, v = rearrange(F.linear(x, W_QKV, b_QKV), "b p (qkv h d) -> qkv b h p d", qkv=3, h=HEADS)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = F.linear(rearrange(z, "b h p d -> b p (h d)"), W_O, b_O)
        return _largest(_attend(model, x), out), _largest(_attend(unscaled, x), out), None


def _attentions(generator: Generator, dtype: torch.dtype) -> tuple[Transformer, Transformer]:
    """A fresh layer of attention, and the same without the division of scores by √d_head."""
    seed = int(torch.randint(2**31, (1,), generator=generator))
    sizes = ModelConfig(n_layers=1, n_heads=HEADS, d_model=WIDTH, d_mlp=0, n_ctx=LENGTH, d_vocab=1, norm="none")
    model = Transformer(sizes, seed=seed)
    unscaled = Transformer(replace(sizes, attention="softmax-unscaled"), seed=seed)
    return model.to(dtype).eval(), unscaled.to(dtype).eval()


def _attend(model: Transformer, x: Batch) -> Batch:
    return model.blocks[0].attn(x, x, x)


def _copied(model: Transformer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Its weights as torch lays them out: W_QKV [3 · head · d_head, d_model], W_O [d_model, head · d_head]; biases."""
    attn = model.blocks[0].attn
    W_QKV = torch.cat([rearrange(W, "h m d -> (h d) m") for W in (attn.W_Q, attn.W_K, attn.W_V)])
    b_QKV = torch.cat([b.flatten() for b in (attn.b_Q, attn.b_K, attn.b_V)])
    return W_QKV, b_QKV, rearrange(attn.W_O, "h d m -> m (h d)"), attn.b_O


def _masks(generator: Generator, dtype: torch.dtype, shift: float) -> Differences:
    """Patterns under the two masks, of scores that were all moved by `shift` (which a softmax does not see)."""
    scores = _draw(generator, dtype, HEADS, LENGTH, LENGTH) + shift
    infinite, constant = (masked(scores, fill).softmax(-1) for fill in (-math.inf, CONSTANT))
    return _largest(infinite, constant), None, float(constant.triu(1).sum(-1).max())


def masks(generator: Generator, dtype: torch.dtype) -> Differences:
    return _masks(generator, dtype, 0.0)


def masks_low(generator: Generator, dtype: torch.dtype) -> Differences:
    return _masks(generator, dtype, CONSTANT)


MEAN = (
    "causal mean: loop against matrix",
    "causal mean: loop against softmax of equal scores",
    "causal mean: loop against ours, uniform",
)
SHUFFLE = "causal mean of the last row: window in order against shuffled"
ATTENTION = (
    "attention, weights copied: ours against nn.MultiheadAttention",
    "attention, weights copied: ours against F.scaled_dot_product_attention",
)
FILLED = f"{CONSTANT:,.0f}".replace("-", "−")
MASKS = (
    f"pattern: mask of −∞ against {FILLED}, ordinary scores",
    f"pattern: mask of −∞ against {FILLED}, all scores lower by as much",
)
UNMASKED, UNSCALED = "the mask left out", "scores not divided by √d_head"
COMPARISONS: dict[str, tuple[Callable[[Generator, torch.dtype], Differences], str]] = {
    MEAN[0]: (loop_and_matrix, UNMASKED),
    MEAN[1]: (loop_and_softmax, UNMASKED),
    MEAN[2]: (loop_and_ours, "scores x·x instead of equal ones"),
    SHUFFLE: (shuffled, "the row half way instead of the last"),
    ATTENTION[0]: (ours_and_multihead, UNSCALED),
    ATTENTION[1]: (ours_and_fused, UNSCALED),
    MASKS[0]: (masks, ""),
    MASKS[1]: (masks_low, ""),
}
"""What is compared → (how, what the control changes)."""


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Agrees, in float32: at most ten times the published difference; where it is "rounding", at most 1e-6."""
    made = []
    for row in rows:
        what, ours = row["what"], row["float32"]["max"]
        published = PUBLISHED_MEAN if what in MEAN else PUBLISHED_ATTENTION if what in ATTENTION else None
        if published:
            made.append(Compared(what, _figure(published), _figure(ours), ours <= FACTOR * published))
        elif what == SHUFFLE:
            made.append(Compared(what, "rounding", _figure(ours), ours <= ROUNDING))
        else:
            made.append(Compared(what, "", _figure(ours), None))
    return made


def discussion(rows: Sequence[Row]) -> list[str]:
    by_name = {row["what"]: row for row in rows}
    same = [row for row in rows if row["control"] and row["float32"]["max"] <= ROUNDING]
    said = []
    if same:
        either = " and ".join(f"{max(row[name]['max'] for row in same):.2g} in {name}" for name in DTYPES)
        said.append(
            f"**Rounding.** {len(same)} of {sum(bool(row['control']) for row in rows)} comparisons differ by at most "
            f"{either}: they are one function, and precision is the difference. A real change makes at least "
            f"{min(row['control']['min'] for row in same):.2g}. The largest difference depends on sizes, draws and the "
            "order in which a processor adds, so only its order of magnitude can agree."
        )
    ordinary, low = by_name.get(MASKS[0]), by_name.get(MASKS[1])
    if ordinary and low:
        said.append(
            f"**Masking.** With scores of ordinary size the patterns under {FILLED} and under −∞ differ by "
            f"{_figure(ordinary['float32']['max'])}. With all of a row's scores lower by that much, which a softmax "
            f"does not see, the constant lets up to {low['on_later_words']:.3f} of the row's attention through to "
            f"words that are not there yet, and weights are off by up to {low['float32']['max']:.3f}. −∞ has no such "
            "row: it is what is used here."
        )
    return said


def _figure(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}"


COLUMNS = (
    Column("what", lambda row: row["what"], essential=True, text=True),
    Column("float32", lambda row: _figure(row["float32"]["max"]), essential=True),
    Column("float64", lambda row: _figure(row["float64"]["max"]), essential=True),
    Column("float32, each draw", lambda row: " ".join(map(_figure, row["float32"]["per_draw"]))),
    Column("control", lambda row: _figure(row["control"]["min"] if row["control"] else None), essential=True),
    Column("control changes", lambda row: row["control"]["change"] if row["control"] else "", text=True),
    Column("on later words", lambda row: _figure(row["on_later_words"])),
    Column("budget", lambda row: row["budget"], essential=True),
)
