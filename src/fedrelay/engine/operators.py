"""Layers with a weight set per lane: what vmap makes of ``conv2d``, ``linear`` and ``cross_entropy``, in layouts that are fast.

vmap turns a convolution with a weight per lane into a *grouped* convolution, which a processor computes 1.3 to 1.7 times slower
than no lanes at all; here it is one channels-last convolution per lane. It computes a linear layer's weight gradient as
[in, out] and hands it back transposed, which slows that product and the update; here it is a batched product in the weight's
own layout. And softmax along rows of ten classes leaves the vector units idle; here it runs down contiguous columns.

Each operator takes lanes as its first dimension, in every argument, and has three registrations: its meaning for tracing
(fake), its gradient (on stacked tensors, *outside* vmap, since only the forward is vmapped), and its vmap rule, which stacks
what vmap brings. A single model calls it with one lane, so vmap only ever turns 1 into many.

    with lane_operators():
        losses = vmap(objective)(stacked, x, y)      # an ordinary nn.Module inside
    grads = torch.autograd.grad(losses.sum(), ...)   # needs no context

The context is a ``TorchFunctionMode``: torch keeps the stack of modes per thread (a patch of ``torch.nn.functional`` would be
seen by a plain loop in another thread), a mode sees every call that a module makes whatever name it was imported under, also
inside vmap, and ``torch.compile`` traces through it, so that no trace of it is left in a captured step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Pair = Sequence[int]
Dims = tuple[int | None, ...]
_CONVOLUTION = "Tensor x, Tensor w, Tensor? b, int[] stride, int[] padding, int[] dilation, int groups"
VECTOR = 16
"""float32 in a vector register. torch's softmax crawls along shorter rows; along longer ones it is the faster one."""


# --- convolution: x [lane, row, channel, height, width], w [lane, out, in / groups, height, width], b [lane, out]


