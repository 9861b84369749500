"""Rounds of every system on quadratic clients, with the numbers worked out by hand.

Client k has the loss (w - t_k)^2 / 2, so one step at rate 1/2 maps w to w/2 + t_k/2. With FedDyn's alpha = 1 the same step
reaches the exact minimum of (w - t)^2 / 2 - h w + (w - r)^2 / 2, which is (t + h + r) / 2, where r is the model received.
"""

from __future__ import annotations

import pytest
import torch

from fedrelay.engine.engine import Engine
from fedrelay.engine.examples import Examples
from fedrelay.engine.visits import Site
from fedrelay.methods import FedDyn, Plain
from fedrelay.models import Model
from fedrelay.models.model import squared_error
from fedrelay.seam.federation import Run
from fedrelay.seam.folds import Bank, Mean
from fedrelay.seam.plan import Chain, Visit
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.rules import End, Rule
from fedrelay.seam.values import value
from fedrelay.simulation.simulation import Simulation
from fedrelay.testing.hostile import HostileFederation

from .systems import FedSeq, FedSeqInter, Grouped, Slots, TwoStage, Warmup
from .world import LANES, LOOP, Point, quadratic

HALF = Recipe(learning_rate=0.5, batch_size=64)
KINDS = [Simulation, HostileFederation]


def exactly(numbers):
    return pytest.approx(numbers, rel=0, abs=1e-12)


def follow(system, fed, rounds, see=lambda s: float(s.weights["point.w"])):
    """What ``see`` sees of the state after each round."""
    view, seen = Run(fed), []
    s = system.init(view)
    for _ in range(rounds):
        s = system.round(view, s)
        seen.append(see(s))
    return seen


@value
class InOrder(Warmup):
    """A warm-up whose cycles are written down."""

    cycles: tuple[tuple[int, ...], ...] = ()

    def pick(self, fed):
        return self.cycles[fed.base.place(fed.path, "cycle").number]


@value
class SeqInOrder(FedSeq):
    """FedSeq without a pre-training, its groups and its draws written down."""

    groups: tuple[tuple[int, ...], ...] = ()
    draws: tuple[tuple[int, ...], ...] = ()

    def init(self, fed, weights=None):
        w = fed.initial()
        return Grouped(w, self.method.init(w, fed.population(units=len(self.groups))), self.groups)

    def drawn(self, fed, s):
        return [self.groups[g] for g in self.draws[fed.base.place(fed.path, "draw").number]]


@pytest.mark.parametrize("kind", KINDS)
def test_WFSL_warm_up(kind) -> None:
    """Targets 2, 4, 8; a = 1/7; a cycle's first visit is not regulated. ``last`` is handed on, ``warm`` is the cycle's mean.

    Cycle 0, 1, 2 from 0:
        0 -> 0/2 + 1 = 1
        1 -> 1/2 + 2 = 5/2,                regulated 6/7 5/2 + 1/7 1      = 16/7
        2 -> 8/7 + 4 = 36/7,               regulated (6 36 + 16) / 49     = 232/49
        warm = (49 + 112 + 232) / 147 = 131/49
    Cycle 2, 0, 1 from 232/49:
        2 -> 116/49 + 4 = 312/49
        0 -> 156/49 + 1 = 205/49,          regulated (6 205 + 312) / 343  = 1542/343
        1 -> 771/343 + 2 = 1457/343,       regulated (6 1457 + 1542) / 2401 = 10284/2401
        warm = (312 49 + 1542 7 + 10284) / 7203 = 12122/2401
    """
    system = InOrder(recipe=HALF, cycles=((0, 1, 2), (2, 0, 1)))
    seen = follow(system, quadratic([2, 4, 8], kind=kind), 2, lambda s: (float(s.last["point.w"]), float(s.weights["point.w"])))
    assert [last for last, _ in seen] == exactly([232 / 49, 10284 / 2401])
    assert [warm for _, warm in seen] == exactly([131 / 49, 12122 / 2401])


