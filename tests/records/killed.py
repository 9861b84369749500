"""A run that kills itself: ``python killed.py FOLDER HOW`` starts one, or goes on with it, and dies where HOW says."""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from pathlib import Path
from typing import Any

from fedrelay.algorithms import FedAvg, Then, Uniform
from fedrelay.engine.auto import picker
from fedrelay.engine.engine import Engine
from fedrelay.engine.lanes import Lanes
from fedrelay.engine.loop import Loop
from fedrelay.methods import SCAFFOLD, FedAdam
from fedrelay.records.checkpoint import Checkpoints
from fedrelay.seam.recipe import Recipe
from fedrelay.simulation.faults import Dropout
from fedrelay.testing.world import world

ROUNDS = 6
SOME = Uniform(count=4)
ALGORITHM = Then(FedAvg(SOME, Recipe(batch_size=8), SCAFFOLD()), 3, FedAvg(SOME, Recipe(batch_size=8), FedAdam(SCAFFOLD())))


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def run(folder: str | Path, **options: Any) -> Any:
    """The run: two phases, clients with memories, some of them lost; a checkpoint after every round."""
    fed = world()
    record = ALGORITHM.fit(fed, ROUNDS, folder=folder, layers=[Dropout(0.2)], **{"checkpoint_seconds": 0, **options})
    return record, fed


def automatic(folder: str | Path, **options: Any) -> Any:
    """A run whose engine is measured; no checkpoint before the end."""
    fed = world()
    fed.engine = Engine(picker("auto"))
    return FedAvg(SOME, Recipe(batch_size=8)).fit(fed, 2, folder=folder, **options), fed


def main(folder: str, how: str) -> None:
    if how.startswith("after round "):
        run(folder, on_round=lambda row: row["round"] == int(how[12:]) and die())
    elif how.startswith("in save "):  # the segment is written, the checkpoint that names it is not
        real, names, nth = Checkpoints._replace, deque[str](), int(how[8:])

        def replace(self: Checkpoints, path: Path, data: bytes) -> None:
            names.append(path.name)
            if names.count("last.json") == nth:
                path.with_name("last.json.new").write_bytes(data[: len(data) // 2])
                die()
            real(self, path, data)

        Checkpoints._replace = replace  # type: ignore[method-assign]
        run(folder)
    else:  # at its first step
        Lanes.run = Loop.run = die  # type: ignore[method-assign]
        automatic(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
