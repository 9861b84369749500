"""One round of each of the five systems, cut short: what the seam must carry. Grouping, selection and growth are stand-ins.

These are not the systems; they are the shapes that the systems will have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from fedrelay.algorithms import FedAvg, Uniform
from fedrelay.methods import Plain
from fedrelay.seam.algorithm import Algorithm, State
from fedrelay.seam.federation import Layer, Run
from fedrelay.seam.folds import Bank, Mean
from fedrelay.seam.landing import Flight, Landing, join
from fedrelay.seam.methods import Method
from fedrelay.seam.plan import Chain, Plan, Visit, chain
from fedrelay.seam.questions import LabelCounts
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.rules import ClientView, End, Rule
from fedrelay.seam.values import plus, value, zeros

RECIPE = Recipe(learning_rate=0.1, batch_size=20)


# --- split learning


@value
class SplitLearning(Algorithm[State]):
    """One chain through everybody, in a fixed order; SplitFed is FedAvg with a cut in its recipe."""

    recipe: Recipe = replace(RECIPE, cut="classifier")
    method: Method[Any] = Plain()

    def init(self, fed, weights=None):
        w = weights or fed.initial()
        return State(w, self.method.init(w, fed.population()))

    def round(self, fed, s):
        recipe, extra = self.method.visit(s.method, self.recipe)
        got = fed.train([chain(s.weights, fed.clients, recipe, extra)], *self.method.folds)
        return State(*self.method.merge(s.weights, s.method, got))


# --- WFSL


@value
class Regulate(Rule):
    """w <- (1 - a) w + a received; nothing to hold on to before the first hand-over of a cycle that succeeded."""

    a: float = 1 / 7

    def end(self, params, see: ClientView, context):
        a = self.a * (see.handed > 0)
        return End({n: (1 - a) * p + a * see.received[n] for n, p in params.items()})


@value
class Elastic(Rule):
    """EWC in a chain: weight/2 * F (w - received)^2; the Fisher travels with the model."""

    weight: float = 0.1
    reads_rows: ClassVar[bool] = True

    def begin(self, see):
        return {"anchor": dict(see.received.items()), "F": dict(see.along.items()) or zeros(see.received)}

    def penalty(self, params, context):
        return self.weight / 2 * sum((context["F"][n] * (p - context["anchor"][n]) ** 2).sum() for n, p in params.items())

    def end(self, params, see, context):
        from torch.func import grad, vmap

        def one(p, x, y):
            return see.criterion(see.forward({**see.received, **p}, x[None]), y[None]).sum()

        g = vmap(grad(one), in_dims=(None, 0, 0))(params, see.x, see.y)
        return End(params, along={**context["F"], **{n: (t**2).mean(0) for n, t in g.items()}})


@value
class EWC(Plain):
    weight: float = 0.1

    def visit(self, m, base):
        return base.adding(Elastic(self.weight)), {}


@value
class Warm:
    last: Any
    method: Any
    weights: Any


@value
class Warmup(Algorithm[Warm]):
    """One chain a cycle, opened by the last hand-over; the warm model is the mean of a cycle's hand-overs."""

    sampling: Uniform = Uniform(count=10)
    recipe: Recipe = RECIPE
    method: Method[Any] = Plain()
    uploads: ClassVar[Mean] = Mean("count", at="visits")

    def init(self, fed, weights=None):
        w = weights or fed.initial()
        return Warm(w, self.method.init(w, fed.population()), w)

    def pick(self, fed):
        return self.sampling.draw(fed)

    def round(self, fed, s):
        recipe, extra = self.method.visit(s.method, self.recipe)
        got = fed.train([chain(s.last, self.pick(fed), recipe.adding(Regulate()), extra)], *self.method.folds, self.uploads)
        return Warm(*self.method.merge(s.last, s.method, got), {**s.last, **got[self.uploads]})


# --- FedSeq


@value
class Grouped:
    weights: Any
    method: Any
    groups: tuple[tuple[int, ...], ...]


