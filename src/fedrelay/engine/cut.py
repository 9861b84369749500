"""Split learning really cut: the device's half and the server's half share two messages a step, and each has an optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedrelay.engine import optimizers
from fedrelay.engine.boundary import Staged, name
from fedrelay.engine.loop import Visiting
from fedrelay.seam.codec import unwire, wire


class CutVisiting(Visiting):
    """A visit whose model lies on two machines: what crosses the cut passes through the wire codec and is counted."""

    crossed = 0

    def begin(self) -> None:
        super().begin()
        segments = list(self.site.model.segments)
        self.at = self.recipe.cut or segments[-1]
        if needs := [name(r) for r in self.recipe.rules if r.has("loss")]:
            raise ValueError(
                f"{needs[0]} needs the whole model, so it cannot be used across a cut: train without `cut`, or without {needs[0]}"
            )
        below = self.site.model.scope(segments[: segments.index(self.at)])
        self.device, self.server = ({n: p for n, p in self.params.items() if (n in below) is side} for side in (True, False))
        halves = [list(half.values()) for half in (self.device, self.server) if half]
        both = Both([optimizers.plain(self.recipe, half) for half in halves])
        self.optimizer = both  # type: ignore[assignment]
        self.resume(both.halves)

    def step(self, x: Tensor, y: Tensor) -> None:
        model = self.site.model
        w = {**self.frozen, **self.buffers}
        smashed = model.forward({**w, **self.device}, x, self.enters, self.at, training=True)
        arrived, labels = self.send((smashed.detach(), y))
        arrived.requires_grad_()
        losses = model.criterion(model.forward({**w, **self.server}, arrived, self.at, training=True), labels)
        self.loss_sum += float(losses.detach().sum())
        (losses.mean() + self.penalty(self.server)).backward()
        (back,) = self.send((arrived.grad,))
        penalty = self.penalty(self.device)
        also = [penalty] if isinstance(penalty, Tensor) and penalty.requires_grad else []
        if smashed.requires_grad or also:
            outputs = [*([smashed] if smashed.requires_grad else []), *also]
            torch.autograd.backward(outputs, [*([back] if smashed.requires_grad else []), *([None] * len(also))])

    def penalty(self, half: dict[str, Tensor]) -> Any:
        return sum(r.penalty(half, self.context[name(r)]) for r in self.recipe.rules) if half else 0.0

    def send(self, tensors: tuple[Tensor | None, ...]) -> Any:
        self.crossed += sum(t.nbytes for t in tensors if t is not None)
        return unwire(wire(tensors))

    def close(self, reason: str | None, made: Staged | None, cut: int = 0) -> bool:
        return super().close(reason, made, self.crossed)


class Both:
    """One optimizer per half, driven as one."""

    def __init__(self, halves: list[torch.optim.Optimizer]) -> None:
        self.halves = halves

    @property
    def param_groups(self) -> list[Any]:
        return [g for o in self.halves for g in o.param_groups]

    def zero_grad(self) -> None:
        for o in self.halves:
            o.zero_grad()

    def step(self) -> None:
        for o in self.halves:
            o.step()
