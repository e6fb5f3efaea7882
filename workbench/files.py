"""Writing files so that a crash, or a power cut, leaves the old one or the new one, never half of it."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def write_atomic(path: Path, data: bytes) -> None:
    """A temporary file beside it, flushed to disk, renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Have a rename in it survive a power cut."""
    if os.name == "nt":  # which opens no folders, and keeps renames in its journal
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class Lines:
    """A file of JSON lines that grows, each line flushed to disk, and the hash of all that was written to it."""

    def __init__(self, path: Path):
        self.path = path
        self.size = 0
        """Bytes."""
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def append(self, line: dict[str, Any]) -> None:
        data = (json.dumps(line) + "\n").encode()
        with self.path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.size += len(data)
        self._digest.update(data)

    def begin(self, data: bytes) -> None:
        """Hold this and nothing else, whatever stood there; without data, be no file."""
        if data:
            write_atomic(self.path, data)
        else:
            self.path.unlink(missing_ok=True)
        self.size, self._digest = len(data), hashlib.sha256(data)
