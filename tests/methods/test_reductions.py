"""Where a method's number is switched off it is another method: whole runs on digits, compared by norm in float64."""

import pytest
import torch

from fedrelay.algorithms import FedAvg, Uniform
from fedrelay.methods import IDA, SCAFFOLD, FedAdagrad, FedAvgM, FedDyn, FedProx, FedYogi, Plain
from fedrelay.seam.recipe import Recipe
from tracer.world import digits, gap, run

RECIPE = Recipe(learning_rate=0.1, batch_size=20, epochs=2)
FAR = 1e5
"""With tau this large, sqrt(v) + tau is 2 tau whatever d was, and eta = 2 tau makes a step of d."""
LATE = {"beta1": 0.0, "tau": FAR, "eta": 2 * FAR}


def weights(method, rounds=2, count=5):
    return run(FedAvg(Uniform(count=count), RECIPE, method), digits(dtype=torch.float64), rounds).weights


@pytest.mark.parametrize(
    ("method", "off", "plain", "rounds", "count"),
    [
        (FedProx(mu=1.0), FedProx(mu=0.0), Plain(), 2, 5),
        (FedProx(mu=1.0, by="count"), FedProx(mu=0.0, by="count"), Plain("count"), 2, 5),
        (FedAvgM(), FedAvgM(beta=0.0), Plain(), 2, 5),
        (FedAvgM(eta=0.5, beta=0.0), FedAvgM(eta=1.0, beta=0.0), Plain(), 2, 5),
        (FedAvgM(inner=FedProx(mu=1.0)), FedAvgM(inner=FedProx(mu=1.0), beta=0.0), FedProx(mu=1.0), 2, 5),
        (FedAdagrad(), FedAdagrad(**LATE), Plain(), 2, 5),
        (FedYogi(), FedYogi(**LATE), Plain(), 2, 5),
        (SCAFFOLD(), SCAFFOLD(), Plain("count"), 1, 5),  # before the first merge all variates are zero
        (SCAFFOLD(option=1), SCAFFOLD(option=1), Plain("count"), 1, 5),
        (IDA(), IDA(), Plain("count"), 2, 2),  # two clients are equally far from their mean
        (IDA(FedProx(mu=1.0)), IDA(FedProx(mu=0.0)), IDA(), 2, 5),
    ],
    ids=repr,
)
def test_switched_off_it_is_another_method(method, off, plain, rounds, count):
    assert gap(weights(off, rounds, count), weights(plain, rounds, count)) < 1e-10
    assert gap(weights(method), weights(plain)) > 1e-4  # switched on it is not


def test_the_first_round_of_FedDyn_is_FedProx_carried_twice_as_far():
    """With zero h_k a client of FedDyn minimises what a client of FedProx does with mu = alpha; with everybody there
    h = -alpha (mean - w), so the server goes to mean - h/alpha = 2 mean - w."""
    w = digits(dtype=torch.float64).initial()
    mean = weights(FedProx(mu=0.5, by="count"), 1, 30)
    assert gap(weights(FedDyn(alpha=0.5), 1, 30), {n: 2 * t - w[n] for n, t in mean.items()}) < 1e-10
