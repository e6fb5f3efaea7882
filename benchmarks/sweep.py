"""Several seeds of one recipe: two processes side by side against one.

    python benchmarks/sweep.py [--seeds 4] [--steps 600] [--rounds 3]

Trains the same seeds of winograd-2 by `train_many` with one job and with two, turn about, into empty folders, and
prints the wall time of each and their ratio: the efficiency of two cores over one. Beside it stands what the machine
itself gives to two processes at once that only multiply matrices: two cores that share their caches, or a core that
is two threads, give less than 2.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from workbench.recipes import load_recipe
from workbench.sweeps import train_many

SIZE, PRODUCTS = 256, 1_500


def sweep(jobs: int, seeds: int, steps: int) -> float:
    """Seconds by the clock, processes and their imports included."""
    recipe = load_recipe("winograd-2").with_steps(steps)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WORKBENCH_RUNS"] = str(Path(folder) / "runs")
        started = time.perf_counter()
        train_many([recipe.with_seed(seed) for seed in range(seeds)], jobs=jobs)
        return time.perf_counter() - started


def multiply() -> float:
    """Seconds of a fixed number of products on one thread."""
    torch.set_num_threads(1)
    a = torch.randn(SIZE, SIZE)
    started = time.perf_counter()
    for _ in range(PRODUCTS):
        torch.mm(a, a)
    return time.perf_counter() - started


def side_by_side() -> float:
    """How many times as much two processes multiply at once as one of them alone."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        alone = pool.apply(multiply)
        together = statistics.mean(each.get() for each in [pool.apply_async(multiply) for _ in range(2)])
    return 2 * alone / together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ratios, bounds = [], []
    for number in range(asked.rounds):
        one, two = (sweep(jobs, asked.seeds, asked.steps) for jobs in (1, 2))
        ratios.append(one / two)
        bounds.append(side_by_side())
        said = f"one process {one:.1f} s, two {two:.1f} s: {ratios[-1]:.2f} × as fast"
        print(f"round {number + 1}: {said}; products alone {bounds[-1]:.2f} ×", flush=True)
    print(f"{asked.seeds} seeds of {asked.steps:,} steps: two processes are {statistics.median(ratios):.2f} × as fast")
    print(f"as one; two that only multiply, {statistics.median(bounds):.2f} ×")


if __name__ == "__main__":
    main()
