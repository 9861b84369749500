"""FedAvg by hand: half-way steps, w becomes w/2 + b/2, on clients of 1, 3 and 4 examples with b = 2, -6, 10."""

from math import nan

import pytest

from byhand import ENGINES, HALF, LEAF, Recorder, These, federation, model, number
from fedrelay.algorithms import Everyone, FedAvg, Uniform
from fedrelay.methods import SCAFFOLD, FedDyn, Plain
from fedrelay.seam.federation import Run

B, SIZES = [2, -6, 10], [1, 3, 4]
every_engine = pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)


def rounds(algorithm, fed, n, start=0.0) -> list[float]:
    s, path = algorithm.init(fed, model(start)), []
    for _ in range(n):
        s = algorithm.round(fed, s)
        path.append(number(s.weights))
    return path


@every_engine
@pytest.mark.parametrize(("by", "path"), [("examples", [1.5, 2.25]), ("count", [1.0, 1.5])])
def test_two_rounds_with_everybody(by, path, pick):
    """From 0: 1, -3, 5; by examples (1 - 9 + 20)/8 = 1.5, by count 1.
    From 1.5: 1.75, -2.25, 5.75; (1.75 - 6.75 + 23)/8 = 2.25.   From 1: 1.5, -2.5, 5.5; 4.5/3 = 1.5."""
    fed = Run(federation(B, sizes=SIZES, pick=pick))
    assert rounds(FedAvg(Everyone(), HALF, Plain(by)), fed, 2) == pytest.approx(path, abs=1e-12)


@every_engine
def test_epochs_and_batches_do_not_multiply_a_clients_weight(pick):
    """One example at a time: 1, 3 and 4 steps: 2 (1 - 1/2) = 1, -6 (1 - 1/8) = -5.25, 10 (1 - 1/16) = 9.375;
    (1 - 15.75 + 37.5)/8 = 2.84375."""
    fed = Run(federation(B, sizes=SIZES, pick=pick))
    assert rounds(FedAvg(Everyone(), HALF.bind({"batch_size": 1}), Plain()), fed, 1) == pytest.approx([2.84375], abs=1e-12)


@every_engine
def test_a_failed_client_counts_nowhere(pick):
    """Without client 1: (1 + 20)/5 = 4.2."""
    fed = Run(federation([2, nan, 10], sizes=SIZES, pick=pick))
    assert rounds(FedAvg(Everyone(), HALF), fed, 1) == pytest.approx([4.2], abs=1e-12)


def test_only_the_cohort_trains_alone_and_from_the_servers_model():
    """Clients 2 and 0 from 4: 7 and 3, by examples (28 + 3)/5 = 6.2; one chain of one visit each, one step a visit."""
    recorder = Recorder()
    fed = Run(federation(B, sizes=SIZES), layers=(recorder,))
    assert rounds(FedAvg(These((2, 0)), HALF), fed, 1, start=4) == pytest.approx([6.2], abs=1e-12)
    assert recorder.chains == [[[2], [0]]]
    assert fed.base.ledger.totals["visits"] == fed.base.ledger.totals["steps"] == 2
    assert fed.base.ledger.who("weights") == [0, 2]


def test_it_starts_from_the_federations_model_or_from_the_one_given():
    fed = Run(federation(B))
    assert number(FedAvg().init(fed).weights) == 0
    given = model(3)
    assert FedAvg().init(fed, given).weights is given
    assert float(given[LEAF]) == 3


def test_the_method_is_told_who_can_train():
    """A client without examples is nobody: SCAFFOLD's N is 2, and so is FedDyn's m."""
    fed = Run(federation(B, sizes=[1, 0, 4]))
    assert FedAvg(method=SCAFFOLD()).init(fed).method["N"] == 2
    assert FedAvg(method=FedDyn()).init(fed).method["m"] == 2


def test_cohorts_change_from_round_to_round_and_with_the_seed():
    def cohorts(seed):
        recorder, base = Recorder(), federation([0] * 30)
        base.seed = seed
        rounds(FedAvg(Uniform(count=5), HALF), Run(base, layers=(recorder,)), 3)
        return [tuple(k for c in plan for k in c) for plan in recorder.chains]

    assert len({*cohorts(0), *cohorts(1)}) == 6
    assert cohorts(0) == cohorts(0)
