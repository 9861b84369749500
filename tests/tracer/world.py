"""A small world: digits over 30 ragged clients of about one class each, on a fleet of three speeds; and quadratic clients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedrelay.engine.engine import Engine, Pick
from fedrelay.engine.examples import Examples
from fedrelay.engine.visits import Site
from fedrelay.models import Model
from fedrelay.models.model import squared_error
from fedrelay.seam.federation import Run
from fedrelay.simulation.simulation import Simulation

WIDTH = 6
LANES, LOOP, CUT = Pick("lanes", WIDTH), Pick("loop", 1), Pick("cut", 1)
THREE = Pick("lanes", 3)


@cache
def digits_data():
    x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(y))
    test, train = order[:400], order[400:]
    bounds = np.sort(np.random.default_rng(2).choice(np.arange(20, len(train) - 20), 29, replace=False))
    parts = np.split(train[np.argsort(y[train].numpy(), kind="stable")], bounds)
    return x / 16, y, test, [p if len(p) > 4 else np.arange(5) for p in parts]


SPEED = np.array([1, 0.25, 0.1])[np.random.default_rng(1).integers(0, 3, 30)]
CLUSTERS = tuple(
    tuple(tuple(m) for s in sorted(set(SPEED.tolist())) if (m := [c for c in range(30) if c % 3 == v and SPEED[c] == s]))
    for v in range(3)
)


def network(dtype: torch.dtype = torch.float32) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = {"extractor": nn.Sequential(nn.Linear(64, 32), nn.Tanh()), "classifier": nn.Linear(32, 10)}
    return Model({n: m.to(dtype) for n, m in layers.items()})


def digits(
    pick: Pick | Engine = LANES,
    dtype=torch.float32,
    kind: type[Simulation] = Simulation,
    broken: Sequence[int] = (),
    seed: int = 0,
    stride: int = 3,
    site: Site | None = None,
):
    x, y, _, parts = digits_data()
    xs = [x[p].to(dtype) * (float("nan") if i in broken else 1) for i, p in enumerate(parts)]
    site = site or Site(network(dtype), Examples.of_lists(xs, [y[p] for p in parts]), block=4)
    engine = pick if isinstance(pick, Engine) else Engine(pick, stride)
    return kind(site, engine, seed, clock=lambda clients, examples: examples / SPEED[clients])


def accuracy(fed: Simulation, w) -> float:
    x, y, test, _ = digits_data()
    rows = x[test].to(next(iter(w.values())).dtype)
    return float((fed.site.model.forward(w, rows).argmax(1) == y[test]).float().mean())


def run(system, fed, rounds: int, state=None, layers=()):
    view = Run(fed, layers=tuple(layers))
    s = state or system.init(view)
    for _ in range(rounds):
        s = system.round(view, s)
    return s


def gap(a, b) -> float:
    """The largest relative norm of a difference over tensors."""
    return max(float((a[n] - b[n]).norm() / b[n].norm().clamp(min=1e-30)) for n in b)


class Point(nn.Module):
    """A model of one number: w plus its input, which is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w + x


def quadratic(
    targets: Sequence[float],
    sizes: Sequence[int] | None = None,
    speed: Sequence[float] | None = None,
    kind: type[Simulation] = Simulation,
    pick: Pick = THREE,
) -> Simulation:
    """Client k has the loss (w - target_k)^2 / 2: one step at rate 1/2 maps w to w/2 + target_k/2."""
    sizes = sizes or [1] * len(targets)
    xs = [torch.zeros(n, 1, dtype=torch.float64) for n in sizes]
    ys = [torch.full((n, 1), t, dtype=torch.float64) for t, n in zip(targets, sizes, strict=True)]
    pace = np.array(speed or [1.0] * len(targets))
    site = Site(Model({"point": Point()}, squared_error), Examples.of_lists(xs, ys), block=2)
    return kind(site, Engine(pick), clock=lambda clients, examples: examples / pace[clients])
