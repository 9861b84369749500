"""Lane operators equal what vmap makes of torch's own layers, and what a plain loop over the lanes computes.

Tolerances are relative norms: 1e-12 in float64, 1e-6 in float32; bfloat16 is compared with the plain loop in bfloat16.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fedrelay.engine import operators, steps
from fedrelay.engine.operators import lane_operators
from fedrelay.engine.visits import Site
from fedrelay.models import Model, cross_entropy
from fedrelay.seam.recipe import Recipe

LANES = 3
BOUND = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}
CONVOLUTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "strided": {"stride": 2, "padding": 1},
    "uneven": {"kernel": (3, 2), "stride": (1, 2), "padding": (2, 0), "dilation": (1, 2)},
    "dilated": {"dilation": 2},
    "1x1": {"kernel": (1, 1)},
    "grouped": {"groups": 2},
    "depthwise": {"groups": 4, "out": 8},
    "same": {"padding": "same", "kernel": (3, 5)},
    "same, even": {"padding": "same", "kernel": (4, 2), "dilation": (1, 3)},
    "valid": {"padding": "valid"},
    "one in a tuple": {"padding": (1,), "stride": (2,)},
}


class Calls(TorchDispatchMode):
    """The operators of ours that ran, and what they were handed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fedrelay":
            self.seen.append((func._schema.name.partition("::")[2], args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.seen]


def draw(*shape: int, dtype=torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def run(f, inputs, in_dims=0, mode=lane_operators, autocast=False):
    """Outputs of every lane, and the gradients of a weighted sum of them in every input."""
    live = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    with mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = vmap(f, in_dims=in_dims)(*live)
    return out, pull(out, live)


def loop(f, inputs, in_dims=0, autocast=False):
    dims = (in_dims,) * len(inputs) if in_dims == 0 else in_dims
    live = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        lanes = [f(*(t if d is None else t.select(d, g) for t, d in zip(live, dims, strict=True))) for g in range(LANES)]
    return torch.stack(lanes), pull(torch.stack(lanes), live)


def pull(out, live):
    live = [t for t in live if t.requires_grad]
    return torch.autograd.grad((out * draw(*out.shape, dtype=out.dtype, seed=9)).sum(), live)


def agree(mine, theirs, bound):
    (out, grads), (expected, expected_grads) = mine, theirs
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    assert off(out, expected) <= bound
    for g, e in zip(grads, expected_grads, strict=True):
        assert g.dtype == e.dtype
        assert off(g, e) <= bound


def convolution(case: dict, dtype) -> tuple:
    given = dict(case)
    groups, out, kernel, bias = given.get("groups", 1), given.pop("out", 6), given.pop("kernel", (3, 3)), given.pop("bias", True)
    inputs = [draw(LANES, 5, 4, 9, 8, dtype=dtype), draw(LANES, out, 4 // groups, *kernel, dtype=dtype, seed=1) / 3]
    inputs += [draw(LANES, out, dtype=dtype, seed=2)] if bias else []
    return lambda x, w, b=None: F.conv2d(x, w, b, **given), inputs


# --- each operator alone


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")  # torch's own, about its copy of the input
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_equals_vmap_and_the_loop(case, dtype):
    f, inputs = convolution(CONVOLUTIONS[case], dtype)
    with Calls() as calls:
        mine = run(f, inputs)
    assert calls.names == ["lane_conv2d", "lane_conv2d_backward"]
    agree(mine, loop(f, inputs), BOUND[dtype])
    if case != "one in a tuple":  # which vmap of torch 2.13 takes for something else
        agree(mine, run(f, inputs, mode=nullcontext), BOUND[dtype])


@pytest.mark.parametrize("case", ["plain", "no bias", "strided"])
def test_convolution_under_autocast_is_the_loop_under_autocast(case):
    f, inputs = convolution(CONVOLUTIONS[case], torch.float32)
    mine = run(f, inputs, autocast=True)
    assert mine[0].dtype == torch.bfloat16
    assert {g.dtype for g in mine[1]} == {torch.float32}
    agree(mine, loop(f, inputs, autocast=True), BOUND[torch.bfloat16])


def linear(x, w, b=None):
    return F.linear(x, w, b)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 5), (2, 7, 5), (2, 3, 4, 5), (1, 5)], ids=str)
def test_linear_equals_vmap_and_the_loop(shape, bias):
    for dtype in (torch.float64, torch.float32):
        inputs = [draw(LANES, *shape, dtype=dtype), draw(LANES, 6, 5, dtype=dtype, seed=1)]
        inputs += [draw(LANES, 6, dtype=dtype, seed=2)] if bias else []
        with Calls() as calls:
            mine = run(linear, inputs)
        assert calls.names == ["lane_linear"]
        agree(mine, run(linear, inputs, mode=nullcontext), BOUND[dtype])
        agree(mine, loop(linear, inputs), BOUND[dtype])
    agree(run(linear, inputs, autocast=True), loop(linear, inputs, autocast=True), BOUND[torch.bfloat16])
    assert run(linear, inputs)[1][1].is_contiguous()  # the weight's gradient comes in the weight's own layout


def test_autocast_leaves_float64_alone():
    inputs = [draw(LANES, 7, 5), draw(LANES, 6, 5, seed=1)]
    agree(run(linear, inputs, autocast=True), loop(linear, inputs, autocast=True), 1e-12)


@pytest.mark.parametrize("classes", [1, 2, 10, 15])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cross_entropy_equals_vmap_and_the_loop(classes, dtype):
    z, y = draw(LANES, 8, classes, dtype=dtype) * 5, torch.arange(LANES * 8).view(LANES, 8) % classes
    with Calls() as calls:
        mine = run(cross_entropy, [z, y])
    assert calls.names == ["row_cross_entropy"]
    if classes == 1:  # the loss of one class is 0, and so is its slope
        assert not mine[0].any()
        assert not mine[1][0].any()
        return
    agree(mine, run(cross_entropy, [z, y], mode=nullcontext), BOUND[dtype])
    agree(mine, loop(cross_entropy, [z, y]), BOUND[dtype])


def test_cross_entropy_of_extreme_logits_and_of_rows_to_ignore():
    """Rows by hand: equal logits cost log 2; 1000 apart, the wrong one costs 1000 and pulls with +-1; label -100 is nothing."""
    z = torch.tensor([[0.0, 0.0], [1000.0, 0.0], [1000.0, 0.0], [3.0, 4.0]]).requires_grad_()
    y = torch.tensor([0, 0, 1, -100])
    with lane_operators():
        loss = vmap(cross_entropy)(z.expand(2, 4, 2), y.expand(2, 4))
    torch.testing.assert_close(loss, torch.tensor([[0.6931472, 0, 1000, 0]]).expand(2, 4))
    (slope,) = torch.autograd.grad(loss[0].sum(), z)
    torch.testing.assert_close(slope, torch.tensor([[-0.5, 0.5], [0, 0], [1, -1], [0, 0]]))


# --- what lanes share, and what lies oddly


SHARED = {
    "x": (None, 0, 0),
    "weight": (0, None, None),
    "weight, not bias": (0, None, 0),
    "bias": (0, 0, None),
    "x and weight": (None, None, 0),
    "lanes last": (1, 2, 1),
}


@pytest.mark.parametrize("in_dims", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("layer", ["conv2d", "linear"])
def test_what_lanes_share_or_stack_elsewhere(layer, in_dims):
    def laid(t, dim):
        return t[0] if dim is None else t.movedim(0, dim)

    f, inputs = (
        convolution({}, torch.float64) if layer == "conv2d" else (linear, [draw(LANES, 7, 5), draw(LANES, 6, 5), draw(LANES, 6)])
    )
    inputs = [laid(t, d) for t, d in zip(inputs, in_dims, strict=True)]
    mine = run(f, inputs, in_dims)
    agree(mine, run(f, inputs, in_dims, nullcontext), 1e-12)
    agree(mine, loop(f, inputs, in_dims), 1e-12)


def test_shared_weights_make_one_ordinary_convolution():
    f, inputs = convolution({}, torch.float64)
    with Calls() as calls, lane_operators():
        vmap(f, in_dims=(0, None, None))(inputs[0], inputs[1][0], inputs[2][0])
    assert [tuple(args[0].shape) for _, args in calls.seen] == [(1, LANES * 5, 4, 9, 8)]


@pytest.mark.parametrize("layout", ["channels last", "transposed", "strided", "expanded"])
def test_non_contiguous_inputs(layout):
    f, (x, w, b) = convolution({}, torch.float64)
    x = {
        "channels last": lambda: x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3),
        "transposed": lambda: x.transpose(3, 4).contiguous().transpose(3, 4),
        "strided": lambda: x.repeat_interleave(2, 4)[..., ::2],
        "expanded": lambda: x[:, :1].expand(x.shape),
    }[layout]()
    assert not x.is_contiguous()
    agree(run(f, [x, w.mT, b]), loop(f, [x, w.mT, b]), 1e-12)
    x, w = draw(LANES, 5, 7).mT, draw(LANES, 5, 12).mT[:, ::2]
    agree(run(linear, [x, w]), loop(linear, [x, w]), 1e-12)


def test_only_the_gradients_that_are_wanted_are_computed():
    """A first layer has no gradient in x, a frozen one none in its weight."""
    f, inputs = convolution({}, torch.float64)
    whole = loop(f, inputs)[1]
    for wanted in ([False, True, True], [True, False, False], [False, False, True]):
        live = [t.detach().requires_grad_(want) for t, want in zip(inputs, wanted, strict=True)]
        with lane_operators():
            out = vmap(f)(*live)
        with Calls() as calls:
            made = pull(out, live)
        ((name, args),) = calls.seen
        assert (name, list(args[-1])) == ("lane_conv2d_backward", wanted)
        for g, e in zip(made, (e for e, want in zip(whole, wanted, strict=True) if want), strict=True):
            assert off(g, e) <= 1e-12


def test_the_registrations_are_sound():
    """torch's own check of a custom operator: schema, tracing (with strides), gradient."""
    f = torch.library.opcheck

    def live(*shape):
        return draw(*shape).requires_grad_()

    x, w, b, how = live(2, 5, 4, 7, 6), live(2, 6, 2, 3, 3), live(2, 6), ([2, 1], [1, 0], [1, 1], 2)
    f(operators.lane_conv2d, (x, w, b, *how))
    f(operators.lane_conv2d, (x, w, None, *how))
    d = draw(2, 5, 6, 4, 4)
    for wanted in ([True] * 3, [False, True, False]):
        f(operators.lane_conv2d_backward, (d, x.detach(), w.detach(), None, *how, wanted))
    f(operators.lane_linear, (live(2, 5, 4), live(2, 3, 4), live(2, 3)))
    f(operators.lane_linear, (live(2, 5, 4), live(2, 3, 4), None))
    f(operators.row_cross_entropy, (live(6, 4), torch.arange(6) % 4))


# --- who gets them


def served(f, *inputs, in_dims=0) -> list[str]:
    with Calls() as calls, lane_operators():
        vmap(f, in_dims=in_dims)(*inputs)
    return calls.names


def test_what_is_not_ours_is_left_to_torch():
    image, kernel, y = draw(LANES, 4, 9, 9), draw(LANES, 6, 4, 3, 3), torch.zeros(LANES, 5, dtype=torch.int64)
    assert served(F.conv2d, image, kernel) == []  # one image without a batch
    assert served(F.linear, draw(LANES, 5), draw(LANES, 6, 5)) == []  # one row without a batch
    z = draw(LANES, 5, 10)
    assert served(F.cross_entropy, z, y) == []  # the mean is no loss per row
    assert served(lambda z, y: F.cross_entropy(z, y, torch.ones(10, dtype=z.dtype), reduction="none"), z, y) == []
    assert served(cross_entropy, draw(LANES, 5, 16), y) == []  # torch is the faster one
    assert served(cross_entropy, z, z.softmax(-1)) == []  # probabilities
    with pytest.raises(RuntimeError, match="strided"):
        served(lambda x, w: F.conv2d(x[None], w, padding="same", stride=2), image, kernel)


def test_only_vmap_of_this_thread_is_served():
    x, w = draw(LANES, 7, 5), draw(LANES, 6, 5)
    seen: list[list[str]] = []

    def elsewhere():
        with Calls() as calls:
            vmap(linear)(x, w)
        seen.append(calls.names)

    with Calls() as calls, lane_operators():
        linear(x[0], w[0])  # one model, no lanes
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert calls.names == []
    assert seen == [[]]
    assert served(linear, x, w) == ["lane_linear"]


@pytest.mark.parametrize("inner", ["grad", "vmap"])
def test_a_rule_may_transform_inside_its_loss(inner):
    """Gradients, or rows mapped one by one, inside the vmapped objective: torch's own layers serve there."""

    def loss(w, x):
        return F.conv2d(x, w).square().sum()

    def objective(x, w):
        if inner == "grad":
            return grad(loss)(w, x).square().sum()
        return vmap(lambda row: loss(w, row[None]))(x).sum()

    _, inputs = convolution({"bias": False}, torch.float64)
    agree(run(objective, inputs), run(objective, inputs, mode=nullcontext), 1e-12)


# --- in the engine's step


def network(dtype) -> Model:
    """Smooth, so that rounding is not blown up by ties."""
    torch.manual_seed(0)
    extractor = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same"), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(4, 6, 3, bias=False), nn.Tanh()
    )
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 10))
    return Model({"extractor": extractor.to(dtype), "classifier": classifier.to(dtype)})


