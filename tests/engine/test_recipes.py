"""What a recipe can ask for beyond a rule: optimizer states that travel or stay, and leaves that a rule adds to the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fedrelay as fr
from fedrelay.testing import HostileFederation, alike, check_algorithm
from fedrelay.testing.contract import Ring
from fedrelay.testing.hostile import apart as gap
from fedrelay.testing.world import LANES, LOOP, world
from tracer.world import quadratic

MOMENTUM = fr.Recipe(0.05, 8, epochs=2, optimizer=fr.SGD(momentum=0.9))
ADAM = fr.Recipe(0.01, 8, epochs=2, optimizer=fr.Adam())


def after(recipe: fr.Recipe, fed: Any, rounds: int = 2, method: Any = None) -> dict[str, torch.Tensor]:
    algorithm, view = Ring(recipe, method or fr.Plain()), fr.Run(fed)
    s = algorithm.init(view)
    for _ in range(rounds):
        s = algorithm.round(view, s)
    return s.weights


@pytest.mark.parametrize("recipe", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("state", ["travels", "stays"])
def test_a_state_that_goes_on_is_the_same_in_lanes_and_loop_and_is_not_a_fresh_one(recipe: fr.Recipe, state: str) -> None:
    kept = replace(recipe, optimizer_state=state)
    loop, lanes = (after(kept, world(pick, dtype=torch.float64)) for pick in (LOOP, LANES))
    assert gap(lanes, loop) < 1e-10
    assert gap(after(recipe, world(LOOP, dtype=torch.float64)), loop) > 1e-6


@pytest.mark.parametrize(("state", "want"), [("fresh", 2.5), ("travels", 3.0)])
def test_a_travelling_velocity_by_hand(state: str, want: float) -> None:
    """Two clients with loss (w - t)^2 / 2, t = 2 and 4; rate 1/2, momentum 1/2, one step each, from 0.

    First visit: g = -2, v = -2, w = 1. Fresh: g = 1 - 4 = -3, v = -3, w = 2.5. Travelling: v = -2/2 - 3 = -4, w = 3.
    """
    recipe = fr.Recipe(0.5, 64, optimizer=fr.SGD(momentum=0.5), optimizer_state=state)
    fed = quadratic([2, 4])
    got = fr.Run(fed).train([fr.chain(fed.initial(), [0, 1], recipe)], fr.Mean())
    assert float(got[fr.Mean()]["point.w"]) == want


def test_a_staying_state_lies_in_the_clients_memory_and_survives_a_hostile_federation() -> None:
    kept = replace(ADAM, optimizer_state="stays")
    plain, hostile = world(), world(kind=HostileFederation)
    assert alike(after(kept, plain), after(kept, hostile))
    assert set(plain.memories.clients()[2]["optimizer"]) >= {"count/", "mean/classifier.weight", "square/classifier.weight"}


def test_an_unknown_state_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer_state = 'keeps' is none of"):
        after(replace(ADAM, optimizer_state="keeps"), world())


@fr.value
class Pulled(fr.Rule):
    """Adds a leaf that is pulled towards 3: a step at rate r moves it from a to a + r (3 - a)."""

    def leaves(self, w: Any) -> Any:
        return {"pulled.a": torch.ones((), dtype=next(iter(w.values())).dtype)}

    def penalty(self, params: Any, context: Any) -> Any:
        return (params["pulled.a"] - 3) ** 2 / 2


@fr.value
class WithALeaf(fr.Plain):
    def visit(self, m: Any, base: fr.Recipe) -> Any:
        return base.adding(Pulled()), {}


def test_a_leaf_that_a_rule_adds_trains_travels_and_merges() -> None:
    """One step at 0.1 a visit: 1, 1.2, 1.38, 1.542, 1.6878; chains of four (12 examples more or less), three, three, three."""
    recipe = fr.Recipe(0.1, 32, steps=1)
    w = after(recipe, world(), 1, WithALeaf())
    assert 1.542 < float(w["pulled.a"]) < 1.6878
    loop, lanes = (after(recipe, world(p, dtype=torch.float64), 2, WithALeaf()) for p in (LOOP, LANES))
    assert gap(lanes, loop) < 1e-10
    check_algorithm(fr.FedAvg(fr.Uniform(count=4), replace(recipe, batch_size=8), WithALeaf()))


@fr.value
class Counting(fr.Rule):
    """Keeps how often it has been here."""

    def memory(self, w: Any) -> Any:
        return {"visits": torch.zeros(())}

    def end(self, params: Any, see: fr.ClientView, context: Any) -> fr.End:
        return fr.End(params, memory={"visits": see.memory["visits"] + 1})


@pytest.mark.parametrize("pick", [LANES, LOOP], ids=["lanes", "loop"])
def test_a_client_that_a_chain_visits_again_finds_what_it_kept_there(pick: Any) -> None:
    """Client 3 three times, client 5 twice in one chain; then client 3 once more in the next plan: 4 and 2."""
    fed = world(pick)
    recipe = fr.Recipe(batch_size=8, rules=(Counting(),))
    for clients in ([3, 5, 3, 5, 3], [3]):
        fr.Run(fed).train([fr.chain(fed.initial(), clients, recipe)], fr.Mean())
    assert {c: float(kept["Counting"]["visits"]) for c, kept in fed.memories.clients().items()} == {3: 4.0, 5: 2.0}
