"""Fetching a text: only the right one is kept, and everything else is one line that says what to do."""

import hashlib
import os

import pytest

from workbench import corpora
from workbench.corpora import CORPORA, Corpus, cached, fetch, read_corpus
from workbench.errors import NoCorpus, UnknownName, WorkbenchError

TEXT = "To have the text, or not to have it: that is what is asked.\n" * 20


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A cache of its own, and a public source that is a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("WORKBENCH_SHAKESPEARE", raising=False)
    source = tmp_path / "public.txt"
    source.write_text(TEXT)
    corpus = Corpus(source.as_uri(), hashlib.sha256(TEXT.encode()).hexdigest(), len(TEXT))
    monkeypatch.setitem(CORPORA, "shakespeare", corpus)
    return source


def test_it_is_downloaded_once_and_read_from_the_cache(elsewhere, tmp_path):
    with pytest.raises(NoCorpus, match="is not here; run: workbench data fetch shakespeare"):
        read_corpus("shakespeare")
    path = fetch("shakespeare")
    assert path == cached("shakespeare") == tmp_path / "cache" / "circuit-workbench" / "shakespeare.txt"
    elsewhere.unlink()
    assert read_corpus("shakespeare") == TEXT
    assert os.listdir(path.parent) == ["shakespeare.txt"]


def test_a_copy_is_taken_instead(tmp_path):
    (tmp_path / "copy.txt").write_text(TEXT)
    assert fetch("shakespeare", tmp_path / "copy.txt").read_text() == TEXT


def test_a_named_copy_is_read_where_it_lies(tmp_path, monkeypatch):
    (tmp_path / "copy.txt").write_text(TEXT)
    monkeypatch.setenv("WORKBENCH_SHAKESPEARE", str(tmp_path / "copy.txt"))
    assert read_corpus("shakespeare") == TEXT
    advice = "unset WORKBENCH_SHAKESPEARE, then run: workbench data fetch shakespeare"
    (tmp_path / "copy.txt").write_text(TEXT.upper())
    with pytest.raises(NoCorpus, match=rf"^WORKBENCH_SHAKESPEARE = .*copy\.txt is not the text of .*; {advice}$"):
        read_corpus("shakespeare")
    (tmp_path / "copy.txt").unlink()
    with pytest.raises(NoCorpus, match=rf"^cannot read WORKBENCH_SHAKESPEARE = .*copy\.txt \(No such .*; {advice}$"):
        read_corpus("shakespeare")


@pytest.mark.parametrize(("wrong", "word"), [
    (TEXT.replace("have", "hold"), "its sha256 is {found}, the right one is {right}"),
    (TEXT[:-1], "its sha256 is {found}, the right one is {right}"),
    (TEXT + "x", "it is longer than 1,200 bytes"),
    ("", "its sha256 is {found}, the right one is {right}"),
])  # fmt: skip
def test_another_text_is_refused_and_the_one_that_is_kept_stays(tmp_path, wrong, word):
    fetch("shakespeare")
    (tmp_path / "wrong.txt").write_text(wrong)
    with pytest.raises(NoCorpus) as refused:
        fetch("shakespeare", tmp_path / "wrong.txt")
    found, right = (hashlib.sha256(text.encode()).hexdigest() for text in (wrong, TEXT))
    assert "wrong.txt is not the text of shakespeare: " + word.format(found=found, right=right) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert read_corpus("shakespeare") == TEXT


def test_what_cannot_be_read_downloaded_or_written_is_one_line(tmp_path, monkeypatch, elsewhere):
    with pytest.raises(NoCorpus, match=r"cannot read .*nothing.txt \(No such file or directory\); expected a copy"):
        fetch("shakespeare", tmp_path / "nothing.txt")
    with pytest.raises(NoCorpus, match=r"cannot read .* \(Is a directory\)"):
        fetch("shakespeare", tmp_path)
    with pytest.raises(UnknownName, match="unknown corpus 'shakespear'; nearest: shakespeare"):
        fetch("shakespear")
    elsewhere.unlink()
    with pytest.raises(NoCorpus, match=r"cannot download file:.*; get a copy in another way, then: .* --from FILE"):
        fetch("shakespeare")
    (tmp_path / "copy.txt").write_text(TEXT)
    monkeypatch.setattr(corpora, "write_atomic", full_disk)
    with pytest.raises(WorkbenchError, match=r"cannot write .* \(No space left on device\)"):
        fetch("shakespeare", tmp_path / "copy.txt")


def full_disk(path, data):
    raise OSError(28, "No space left on device")