@value
class FedSeq(Algorithm[Grouped]):
    """Pre-train, group what differs, then one chain per drawn superclient."""

    size: int = 5
    share: float = 0.4
    recipe: Recipe = RECIPE
    method: Method[Any] = Plain()
    signature: ClassVar[Bank] = Bank("classifier.weight")

    def init(self, fed, weights=None):
        w = weights or fed.initial()
        got = fed.train((chain(w, [c], replace(self.recipe, epochs=3)) for c in fed.clients), self.signature)
        groups = greedy(np.array([t.numpy().ravel() for t, _ in got[self.signature]]), self.size, fed.rng("group"))
        return Grouped(w, self.method.init(w, fed.population(units=len(groups))), groups)

    def drawn(self, fed, s):
        rng = fed.rng("superclients")
        chosen = rng.choice(len(s.groups), max(1, int(self.share * len(s.groups))), replace=False)
        return [rng.permutation(s.groups[i]).tolist() for i in chosen]

    def round(self, fed, s):
        recipe, extra = self.method.visit(s.method, self.recipe)
        got = fed.train((chain(s.weights, g, recipe, extra) for g in self.drawn(fed, s)), *self.method.folds)
        return Grouped(*self.method.merge(s.weights, s.method, got), s.groups)


def greedy(signatures: np.ndarray, size: int, rng: np.random.Generator) -> tuple[tuple[int, ...], ...]:
    left, groups = rng.permutation(len(signatures)).tolist(), []
    while left:
        g = [left.pop()]
        while left and len(g) < size:
            m = signatures[g].mean(0)
            g.append(min(left, key=lambda c: float(signatures[c] @ m / np.linalg.norm(signatures[c]))))
            left.remove(g[-1])
        groups.append(tuple(g))
    return tuple(groups)


@value
class Slots:
    weights: Any
    method: Any
    groups: tuple[tuple[int, ...], ...]
    bank: tuple[Any, ...] = ()
    seen: tuple[int, ...] = ()
    done: int = 0


@value
class FedSeqInter(Algorithm[Slots]):
    """Each chain starts from another superclient's model; every N_S rounds all are merged by what they saw since."""

    seq: FedSeq = FedSeq()

    def init(self, fed, weights=None):
        s = self.seq.init(fed, weights)
        return Slots(s.weights, s.method, s.groups)

    def drawn(self, fed, s):
        return self.seq.drawn(fed, s)

    def round(self, fed, s):
        recipe, extra = self.seq.method.visit(s.method, self.seq.recipe)
        drawn, merging = self.drawn(fed, s), (s.done + 1) % len(s.groups) == 0
        bank, seen = s.bank or (s.weights,) * len(drawn), s.seen or (0,) * len(drawn)
        chains = (chain(w, g, recipe, extra, n * merging) for w, g, n in zip(bank, drawn, seen, strict=True))
        got = fed.train(chains, *self.seq.method.folds, Bank())
        w, method = self.seq.method.merge(s.weights, s.method, got)
        if merging:
            return Slots(w, method, s.groups, done=s.done + 1)
        bank, examples = zip(*got[Bank()], strict=True)
        return Slots(w, method, s.groups, bank, tuple(a + b for a, b in zip(seen, examples, strict=True)), s.done + 1)


# --- HFedMS


@value
class Semantic(Rule):
    """Trains the classifier on fresh features and a store, which moves with the drift between two global extractors."""

    q: int = 50
    width: int = 32
    keep: int = 0  # 1 in the round that ends a block
    enters: ClassVar[str] = "classifier"
    reads_rows: ClassVar[bool] = True

    def memory(self, w):
        z = next(iter(w.values())).new_zeros(self.q, self.width)
        return {"z": z, "y": torch.zeros(self.q, dtype=torch.long), "n": torch.tensor(0), "block": torch.tensor(0)}

    def prepare(self, see):
        def features(w):
            return see.forward(w, see.x, until="classifier")

        fresh, n, block = features(see.received), int(see.memory["n"]), int(see.memory["block"])
        z, y = see.memory["z"][:n].clone(), see.memory["y"][:n]
        if n and block != see.extra["block"]:
            drift = fresh - features(see.extra["past"][block])
            for c in see.y.unique():
                z[y == c] += drift[see.y == c].mean(0)
        return torch.cat([fresh, z]), torch.cat([see.y, y])

    def end(self, params, see, context):
        z, y, block = see.x, see.y, torch.tensor(see.extra["block"])
        if self.keep:
            n = len(y) - int(see.memory["n"])  # today's batch comes first; its means decide

            def mean(c):
                return z[:n][y[:n] == c].mean(0) if (y[:n] == c).any() else z[y == c].mean(0)

            near = torch.stack([(row - mean(c)).norm() for row, c in zip(z, y, strict=True)]).argsort(stable=True)[: self.q]
        else:
            near = torch.arange(len(y) - int(see.memory["n"]), len(y))
        store = {k: t.clone() for k, t in see.memory.items()}
        store["z"][: len(near)], store["y"][: len(near)] = z[near], y[near]
        return End(params, {**store, "n": torch.tensor(len(near)), "block": block})


