"""Server optimizers by hand: rounds in which the clients' mean is given, and the server steps towards it.

Every case starts at 0 with beta1 = 1/2; d is the clients' mean minus the server's model.
"""

from math import sqrt

import pytest
import torch

from byhand import LEAF, federation, landed, model, number, play
from fedrelay.methods import SCAFFOLD, FedAdagrad, FedAdam, FedAvgM, FedProx, FedYogi, Plain, Proximal
from fedrelay.seam.methods import Population
from fedrelay.seam.recipe import Recipe

ALL = Population(2, 2)


def rounds(method, steps) -> list[float]:
    """The server's model after each round, when the clients' mean lies ``d`` away from it."""
    w, m, path = model(0), method.init(model(0), ALL), []
    for d in steps:
        w, m = method.merge(w, m, landed(method.folds, w, [model(number(w) + d - 1), model(number(w) + d + 1)]))
        path.append(number(w))
    return path


def test_FedAvgM_by_hand():
    """beta = eta = 1/2. d = 2: v = 2, w = 1. d = 1: v = 1 + 1 = 2, w = 2. d = -3: v = 1 - 3 = -2, w = 1."""
    assert rounds(FedAvgM(eta=0.5, beta=0.5), [2, 1, -3]) == [1, 2, 1]


def test_FedAdagrad_by_hand():
    """tau = 3 (v starts at 9), eta = 2. d = 4: m = 2, v = 9 + 16 = 25, w = 2 * 2/(5 + 3) = 0.5.
    d = 12: m = 1 + 6 = 7, v = 25 + 144 = 169, w = 0.5 + 2 * 7/(13 + 3) = 1.375. (With v from 0: 8/7 at once.)"""
    assert rounds(FedAdagrad(eta=2.0, beta1=0.5, tau=3.0), [4, 12]) == pytest.approx([0.5, 1.375], abs=1e-12)


def test_FedAdagrad_has_no_momentum_unless_asked():
    """beta1 = 0: m = d. d = 4: w = 2 * 4/8 = 1; d = 12: w = 1 + 2 * 12/16 = 2.5."""
    assert rounds(FedAdagrad(eta=2.0, tau=3.0), [4, 12]) == pytest.approx([1, 2.5], abs=1e-12)


def test_FedAdam_by_hand():
    """tau = 1 (v starts at 1), beta2 = 1/2, eta = 78. d = 7: m = 3.5, v = (1 + 49)/2 = 25, w = 78 * 3.5/6 = 45.5.
    d = 35: m = 1.75 + 17.5 = 19.25, v = (25 + 1225)/2 = 625, w = 45.5 + 78 * 19.25/26 = 103.25. No bias is corrected."""
    assert rounds(FedAdam(eta=78.0, beta1=0.5, beta2=0.5, tau=1.0), [7, 35]) == pytest.approx([45.5, 103.25], abs=1e-10)


def test_FedYogi_by_hand():
    """tau = 3 (v starts at 9), beta2 = 3/4, eta = 7.8. d = 8, d^2 above v: m = 4, v = 9 + 64/4 = 25, w = 7.8 * 4/8 = 3.9.
    d = 2.8, d^2 = 7.84 below v: m = 2 + 1.4 = 3.4, v = 25 - 7.84/4 = 23.04 = 4.8^2, w = 3.9 + 7.8 * 3.4/7.8 = 7.3."""
    assert rounds(FedYogi(eta=7.8, beta1=0.5, beta2=0.75, tau=3.0), [8, 2.8]) == pytest.approx([3.9, 7.3], abs=1e-12)


