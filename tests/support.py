"""Small models for tests: ours, TransformerLens' bridges with the same weights, and the same model in another gauge.

And the app, opened by a link, and what it shows; what is committed of a table; a training that is interrupted;
and how often a fault is tried.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from einops import rearrange
from streamlit.testing.v1 import AppTest
from torch import Tensor
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import boot_native, build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel

from workbench.content import content
from workbench.pages import cache
from workbench.recipes import ModelConfig, load_recipe
from workbench.tables.table import NOT_RUN
from workbench.training import Trainer, train
from workbench.transformer import LayerNorm, Transformer
from workbench.vocabulary import Vocabulary

SENTENCE = "the animal did not cross the street because it was too tired , so the"
OTHER_SENTENCE = "the animal did not cross the street because it was too wet , so the"
SIZES: dict[str, Any] = {"n_layers": 2, "n_heads": 2, "d_model": 16, "n_ctx": 12, "d_vocab": 20}


def build(seed: int = 0, **options: Any) -> Transformer:
    """A fresh model in eval mode; biases and LayerNorms random too, so that nothing hides behind zeros and ones."""
    model = fresh(seed, **options)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2].startswith("b"):
            torch.nn.init.normal_(parameter, 0, 0.3, generator=generator)
    for module in model.modules():
        if isinstance(module, LayerNorm):
            torch.nn.init.normal_(module.w, 1, 0.3, generator=generator)
    return model


def fresh(seed: int = 0, **options: Any) -> Transformer:
    """A model as training finds it, in eval mode."""
    config = ModelConfig(**SIZES | options)
    return Transformer(config, Vocabulary(tuple(f"t{i}" for i in range(config.d_vocab))), seed=seed).eval()


def native_bridge(seed: int = 0, **options: Any) -> TransformerBridge:
    """TransformerLens' native model with random weights, LayerNorms and biases."""
    config = SIZES | {"d_head": 8, "d_mlp": None, "act_fn": "gelu", "normalization_type": "LN"} | options
    config |= {"attn_only": not config["d_mlp"], "architecture": "TransformerLensNative"}
    return _randomised(boot_native(TransformerBridgeConfig(**config)).eval(), seed)


def gpt2_bridge(seed: int = 0, **options: Any) -> TransformerBridge:
    """A bridge around a GPT-2 built from a configuration."""
    sizes = SIZES | options
    names = {"n_layer": "n_layers", "n_head": "n_heads", "n_embd": "d_model", "n_positions": "n_ctx"}
    theirs = {theirs: sizes[ours] for theirs, ours in names.items()} | {"vocab_size": sizes["d_vocab"]}
    gpt2 = GPT2LMHeadModel(GPT2Config(**theirs)).eval()  # pyright: ignore[reportArgumentType]
    config = TransformerBridgeConfig(
        **sizes, d_head=sizes["d_model"] // sizes["n_heads"], d_mlp=4 * sizes["d_model"], act_fn="gelu_new",
        normalization_type="LN", architecture="GPT2LMHeadModel",
    )  # fmt: skip
    return build_bridge_from_module(_randomised(gpt2, seed), "GPT2LMHeadModel", tl_config=config).eval()


def from_native(native: TransformerBridge, **options: Any) -> Transformer:
    """Its weights in ours: nn.Linear's [out, in] become [in, out], with a head axis in attention."""
    names = {"embed.weight": "embed.W_E", "pos_embed.weight": "pos_embed.W_pos", "unembed.bias": "unembed.b_U"}
    weights = {"unembed.W_U": native.state_dict()["unembed.weight"].T}
    heads = native.cfg.n_heads
    for name, weight in native.state_dict().items():
        *path, module, kind = name.split(".")
        prefix = ".".join(path)
        if module in ("q", "k", "v"):
            pattern = "(h d) m -> h m d" if kind == "weight" else "(h d) -> h d"
            letter = "W" if kind == "weight" else "b"
            weights[f"{prefix}.{letter}_{module.upper()}"] = rearrange(weight, pattern, h=heads)
        elif module == "o" and kind == "weight":
            weights[f"{prefix}.W_O"] = rearrange(weight, "m (h d) -> h d m", h=heads)
        elif module in ("o", "in", "out"):
            suffix = f"{'W' if kind == 'weight' else 'b'}_{'O' if module == 'o' else module}"
            weights[f"{prefix}.{suffix}"] = weight.T if kind == "weight" else weight
        elif module.startswith("ln"):
            weights[f"{prefix}.{module}.{kind[0]}".removeprefix(".")] = weight
        elif name in names:
            weights[names[name]] = weight
    sizes = {name: getattr(native.cfg, name) for name in (*SIZES, "d_head")}
    norm = "pre" if native.cfg.normalization_type else "none"
    model = (
        Transformer(
            ModelConfig(**sizes | {"d_mlp": 0 if native.cfg.attn_only else native.cfg.d_mlp, "norm": norm} | options)
        )
        .eval()
        .to(native.W_E.dtype)
    )
    model.load_state_dict(weights)
    return model


# The same function in another gauge, for models without LayerNorm


