"""A recipe says everything that makes a model: task, architecture, training, seeds. TOML → frozen dataclasses.

    about = "two blocks, attention and feed-forward"
    task = "winograd"

    [model]
    n_layers = 2
    n_heads = 4
    d_model = 64

    [training]
    steps = 1500
    lr = 1e-3

    [seeds]
    initialisation = 0

Every field has a default; unknown and contradictory ones are refused by name. The hash of a recipe covers every
field that changes the weights (all but `name`, `about` and `probes`), so two runs with one hash are one experiment.
This module imports neither torch nor TransformerLens.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from workbench.content import content
from workbench.errors import BadRecipe, UnknownName, WorkbenchError
from workbench.untrusted import LARGEST_TOML, is_plain, parse_toml, plain, read_file, short

Norm = Literal["none", "pre", "post"]
Positions = Literal["none", "learned", "sinusoidal", "rotary", "alibi", "shortformer"]
Attention = Literal["softmax", "softmax-unscaled", "uniform"]
QueryKey = Literal["separate", "tied", "identity"]
ValueOutput = Literal["value-output", "value", "identity"]
Activation = Literal["gelu", "gelu-tanh", "relu"]
Initialisation = Literal["torch", "gpt2", "normal", "by-hand"]
Schedule = Literal["constant", "linear", "cosine"]
Probe = Literal["heads", "composition", "copying", "in-context", "edges"]


MOST = 1_000_000
"""Of widths and positions: enough for any model of this kind, and a mistyped size is no allocation."""
MOST_PARTS = 512
"""Of layers, and of heads in each: every one has a name that is listed."""
LARGEST_MODEL = 2**28
"""Numbers, trained and fixed: 1 GiB, and in training four times that."""
LARGEST_MAPS = 2**29
"""Numbers in the patterns of all heads of a block on one sequence: 2 GiB, and as much again for the scores."""
MOST_STEPS = 10**9
MOST_COMBINATIONS = 10_000
"""Of settings in one grid."""
LONGEST_TEXT = 1_000
"""Characters of what a recipe says of itself, and of a task's path."""