def test_FedAdam_as_in_Flower_by_hand():
    """v starts at 0; in round t, from 1, the rate is eta sqrt(1 - beta2^(t+1))/(1 - beta1^(t+1)). beta2 = 3/4, tau = 1, eta = 6.

    d = 2: m = 1, v = 1; rate = 6 sqrt(7/16)/(3/4) = 2 sqrt 7; w = 2 sqrt 7 * 1/2 = sqrt 7.
    d = 1: m = 1, v = 1; rate = 6 sqrt(37/64)/(7/8) = 6 sqrt 37/7; w = sqrt 7 + 3 sqrt 37/7.
    """
    made = rounds(FedAdam(eta=6.0, beta1=0.5, beta2=0.75, tau=1.0, variant="flower"), [2, 1])
    assert made == pytest.approx([sqrt(7), sqrt(7) + 3 * sqrt(37) / 7], abs=1e-12)


def test_defaults_are_those_of_the_papers_best_choice():
    """Reddi et al.: beta1 = 0.9 (0 for FedAdagrad), beta2 = 0.99, tau = 1e-3; a first round with d = 1 and eta = 1 moves by

    FedAdam: 0.1/(sqrt(0.99e-6 + 0.01) + 0.001), FedYogi: 0.1/(sqrt(1e-6 + 0.01) + 0.001), FedAdagrad: 1/(sqrt(1e-6 + 1) + 0.001).
    """
    made = [rounds(cls(eta=1.0), [1])[0] for cls in (FedAdam, FedYogi, FedAdagrad)]
    expected = [0.1 / (sqrt(0.01 + 0.99e-6) + 1e-3), 0.1 / (sqrt(0.01 + 1e-6) + 1e-3), 1 / (sqrt(1 + 1e-6) + 1e-3)]
    assert made == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("cls", [FedAvgM, FedAdagrad, FedYogi, FedAdam])
def test_moments_are_kept_per_leaf(cls):
    """Two leaves with the same history end at the same place; the third, in scope from round 2 only, begins there."""
    method, w = cls(), {n: torch.zeros(2, dtype=torch.float64) for n in "abc"}
    m, one = method.init(w, ALL), torch.ones(2, dtype=torch.float64)
    w1, m1 = method.merge(w, m, landed(method.folds, w, [{"a": one, "b": one}]))
    w2, _ = method.merge(w1, m1, landed(method.folds, w1, [{n: t + 1 for n, t in w1.items()}]))
    assert w1["c"] is w["c"]
    assert torch.equal(w2["a"], w2["b"])
    assert torch.equal(w2["c"], w1["a"])
    assert not torch.equal(w2["c"], w2["a"])


def test_the_pseudo_gradient_is_the_inner_methods():
    """Ends 1 and 5 of 3 and 13 examples: inner Plain by examples gives d = 4.25, by count d = 3; eta = 1, first round: w = d."""
    for by, d in (("examples", 4.25), ("count", 3.0)):
        method = FedAvgM(inner=Plain(by))
        made, _ = method.merge(
            model(0), method.init(model(0), ALL), landed(method.folds, model(0), [model(1), model(5)], [3, 13])
        )
        assert number(made) == d


def test_the_inner_methods_clients_and_state_come_along():
    """FedAvgM(eta = 2) around SCAFFOLD on b = 2, -6, two steps at rate 1/2 from 0: x = -1.5 and c = 1.5 as in SCAFFOLD alone, so
    w = -3. In round 2 corrections 3 and -3 apply: -3 -> -2 -> -1.5 and -3 -> -3 -> -3, x = -2.25, d = 0.75, v = -1.35 + 0.75."""
    fed, recipe = federation([2, -6]), Recipe(learning_rate=0.5, batch_size=8, steps=2)
    method = FedAvgM(inner=SCAFFOLD(), eta=2.0)
    w, m = play(method, fed, model(0), method.init(model(0), ALL), [[0], [1]], recipe)
    assert (number(w), float(m["inner"]["c"][LEAF])) == (-3, 1.5)
    w, m = play(method, fed, w, m, [[0], [1]], recipe)
    assert number(w) == pytest.approx(-3 - 1.2, abs=1e-12)
    assert FedAdam(inner=FedProx(mu=0.5)).visit({"inner": None}, Recipe())[0].rules == (Proximal(0.5),)
