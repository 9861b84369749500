"""The contract: what every algorithm and every method must keep, ours or a user's, in the spirit of ``check_estimator``.

    check_algorithm(MyAlgorithm(...))        # raises ContractError with one sentence, or returns nothing
    check_method(MyMethod(...))

``contract(algorithm)`` lists the checks by name, for a parametrised test.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedrelay.algorithms.fedavg import FedAvg
from fedrelay.algorithms.sampling import Uniform
from fedrelay.engine.boundary import name
from fedrelay.records.driver import fit
from fedrelay.seam.algorithm import Algorithm
from fedrelay.seam.codec import Store, decode, encode
from fedrelay.seam.federation import Layer, Run
from fedrelay.seam.methods import Method, Population
from fedrelay.seam.plan import EVERYBODY, Chain, Plan, chain
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import value
from fedrelay.simulation.simulation import Simulation
from fedrelay.testing.hostile import HostileFederation, alike
from fedrelay.testing.world import LANES, LOOP, SIZES, world

NEAR = {torch.float64: 1e-10, torch.float32: 2e-5}


class ContractError(AssertionError):
    """A promise that was not kept."""


def demand(kept: bool, sentence: str) -> None:
    if not kept:
        raise ContractError(sentence)


def rounds(algorithm: Algorithm[Any], fed: Simulation, n: int, layers: tuple[Layer, ...] = ()) -> Any:
    """The state after some rounds."""
    view = Run(fed, layers=layers)
    s = algorithm.init(view)
    for _ in range(n):
        s = algorithm.round(view, s)
    return s


def gap(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """The largest relative norm of a difference, over tensors."""
    return max(float((a[n] - b[n]).norm() / b[n].norm().clamp(min=1e-30)) for n in b)


# --- the checks of an algorithm


def is_a_value(algorithm: Algorithm[Any], n: int) -> None:
    """It travels through the codec and comes back equal; so does its state, which has ``weights``."""
    said = json.dumps(encode(algorithm, Store()))
    demand(decode(json.loads(said), Store()) == algorithm, f"{_of(algorithm)} comes back from the codec as something else")
    s = rounds(algorithm, world(), 1)
    store = Store()
    demand(
        alike(decode(json.loads(json.dumps(encode(s, store))), store), s),
        f"the state of {_of(algorithm)} is changed by the codec",
    )
    demand(isinstance(s.weights, Mapping), f"the state of {_of(algorithm)} has no `weights` to evaluate")


def same_seed_same_bits(algorithm: Algorithm[Any], n: int) -> None:
    """Twice the same; and the seed matters, or nothing is drawn from it."""
    demand(alike(rounds(algorithm, world(), n), rounds(algorithm, world(), n)), f"{_of(algorithm)}: one seed gave two results")


def it_learns_something(algorithm: Algorithm[Any], n: int) -> None:
    """The weights move and stay finite."""
    fed = world()
    w = rounds(algorithm, fed, n).weights
    demand(all(bool(t.isfinite().all()) for t in w.values()), f"{_of(algorithm)}: weights that are not finite")
    demand(gap(w, fed.initial()) > 0, f"{_of(algorithm)}: the weights did not move in {n} rounds")


def resume_equals_straight_run(algorithm: Algorithm[Any], n: int) -> None:
    """Stopped after every round and started again from disk: the same bits."""
    want = world()
    straight = fit(algorithm, want, n)
    with tempfile.TemporaryDirectory() as folder:
        for k in range(1, n + 1):
            fed = world()
            record = fit(algorithm, fed, k, folder=folder)
    demand(alike(record.state, straight.state), f"{_of(algorithm)}: a resumed run ends elsewhere than a straight one")
    demand(
        fed.now == want.now and fed.ledger.totals == want.ledger.totals, f"{_of(algorithm)}: clock or ledger are lost by a resume"
    )


def engines_agree(algorithm: Algorithm[Any], n: int) -> None:
    """Lanes against the loop, round by round from one checkpoint, in double precision."""
    loop, lanes = world(LOOP, dtype=torch.float64), world(LANES, dtype=torch.float64)
    s = algorithm.init(Run(loop))
    for _ in range(n):
        lanes.restore(loop.state())
        fast, s = algorithm.round(Run(lanes), s), algorithm.round(Run(loop), s)
        apart = gap(fast.weights, s.weights)
        demand(apart < NEAR[torch.float64], f"{_of(algorithm)}: lanes and loop are {apart:.1e} apart after a round")


def hostile_agrees(algorithm: Algorithm[Any], n: int) -> None:
    """Killed, retrained, answered twice: the same bits."""
    plain, hostile = world(), world(kind=HostileFederation)
    same = alike(rounds(algorithm, plain, n), rounds(algorithm, hostile, n)) and alike(plain.state(), hostile.state())
    demand(same, f"{_of(algorithm)}: a hostile federation gave other bits than a plain one")


@dataclass(frozen=True)
class Lossy(Layer):
    """Loses visits."""

    share: float = 0.4

    def plan(self, plan: Plan, rng: Callable[[], np.random.Generator]) -> Plan:
        draw = rng()

        def marked(c: Chain) -> Chain:
            lost = [None if v.client == EVERYBODY or draw.random() >= self.share else "dropped out" for v in c.visits]
            return replace(c, visits=tuple(replace(v, lost=why) for v, why in zip(c.visits, lost, strict=True)))

        return replace(plan, chains=tuple(map(marked, plan.chains)))


def dropouts_survive(algorithm: Algorithm[Any], n: int) -> None:
    """Lost visits, all visits of a round lost, and clients that send NaN: the model stays finite."""
    for share in (0.4, 1.0):
        w = rounds(algorithm, world(), n, (Lossy(share),)).weights
        demand(
            all(bool(t.isfinite().all()) for t in w.values()), f"{_of(algorithm)}: lost visits leave weights that are not finite"
        )
    broken = (1, 6)
    fed = world(broken=broken)
    w = rounds(algorithm, fed, n).weights
    demand(all(bool(t.isfinite().all()) for t in w.values()), f"{_of(algorithm)}: a client that sends NaN poisons the model")


def one_client(algorithm: Algorithm[Any], n: int) -> None:
    """A federation of one client, and of clients with one example."""
    for sizes in ((9,), (1,), (1,) * len(SIZES)):
        try:
            rounds(algorithm, world(sizes=sizes), 1)
        except ValueError as e:
            demand("\n" not in str(e) and len(sizes) == 1, f"{_of(algorithm)} fails with clients of one example: {e}")


def ledger_adds_up(algorithm: Algorithm[Any], n: int) -> None:
    """The totals are the sums of the receipts, and whoever trained is known to have disclosed something."""
    fed = world()
    totals: dict[str, float] = {}
    layer = Overhear(totals)
    rounds(algorithm, fed, n, (layer,))
    for column, amount in totals.items():
        demand(
            fed.ledger.totals.get(column) == amount, f"{_of(algorithm)}: the ledger's {column!r} is not the sum of the receipts"
        )
    demand(totals.get("visits", 0) > 0 and totals["wire up"] > totals["up"] > 0, f"{_of(algorithm)}: nothing was sent")
    demand(bool(fed.ledger.disclosed), f"{_of(algorithm)}: clients trained, and the ledger knows of no disclosure")


@dataclass(frozen=True)
class Overhear(Layer):
    """Adds up the receipts of every landing."""

    totals: dict[str, float]

    def landed(self, landing: Any) -> None:
        columns = {"visits": [1] * len(landing.receipts), "steps": landing.receipts.steps, **landing.receipts.traffic}
        for column, amounts in columns.items():
            self.totals[column] = self.totals.get(column, 0) + int(np.sum(amounts))


CHECKS = (
    is_a_value,
    same_seed_same_bits,
    it_learns_something,
    resume_equals_straight_run,
    engines_agree,
    hostile_agrees,
    dropouts_survive,
    one_client,
    ledger_adds_up,
)


def contract(algorithm: Algorithm[Any], n: int = 2) -> dict[str, Callable[[], None]]:
    """The checks of an algorithm by name."""
    return {check.__name__: partial(check, algorithm, n) for check in CHECKS}


def check_algorithm(algorithm: Algorithm[Any], n: int = 2) -> None:
    """Raise a ContractError with one sentence unless this algorithm keeps every promise.

    >>> check_algorithm(FedAvg(Uniform(count=4), Recipe(batch_size=8)))
    """
    for check in contract(algorithm, n).values():
        check()


# --- the checks of a method


def check_method(method: Method[Any], n: int = 2) -> None:
    """Raise a ContractError with one sentence unless this method keeps every promise, alone and inside a chain.

    >>> from fedrelay.methods import FedProx
    >>> check_method(FedProx(mu=0.1))
    """
    method.check()
    recipe = Recipe(batch_size=8)
    _vectorises(method, recipe)
    _memory_is_fixed(method, recipe)
    check_algorithm(FedAvg(Uniform(count=4), recipe, method), n)
    check_algorithm(Ring(recipe, method), n)


@value
class Ring(Algorithm[Any]):
    """Chains of three, one of which visits a client twice: what a method must survive that never heard of chains."""

    recipe: Recipe = Recipe()
    method: Method[Any] = Method()

    def init(self, fed: Run, weights: Any = None) -> Any:
        return FedAvg(method=self.method).init(fed, weights)

    def round(self, fed: Run, s: Any) -> Any:
        recipe, extra = self.method.visit(s.method, self.recipe)
        order = fed.rng("order").permutation(fed.clients).tolist()
        chains = [order[i : i + 3] for i in range(0, len(order), 3)]
        chains[0] = chains[0] + chains[0][:1]
        got = fed.train((chain(s.weights, c, recipe, extra) for c in chains), *self.method.folds)
        return type(s)(*self.method.merge(s.weights, s.method, got))


def _vectorises(method: Method[Any], recipe: Recipe) -> None:
    """Clients of 1, 7 and 30 examples: what is vectorised asks no tensor for a Python truth."""
    fed = world(sizes=(1, 7, 30))
    algorithm = FedAvg(Uniform(count=3), recipe, method)
    try:
        rounds(algorithm, fed, 1)
        why = next((w for w in fed.engine._cannot.values() if w), None)
    except RuntimeError as e:
        why = str(e)
    if why and "data-dependent control flow" in why:
        rules = ", ".join(name(r) for r in method.visit(algorithm.init(Run(world())).method, recipe)[0].rules)
        raise ContractError(
            f"a vectorised function of {rules} asks a tensor for a Python truth: use torch.where, or `reads_rows = True`"
        )
    demand(not why, f"{type(method).__name__} cannot be vectorised: {why}")


def _memory_is_fixed(method: Method[Any], recipe: Recipe) -> None:
    """What a client keeps begins with zeros of a shape that does not change."""
    fed = world()
    w = fed.initial()
    made = method.visit(method.init(w, Population(len(SIZES), len(SIZES))), recipe)[0]
    for rule in made.rules:
        start = rule.memory(w)
        demand(all(not bool(t.any()) for t in start.values()), f"{name(rule)}.memory must start from zeros")
    algorithm = FedAvg(Uniform(count=len(SIZES)), recipe, method)
    rounds(algorithm, fed, 1)
    for kept in fed.memories.clients().values():
        for rule in made.rules:
            if rule.has("memory"):
                same = {k: t.shape for k, t in kept[name(rule)].items()} == {k: t.shape for k, t in rule.memory(w).items()}
                demand(same, f"{name(rule)} keeps other leaves or shapes than its `memory` says")


def _of(algorithm: Algorithm[Any]) -> str:
    method = getattr(algorithm, "method", None)
    return type(algorithm).__name__ + (f" with {type(method).__name__}" if method is not None else "")
