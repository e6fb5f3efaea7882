"""Byte pairs and the task on a text; with Shakespeare's own text where it is here."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.attention_report import attention_report
from workbench.byte_pairs import BytePairs, train_tokenizer
from workbench.content import content
from workbench.errors import BadPrompt, BadRecipe, NoCorpus
from workbench.tasks import load, load_task
from workbench.tasks.text import Text
from workbench.training import evaluate, train

TOKENIZER = content("datasets") / "shakespeare-1024.json"
BYTE_PAIRS = BytePairs.read(TOKENIZER)


@given(st.text(min_size=1))
def test_any_text_comes_back_as_it_was(text):
    tokens = BYTE_PAIRS.encode(text)
    assert BYTE_PAIRS.decode(tokens) == text
    assert all(0 <= token < 1024 for token in tokens)
    if text.isascii():
        assert "".join(BYTE_PAIRS.str_tokens(tokens)) == text


def test_tokens_are_shown_as_the_text_they_stand_for():
    assert len(BYTE_PAIRS) == len(set(BYTE_PAIRS.words)) == 1024
    assert BYTE_PAIRS.str_tokens(BYTE_PAIRS.encode("é\n")) == ["<0xC3>", "<0xA9>", "\n"]
    assert BYTE_PAIRS.words[BYTE_PAIRS.token(" the")] == " the"
    with pytest.raises(BadPrompt, match=r"' the the' is 2 tokens \( the \|  the\); expected the text of one"):
        BYTE_PAIRS.token(" the the")
    with pytest.raises(BadPrompt, match="the prompt is empty"):
        BYTE_PAIRS.encode("")


def test_merges_are_by_frequency():
    """By hand: of "ab" five times and "cd" three times, the first merge is ab, the second cd."""
    tokenizer = train_tokenizer(["ab ab ab ab ab", " cd cd cd"], 256 + 3)
    assert [tokenizer.id_to_token(i) for i in range(256, 259)] == ["ab", "Ġab", "cd"]
    assert len(BytePairs.of(tokenizer)) == 259


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(BadRecipe, match=r"bad.json: not a readable tokenizer"):
        BytePairs.read(tmp_path / "bad.json")


def test_a_trained_model_needs_no_text(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("WORKBENCH_SHAKESPEARE", raising=False)
    load._load.cache_clear()
    task = load_task("shakespeare")
    assert task.n_ctx == 128 and len(task.vocabulary) == 1024
    assert task.decode(task.encode("Speak, speak.")) == "Speak, speak."
    with pytest.raises(BadPrompt, match="the prompt has 201 tokens, but shakespeare has a context of 128"):
        task.encode("no" * 200)
    for part in ("train", "held_out"):
        with pytest.raises(NoCorpus, match="workbench data fetch shakespeare"):
            getattr(task, part)
    with pytest.raises(NoCorpus):
        train(replace(wb.load_recipe("shakespeare-0")), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(AttributeError):
        getattr(task, "nothing")  # noqa: B009


def test_windows_lie_side_by_side_and_training_ones_begin_anywhere(made_up_text):
    task = load_task("shakespeare")
    tokens = task.vocabulary.encode(made_up_text)
    n_train = round(0.9 * len(tokens))
    for part, of in ((task.train, tokens[:n_train]), (task.held_out, tokens[n_train:])):
        assert part.shape == ((len(of) - 1) // 128, 129)
        assert part[1].tolist() == of[128 : 128 + 129]
        assert part[:, :-1].flatten().tolist() == of[: 128 * len(part)]  # every token is read once
    batch = task.batch(3, 7, 64)
    starts = {tuple(tokens[i : i + 129]) for i in range(n_train - 128)}
    assert all(tuple(row) in starts for row in batch.tolist())
    assert torch.equal(batch, task.batch(3, 7, 64)) and not torch.equal(batch, task.batch(3, 8, 64))
    assert len({tuple(row) for row in batch.tolist()}) > 32


def test_scores_equal_those_computed_in_one_go_and_the_error_is_that_of_blocks(made_up_text):
    """Brute force: all logits at once, and the clustered standard error by its formula."""
    recipe = wb.load_recipe("shakespeare-0")
    task = load_task("shakespeare")
    model = wb.Transformer(replace(recipe.model, n_ctx=128, d_vocab=1024), task.vocabulary)
    tokens = task.train
    scores = evaluate(model, task, tokens)
    with torch.no_grad():
        log_probs = model(tokens[:, :-1]).log_softmax(-1)
    losses = -log_probs.gather(2, tokens[:, 1:, None])[..., 0].double()
    assert scores.loss == pytest.approx(losses.mean().item(), abs=1e-6)
    assert scores.measures["perplexity"] == pytest.approx(math.exp(losses.mean().item()), rel=1e-6)
    assert scores.accuracy == pytest.approx((log_probs.argmax(-1) == tokens[:, 1:]).double().mean().item())
    away = losses.mean(1) - losses.mean()
    blocks = [away[i : i + 8].sum().item() ** 2 for i in range(0, len(away), 8)]
    error = math.sqrt(sum(blocks) * len(blocks) / (len(blocks) - 1)) / len(away)
    assert scores.measures["loss_standard_error"] == pytest.approx(error, rel=1e-4)
    assert sum(n for n, _ in scores.by_cluster().values()) == len(tokens)
    assert list(scores.by_cluster())[1] == "windows 8–15"


def test_a_run_on_a_text_says_its_perplexity(made_up_text):
    recipe = wb.load_recipe("shakespeare-0").with_steps(3)
    run = train(recipe)
    assert run.score == f"held-out perplexity {math.exp(run.results['held_out']['loss']):.2f}"
    assert run.metrics[-1]["perplexity"] == pytest.approx(math.exp(run.metrics[-1]["held_out_loss"]))
    assert run.model(run.encode("the king and")).shape[-1] == 1024
    report = attention_report(run, ["the king\nand"])
    assert report.lines()[0] == "the ·king ↵ and"  # blanks are shown, and tokens stay what they are
    assert report.data["prompt"]["tokens"] == ["the", " king", "\n", "and"]


# The published text


def test_the_shipped_tokenizer_is_what_training_on_the_text_gives(shakespeare, tmp_path):
    """Published: 1,115,394 characters, 459,760 tokens, 2.43 a token; with this library 459,792."""
    assert len(shakespeare) == 1_115_394
    train_tokenizer([shakespeare], 1024).save(str(tmp_path / "again.json"), pretty=False)
    assert (tmp_path / "again.json").read_bytes() == TOKENIZER.read_bytes()
    tokens = BYTE_PAIRS.encode(shakespeare)
    assert len(tokens) == 459_792
    assert len(tokens) == pytest.approx(459_760, rel=1e-3)
    assert len(shakespeare) / len(tokens) == pytest.approx(2.43, abs=0.005)
    assert BYTE_PAIRS.decode(tokens) == shakespeare


def test_its_last_tenth_is_held_out(shakespeare):
    task = load_task("shakespeare")
    assert isinstance(task, Text)
    train_tokens, held_out = task.parts
    assert task.decode(torch.cat([train_tokens, held_out])) == shakespeare
    assert len(held_out) / (len(train_tokens) + len(held_out)) == pytest.approx(0.1, abs=1e-5)
    assert task.held_out.shape == (359, 129)  # published: 359 windows
