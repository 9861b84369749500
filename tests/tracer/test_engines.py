"""The tracer's systems on both engines: round by round from one checkpoint, because whole runs amplify the last bit.

(Momentum with FedDyn multiplies a difference by 3e5 in seven rounds.) Double precision; norms per tensor.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedrelay.algorithms import FedAvg, Uniform
from fedrelay.engine.engine import Engine
from fedrelay.methods import SCAFFOLD, FedDyn, FedProx, Proximal
from fedrelay.seam.federation import Layer, Run
from fedrelay.seam.folds import Bank, Mean
from fedrelay.seam.plan import Chain, Visit, chain
from fedrelay.seam.recipe import SGD, Adam, AdamW, Cosine, Exponential, Recipe
from fedrelay.seam.values import leaves

from .systems import EWC, RECIPE, Evolve, FedSeq, FedSeqInter, Genetic, HFedMS, SplitLearning, TwoStage, Warmup
from .world import CLUSTERS, CUT, LANES, LOOP, digits, gap, run

EXACT = 1e-10
TEN = Uniform(count=10)
MOMENTUM = Recipe(0.05, 7, epochs=2, optimizer=SGD(momentum=0.9, decay=1e-3))
NESTEROV = Recipe(0.03, 11, steps=5, optimizer=SGD(momentum=0.8, nesterov=True))
ADAM = Recipe(0.01, 9, optimizer=Adam(decay=1e-3))
ADAMW = Recipe(0.005, 16, optimizer=AdamW(decay=0.1), schedule=Cosine(floor=0.1))
LEARNERS = {
    "FedAvg, momentum": FedAvg(TEN, MOMENTUM),
    "FedAvg, Nesterov": FedAvg(TEN, NESTEROV),
    "FedAvg, Adam": FedAvg(TEN, ADAM),
    "FedAvg x FedProx, AdamW": FedAvg(TEN, ADAMW, FedProx(mu=0.1)),
    "FedAvg x SCAFFOLD, option 1, Adam": FedAvg(TEN, ADAM, SCAFFOLD(option=1)),
    "Warmup, AdamW": Warmup(recipe=ADAMW),
    "Warmup x EWC, exponential": Warmup(recipe=replace(RECIPE, epochs=2, schedule=Exponential(0.95)), method=EWC(1.0)),
    "FedSeq x SCAFFOLD": FedSeq(method=SCAFFOLD()),
    "FedSeqInter x FedDyn, momentum": FedSeqInter(FedSeq(recipe=MOMENTUM, method=FedDyn())),
    "HFedMS, Adam": HFedMS(recipe=ADAM),
    "HFedMS x FedProx, momentum": HFedMS(recipe=MOMENTUM, method=FedProx("count", mu=0.1)),
    "2LS x FedProx, Nesterov": TwoStage(CLUSTERS, recipe=NESTEROV, method=FedProx("count", mu=0.1)),
    "2LS x SCAFFOLD": TwoStage(CLUSTERS, method=SCAFFOLD()),
    "split learning, Adam": SplitLearning(recipe=replace(ADAM, cut="classifier")),
    "Genetic, momentum": Genetic(recipe=MOMENTUM),
    "FedSeq, evolving momentum": Evolve(FedSeq(recipe=MOMENTUM), "optimizer.momentum", (0.9, 0.5, 0.1)),
    "FedAvg x FedProx, evolving mu": Evolve(FedAvg(TEN, RECIPE, FedProx()), "Proximal.mu", (1.0, 0.1, 0.01)),
}


def trained_in_lanes(fed) -> bool:
    """That lanes were asked for is not enough: a kind that cannot be vectorised goes to the loop."""
    return bool(fed.engine._lanes) and not any(fed.engine._cannot.values())


def memories(fed):
    return {(path, client): kept for path, client, _, kept in fed.state()["memory"]}


def kept_apart(a, b) -> float:
    """The largest difference between what clients keep, relative to the whole of it."""
    ours, theirs = memories(a), memories(b)
    assert ours.keys() == theirs.keys()
    pairs = [(m, n) for k in ours for m, n in zip(leaves(ours[k]), leaves(theirs[k]), strict=True)]
    loaded = [(m.load().double(), n.load().double()) for m, n in pairs]
    size = max((n.norm() for _, n in loaded), default=torch.tensor(1.0))
    return float(max(((m - n).norm() for m, n in loaded), default=0.0) / size.clamp(min=1e-30))


@pytest.mark.parametrize("name", LEARNERS)
def test_loop_equals_lanes_round_by_round(name: str) -> None:
    system = LEARNERS[name]
    slow, fast = digits(LOOP, torch.float64), digits(LANES, torch.float64)
    s = system.init(Run(slow))
    for _ in range(5):
        fast.restore(slow.state())
        f, s = run(system, fast, 1, s), run(system, slow, 1, s)
        assert gap(f.weights, s.weights) < EXACT
        assert kept_apart(fast, slow) < EXACT
        assert fast.ledger.totals == slow.ledger.totals
        assert fast.now == slow.now
    assert trained_in_lanes(fast)
    assert gap(s.weights, slow.initial()) > 1e-3


@pytest.mark.parametrize(
    "system",
    [
        SplitLearning(recipe=replace(MOMENTUM, epochs=1, cut="classifier"), method=FedProx(mu=0.1)),
        SplitLearning(recipe=replace(ADAMW, cut="classifier")),
        FedAvg(TEN, replace(RECIPE, cut="classifier"), SCAFFOLD()),
        FedAvg(TEN, replace(RECIPE, cut="classifier"), FedDyn()),
    ],
    ids=["split learning x FedProx", "split learning, AdamW", "SplitFed x SCAFFOLD", "SplitFed x FedDyn"],
)
def test_really_cut_equals_joint(system) -> None:
    """Two machines, two optimizers and two messages a step, against one machine that knows nothing of a cut."""
    a, b = digits(CUT, torch.float64), digits(LOOP, torch.float64)
    s = system.init(Run(b))
    for _ in range(3):
        a.restore(b.state())
        c, s = run(system, a, 1, s), run(system, b, 1, s)
        assert gap(c.weights, s.weights) < EXACT
        assert kept_apart(a, b) < EXACT


class Heard(Layer):
    """Keeps every plan and landing that passes."""

    def __init__(self) -> None:
        self.plans, self.landings = [], []

    def plan(self, plan, rng):
        self.plans.append(plan)
        return plan

    def landed(self, landing) -> None:
        self.landings.append(landing)


def test_what_crosses_the_cut_is_counted() -> None:
    """A row sends 32 features and gets 32 gradients back, 4 bytes each, and sends its label, 8 bytes: 264 bytes an epoch."""
    heard = Heard()
    run(SplitLearning(recipe=replace(RECIPE, cut="classifier", epochs=2)), digits(CUT), 1, layers=[heard])
    [landing] = heard.landings
    assert landing.receipts.traffic["cut"].tolist() == (landing.receipts.examples * 2 * 264).tolist()
    heard = Heard()
    run(SplitLearning(), digits(LOOP), 1, layers=[heard])
    assert not heard.landings[0].receipts.traffic["cut"].any()


KINDS = (
    Recipe(0.1, 16, optimizer=SGD(0.9)),
    Recipe(0.01, 16, optimizer=Adam(), rules=(Proximal(0.5),)),
    Recipe(0.1, 16, scope=("classifier",)),
    Recipe(0.1, 50, rows=64),
)


@pytest.mark.parametrize("shift", range(4))
def test_a_chain_changes_kind_at_a_visit_boundary(shift: int) -> None:
    """Fourteen chains of six visits, each visit of another kind than the one before."""
    ends = []
    for pick in (LOOP, LANES):
        fed = digits(pick, torch.float64)
        mixed = [
            Chain(fed.initial(), tuple(Visit(c, (KINDS[(c + i + shift) % 4],)) for i in range(3) for c in (k, k + 1)))
            for k in range(0, 28, 2)
        ]
        ends.append([w for w, _ in Run(fed).train(mixed, Bank())[Bank()]])
    assert trained_in_lanes(fed)
    assert max(gap(a, b) for a, b in zip(*ends, strict=True)) < EXACT


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 0, 1), (1, 0, 1)])
def test_a_classifier_trains_on_its_own_chain_s_extractor(order: tuple[int, ...]) -> None:
    """Forty chains train everything, then the classifier alone: no two of them have the same extractor by then."""
    kinds, ends = (Recipe(0.1, 16), Recipe(0.1, 16, scope=("classifier",))), []
    for pick in (LOOP, LANES):
        fed = digits(pick, torch.float64)
        chains = [
            Chain(fed.initial(), tuple(Visit((7 * k + i) % 30, (kinds[j],)) for i, j in enumerate(order))) for k in range(40)
        ]
        ends.append([w for w, _ in Run(fed).train(chains, Bank())[Bank()]])
    assert trained_in_lanes(fed)
    assert max(gap(a, b) for a, b in zip(*ends, strict=True)) < EXACT


@pytest.mark.parametrize("pick", [LOOP, LANES], ids=["loop", "lanes"])
@pytest.mark.parametrize("scopes", [(None, ("classifier",)), (("classifier",), None), (("extractor",), ("classifier",))])
def test_a_mean_holds_whatever_a_chain_trained(scopes, pick) -> None:
    """Two visits of different scope: what either trained is merged, and nothing else."""
    fed = digits(pick)
    chains = [
        Chain(fed.initial(), tuple(Visit(k + i, (Recipe(0.1, 16, scope=s),)) for i, s in enumerate(scopes))) for k in (2, 8)
    ]
    got = Run(fed).train(chains, Mean("count"), Bank())
    (a, _), (b, _) = got[Bank()]
    assert got[Mean("count")].keys() == fed.initial().keys()
    assert gap(got[Mean("count")], {n: (a[n] + b[n]) / 2 for n in a}) < 1e-6
    assert all(not torch.equal(a[n], t) for n, t in fed.initial().items())


def test_chains_of_one_plan_start_from_different_extractors() -> None:
    """The classifier alone trains, on three extractors at once: lanes share one extractor only where it is the same."""
    recipe, ends = Recipe(0.1, 16, scope=("classifier",)), []
    for pick in (LOOP, LANES):
        fed = digits(pick, torch.float64)
        starts = [{n: t * (1 + k / 2) for n, t in fed.initial().items()} for k in range(3)]
        chains = [chain(starts[c % 3], [c, (c + 5) % 30], recipe) for c in range(20)]
        ends.append([w for w, _ in Run(fed).train(chains, Bank())[Bank()]])
        assert all(w[n] is starts[c % 3][n] for c, w in enumerate(ends[-1]) for n in w if n.startswith("extractor"))
    assert trained_in_lanes(fed)
    assert max(gap(a, b) for a, b in zip(*ends, strict=True)) < EXACT


def test_alternatives_of_one_visit_see_the_same_batches() -> None:
    """Two equal recipes to choose from give what one gives alone; the visit's place draws the batches, not the recipe."""
    ends = []
    for recipes in ((RECIPE,), (RECIPE, replace(RECIPE, learning_rate=0.0))):
        fed = digits(LANES, torch.float64)
        ends.append(Run(fed).train([Chain(fed.initial(), (Visit(c, recipes),)) for c in range(8)], Bank())[Bank()])
    assert all(torch.equal(a[n], b[n]) for (a, _), (b, _) in zip(*ends, strict=True) for n in a)


