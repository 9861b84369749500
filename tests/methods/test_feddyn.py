"""FedDyn by hand; alpha = 1 and one step at rate 1/2, which is the exact minimiser: w = (b + h_k + received)/2."""

import pytest

from byhand import ENGINES, HALF, LEAF, federation, model, number, play
from fedrelay.methods import FedDyn
from fedrelay.seam.methods import Population


def kept(fed) -> dict[int, float]:
    return {k: float(memory["Dynamic"][LEAF]) for k, memory in fed.memories.clients().items()}


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_two_superclients_over_two_rounds(pick):
    """Chains of b = 2, 4 and of b = -6; m = 2 units. Clients: h_k <- h_k - (w - received).

    Round 1 from 0: 2 -> 1 (h_0 = -1), 4 -> 2.5 (received 1: h_1 = -1.5), -6 -> -3 (h_2 = 3).
        h = 0 - (2.5 - 3)/2 = 0.25;   w = (2.5 - 3)/2 - 0.25 = -0.5.
    Round 2 from -0.5: (2 - 1 - 0.5)/2 = 0.25 (h_0 = -1.75), (4 - 1.5 + 0.25)/2 = 1.375 (h_1 = -2.625), (-6 + 3 - 0.5)/2 = -1.75
    (h_2 = 4.25).
        h = 0.25 - ((1.375 + 0.5) + (-1.75 + 0.5))/2 = -0.0625;   w = (1.375 - 1.75)/2 + 0.0625 = -0.125.
    """
    fed, method = federation([2, 4, -6], sizes=[1, 5, 1], pick=pick), FedDyn(alpha=1.0)
    w, m = model(0), method.init(model(0), Population(clients=3, units=2))
    w, m = play(method, fed, w, m, [[0, 1], [2]])
    assert (number(w), float(m["h"][LEAF]), kept(fed)) == (-0.5, 0.25, {0: -1, 1: -1.5, 2: 3})
    w, m = play(method, fed, w, m, [[0, 1], [2]])
    assert (number(w), float(m["h"][LEAF]), kept(fed)) == (-0.125, -0.0625, {0: -1.75, 1: -2.625, 2: 4.25})


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_m_counts_all_units_and_alpha_scales_both_halves(pick):
    """alpha = 1/2, one of m = 4 clients drawn, b = 6, from 2, rate 1/2: w = 2 - (2 - 6)/2 = 4 (where alpha does not pull yet).

    h_0 = -(1/2) 2 = -1;   h = -(1/2)/4 * 2 = -0.25;   w = 4 + 0.25/(1/2) = 4.5. (With m the cohort it would be 6.)
    Again from 4.5: gradient 4.5 - 6 + 1 = -0.5, w = 4.75, h_0 = -1 - 0.125; h = -0.25 - 0.03125; w = 4.75 + 0.5625 = 5.3125.
    """
    fed, method = federation([6, 0, 0, 0], pick=pick), FedDyn(alpha=0.5)
    w, m = model(2), method.init(model(2), Population(clients=4, units=4))
    w, m = play(method, fed, w, m, [[0]])
    assert (number(w), float(m["h"][LEAF]), kept(fed)) == (4.5, -0.25, {0: -1})
    w, m = play(method, fed, w, m, [[0]])
    assert (number(w), float(m["h"][LEAF]), kept(fed)) == (5.3125, -0.28125, {0: -1.125})


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_the_linear_term_and_the_anchor_have_a_gradient_within_a_visit(pick):
    """alpha = 1, two steps at rate 1/4 from 0, b = 8: w <- w - (w - 8 - h + w - received)/4 = w/2 + 2 + (h + received)/4.

    First visit: 0 -> 2 -> 3; h = -3; the server (m = 1): h = -3, w = 6. Second visit from 6: 3 + 2 + 3/4 = 5.75 -> 5.625;
    h_0 = -3 + 0.375 = -2.625, and the server's with it; w = 5.625 + 2.625 = 8.25.
    """
    fed, method = federation([8], pick=pick), FedDyn(alpha=1.0)
    recipe = HALF.bind({"learning_rate": 0.25, "steps": 2})
    w, m = model(0), method.init(model(0), Population(1, 1))
    w, m = play(method, fed, w, m, [[0]], recipe)
    assert (number(w), kept(fed)) == (6, {0: -3})
    w, m = play(method, fed, w, m, [[0]], recipe)
    assert (number(w), kept(fed)) == (8.25, {0: -2.625})


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_a_failed_client_counts_nowhere(pick):
    """b = 2 comes back with 1, another of m = 3 fails: h = -1/3, w = 1 + 1/3; the failed client keeps nothing."""
    fed, method = federation([2, float("nan"), 0], pick=pick), FedDyn(alpha=1.0)
    w, m = play(method, fed, model(0), method.init(model(0), Population(3, 3)), [[0], [1]])
    assert number(w) == pytest.approx(4 / 3, abs=1e-12)
    assert float(m["h"][LEAF]) == pytest.approx(-1 / 3, abs=1e-12)
    assert kept(fed) == {0: -1}
