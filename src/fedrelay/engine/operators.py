"""Layers with a weight set per lane: what ``vmap`` makes of ``conv2d``, ``linear`` and ``cross_entropy``, in layouts that are fast.

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
FEW = 32
"""Up to so many classes a softmax down the columns is faster than torch's along rows."""


# --- convolution: x [lane, row, channel, height, width], w [lane, out, in / groups, height, width], b [lane, out]


@torch.library.custom_op("fedrelay::lane_conv2d", mutates_args=(), schema=f"({_CONVOLUTION}) -> Tensor")
def lane_conv2d(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Tensor:
    """One channels-last convolution per lane: the kernels (and the bits) of a plain channels-last loop."""
    out = _like_conv2d(x, w, b, stride, padding, dilation, groups)
    for g in range(len(x)):
        bias = None if b is None else b[g]
        out[g] = torch.ops.aten.convolution(_last(x[g]), _last(w[g]), bias, stride, padding, dilation, False, [0, 0], groups)
    return out


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
    made = _like_backward(d, x, w, b, *rest)
    *how, groups, wanted = rest
    for g in range(len(x)):
        one = torch.ops.aten.convolution_backward(
            _last(d[g]), _last(x[g]), _last(w[g]), [w.shape[1]], *how, False, [0, 0], groups, wanted
        )
        for all_lanes, mine, want in zip(made, one, wanted, strict=True):
            if want:
                all_lanes[g] = mine
    return made


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


# --- linear: x [lane, row, in], w [lane, out, in], b [lane, out]


@torch.library.custom_op("fedrelay::lane_linear", mutates_args=(), schema="(Tensor x, Tensor w, Tensor? b) -> Tensor")
def lane_linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """One batched product."""
    return torch.bmm(x, w.mT) if b is None else torch.baddbmm(b.unsqueeze(1), x, w.mT)


def _like_linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:2], w.shape[1]))


def _linear_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _linear_gradient(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    dx, dw, db = ctx.needs_input_grad[:3]
    return d @ w if dx else None, d.mT @ x if dw else None, d.sum(1) if db else None


# --- cross-entropy: z [row, class], y [row]; it has no weights, so lanes are merely more rows


@torch.library.custom_op("fedrelay::row_cross_entropy", mutates_args=(), schema="(Tensor z, Tensor y) -> (Tensor, Tensor)")
def row_cross_entropy(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """-log softmax(z)[y] per row, and its slope in z as [class, row]: softmax - one-hot. A label of -100 costs nothing."""
    real = y != -100
    at = y.where(real, 0).unsqueeze(0)
    t = z.mT.contiguous() if z.mT.is_contiguous() is False else z.mT.clone()
    t -= t.amax(0)
    truth = t.gather(0, at)
    norm = t.exp_().sum(0)
    t /= norm
    t.scatter_add_(0, at, t.new_full((1, 1), -1.0).expand_as(at))
    return torch.where(real, norm.log() - truth[0], 0), torch.where(real, t, 0)


def _like_cross_entropy(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape[0]), z.new_empty((z.shape[1], z.shape[0]))


def _cross_entropy_saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _cross_entropy_gradient(ctx: Any, d: Tensor | None, _: None) -> tuple[Tensor | None, None]:
    return None if d is None else (ctx.saved_tensors[0] * d).mT, None
