"""Writing files so that a crash leaves the old one or the new one, never half of it."""

import os
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """A temporary file beside it, flushed to disk, renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
