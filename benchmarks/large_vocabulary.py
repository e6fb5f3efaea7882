"""Peak memory at a vocabulary of 50,257: eigenvalues and skip-trigrams of 12 heads, without a vocabulary × vocabulary
matrix (10 GB each).

    python benchmarks/large_vocabulary.py [HEADS]

One layer, d_model 768, d_head 64, random weights, one thread. The peak is that of the whole process, interpreter,
libraries and weights included; it must stay under 1.5 GB. HEADS (12) is for how many heads skip-trigrams are read.
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import resource
import time

import torch

from circuits.spectra import eigenvalues
from circuits.trigrams import head_skip_trigrams
from workbench.recipes import ModelConfig
from workbench.transformer import Transformer

LIMIT = 1.5  # GB


def peak() -> float:
    """GB, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB


def main() -> None:
    torch.set_num_threads(1)
    heads = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    config = ModelConfig(
        n_layers=1, n_heads=12, d_model=768, d_head=64, d_mlp=0, n_ctx=16, d_vocab=50_257, norm="none", init="normal"
    )
    print(f"{'libraries':36} {peak():5.2f} GB")
    model = Transformer(config).eval()
    print(f"{'and a model':36} {peak():5.2f} GB")

    started = time.perf_counter()
    values = eigenvalues(model, fold=False)
    seconds = time.perf_counter() - started
    print(f"{f'eigenvalues of {values.shape[1]} OV circuits':36} {peak():5.2f} GB {seconds:7.1f} s")

    started = time.perf_counter()
    for head in range(heads):
        rows = len(head_skip_trigrams(model, (0, head), n=20).tokens)
        seconds = time.perf_counter() - started
        print(f"{f'top {rows} skip-trigrams of {head + 1} heads':36} {peak():5.2f} GB {seconds:7.1f} s", flush=True)
    if peak() > LIMIT:
        sys.exit(f"{peak():.2f} GB is more than {LIMIT} GB")


if __name__ == "__main__":
    main()
