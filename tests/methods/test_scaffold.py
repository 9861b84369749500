"""SCAFFOLD by hand, options II and I: two clients with the losses (w-2)^2/2 and (w+6)^2/2, two steps at rate 1/2."""

import re

import pytest

from byhand import ENGINES, LEAF, federation, model, number, play
from fedrelay.methods import SCAFFOLD, Proximal
from fedrelay.seam.federation import Run
from fedrelay.seam.recipe import SGD, Adam, Cosine, Recipe
from fedrelay.seam.rules import Rule
from fedrelay.seam.values import value

TWO_BATCHES = Recipe(learning_rate=0.5, batch_size=1, epochs=1)
"""Clients of two rows take two steps in their one epoch."""


def variate(m) -> float:
    return float(m["c"][LEAF])


def variates(fed) -> dict[int, float]:
    return {k: float(leaf[LEAF]) for k, kept in fed.memories.clients().items() for leaf in kept.values()}


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_option_2_over_two_rounds(pick):
    """c_i+ = c_i - c + (x - y)/(K rate) with K = 2 steps, so K rate = 1. Without corrections y: 0 -> b/2 -> 3b/4.

    Round 1 from 0, all variates 0:
        client 0: 0 -> 1 -> 1.5;    c_0 = -1.5.     client 1: 0 -> -3 -> -4.5;  c_1 = 4.5.
        x = (1.5 - 4.5)/2 = -1.5;   c = (-1.5 + 4.5)/2 = 1.5.
    Round 2 from -1.5, corrections c - c_0 = 3 and c - c_1 = -3:
        client 0: -1.5 -> -1.5 - (-3.5 + 3)/2 = -1.25 -> -1.25 - (-3.25 + 3)/2 = -1.125;  c_0 = -3 + (-1.5 + 1.125) = -3.375.
        client 1: -1.5 -> -1.5 - (4.5 - 3)/2 = -2.25 -> -2.25 - (3.75 - 3)/2 = -2.625;    c_1 = 3 + (-1.5 + 2.625) = 4.125.
        x = (-1.125 - 2.625)/2 = -1.875;   c = (-3.375 + 4.125)/2 = 0.375, on its way to 0 as x is to the optimum -2.
    """
    fed, method = federation([2, -6], sizes=[2, 2], pick=pick), SCAFFOLD()
    w, m = model(0), method.init(model(0), Run(fed).population())
    w, m = play(method, fed, w, m, [[0], [1]], TWO_BATCHES)
    assert (number(w), variate(m), variates(fed)) == (-1.5, 1.5, {0: -1.5, 1: 4.5})
    w, m = play(method, fed, w, m, [[0], [1]], TWO_BATCHES)
    assert (number(w), variate(m), variates(fed)) == (-1.875, 0.375, {0: -3.375, 1: 4.125})


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_option_1_over_two_rounds(pick):
    """c_i+ is the gradient at x, over the whole data.

    Round 1 from 0: y as in option II, x = -1.5; c_0 = 0 - 2 = -2, c_1 = 0 + 6 = 6, c = 2.
    Round 2, corrections 4 and -4:
        client 0: -1.5 -> -1.5 - (-3.5 + 4)/2 = -1.75 -> -1.75 - (-3.75 + 4)/2 = -1.875;   c_0 = -1.5 - 2 = -3.5.
        client 1: -1.5 -> -1.5 - (4.5 - 4)/2 = -1.75 -> -1.75 - (4.25 - 4)/2 = -1.875;     c_1 = -1.5 + 6 = 4.5.
        x = -1.875;   c = 0.5.
    """
    fed, method = federation([2, -6], sizes=[2, 2], pick=pick), SCAFFOLD(option=1)
    w, m = model(0), method.init(model(0), Run(fed).population())
    w, m = play(method, fed, w, m, [[0], [1]], TWO_BATCHES)
    assert (number(w), variate(m), variates(fed)) == (-1.5, 2, {0: -2, 1: 6})
    w, m = play(method, fed, w, m, [[0], [1]], TWO_BATCHES)
    assert (number(w), variate(m), variates(fed)) == (-1.875, 0.5, {0: -3.5, 1: 4.5})


@pytest.mark.parametrize(("option", "c"), [(2, (-1.5 + 4.5) / 4), (1, (-2 + 6) / 4)])
@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_the_server_divides_by_all_clients_and_merges_uniformly(option, c, pick):
    """Of N = 4 clients three were drawn and one of these failed: x is the mean of the two that came back, whatever their sizes
    (2 and 4 rows, two steps each), and c moves by their sum over 4."""
    fed, method = federation([2, -6, float("nan"), 100], sizes=[2, 4, 2, 2], pick=pick), SCAFFOLD(option=option)
    m = method.init(model(0), Run(fed).population())
    w, m = play(method, fed, model(0), m, [[0], [1], [2]], Recipe(learning_rate=0.5, batch_size=8, steps=2))
    assert (number(w), variate(m)) == (-1.5, c)
    assert variates(fed).keys() == {0, 1}


def test_variates_count_steps_not_epochs():
    """Two epochs of two batches are K = 4 steps: y = 2 (1 - 1/16) = 1.875, c_0 = -1.875/(4/2) = -0.9375."""
    fed, method = federation([2], sizes=[2]), SCAFFOLD()
    m = method.init(model(0), Run(fed).population())
    w, m = play(method, fed, model(0), m, [[0]], Recipe(learning_rate=0.5, batch_size=1, epochs=2))
    assert (number(w), variates(fed)) == (1.875, {0: -0.9375})


PATH = "SCAFFOLD reads gradients off the path of plain SGD at a constant rate: no momentum, no schedule"
PULL = "SCAFFOLD would take {}'s pull for a gradient of the data: use option=1"
RATE = "SCAFFOLD divides by the learning rate: it must be positive"


@value
class Pull(Rule):
    """Draws the weights to 0."""

    def penalty(self, params, context):
        return sum((t**2).sum() for t in params.values())


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (Recipe(rules=(Proximal(),)), PULL.format("Proximal")),
        (Recipe(rules=(Pull(),)), PULL.format("Pull")),
        (Recipe(optimizer=SGD(momentum=0.9)), PATH),
        (Recipe(optimizer=Adam()), PATH),
        (Recipe(schedule=Cosine()), PATH),
        (Recipe(learning_rate=0.0), RATE),
    ],
)
def test_option_2_refuses_what_option_1_can_do(recipe, sentence):
    fed, w = federation([2]), model(0)
    m = SCAFFOLD().init(w, Run(fed).population())
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        play(SCAFFOLD(), fed, w, m, [[0]], recipe)
    play(SCAFFOLD(option=1), fed, w, m, [[0]], recipe)
    assert variates(fed) == {0: -2}
