"""What attention costs as the sequence doubles: time and memory of one layer, its projections, and the fused kernel.

    scores = q kᵀ / √d_head, masked; pattern = softmax(scores); z = pattern v          [head, n, n] is held twice

The score matrix of one sequence is heads · n² numbers of four bytes. `F.scaled_dot_product_attention` never holds it
(Dao et al. 2022, FlashAttention). A row that would need more memory than it may take is predicted, not tried.
"""

import math
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock
from jaxtyping import Float
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.memory import machine_bytes
from workbench.runs import Run, runs_folder
from workbench.tables.engine import Asked, Plan, Quick
from workbench.tables.table import Column, Compared, Row

TITLE = "What attention costs"
SEEDS = 1
QUICK = Quick()
OPTIONS = ("memory",)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
HEADS, WIDTH = 8, 512
D_HEAD = WIDTH // HEADS
FLOAT = 4
"""Bytes of a number."""
GIB = 2**30
MEMORY = 8
"""GiB that a row may take, unless given; at most half of what the machine has."""
REPEATS, PATIENCE = 3, 2.0
"""A figure of time is the median of at least three repeats and of as many as two seconds hold."""
UNFIT = "predicted out of memory"
SOURCE_EXPONENT, EXPONENTS, LINEAR = 1.9, (1.8, 2.1), (0.9, 1.15)
SOURCE_SCORES = (16_384, 8)
"""Published: n, GiB of the score matrix."""
NOTES = (
    f"one layer, width {WIDTH}, {HEADS} heads, batch 1, float32, one thread of a CPU, no gradient; attention is what "
    "lies between the projections: scores, mask, softmax, weighted sum",
    f"score matrix: {HEADS} · n² · {FLOAT} bytes, by the formula; peak: what the process took beyond its inputs, as "
    "the system counts it, of which scores and pattern are two such matrices and the mask is n² bytes",
    "projections: the four linear maps of the same layer; fused: F.scaled_dot_product_attention",
    f"time: median of at least {REPEATS} repeats, with fastest and slowest in the data; other work on the machine "
    "counts, so rows are measured one at a time",
    f"{UNFIT}: scores, pattern and mask would need more than the memory that a row may take (--memory, in GiB), so it "
    "is not tried",
    "nothing is trained, so seeds and budget change nothing",
)

Heads = Float[Tensor, "batch head position d_head"]


def plans(asked: Asked) -> list[Plan]:
    """One row a length. Raises: WorkbenchError for a memory that no row or no machine has."""
    memory = bytes_allowed(asked.options.get("memory"))
    return [Plan({"n": n}, (), measure, (n, memory)) for n in LENGTHS]


def bytes_allowed(memory: float | None) -> int:
    """From GiB, as they were asked for, or the default. Raises: WorkbenchError."""
    machine = machine_bytes()
    if memory is None:
        return min(MEMORY * GIB, machine // 2) if machine else MEMORY * GIB
    least = needed_bytes(LENGTHS[0])
    if not least <= memory * GIB:  # not a number neither
        raise WorkbenchError(
            f"--memory {memory:g}: expected GiB; the shortest row, n = {LENGTHS[0]}, needs {least / GIB:.2g}"
        )
    if machine and memory * GIB > machine:
        raise WorkbenchError(f"--memory {memory:g}: this machine has {machine / GIB:.1f} GiB; give less than that")
    return round(memory * GIB)


def score_bytes(n: int) -> int:
    """Of the score matrix of one sequence, every head's."""
    return HEADS * n**2 * FLOAT


def needed_bytes(n: int) -> int:
    """What `written_out` holds at most: scores and pattern, the mask of one byte a pair."""
    return 2 * score_bytes(n) + n**2


def written_out(q: Heads, k: Heads, v: Heads) -> Heads:
    """Causal attention, step by step, in as few copies as there can be."""
    scores = q @ k.mT
    scores /= math.sqrt(q.shape[-1])
    n = scores.shape[-1]
    scores.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu_(1), -math.inf)
    return scores.softmax(-1) @ v