@dataclass(frozen=True)
class ModelConfig:
    """The architecture. `n_ctx` and `d_vocab` are the task's unless given.

    `d_head` and `d_mlp` are filled in when it is made: `dataclasses.replace` with another d_model must give them anew.
    """

    n_layers: int = 2
    """Blocks; 0 is embedding → unembedding, a bigram model."""
    n_heads: int = 4
    d_model: int = 64
    """Width of the residual stream."""
    d_head: int = 0
    """Width of a head; 0 means d_model / n_heads."""
    d_mlp: int = -1
    """Neurons in a feed-forward layer; -1 means 4 · d_model, 0 means attention-only."""
    n_ctx: int = 0
    """Longest sequence in tokens; 0 means the task's."""
    d_vocab: int = 0
    """Vocabulary size; 0 means the task's."""
    norm: Norm = "pre"
    """LayerNorm before each sub-layer and at the end, after each addition, or none."""
    positions: Positions = "learned"
    attention: Attention = "softmax"
    """Softmax of q·k/√d_head, of q·k, or the uniform average over all earlier tokens and oneself."""
    query_key: QueryKey = "separate"
    """W_Q and W_K separate; one matrix for both; or raw x·x, each head on its own slice of the stream."""
    value_output: ValueOutput = "value-output"
    """W_V and W_O; W_V alone, heads concatenated; or neither: each head averages its own slice of the stream."""
    residual: bool = True
    """Sub-layers add to the residual stream; false: they replace the token."""
    bias_qkv: bool = True
    bias_out: bool = True
    """Biases of attention's output and of the feed-forward layer."""
    bias_unembed: bool = False
    activation: Activation = "gelu"
    tied_unembedding: bool = False
    """W_U = W_Eᵀ."""
    dropout: float = 0.0
    init: Initialisation = "torch"
    """torch: embeddings N(0, 1), matrices U(±1/√fan-in). gpt2: N(0, 0.02), matrices that write to the residual
    stream divided by √(2 · n_layers). normal: N(0, 0.8/√d_model). by-hand: weights written out by workbench.by_hand."""
    init_scale: float = 1.0
    """Factor on every initial weight but LayerNorm's."""

    def __post_init__(self) -> None:
        _check_types(self)
        if self.d_head == 0:
            if self.n_heads < 1 or self.d_model % self.n_heads:
                raise BadRecipe(
                    f"n_heads = {self.n_heads} does not divide d_model = {self.d_model}; "
                    "choose a divisor, or give d_head"
                )
            object.__setattr__(self, "d_head", self.d_model // self.n_heads)
        if self.d_mlp == -1:
            object.__setattr__(self, "d_mlp", 4 * self.d_model)
        for name, (least, most) in {
            "n_layers": (0, MOST_PARTS), "n_heads": (1, MOST_PARTS), "d_model": (1, MOST), "d_head": (1, MOST),
            "d_mlp": (0, MOST), "n_ctx": (0, MOST), "d_vocab": (0, MOST),
        }.items():  # fmt: skip
            if not least <= getattr(self, name) <= most:
                raise BadRecipe(f"{name} = {getattr(self, name)}: expected {least} to {most}")
        if not 0 <= self.dropout < 1:
            raise BadRecipe(f"dropout = {self.dropout}: expected a rate from 0 up to, not including, 1")
        sliced = self.n_heads * self.d_head == self.d_model
        for clash, why in {
            self.positions == "rotary" and self.d_head % 2 == 1:
                f'positions = "rotary" turns pairs, but d_head = {self.d_head} is odd',
            self.attention == "uniform" and self.positions in ("rotary", "alibi"):
                f'attention = "uniform" has no scores for positions = "{self.positions}" to act on',
            self.attention == "uniform" and self.query_key != "separate":
                f'attention = "uniform" has no queries and keys: query_key = "{self.query_key}" contradicts it',
            self.query_key == "identity" and not sliced:
                'query_key = "identity" needs n_heads · d_head = d_model',
            self.value_output != "value-output" and not sliced:
                f'value_output = "{self.value_output}" needs n_heads · d_head = d_model',
            self.positions == "shortformer" and (self.query_key == "identity" or self.attention == "uniform"):
                'positions = "shortformer" adds positions to queries and keys: '
                'query_key = "identity" and attention = "uniform" contradict it',
            self.positions in ("shortformer", "rotary", "alibi") and self.n_layers == 0:
                f'positions = "{self.positions}" act in attention: n_layers = 0 contradicts it',
        }.items():  # fmt: skip
            if clash:
                raise BadRecipe(why)

    @property
    def attn_only(self) -> bool:
        return self.d_mlp == 0

    @property
    def numbers(self) -> int:
        """How many a model holds at most, trained and fixed ones; what n_ctx and d_vocab leave to the task apart."""
        attention = 4 * self.n_heads * self.d_head * (self.d_model + 1)
        feed_forward = self.d_mlp * (2 * self.d_model + 1)
        ends = (self.n_ctx + 2 * self.d_vocab) * self.d_model + self.d_vocab
        return ends + self.n_layers * (attention + feed_forward + 6 * self.d_model) + 2 * self.d_model

    def numbers_of_step(self, batch: int, length: int, few: int = 0) -> int:
        """How many a training step on sequences of `length` tokens holds at least, for its backward pass: what each
        sub-layer reads, queries, keys and values, what a feed-forward layer's activation reads or makes, and patterns:
        with dropout before and after it; without, where up to `few` tokens are attended to by workbench.short."""
        plain = self.positions not in ("rotary", "alibi", "shortformer")
        patterns = 2 if self.dropout else int(plain and length <= few)
        of_token = (1 if self.attn_only else 2) * self.d_model + 3 * self.n_heads * self.d_head + self.d_mlp
        return batch * length * self.n_layers * (of_token + patterns * self.n_heads * length)

    def widest(self, length: int) -> int:
        """Most numbers that a forward pass over `length` tokens holds of each at a time: logits, neurons, queries
        with keys and values, patterns."""
        of_block = (self.d_mlp, 3 * self.n_heads * self.d_head, self.n_heads * length) if self.n_layers else ()
        return max([self.d_vocab, *of_block])

    def check_size(self, name: str, length: int = 0) -> None:
        """Before it is made. Raises: BadRecipe for a model of more than `LARGEST_MODEL` numbers, or attention maps of a
        sequence of `length` tokens with more than `LARGEST_MAPS`."""
        maps = self.n_heads * length**2 if self.n_layers else 0
        for numbers, most, what in (
            (self.numbers, LARGEST_MODEL, "it would hold"),
            (maps, LARGEST_MAPS, "a block's attention maps would hold"),
        ):
            if numbers > most:
                raise BadRecipe(
                    f"{name} does not fit into memory: {what} {numbers:,} numbers; expected at most {most:,}"
                )


@dataclass(frozen=True)
class TrainingConfig:
    """AdamW on the mean next-token loss over all positions."""

    steps: int = 1500
    batch: int = 64
    """Sequences a step."""
    lr: float = 1e-3
    """Highest learning rate."""
    warmup: int = 0
    """Steps of linear warm-up from 0."""
    schedule: Schedule = "constant"
    """After warm-up: constant, linear to 0, or cosine to 0."""
    weight_decay: float = 0.01
    """On matrices; biases and LayerNorm are exempt."""
    beta1: float = 0.9
    beta2: float = 0.999
    clip: float = 0.0
    """Largest norm of the whole gradient; 0 means no clipping."""
    log_every: int = 50
    """Steps between two lines of metrics.jsonl."""
    save_every: int = 250
    """Steps between two saved trainer states, from which an interrupted run goes on."""
    checkpoints: int = 0
    """How many checkpoints to keep, log-spaced over training (0 is none; the last one is the model itself)."""
    probes: tuple[Probe, ...] = ()
    """What is read from the model at log-spaced steps while it trains, see workbench.probes; it changes no weight."""

    def __post_init__(self) -> None:
        _check_types(self)
        for name, (least, most) in {
            "steps": (0, MOST_STEPS), "batch": (1, 100_000), "warmup": (0, MOST_STEPS), "log_every": (1, MOST_STEPS),
            "save_every": (1, MOST_STEPS), "checkpoints": (0, 10_000),
        }.items():  # fmt: skip
            if not least <= getattr(self, name) <= most:
                raise BadRecipe(f"{name} = {getattr(self, name)}: expected {least} to {most}")
        for name in ("clip", "weight_decay", "beta1", "beta2"):
            if getattr(self, name) < 0:
                raise BadRecipe(f"{name} = {getattr(self, name)}: expected at least 0")
        if self.lr <= 0:
            raise BadRecipe(f"lr = {self.lr}: expected a learning rate above 0")
        if max(self.beta1, self.beta2) >= 1:
            raise BadRecipe(f"beta1 = {self.beta1}, beta2 = {self.beta2}: expected rates below 1")
        if len(set(self.probes)) < len(self.probes):
            raise BadRecipe("probes has one twice; expected each once")
        if self.warmup > self.steps:
            raise BadRecipe(f"warmup = {self.warmup} is longer than the training, steps = {self.steps}")

    def learning_rate(self, step: int) -> float:
        """The rate of update `step` (0 is the first)."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2)


@dataclass(frozen=True)
class Seeds:
    """Kept apart, so that one can vary while the others stay."""

    split: int = 0
    """What is held out, and what generated tasks draw as their truth."""
    initialisation: int = 0
    batches: int = 0

    def __post_init__(self) -> None:
        _check_types(self)
        for f in fields(self):
            if not 0 <= getattr(self, f.name) < 2**32:
                raise BadRecipe(f"seeds.{f.name} = {getattr(self, f.name)}: expected 0 to {2**32 - 1}")


@dataclass(frozen=True)
class Recipe:
    name: str
    """The file's, or its folder's; not a field of the TOML."""
    task: str
    """A task's name, or the path of a TOML file of one."""
    about: str = ""
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    seeds: Seeds = field(default_factory=Seeds)

    def __post_init__(self) -> None:
        _check_types(self)
        if not _names_a_folder(self.name):
            raise BadRecipe(f"{short(self.name, 80)!r} cannot name a run; expected the name of a folder")
        for name in ("task", "about"):
            text = getattr(self, name)
            if len(text) > LONGEST_TEXT or not is_plain(text):
                raise BadRecipe(f"{name} = {short(text, 60)!r}: expected one line of at most {LONGEST_TEXT} characters")
        file = Path(self.task).name
        if not self.task.endswith(".toml") and (not file or file != self.task):
            raise BadRecipe(f"task = {short(self.task, 60)!r}: expected a task's name, or a file that ends in .toml")
        if file == "recipe.toml":  # a run keeps the task's file beside its recipe
            raise BadRecipe(f"the task's file must not be called recipe.toml; rename {plain(self.task)}")

    def with_seed(self, seed: int, *, split: bool = False) -> "Recipe":
        """The same experiment from another seed: initialisation and batches, and the split too if asked."""
        seeds = Seeds(seed if split else self.seeds.split, seed, seed)
        return dataclasses.replace(self, seeds=seeds)

    def with_steps(self, steps: int) -> "Recipe":
        """The same recipe at another budget; a warm-up shrinks or grows with it."""
        if not 1 <= steps <= MOST_STEPS:
            raise BadRecipe(f"steps = {plain(steps, 60)}: expected 1 to {MOST_STEPS:,}")
        if not self.training.steps:
            return self
        warmup = round(self.training.warmup * steps / self.training.steps)
        return dataclasses.replace(self, training=dataclasses.replace(self.training, steps=steps, warmup=warmup))

    def changed(self, **settings: Any) -> "Recipe":
        """The same recipe with other values of fields of its model or training.

        d_head and d_mlp that have the default of their width follow d_model and n_heads. Raises: UnknownName.
        """
        of_model, of_training = ModelConfig.__dataclass_fields__, TrainingConfig.__dataclass_fields__
        for name in settings:
            if name not in of_model and name not in of_training:
                raise UnknownName("field", short(name, 60), [*of_model, *of_training])
        model = {name: value for name, value in settings.items() if name in of_model}
        training = {name: value for name, value in settings.items() if name in of_training}
        if {"d_model", "n_heads"} & model.keys():
            if self.model.d_head * self.model.n_heads == self.model.d_model:
                model.setdefault("d_head", 0)
            if self.model.d_mlp == 4 * self.model.d_model:
                model.setdefault("d_mlp", -1)
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, **model),
            training=dataclasses.replace(self.training, **training),
        )

    @property
    def sha256(self) -> str:
        """Of every field that changes the weights."""
        said = {k: v for k, v in self.to_dict().items() if k not in ("name", "about")}
        said["training"] = {k: v for k, v in said["training"].items() if k != "probes"}
        return _sha256(said | {"task": Path(self.task).name})  # wherever the task's file lies; its hash is kept apart

    @property
    def experiment(self) -> str:
        """The hash of what all seeds of one experiment share: everything but initialisation and batches."""
        return self.with_seed(0).sha256

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        """The whole recipe, every default spelt out. A task's file is named as if it lay beside the recipe."""
        head = {"about": self.about, "task": Path(self.task).name}
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
        for section in ("model", "training", "seeds"):
            lines += ["", f"[{section}]"]
            for key, value in dataclasses.asdict(getattr(self, section)).items():
                lines.append(f"{key} = {json.dumps(value)}")
        return "\n".join(lines) + "\n"


