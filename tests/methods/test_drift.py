"""What control variates and dynamic regularisation are for: clients whose losses disagree in place and in curvature.

Client 0 has the loss (w - 50)^2/2, curvature 1; client 1 has (2 w)^2/2, curvature 4. The sum is least where
(w - 50) + 4 w = 0, at w = 10. Two steps at rate 1/4 take client 0 to 50 + (3/4)^2 (w - 50) = (9 w + 350)/16; a single one takes
client 1 to its minimum 0, where it stays. So FedAvg rests where w = (9 w + 350)/32, at 350/23 = 15.2, however long it runs.
"""

import pytest

from byhand import ENGINES, federation, number
from fedrelay.algorithms import Everyone, FedAvg, Uniform
from fedrelay.methods import SCAFFOLD, FedDyn, FedProx, Plain
from fedrelay.seam.federation import Run
from fedrelay.seam.recipe import Recipe

OPTIMUM, FEDAVG = 10, 350 / 23
EVERYONE = Everyone()


def trained(method, rounds, b=(50, 0), a=(1, 2), steps=2, sampling=EVERYONE, pick=ENGINES[0]):
    fed = Run(federation(b, a, pick=pick))
    algorithm = FedAvg(sampling, Recipe(learning_rate=0.25, batch_size=8, steps=steps), method)
    s = algorithm.init(fed)
    for _ in range(rounds):
        s = algorithm.round(fed, s)
    return number(s.weights)


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
@pytest.mark.parametrize(
    ("method", "rounds", "rest"),
    [
        (Plain(), 30, FEDAVG),
        (SCAFFOLD(), 30, OPTIMUM),
        (SCAFFOLD(option=1), 30, OPTIMUM),
        (FedDyn(alpha=1.0), 80, OPTIMUM),
    ],
    ids=repr,
)
def test_FedDyn_and_SCAFFOLD_reach_the_optimum_that_FedAvg_misses(method, rounds, rest, pick):
    assert trained(method, rounds, pick=pick) == pytest.approx(rest, rel=1e-8)


def test_FedProx_alone_does_not_remove_the_drift():
    """mu = 1, two steps at rate 1/4: client 0 has the curvature 2 and in two steps goes to w + (3/4) (50 - w)/2 = (5 w + 150)/8;
    client 1, of curvature 5 and minimum w/5, to w/5 + (1/16) (4/5) w = w/4. Rest: 16 w = 7 w + 150, w = 50/3."""
    assert trained(FedProx(mu=1.0), 60) == pytest.approx(50 / 3, rel=1e-8)


def test_with_a_single_step_there_is_no_drift():
    """Then FedAvg is gradient descent on the mean loss."""
    assert trained(Plain(), 40, steps=1) == pytest.approx(OPTIMUM, rel=1e-8)


@pytest.mark.parametrize("method", [SCAFFOLD(), SCAFFOLD(option=1), FedDyn(alpha=1.0)], ids=repr)
def test_a_cohort_of_two_among_three_reaches_the_optimum_too(method):
    """A third client (w + 20)^2/2: (w - 50) + 4 w + (w + 20) = 0 at w = 5."""
    made = trained(method, 100, (50, 0, -20), (1, 2, 1), sampling=Uniform(count=2))
    assert made == pytest.approx(5, rel=1e-6)
