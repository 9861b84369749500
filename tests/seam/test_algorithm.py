"""Algorithms: by default one checks what it is made of."""

import re

import pytest

from byhand import federation
from fedrelay.algorithms import FedAvg, LocalOnly, Then
from fedrelay.methods import IDA, FedDyn, FedProx
from fedrelay.seam.federation import Run

BAD = FedAvg(method=FedProx(mu=-1.0))


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (BAD, "mu = -1.0 is not at least 0"),
        (Then(BAD, 1, FedAvg()), "mu = -1.0 is not at least 0"),
        (Then(FedAvg(), 1, BAD), "mu = -1.0 is not at least 0"),
        (Then(FedAvg(), 1, Then(FedAvg(), 1, FedAvg(method=IDA(FedDyn())))), "FedDyn has a server half of its own"),
    ],
)
def test_a_part_that_makes_no_sense_is_refused_wherever_it_is(algorithm, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        algorithm.check(Run(federation([0.0])))


@pytest.mark.parametrize("algorithm", [FedAvg(), LocalOnly(), Then(FedAvg(method=FedDyn()), 1, LocalOnly())])
def test_what_makes_sense_passes(algorithm):
    assert algorithm.check(Run(federation([0.0]))) is None