@pytest.mark.parametrize("kind", KINDS)
def test_WFSL_after_a_failed_first_visit(kind) -> None:
    """Targets NaN, 2, 4. Client 0 fails, so client 1 is the first survivor and is not regulated: 0/2 + 1 = 1. Client 2 then gives
    1/2 + 2 = 5/2, regulated 15/7 + 1/7 = 16/7, and the warm model is the mean of the two that handed over."""
    system = InOrder(recipe=HALF, cycles=((0, 1, 2),))
    fed = quadratic([float("nan"), 2, 4], kind=kind)
    [(last, warm)] = follow(system, fed, 1, lambda s: (float(s.last["point.w"]), float(s.weights["point.w"])))
    assert (last, warm) == exactly((16 / 7, (1 + 16 / 7) / 2))


@pytest.mark.parametrize("kind", KINDS)
def test_FedSeqInter(kind) -> None:
    """Four superclients of one client: targets 2, 4, 6, 8, examples 10, 20, 30, 40; three slots; all merge every fourth round.

    round  drawn    slots start at     end at                  examples of the slots   mean by what was seen
    1      0 1 2    0, 0, 0            1, 2, 3                 10, 20, 30              140/60 = 7/3  (this round's)
    2      3 0 1    1, 2, 3            9/2, 2, 7/2             40, 10, 20              270/70 = 27/7 (this round's)
    3      1 2 3    9/2, 2, 7/2        17/4, 4, 23/4           20, 30, 40              435/90 = 29/6 (this round's)
    4      0 1 2    17/4, 4, 23/4      25/8, 4, 47/8           80, 80, 120 (all four)  1275/280 = 255/56, the merge
    """
    seq = SeqInOrder(recipe=HALF, groups=((0,), (1,), (2,), (3,)), draws=((0, 1, 2), (3, 0, 1), (1, 2, 3), (0, 1, 2)))
    fed = quadratic([2, 4, 6, 8], [10, 20, 30, 40], kind=kind)
    assert follow(FedSeqInter(seq), fed, 4) == exactly([7 / 3, 27 / 7, 29 / 6, 255 / 56])


def test_FedSeqInter_goes_on_from_the_merge() -> None:
    """After the merge of :func:`test_FedSeqInter` every slot starts at 255/56 and counts examples from nothing:
    round 5 draws 3 alone in three slots' stead, so the mean is 255/112 + 4."""
    seq = SeqInOrder(recipe=HALF, groups=((0,), (1,), (2,), (3,)), draws=((0, 1, 2), (3, 0, 1), (1, 2, 3), (0, 1, 2), (3,)))
    got = follow(FedSeqInter(seq), quadratic([2, 4, 6, 8], [10, 20, 30, 40]), 5, lambda s: (float(s.weights["point.w"]), s.seen))
    assert got[3][1] == ()
    assert got[4][0] == exactly(255 / 112 + 4)
    assert got[4][1] == (40,)


DYNAMIC = {"recipe": HALF, "method": FedDyn(alpha=1.0), "groups": ((0, 1), (2,))}


@pytest.mark.parametrize("kind", KINDS)
def test_FedSeq_x_FedDyn(kind) -> None:
    """Targets 2, 4, -6; superclients (0, 1) and (2); m = 2 superclients; all h start at 0.

    Round 1 from 0:     0 -> 1,    h_0 = -1;    1 -> (4 + 1)/2 = 5/2,   h_1 = -3/2;    2 -> -3,   h_2 = 3
        mean -1/4,  h = -(5/2 - 3)/2 = 1/4,  w = -1/4 - 1/4 = -1/2
    Round 2 from -1/2:  0 -> (2 - 1 - 1/2)/2 = 1/4;  1 -> (4 - 3/2 + 1/4)/2 = 11/8;  2 -> (-6 + 3 - 1/2)/2 = -7/4
        mean -3/16,  h = 1/4 - (15/8 - 5/4)/2 = -1/16,  w = -3/16 + 1/16 = -1/8
    """
    system = SeqInOrder(**DYNAMIC, draws=((0, 1), (0, 1)))
    assert follow(system, quadratic([2, 4, -6], kind=kind), 2) == exactly([-0.5, -0.125])


