"""How numbers are written, wherever a person reads them."""


def percent(rate: float) -> str:
    """One decimal: 0.996 is 99.6 %."""
    return f"{100 * rate:.1f} %"


def count(n: int, noun: str) -> str:
    """ "1 layer", "2 layers"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
