"""How many numbers a transformer has: a formula beside the parameters of a real module, counted one by one.

A formula is a sum of products of sizes, in these letters: V words of the vocabulary, n positions, d the width of the
residual stream, L blocks, h heads of width k in a block, m neurons in a feed-forward layer. Modules too large to fill
are built on torch's meta device: shapes without memory, so a count of GPT-3's attention is one of real parameters too.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from workbench.recipes import ModelConfig, load_recipe
from workbench.runs import Run
from workbench.tables.engine import Asked, Plan, Quick
from workbench.tables.table import Column, Compared, Row
from workbench.tasks import load_task
from workbench.transformer import Transformer

TITLE = "How many numbers a transformer has"
SEEDS = 1
QUICK = Quick()

NOTES = (
    "V words, n positions, d width of the residual stream, L blocks, h heads of width k, m neurons",
    "in the bracket, of one block: matrices of q, k and v, their biases; output matrix, its bias; feed-forward "
    "matrices, their biases; LayerNorms' scales and shifts",
    "formula's value: from the formula alone; counted: the parameters of a module that was built, each once; "
    "difference: the first minus the second",
    "rows with a − compare two modules, and the formula is that of the piece that one has more",
    "nothing is trained and nothing is drawn at random, so seeds and budget change nothing",
)

Term = tuple[str | int, ...]
"""A product, such as (3, "d", "h", "k")."""
Formula = tuple[Term, ...]
"""A sum of products."""

SMALL = ModelConfig(n_layers=2, n_heads=4, d_model=48, n_ctx=20, d_vocab=30)
OPTIONS: dict[str, dict[str, Any]] = {
    "every default": {},
    "no blocks": {"n_layers": 0},
    "attention only": {"d_mlp": 0},
    "no biases in q, k, v": {"bias_qkv": False},
    "no biases in outputs": {"bias_out": False},
    "one matrix for q and k": {"query_key": "tied"},
    "raw x·x for scores": {"query_key": "identity"},
    "uniform average": {"attention": "uniform"},
    "values, no output matrix": {"value_output": "value"},
    "neither values nor outputs": {"value_output": "identity"},
    "heads narrower than d / h": {"d_head": 5},
    "no LayerNorm": {"norm": "none"},
    "LayerNorm after, none at the end": {"norm": "post"},
    "no positions": {"positions": "none"},
    "positions computed": {"positions": "rotary"},
    "unembedding tied to the embedding": {"tied_unembedding": True},
    "unembedding with a bias": {"bias_unembed": True},
}
"""Our transformer with one option changed."""
SHAPES: dict[str, dict[str, Any]] = {
    "one block, one head": {"n_layers": 1, "n_heads": 1, "d_head": 0, "d_model": 128, "d_mlp": -1},
    "six blocks of eight heads": {"n_layers": 6, "n_heads": 8, "d_head": 0, "d_model": 256, "d_mlp": 600},
}
"""Our transformer in other sizes."""
LADDER: tuple[tuple[str, str, Formula], ...] = (
    ("shakespeare-average-positions", "shakespeare-average", (("n", "d"),)),
    ("shakespeare-head", "shakespeare-average-added", ((3, "d", "d"),)),
    ("shakespeare-4-heads", "shakespeare-head", (("d", "d"), ("d",))),
    ("shakespeare-mlp", "shakespeare-4-heads", ((8, "d", "d"), (5, "d"))),
    ("shakespeare-1", "shakespeare-mlp", ((6, "d"),)),
    ("shakespeare-2", "shakespeare-1", ((12, "d", "d"), (10, "d"))),
)
"""(recipe, the one before it, what it has more), of the ladder on Shakespeare."""
BLOCK: Formula = ((12, "d", "d"), (13, "d"))
"""A block with biases everywhere, two LayerNorms and m = 4 d."""
TORCH_BLOCKS = ((64, 4), (128, 8), (768, 12), (12_288, 96))
"""(d, h) of torch's own layers."""
GPT2_SMALL = ModelConfig(
    n_layers=12, n_heads=12, d_model=768, n_ctx=1024, d_vocab=50_257, tied_unembedding=True, activation="gelu-tanh"
)
GPT3 = ModelConfig(
    n_layers=96, n_heads=96, d_model=12_288, n_ctx=2048, d_vocab=50_257, tied_unembedding=True, bias_qkv=False,
    bias_out=False,
)  # fmt: skip
"""GPT-3's sizes (Brown et al. 2020, table 2.1). The published figures count its matrices, without biases."""
GPT3_PARTS: dict[str, tuple[str, Formula, int]] = {
    "head": ("GPT-3: attention matrices of one head", ((4, "d", "k"),), 6_291_456),
    "layer": ("GPT-3: attention matrices of a layer", ((4, "d", "h", "k"),), 603_979_776),
    "layers": ("GPT-3: attention matrices of all layers", ((4, "L", "d", "h", "k"),), 57_982_058_496),
    "heads": ("GPT-3: heads", (("L", "h"),), 9_216),
    "scores": ("GPT-3: scores of one head", (("n", "n"),), 4_194_304),
}
"""Part → (what, formula, published)."""
PUBLISHED = {
    "shakespeare-4-heads − shakespeare-head": 16_512,
    "shakespeare-1 − shakespeare-mlp": 768,
    "GPT-2 small, Hugging Face's module": 124_439_808,
    "GPT-2 small, ours": 124_439_808,
} | {what: published for what, _, published in GPT3_PARTS.values()}
MATRICES = ("W_Q", "W_K", "W_V", "W_O")