@pytest.mark.parametrize("kind", KINDS)
def test_FedSeqInter_x_FedDyn(kind) -> None:
    """The same clients, all merge every second round; round 1 is FedSeq's, and the slots keep 5/2 and -3.

    Round 2: slot 5/2 goes to 2:  (-6 + 3 + 5/2)/2 = -1/4,   h_2 = 3 + 11/4 = 23/4
             slot -3 goes to 0, 1: 0 -> (2 - 1 - 3)/2 = -1,      h_0 = -1 - 2 = -3
                                   1 -> (4 - 3/2 - 1)/2 = 3/4,   h_1 = -3/2 - 7/4 = -13/4
        mean 1/4,  h = 1/4 - (-11/4 + 15/4)/2 = -1/4,  w = 1/4 + 1/4 = 1/2
    Round 3 from 1/2: 0 -> (2 - 3 + 1/2)/2 = -1/4;  1 -> (4 - 13/4 - 1/4)/2 = 1/4;  2 -> (-6 + 23/4 + 1/2)/2 = 1/8
        mean 3/16,  h = -1/4 + (1/4 + 3/8)/2 = 1/16,  w = 3/16 - 1/16 = 1/8
    """
    system = FedSeqInter(SeqInOrder(**DYNAMIC, draws=((0, 1), (1, 0), (0, 1))))
    assert follow(system, quadratic([2, 4, -6], kind=kind), 3) == exactly([-0.5, 0.5, 0.125])


TWO = TwoStage(clusters=(((0,), (1,)),), share=1.0, recipe=HALF)


@pytest.mark.parametrize("kind", KINDS)
def test_2LS_with_a_straggler(kind) -> None:
    """Two in-clusters of one client, targets 2 and 20, which need 1 / 0.5 = 2 s and 3 / 0.6 = 5 s.

    round 1   both leave at 0 from 0;  0 is back at 2:  w = 1
    round 2   0 leaves at 2, is back at 4:  w = 1/2 + 1 = 3/2
    round 3   0 leaves at 4, is back at 6:  7/4;  1 came back at 5 with 10, two rounds stale:  w = 2/3 7/4 + 1/3 10 = 9/2
    round 4   both leave at 6 from 9/2;  0 is back at 8:  w = 9/4 + 1 = 13/4
    """
    fed = quadratic([2, 20], [1, 3], [0.5, 0.6], kind)
    assert follow(TWO, fed, 4) == exactly([1, 1.5, 4.5, 3.25])
    assert fed.now == exactly(8)


@pytest.mark.parametrize("kind", KINDS)
def test_2LS_two_that_finish_together(kind) -> None:
    """Both need 2 s: the ends 1 and 10 are merged as one cohort, 11/2; then 11/4 + 1 and 11/4 + 10 give 33/4."""
    assert follow(TWO, quadratic([2, 20], [1, 3], [0.5, 1.5], kind), 2) == exactly([5.5, 8.25])


@pytest.mark.parametrize("pick", [LANES, LOOP])
def test_alternatives_keep_the_best_by_their_own_loss(pick) -> None:
    """At rate 1 a step lands on the client's target, so rate 1 wins everywhere: the mean of 2, 20 and -6 is 16/3."""
    fed = quadratic([2, 20, -6], pick=pick)
    tries = tuple(Recipe(learning_rate=rate, batch_size=64) for rate in (0.1, 0.5, 1.0, 0.3))
    got = Run(fed).train((Chain(fed.initial(), (Visit(c, tries),)) for c in range(3)), Mean())
    assert [r.numbers["learning_rate"] for r in got.receipts] == [1.0] * 3
    assert [r.loss for r in got.receipts] == exactly([0.0] * 3)
    assert float(got[Mean()]["point.w"]) == exactly(16 / 3)


