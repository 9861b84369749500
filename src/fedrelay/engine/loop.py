"""The loop engine: plain PyTorch, one visit after another, with torch's own optimizers. This is what a visit means.

It takes any module. BatchNorm's statistics travel with the model or stay on the client; dropout draws from the visit's place.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor, nn

from fedrelay.engine import optimizers
from fedrelay.engine.batches import batches, row_keys
from fedrelay.engine.boundary import Prepared, Staged, alone, commit, enters, name, prepares
from fedrelay.engine.visits import Boarding, Outcome, Site
from fedrelay.seam.places import child
from fedrelay.seam.rules import ClientView, End

BUFFERS = "buffers"  # under this name BatchNorm's statistics are kept on a client that keeps its own
DROPOUT = 2  # the stream of a visit's key that dropout draws from


class Visiting:
    """One recipe of one visit, in plain PyTorch."""

    def __init__(self, site: Site, b: Boarding, channels_last: bool = False, precision: str = "float32") -> None:
        self.site, self.b, self.recipe, self.precision = site, b, b.recipe, precision
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.rows = Prepared(site, b) if prepares(b.recipe) else None
        self.received = dict(b.trip.weights.items())
        self.enters = enters(b.recipe)
        self.scope = site.trains(b.recipe)
        self.buffers = {n: self.received[n].clone() for n in site.model.buffers(b.recipe.scope)}
        if site.buffers == "local" and BUFFERS in b.memory:
            self.buffers = {n: t.clone() for n, t in b.memory[BUFFERS].items()}
        self.frozen = {n: t for n, t in self.received.items() if n not in self.scope}
        self.frozen |= site.model.counters()  # every visit counts from the start: no visit hears of another through a module
        self.size = len(self.rows.y) if self.rows else int(site.data.train.lengths[b.client])
        self.steps = self.seen = 0
        self.loss_sum = 0.0

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The visit's batches as the model sees them, in the order that its key says."""
        r, device = self.recipe, next(iter(self.received.values())).device
        size, batch = torch.tensor([self.size], device=device), torch.tensor([int(r.batch_size)], device=device)
        per_epoch = -(-self.size // int(r.batch_size))
        total = int(r.steps) or int(r.epochs) * per_epoch
        key = torch.tensor([self.b.key], device=device)
        for epoch in range(-(-total // per_epoch) if self.size else 0):
            laid = batches(key, size, batch, torch.tensor([total], device=device), epoch, 1, r.shape)
            for rows, n in zip(laid.rows[0], laid.counts[0].tolist(), strict=True):
                if n:
                    yield self.inputs(rows[:n], row_keys(key, torch.tensor([self.steps], device=device), r.shape)[0, :n])

    def inputs(self, places: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        if self.rows:
            return self.rows.x[places].detach(), self.rows.y[places]
        part = self.site.data.train
        rows = part.index[places + int(part.starts[self.b.client])].long()
        x = self.site.data.inputs(part.x[rows], keys)
        return (x.contiguous(memory_format=self.layout) if x.ndim == 4 else x), part.y[rows]

    def see(self, rule: Any, steps: int = 0) -> ClientView:
        return alone(self.site, rule, self.b, self.rows, steps, rule.reads_rows)

    def begin(self) -> None:
        with torch.no_grad():
            self.context = {name(r): r.begin(self.see(r)) for r in self.recipe.rules}
        self.params = {n: self.own(self.received[n]).requires_grad_() for n in self.scope}
        self.optimizer = optimizers.plain(self.recipe, list(self.params.values()))
        self.resume([self.optimizer])

    def resume(self, halves: list[torch.optim.Optimizer]) -> None:
        """Go on from an optimizer state that travelled or stayed."""
        self.halves = halves
        optimizers.load(halves, self.params, self.b.optimizer_state)

    def own(self, t: Tensor) -> Tensor:
        return t.detach().clone(memory_format=self.layout if t.ndim == 4 else torch.contiguous_format)

    def forward(self, params: Any, x: Tensor, until: str | None = None) -> Tensor:
        w = {**self.frozen, **self.buffers, **params}
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            z = self.site.model.forward(w, x, self.enters, until, training=True)
        return z.to(next(iter(self.params.values())).dtype)

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of the batch plus what the rules add."""
        losses = self.site.model.criterion(self.forward(self.params, x), y)
        self.loss_sum += float(losses.detach().sum())
        loss = losses.mean()
        everything = torch.ones(len(y), dtype=torch.bool, device=y.device)
        for r in self.recipe.rules:
            c = self.context[name(r)]
            loss = loss + r.penalty(self.params, c) + r.loss(self.params, self.forward, x, y, everything, c)
        return loss

    def step(self, x: Tensor, y: Tensor) -> None:
        self.objective(x, y).backward()

    def train(self, most: int | None = None) -> str | None:
        """Every step of the visit (at most ``most``); why it failed, or None."""
        fixed = self.size and any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for s in self.site.model.segments.values() for m in s.modules()
        )
        if fixed and 1 in (self.size % int(self.recipe.batch_size), int(self.recipe.batch_size)):
            return "BatchNorm cannot train on a batch of one example: choose another batch size, or GroupNorm"
        total = int(self.recipe.steps) or int(self.recipe.epochs) * -(-self.size // int(self.recipe.batch_size))
        for x, y in self.batches():
            for group in self.optimizer.param_groups:
                group["lr"] = self.recipe.learning_rate * self.recipe.schedule.factor(float(self.steps), float(total))
            self.optimizer.zero_grad()
            self.step(x, y)
            self.optimizer.step()
            self.steps += 1
            self.seen += len(y)
            if self.steps == most:
                break
        return None

    def end(self) -> Staged:
        """What the rules make of the trained leaves, each seeing what the one before handed on."""
        params: Any = {n: p.detach().contiguous() for n, p in self.params.items()}
        memory, up, along = {}, {}, {}
        for r in self.recipe.rules:
            made: End = r.end(params, self.see(r, self.steps), self.context[name(r)])
            params = made.weights
            up.update({k: _lone(u) for k, u in made.up.items()})
            if made.memory is not None:
                memory[name(r)] = _lone(made.memory)
            if made.along is not None:
                along[name(r)] = _lone(made.along)
        if self.buffers and self.site.buffers == "local":
            memory[BUFFERS] = _lone(self.buffers)
        elif self.buffers:
            params = {**params, **self.buffers}
        staged = Staged(_lone(params), memory, up, along)
        if self.recipe.optimizer_state == "fresh":
            return staged
        return staged.with_optimizer(self.recipe, _lone(optimizers.dump(self.halves, self.params)))

    def run(self) -> tuple[str | None, Staged | None]:
        with contextlib.ExitStack() as stack:
            if self.site.draws:
                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.default_generator.manual_seed(int(child(torch.tensor([self.b.key]), DROPOUT)) & (1 << 63) - 1)
            self.begin()
            reason = self.train()
        with torch.no_grad():
            return reason, self.end() if reason is None else None

    def close(self, reason: str | None, made: Staged | None, cut: int = 0) -> bool:
        """Commit; True when the chain may go on."""
        if made is None:
            return self.b.trip.close(self.b.which, Outcome(self.b.trip.weights, float("nan"), self.steps, reason))
        loss = torch.tensor([self.loss_sum / max(self.seen, 1)], dtype=torch.float64)
        return commit(self.site, [self.b], made, torch.tensor([self.steps]), loss, [cut])[0]


Visited = tuple[Visiting, str | None, Staged | None]


def _lone(tree: Any) -> dict[str, Tensor]:
    return {n: t.unsqueeze(0) for n, t in tree.items()}


class Loop:
    """Visits one after another, or by several workers with one thread each (beside other load, and where the operators of a
    small model do not fill two threads, that is faster)."""

    def __init__(
        self,
        site: Site,
        workers: int = 1,
        channels_last: bool = False,
        precision: str = "float32",
        visiting: type[Visiting] = Visiting,
    ) -> None:
        self.site, self.workers, self.channels_last, self.precision, self.visiting = (
            site,
            workers,
            channels_last,
            precision,
            visiting,
        )

    def run(self, queue: deque[Boarding], more: Callable[[Sequence[Boarding]], None]) -> None:
        """Train the queue until it is empty. ``more`` is told which chains may go on, and may add to the queue."""
        if self.workers == 1 or self.site.draws:  # torch has one generator for all threads
            while queue:
                self._close(self._train(queue.popleft()), more)
            return
        with ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            going: set[Future[Any]] = set()
            while queue or going:
                while queue and len(going) <= self.workers:  # one waits, so that no worker does
                    going.add(pool.submit(self._train, queue.popleft()))
                done, going = wait(going, return_when=FIRST_COMPLETED)
                for f in done:
                    self._close(f.result(), more)

    def _train(self, b: Boarding) -> Visited:
        v = self.visiting(self.site, b, self.channels_last, self.precision)
        reason, made = v.run()
        return v, reason, made

    def _close(self, visited: Visited, more: Callable[[Sequence[Boarding]], None]) -> None:
        v, reason, made = visited
        with torch.no_grad():
            goes_on = v.close(reason, made)
        more([v.b] if goes_on else [])
