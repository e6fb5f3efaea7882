"""Claims: what holds is shown to hold, what does not is refuted, and each can be either."""

import torch
from support import build

import workbench as wb
from circuits.claims import Claim, Verdict, claims_frame, composition_claims, looking_claims
from circuits.composition import compositions
from circuits.heads import head_scores
from workbench.known_answers import induction_pair, positional_impostor


def test_a_claim_runs_its_experiment_once_and_shows_what_it_found():
    runs = []

    def check(holds):
        runs.append(holds)
        return Verdict(holds, "a figure")

    held, refuted = (Claim("it does", ("0.0",), "cut", lambda holds=holds: check(holds)) for holds in (True, False))
    assert str(held) == "✓ it does (cut: a figure)"
    assert str(refuted) == "✗ refuted: it does (cut: a figure)"
    assert held.holds and not refuted.holds
    assert runs == [True, False]
    assert claims_frame([held, refuted])["holds"].tolist() == [True, False]


def test_of_the_hand_built_pair_exactly_the_true_composition_holds():
    known = induction_pair()
    claims = composition_claims(known.model, known.tokens, compositions(known.model), positions=slice(12, None))
    assert [(claim.text, claim.holds) for claim in claims] == [("the keys of 1.0 read head 0.0", True)]


def test_a_high_score_that_is_used_for_nothing_is_refuted():
    """In the trained induction model 0.3 → V → 1.1 stands out at z = +12, more than any other value path."""
    run = wb.load("induction-2-attn")
    composition = compositions(run.model)
    assert composition["V"]["0.3", "1.1"].z > 10
    claims = composition_claims(run.model, run.task.held_out[:128], composition, positions=list(run.task.scored))
    told = {claim.text: claim.holds for claim in claims}
    assert told["the keys of 1.0, 1.1, 1.2, 1.3 read head 0.0"]
    assert not told["the values of 1.1 read head 0.3"]


def test_where_heads_look_is_measured_anew_and_can_be_refuted():
    known = induction_pair()
    heads = head_scores(known.model)
    claims = looking_claims(known.model, heads)
    assert {claim.circuit[0] for claim in claims} == {"0.0", "0.1", "1.0"}
    assert all(claim.holds for claim in claims)
    # named by one model, asked of another, in which no head looks there
    wrong = looking_claims(indifferent(known), heads)
    assert not any(claim.holds for claim in wrong)


def indifferent(known):
    """A model of the same shape whose heads attend almost alike to everything."""
    sizes = {name: getattr(known.model.cfg, name) for name in ("n_layers", "n_heads", "d_vocab", "n_ctx")}
    model = build(d_mlp=0, norm="none", **sizes)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q.mul_(0.01)
            block.attn.b_Q.zero_()
    return model


def test_an_impostor_gets_no_claim_about_induction():
    known = positional_impostor()
    assert looking_claims(known.model, head_scores(known.model)) == []
    assert composition_claims(known.model, known.tokens, compositions(known.model)) == []