def rotated(model: Transformer, seed: int = 1) -> Transformer:
    """Every vector of the residual stream turned by one rotation."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(model.config.d_model, model.config.d_model, generator=generator)).Q
    weights = {}
    for name, weight in model.state_dict().items():
        kind = name.rpartition(".")[2]
        if kind in ("W_E", "W_pos", "W_O", "W_out", "b_O", "b_out"):
            weight = weight @ turn
        elif kind in ("W_Q", "W_K", "W_V", "W_in", "W_U"):
            weight = turn.T @ weight
        weights[name] = weight
    return _with(model, weights)


def refactored(model: Transformer, seed: int = 1) -> Transformer:
    """W_Q and W_K, W_V and W_O split differently: an invertible matrix between them."""
    generator = torch.Generator().manual_seed(seed)
    d = model.config.d_head
    weights = dict(model.state_dict())
    for layer in range(model.config.n_layers):
        at = f"blocks.{layer}.attn."
        for left, right in (("Q", "K"), ("V", "O")):
            between = torch.eye(d) + 0.4 * torch.randn(d, d, generator=generator) / d**0.5
            weights[f"{at}W_{left}"] = weights[f"{at}W_{left}"] @ between
            weights[f"{at}b_{left}"] = weights[f"{at}b_{left}"] @ between if left != "O" else weights[f"{at}b_O"]
            if right == "K":
                weights[f"{at}W_K"] = weights[f"{at}W_K"] @ between.inverse().T
                weights[f"{at}b_K"] = weights[f"{at}b_K"] @ between.inverse().T
            else:
                weights[f"{at}W_O"] = between.inverse() @ weights[f"{at}W_O"]
    return _with(model, weights)


def biases_in_a_dimension(model: Transformer) -> Transformer:
    """One more dimension of the residual stream, which holds the constant 1 and carries the biases of q, k, v and of
    the neurons' input."""
    width = model.config.d_model
    bigger = fresh(**vars_of(model) | {"d_model": width + 1, "bias_qkv": False})
    weights = {}
    for name, weight in model.state_dict().items():
        path, _, kind = name.rpartition(".")
        if kind in ("W_E", "W_pos", "W_O", "W_out", "b_O", "b_out"):
            column = torch.ones if kind == "W_E" else torch.zeros
            weight = torch.cat([weight, column(*weight.shape[:-1], 1)], -1)
        elif kind in ("W_Q", "W_K", "W_V"):
            weight = torch.cat([weight, model.state_dict()[f"{path}.b_{kind[2]}"][:, None]], 1)
        elif kind in ("W_in", "W_U"):
            weight = torch.cat([weight, torch.zeros(1, weight.shape[1])])
        if kind not in ("b_Q", "b_K", "b_V"):
            weights[name] = weight
    bigger.load_state_dict(weights)
    return bigger


def vars_of(model: Transformer) -> dict[str, Any]:
    return dict(vars(model.config))


def _with(model: Transformer, weights: dict[str, Tensor]) -> Transformer:
    other = Transformer(model.config, model.vocabulary).eval()
    other.load_state_dict(weights)
    return other


def _randomised(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        mean = 1.0 if "ln" in name and name.endswith("weight") else 0.0
        torch.nn.init.normal_(parameter, mean, 0.3, generator=generator)
    return model


def opened(**query: str) -> AppTest:
    """The app on its first page, as a link with this query opens it."""
    return _opened(None, query)


def app_page(name: str, **query: str) -> AppTest:
    """A page of the app by its file's name ("two_hops"), as a link with this query opens it; its Python is shown."""
    return _opened(name, {"python": "true"} | query)


def _opened(page: str | None, query: dict[str, str]) -> AppTest:
    app = AppTest.from_file(str(content("app.py")), default_timeout=60)
    if page:
        app.switch_page(f"workbench/pages/{page}.py")
    for key, value in query.items():
        app.query_params[key] = value
    app.run()
    assert not app.exception
    return app


def shown(app: AppTest, i: int = 0) -> list[str]:
    """Titles of the maps in a chart."""
    figure = json.loads(app.get("plotly_chart")[i].proto.spec)
    return [trace["name"] for trace in figure["data"] if trace["type"] == "heatmap"]


def text(app: AppTest) -> str:
    return " ".join([*(m.value for m in app.markdown), *(h.proto.body for h in app.get("html"))])


def committed_rows(table: str) -> list[dict[str, Any]]:
    """The rows of a committed table that were run."""
    path = Path(__file__).parent.parent / "docs" / "results" / f"{table}.json"
    return [row for row in json.loads(path.read_text())["rows"] if row["budget"] != NOT_RUN]


@contextmanager
def interrupted(before: int | None = None) -> Iterator[None]:
    """A training in which Ctrl-C comes before this step, or before the end is written."""
    name = "_finish" if before is None else "_update"
    go_on = getattr(Trainer, name)

    def stop(trainer: Trainer) -> None:
        if before in (None, trainer.step):
            raise KeyboardInterrupt
        go_on(trainer)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, name, stop)
        yield


def deep_run(folder: Path, length: int) -> None:
    """A run called deep: twelve blocks of twelve heads on sequences of `length` tokens, hardly trained."""
    task = (content("datasets") / "induction.toml").read_text()
    for name, value in (("length", length), ("train", 2), ("held_out", 2)):
        task = re.sub(rf"^{name} = .*", f"{name} = {value}", task, flags=re.MULTILINE)
    (folder / "long.toml").write_text(task)
    (folder / "deep.toml").write_text(
        'task = "long.toml"\n[model]\nn_layers = 12\nn_heads = 12\nd_model = 24\nd_mlp = 0\n'
        "[training]\nsteps = 1\nbatch = 1"
    )
    train(load_recipe(folder / "deep.toml"))
    cache.forget_entries()


def counted(short: int, full: int) -> int:
    """How many cases a fault or fuzz test tries: few in `make test`, all in `make faults`."""
    return full if os.environ.get("WORKBENCH_FAULTS") == "full" else short