def load_recipe(name_or_path: str | Path) -> Recipe:
    """A shipped recipe by name, or any TOML file by path; that of a run, such as runs/mine/seed-0/recipe.toml, too.

    Raises: UnknownName with the nearest names; BadRecipe naming the field.
    """
    path = Path(name_or_path)
    if path.suffix == ".toml":
        return read_recipe(path)
    if str(name_or_path) not in recipe_names():
        raise UnknownName("model", short(str(name_or_path), 100), recipe_names())
    return read_recipe(content("models") / name_or_path / "recipe.toml")


def read_recipe(path: Path) -> Recipe:
    """Parse one recipe file. It is named by the file, or by the folder if it is a recipe.toml."""
    path = path.absolute()
    folder = path.parent.parent if path.parent.name.startswith("seed-") else path.parent
    try:
        raw = parse_toml(read_file(path, LARGEST_TOML))
    except FileNotFoundError:
        raise BadRecipe(f"{plain(path)}: no such recipe file") from None
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadRecipe(f"{plain(path)}: not a readable TOML file ({reason})") from None
    recipe = parse_recipe(raw, folder.resolve().name if path.stem == "recipe" else path.stem, plain(path))
    if not recipe.task.endswith(".toml"):
        return recipe
    try:
        task = str((path.parent / recipe.task).resolve())  # relative to the recipe
    except (RuntimeError, OSError):
        raise BadRecipe(f"{plain(path)}: its task {plain(recipe.task, 60)} is a link that leads nowhere") from None
    return dataclasses.replace(recipe, task=task)


