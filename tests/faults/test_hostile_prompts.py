"""Prompts from a stranger, any Unicode at all: tokens of the task, or one line; and the same on the command line."""

import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hostile import HANG, assert_one_line
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import counted

from workbench.byte_pairs import BytePairs
from workbench.errors import WorkbenchError
from workbench.recipes import load_recipe
from workbench.tasks import load_task, task_names
from workbench.training import train

TASKS = [load_task(name) for name in task_names()]
PROMPTS = {
    "nothing": "",
    "blanks": " \t\u00a0\u2003 ",
    "a NUL": "\0",
    "half of a pair": "\ud800",
    "a byte that is no text": "\udcff",
    "escape codes": "\x1b]0;owned\x07\x1b[2J",
    "right to left": "\u202eevil \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "marks without end": "a" + "\u0301" * 10_000,
    "emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 50,
    "a million letters": "x" * 10**6,
    "a million bytes in words": "the " * 250_000,
    "100,000 words": "zebra " * 100_000,
    "a million blanks": " " * 10**6,
    "HTML": "<script>alert(1)</script> <img src=x onerror=alert(1)>",
    "Markdown": "[x](javascript:alert(1)) `$x$` **b**",
    "a template": "{{7*7}} ${x} %s {0} __import__('os')",
    "lines": "zebra\nanimal\r\ndid\u2028not",
    "every letter": "".join(map(chr, range(0x20, 0x3000))),
    "last letters": "".join(map(chr, range(0x10FF00, 0x110000))),
}
KNOWN = ["the", "animal", "did", "t1", "s3", "a0", "f2", " ", "\u00e9", "\n"]


def check(text: str) -> None:
    for task in TASKS:
        try:
            tokens = task.encode(text)
        except WorkbenchError as error:
            assert_one_line(error)
            continue
        assert tokens.shape[0] == 1 and 1 <= tokens.shape[1] <= task.n_ctx
        assert tokens.min() >= 0 and tokens.max() < len(task.vocabulary)
        assert task.decode(tokens) == (text if isinstance(task.vocabulary, BytePairs) else " ".join(text.split()))


@pytest.mark.parametrize("text", PROMPTS.values(), ids=PROMPTS)
def test_a_strange_prompt_is_tokens_or_one_line(text):
    check(text)


@settings(max_examples=counted(100, 2_000))
@example("the \ud800")
@given(st.text(st.characters(exclude_categories=())) | st.lists(st.sampled_from(KNOWN)).map(" ".join))
def test_any_prompt_is_tokens_or_one_line(text):
    check(text)


@pytest.mark.parametrize("text", PROMPTS.values(), ids=PROMPTS)
def test_the_name_of_a_single_word_is_a_token_or_one_line(text):
    for task in TASKS:
        try:
            assert 0 <= task.vocabulary.token(text) < len(task.vocabulary)
        except WorkbenchError as error:
            assert_one_line(error)


@pytest.mark.parametrize("option", ["prompt", "--against", "--head", "run"])
def test_the_command_line_answers_any_prompt_in_one_line(workbench, runs, option):
    rng = random.Random(0)
    texts = [text for text in PROMPTS.values() if len(text) < 2**17]  # Linux takes no longer argument
    for text in rng.sample(texts, counted(2, len(texts))):
        given = {"run": "winograd-2", "prompt": "the animal"} | ({option: text} if option[0] != "-" else {})
        extra = [f"{option}={text}"] if option[0] == "-" else []
        code, out, err = workbench("attention", *extra, "--", given["run"], given["prompt"])
        assert code == 2 and out == "" and err.count("\n") == 1 and err.endswith("\n")
        assert not [letter for letter in err[:-1] if unicodedata.category(letter)[0] == "C"], err
    assert not runs.exists()


def test_bytes_that_are_no_text_are_refused_by_the_process_itself(made_up_text, runs):
    """Python makes half of a pair of such a byte; a text's tokenizer takes whole letters alone."""
    train(load_recipe("shakespeare-0").with_steps(1))
    for path in runs.glob("*/seed-0"):
        done = subprocess.run(
            [sys.executable, "-m", "workbench", "attention", str(path), b"\xff\xfe"],
            capture_output=True, timeout=HANG, check=False, env=os.environ | {"PYTHONUTF8": "1"},
        )  # fmt: skip
        assert done.returncode == 2 and done.stdout == b"" and done.stderr.count(b"\n") == 1
        assert b"leave out what is no UTF-8" in done.stderr
    assert Path(runs).exists()
