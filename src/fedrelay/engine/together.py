"""Many runs, one batch: runs in threads of their own meet here, and what they have to train trains together.

No run's bits depend on who else is in the batch, so each gets what it would have got alone, in whatever order they come.
Chains meet in one set of lanes where the runs share a site (the same model and data).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from fedrelay.engine.engine import Pick
from fedrelay.engine.visits import Tally

T = TypeVar("T")
Told = Callable[[Mapping[str, Pick]], None]


class Trainer(Protocol):
    """Whoever trains flights to their end: an engine."""

    def run(self, tallies: Sequence[Tally]) -> None: ...
    def picks(self) -> Mapping[str, Pick]: ...
    def use(self, picks: Mapping[str, Pick], told: Told | None = None) -> None: ...


class Together:
    """A trainer that several runs share: it waits until every run that is still going has come, then trains all they brought.

    Every run must :meth:`leave` when it is over, however it ended, or the others wait for it forever; :func:`side_by_side`
    sees to that.
    """

    def __init__(self, trainer: Trainer, runs: int) -> None:
        self.trainer = trainer
        self.turns = 0
        """Batches trained so far."""
        self._going = runs
        self._brought: list[Sequence[Tally]] = []
        self._failed: BaseException | None = None
        self._told: list[Told] = []
        self._meeting = threading.Condition()

    def picks(self) -> Mapping[str, Pick]:
        """What a measuring picker has decided, for all runs."""
        return self.trainer.picks()

    def use(self, picks: Mapping[str, Pick], told: Told | None = None) -> None:
        """Decide as this run has it on record, and tell every run of every new decision."""
        with self._meeting:
            if differing := [p for key, p in self.trainer.picks().items() if picks.get(key, p) != p]:
                raise ValueError(f"one of these runs is on record with another engine than {differing[0]}: they cannot share one")
            if told is not None:
                self._told.append(told)
            self.trainer.use(picks, self._tell)

    def _tell(self, picks: Mapping[str, Pick]) -> None:
        for told in self._told:
            told(picks)

    def run(self, tallies: Sequence[Tally]) -> None:
        """Bring flights, and come back when they are trained."""
        with self._meeting:
            turn = self.turns
            self._brought.append(tallies)
            self._train_if_all_are_here()
            self._meeting.wait_for(lambda: self.turns != turn)  # the next turn needs this run too, so `_failed` is this turn's
            if self._failed is not None:
                raise RuntimeError(f"a batch of several runs could not be trained: {self._failed}") from self._failed

    def leave(self) -> None:
        """This run is over; nobody waits for it any more."""
        with self._meeting:
            self._going -= 1
            self._train_if_all_are_here()

    def _train_if_all_are_here(self) -> None:
        if not self._brought or len(self._brought) < self._going:
            return
        self._failed = None
        try:
            self.trainer.run([t for tallies in self._brought for t in tallies])
        except BaseException as e:  # every run that was part of the batch hears of it
            self._failed = e
        self._brought = []
        self.turns += 1
        self._meeting.notify_all()


def side_by_side(trainer: Trainer, runs: Sequence[Callable[[Together], T]]) -> list[T]:
    """What these runs return, each called in a thread with the trainer that they share. The first that failed is raised."""
    shared = Together(trainer, len(runs))
    made: dict[int, T] = {}
    failed: dict[int, BaseException] = {}

    def go(i: int) -> None:
        try:
            made[i] = runs[i](shared)
        except BaseException as e:
            failed[i] = e
        finally:
            shared.leave()

    threads = [threading.Thread(target=go, args=(i,), name=f"run {i}") for i in range(len(runs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise failed[min(failed)]
    return [made[i] for i in range(len(runs))]