def parse_recipe(raw: dict[str, Any], name: str, where: str) -> Recipe:
    """Build a recipe from plain data, refusing what it does not know. `where` opens the error messages."""
    sections = {"model": ModelConfig, "training": TrainingConfig, "seeds": Seeds}
    if "name" in raw:
        raise BadRecipe(f"{where}: a recipe is named by its file or folder; remove the field name")
    if "task" not in raw:
        raise BadRecipe(f'{where}: no task given; add a line such as task = "winograd"')
    try:
        values = {"name": name, **_known(raw, Recipe)}
        for section, kind in sections.items():
            if section in raw:
                if not isinstance(raw[section], dict):
                    raise BadRecipe(f"{section} must be a section, [{section}]")
                values[section] = kind(**_known(raw[section], kind))
        return Recipe(**values)
    except WorkbenchError as error:
        raise BadRecipe(f"{where}: {error}") from None


def grid(recipe: Recipe, settings: Sequence[str]) -> list[tuple[str, Recipe]]:
    """A recipe for every combination of settings such as "lr=1e-3,3e-3", each with what sets it apart in words.

    Each has a name of its own, with a piece of its hash. Raises: BadRecipe, UnknownName.
    """
    axes = [[(field_name, value) for value in values] for field_name, values in map(_setting, settings)]
    if math.prod(map(len, axes)) > MOST_COMBINATIONS:
        raise BadRecipe(f"--set: {math.prod(map(len, axes)):,} combinations; expected at most {MOST_COMBINATIONS:,}")
    made: dict[str, tuple[str, Recipe]] = {}
    for chosen in itertools.product(*axes):
        changed = recipe.changed(**dict(chosen))
        name = recipe.name if changed.experiment == recipe.experiment else f"{recipe.name}-{changed.experiment[:8]}"
        said = ", ".join(f"{field_name} = {value}" for field_name, value in chosen)
        made[changed.experiment] = said, dataclasses.replace(changed, name=name)
    return list(made.values())


