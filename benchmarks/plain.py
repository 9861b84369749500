"""What the product is compared with: whole FedAvg rounds in plain PyTorch, written as well as a plain loop can be.

A round is: draw a cohort, shuffle, train every client from the server's weights, merge by examples. No evaluation.

- ``SGDLoop``: the loop of every tutorial, an ``nn.Module`` and ``torch.optim.SGD``.
- ``GradientLoop``: the fastest plain loop that we know: ``torch.autograd.grad`` on functional calls, foreach updates in place,
  and no optimizer object.

Either trains in channels last or in bf16 (autocast) where asked to, with torch's threads (``Alone``) or split over persistent
processes of one thread each (``Processes``).
"""

from __future__ import annotations

import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.multiprocessing  # it teaches pickle to hand over shared tensors
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Task:
    """What is trained, on whose data, and the numbers of a round."""

    network: Callable[[], nn.Sequential]
    clients: Sequence[tuple[Tensor, Tensor]]
    """(x, y) of each client."""
    cohort: int
    batch: int
    epochs: int
    rate: float
    seed: int = 0


class Loop(ABC):
    """One process's share of a round: clients one after another, in a model that is reused."""

    def __init__(self, task: Task, channels_last: bool = False, bf16: bool = False) -> None:
        self.task, self.channels_last = task, channels_last
        torch.manual_seed(task.seed)  # every process begins with the same weights
        self.model = task.network()
        if channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.parameters = list(self.model.parameters())
        self.values = [p.detach() for p in self.parameters]  # the same memory, unseen by autograd
        self.precision: Callable[[], AbstractContextManager[object]] = (
            partial(torch.autocast, "cpu", torch.bfloat16) if bf16 else nullcontext
        )

    def share(self, clients: Sequence[int], start: Sequence[Tensor], total: Sequence[Tensor]) -> int:
        """Train these clients from ``start`` and add n_k w_k to ``total``; returns the sum of n_k."""
        examples = 0
        for k in clients:
            x, y = self.task.clients[k]
            torch._foreach_copy_(self.values, list(start))
            for _ in range(self.task.epochs):
                self.epoch(x, y)
            torch._foreach_add_(list(total), self.values, alpha=len(y))
            examples += len(y)
        return examples

    def batches(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The client's rows in a new order; a last partial batch is not dropped."""
        for rows in torch.randperm(len(y), device=y.device).split(self.task.batch):
            inputs = x.index_select(0, rows)
            if self.channels_last:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            yield inputs, y.index_select(0, rows)

    @abstractmethod
    def epoch(self, x: Tensor, y: Tensor) -> None:
        """Go through a client's examples once."""


class SGDLoop(Loop):
    """An ``nn.Module`` and ``torch.optim.SGD``."""

    def share(self, clients: Sequence[int], start: Sequence[Tensor], total: Sequence[Tensor]) -> int:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.task.rate)  # without momentum it keeps nothing
        return super().share(clients, start, total)

    def epoch(self, x: Tensor, y: Tensor) -> None:
        for inputs, labels in self.batches(x, y):
            self.optimizer.zero_grad()
            with self.precision():
                loss = F.cross_entropy(self.model(inputs), labels)
            loss.backward()
            self.optimizer.step()


class GradientLoop(Loop):
    """``torch.autograd.grad`` and one foreach update."""

    def __init__(self, task: Task, channels_last: bool = False, bf16: bool = False) -> None:
        super().__init__(task, channels_last, bf16)
        self.forward = functional(self.model)

    def epoch(self, x: Tensor, y: Tensor) -> None:
        for inputs, labels in self.batches(x, y):
            with self.precision():
                loss = F.cross_entropy(self.forward(inputs), labels)
            gradients = torch.autograd.grad(loss, self.parameters)
            torch._foreach_add_(self.values, gradients, alpha=-self.task.rate)


def functional(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    """The model as calls of ``torch.nn.functional``: calling a module costs some microseconds, and a visit has many."""
    calls: list[Callable[[Tensor], Tensor]] = []
    for m in model:
        if isinstance(m, nn.Linear):
            calls.append(partial(F.linear, weight=m.weight, bias=m.bias))
        elif isinstance(m, nn.Conv2d) and isinstance(m.padding, tuple):
            calls.append(partial(F.conv2d, weight=m.weight, bias=m.bias, stride=m.stride, padding=m.padding))
        elif isinstance(m, nn.MaxPool2d):
            calls.append(partial(F.max_pool2d, kernel_size=m.kernel_size, stride=m.stride))
        elif isinstance(m, nn.ReLU):
            calls.append(torch.relu)
        elif isinstance(m, nn.Flatten):
            calls.append(partial(torch.flatten, start_dim=1))
        else:
            calls.append(m)

    def forward(x: Tensor) -> Tensor:
        for call in calls:
            x = call(x)
        return x

    return forward


@dataclass(frozen=True)
class How:
    """Which loop, and how; picklable, so that worker processes can be told."""

    loop: type[Loop] = SGDLoop
    channels_last: bool = False
    bf16: bool = False

    def make(self, task: Task) -> Loop:
        return self.loop(task, self.channels_last, self.bf16)


class Alone:
    """Rounds in this process, with as many threads as torch is told to use."""

    def __init__(self, task: Task, how: How) -> None:
        self.loop, self.rng = how.make(task), np.random.default_rng(task.seed)
        self.weights = [v.clone() for v in self.loop.values]

    def round(self) -> None:
        task = self.loop.task
        cohort = self.rng.choice(len(task.clients), task.cohort, replace=False).tolist()
        total = [torch.zeros_like(w) for w in self.weights]
        examples = self.loop.share(cohort, self.weights, total)
        self.weights = [t / examples for t in total]


class Processes:
    """Rounds split over persistent processes of one thread each.

    Data, the round's start and a sum per worker lie in memory that all share: a round costs a short message to each worker and
    a shorter one back.
    """

    def __init__(self, task: Callable[[], Task], how: How, workers: int = 2) -> None:
        self.task, self.rng = task(), np.random.default_rng(0)
        self.weights = _shared(how.make(self.task).values)
        self.totals = [_shared([torch.zeros_like(w) for w in self.weights]) for _ in range(workers)]
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        for i, total in enumerate(self.totals):
            ours, theirs = context.Pipe()
            context.Process(target=_work, args=(theirs, i, task, how, self.weights, total), daemon=True).start()
            theirs.close()
            self.pipes.append(ours)
        for pipe in self.pipes:
            pipe.recv()  # ready

    def round(self) -> None:
        cohort = self.rng.choice(len(self.task.clients), self.task.cohort, replace=False).tolist()
        for i, pipe in enumerate(self.pipes):
            pipe.send(cohort[i :: len(self.pipes)])
        examples = sum(pipe.recv() for pipe in self.pipes)
        first, *others = self.totals
        for other in others:
            torch._foreach_add_(first, other)
        torch._foreach_div_(first, examples)
        torch._foreach_copy_(self.weights, first)

    def close(self) -> None:
        """Let the workers go."""
        for pipe in self.pipes:
            pipe.close()


def _shared(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone().share_memory_() for t in tensors]


def _work(pipe: Connection, number: int, task: Callable[[], Task], how: How, start: list[Tensor], total: list[Tensor]) -> None:
    """A worker: until the pipe is closed, train the clients it names."""
    torch.set_num_threads(1)
    loop = how.make(task())
    torch.manual_seed(1 + number)  # workers shuffle differently
    with suppress(EOFError, ConnectionError):
        pipe.send(None)
        while True:
            clients = pipe.recv()
            torch._foreach_zero_(total)
            pipe.send(loop.share(clients, start, total))