@pytest.mark.parametrize("pick", [LANES, LOOP])
def test_alternatives_are_judged_on_what_was_held_out(pick) -> None:
    """Both clients train towards 2 and reach 0.2, 1, 2 at rates 0.1, 0.5, 1; client 0 is judged by (w - 0.9)^2 / 2, client 1 by
    (w - 0.3)^2 / 2: rate 0.5 wins at 0.1^2 / 2 and rate 0.1 at 0.1^2 / 2. The next client of the chain starts from the winner."""
    xs = [torch.zeros(1, 1, dtype=torch.float64)] * 3
    ys = [torch.full((1, 1), t, dtype=torch.float64) for t in (2.0, 2.0, 0.0)]
    held = [(x, torch.full((1, 1), t, dtype=torch.float64)) for x, t in zip(xs, (0.9, 0.3, 0.0), strict=True)]
    fed = Simulation(Site(Model({"point": Point()}, squared_error), Examples.of_lists(xs, ys, held)), Engine(pick))
    tries = tuple(Recipe(learning_rate=rate, batch_size=8) for rate in (0.1, 0.5, 1.0))
    chains = [Chain(fed.initial(), (Visit(0, tries), Visit(2, (HALF,)))), Chain(fed.initial(), (Visit(1, tries),))]
    got = Run(fed).train(chains, Mean("count"), Mean("count", at="visits"))
    assert [r.numbers["learning_rate"] for r in got.receipts] == [0.5, 0.5, 0.1]
    assert [r.loss for r in got.receipts if r.client != 2] == exactly([0.005, 0.005])
    assert float(got[Mean("count")]["point.w"]) == exactly((0.5 + 0.2) / 2)
    assert float(got[Mean("count", at="visits")]["point.w"]) == exactly((1 + 0.5 + 0.2) / 3)


@pytest.mark.parametrize("pick", [LANES, LOOP])
def test_a_client_that_holds_nothing_out_is_judged_on_what_it_trains_on(pick) -> None:
    """Others hold something out, this one has too little: towards 2, rate 1 is best and its loss is 0."""
    xs, ys = [torch.zeros(1, 1, dtype=torch.float64)] * 2, [torch.full((1, 1), 2.0, dtype=torch.float64)] * 2
    data = Examples.of_lists(xs, ys, [(xs[0][:0], ys[0][:0]), (xs[1], ys[1])])
    fed = Simulation(Site(Model({"point": Point()}, squared_error), data), Engine(pick))
    tries = tuple(Recipe(learning_rate=rate, batch_size=8) for rate in (0.1, 1.0, 0.5))
    got = Run(fed).train([Chain(fed.initial(), (Visit(0, tries),))], Mean())
    assert got.receipts.ok.all()
    assert [(r.numbers["learning_rate"], r.loss) for r in got.receipts] == [(1.0, 0.0)]


@value
class Told(Rule):
    """Hands on what it is told of its visit, digit by digit."""

    def begin(self, see):
        return {"seen": 1000 * see.examples + see.rate + 0 * see.received["point.w"]}

    def end(self, params, see, context):
        told = context["seen"] + 1e6 * see.handed + 100 * see.steps + 10 * see.examples
        return End({"point.w": told + 0 * params["point.w"]})


@pytest.mark.parametrize("pick", [LANES, LOOP])
def test_what_a_rule_is_told_of_its_visit(pick) -> None:
    """Examples 3 and 5; steps 2 ceil(3/2) = 4 and 3 ceil(5/2) = 9; rates 1/4 and 1/2; hand-overs before 0 and, one failed, 1."""
    fed = quadratic([2, float("nan"), 4], [3, 4, 5], pick=pick)
    recipes = [Recipe(rate, 2, epochs=epochs, rows=8, rules=(Told(),)) for rate, epochs in ((0.25, 2), (0.25, 2), (0.5, 3))]
    visits = tuple(Visit(c, (r,)) for c, r in enumerate(recipes))
    got = Run(fed).train([Chain(fed.initial(), visits[:n]) for n in (1, 3)], Bank())
    ends = [float(w["point.w"]) for w, _ in got[Bank()]]
    assert ends == exactly([3000 + 0.25 + 400 + 30, 5000 + 0.5 + 1e6 + 900 + 50])
    assert [n for _, n in got[Bank()]] == [3, 8]


def test_a_state_says_what_it_carries() -> None:
    """The slots of FedSeqInter between merges: one model and one count of examples per slot."""
    seq = SeqInOrder(recipe=HALF, method=Plain("count"), groups=((0,), (1,)), draws=((0, 1), (1, 0)))
    [s] = follow(FedSeqInter(seq), quadratic([2, 4], [5, 7]), 1, lambda s: s)
    assert isinstance(s, Slots)
    assert [float(w["point.w"]) for w in s.bank] == exactly([1, 2])
    assert s.seen == (5, 7)
