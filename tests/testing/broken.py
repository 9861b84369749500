"""Algorithms, methods, rules and federations with one thing wrong each."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import torch

from fedrelay.methods import Plain
from fedrelay.seam.algorithm import Algorithm, State
from fedrelay.seam.folds import Bank, Mean
from fedrelay.seam.plan import chain
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.rules import End, Rule
from fedrelay.seam.values import minus, plus, value, zeros

RECIPE = Recipe(batch_size=8)


# --- algorithms that break a promise


@value
class Broken(Algorithm[State]):
    """FedAvg with something wrong."""

    def init(self, fed, weights=None):
        return State(weights or fed.initial(), None)

    def cohort(self, fed):
        return fed.rng("cohort").choice(fed.clients, min(4, len(fed.clients)), replace=False)

    def train(self, fed, w):
        return fed.train((chain(w, [k], RECIPE) for k in self.cohort(fed)), Mean(), Bank())

    def round(self, fed, s):
        return State({**s.weights, **self.train(fed, s.weights)[Mean()]}, s.method)


@value
class DrawsFromNumpy(Broken):
    def cohort(self, fed):
        return np.random.choice(fed.clients, min(4, len(fed.clients)), replace=False)


@value
class SeedsNumpy(Broken):
    def cohort(self, fed):
        np.random.seed(0)
        return np.random.choice(fed.clients, min(4, len(fed.clients)), replace=False)


@value
class DrawsFromPython(Broken):
    def cohort(self, fed):
        return random.sample(fed.clients.tolist(), min(4, len(fed.clients)))


@value
class DrawsFromTorch(Broken):
    def round(self, fed, s):
        made = super().round(fed, s)
        return State({n: t + torch.randn_like(t) / 100 for n, t in made.weights.items()}, None)


@value
class RemembersOnItself(Broken):
    """Momentum that is kept on the object."""

    def init(self, fed, weights=None):
        s = super().init(fed, weights)
        object.__setattr__(self, "speed", zeros(s.weights))
        return s

    def round(self, fed, s):
        new = super().round(fed, s).weights
        object.__setattr__(self, "speed", plus(minus(new, s.weights), self.speed, 0.9))
        return State(plus(s.weights, self.speed), None)


@value
class RemembersOnItsClass(Broken):
    """Rounds that are counted on the class; the cohort grows with them."""

    done: ClassVar[list[int]] = [0]

    def init(self, fed, weights=None):
        self.done[0] = 0
        return super().init(fed, weights)

    def cohort(self, fed):
        self.done[0] += 1
        return fed.rng("cohort").choice(fed.clients, min(self.done[0], len(fed.clients)), replace=False)


@value
class StateWithAList(Broken):
    def init(self, fed, weights=None):
        return State(fed.initial(), [])


class NotRegistered(Broken):
    """Without ``@value`` the codec does not know it."""


@value
class WithoutWeights(Broken):
    def round(self, fed, s):
        return (super().round(fed, s),)


@value
class NeverMoves(Broken):
    def round(self, fed, s):
        self.train(fed, s.weights)
        return s


@value
class ChangesInPlace(Broken):
    def round(self, fed, s):
        mean = self.train(fed, s.weights)[Mean()]
        for n, t in mean.items():
            s.weights[n].copy_(t)
        return State(s.weights, None)


@value
class Peeks(Broken):
    """Draws by label without having asked anybody."""

    def cohort(self, fed):
        labels = fed.base.site.data.train.y
        return [int(c) for c in fed.clients if int(labels[fed.base.site.data.train.rows(int(c))[0]]) < 2][:4] or fed.clients[:1]


@value
class CountsThePlanned(Broken):
    """Divides by whom it asked, not by who came back."""

    def round(self, fed, s):
        cohort = self.cohort(fed)
        got = fed.train((chain(s.weights, [k], RECIPE) for k in cohort), Bank(at="ends"))
        total = {n: sum(w[n] for w, _ in got[Bank(at="ends")]) for n in s.weights}
        return State({n: t / len(cohort) + 0 * s.weights[n] for n, t in total.items()}, None)


@value
class CountsFailedSteps(Broken):
    """Moves the less, the more steps were made, also by those who failed in the end."""

    def round(self, fed, s):
        got = self.train(fed, s.weights)
        shrink = 1 / (1 + int(got.receipts.steps.sum()))
        return State({**s.weights, **{n: s.weights[n] + shrink * (t - s.weights[n]) for n, t in got[Mean()].items()}}, None)


@value
class NeedsSomebody(Broken):
    def round(self, fed, s):
        return State({**s.weights, **self.train(fed, s.weights)[Bank(at="ends")][0][0]}, None)

    def train(self, fed, w):
        return fed.train((chain(w, [k], RECIPE) for k in self.cohort(fed)), Bank(at="ends"))


@value
class NeedsTwo(Broken):
    """Weighs chains by their distance from each other: with one there is none."""

    def round(self, fed, s):
        ends = [w for w, _ in self.train(fed, s.weights)[Bank()]]
        far = {n: sum((w[n] - ends[0][n]) ** 2 for w in ends) / (torch.tensor(len(ends)) - 1) for n in s.weights}
        return State({n: ends[0][n] - 0.01 * t for n, t in far.items()}, None)


@value
class SaysTooMuch(Broken):
    def round(self, fed, s):
        if (fed.sizes[fed.clients] == 1).all() and len(fed.clients) > 1:
            raise ValueError("clients with one example cannot be trained")
        return super().round(fed, s)


@value
class SpeaksInRiddles(Broken):
    """Refuses one client in more than one sentence."""

    def round(self, fed, s):
        if len(fed.clients) == 1:
            raise ValueError("too few clients\nsee the manual")
        return super().round(fed, s)


@value
class BranchesInBegin(Rule):
    def begin(self, see):
        return {"received": see.received, "mu": 1.0 if see.handed > 0 else 0.5}


@value
class BranchesInPenalty(Rule):
    mu: float = 0.1

    def penalty(self, params, context):
        return sum((w**2).sum() for w in params.values()) if self.mu > 0 else 0.0


@value
class BranchesInEnd(Rule):
    def end(self, params, see, context):
        return End({n: -w if (w > 5).any() else w for n, w in params.items()})


@value
class ReadsItem(Rule):
    def end(self, params, see, context):
        return End({n: w / max(1.0, w.norm().item()) for n, w in params.items()})


@value
class ReadsRowsInSecret(Rule):
    def begin(self, see):
        return {"scale": see.x.mean()}


@value
class Keeps(Rule):
    """A rule with a memory."""

    def memory(self, w):
        return zeros(w)


@value
class StartsFromOnes(Keeps):
    def memory(self, w):
        return {n: torch.ones_like(t) for n, t in w.items()}


@value
class KeepsMore(Keeps):
    def end(self, params, see, context):
        return End(params, memory={**see.memory, "visits": see.steps})


@value
class KeepsLonger(Keeps):
    def end(self, params, see, context):
        return End(params, memory={n: torch.stack([t, t]) for n, t in see.memory.items()})


@value
class KeepsDoubles(Keeps):
    def end(self, params, see, context):
        return End(params, memory={n: t.double() for n, t in see.memory.items()})


@value
class SeesThePadding(Rule):
    """A loss that forgets the mask."""

    def loss(self, params, forward, x, y, mask, context):
        return forward(params, x).square().mean() / 10


@value
class SeesTheNeighbours(Rule):
    """Pulls harder, the more visits are under way."""

    reads_rows: ClassVar[bool] = True
    aboard: ClassVar[list[int]] = [0]

    def begin(self, see):
        self.aboard[0] += 1
        return {"pull": see.x.new_tensor(self.aboard[0] / 100)}

    def penalty(self, params, context):
        return context["pull"] * sum((w**2).sum() for w in params.values())

    def end(self, params, see, context):
        self.aboard[0] -= 1
        return End(params)


@value
class ForgetsOnLanes(Rule):
    """Its memory is one thing in lanes, which hand it a tensor of steps, and another in the loop, which hands it a number."""

    def memory(self, w):
        return {"steps": next(iter(w.values())).new_zeros(())}

    def end(self, params, see, context):
        return End(params, memory={"steps": see.memory["steps"] + see.steps * (1 if isinstance(see.steps, int) else 2)})


@value
class NeedsTwoRows(Rule):
    """The deviation of one row is not a number."""

    reads_rows: ClassVar[bool] = True

    def begin(self, see):
        return {"scale": ((see.x - see.x.mean(0)) ** 2).sum() / (see.x.new_tensor(len(see.x)) - 1) / 100}

    def penalty(self, params, context):
        return context["scale"] * sum((w**2).sum() for w in params.values())


@value
class OnlyFirst(Rule):
    """Divides by zero behind the first hand-over of a chain."""

    def end(self, params, see, context):
        return End({n: w / (see.handed != 1) for n, w in params.items()})


@value
class Using(Plain):
    """Plain, with a rule."""

    rule: Rule = Rule()

    def visit(self, m, base):
        return base.adding(self.rule), {}


@value
class CountsReceipts(Plain):
    """Divides by the visits that were planned; sparing those that came back would be right."""

    @property
    def folds(self):
        return (Mean("count"),)

    def merge(self, w, m, got):
        mean, share = got[Mean("count")], got.receipts.ok.sum() / len(got.receipts)
        return {**w, **{n: w[n] + float(1 + share) / 2 * (t - w[n]) for n, t in mean.items()}}, m


@value
class KeepsAClosure(Plain):
    def init(self, w, who):
        return {"schedule": lambda t: 1 / t}


@value
class Centre(Plain):
    """Server state on the object."""

    def init(self, w, who):
        object.__setattr__(self, "centre", w)

    def merge(self, w, m, got):
        new, m = super().merge(w, m, got)
        object.__setattr__(self, "centre", plus(self.centre, new))
        return {**w, **{n: (t + self.centre[n]) / 3 for n, t in new.items()}}, m