def batch(model: Model, dtype, seed: int = 0):
    """Arguments of a step of some lanes, one of them idle, one with a short batch."""
    w = {n: t + draw(LANES, *t.shape, dtype=dtype, seed=seed) / 10 for n, t in model.initial().items()}
    x, y = draw(LANES, 6, 2, 8, 8, dtype=dtype, seed=seed), torch.arange(LANES * 6).view(LANES, 6) % 10
    mask = torch.arange(6) < torch.tensor([6, 0, 4])[:, None]
    numbers = {n: torch.full((LANES,), float(v), dtype=dtype) for n, v in Recipe(learning_rate=0.3).numbers.items()}
    none = torch.zeros(LANES, dtype=torch.int64)
    return w, {}, numbers, x, y, mask, {}, none, none


@pytest.mark.parametrize("scope", [None, ("classifier",), ("extractor",)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "precision", "bound"),
    [(torch.float64, "float32", 1e-12), (torch.float32, "float32", 1e-6), (torch.float32, "bf16", 2e-2)],
)
def test_a_step_with_and_without_operators(monkeypatch, dtype, precision, bound, scope):
    model = network(dtype)
    kind = Recipe(learning_rate=0.3, batch_size=6, scope=scope).kind
    trains = model.scope(scope)
    frozen = {n: t for n, t in model.initial().items() if n not in trains}
    step = steps.Step(Site(model, None), kind, frozen, precision)

    def moved():
        w, *rest = batch(model, dtype)
        w = {n: w[n] for n in trains}
        before = {n: t.clone() for n, t in w.items()}
        losses = step(w, *rest)
        return {n: w[n] - t for n, t in before.items()} | {"losses": losses}

    with Calls() as calls:
        mine = moved()
    assert {"lane_conv2d", "lane_linear", "row_cross_entropy"} <= set(calls.names)
    monkeypatch.setattr(steps, "lane_operators", nullcontext)
    with Calls() as calls:
        theirs = moved()
    assert calls.names == []
    for n, t in theirs.items():
        assert off(mine[n], t) <= bound, n
        assert not mine[n][1].any()  # the idle lane


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_captured_step_keeps_the_operators_and_is_captured_once(precision):
    model = network(torch.float32)
    step = steps.Step(Site(model, None), Recipe(learning_rate=0.3, batch_size=6).kind, {}, precision)
    targets: list[str] = []

    def backend(graph, inputs):
        targets.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    steps.before_capture()
    captured = torch.compile(step.__call__, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(trace_autograd_ops=True, error_on_recompile=True):
        for seed in (0, 1):
            (w, *rest), (expected, *_) = batch(model, torch.float32, seed), batch(model, torch.float32, seed)
            losses = captured(w, *rest)
            assert off(losses, step(expected, *rest)) <= 2e-6
            for n, t in expected.items():
                assert off(w[n], t) <= 2e-6, n
    torch._dynamo.reset()
    ours = [t.split(".")[1] for t in targets if t.startswith("fedrelay.")]
    assert ours == ["lane_conv2d", "lane_conv2d", "lane_linear", "lane_linear", "row_cross_entropy"]