def plans(asked: Asked) -> list[Plan]:
    """Nothing depends on seeds or budget."""
    ours = {f"ours: {what}": asdict(replace(SMALL, **changes)) for what, changes in (OPTIONS | SHAPES).items()}
    ours["GPT-2 small, ours"] = asdict(GPT2_SMALL)
    return [
        *(Plan({"what": what}, (), measure_ours, (config,)) for what, config in ours.items()),
        *(Plan({"what": f"{more} − {less}"}, (), measure_step, (more, less)) for more, less, _ in LADDER),
        *(Plan({"what": f"torch's block, d = {d:,}"}, (), measure_torch, (d, h)) for d, h in TORCH_BLOCKS),
        Plan({"what": "GPT-2 small, Hugging Face's module"}, (), measure_gpt2),
        *(Plan({"what": what}, (), measure_gpt3, (part,)) for part, (what, _, _) in GPT3_PARTS.items()),
    ]


def value(formula: Formula, sizes: Mapping[str, int]) -> int:
    """The formula with its letters replaced by sizes."""
    return sum(math.prod(sizes[f] if isinstance(f, str) else f for f in term) for term in formula)


def wording(formula: Formula) -> str:
    """The formula as it is read: 12·d·d becomes 12·d², and several products of L stand in one bracket."""

    def product(term: Term) -> str:
        powers = [(factor, term.count(factor)) for factor in dict.fromkeys(term)]
        return "·".join(str(factor) + {1: "", 2: "²"}[power] for factor, power in powers)

    said = []
    for of_blocks, group in groupby(formula, key=lambda term: term[0] == "L"):
        terms = list(group)
        if of_blocks and len(terms) > 1:
            said.append(f"L·({' + '.join(product(term[1:]) for term in terms)})")
        else:
            said += map(product, terms)
    return " + ".join(said)


def sizes_of(config: ModelConfig) -> dict[str, int]:
    return {
        "V": config.d_vocab, "n": config.n_ctx, "d": config.d_model, "L": config.n_layers, "h": config.n_heads,
        "k": config.d_head, "m": config.d_mlp,
    }  # fmt: skip


def transformer_formula(config: ModelConfig) -> Formula:
    """The trained numbers of `Transformer`, piece by piece: embedding, positions, and for every block attention's
    matrices and biases, the feed-forward layer's, LayerNorms' scales and shifts; the last LayerNorm; unembedding."""
    terms: list[Term] = [("V", "d")]
    if config.positions in ("learned", "shortformer"):
        terms.append(("n", "d"))
    if config.n_layers:
        terms += [("L", *term) for term in _block(config)]
    if config.norm == "pre":
        terms.append((2, "d"))
    if not config.tied_unembedding:
        terms.append(("d", "V"))
    if config.bias_unembed:
        terms.append(("V",))
    return tuple(terms)


def _block(config: ModelConfig) -> list[Term]:
    """Of one block. Each of q, k and v is a matrix [d, k] a head, with a bias [k]."""
    scores = 0 if config.attention == "uniform" else {"separate": 2, "tied": 1, "identity": 0}[config.query_key]
    projections = scores + (config.value_output != "identity")
    terms: list[Term] = []
    if projections:
        several: Term = (projections,) if projections > 1 else ()
        terms.append((*several, "d", "h", "k"))
        if config.bias_qkv:
            terms.append((*several, "h", "k"))
    if config.value_output == "value-output":
        terms.append(("h", "k", "d"))
        if config.bias_out:
            terms.append(("d",))
    if not config.attn_only:
        terms.append((2, "d", "m"))
        if config.bias_out:
            terms += [("m",), ("d",)]
    if config.norm != "none":
        terms.append((2 if config.attn_only else 4, "d"))
    return terms


def measure_ours(runs: list[Run], config: dict[str, Any]) -> Row:
    """A whole transformer of ours."""
    model = ModelConfig(**config)
    module = _on_meta(model)
    return _row(transformer_formula(model), sizes_of(model), "Transformer", module.n_parameters)


