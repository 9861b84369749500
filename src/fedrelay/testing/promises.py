"""What every algorithm keeps: a function per promise, which raises a ContractError where it is broken."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedrelay.records.driver import fit
from fedrelay.seam.algorithm import Algorithm
from fedrelay.seam.codec import Store, decode, encode
from fedrelay.seam.federation import Layer, Run
from fedrelay.seam.methods import Method
from fedrelay.seam.plan import Plan
from fedrelay.simulation.faults import Dropout, each_visit
from fedrelay.simulation.simulation import Simulation
from fedrelay.testing.hostile import HostileFederation, alike, apart
from fedrelay.testing.world import LANES, LOOP, SIZES, world

NEAR = 1e-10
"""How far engines may be apart in double precision: a relative norm per tensor."""


class ContractError(AssertionError):
    """A promise that was not kept."""


def of(what: Algorithm[Any] | Method[Any]) -> str:
    """What it is called in a sentence."""
    method = getattr(what, "method", None)
    return type(what).__name__ + (f" with {type(method).__name__}" if method is not None else "")


def demand(kept: bool, sentence: str) -> None:
    if not kept:
        raise ContractError(sentence)


def rounds(algorithm: Algorithm[Any], fed: Any, n: int, layers: tuple[Layer, ...] = ()) -> Any:
    """The state after some rounds."""
    view = Run(fed, layers=layers)
    algorithm.check(view)
    s = algorithm.init(view)
    for _ in range(n):
        s = algorithm.round(view, s)
    return s


def finite(w: Mapping[str, torch.Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in w.values())


def is_a_value(algorithm: Algorithm[Any], n: int) -> None:
    """It travels through the codec and comes back equal; so does its state, which has ``weights``."""
    said = json.dumps(encode(algorithm, Store()))
    demand(decode(json.loads(said), Store()) == algorithm, f"{of(algorithm)} comes back from the codec as something else")
    s = rounds(algorithm, world(), 1)
    store = Store()
    demand(
        alike(decode(json.loads(json.dumps(encode(s, store))), store), s),
        f"the state of {of(algorithm)} is changed by the codec",
    )
    demand(isinstance(getattr(s, "weights", None), Mapping), f"the state of {of(algorithm)} has no `weights` to evaluate")


def same_seed_same_bits(algorithm: Algorithm[Any], n: int) -> None:
    """Twice the same, and nobody's global generator is touched: what is drawn is drawn from the federation's places."""
    before = _generators()
    demand(alike(rounds(algorithm, world(), n), rounds(algorithm, world(), n)), f"{of(algorithm)}: one seed gave two results")
    demand(
        all(map(np.array_equal, before, _generators())),
        f"{of(algorithm)} uses a global random generator: draw from `fed.rng(purpose)`",
    )


def _generators() -> list[Any]:
    legacy = np.random.get_state(legacy=False)
    return [legacy["state"]["key"], legacy["state"]["pos"], random.getstate()[1], torch.get_rng_state().numpy()]


def it_learns_something(algorithm: Algorithm[Any], n: int) -> None:
    """The weights move and stay finite, and no visit fails."""
    fed = world()
    w = rounds(algorithm, fed, n).weights
    demand(finite(w), f"{of(algorithm)}: weights that are not finite")
    demand(not fed.ledger.totals.get("failed"), f"{of(algorithm)}: visits fail, though no client was lost")
    demand(apart(w, fed.initial()) > 0, f"{of(algorithm)}: the weights did not move in {n} rounds")


def leaves_what_it_is_given(algorithm: Algorithm[Any], n: int) -> None:
    """A round makes a new state; the one that it was given, and the federation's first model, stay what they were."""
    fed = world()
    view, first = Run(fed), deepcopy(fed.initial())
    s = algorithm.init(view)
    for _ in range(n):
        before, given = deepcopy(s), s
        s = algorithm.round(view, s)
        demand(alike(before, given), f"{of(algorithm)} changes the state that it is given: make a new one")
    demand(alike(first, fed.initial()), f"{of(algorithm)} changes the federation's first model: make a new one")


def stays_on_the_seam(algorithm: Algorithm[Any], n: int) -> None:
    """It asks for nothing that another federation (a cluster, devices) would not have."""
    try:
        rounds(algorithm, Seam(world()), n)
    except AttributeError as e:
        demand("'Seam'" not in str(e), f"{of(algorithm)} reaches around the seam, for what only a simulation has: {e}")
        raise


class Seam:
    """The verbs of a federation, and nothing else of it."""

    def __init__(self, fed: Simulation) -> None:
        self.seed, self.sizes, self.initial, self.place = fed.seed, fed.sizes, fed.initial, fed.place
        self.launch, self.land, self.ask, self.forget = fed.launch, fed.land, fed.ask, fed.forget


def resume_equals_straight_run(algorithm: Algorithm[Any], n: int) -> None:
    """Stopped after every round and started again from disk, with another run in between: the same bits."""
    want = world()
    straight = fit(algorithm, want, n)
    with tempfile.TemporaryDirectory() as folder:
        for k in range(1, n + 1):
            fed = world()
            record = fit(algorithm, fed, k, folder=folder)
            rounds(algorithm, world(seed=1), n + 1)  # whatever is kept outside the state is now this run's
    demand(alike(record.state, straight.state), f"{of(algorithm)}: a resumed run ends elsewhere than a straight one")
    demand(
        fed.now == want.now and fed.ledger.totals == want.ledger.totals, f"{of(algorithm)}: clock or ledger are lost by a resume"
    )


