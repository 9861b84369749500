"""Nothing in a rule or in the engine stands in the way of capturing the step of any kind, and a kind is captured once.

The step of every method and optimizer is traced whole (``fullgraph``), as the written-out step of a linear chain and as the
generic step of a convolutional network. Captured and eager steps agree by norm, and another cohort, other batch sizes (idle
lanes too) and other numbers are served by the same graph: a recompile is an error.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fedrelay.engine import optimizers
from fedrelay.engine.boundary import name
from fedrelay.engine.steps import Step, before_capture
from fedrelay.engine.visits import Site
from fedrelay.methods import SCAFFOLD, FedDyn, FedProx, Plain
from fedrelay.models import Model
from fedrelay.seam.methods import Population
from fedrelay.seam.recipe import SGD, Adam, AdamW, Cosine, Exponential, Recipe
from fedrelay.seam.rules import ClientView, Rule
from fedrelay.seam.values import tmap, value

LANES, ROWS = 3, 6
BASE = Recipe(learning_rate=0.1, batch_size=ROWS)


def kind(method=None, **how) -> Recipe:
    """What a client is sent under this method."""
    method = method or Plain()
    state = method.init({"w": torch.zeros(1)}, Population(LANES, LANES))
    return method.visit(state, replace(BASE, **how))[0]


@value
class StudentWithAFactor(Rule):
    """Features stay near what the received model makes of the rows, up to a factor that is a leaf of the rule's own."""

    weight: float = 0.3

    def leaves(self, w):
        return {"student.factor": torch.ones(1, dtype=torch.float64)}

    def begin(self, see):
        return {"received": see.received}

    def loss(self, params, forward, x, y, mask, context):
        mine, theirs = (forward(w, x, until="classifier").flatten(1) for w in (params, context["received"]))
        return self.weight * torch.where(mask[:, None], mine - params["student.factor"] * theirs, 0).square().sum()


# What FedAdam, IDA and the like send to clients is the kind of the method inside them.
KINDS = {
    "Plain": kind(),
    "FedProx": kind(FedProx()),
    "SCAFFOLD": kind(SCAFFOLD()),
    "SCAFFOLD, option I": kind(SCAFFOLD(option=1)),
    "FedDyn": kind(FedDyn()),
    "momentum": kind(optimizer=SGD(momentum=0.9)),
    "Nesterov and decay": kind(optimizer=SGD(momentum=0.9, decay=1e-3, nesterov=True)),
    "decay": kind(optimizer=SGD(decay=1e-3)),
    "Adam": kind(optimizer=Adam(decay=1e-3)),
    "AdamW": kind(optimizer=AdamW()),
    "Cosine": kind(schedule=Cosine(0.1)),
    "Exponential": kind(schedule=Exponential()),
    "FedProx and momentum": kind(FedProx(), optimizer=SGD(momentum=0.9)),
    "FedDyn, AdamW and Cosine": kind(FedDyn(), optimizer=AdamW(), schedule=Cosine()),
    "the classifier alone": kind(FedProx(), scope=("classifier",)),
    "a loss of the whole model": replace(BASE, rules=(StudentWithAFactor(),)),
}
# What only changes the update is the same code after either step's gradients, so a convolution need not show each once more.
GENERIC = ("the classifier alone", "a loss of the whole model")
ONCE_IS_ENOUGH = ("SCAFFOLD, option I", "decay", "Nesterov and decay", "Cosine", "Exponential")


def linear() -> Model:
    extractor = nn.Sequential(nn.Flatten(), nn.Linear(50, 7), nn.Tanh())
    return Model({"extractor": extractor, "classifier": nn.Sequential(nn.Linear(7, 5), nn.Sigmoid(), nn.Linear(5, 4))})


def convolutional() -> Model:
    extractor = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2))
    return Model({"extractor": extractor, "classifier": nn.Sequential(nn.Flatten(), nn.Linear(12, 4))})


def arguments(site: Site, recipe: Recipe, seed: int):
    """What a step is called with: some cohort, its sizes and its numbers, all drawn from ``seed``."""
    g = torch.Generator().manual_seed(seed)

    def noise(t):
        return torch.randn(t.shape, generator=g, dtype=torch.float64) / 10

    start = {n: t.expand(LANES, *t.shape) for n, t in (site.model.initial() | dict(site.added(recipe))).items()}
    w = {n: start[n] + noise(start[n]) for n in site.trains(recipe)}
    opt = tmap(lambda t: t + noise(t).abs(), optimizers.start(recipe.optimizer, w, LANES))
    if "count" in opt:
        opt["count"][""] = torch.arange(LANES, dtype=torch.float64) + seed
    numbers = {n: v - v * torch.rand(LANES, generator=g, dtype=torch.float64) / 10 for n, v in recipe.numbers.items()}
    context = {}
    for rule in recipe.rules:
        received = {n: t + noise(t) for n, t in w.items()}
        memory = {n: t + noise(t) for n, t in rule.memory(received).items()}
        extra = {"c": {n: noise(t) for n, t in w.items()}}
        context[name(rule)] = rule.begin(ClientView(received, memory, extra, {}, rate=0.1, steps=1, handed=0, examples=ROWS))
    x = torch.randn(LANES, ROWS, 2, 5, 5, generator=g, dtype=torch.float64)
    y = torch.randint(4, (LANES, ROWS), generator=g)
    counts = torch.tensor([[6, 6, 6], [2, 0, 6], [1, 5, 0]])[seed]
    at = torch.tensor([0, 3, 5]).roll(seed)
    return w, opt, numbers, x, y, torch.arange(ROWS) < counts[:, None], context, at, at + 4


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def check(model: Model, recipe: Recipe, written_out: bool) -> None:
    torch.manual_seed(0)
    for segment in model.segments.values():
        segment.double()
    site = Site(model, None)
    trained = site.trains(recipe)
    step = Step(site, recipe.kind, {n: t for n, t in model.initial().items() if n not in trained})
    assert (step.linear is not None) == written_out
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    try:
        before_capture()
        captured = torch.compile(step.__call__, fullgraph=True, backend=counter)
        with torch._dynamo.config.patch(trace_autograd_ops=True, error_on_recompile=True):
            for seed in range(3):
                before, mine, theirs = (arguments(site, recipe, seed) for _ in range(3))
                assert apart(captured(*mine), step(*theirs)) <= 1e-12
                for n in trained:
                    assert apart(mine[0][n] - before[0][n], theirs[0][n] - before[0][n]) <= 1e-12, n
                for part, stacked in theirs[1].items():
                    for n, t in stacked.items():
                        assert apart(mine[1][part][n], t) <= 1e-12, (part, n)
    finally:
        torch._dynamo.reset()
    assert counter.frame_count == 1


@pytest.mark.parametrize("what", [k for k in KINDS if k not in GENERIC])
def test_a_written_out_step_is_captured_once(what):
    check(linear(), KINDS[what], written_out=True)


@pytest.mark.parametrize("what", [k for k in KINDS if k not in ONCE_IS_ENOUGH])
def test_a_generic_step_is_captured_once(what):
    check(convolutional(), KINDS[what], written_out=False)
