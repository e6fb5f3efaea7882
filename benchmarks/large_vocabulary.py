"""Peak memory at a vocabulary of 50,257: eigenvalues and skip-trigrams of 12 heads, without a vocabulary × vocabulary
matrix (10 GB each).

    python benchmarks/large_vocabulary.py [HEADS]

One layer, d_model 768, d_head 64, random weights, one thread; first without LayerNorm, then with it and folded weights,
the default, each in a process of its own. The peak is that of the whole process, interpreter, libraries and weights
included; it must stay under 1.5 GB. HEADS (12) is for how many heads skip-trigrams are read.
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
import resource
import time

import torch

from circuits.spectra import eigenvalues
from circuits.surface import folded
from circuits.trigrams import head_skip_trigrams
from workbench.recipes import ModelConfig, Norm
from workbench.transformer import Transformer

LIMIT = 1.5  # GB


def peak() -> float:
    """GB, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB


def report(what: str, started: float) -> None:
    print(f"{what:44} {peak():5.2f} GB {time.perf_counter() - started:7.1f} s", flush=True)


def measure(norm: Norm, heads: int) -> None:
    """Prints peak and time of each step. Exits with a message above LIMIT."""
    torch.set_num_threads(1)
    config = ModelConfig(
        n_layers=1, n_heads=12, d_model=768, d_head=64, d_mlp=0, n_ctx=16, d_vocab=50_257, norm=norm, init="normal"
    )
    started = time.perf_counter()
    report("libraries", started)
    model = Transformer(config).eval()
    report(f"and a model, norm {norm}", started)
    if norm != "none":
        started = time.perf_counter()
        model = folded(model)  # once: what is folded already is read as it is
        report("folded", started)
    started = time.perf_counter()
    values = eigenvalues(model, fold=norm != "none")
    report(f"eigenvalues of {values.shape[1]} OV circuits", started)
    started = time.perf_counter()
    for head in range(heads):
        rows = len(head_skip_trigrams(model, (0, head), n=20).tokens)
        report(f"top {rows} skip-trigrams of {head + 1} heads", started)
    if peak() > LIMIT:
        sys.exit(f"{peak():.2f} GB is more than {LIMIT} GB")


def main() -> None:
    heads, failed = int(sys.argv[1]) if len(sys.argv) > 1 else 12, []
    norms: tuple[Norm, ...] = ("none", "pre")
    for norm in norms:
        alone = multiprocessing.get_context("spawn").Process(target=measure, args=(norm, heads))
        alone.start()
        alone.join()
        failed += [norm] if alone.exitcode else []
    if failed:
        sys.exit(f"failed: norm {', '.join(failed)}")


if __name__ == "__main__":
    main()