def engines_agree(algorithm: Algorithm[Any], n: int) -> None:
    """Lanes against the loop, round by round from one checkpoint, in double precision: states, and what the federations know."""
    loop, lanes = world(LOOP, dtype=torch.float64), world(LANES, dtype=torch.float64)
    s = algorithm.init(Run(loop))
    for _ in range(n):
        lanes.restore(loop.state())
        fast, s = algorithm.round(Run(lanes), s), algorithm.round(Run(loop), s)
        for what, far in (("states", apart(fast, s)), ("federations", apart(lanes.state(), loop.state()))):
            demand(far < NEAR, f"{of(algorithm)}: the {what} of lanes and loop are {far:.1e} apart after a round")


def hostile_agrees(algorithm: Algorithm[Any], n: int) -> None:
    """Killed, retrained, answered twice: the same bits."""
    plain, hostile = world(), world(kind=HostileFederation)
    same = alike(rounds(algorithm, plain, n), rounds(algorithm, hostile, n)) and alike(plain.state(), hostile.state())
    demand(same, f"{of(algorithm)}: a hostile federation gave other bits than a plain one")


@dataclass(frozen=True)
class Lose(Layer):
    """Loses these clients."""

    clients: tuple[int, ...]

    def plan(self, plan: Plan, rng: Callable[[], np.random.Generator]) -> Plan:
        return each_visit(plan, lambda v: replace(v, lost="lost") if v.client in self.clients else v)


class Idle(Layer):
    """Sets a rate at which nobody moves."""

    def plan(self, plan: Plan, rng: Callable[[], np.random.Generator]) -> Plan:
        return each_visit(plan, lambda v: replace(v, recipes=tuple(r.gene("learning_rate", 1e-30) for r in v.recipes)))


def dropouts_survive(algorithm: Algorithm[Any], n: int) -> None:
    """Lost visits, all visits of a round lost, and clients that send NaN: the merge is one of those who came back."""
    idle = rounds(algorithm, world(), n, (Idle(),)).weights
    for share in (0.4, 1.0):
        w = rounds(algorithm, world(), n, (Dropout(share),)).weights
        demand(finite(w), f"{of(algorithm)}: lost visits leave weights that are not finite")
        w = rounds(algorithm, world(), n, (Idle(), Dropout(share))).weights
        before = {k: idle[k] for k in w}  # leaves that a rule adds come with the first visit
        demand(apart(w, before) < 0.05, f"{of(algorithm)}: lost visits move the model though nobody trained: do not count them")
    broken = (1, 6)
    fed = world(broken=broken)
    w = rounds(algorithm, fed, n).weights
    demand(finite(w), f"{of(algorithm)}: a client that sends NaN poisons the model")
    lost = rounds(algorithm, world(broken=broken), n, (Lose(broken),)).weights
    same = alike(w, lost) or not fed.ledger.totals.get("failed")  # a rule may mend the rows
    demand(same, f"{of(algorithm)}: a client that trained and failed leaves more than one that was lost")


def one_client(algorithm: Algorithm[Any], n: int) -> None:
    """A federation of one client (which may be refused in one sentence), and of clients with one example."""
    for sizes in ((9,), (1,), (1,) * len(SIZES)):
        fed, whom = world(sizes=sizes), "one client" if len(sizes) == 1 else "clients of one example"
        try:
            w = rounds(algorithm, fed, 1).weights
        except ValueError as e:
            demand("\n" not in str(e), f"{of(algorithm)} refuses {whom}, but not in one sentence")
            demand(len(sizes) == 1, f"{of(algorithm)} fails with {whom}: {e}")
            continue
        demand(finite(w), f"{of(algorithm)} with {whom}: weights that are not finite")
        demand(not fed.ledger.totals.get("failed"), f"{of(algorithm)}: visits fail with {whom}")


def ledger_adds_up(algorithm: Algorithm[Any], n: int) -> None:
    """The totals are the sums of the receipts, and whoever handed something on is known to have disclosed something."""
    fed = world()
    totals: dict[str, float] = {}
    gave: set[int] = set()
    rounds(algorithm, fed, n, (Overhear(totals, gave),))
    for column, amount in totals.items():
        demand(
            fed.ledger.totals.get(column) == amount, f"{of(algorithm)}: the ledger's {column!r} is not the sum of the receipts"
        )
    demand(totals.get("visits", 0) > 0 and totals["wire up"] > totals["up"] > 0, f"{of(algorithm)}: nothing was sent")
    known = {c for what in fed.ledger.disclosed for c in fed.ledger.who(what)}
    demand(gave <= known, f"{of(algorithm)}: clients trained, and the ledger knows of no disclosure")


@dataclass(frozen=True)
class Overhear(Layer):
    """Adds up the receipts of every landing."""

    totals: dict[str, float]
    gave: set[int]

    def landed(self, landing: Any) -> None:
        r = landing.receipts
        plain = {"visits": [1] * len(r), "failed": ~r.ok, "examples": r.examples, "steps": r.steps}
        for column, amounts in (plain | r.traffic).items():
            self.totals[column] = self.totals.get(column, 0) + int(np.sum(amounts))
        self.gave.update(c for c in r.client[r.ok].tolist() if c >= 0)


CHECKS = (
    is_a_value,
    same_seed_same_bits,
    it_learns_something,
    leaves_what_it_is_given,
    stays_on_the_seam,
    resume_equals_straight_run,
    engines_agree,
    hostile_agrees,
    dropouts_survive,
    one_client,
    ledger_adds_up,
)
