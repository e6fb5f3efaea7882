"""Shapes checked at every call; one thread, since tiny models are slower on more; a folder of runs for each test."""

from pathlib import Path

from jaxtyping import install_import_hook

# Before the first import of ours. (jaxtyping's pytest option cannot take a checker with arguments and two packages.)
# Not the recipes: they refuse wrong types themselves, in the user's words.
PACKAGE = Path(__file__).parent.parent / "workbench"
OURS = ["circuits", *(f"workbench.{path.stem}" for path in PACKAGE.iterdir() if path.stem[0] not in "_.")]
install_import_hook(
    [module for module in OURS if module != "workbench.recipes"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

import hashlib  # noqa: E402
import random  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from workbench import cli, corpora  # noqa: E402
from workbench.errors import NoCorpus  # noqa: E402
from workbench.tasks import load  # noqa: E402

torch.set_num_threads(1)
settings.register_profile("workbench", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("workbench")


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """An empty folder for runs, so that a test sees the shipped ones and its own."""
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def workbench(monkeypatch, capsys):
    """Run a command line; (exit code, stdout, stderr)."""

    def call(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["workbench", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out = capsys.readouterr()
        return stop.value.code or 0, out.out, out.err

    return call


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def made_up_text(tmp_path, monkeypatch):
    """In the place of Shakespeare's: words of one sentence, in no order."""
    words = ["the", "king", "and", "his", "fool", "speak", "of", "what", "they", "have", "lost", ",", "or", "who", "."]
    text = " ".join(random.Random(0).choices(words, k=12_000))
    monkeypatch.setenv("WORKBENCH_SHAKESPEARE", str(tmp_path / "text.txt"))
    (tmp_path / "text.txt").write_text(text)
    corpus = corpora.Corpus("", hashlib.sha256(text.encode()).hexdigest(), len(text))
    monkeypatch.setitem(corpora.CORPORA, "shakespeare", corpus)
    load._load.cache_clear()  # a task keeps the text that it was asked with
    yield text
    load._load.cache_clear()


@pytest.fixture
def shakespeare():
    try:
        return corpora.read_corpus("shakespeare")
    except NoCorpus:
        pytest.skip("Shakespeare's text is not here: workbench data fetch shakespeare")