def fused(q: Heads, k: Heads, v: Heads) -> Heads:
    """The same by torch's own kernel."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


KERNELS: dict[str, Callable[..., Tensor]] = {"attention": written_out, "fused": fused}


def measure(runs: list[Run], n: int, memory: int) -> Row:
    """One length; rows wait for each other, since time and memory are the machine's."""
    fits = needed_bytes(n) <= memory
    with FileLock(runs_folder() / "tables" / ".attention-cost-row.lock"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, 1, HEADS, n, D_HEAD, generator=generator)
        x, W = torch.randn(1, n, WIDTH, generator=generator), torch.randn(4, WIDTH, WIDTH, generator=generator)
        seconds = {"projections": timed(lambda: [F.linear(x, matrix) for matrix in W])}
        peak = {}
        for name, kernel in KERNELS.items():
            if name == "fused" or fits:
                peak[name] = peak_bytes(name, n)
                seconds[name] = timed(lambda kernel=kernel: kernel(q, k, v))
    return {
        "score_bytes": score_bytes(n),
        "needed_bytes": needed_bytes(n),
        "memory_bytes": memory,
        "attention": "measured" if fits else UNFIT,
        "peak_bytes": peak,
        "time": seconds,
    }


def timed(work: Callable[[], object]) -> Row:
    """Seconds of one call, repeated; the first is not counted."""
    times: list[float] = []
    started = time.perf_counter()
    work()
    while len(times) < REPEATS or time.perf_counter() - started < PATIENCE:
        before = time.perf_counter()
        work()
        times.append(time.perf_counter() - before)
    return {"median": statistics.median(times), "min": min(times), "max": max(times), "repeats": len(times)}


def peak_bytes(kernel: str, n: int) -> int:
    """The most that the kernel takes beyond its inputs, in a process of its own.

    Raises: WorkbenchError if the machine does not have it.
    """
    code = f"from workbench.tables.attention_cost import grown; print(grown({kernel!r}, {n}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode > 0 and "allocate memory" not in done.stderr:
        raise RuntimeError(done.stderr)
    if done.returncode:  # killed by the system, or refused by torch
        raise WorkbenchError(
            f"n = {n:,} needs {needed_bytes(n) / GIB:.2g} GiB, which the machine did not have; close other programs, "
            "or give a smaller --memory"
        )
    return int(done.stdout)


def grown(kernel: str, n: int) -> int:
    """How many bytes this process's high-water mark rises by when it runs the kernel once."""
    torch.set_num_threads(1)
    work = KERNELS[kernel]
    with torch.no_grad():
        work(*torch.randn(3, 1, HEADS, 64, D_HEAD))  # what the first call alone allocates
        inputs = torch.randn(3, 1, HEADS, n, D_HEAD)
        before = _high_water()
        work(*inputs)
    return _high_water() - before


def _high_water() -> int:
    """Of resident memory, in bytes. Linux gives a new process its parent's in getrusage, so it is asked elsewhere."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    if found:
        return 1024 * int(found[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def exponent(lengths: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """The slope of log value over log n by least squares, and its standard error (0 for two points)."""
    x, y = np.log(lengths), np.log(values)
    x = x - x.mean()
    slope = float(x @ y / (x @ x))
    left = y - y.mean() - slope * x
    spread = float(left @ left) / (len(x) - 2) if len(x) > 2 else 0.0
    return slope, math.sqrt(spread / float(x @ x))


def fitted(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """What grows → its exponent and standard error, over the rows that have it; nothing for fewer than two."""
    series = {
        "attention, time": [(row["n"], row["time"]["attention"]["median"]) for row in rows if _fits(row)],
        "attention, peak memory": [(row["n"], row["peak_bytes"]["attention"]) for row in rows if _fits(row)],
        "projections, time": [(row["n"], row["time"]["projections"]["median"]) for row in rows],
        "fused, time": [(row["n"], row["time"]["fused"]["median"]) for row in rows],
    }
    return {what: exponent(*zip(*sorted(points), strict=True)) for what, points in series.items() if len(points) >= 2}


def _fits(row: Row) -> bool:
    return "attention" in row["time"]


def summary(rows: Sequence[Row]) -> list[str]:
    fits = fitted(rows)
    if not fits:
        return []
    said = "; ".join(f"{what} {slope:.2f} ± {error:.2f}" for what, (slope, error) in fits.items())
    return [f"fitted exponents of n, ± standard error of the fit: {said}"]


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Agreement: an exponent of attention from 1.8 to 2.1, of the projections from 0.9 to 1.15; the score matrix
    exactly."""
    fits, made = fitted(rows), []
    for what in ("attention, time", "attention, peak memory"):
        if what in fits:
            slope = fits[what][0]
            made.append(Compared(f"{what}: exponent of n", f"about {SOURCE_EXPONENT}", f"{slope:.2f}",
                                 EXPONENTS[0] <= slope <= EXPONENTS[1]))  # fmt: skip
    if "projections, time" in fits:
        slope = fits["projections, time"][0]
        made.append(Compared("projections, time: exponent of n", "1", f"{slope:.2f}", LINEAR[0] <= slope <= LINEAR[1]))
    if "fused, time" in fits:
        made.append(Compared("fused, time: exponent of n", "", f"{fits['fused, time'][0]:.2f}", None))
    n, size = SOURCE_SCORES
    row = next((row for row in rows if row["n"] == n), None)
    if row:
        ours = row["score_bytes"] / GIB
        made.append(Compared(f"score matrix, n = {n:,}, GiB", str(size), f"{ours:g}", ours == size))
    return made


