"""Texts to train on. They are not part of the project: each is fetched once, checked by its hash, and kept.

    workbench data fetch shakespeare                  from its public source
    workbench data fetch shakespeare --from FILE      from a copy on this machine

`$WORKBENCH_SHAKESPEARE` may name a copy instead; it is checked in the same way every time it is read.
"""

import hashlib
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import NoCorpus, UnknownName, WorkbenchError
from workbench.files import write_atomic

PATIENCE = 30
"""Seconds without a byte before a download is given up."""


@dataclass(frozen=True)
class Corpus:
    url: str
    sha256: str
    size: int
    """Bytes."""


CORPORA = {
    "shakespeare": Corpus(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        1_115_394,
    )
}


def fetch(name: str, source: Path | None = None) -> Path:
    """Take a corpus from `source`, or download it; where it lies then. Nothing is kept unless its hash is right.

    Raises: UnknownName; NoCorpus if it cannot be had or is another text; WorkbenchError if it cannot be written.
    """
    corpus = _corpus(name)
    where, advice = (corpus.url, "give a copy by --from FILE") if source is None else (str(source), _fetch(name))
    data = _download(name, corpus) if source is None else _read(name, source, where, advice)
    _check(name, data, where, advice)
    path = cached(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except OSError as error:
        raise WorkbenchError(f"cannot write {path} ({error.strerror}); set XDG_CACHE_HOME to another folder") from None
    return path


def read_corpus(name: str) -> str:
    """The text. Raises: NoCorpus, with how to get it, unless it is here and the right one."""
    _corpus(name)
    given = os.environ.get(variable(name))
    path = Path(given) if given else cached(name)
    if not given and not path.exists():
        raise NoCorpus(f"the text of {name} is not here; {_fetch(name)} (or add --from FILE for a copy you have)")
    where = f"{variable(name)} = {path}" if given else str(path)
    advice = f"unset {variable(name)}, then run: workbench data fetch {name}" if given else _fetch(name)
    data = _read(name, path, where, advice)
    _check(name, data, where, advice)
    return data.decode("utf-8")


def variable(name: str) -> str:
    """The environment variable that may name a copy."""
    return f"WORKBENCH_{name.upper()}"


def cached(name: str) -> Path:
    """Where a fetched corpus is kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "circuit-workbench" / f"{name}.txt"


def _corpus(name: str) -> Corpus:
    if name not in CORPORA:
        raise UnknownName("corpus", name, CORPORA)
    return CORPORA[name]


def _fetch(name: str) -> str:
    return f"run: workbench data fetch {name}"


def _check(name: str, data: bytes, where: str, advice: str) -> None:
    corpus, found = CORPORA[name], hashlib.sha256(data).hexdigest()
    if len(data) > corpus.size:
        raise NoCorpus(f"{where} is not the text of {name}: it is longer than {corpus.size:,} bytes; {advice}")
    if found != corpus.sha256:
        raise NoCorpus(
            f"{where} is not the text of {name}: its sha256 is {found}, the right one is {corpus.sha256}; {advice}"
        )


def _read(name: str, path: Path, where: str, advice: str) -> bytes:
    """No more than a little over what the corpus has: a larger file is another one, whatever it is."""
    try:
        with path.open("rb") as file:
            return file.read(CORPORA[name].size + 1)
    except OSError as error:
        said = f"cannot read {where} ({error.strerror}); expected a copy of the text of {name}"
        raise NoCorpus(f"{said}; {advice}") from None


def _download(name: str, corpus: Corpus) -> bytes:
    try:
        with urllib.request.urlopen(corpus.url, timeout=PATIENCE) as answer:
            return answer.read(corpus.size + 1)
    except (urllib.error.URLError, OSError) as error:
        why = getattr(error, "reason", error)
        raise NoCorpus(
            f"cannot download {corpus.url} ({why}); get a copy in another way, then: "
            f"workbench data fetch {name} --from FILE"
        ) from None
