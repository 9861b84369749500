"""Every client for itself, by hand: half-way steps towards b = 2 and b = -6."""

from math import nan

import pytest

from byhand import ENGINES, HALF, federation, model, number
from fedrelay.algorithms import LocalOnly
from fedrelay.seam.federation import Run


def numbers(s) -> tuple[float, dict[int, float]]:
    return number(s.weights), {k: number(w) for k, w in s.models.items()}


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_every_client_goes_on_with_its_own_model(pick):
    """From 1, sizes 1, 0, 4: client 0: 1.5, 1.75; client 2: -2.5, -4.25; client 1 has nothing to train on.
    Plain means: -0.5, -1.25."""
    fed, algorithm = Run(federation([2, 0, -6], sizes=[1, 0, 4], pick=pick)), LocalOnly(HALF)
    s = algorithm.init(fed, model(1))
    assert numbers(s) == (1, {0: 1, 2: 1})
    s = algorithm.round(fed, s)
    assert numbers(s) == (-0.5, {0: 1.5, 2: -2.5})
    s = algorithm.round(fed, s)
    assert numbers(s) == (-1.25, {0: 1.75, 2: -4.25})


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_a_client_that_fails_keeps_the_model_it_had(pick):
    """The mean is of those that came back."""
    fed, algorithm = Run(federation([2, nan, -6], pick=pick)), LocalOnly(HALF)
    s = algorithm.round(fed, algorithm.init(fed, model(1)))
    assert numbers(s) == (-0.5, {0: 1.5, 1: 1, 2: -2.5})
    assert numbers(algorithm.round(fed, s)) == (-1.25, {0: 1.75, 1: 1, 2: -4.25})


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_where_everybody_fails_nothing_moves(pick):
    fed, algorithm = Run(federation([nan, nan], pick=pick)), LocalOnly(HALF)
    assert numbers(algorithm.round(fed, algorithm.init(fed, model(1)))) == (1, {0: 1, 1: 1})


def test_nobody_sees_anothers_model():
    """The model that is handed on stays with its client: no chain starts from the mean."""
    fed, algorithm = Run(federation([2, -6])), LocalOnly(HALF)
    s = algorithm.init(fed)
    for _ in range(40):
        s = algorithm.round(fed, s)
    assert numbers(s) == (pytest.approx(-2), {0: pytest.approx(2), 1: pytest.approx(-6)})
