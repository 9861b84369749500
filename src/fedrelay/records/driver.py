"""The driver of a run: rounds, evaluations, checkpoints, and going on where a run was stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from fedrelay.records.checkpoint import Checkpoints
from fedrelay.seam.algorithm import Algorithm
from fedrelay.seam.codec import Store, encode
from fedrelay.seam.federation import Federation, Layer, Run
from fedrelay.seam.landing import Landing
from fedrelay.seam.ledger import Ledger
from fedrelay.seam.questions import Counts

if TYPE_CHECKING:
    from fedrelay.seam.values import Weights

Row = Mapping[str, Any]


class Driven(Federation, Protocol):
    """What a driver needs of a federation beyond the seam: its clock, its ledger, its state, and test rows at the server."""

    now: float
    ledger: Ledger

    def state(self) -> Any: ...
    def restore(self, state: Any) -> None: ...
    def test(self, weights: Weights) -> Counts | None: ...
    def picks(self) -> Mapping[str, Any]: ...
    def use(self, picks: Mapping[str, Any], told: Callable[[Mapping[str, Any]], None] | None) -> None: ...


@dataclass
class Record:
    """A run as it went: a row per round, and where it stands."""

    weights: Weights
    state: Any
    rounds: list[Row] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """The last accuracy that was measured."""
        return float(next((r["global/accuracy"] for r in reversed(self.rounds) if "global/accuracy" in r), float("nan")))

    def mean_accuracy(self, last: int) -> float:
        """Over the last evaluations."""
        seen = [r["global/accuracy"] for r in self.rounds if "global/accuracy" in r]
        return float(np.mean(seen[-last:]))


class Failures(Layer):
    """Overhears who failed, where in its chain, and why."""

    def __init__(self) -> None:
        self.visits: list[Mapping[str, Any]] = []

    def landed(self, landing: Landing) -> None:
        got = landing.receipts
        for i, why in got.reasons.items():
            self.visits.append({"client": int(got.client[i]), "position": int(got.position[i]), "reason": why})


def fit(
    algorithm: Algorithm[Any],
    fed: Federation,
    rounds: int,
    *,
    weights: Weights | None = None,
    evaluate_every: int = 1,
    layers: Sequence[Layer] = (),
    folder: str | Path | None = None,
    checkpoint_seconds: float = 10.0,
    on_round: Callable[[Row], None] | None = None,
) -> Record:
    """Run an algorithm for some rounds; with a folder, go on where that folder's run was stopped.

    Args:
        algorithm: What to run.
        fed: Where to run it.
        rounds: How many rounds in all, those before a resume included.
        weights: The model to start from; by default the federation's own.
        evaluate_every: Rounds between evaluations on the server's test rows (0: never); the last round is evaluated too.
        layers: What stands around the federation.
        folder: Where checkpoints go.
        checkpoint_seconds: Seconds between checkpoints; the end is always one.
        on_round: Told every row as it is made.

    >>> from fedrelay.algorithms import FedAvg
    >>> from fedrelay.simulation.build import simulate
    >>> run = FedAvg().fit(simulate("digits", engine="loop"), rounds=2)
    >>> len(run.rounds), run.rounds[-1]["round"]
    (2, 2)
    """
    if rounds < 0:
        raise ValueError(f"rounds = {rounds} is not at least 0")
    driven = cast(Driven, fed)
    failed = Failures()
    algorithm.check(view := Run(fed, layers=(*layers, failed)))
    store = Checkpoints(folder) if folder is not None else None
    said = encode(algorithm, Store())
    record = _resumed(store, said, driven) if store is not None and (store.folder / "last.json").exists() else None
    if store is None:
        driven.use({}, None)
    else:
        driven.use(_picks(store), partial(_write_picks, store))
    before = dict(driven.ledger.totals)
    if record is None:  # what the start costs, and who fails in it, stands in the first round's row
        start = algorithm.init(view, weights)
        record = Record(start.weights, start)
    saved = time.monotonic()
    for n in range(len(record.rounds) + 1, rounds + 1):
        began = time.perf_counter()
        record.state = algorithm.round(view, record.state)
        record.weights = record.state.weights
        row: dict[str, Any] = {"round": n, "seconds": time.perf_counter() - began, "time": driven.now}
        row |= {k: v - before.get(k, 0) for k, v in driven.ledger.totals.items()}
        before = dict(driven.ledger.totals)
        if failed.visits:
            row["failures"] = tuple(failed.visits)
            failed.visits.clear()
        if evaluate_every and (n % evaluate_every == 0 or n == rounds) and (counts := driven.test(record.weights)):
            row |= {"global/accuracy": counts.accuracy, "global/loss": counts.loss}
        record.rounds.append(row)
        if on_round:
            on_round(row)
        if store is not None and (n == rounds or time.monotonic() - saved >= checkpoint_seconds):
            store.save(
                "last",
                {
                    "algorithm": said_text(said),
                    "seed": driven.seed,
                    "state": record.state,
                    "federation": driven.state(),
                    "rounds": tuple(record.rounds),
                },
            )
            saved = time.monotonic()
    return record


def _write_picks(store: Checkpoints, picks: Mapping[str, Any]) -> None:
    store.save("engine", dict(picks))


def _picks(store: Checkpoints) -> Mapping[str, Any]:
    """How this run trains each kind, as it was written before its first step."""
    picks: Mapping[str, Any] = Checkpoints(store.folder).load("engine") if (store.folder / "engine.json").exists() else {}
    return picks


def _resumed(store: Checkpoints, said: Any, fed: Any) -> Record:
    kept = store.load("last")
    if kept["algorithm"] != said_text(said):
        raise ValueError(
            f"{store.folder} holds a run with other parameters: resume it with the same algorithm, or choose another folder"
        )
    if kept["seed"] != fed.seed:
        raise ValueError(f"{store.folder} holds a run of seed {kept['seed']}, not {fed.seed}: resume it with its own seed")
    fed.restore(kept["federation"])
    return Record(kept["state"].weights, kept["state"], list(kept["rounds"]))


def said_text(said: Any) -> str:
    """An algorithm's parameters as text, to compare."""
    import json

    return json.dumps(said, sort_keys=True)
