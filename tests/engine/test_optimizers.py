"""The stacked optimizers are torch's, lane by lane, and a masked step is no step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedrelay.engine import optimizers
from fedrelay.seam.recipe import SGD, Adam, AdamW, Cosine, Exponential, Recipe, numeric

LANES, STEPS = 4, 12
SHAPES = {"a.weight": (3, 2), "a.bias": (3,), "point": ()}
OPTIMIZERS = {
    "SGD": SGD(),
    "SGD, decay": SGD(decay=0.1),
    "momentum": SGD(momentum=0.9),
    "momentum, decay": SGD(momentum=0.5, decay=0.1),
    "Nesterov": SGD(momentum=0.9, nesterov=True),
    "Nesterov, decay": SGD(momentum=0.9, decay=0.05, nesterov=True),
    "Adam": Adam(),
    "Adam, decay": Adam(decay=0.1),
    "AdamW": AdamW(),
    "AdamW, no decay": AdamW(decay=0.0),
}


def numbers_of(recipe: Recipe, lane: int) -> dict[str, float]:
    """The recipe's numbers, a little different in every lane."""
    near_one = {"optimizer.momentum", "optimizer.beta1", "optimizer.beta2"}
    return {p: v * (1 - 0.1 * lane if p in near_one else 1 + 0.5 * lane) for p, v in recipe.numbers.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
def test_every_lane_is_torch_s_own_optimizer(name: str, dtype: torch.dtype) -> None:
    """Random gradients, a random half of the lanes at a time; rates, momenta, betas and decays of their own."""
    g = torch.Generator().manual_seed(0)
    recipe = replace(Recipe(0.05), optimizer=OPTIMIZERS[name])
    own = [recipe.bind(numbers_of(recipe, lane)) for lane in range(LANES)]
    numbers = {p: torch.tensor([r.numbers[p] for r in own], dtype=dtype) for p in recipe.numbers}
    w = {n: torch.randn(LANES, *shape, generator=g, dtype=dtype) for n, shape in SHAPES.items()}
    state = optimizers.start(recipe.kind.optimizer, w, LANES)
    bound = optimizers.bound(recipe.kind, numbers)
    params = [[torch.nn.Parameter(t[lane].clone()) for t in w.values()] for lane in range(LANES)]
    theirs = [optimizers.plain(r, p) for r, p in zip(own, params, strict=True)]
    moved = torch.zeros(LANES, dtype=torch.int64)
    for _ in range(STEPS):
        active = torch.rand(LANES, generator=g) < 0.5
        grads = {n: torch.randn(t.shape, generator=g, dtype=dtype) for n, t in w.items()}
        before = {n: t.clone() for n, t in w.items()}
        kept = {part: {n: t.clone() for n, t in tree.items()} for part, tree in state.items()}
        optimizers.step(bound, w, grads, state, numbers["learning_rate"], active)
        for lane in range(LANES):
            if active[lane]:
                for p, t in zip(params[lane], grads.values(), strict=True):
                    p.grad = t[lane].clone()
                theirs[lane].step()
                moved[lane] += 1
                assert any(not torch.equal(t[lane], before[n][lane]) for n, t in w.items())
            else:  # bit for bit: the model, the moments and the count
                assert all(torch.equal(t[lane], before[n][lane]) for n, t in w.items())
                assert all(torch.equal(t[lane], kept[part][n][lane]) for part, tree in state.items() for n, t in tree.items())
    assert 0 < int(moved.min()) < STEPS
    bound_on = 1e-13 if dtype is torch.float64 else 2e-6
    for lane in range(LANES):
        for p, t in zip(params[lane], w.values(), strict=True):
            assert float((t[lane] - p).detach().norm() / p.detach().norm()) < bound_on


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_masked_lane_may_hold_anything(name: str) -> None:
    """An idle lane's gradient is of no account, not even if it is not a number."""
    recipe = replace(Recipe(0.05), optimizer=OPTIMIZERS[name])
    numbers = {p: torch.full((2,), float(v)) for p, v in recipe.numbers.items()}
    w = {"a": torch.ones(2, 3)}
    state = optimizers.start(recipe.kind.optimizer, w, 2)
    for _ in range(3):
        grads = {"a": torch.tensor([[1.0] * 3, [torch.nan] * 3])}
        optimizers.step(
            optimizers.bound(recipe.kind, numbers), w, grads, state, numbers["learning_rate"], torch.tensor([True, False])
        )
    assert torch.equal(w["a"][1], torch.ones(3))
    assert w["a"].isfinite().all()
    assert (w["a"][0] < 1).all()


def test_what_the_kind_switches_off_is_not_computed() -> None:
    """No velocity without momentum, and no decay that multiplies by a tensor of zeros."""
    plain = Recipe()
    assert optimizers.start(plain.kind.optimizer, {"a": torch.ones(2, 3)}, 2) == {}
    numbers = {p: torch.zeros(2) for p in plain.numbers}
    assert optimizers.bound(plain.kind, numbers).decay == 0.0
    assert isinstance(optimizers.bound(replace(plain, optimizer=SGD(decay=0.1)).kind, numbers).decay, torch.Tensor)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_goes_on_where_it_was(name: str) -> None:
    """Three steps, a state through our names, three steps more: six steps. A fresh state is zeros."""
    recipe = replace(Recipe(0.05), optimizer=OPTIMIZERS[name])
    g = torch.Generator().manual_seed(0)
    grads = [{n: torch.randn(s, generator=g) for n, s in SHAPES.items()} for _ in range(6)]
    start = {n: torch.randn(s, generator=g) for n, s in SHAPES.items()}

    def go(params, optimizer, some):
        for grad in some:
            for n, p in params.items():
                p.grad = grad[n].clone()
            optimizer.step()

    whole = {n: torch.nn.Parameter(t.clone()) for n, t in start.items()}
    go(whole, optimizers.plain(recipe, [*whole.values()]), grads)
    first = {n: torch.nn.Parameter(t.clone()) for n, t in start.items()}
    optimizer = optimizers.plain(recipe, [*first.values()])
    fresh = optimizers.dump([optimizer], first)
    assert not any(t.any() for t in fresh.values())
    go(first, optimizer, grads[:3])
    state = optimizers.dump([optimizer], first)
    assert state.keys() == fresh.keys()
    second = {n: torch.nn.Parameter(t.detach().clone()) for n, t in first.items()}
    other = optimizers.plain(recipe, [*second.values()])
    optimizers.load([other], second, state)
    optimizers.load([other], second, {"velocity/elsewhere": torch.ones(3)})  # nobody's, so it changes nothing
    go(second, other, grads[3:])
    assert all(torch.equal(whole[n], p) for n, p in second.items())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
def test_bits_do_not_depend_on_the_lane(name: str, dtype: torch.dtype) -> None:
    """Fifty equal lanes stay equal bit for bit: a processor's vectors take the first 48, and the last two are a rest."""
    g = torch.Generator().manual_seed(0)
    recipe = replace(Recipe(0.05), optimizer=OPTIMIZERS[name])
    numbers = {p: torch.full((50,), float(v), dtype=dtype) for p, v in recipe.numbers.items()}
    w = {n: torch.ones(50, *s, dtype=dtype) for n, s in SHAPES.items()}
    state, bound = optimizers.start(recipe.kind.optimizer, w, 50), optimizers.bound(recipe.kind, numbers)
    for _ in range(60):
        grads = {n: torch.randn(s, generator=g, dtype=dtype).expand(50, *s).clone() for n, s in SHAPES.items()}
        optimizers.step(bound, w, grads, state, numbers["learning_rate"], torch.ones(50, dtype=torch.bool))
    assert all(torch.equal(t, t[:1].expand_as(t)) for t in w.values())


@pytest.mark.parametrize("schedule", [Cosine(0.1), Exponential(0.9), Exponential(0.0)], ids=["cosine", "exponential", "at once"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
def test_a_schedule_in_lanes_is_the_loop_s(schedule: Cosine | Exponential, dtype: torch.dtype) -> None:
    """The same factor for plain numbers and for fifty lanes, all of which have the same bits."""
    [field] = numeric(type(schedule))
    lanes = replace(schedule, **{field: torch.full((50,), getattr(schedule, field), dtype=dtype)})
    for step in range(0, 400, 7):
        made = lanes.factor(*(torch.full((50,), float(n), dtype=dtype) for n in (step, 400)))
        assert torch.equal(made, made[:1].expand(50))
        assert float(made[0]) == pytest.approx(schedule.factor(float(step), 400.0), rel=1e-5, abs=1e-7)