@torch.library.custom_op("fedrelay::lane_conv2d", mutates_args=(), schema=f"({_CONVOLUTION}) -> Tensor")
def lane_conv2d(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Tensor:
    """One channels-last convolution per lane: the kernels (and the bits) of a plain channels-last loop."""
    out: Tensor = _like_conv2d(x, w, b, stride, padding, dilation, groups)
    for g in range(len(x)):
        bias = None if b is None else b[g]
        out[g] = torch.ops.aten.convolution(_last(x[g]), _last(w[g]), bias, stride, padding, dilation, False, [0, 0], groups)
    return out


@lane_conv2d.register_fake
def _like_conv2d(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Tensor:
    sides = zip(x.shape[3:], w.shape[3:], stride, padding, dilation, strict=True)
    return _channels_last(x, (*x.shape[:2], w.shape[1], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)))


def _channels_last(like: Tensor, shape: Sequence[int]) -> Tensor:
    lanes, rows, channels, height, width = shape
    return like.new_empty((lanes, rows, height, width, channels)).permute(0, 1, 4, 2, 3)


def _last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


_GRADIENTS = f"(Tensor d, {_CONVOLUTION}, bool[] wanted) -> (Tensor, Tensor, Tensor)"


@torch.library.custom_op("fedrelay::lane_conv2d_backward", mutates_args=(), schema=_GRADIENTS)
def lane_conv2d_backward(d: Tensor, x: Tensor, w: Tensor, b: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, w and b; what is not ``wanted`` is empty and costs nothing (x, in a first layer)."""
    made: tuple[Tensor, Tensor, Tensor] = _like_backward(d, x, w, b, *rest)
    *how, groups, wanted = rest
    for g in range(len(x)):
        one = torch.ops.aten.convolution_backward(
            _last(d[g]), _last(x[g]), _last(w[g]), [w.shape[1]], *how, False, [0, 0], groups, wanted
        )
        for all_lanes, mine, want in zip(made, one, wanted, strict=True):
            if want:
                all_lanes[g] = mine
    return made


@lane_conv2d_backward.register_fake
def _like_backward(d: Tensor, x: Tensor, w: Tensor, b: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = rest[-1]
    nothing = d.new_empty(0)
    return (
        _channels_last(d, x.shape) if dx else nothing,
        d.new_empty(w.shape) if dw else nothing.clone(),  # an operator's outputs may not share memory
        d.new_empty(w.shape[:2]) if db else nothing.clone(),
    )


def _conv2d_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, *ctx.how = inputs
    ctx.save_for_backward(x, w)


def _conv2d_gradient(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    made = lane_conv2d_backward(d, *ctx.saved_tensors, None, *ctx.how, wanted)
    return (*(t if want else None for t, want in zip(made, wanted, strict=True)), None, None, None, None)


lane_conv2d.register_autograd(_conv2d_gradient, setup_context=_conv2d_saves)


# --- linear: x [lane, row, in], w [lane, out, in], b [lane, out]


@torch.library.custom_op("fedrelay::lane_linear", mutates_args=(), schema="(Tensor x, Tensor w, Tensor? b) -> Tensor")
def lane_linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """One batched product."""
    return x @ w.mT if b is None else torch.baddbmm(b.unsqueeze(1), x, w.mT)


@lane_linear.register_fake
def _like_linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:2], w.shape[1]))


def _linear_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _linear_gradient(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    dx, dw, db = ctx.needs_input_grad[:3]
    return d @ w if dx else None, d.mT @ x if dw else None, d.sum(1) if db else None


lane_linear.register_autograd(_linear_gradient, setup_context=_linear_saves)


# --- cross-entropy: z [row, class], y [row]; it has no weights, so lanes are merely more rows


@torch.library.custom_op("fedrelay::row_cross_entropy", mutates_args=(), schema="(Tensor z, Tensor y) -> (Tensor, Tensor)")
def row_cross_entropy(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """-log softmax(z)[y] per row, and its slope in z as [class, row]: softmax - one-hot. A label of -100 is no row."""
    real = y != -100
    at = y.where(real, 0).unsqueeze(0)
    t = z.mT.clone(memory_format=torch.contiguous_format)
    t -= t.amax(0)
    truth = t.gather(0, at).squeeze(0)
    norm = t.exp_().sum(0)
    t /= norm
    t.scatter_add_(0, at, t.new_full((1, 1), -1.0).expand_as(at))
    return torch.where(real, norm.log() - truth, 0), torch.where(real, t, 0)


@row_cross_entropy.register_fake
def _like_cross_entropy(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape[0]), z.new_empty((z.shape[1], z.shape[0]))


def _cross_entropy_saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _cross_entropy_gradient(ctx: Any, d: Tensor | None, _: None) -> tuple[Tensor | None, None]:
    return None if d is None else (ctx.saved_tensors[0] * d).mT, None


def _cross_entropy_lanes(info: Any, dims: Dims, z: Tensor, y: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    lanes = info.batch_size
    loss, slope = row_cross_entropy(_stacked(z, dims[0], lanes), _stacked(y, dims[1], lanes))
    return (loss.unflatten(0, (lanes, -1)), slope.unflatten(1, (lanes, -1))), (0, 1)


row_cross_entropy.register_autograd(_cross_entropy_gradient, setup_context=_cross_entropy_saves)
row_cross_entropy.register_vmap(_cross_entropy_lanes)


# --- what vmap brings


def _stacked(t: Tensor, dim: int | None, lanes: int) -> Tensor:
    """vmap's dimension joined to the operator's own first one; what all lanes share is repeated, without a copy if it is one."""
    return (t.expand(lanes, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)


def _weighted(operator: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """The vmap rule of an operator on (x, w, b, ...)."""

    def rule(info: Any, dims: Dims, x: Tensor, w: Tensor, b: Tensor | None, *rest: Any) -> tuple[Tensor, int]:
        lanes = info.batch_size
        if dims[0] is not None and dims[1] is None and dims[2] is None:  # one set of weights (a frozen extractor): more rows
            rows = x.movedim(dims[0], 1).flatten(1, 2)
            return operator(rows, w, b, *rest).unflatten(1, (lanes, -1)), 1
        bias = None if b is None else _stacked(b, dims[2], lanes)
        made = operator(_stacked(x, dims[0], lanes), _stacked(w, dims[1], lanes), bias, *rest)
        return made.unflatten(0, (lanes, -1)), 0

    return rule


lane_conv2d.register_vmap(_weighted(lane_conv2d))
lane_linear.register_vmap(_weighted(lane_linear))


# --- where modules get them


def lane_operators() -> TorchFunctionMode:
    """While this is entered, modules under ``vmap`` compute with the operators of this file where these are faster."""
    return _Lanes()


class _Lanes(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        serve = _SERVED.get(func)
        if serve is not None and _in_lanes():
            made = serve(*args, **kwargs)
            if made is not None:
                return made
        return func(*args, **kwargs)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # it does not change in what is captured
def _in_lanes() -> bool:
    """Whether this is one vmap and nothing else. A rule may take gradients or map rows inside its loss: torch's own layers serve
    there, because torch refuses the gradient of a registered operator inside ``torch.func.grad``."""
    levels = torch._C._functorch.get_interpreter_stack() or []
    return len(levels) == 1 and levels[0].key() == torch._C._functorch.TransformType.Vmap


def _cast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """As autocast would hand these to the layer: operators of our own it does not know."""
    device = tensors[0].device.type if tensors[0] is not None else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    low = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(low) for t in tensors)


def _conv2d(
    input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor | None:
    if input.device.type != "cpu" or input.ndim != 4 or not input.is_floating_point():
        return None  # a GPU is served by grouped convolutions
    stride, dilation = _pair(stride), _pair(dilation)
    if padding == "same":
        if stride != [1, 1]:
            return None  # torch says why
        around = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(n % 2 for n in around):  # torch puts the odd one at the end
            (top, left), (height, width) = (n // 2 for n in around), around
            input, around = F.pad(input, (left, width - left, top, height - top)), [0, 0]
        padding = [n // 2 for n in around]
    padding = [0, 0] if padding == "valid" else _pair(padding)
    x, w, b = _cast(input, weight, bias)
    b = None if b is None else b.unsqueeze(0)
    made: Tensor = lane_conv2d(x.unsqueeze(0), w.unsqueeze(0), b, stride, padding, dilation, groups)
    return made.squeeze(0)


def _pair(n: Any) -> list[int]:
    both = [n] if isinstance(n, int) else list(n)
    return both * 2 if len(both) == 1 else both


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if input.ndim < 2 or weight.ndim != 2 or not input.is_floating_point():
        return None
    x, w, b = _cast(input, weight, bias)
    rows = x.unsqueeze(0).flatten(1, -2)
    made: Tensor = lane_linear(rows, w.unsqueeze(0), None if b is None else b.unsqueeze(0))
    return made.reshape(*x.shape[:-1], w.shape[0])


def _cross_entropy(input: Tensor, target: Tensor, *weights: Any, weight: Any = None, **said: Any) -> Tensor | None:
    if weights or weight is not None or {**_USUAL, **said} != {**_USUAL, "reduction": "none"} or input.device.type != "cpu":
        return None
    rows = input.ndim == 2 and target.ndim == 1 and input.dtype in (torch.float32, torch.float64)
    if not rows or not 0 < input.shape[1] < VECTOR:
        return None
    made: Tensor = row_cross_entropy(input, target)[0]
    return made


_USUAL = {"size_average": None, "ignore_index": -100, "reduce": None, "reduction": "mean", "label_smoothing": 0.0}
_SERVED: dict[Any, Callable[..., Tensor | None]] = {F.conv2d: _conv2d, F.linear: _linear, F.cross_entropy: _cross_entropy}
