"""One step of many models side by side: forward vmapped over stacked parameters, losses summed, one ordinary backward.

Lanes are independent, so the gradient of the sum gives every lane its own. Linear chains take the written-out step instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedrelay.engine import linear, optimizers
from fedrelay.engine.boundary import enters, name
from fedrelay.engine.visits import Site
from fedrelay.models.model import Model
from fedrelay.seam.recipe import SGD, Constant, Recipe, rebind

Leaves = Mapping[str, Tensor]
Gradients = tuple[dict[str, Tensor], Tensor]


def lane_operators() -> Any:
    """The lane operators, loaded when lanes first need them: registering operators brings half of torch's compiler along."""
    from fedrelay.engine.operators import lane_operators

    return lane_operators()


def before_capture() -> None:
    """Call this before a step is compiled. Which modules a thread is lent is asked of Python's threads, which no capture can
    look into; the graph holds none of them."""
    torch.compiler.assume_constant_result(Model._modules)


class Step:
    """The step of one kind of visit on one model: everything static is decided here, everything else is a tensor."""

    def __init__(self, site: Site, kind: Recipe, frozen: Leaves, precision: str = "float32") -> None:
        self.model, self.kind, self.frozen, self.precision = site.model, kind, frozen, precision
        for lazy in (n for n, p in vars(Model).items() if isinstance(p, cached_property)):
            getattr(site.model, lazy)  # what is first read inside a capture takes a lock, which cannot be captured
        self.enters = enters(kind)
        self.penalties = [r for r in kind.rules if r.has("penalty")]
        self.losses = [r for r in kind.rules if r.has("loss")]
        o = kind.optimizer
        bare = isinstance(o, SGD) and not o.momentum and not o.decay and not self.penalties
        generic = self.losses or precision != "float32" or frozen_inside(site, kind) or any(r.has("leaves") for r in kind.rules)
        layers = None if generic else linear.read(site.model, self.enters)
        self.linear = linear.LinearStep(layers, fused=bare) if layers else None

    def __call__(
        self,
        w: dict[str, Tensor],
        opt: Any,
        numbers: Leaves,
        x: Tensor,
        y: Tensor,
        mask: Tensor,
        context: Any,
        at: Tensor,
        total: Tensor,
    ) -> Tensor:
        """Move every lane that has a batch, in place; returns each lane's summed loss over its rows."""
        active = mask.any(1)
        rate = numbers["learning_rate"]
        if not isinstance(self.kind.schedule, Constant):
            rate = rate * rebind(self.kind.schedule, "schedule", numbers).factor(at.to(rate.dtype), total.to(rate.dtype))
        if self.linear:
            per_row = 1 / mask.sum(1).clamp(min=1).to(rate.dtype)
            made: Gradients = self.linear(w, x, y, mask, per_row * rate if self.linear.fused else per_row)
            grads, losses = made
            if self.linear.fused:
                return losses
            if self.penalties:
                for n, g in self.penalty_gradients(w, numbers, context).items():
                    grads[n] = grads[n] + g
        else:
            grads, losses = self.gradients(w, numbers, x, y, mask, context)
        optimizers.step(optimizers.bound(self.kind, numbers), w, grads, opt, rate, active)
        return losses

    def penalty(self, p: Leaves, numbers: Leaves, context: Any) -> Tensor:
        """The rules' penalties of one model."""
        added: Tensor = sum(rebind(r, name(r), numbers).penalty(p, context[name(r)]) for r in self.penalties)
        return added

    def penalty_gradients(self, w: Leaves, numbers: Leaves, context: Any) -> dict[str, Tensor]:
        live = {n: t.detach().requires_grad_() for n, t in w.items()}
        value = vmap(self.penalty)(live, dict(numbers), context).sum()
        grads = torch.autograd.grad(value, list(live.values()), materialize_grads=True)
        return dict(zip(live, grads, strict=True))

    def objective(self, p: Leaves, numbers: Leaves, x: Tensor, y: Tensor, mask: Tensor, context: Any) -> tuple[Tensor, Tensor]:
        """(what one lane descends, its summed loss over its rows)."""

        def forward(q: Leaves, rows: Tensor, until: str | None = None) -> Tensor:
            with torch.autocast(rows.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                made = self.model.forward({**self.frozen, **q}, rows, self.enters, until, training=True)
            return made.to(next(iter(p.values())).dtype)

        z = forward(p, x)
        data = torch.where(mask, self.model.criterion(z, y), 0).sum()
        loss = data / mask.sum().clamp(min=1)
        if self.penalties:
            loss = loss + self.penalty(p, numbers, context)
        for r in self.losses:
            loss = loss + rebind(r, name(r), numbers).loss(p, forward, x, y, mask, context[name(r)])
        return loss, data.detach()

    def gradients(
        self, w: Leaves, numbers: Leaves, x: Tensor, y: Tensor, mask: Tensor, context: Any
    ) -> tuple[dict[str, Tensor], Tensor]:
        live = {n: t.detach().requires_grad_() for n, t in w.items()}
        with lane_operators():
            loss, data = vmap(self.objective)(live, dict(numbers), x, y, mask, context)
        grads = torch.autograd.grad(loss.sum(), list(live.values()), materialize_grads=True)
        return dict(zip(live, grads, strict=True)), data


def frozen_inside(site: Site, kind: Recipe) -> bool:
    """Whether a leaf does not train that lies behind the place where the rows enter."""
    trained = site.trains(kind)
    return any(n not in trained for n in site.model.scope(site.model.between(enters(kind))))
