"""What the library says of the trained induction models, where the answer is known from the literature: previous-token
heads in layer 0, induction heads in layer 1, K-composition between them, positive, and shown by a cut; with one layer
nothing of it. (*A Mathematical Framework for Transformer Circuits*; *In-context Learning and Induction Heads*.)"""

import pytest

import workbench as wb
from circuits import (
    Path,
    composition_scores,
    composition_spectrum,
    cut,
    every_path,
    head_scores,
    in_context_learning_score,
    path_effects,
    qk_trace,
)  # fmt: skip


@pytest.fixture(scope="module")
def run():
    return wb.load("induction-2-attn")


def test_previous_token_heads_in_layer_0_and_induction_heads_in_layer_1(run):
    roles = head_scores(run.model).roles()
    assert roles["previous-token"]
    assert all(head.startswith("0.") for head in roles["previous-token"])
    assert roles["induction"] == ("1.0", "1.1", "1.2", "1.3")
    assert (qk_trace(run.model).z[1] > 10).all()


def test_their_k_composition_ranks_first_and_is_positive(run):
    scores = composition_scores(run.model, "K")
    roles = head_scores(run.model).roles()
    for writer, reader in scores.ranked()[:4]:
        assert f"{writer[0]}.{writer[1]}" in roles["previous-token"]
        assert f"{reader[0]}.{reader[1]}" in roles["induction"]
        positivity = composition_spectrum(run.model, "K", writer, reader).positivity
        assert positivity.value > 0.95
        assert positivity.outside
    assert composition_scores(run.model, "Q").z.max() < 0.5  # nothing above chance in the queries


def test_the_cuts_confirm_exactly_them(run):
    """Each of the four paths of head 0.0 into a key costs its reader half of its attention; no other path does. On the
    loss, one path costs little, since four heads do the same, and the four together nearly everything."""
    tokens, second_half = run.task.held_out[:128], list(run.task.scored)
    paths = every_path(run.model)
    effects = path_effects(run.model, tokens, paths, positions=second_half, measure="prefix_matching")
    confirmed = [path for path, yes in zip(paths, effects.confirmed(), strict=True) if yes]
    together = [Path("0.0", "K", (1, head)) for head in range(4)]
    assert confirmed == together
    loss = path_effects(run.model, tokens, [*together, together], positions=second_half)
    assert loss.confirmed().tolist() == [False] * 4 + [True]
    assert loss.mean[-1] > 1
    with cut(run.model, together):
        assert head_scores(run.model, draws=39)["prefix_matching"].scores[1].max() < 0.5


def test_the_one_layer_control_has_none_of_it(run):
    control = wb.load("induction-1-attn")
    assert head_scores(control.model).roles()["induction"] == ()
    assert len(composition_scores(control.model, "K").to_frame()) == 0
    tokens = run.task.held_out[:128]
    late = in_context_learning_score(run.model, tokens).value
    assert late < -3
    assert late < 2 * in_context_learning_score(control.model, tokens).value