def test_EWC_s_Fisher_travels_along_the_chain() -> None:
    """Weight 0 is no rule at all, weight 1 is something else, and both engines carry it."""
    recipe = replace(RECIPE, epochs=2)

    def warm(pick, **options):
        return run(Warmup(recipe=recipe, **options), digits(pick, torch.float64), 3).weights

    nothing = warm(LOOP)
    assert gap(warm(LOOP, method=EWC(weight=0.0)), nothing) < 1e-12
    pulled = warm(LOOP, method=EWC(weight=1.0))
    assert gap(pulled, nothing) > 1e-3
    assert gap(warm(LANES, method=EWC(weight=1.0)), pulled) < EXACT


def test_EWC_does_nothing_at_the_first_visit_of_a_chain() -> None:
    """There the Fisher is zero; at the second it is the first client's."""
    for visits in (1, 2):
        ends = []
        for weight in (0.0, 1.0):
            fed = digits(LANES, torch.float64)
            recipe, _ = EWC(weight=weight).visit(None, replace(RECIPE, epochs=2))
            ends.append(Run(fed).train([chain(fed.initial(), range(visits), recipe)], Mean())[Mean()])
        assert (gap(*ends) < 1e-12) == (visits == 1)


def test_twice_round_the_ring() -> None:
    """A chain visits (1, 2, 3, 1, 2, 3): at the second visit a client remembers the first, before anything has landed."""
    ends, kept = [], []
    for pick in (LOOP, LANES):
        fed = digits(pick, torch.float64)
        w = fed.initial()
        recipe, extra = SCAFFOLD().visit({"c": {n: t * 0.01 for n, t in w.items()}}, RECIPE)
        chains = [chain(w, ring * 2, recipe, extra) for ring in ([1, 2, 3], [4, 5])]
        ends.append(Run(fed).train(chains, Bank())[Bank()])
        kept.append(fed.memories.clients())
    assert max(gap(a[0], b[0]) for a, b in zip(*ends, strict=True)) < EXACT
    assert max(gap(a["ControlVariate"], kept[1][c]["ControlVariate"]) for c, a in kept[0].items()) < EXACT
    once = digits(LANES, torch.float64)
    Run(once).train([chain(w, [1, 2, 3], recipe, extra)], Bank())
    after_one = once.memories.clients()
    Run(once).train([chain(w, [1, 2, 3], recipe, extra)], Bank())
    assert gap(after_one[1]["ControlVariate"], kept[1][1]["ControlVariate"]) > 1e-3
    assert once.memories.version((), 1) == 2
    assert fed.memories.version((), 1) == 1  # one flight, one version


def test_other_widths_and_strides_differ_by_rounding_only() -> None:
    """Bits belong to a width; between widths a norm of 1e-5 over eight rounds in single precision."""
    system = FedAvg(TEN, MOMENTUM)
    base = run(system, digits(), 8).weights
    for engine in (Engine(replace(LANES, width=7), 3), Engine(replace(LANES, width=2), 1), Engine(LANES, 7)):
        assert gap(run(system, digits(engine), 8).weights, base) < 1e-5
