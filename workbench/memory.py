"""The memory of the machine: how much there is, and keeping what was freed."""

import ctypes
import os

import torch

NUMBERS_AT_ONCE = 2**24
"""In scoring, of logits, neurons or patterns: 64 MB, and as much again for their logarithms."""
GLIBC = {-3: 2**30, -1: 2**31 - 1, -2: 2**26}
"""malloc.h: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD, in bytes."""


def machine_bytes(device: torch.device | None = None) -> int | None:
    """How many there are, used or not, on the machine or an accelerator; None where the system does not tell."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has none
        return None


def keep_freed() -> None:
    """Have glibc keep what a step frees. It would give tensors of megabytes back to the system and get them anew at
    every step, page by page: a quarter of the time of a step on a text."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return  # another system's allocator
    for parameter, value in GLIBC.items():
        mallopt(parameter, value)
