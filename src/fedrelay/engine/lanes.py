"""The lane engine: chains side by side as one batched computation over stacked parameters.

A lane that finishes its visit takes the next one at once. Shapes come from the kind alone, ragged work is masked exactly, and
memory depends on the number of lanes only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrelay.engine import linear, optimizers
from fedrelay.engine.batches import batches, row_keys, total_steps
from fedrelay.engine.boundary import Prepared, begin, commit, end, prepares
from fedrelay.engine.steps import Step
from fedrelay.engine.visits import Boarding, Site
from fedrelay.seam.folds import stack
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import tmap

LEG = 1 << 17  # rows of a lane whose order is held at once: a long visit is laid out in legs of whole epochs


class Lanes:
    """``width`` models of one kind side by side."""

    def __init__(
        self,
        site: Site,
        kind: Recipe,
        frozen: Mapping[str, Tensor],
        first: Boarding,
        width: int,
        stride: int = 1,
        precision: str = "float32",
    ) -> None:
        self.site, self.kind, self.width, self.stride = site, kind, width, stride
        self.step = Step(site, kind, frozen, precision)
        self.scope = site.trains(kind)
        self.prepares = prepares(kind)
        start = first.trip.weights
        one = start[self.scope[0]]
        self.device, self.dtype = one.device, one.dtype
        self.w = {n: linear.aligned(start[n], width) for n in self.scope}
        used = [n for n in first.recipe.numbers if n == "learning_rate" or "." in n]
        self.table = torch.zeros((len(used), width), dtype=self.dtype, device=self.device)
        self.numbers = dict(zip(used, self.table, strict=True))
        self.context: Any = None
        self.pool_x, self.pool_y = site.data.train.x, site.data.train.y
        self.on: list[Boarding | None] = [None] * width
        self.prepared: list[Prepared | None] = [None] * width
        self.left, self.epoch, self.epochs = (np.zeros(width, np.int64) for _ in range(3))
        self.base = torch.arange(width, device=self.device)
        self.shape = -(-kind.rows // 4) * 4  # products take another way where rows do not fill a vector
        self.column = torch.arange(self.shape, device=self.device)
        self.state = torch.ones((7, width), dtype=torch.int64, device=self.device)
        self.sizes, self.batch, self.total, self.keys, self.done, self.seen, self.at = self.state
        self.at.zero_()
        self.loss = torch.zeros(width, dtype=self.dtype, device=self.device)
        self.rows = torch.zeros((width, 1, self.shape), dtype=torch.int64, device=self.device)
        self.counts = torch.zeros((width, 1), dtype=torch.int64, device=self.device)
        self.buffer: Tensor | None = None
        self.opt: Any = None
        self.capacity = 0

    def run(self, queue: deque[Boarding], more: Callable[[Sequence[Boarding]], None]) -> None:
        """Train the queue until it is empty. ``more`` is told which chains may go on, and may add to the queue."""
        while True:
            self.board(queue)
            if not any(self.on):
                return
            going = self.left[self.left > 0]
            steps = max(self.stride, int(going.min())) if len(going) else 0
            for _ in range(steps):
                self.advance()
            self.left = np.maximum(self.left - steps, 0)
            self._legs()
            ended = [g for g in range(self.width) if self.on[g] and self.left[g] == 0]
            if ended:
                more(self._leave(ended))

    # --- boarding

    def board(self, queue: deque[Boarding]) -> None:
        free = [g for g in range(self.width) if self.on[g] is None][: len(queue)]
        if not free:
            return
        batch = [queue.popleft() for _ in free]
        prepared = [Prepared(self.site, b) if self.prepares else None for b in batch]
        whole = len(free) == self.width
        slots = torch.tensor(free, device=self.device)

        def put(lanes: Tensor, new: Tensor) -> None:
            lanes.copy_(new) if whole else lanes.index_copy_(0, slots, new.to(lanes.dtype).contiguous())

        with torch.no_grad():
            starts = [b.trip.weights for b in batch]
            for n, t in self.w.items():
                put(t, stack(starts, n))
            context = begin(self.site, batch, prepared)
            if self.context is None:
                self.context = tmap(lambda t: t.new_zeros((self.width, *t.shape[1:])), context)
            tmap(put, self.context, context)
            distinct = {id(b.recipe): [b.recipe.numbers[p] for p in self.numbers] for b in batch}
            numbers = torch.tensor([distinct[id(b.recipe)] for b in batch], dtype=self.dtype, device=self.device)
            self.table.index_copy_(1, slots, numbers.T.contiguous())
            if self.opt is None:
                self.opt = optimizers.start(self.kind.optimizer, self.w, self.width)
            mine = dict(leaves_by_path(self.opt))  # the state of another optimizer or scope is none
            states = [s if (s := b.optimizer_state).keys() == mine.keys() else {} for b in batch]
            for part, lane in mine.items():
                fresh = lane.new_zeros(lane.shape[1:])
                put(lane, torch.stack([s.get(part, fresh) for s in states]))
            self._lay_out(free, slots, batch, prepared)

    def _lay_out(self, free: list[int], slots: Tensor, batch: list[Boarding], prepared: list[Prepared | None]) -> None:
        """Which rows these lanes will train on, in which order."""
        if self.prepares:
            lengths = [len(p.y) for p in prepared if p]
            self._pool(free, prepared, max(lengths))
        else:
            lengths = self.site.data.train.lengths[[b.client for b in batch]].tolist()
        recipes = [b.recipe for b in batch]
        plain = [[int(getattr(r, f)) for r in recipes] for f in ("batch_size", "epochs", "steps")]
        size, keys, rows, epochs, steps = torch.tensor([lengths, [b.key for b in batch], *plain], device=self.device)
        total = total_steps(size.clamp(min=1), rows, epochs, steps)
        per_epoch = (size.clamp(min=1) + rows - 1) // rows
        zero = torch.zeros_like(size)
        self.state.index_copy_(1, slots, torch.stack([size, rows, total, keys, zero, zero, zero]))
        self.loss[slots] = 0
        self.counts[slots] = 0  # a visit without a step has none, whatever trained here before
        total = torch.where(size > 0, total, 0)
        self.epoch[free] = 0
        self.epochs[free] = ((total + per_epoch - 1) // per_epoch).numpy(force=True)
        for g, b, p in zip(free, batch, prepared, strict=True):
            self.on[g], self.prepared[g] = b, p
        self.left[free] = 0
        self._legs(free)

    def _legs(self, lanes: Sequence[int] | None = None) -> None:
        """Lay out the next epochs of lanes that have come to the end of those laid out."""
        lanes = [
            g
            for g in (range(self.width) if lanes is None else lanes)
            if self.on[g] and self.left[g] == 0 and self.epoch[g] < self.epochs[g]
        ]
        at = {g: int(self.epoch[g]) for g in lanes}  # as it was: a lane laid out here is not laid out again with the next ones
        for first in sorted(set(at.values())):
            some = [g for g in lanes if at[g] == first]
            which: Any = slice(None) if len(some) == self.width else torch.tensor(some, device=self.device)
            size, batch, total = self.sizes[which], self.batch[which], self.total[which]
            per_epoch = (size + batch - 1) // batch
            epochs = int(max(1, min(LEG // (int(per_epoch.max()) * self.shape), (self.epochs[some] - first).max())))
            laid = batches(self.keys[which], size, batch, total, first, epochs, self.shape)
            steps = laid.rows.shape[1]
            if steps >= self.rows.shape[1]:
                grown = self.rows.new_zeros((self.width, steps + 1, self.shape))
                counts = self.counts.new_zeros((self.width, steps + 1))
                grown[:, : self.rows.shape[1]], counts[:, : self.counts.shape[1]] = self.rows, self.counts
                self.rows, self.counts = grown, counts
            self.rows[which, :steps] = self._pool_rows(some, laid.rows)
            self.counts[which, :steps] = laid.counts
            self.counts[which, steps:] = 0
            self.rows[which, steps:] = self.rows[which, :1]  # an idle lane looks at a row of its own
            self.at[which] = 0
            self.left[some] = (laid.counts > 0).sum(1).numpy(force=True)
            self.epoch[some] = first + epochs

    def _pool_rows(self, lanes: list[int], places: Tensor) -> Tensor:
        if self.prepares:
            return places + (torch.tensor(lanes, device=self.device) * self.capacity).view(-1, 1, 1)
        part = self.site.data.train
        clients = np.array([b.client for b in (self.on[g] for g in lanes) if b])
        offsets = torch.as_tensor(part.starts[clients], device=self.device)
        return part.index[places + offsets.view(-1, 1, 1)].long()

    def _pool(self, free: list[int], prepared: list[Prepared | None], longest: int) -> None:
        """Prepared rows lie in a pool of their own: a stretch per lane."""
        first = next(p for p in prepared if p)
        if self.capacity < longest:
            before, self.capacity = self.capacity, longest
            x = first.x.new_zeros((self.width, longest, *first.x.shape[1:]))
            y = first.y.new_zeros((self.width, longest, *first.y.shape[1:]))
            if before:
                x[:, :before], y[:, :before] = (
                    self.pool_x.view(self.width, before, *x.shape[2:]),
                    self.pool_y.view(self.width, before, *y.shape[2:]),
                )
                moved = torch.arange(self.width, device=self.device).view(-1, 1, 1) * (longest - before)
                self.rows = self.rows + moved
            self.pool_x, self.pool_y = x.flatten(0, 1), y.flatten(0, 1)
        for g, p in zip(free, prepared, strict=True):
            if p is not None:
                at = g * self.capacity
                self.pool_x[at : at + len(p.y)], self.pool_y[at : at + len(p.y)] = p.x.detach(), p.y

    # --- training

    def advance(self) -> None:
        """One step of every lane that has one left."""
        lane = self.base * self.rows.shape[1] + self.at
        rows = self.rows.view(-1, self.shape).index_select(0, lane).view(-1)
        count = self.counts.view(-1).index_select(0, lane)
        mask = self.column < count[:, None]
        x = self._inputs(rows).unflatten(0, (self.width, self.shape))
        y = self.pool_y.index_select(0, rows).unflatten(0, (self.width, self.shape))
        self.loss += self.step(self.w, self.opt, self.numbers, x, y, mask, self.context, self.done, self.total)
        self.seen += count
        went = (count > 0).long()
        self.done += went
        self.at += went

    def _inputs(self, rows: Tensor) -> Tensor:
        if self.prepares:
            return self.pool_x.index_select(0, rows)
        if self.site.data.transform is None and self.pool_x.dtype == self.dtype:
            if self.buffer is None:  # reused: fresh pages cost more than the copy
                self.buffer = self.pool_x.new_empty((len(rows), *self.pool_x.shape[1:]))
            return torch.index_select(self.pool_x, 0, rows, out=self.buffer)
        keys = row_keys(self.keys, self.done, self.shape).view(-1) if self.site.data.augments else None
        return self.site.data.inputs(self.pool_x.index_select(0, rows), keys)

    def try_end(self) -> None:
        """Whether the rules' ends can be computed in lanes; nothing is closed."""
        some = [g for g in range(self.width) if self.on[g]]
        batch = [b for b in self.on if b]
        with torch.no_grad():
            w, context = ({n: t[some] for n, t in self.w.items()}, tmap(lambda t: t[some], self.context))
            end(self.site, batch, [self.prepared[g] for g in some], w, context, self.done[some])

    # --- leaving

    def _leave(self, ended: list[int]) -> list[Boarding]:
        """Close the visits in these lanes; the ones whose chains may go on are returned."""
        batch = [b for b in (self.on[g] for g in ended) if b]
        prepared = [self.prepared[g] for g in ended]
        with torch.no_grad():
            if len(ended) == self.width:
                w, context = {n: t.clone() for n, t in self.w.items()}, self.context
                steps, losses = self.done.clone(), self.loss / self.seen.clamp(min=1)
            else:
                slots = torch.tensor(ended, device=self.device)
                w, context = {n: t[slots] for n, t in self.w.items()}, tmap(lambda t: t[slots], self.context)
                steps, losses = self.done[slots], self.loss[slots] / self.seen[slots].clamp(min=1)
            if len(ended) == self.width and any(r.has("end") for r in self.kind.rules):
                context = tmap(lambda t: t.clone(), context)  # what a rule keeps of it must not be the lanes' own
            made = end(self.site, batch, prepared, w, context, steps)
            if self.kind.optimizer_state != "fresh":
                made = made.with_optimizer(self.kind, {p: t[ended].clone() for p, t in leaves_by_path(self.opt)})
            goes_on = commit(self.site, batch, made, steps, losses)
        for g in ended:
            self.on[g] = self.prepared[g] = None
        return [b for b, on in zip(batch, goes_on, strict=True) if on]


def leaves_by_path(state: Mapping[str, Mapping[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """An optimizer's state as flat leaves."""
    return [(f"{part}/{n}", t) for part, tree in state.items() for n, t in tree.items()]


def cannot(site: Site, kind: Recipe, frozen: Mapping[str, Tensor], b: Boarding) -> str | None:
    """Why this kind of visit cannot train in lanes, in one sentence; None if it can."""
    if site.model.moody:
        return "this model trains in the loop engine: its BatchNorm or dropout layers cannot be vectorised (GroupNorm can)"
    try:
        lanes = Lanes(site, kind, frozen, b, 2)
        lanes.board(deque([b]))
        lanes.advance()
        lanes.try_end()
    except (
        RuntimeError,
        ValueError,
        TypeError,
        NotImplementedError,
        LookupError,
    ) as e:  # whatever it is, the loop will say it too
        rules = "+".join(type(r).__name__ for r in kind.rules) or "no rule"
        said = str(e).strip().splitlines()[0]
        return f"this kind of visit ({rules}) trains in the loop engine, because it cannot be vectorised: {said}"
    return None
