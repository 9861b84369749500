"""IDA by hand: each client weighs the inverse of its L1 distance from the uniform mean, over all leaves together."""

import pytest
import torch

from byhand import ENGINES, federation, landed, model, number, play
from fedrelay.methods import IDA, FedProx, Plain, Proximal
from fedrelay.seam.recipe import Recipe


def w(*leaves: float) -> dict[str, torch.Tensor]:
    return {n: torch.tensor([v, -v], dtype=torch.float64) for n, v in zip("ab", leaves, strict=False)}


def merged(ends, examples=None) -> dict[str, list[float]]:
    method, old = IDA(), w(100, 100)
    new, _ = method.merge(old, None, landed(method.folds, old, ends, examples))
    return {n: t.tolist() for n, t in new.items()}


@pytest.mark.parametrize("examples", [[1, 1, 1], [1, 50, 7]])
def test_three_clients(examples):
    """(a | b), each leaf holding v and -v: (0 | 3), (3 | 0), (6 | 0); mean (3 | 1).

    L1 distances: 2 (3 + 2) = 10, 2 (0 + 1) = 2, 2 (3 + 1) = 8; alpha = 1/10, 1/2, 1/8, together 29/40.
    a = (0 + 3/2 + 6/8) 40/29 = 90/29,   b = (3/10) 40/29 = 12/29. Examples do not matter.
    (Distances per leaf would leave a at 3, L2 distances give another mix.)
    """
    made = merged([w(0, 3), w(3, 0), w(6, 0)], examples)
    assert made["a"] == pytest.approx([90 / 29, -90 / 29], rel=1e-12)
    assert made["b"] == pytest.approx([12 / 29, -12 / 29], rel=1e-12)


def test_two_clients_are_equally_far():
    assert merged([w(1, 2), w(5, 0)]) == {"a": [3, -3], "b": [1, -1]}


def test_equal_clients_stay_where_they_are():
    assert merged([w(4, 2)] * 3) == {"a": [4, -4], "b": [2, -2]}


def test_a_client_on_the_mean_decides():
    """0, 0, 9 and 3, whose mean is 3: distances 6, 6, 12 and 0, which counts as a millionth of the largest. So alpha = 1/6, 1/6,
    1/12, 1e6/12, and the merged model lies (3/6 + 3/6 - 6/12)/(5/12 + 1e6/12) = 6/1000005 below 3."""
    assert merged([w(v, 1) for v in (0, 0, 9, 3)])["a"][0] == pytest.approx(3 - 6 / 1000005, rel=1e-12)


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_a_failed_client_counts_nowhere(pick):
    """Half-way steps from 0 to b = 0, 2, 10 end at 0, 1, 5: mean 2, distances 2, 1, 3, so (1 + 5/3)/(1/2 + 1 + 1/3) = 16/11."""
    fed = federation([0, 2, float("nan"), 10], pick=pick)
    made, _ = play(IDA(), fed, model(0), None, [[k] for k in range(4)])
    assert number(made) == pytest.approx(16 / 11, abs=1e-12)


def test_the_client_half_is_the_inner_methods():
    recipe, extra = IDA(FedProx(mu=0.5)).visit(None, Recipe())
    assert (recipe.rules, extra) == ((Proximal(0.5),), {})
    assert IDA(Plain()).visit(None, Recipe()) == (Recipe(), {})