def discussion(rows: Sequence[Row]) -> list[str]:
    fits, said = fitted(rows), []
    measured = [row for row in rows if _fits(row)]
    if "attention, time" in fits and "projections, time" in fits:
        first, last = measured[0], measured[-1]
        shares = [row["time"]["attention"]["median"] / row["time"]["projections"]["median"] for row in (first, last)]
        said.append(
            f"**Attention quadruples, the projections double**: exponents {fits['attention, time'][0]:.2f} and "
            f"{fits['projections, time'][0]:.2f}. At n = {first['n']:,} attention takes {shares[0]:.2f} times the "
            f"projections' time, at {last['n']:,} {shares[1]:.1f} times."
        )
    if measured:
        row = measured[-1]
        times = row["time"]["attention"]["median"] / row["time"]["fused"]["median"]
        said.append(
            f"**Fused attention does the same sums without the matrix**: at n = {row['n']:,} its peak is "
            f"{_mib(row['peak_bytes']['fused'])} MiB where writing it out takes "
            f"{_mib(row['peak_bytes']['attention'])}, {row['peak_bytes']['attention'] / row['score_bytes']:.2f} score "
            f"matrices; it is {times:.1f} times as fast."
            + (f" Its time still grows as n to the {fits['fused, time'][0]:.2f}." if "fused, time" in fits else "")
        )
    unfit = [row for row in rows if not _fits(row)]
    if unfit:
        row, lengths = unfit[0], ", ".join(f"{row['n']:,}" for row in unfit)
        said.append(
            f"**Not tried**: n = {lengths}. Scores, pattern and mask would take {row['needed_bytes'] / GIB:.1f} GiB"
            f"{' or more' * (len(unfit) > 1)}, and a row may take {row['memory_bytes'] / GIB:g}."
        )
    return said


def _mib(number: int) -> str:
    return f"{number / 2**20:,.1f}"


def _ms(row: Row, name: str) -> str:
    return f"{1000 * row['time'][name]['median']:,.1f}" if name in row["time"] else UNFIT


COLUMNS = (
    Column("n", lambda row: f"{row['n']:,}", essential=True),
    Column("score matrix, MiB", lambda row: _mib(row["score_bytes"]), essential=True),
    Column("peak, MiB", lambda row: _mib(row["peak_bytes"]["attention"]) if _fits(row) else UNFIT, essential=True),
    Column("fused: peak, MiB", lambda row: _mib(row["peak_bytes"]["fused"])),
    Column("attention, ms", lambda row: _ms(row, "attention"), essential=True),
    Column("projections, ms", lambda row: _ms(row, "projections"), essential=True),
    Column("fused, ms", lambda row: _ms(row, "fused"), essential=True),
    Column("repeats", lambda row: " ".join(str(each["repeats"]) for each in row["time"].values())),
    Column("may take, GiB", lambda row: f"{row['memory_bytes'] / GIB:g}"),
    Column("budget", lambda row: row["budget"], essential=True),
)
