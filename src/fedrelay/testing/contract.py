"""The contract: what every algorithm and every method must keep, ours or a user's, in the spirit of ``check_estimator``.

    check_algorithm(MyAlgorithm(...))        # raises ContractError with one sentence, or returns nothing
    check_method(MyMethod(...))

``contract(algorithm)`` and ``contract(method)`` list the checks by name, for a parametrised test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedrelay.algorithms.fedavg import FedAvg
from fedrelay.algorithms.sampling import Uniform
from fedrelay.engine.boundary import name
from fedrelay.seam.algorithm import Algorithm
from fedrelay.seam.federation import Layer, Run
from fedrelay.seam.methods import Method, Population
from fedrelay.seam.plan import Plan, chain
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import value
from fedrelay.testing.hostile import alike
from fedrelay.testing.promises import CHECKS, ContractError, demand, of, rounds
from fedrelay.testing.world import SIZES, world


def contract(what: Algorithm[Any] | Method[Any], n: int = 2) -> dict[str, Callable[[], None]]:
    """The checks of an algorithm or a method by name. A method is checked by itself, then alone at clients and inside chains.

    >>> list(contract(FedAvg()))[:2]
    ['is_a_value', 'same_seed_same_bits']
    """
    if isinstance(what, Algorithm):
        return {check.__name__: partial(_one, check, what, n) for check in CHECKS}
    checks: dict[str, Callable[[], None]] = {c.__name__: partial(_one, c, what, n) for c in METHOD_CHECKS}
    for where, algorithm in (("alone", FedAvg(SOME, RECIPE, what)), ("in chains", Ring(RECIPE, what))):
        checks |= {f"{check}, {where}": run for check, run in contract(algorithm, n).items()}
    return checks


def _one(check: Callable[[Any, int], None], what: Any, n: int) -> None:
    with _promised(f"{of(what)} breaks in `{check.__name__}`"):
        check(what, n)


@contextmanager
def _promised(what: str) -> Iterator[None]:
    """Whatever goes wrong in here is a promise that was not kept, and is said in one sentence."""
    try:
        yield
    except ContractError:
        raise
    except Exception as e:
        said = next(iter(str(e).strip().splitlines()), "no reason given")
        raise ContractError(f"{what}: {said} ({type(e).__name__})") from e


def check_algorithm(algorithm: Algorithm[Any], n: int = 2) -> None:
    """Raise a ContractError with one sentence unless this algorithm keeps every promise.

    >>> check_algorithm(FedAvg(Uniform(count=4), Recipe(batch_size=8)))
    """
    for check in contract(algorithm, n).values():
        check()


# --- the checks of a method

RECIPE = Recipe(batch_size=8)
SOME = Uniform(fraction=0.34)
"""Four clients of twelve, or one of one."""


def check_method(method: Method[Any], n: int = 2) -> None:
    """Raise a ContractError with one sentence unless this method keeps every promise, alone and inside a chain.

    >>> from fedrelay.methods import FedProx
    >>> check_method(FedProx(mu=0.1))
    """
    method.check()
    for check in contract(method, n).values():
        check()


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


def vectorises(method: Method[Any], n: int) -> None:
    """Clients of 1, 7 and 30 examples: what is vectorised asks no tensor for a Python truth, and no client for its rows."""
    fed, failed = world(sizes=(1, 7, 30)), None
    try:
        rounds(FedAvg(Uniform(count=3), RECIPE, method), fed, 1)
    except (RuntimeError, LookupError) as e:
        failed = str(e)
    why = next((w for w in fed.engine._cannot.values() if w), failed)
    if why and "data-dependent control flow" in why:
        rules = ", ".join(name(r) for r in _rules(method))
        raise ContractError(
            f"a vectorised function of {rules} asks a tensor for a Python truth: use torch.where, or `reads_rows = True`"
        )
    demand(not why, f"{of(method)} cannot be vectorised: {why}")


def memory_is_fixed(method: Method[Any], n: int) -> None:
    """What a client keeps begins with zeros of a type and shape that do not change."""
    fed = world()
    starts = {name(rule): rule.memory(fed.initial()) for rule in _rules(method)}
    for rule, start in starts.items():
        demand(all(not bool(t.any()) for t in start.values()), f"{rule}.memory must start from zeros")
    rounds(FedAvg(Uniform(count=len(SIZES)), RECIPE, method), fed, 1)

    def layout(memory: Mapping[str, torch.Tensor]) -> Any:
        return {leaf: (t.dtype, t.shape) for leaf, t in memory.items()}

    for kept in fed.memories.clients().values():
        for rule, made in kept.items():
            demand(layout(made) == layout(starts[rule]), f"{rule} keeps other leaves, types or shapes than its `memory` says")


def lost_leaves_no_trace(method: Method[Any], n: int) -> None:
    """The merge is that of those who came back: a chain in which everybody is lost is as if it had not been planned."""
    algorithm = FedAvg(SOME, RECIPE, method)
    lost, unplanned = (rounds(algorithm, world(), n, (Last(why),)) for why in ("lost", None))
    demand(alike(lost, unplanned), f"{of(method)}: the merge counts a client that was lost")


@dataclass(frozen=True)
class Last(Layer):
    """Loses the visits of a plan's last chain; without a reason, takes that chain out."""

    why: str | None

    def plan(self, plan: Plan, rng: Callable[[], np.random.Generator]) -> Plan:
        *others, last = plan.chains
        gone = replace(last, visits=tuple(replace(v, lost=self.why) for v in last.visits))
        return replace(plan, chains=(*others, gone) if self.why else tuple(others))


METHOD_CHECKS = (vectorises, memory_is_fixed, lost_leaves_no_trace)


def _rules(method: Method[Any]) -> tuple[Any, ...]:
    w = world().initial()
    return method.visit(method.init(w, Population(len(SIZES), len(SIZES))), RECIPE)[0].rules