def measure_step(runs: list[Run], more: str, less: str) -> Row:
    """What one recipe of the ladder has more than another."""
    formula = next(formula for one, other, formula in LADDER if (one, other) == (more, less))
    configs = []
    for name in (more, less):
        recipe = load_recipe(name)
        task = load_task(recipe.task)
        configs.append(replace(recipe.model, n_ctx=task.n_ctx, d_vocab=len(task.vocabulary)))
    counted = [_on_meta(config).n_parameters for config in configs]
    return _row(formula, sizes_of(configs[0]), "two Transformers", counted[0] - counted[1])


def measure_torch(runs: list[Run], width: int, heads: int) -> Row:
    """torch's own block."""
    with torch.device("meta"):
        module = nn.TransformerEncoderLayer(width, heads, dim_feedforward=4 * width)
    return _row(BLOCK, {"d": width}, "nn.TransformerEncoderLayer", _count(module.parameters()))


def measure_gpt2(runs: list[Run]) -> Row:
    """Hugging Face's GPT-2 small, in its default sizes: embeddings, L blocks with biases everywhere, one LayerNorm."""
    with torch.device("meta"):
        module = GPT2LMHeadModel(GPT2Config())
    config = module.config
    formula: Formula = (("V", "d"), ("n", "d"), *(("L", *term) for term in BLOCK), (2, "d"))
    sizes = {"V": config.vocab_size, "n": config.n_positions, "d": config.n_embd, "L": config.n_layer}
    return _row(formula, sizes, "transformers' GPT2LMHeadModel", _count(module.parameters()))


def measure_gpt3(runs: list[Run], part: str) -> Row:
    """A part of GPT-3's attention, counted in a module of its size."""
    _, formula, _ = GPT3_PARTS[part]
    one_layer = replace(GPT3, n_layers=1)
    model = _on_meta(GPT3 if part in ("layers", "heads") else one_layer)
    matrices = [getattr(block.attn, name) for block in model.blocks for name in MATRICES]
    if part == "head":
        counted = _count(matrix[0] for matrix in matrices)
    elif part == "heads":
        counted = sum(len(block.attn.W_Q) for block in model.blocks)
    elif part == "scores":
        tokens = torch.zeros(1, GPT3.n_ctx, dtype=torch.long, device="meta")
        _, cache = model.run_with_cache(tokens, return_type=None, names_filter="blocks.0.attn.hook_attn_scores")
        counted = cache["blocks.0.attn.hook_attn_scores"][0, 0].numel()
    else:
        counted = _count(matrices)
    return _row(formula, sizes_of(GPT3), "Transformer on the meta device", counted)


def _on_meta(config: ModelConfig) -> Transformer:
    """Its shapes without their memory."""
    with torch.device("meta"):
        return Transformer(config)


def _count(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _row(formula: Formula, sizes: Mapping[str, int], module: str, counted: int) -> Row:
    letters = {factor for term in formula for factor in term if isinstance(factor, str)}
    predicted = value(formula, sizes)
    return {
        "formula": wording(formula),
        "sizes": {letter: size for letter, size in sizes.items() if letter in letters},
        "value": predicted,
        "module": module,
        "counted": counted,
        "difference": predicted - counted,
    }


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Agrees: not one number more or less."""
    return [
        Compared(row["what"], f"{PUBLISHED[row['what']]:,}", f"{row['counted']:,}",
                 row["counted"] == PUBLISHED[row["what"]])
        for row in rows
        if row["what"] in PUBLISHED
    ]  # fmt: skip


def discussion(rows: Sequence[Row]) -> list[str]:
    wrong = [row["what"] for row in rows if row["difference"]]
    said = [
        f"**Formula and module** agree to the last number in {len(rows) - len(wrong)} of {len(rows)} rows"
        + (f"; not in: {'; '.join(wrong)}." if wrong else ".")
    ]
    by_name = {row["what"]: row for row in rows}
    heads = by_name.get("shakespeare-4-heads − shakespeare-head")
    if heads:
        said.append(
            f"**Four heads are no larger than one**: both have three matrices d × d. The {heads['counted']:,} numbers "
            "that four have more are the output matrix and its bias, which the source's single head goes without."
        )
    layers, head = by_name.get(GPT3_PARTS["layers"][0]), by_name.get(GPT3_PARTS["head"][0])
    if layers and head:
        said.append(
            f"**GPT-3.** Its attention is {layers['counted'] / head['counted']:,.0f} times one head; the published "
            "figures are of its matrices alone, and so are ours."
        )
    return said


COLUMNS = (
    Column("what", lambda row: row["what"], essential=True, text=True),
    Column("formula", lambda row: row["formula"], text=True),
    Column("sizes", lambda row: ", ".join(f"{k} {v:,}" for k, v in row["sizes"].items()), text=True),
    Column("formula's value", lambda row: f"{row['value']:,}", essential=True),
    Column("real module", lambda row: row["module"], text=True),
    Column("counted", lambda row: f"{row['counted']:,}", essential=True),
    Column("difference", lambda row: f"{row['difference']:,}", essential=True),
    Column("budget", lambda row: row["budget"], essential=True),
)