@value
class Industrial:
    weights: Any
    method: Any
    done: int = 0
    drawn: tuple[tuple[int, ...], ...] = ()
    past: Mapping[int, Any] = field(default_factory=dict)  # block -> global extractor


@value
class HFedMS(Algorithm[Industrial]):
    """Full rounds regroup and send everything; the others train and send the classifier only."""

    t: int = 3
    kappa: float = 0.5
    beta: int = 2
    store: Semantic = Semantic()
    recipe: Recipe = RECIPE
    method: Method[Any] = Plain("count")

    def init(self, fed, weights=None):
        w = weights or fed.initial()
        return Industrial(w, self.method.init(w, fed.population()))

    def round(self, fed, s):
        block, step = divmod(s.done, self.t)
        if step == 0:
            s = replace(s, drawn=self.regroup(fed, block))
            return self.travel(fed, s, self.recipe, {}, block)
        store = replace(self.store, keep=int(step == self.t - 1))
        return self.travel(fed, s, replace(self.recipe, scope=("classifier",)), {"block": block, "past": s.past}, block, store)

    def travel(self, fed, s, base, down, block, *rules):
        recipe, extra = self.method.visit(s.method, base)
        got = fed.train((chain(s.weights, g, recipe.adding(*rules), {**extra, **down}) for g in s.drawn), *self.method.folds)
        w, method = self.method.merge(s.weights, s.method, got)
        return Industrial(
            w, method, s.done + 1, s.drawn, {**s.past, block: {n: t for n, t in w.items() if n.startswith("extractor")}}
        )

    def regroup(self, fed, block):
        rng, counts = fed.rng("groups"), fed.ask(fed.clients, LabelCounts(10))
        order = sorted(map(int, fed.clients), key=lambda c: np.argmax(counts[c]) + rng.random() / 2)  # stands for ICG
        m = min(self.beta * int(0.7 * block + 1), len(order))
        return tuple(tuple(order[i::m]) for i in rng.choice(m, max(1, int(self.kappa * m)), replace=False).tolist())


# --- two-stage clustered SplitFed


@value
class Stages:
    weights: Any
    method: Any
    done: int
    busy: Mapping[tuple[int, int], tuple[Flight, int]]  # in-cluster -> (flight, the round it left in)
    queue: Mapping[int, tuple[tuple[Landing, int], ...]]  # out-cluster -> late landings, first in first out


@value
class TwoStage(Algorithm[Stages]):
    """Out-clusters in turn, in-clusters at their own pace, late results mixed in with 1 / (1 + staleness)."""

    clusters: tuple[tuple[tuple[int, ...], ...], ...] = ()  # out-cluster -> in-cluster -> clients
    share: float = 0.4
    recipe: Recipe = RECIPE
    method: Method[Any] = Plain("count")

    def init(self, fed, weights=None):
        w = weights or fed.initial()
        return Stages(w, self.method.init(w, fed.population()), 0, {}, dict.fromkeys(range(len(self.clusters)), ()))

    def round(self, fed, s):
        w, m, busy, queue, rng, now = s.weights, s.method, dict(s.busy), dict(s.queue), fed.rng("round"), s.done + 1
        for v in rng.permutation(len(self.clusters)).tolist():
            started = {}
            for k, members in enumerate(self.clusters[v]):
                if (v, k) in busy:
                    continue
                chosen = rng.choice(members, max(1, int(self.share * len(members))), replace=False)
                recipe, extra = self.method.visit(m, self.recipe)
                started[v, k] = fed.launch((chain(w, [c], recipe, extra) for c in chosen), *self.method.folds), now
            if not started:
                continue
            down = {x.flight: x for x in fed.land([f for f, _ in started.values()], also=[f for f, _ in busy.values()])}
            for key, (flight, r) in busy.items():
                if flight in down:
                    queue[key[0]] += ((down[flight], r),)
            w, m = self.method.merge(w, m, join([down[f] for f, _ in started.values() if f in down]))
            busy = {key: (f, r) for key, (f, r) in (busy | started).items() if f not in down}
            for late, r in queue[v]:
                a = 1 / (1 + now - r)
                q, m = self.method.merge(w, m, late)
                w = {n: t if t is q[n] else (1 - a) * t + a * q[n] for n, t in w.items()}
            queue[v] = ()
        return Stages(w, m, now, busy, queue)


# --- Genetic CFL, evolution around anything, a fleet that fails


