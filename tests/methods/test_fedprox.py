"""FedProx by hand: mu/2 |w - received|^2, where received is what this client was handed."""

import pytest

from byhand import ENGINES, federation, model, number, play
from fedrelay.methods import FedProx
from fedrelay.seam.recipe import Recipe

TWICE = Recipe(learning_rate=0.5, batch_size=8, steps=2)


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_the_anchor_is_what_the_client_received(pick):
    """Losses (w-4)^2/2 then (w-8)^2/2 in one chain from 0; mu = 1, two steps at rate 1/2: w <- w - (w - b + (w - received))/2.

    First client, received 0:   0 -> 0 + 4/2 = 2,        2 - (-2 + 2)/2 = 2.
    Second client, received 2:  2 -> 2 + 6/2 = 5,        5 - (-3 + 3)/2 = 5.
    Anchored to the server's 0 the second would end at 4; without any anchor the chain would end at 6.75; without the
    square's factor 2 (a gradient of mu/2 (w - received)) at 5.84375.
    """
    fed, method, w = federation([4, 8], pick=pick), FedProx(mu=1.0), model(0)
    assert number(play(method, fed, w, None, [[0, 1]], TWICE)[0]) == pytest.approx(5, abs=1e-12)
    assert number(play(FedProx(mu=0.0), fed, w, None, [[0, 1]], TWICE)[0]) == pytest.approx(6.75, abs=1e-12)


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_side_by_side_and_merged_by_examples(pick):
    """mu = 1/2 from 1, two steps at rate 1/2: w <- w - (w - b + (w - 1)/2)/2 = w/4 + b/2 + 1/4.

    b = 3: 1 -> 2 -> 2.25.   b = -5: 1 -> -2 -> -2.75.   Of 1 and 3 examples: (2.25 - 8.25)/4 = -1.5.
    """
    fed = federation([3, -5], sizes=[1, 3], pick=pick)
    merged, _ = play(FedProx(mu=0.5), fed, model(1), None, [[0], [1]], TWICE)
    assert number(merged) == pytest.approx(-1.5, abs=1e-12)
