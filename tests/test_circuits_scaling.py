"""Random scores against what is published of them, and layers against the paper's table."""

import pytest
import torch

from circuits.errors import Undefined
from circuits.scaling import FROZEN, layer_costs, random_scores


@pytest.fixture(scope="module")
def found():
    return {scores.width: scores for scores in random_scores([4, 16, 64, 256, 1024], rows=400)}


def test_the_variance_of_products_is_the_width(found):
    for width, scores in found.items():
        assert abs(scores.variance / width - 1) < 0.03  # four standard errors, and a little


def test_published_figures(found):
    """At 256 everything is on one of 64 tokens, at 1024 seven rows of ten are frozen, scaled .96 stays."""
    assert found[256].unscaled.effective_tokens < 1.6
    assert found[1024].unscaled.frozen == pytest.approx(0.7, abs=0.08)
    for scores in found.values():
        assert scores.scaled.jacobian == pytest.approx(0.96, abs=0.01)
        assert scores.scaled.frozen == 0
    jacobians = [scores.unscaled.jacobian for scores in found.values()]
    assert jacobians == sorted(jacobians, reverse=True)


def test_the_trace_is_that_of_the_jacobian():
    scores = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = scores.softmax(-1)
    trace = torch.autograd.functional.jacobian(lambda x: x.softmax(-1), scores).trace()
    assert abs(float(trace - (1 - p.pow(2).sum()))) < 1e-12
    one = random_scores([1], keys=1, rows=3, pairs=2)[0]  # one key: all weight on it, and nothing to learn
    assert (one.scaled.effective_tokens, one.scaled.jacobian, one.scaled.frozen) == (1, 0, 1) and FROZEN > 0


def test_layers_cost_what_the_papers_table_says():
    n, d = 100, 512
    costs = {cost.kind: (cost.operations, cost.sequential, cost.path) for cost in layer_costs(n, d, 3, 10)}
    assert costs == {
        "self-attention": (100 * 100 * 512, 1, 1),
        "recurrent": (100 * 512 * 512, 100, 100),
        "convolutional": (3 * 100 * 512 * 512, 1, 5),  # 3⁴ = 81 < 100 ≤ 3⁵
        "self-attention, restricted": (10 * 100 * 512, 1, 10),
    }
    whole = layer_costs(8, 4, 2, 64)
    assert whole[2].path == 3 and whole[3].operations == whole[0].operations and whole[3].path == 1


@pytest.mark.parametrize("wrong", [{"n": 0, "d": 1}, {"n": 1, "d": 0}, {"n": 4, "d": 4, "kernel": 1}])
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(Undefined, match="a layer's cost needs"):
        layer_costs(**wrong)
    with pytest.raises(Undefined, match="random scores need"):
        random_scores([0])