@dataclass(frozen=True)
class Genes(Layer):
    """Writes each client's gene into every visit that leaves, and overhears the losses of every visit that lands."""

    path: str
    genes: Mapping[int, float]
    losses: dict[int, float]

    def plan(self, plan: Plan, rng: Callable[[], np.random.Generator]) -> Plan:
        def own(v: Visit) -> Visit:
            return replace(v, recipes=tuple(r.gene(self.path, self.genes[v.client]) for r in v.recipes))

        return replace(plan, chains=tuple(replace(c, visits=tuple(map(own, c.visits))) for c in plan.chains))

    def landed(self, landing: Landing) -> None:  # a loss counts for the gene that earned it: a late flight's may have changed
        self.losses.update(
            {r.client: r.loss for r in landing.receipts if r.reason is None and r.numbers[self.path] == self.genes[r.client]}
        )


@dataclass(frozen=True)
class Fleet(Layer):
    """Devices drop out and stall; whoever is lost is reported, and every other place stays what it was."""

    lost: float = 0.2
    slow: float = 0.2
    wait: float = 1000.0

    def plan(self, plan: Plan, rng: Callable[[], np.random.Generator]) -> Plan:
        r = rng()

        def fate(v: Visit) -> Visit:
            return replace(
                v,
                lost="dropped out" if r.random() < self.lost else v.lost,
                wait=v.wait + self.wait * bool(r.random() < self.slow),
            )

        return replace(plan, chains=tuple(replace(c, visits=tuple(map(fate, c.visits))) for c in plan.chains))


def breed(genes, losses, rng):
    """The two best survive; the others are means of two of the better half, give or take a tenth."""
    best = sorted(losses, key=lambda c: (losses[c], c))

    def child():
        return float(np.mean([genes[c] for c in rng.choice(best[: len(best) // 2 + 1], 2)]) * rng.choice([0.9, 1.0, 1.1]))

    return {**genes, **{c: child() for c in best[2:]}}


@value
class Evolved:
    inner: Any
    genes: Mapping[int, float]
    losses: Mapping[int, float]

    @property
    def weights(self):
        return self.inner.weights


@value
class Evolve(Algorithm[Evolved]):
    """Numbers that evolve around any system: ``path`` names one of its recipe's numbers."""

    inner: Algorithm[Any] = FedAvg()
    path: str = "learning_rate"
    values: tuple[float, ...] = (0.3, 0.1, 0.01, 0.001)

    def init(self, fed, weights=None):
        rng = fed.rng("genes")
        genes = {int(c): float(rng.choice(self.values)) for c in fed.clients}
        return Evolved(self.inner.init(fed.under("inner"), weights), genes, {})

    def round(self, fed, s):
        layer = Genes(self.path, s.genes, {})
        inner = self.inner.round(fed.under("inner").around(layer), s.inner)
        return Evolved(inner, breed(s.genes, layer.losses, fed.rng("breed")), {**s.losses, **layer.losses})


@value
class Genetic(Algorithm[Evolved]):
    """Every client tries three rates and keeps the best of its own; then genes evolve, one cohort for good."""

    cohort: int = 10
    recipe: Recipe = RECIPE
    rates: tuple[float, ...] = (0.3, 0.1, 0.01, 0.001)

    def init(self, fed, weights=None):
        w, rng = weights or fed.initial(), fed.rng("tries")
        keys = Uniform(count=self.cohort).draw(fed)

        def tries():
            return tuple(replace(self.recipe, learning_rate=g) for g in rng.choice(self.rates, 3, replace=False).tolist())

        got = fed.train((Chain(w, (Visit(c, tries()),)) for c in keys), Mean("count"))
        genes = {r.client: r.numbers["learning_rate"] for r in got.receipts}
        losses = {r.client: r.loss for r in got.receipts if r.reason is None}
        return Evolved(State({**w, **got[Mean("count")]}, None), genes, losses)

    def round(self, fed, s):
        genes = breed(s.genes, s.losses, fed.rng("breed"))
        got = fed.train((chain(s.weights, [c], replace(self.recipe, learning_rate=g)) for c, g in genes.items()), Mean("count"))
        losses = {r.client: r.loss for r in got.receipts if r.reason is None}
        return Evolved(State({**s.weights, **got[Mean("count")]}, None), genes, losses)


__all__ = [
    "EWC",
    "RECIPE",
    "Evolve",
    "FedSeq",
    "FedSeqInter",
    "Fleet",
    "Genetic",
    "HFedMS",
    "Regulate",
    "Run",
    "Semantic",
    "Slots",
    "SplitLearning",
    "TwoStage",
    "Warmup",
    "greedy",
    "plus",
]
