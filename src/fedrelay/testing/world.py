"""A world small enough to break things in: ragged clients of a class or two each, one of them with a single example."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from fedrelay.engine.engine import Engine, Pick
from fedrelay.engine.examples import Examples, Part
from fedrelay.engine.visits import Site
from fedrelay.models.model import Model
from fedrelay.simulation.simulation import Simulation

SIZES = (1, 7, 30, 12, 5, 18, 9, 25, 3, 16, 11, 21)
FEATURES, HIDDEN, CLASSES, WIDTH = 11, 5, 4, 3  # sizes that fill no vector, on purpose
LANES, LOOP = Pick("lanes", WIDTH), Pick("loop", 1)


def examples(sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float32, broken: tuple[int, ...] = ()) -> Examples:
    """Rows around four centres; client k has the classes k and k + 1. The rows of ``broken`` clients are NaN."""
    rng = np.random.default_rng(0)
    n = sum(sizes)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    y = (owner + rng.integers(0, 2, n)) % CLASSES
    x = rng.normal(size=(CLASSES, FEATURES))[y] + rng.normal(size=(n, FEATURES)) / 2
    x[np.isin(owner, broken)] = np.nan
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows, labels = torch.tensor(x, dtype=dtype), torch.tensor(y)
    part = Part(rows, labels, torch.arange(n, dtype=torch.int32), offsets)
    return Examples({"train": part}, dtype=dtype, classes=CLASSES, server=(rows.nan_to_num(0.0), labels))


def world(
    pick: Pick = LANES,
    *,
    kind: type[Simulation] = Simulation,
    sizes: tuple[int, ...] = SIZES,
    dtype: torch.dtype = torch.float32,
    broken: tuple[int, ...] = (),
    seed: int = 0,
    stride: int = 2,
    **options: Any,
) -> Simulation:
    """A federation of this world; lanes look at their boundaries every second step, so that some idle inside a visit."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        layers = {"extractor": nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh()), "classifier": nn.Linear(HIDDEN, CLASSES)}
    model = Model({name: segment.to(dtype) for name, segment in layers.items()})
    return kind(Site(model, examples(sizes, dtype, broken), block=2), Engine(pick, stride), seed, **options)