def _setting(text: str) -> tuple[str, list[Any]]:
    """ "lr=1e-3,3e-3" → lr and its values; a text needs no quotes."""
    field_name, equals, values = text.partition("=")
    if not equals or not values.strip():
        raise BadRecipe(f"--set {plain(text, 60)}: expected FIELD=VALUE or FIELD=VALUE,VALUE, such as lr=1e-3,3e-3")

    def value_of(part: str) -> Any:
        try:
            return tomllib.loads(f"x = {part}")["x"]
        except (ValueError, RecursionError):
            return part

    return field_name.strip(), [value_of(part.strip()) for part in values.split(",")]


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return sorted(p.parent.name for p in content("models").glob("*/recipe.toml"))


def shipped_names() -> list[str]:
    """Those of them whose trained model is shipped too."""
    return sorted(p.parent.name for p in content("models").glob("*/run.json"))


def _known(raw: dict[str, Any], kind: type) -> dict[str, Any]:
    """The same fields, if the dataclass has them all."""
    for key in raw:
        if key not in kind.__dataclass_fields__:
            raise UnknownName("field", short(key, 60), kind.__dataclass_fields__)
    return raw


def _check_types(config: Any) -> None:
    """Fields have the type they are declared with, whether they come from a file or from Python."""
    for f in fields(config):
        object.__setattr__(config, f.name, _typed(getattr(config, f.name), f.type, f.name))


def _typed(value: Any, expected: Any, where: str) -> Any:
    """The value, if it is of the type, or an integer where a float is expected."""
    if get_origin(expected) is Literal:
        if type(value) is not str or value not in get_args(expected):
            raise BadRecipe(f"{where} = {_shown(value)}: expected one of {', '.join(get_args(expected))}")
        return value
    if get_origin(expected) is tuple:
        if not isinstance(value, list | tuple):
            raise BadRecipe(f"{where} = {_shown(value)}: expected a list")
        return tuple(_typed(each, get_args(expected)[0], where) for each in value)
    if expected in _ARTICLES:
        if type(value) is int and abs(value) >= MOST_DIGITS:
            raise BadRecipe(f"{where} = {_shown(value)}: expected a smaller one")
        if expected is float and type(value) is int:
            value = float(value)
        if type(value) is not expected:
            raise BadRecipe(f"{where} = {_shown(value)}: expected {_ARTICLES[expected]}")
        if expected is float and not math.isfinite(value):
            raise BadRecipe(f"{where} = {value}: expected a finite number")
    return value


def _shown(value: Any) -> str:
    """For a message: short, however large, deep or strange the value is."""
    if type(value) is int and abs(value) >= MOST_DIGITS:
        return "a number of over 60 digits"
    if isinstance(value, list | tuple | dict):
        return "a section" if isinstance(value, dict) else "a list"
    return json.dumps(value[:60] if isinstance(value, str) else value, default=str)[:60]


def _names_a_folder(name: str) -> bool:
    """On every system: short, seen, without what has a meaning in a path."""
    return (
        is_plain(name)
        and name == name.strip()
        and len(os.fsencode(name)) <= LONGEST_NAME
        and not set(name) & set('/\\:*?"<>|')
        and name.strip(".") != ""
        and name[-1] != "."
        and name.partition(".")[0].upper() not in _WINDOWS
    )


LONGEST_NAME = 100
"""Bytes of a run's name; systems take 255 for a folder's."""
MOST_DIGITS = 10**60
_WINDOWS = {"CON", "PRN", "AUX", "NUL", *(f"{port}{n}" for port in ("COM", "LPT") for n in range(1, 10))}
_ARTICLES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
