"""Variants measured side by side: each in a process of its own, a few rounds after another in turn (AA BB CC AA BB ...).

All get the same processors one after another, so whatever else happens on the machine happens to all of them. A turn of several
rounds is what a user's run looks like: its first round finds the caches as the variant before left them.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from machine import Load

PAUSE = 0.01  # seconds for a variant's threads to fall asleep before the next variant's turn


@dataclass(frozen=True)
class Variant:
    """Something that is measured. Its parts travel to another process, so they are values or functions of a module."""

    name: str
    make: Callable[[], Callable[[], Any]]
    """Prepare; what it returns runs one round. The round may return a note, of which the last is kept."""
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of some values, one being enough."""
        if len(values) < 2:
            return Spread(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, low, high)


@dataclass(frozen=True)
class Measured:
    """Seconds of every round of every variant, round i of all of them measured next to each other."""

    seconds: Mapping[str, list[float]]
    notes: Mapping[str, Any]
    others: float
    """The share of the processors that others used meanwhile."""

    def spread(self, name: str) -> Spread:
        """Seconds a round."""
        return Spread.of(self.seconds[name])

    def times(self, name: str, than: str) -> Spread:
        """How many times as fast ``name`` is, pair by pair of neighbouring rounds."""
        return Spread.of([b / a for a, b in zip(self.seconds[name], self.seconds[than], strict=True)])

    def fastest(self, names: Sequence[str]) -> str:
        """The variant with the least median."""
        return min(names, key=lambda n: self.spread(n).median)


def measure(variants: Sequence[Variant], turns: int, warmup: int = 2, together: int = 1) -> Measured:
    """Seconds a round, the mean of the ``together`` rounds of a turn, after ``warmup`` turns that are not counted."""
    seconds: dict[str, list[float]] = {v.name: [] for v in variants}
    notes: dict[str, Any] = {}
    pipes = {v.name: _start(v) for v in variants}
    try:
        for name, pipe in pipes.items():
            _answer(name, pipe)  # ready
        with Load() as load:
            for i in range(warmup + turns):
                for name, pipe in pipes.items():
                    time.sleep(PAUSE)
                    pipe.send(together)
                    spent, note = _answer(name, pipe)
                    if i >= warmup:
                        seconds[name].append(spent)
                        notes[name] = note
    finally:
        for pipe in pipes.values():
            pipe.close()
    return Measured(seconds, {n: note for n, note in notes.items() if note is not None}, load.others)


def _start(v: Variant) -> Connection:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with _environment(v.environment):
        context.Process(target=_serve, args=(theirs, v)).start()
    theirs.close()
    return ours


@contextmanager
def _environment(more: Mapping[str, str]) -> Any:
    """What a process that starts inside inherits; some settings are read only then."""
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(pipe: Connection, v: Variant) -> None:
    """A variant's process: a round whenever it is asked for one, until the pipe is closed."""
    import torch

    with suppress(EOFError, ConnectionError):  # whoever asks has gone
        try:
            torch.set_num_threads(v.threads)
            run = v.make()
            pipe.send((0.0, None))
        except Exception:
            pipe.send(traceback.format_exc())
            return
        while True:
            together = pipe.recv()
            try:
                began = time.perf_counter()
                notes = [run() for _ in range(together)]
                answer: Any = ((time.perf_counter() - began) / together, notes[-1])
            except Exception:
                answer = traceback.format_exc()
            pipe.send(answer)


def _answer(name: str, pipe: Connection) -> tuple[float, Any]:
    try:
        answer = pipe.recv()
    except (EOFError, ConnectionError):
        raise RuntimeError(f"{name!r} has ended without an answer") from None
    if isinstance(answer, str):
        raise RuntimeError(f"{name!r} failed:\n{answer}")
    return float(answer[0]), answer[1]
