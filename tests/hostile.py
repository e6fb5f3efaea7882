"""What the tests on hostile input share: what an answer may look like, and ways to spoil a file."""

import os
import random
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HANG = 300
"""Seconds after which a process that should take a few is taken to have no end, however busy the machine is."""
LONGEST = 300
"""Characters of a refusal, the paths in it apart."""
BITS = [
    b"nan", b"-inf", b"1e400", b"-1", b"0", b"true", b"1979-05-27T07:32:00Z", b"9" * 5_000, b"0x" + b"f" * 9_000,
    b"[]", b"{}", b"[[1], {}]", b'"x"', b"''", b'"\\u001b[31m"', b'"\\u202e"', b'"\\n"', b'"\\u007f"', b"\r",
    b'"../../x.toml"', b'"/dev/zero"', b'"a\\u0000b"', b'"' + b"long " * 400 + b'"', b"\x00", b"\xff\xfe",
    b"\xef\xbb\xbf", b"\x1b[2J", b"[model]\n", b"[[seeds]]\n", b"a.b.c = 1\n", b"=", b'"', b"'''", b"{", b"}", b",",
    b"\n", b"null", b"Infinity", b"1000000000000", b'"<script>alert(1)</script>"', "\u00e9\u4e2d\U0001f600".encode(),
]  # fmt: skip
"""What is put in the place of something else."""


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory where there is such a thing: thousands of small files are soon written."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


def assert_one_line(error: Exception, *paths: object) -> str:
    """The message: one line that can be read and steers no terminal, and is no longer than it must be."""
    said = str(error)
    for path in paths:
        said = said.replace(str(path), "")
    assert said and len(said) <= LONGEST, (len(said), said)
    unseen = [letter for letter in said if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")]
    assert not unseen, (said, unseen)
    return said


def spoilt(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """The bytes after one to three blows: bits put in, parts cut, doubled, exchanged, values after a key replaced."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((0, 1, 2, 8, 60)))
        blow = rng.randrange(7)
        if blow == 0:
            data = data[:start] + rng.randbytes(rng.choice((1, 1, 2, 9))) + data[end:]
        elif blow == 1:
            data = data[:start] + rng.choice(BITS) + data[end:]
        elif blow == 2:
            data = data[:start] + data[end:]
        elif blow == 3:
            data = data[:end] + data[start:]
        elif blow == 4:
            other = rng.choice(others)
            at = rng.randrange(len(other) + 1)
            data = data[:start] + other[at : at + 60] + data[end:]
        else:
            lines = data.split(b"\n")
            i = rng.randrange(len(lines))
            for sign in (b" = ", b": "):
                key, found, _ = lines[i].partition(sign)
                if found:
                    lines[i] = key + sign + rng.choice(BITS)
                    break
            data = b"\n".join(lines)
    return data
