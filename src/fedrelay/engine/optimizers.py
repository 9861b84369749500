"""Optimizers for many models side by side: as torch.optim computes them, in place, with a rate and state per lane.

A masked step is no step: momentum, moments, step count, weight decay and the model of a lane without a batch do not move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedrelay.seam.recipe import OFF_AT_ZERO, SGD, Adam, AdamW, Optimizer, Recipe, rebind

Stacked = dict[str, Tensor]


def beside(number: Any, t: Tensor) -> Any:
    """A number per lane, shaped to multiply a stacked leaf."""
    return number.view(-1, *[1] * (t.ndim - 1)) if isinstance(number, Tensor) and number.ndim else number


def start(optimizer: Optimizer, w: Mapping[str, Tensor], lanes: int) -> dict[str, Stacked]:
    """The state before the first step, for leaves that are stacked already."""
    zeros = {n: torch.zeros_like(t) for n, t in w.items()}
    if isinstance(optimizer, SGD):
        return {"velocity": zeros} if optimizer.momentum else {}
    one = next(iter(w.values()))
    return {"mean": zeros, "square": {n: torch.zeros_like(t) for n, t in w.items()}, "count": {"": one.new_zeros(lanes)}}


def bound(kind: Recipe, numbers: Mapping[str, Any]) -> Optimizer:
    """The kind's optimizer with a number per lane; what the kind switches off stays a plain 0."""
    off = [p for p in OFF_AT_ZERO if not getattr(kind.optimizer, p.partition(".")[2], 1)]
    made: Optimizer = rebind(kind.optimizer, "optimizer", {p: v for p, v in numbers.items() if p not in off})
    return made


def step(optimizer: Optimizer, w: Stacked, g: Mapping[str, Tensor], s: dict[str, Stacked], rate: Tensor, active: Tensor) -> None:
    """One step of every active lane, in place."""
    with torch.no_grad():
        if isinstance(optimizer, SGD):
            _sgd(optimizer, w, g, s, rate, active)
        else:
            _adam(optimizer, w, g, s, rate, active)


def _sgd(o: SGD, w: Stacked, g: Mapping[str, Tensor], s: dict[str, Stacked], rate: Tensor, active: Tensor) -> None:
    decays = isinstance(o.decay, Tensor)
    for n, t in w.items():
        d = g[n] + beside(o.decay, t) * t if decays else g[n]
        if s:
            v, on = s["velocity"][n], beside(active, t)
            v.copy_(torch.where(on, beside(o.momentum, t) * v + d, v))
            d = d + beside(o.momentum, t) * v if o.nesterov else v
        t.sub_(torch.where(beside(active, t), beside(rate, t) * d, torch.zeros_like(t)))


def _adam(o: Adam | AdamW, w: Stacked, g: Mapping[str, Tensor], s: dict[str, Stacked], rate: Tensor, active: Tensor) -> None:
    count = s["count"][""]
    count.add_(active.to(count.dtype))
    t = count.clamp(min=1)
    first, second = _corrected(o.beta1, t), _corrected(o.beta2, t).sqrt()
    for n, p in w.items():
        on, d = beside(active, p), g[n]
        m, v = s["mean"][n], s["square"][n]
        if isinstance(o, Adam):
            d = d + beside(o.decay, p) * p
        m.copy_(torch.where(on, beside(o.beta1, p) * m + (1 - beside(o.beta1, p)) * d, m))
        v.copy_(torch.where(on, beside(o.beta2, p) * v + (1 - beside(o.beta2, p)) * d * d, v))
        change = beside(rate / first, p) * m / (v.sqrt() / beside(second, p) + beside(o.eps, p))
        if isinstance(o, AdamW):
            change = change + beside(rate, p) * beside(o.decay, p) * p
        p.sub_(torch.where(on, change, torch.zeros_like(p)))


def _corrected(beta: Any, t: Tensor) -> Tensor:
    """1 - beta^t. (Not by a power: its bits depend on where in the tensor, that is in which lane, a number lies.)"""
    return -torch.expm1(t * torch.as_tensor(beta, dtype=t.dtype, device=t.device).log())


def plain(recipe: Recipe, params: list[Tensor]) -> torch.optim.Optimizer:
    """torch's own optimizer for one model: what the stacked ones must equal."""
    o, rate = recipe.optimizer, recipe.learning_rate
    if isinstance(o, SGD):
        return torch.optim.SGD(params, rate, momentum=o.momentum, weight_decay=o.decay, nesterov=o.nesterov)
    cls = torch.optim.Adam if isinstance(o, Adam) else torch.optim.AdamW
    return cls(params, rate, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.decay)


TORCH_NAMES = {"velocity": "momentum_buffer", "mean": "exp_avg", "square": "exp_avg_sq"}


def load(halves: list[torch.optim.Optimizer], params: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Give torch's optimizers a state in our names. An empty one, or another optimizer's or scope's, leaves them fresh."""
    if not state or state.keys() != dump(halves, params).keys():
        return
    for half in halves:
        mine = {id(p) for group in half.param_groups for p in group["params"]}
        for n, p in params.items():
            if id(p) in mine:
                known = [(ours, theirs) for ours, theirs in TORCH_NAMES.items() if f"{ours}/{n}" in state]
                half.state[p] = {theirs: state[f"{ours}/{n}"].clone() for ours, theirs in known}
                if "count/" in state:
                    half.state[p]["step"] = state["count/"].clone().float()


def dump(halves: list[torch.optim.Optimizer], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of torch's optimizers in our names; before the first step it is zero."""
    states = {id(p): half.state.get(p, {}) for half in halves for group in half.param_groups for p in group["params"]}
    adaptive = "betas" in halves[0].defaults
    kept = ("mean", "square") if adaptive else ("velocity",) if halves[0].defaults["momentum"] else ()
    out: dict[str, Tensor] = {}
    for ours in kept:
        for n, p in params.items():
            t = states[id(p)].get(TORCH_NAMES[ours])
            out[f"{ours}/{n}"] = torch.zeros_like(p).detach() if t is None else t.detach().clone()
    if adaptive:
        first, p = next(iter(states.values())), next(iter(params.values()))
        out["count/"] = torch.as_tensor(first.get("step", 0)).to(p).clone()
    return out
