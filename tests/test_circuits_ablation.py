"""A head at its mean: against the same taken apart by hand, with a head that does all, and one that does nothing."""

import pytest
import torch
import torch.nn.functional as F
from support import build

from circuits.ablation import head_ablations
from circuits.errors import CircuitError
from workbench.known_answers import induction_pair


def by_hand(model, tokens, layer, head, positions):
    """The cut written out: the mean of z over the batch, the rest of the pass by plain hooks of TransformerLens."""
    name = f"blocks.{layer}.attn.hook_z"
    _, cache = model.run_with_cache(tokens)
    mean = cache[name][:, :, head].mean(0)

    def put(z, hook):
        return torch.cat([z[:, :, :head], mean[None, :, None].expand(len(z), -1, 1, -1), z[:, :, head + 1 :]], 2)

    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=[(name, put)])[:, positions]
    answers = tokens[:, [p + 1 for p in positions]]
    loss = F.cross_entropy(logits.transpose(1, 2), answers, reduction="none").mean(1)
    return loss, (logits.argmax(-1) == answers).float().mean(1)


@pytest.mark.parametrize("options", [{"d_mlp": 16}, {"d_mlp": 0, "norm": "post"}, {"residual": False}])
def test_it_is_the_pass_with_the_heads_mean_in_its_place(options):
    model = build(**options)
    tokens = torch.randint(20, (7, 12), generator=torch.Generator().manual_seed(1))
    positions = [3, 9, 10]
    found = head_ablations(model, tokens, positions=positions)
    for layer in range(2):
        for head in range(2):
            loss, right = by_hand(model, tokens, layer, head, positions)
            torch.testing.assert_close(found.loss[layer, head].float(), loss, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(found.right[layer, head].float(), right)
    with torch.no_grad():
        logits = model(tokens)[:, positions]
    clean = F.cross_entropy(logits.transpose(1, 2), tokens[:, [4, 10, 11]], reduction="none").mean(1)
    torch.testing.assert_close(found.clean_loss.float(), clean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.cost, (found.loss - found.clean_loss).mean(-1))
    torch.testing.assert_close(model(tokens)[:, positions], logits)  # nothing of the cut is left


def test_on_the_induction_pair_the_pair_is_worth_everything_and_the_others_nothing():
    known = induction_pair()
    late = list(range(13, known.tokens.shape[1] - 1))
    found = head_ablations(known.model, known.tokens, positions=late)
    assert float(found.clean_right.mean()) > 0.99
    assert (found.accuracy_change[[0, 1], 0] < -0.8).all() and (found.cost_interval[0, [0, 1], 0] > 1).all()
    assert (found.accuracy_change[[0, 1], 1].abs() < 0.01).all() and (found.cost[[0, 1], 1].abs() < 0.05).all()


def test_intervals_go_by_clusters():
    model = build()
    tokens = torch.randint(20, (6, 12), generator=torch.Generator().manual_seed(2))
    twice = torch.cat([tokens, tokens])
    once = head_ablations(model, tokens).cost_interval
    clustered = head_ablations(model, twice, clusters=[str(i % 6) for i in range(12)])
    torch.testing.assert_close(clustered.cost_interval, once)  # a copy of each teaches nothing
    naive = head_ablations(model, twice).cost_interval
    assert ((naive[1] - naive[0]) < (once[1] - once[0])).all()
    # Student's t on six independent means, written out
    changes = clustered.loss[0, 0, :6] - clustered.clean_loss[:6]
    half = 2.5705818 * changes.std() / 6**0.5
    torch.testing.assert_close(once[1, 0, 0], changes.mean() + half, atol=1e-6, rtol=1e-5)
    frame = clustered.to_frame()
    assert frame["head"].tolist() == ["0.0", "0.1", "1.0", "1.1"]
    assert frame["cost_high"].tolist() == pytest.approx(once[1].flatten().tolist())


def test_no_layers_and_bad_input():
    tokens = torch.randint(20, (4, 12))
    assert head_ablations(build(n_layers=0), tokens).cost.shape == (0, 2)
    with pytest.raises(ValueError, match="two sequences"):
        head_ablations(build(), tokens[:1])
    with pytest.raises(ValueError, match="3 clusters for 4"):
        head_ablations(build(), tokens, clusters=["a"] * 3)
    with pytest.raises(CircuitError, match="training mode with dropout"):
        head_ablations(build(dropout=0.5).train(), tokens)
