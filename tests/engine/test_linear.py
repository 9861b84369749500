"""The written-out step of linear layers computes what autograd does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedrelay.engine import linear
from fedrelay.models import Model
from fedrelay.models.model import squared_error

LANES, ROWS, FEATURES, CLASSES = 3, 5, 6, 4


def layers(*middle: nn.Module, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 5, bias=bias), *middle, nn.Linear(5, CLASSES, bias=bias))


CHAINS = {
    "logistic": {"model": nn.Linear(FEATURES, CLASSES)},
    "tanh": {"model": layers(nn.Tanh())},
    "relu": {"model": layers(nn.ReLU())},
    "sigmoid": {"model": layers(nn.Sigmoid())},
    "no activation": {"model": layers()},
    "no bias": {"model": layers(nn.Tanh(), bias=False)},
    "deep": {"model": layers(nn.Tanh(), nn.Linear(5, 7), nn.ReLU(), nn.Identity(), nn.Linear(7, 5), nn.Sigmoid())},
    "flattened": {"model": nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES))},
    "segments": {
        "body": nn.Sequential(nn.Linear(FEATURES, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 3))),
        "head": nn.Linear(3, CLASSES),
    },
}


def case(name: str, dtype: torch.dtype):
    """Stacked weights, rows, labels and a mask with a full lane, a partial one and an idle one."""
    g = torch.Generator().manual_seed(1)
    model = Model(CHAINS[name])
    w = {n: torch.randn(LANES, *t.shape, generator=g, dtype=dtype) for n, t in model.initial().items()}
    shape = (LANES, ROWS, 2, FEATURES // 2) if name == "flattened" else (LANES, ROWS, FEATURES)
    x, y = torch.randn(shape, generator=g, dtype=dtype), torch.randint(CLASSES, (LANES, ROWS), generator=g)
    return model, w, x, y, torch.arange(ROWS) < torch.tensor([[ROWS], [2], [0]])


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
def test_gradients_are_autograd_s(name: str, dtype: torch.dtype) -> None:
    model, w, x, y, mask = case(name, dtype)
    read = linear.read(model, None)
    assert read is not None
    scale = torch.tensor([0.3, 0.5, 0.7], dtype=dtype)
    grads, losses = linear.LinearStep(read, fused=False)(w, x, y, mask, scale)
    assert grads.keys() == w.keys()
    bound = 1e-13 if dtype is torch.float64 else 2e-6
    for lane in range(LANES):
        live = {n: t[lane].clone().requires_grad_() for n, t in w.items()}
        n = int(mask[lane].sum())
        loss = F.cross_entropy(model.forward(live, x[lane, :n]), y[lane, :n], reduction="sum")
        assert float(losses[lane]) == pytest.approx(float(loss.detach()), rel=10 * bound, abs=1e-300)
        true = dict(zip(live, torch.autograd.grad(scale[lane] * loss, [*live.values()]), strict=True))
        for leaf, theirs in true.items():
            assert float((grads[leaf][lane] - theirs).norm()) <= bound * float(theirs.norm()), leaf


@pytest.mark.parametrize("name", CHAINS)
def test_fused_is_a_step_of_plain_descent(name: str) -> None:
    """In place, and a lane without rows does not move by a bit."""
    model, w, x, y, mask = case(name, torch.float64)
    read, scale = linear.read(model, None), torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64)
    grads, losses = linear.LinearStep(read, fused=False)(w, x, y, mask, scale)
    new = {n: t.clone() for n, t in w.items()}
    fused_losses = linear.LinearStep(read, fused=True)(new, x, y, mask, scale)[1]
    assert torch.equal(losses, fused_losses)
    for n, t in w.items():
        assert torch.equal(new[n][2], t[2])
        assert torch.allclose(new[n], t - grads[n], rtol=1e-13, atol=1e-14)
        assert not torch.equal(new[n][1], t[1])


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
def test_bits_do_not_depend_on_the_lane(name: str, dtype: torch.dtype) -> None:
    """Seven equal lanes of odd sizes have equal gradients, bit for bit; so have they after steps in place."""
    model, w, x, y, _ = case(name, dtype)
    w, x, y = (
        {n: t[:1].repeat(7, *[1] * (t.ndim - 1)) for n, t in w.items()},
        x[:1].repeat(7, *[1] * (x.ndim - 1)),
        y[:1].repeat(7, 1),
    )
    mask, scale = torch.arange(ROWS).expand(7, ROWS) < 3, torch.full((7,), 0.3, dtype=dtype)
    read = linear.read(model, None)
    for _ in range(20):
        grads, losses = linear.LinearStep(read, fused=False)(w, x, y, mask, scale)
        linear.LinearStep(read, fused=True)(w, x, y, mask, scale)
        assert all(torch.equal(t, t[:1].expand_as(t)) for t in (*grads.values(), losses, *w.values()))


def test_large_outputs_do_not_overflow() -> None:
    """Logits of a thousand: exp would overflow without the maximum taken off first."""
    model, w, x, y, mask = case("logistic", torch.float32)
    w = {n: 1000 * t for n, t in w.items()}
    grads, losses = linear.LinearStep(linear.read(model, None), fused=False)(w, x, y, mask, torch.ones(LANES))
    assert losses.isfinite().all()
    assert all(t.isfinite().all() for t in grads.values())
    true = F.cross_entropy(model.forward({n: t[0] for n, t in w.items()}, x[0]), y[0], reduction="sum")
    assert float(losses[0]) == pytest.approx(float(true), rel=1e-5)


def test_rows_that_are_masked_may_hold_anything() -> None:
    """Padding is a copy of a true row in the engine, but nothing rests on that."""
    model, w, x, y, mask = case("tanh", torch.float64)
    step, scale = linear.LinearStep(linear.read(model, None), fused=False), torch.ones(LANES, dtype=torch.float64)
    grads, losses = step(w, x, y, mask, scale)
    wild = torch.where(mask[:, :, None], x, 1e6)
    others, wild_losses = step(w, wild, y, mask, scale)
    assert torch.equal(losses, wild_losses)
    assert all(torch.equal(grads[n], others[n]) for n in grads)


@pytest.mark.parametrize("enters", [None, "head"])
def test_rows_may_enter_at_a_segment(enters: str | None) -> None:
    model = Model(CHAINS["segments"])
    wanted = ["body.0.weight", "body.1.1.weight", "head.weight"] if enters is None else ["head.weight"]
    assert [layer.weight for layer in linear.read(model, enters)] == wanted


class Own(nn.Sequential):
    """A subclass may do anything in its forward."""


class OwnLinear(nn.Linear):
    pass


def parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, CLASSES)))


NOT_CHAINS = {
    "a convolution": nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, CLASSES)),
    "ends in an activation": layers(nn.Tanh()).append(nn.Tanh()),
    "begins with an activation": nn.Sequential(nn.Tanh(), nn.Linear(FEATURES, CLASSES)),
    "two activations": layers(nn.Tanh(), nn.Tanh()),
    "an unknown activation": layers(nn.GELU()),
    "dropout": layers(nn.Dropout()),
    "a norm": layers(nn.LayerNorm(5)),
    "a subclass of Sequential": Own(nn.Linear(FEATURES, CLASSES)),
    "a subclass of Linear": OwnLinear(FEATURES, CLASSES),
    "flatten in the middle": layers(nn.Flatten()),
    "flatten of other dimensions": nn.Sequential(nn.Flatten(2), nn.Linear(FEATURES, CLASSES)),
    "spectral norm": parametrized(),
    "nothing": nn.Sequential(),
}


@pytest.mark.parametrize("name", NOT_CHAINS)
def test_anything_else_is_not_read_as_a_chain(name: str) -> None:
    assert linear.read(Model(NOT_CHAINS[name]), None) is None


def test_another_criterion_is_not_read_as_a_chain() -> None:
    assert linear.read(Model(nn.Linear(FEATURES, CLASSES), squared_error), None) is None
    assert linear.read(Model(nn.Linear(FEATURES, CLASSES)), None) is not None
