"""The memory of the machine: how much there is, and keeping what was freed."""

import ctypes
import os

GLIBC = {-3: 2**30, -1: 2**31 - 1, -2: 2**26}
"""malloc.h: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD, in bytes."""


def machine_bytes() -> int:
    """How many there are, used or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def keep_freed() -> None:
    """Have glibc keep what a step frees. It would give tensors of megabytes back to the system and get them anew at
    every step, page by page: a quarter of the time of a step on a text."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return  # another system's allocator
    for parameter, value in GLIBC.items():
        mallopt(parameter, value)
