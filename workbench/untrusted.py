"""What a stranger may have written: files are read up to a size, and quoted so that no terminal or page obeys them."""

import errno
import os
import stat
import tomllib
import unicodedata
from pathlib import Path
from typing import Any

LARGEST_TOML = 2**16
"""Bytes of a recipe or a task."""
MOST_DOTS = 100
"""In a line of TOML: a key of n parts takes time n²."""


def read_file(path: Path, most: int) -> bytes:
    """The bytes of an ordinary file. Raises: OSError, for a pipe, a device and more than `most` bytes too."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not an ordinary file")
            data = file.read(most + 1)
    except ValueError:  # a name with a NUL, or with half of a surrogate pair
        raise OSError(errno.EINVAL, "not the name of a file") from None
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return data


def _open_at_once(path: str, flags: int) -> int:
    """A pipe that nobody writes to would be waited for."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def parse_toml(data: bytes) -> dict[str, Any]:
    """Raises: ValueError with the reason in one line, for what is no TOML and for what would take long to read."""
    if len(data) > LARGEST_TOML:
        raise ValueError(f"it has more than {LARGEST_TOML:,} bytes")
    if any(line.count(b".") > MOST_DOTS for line in data.splitlines()):
        raise ValueError(f"a line has more than {MOST_DOTS} dots")
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(plain(error, 100)) from None


def is_plain(text: str) -> bool:
    """Whether it is one line of characters that are seen: no control character, nothing that changes the direction."""
    return all(letter.isprintable() or unicodedata.category(letter) == "Zs" for letter in text)


def short(text: str, most: int) -> str:
    """Of what takes more than `most` characters, escapes counted, both ends."""
    said, end = text, most // 2
    while end and (len(said) > most + 3 or len(repr(said)) > most + 5):
        said, end = f"{text[:end]} … {text[-end:]}", end // 2
    return said


def plain(text: object, most: int = 160) -> str:
    """As `short`, and as it stands if that is one plain line, else with escapes."""
    said = short(str(text), most)
    return said if is_plain(said) else repr(said)[1:-1]
