"""Layers with a weight set per lane: what vmap makes of a convolution, a linear layer and a cross-entropy, in faster layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

CONV = "Tensor x, Tensor w, Tensor? b, int[] stride, int[] padding, int[] dilation, int groups"


def _nhwc(shape, like):
    lanes, rows, channels, height, width = shape
    return like.new_empty((lanes, rows, height, width, channels)).permute(0, 1, 4, 2, 3)


def _last(t):
    return t.contiguous(memory_format=torch.channels_last)


def _shape(x, w, stride, padding, dilation):
    sides = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(x.shape[3:], w.shape[3:], stride, padding, dilation, strict=True)]
    return (*x.shape[:2], w.shape[1], *sides)


@torch.library.custom_op("fedrelay::lane_conv2d", mutates_args=(), schema=f"({CONV}) -> Tensor")
def lane_conv2d(x, w, b, stride, padding, dilation, groups):
    out = _nhwc(_shape(x, w, stride, padding, dilation), x)
    for g in range(len(x)):
        out[g] = torch.ops.aten.convolution(_last(x[g]), _last(w[g]), None if b is None else b[g], stride, padding, dilation, False, [0, 0], groups)
    return out


@lane_conv2d.register_fake
def _(x, w, b, stride, padding, dilation, groups):
    return _nhwc(_shape(x, w, stride, padding, dilation), x)


@torch.library.custom_op("fedrelay::lane_conv2d_backward", mutates_args=(), schema=f"(Tensor d, {CONV}, bool[] wanted) -> (Tensor, Tensor, Tensor)")
def lane_conv2d_backward(d, x, w, b, stride, padding, dilation, groups, wanted):
    dx, dw, db = _grads(d, x, w, b, stride, padding, dilation, groups, wanted)
    for g in range(len(x)):
        made = torch.ops.aten.convolution_backward(
            _last(d[g]), _last(x[g]), _last(w[g]), [w.shape[1]], stride, padding, dilation, False, [0, 0], groups, wanted
        )
        for t, m in zip((dx, dw, db), made, strict=True):
            if m is not None:
                t[g] = m
    return dx, dw, db


@lane_conv2d_backward.register_fake
def _grads(d, x, w, b, stride, padding, dilation, groups, wanted):
    return (
        _nhwc(x.shape, d) if wanted[0] else d.new_empty(0),
        d.new_empty(w.shape) if wanted[1] else d.new_empty(0),
        d.new_empty(w.shape[:2]) if wanted[2] else d.new_empty(0),
    )


def _conv_setup(ctx, inputs, output):
    x, w, b, *ctx.rest = inputs
    ctx.save_for_backward(x, w)


def _conv_backward(ctx, d):
    x, w = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    made = lane_conv2d_backward(d, x, w, None, *ctx.rest, wanted)
    return (*(t if k else None for t, k in zip(made, wanted, strict=True)), None, None, None, None)


lane_conv2d.register_autograd(_conv_backward, setup_context=_conv_setup)


def _lanes(info, dims, x, w, b):
    """bring to [lanes, ...]; """
    dx, dw, db = dims
    n = info.batch_size
    shared = dw is None and db is None and w.shape[0] == 1
    if shared:
        x = x.movedim(dx, 0)  # [G,1,B..]
        return x.flatten(0, 2)[None] if False else x.movedim(1, 0).flatten(1, 2), w, b, True
    def st(t, d):
        if t is None: return None
        t = t.movedim(d, 0) if d is not None else t.expand(n, *t.shape)
        return t.flatten(0, 1)
    return st(x, dx), st(w, dw), st(b, db), False


def _conv_vmap(info, dims, x, w, b, *rest):
    x, w, b, shared = _lanes(info, dims[:3], x, w, b)
    out = lane_conv2d(x, w, b, *rest)
    return (out.unflatten(1, (info.batch_size, -1)), 1) if shared else (out.unflatten(0, (info.batch_size, -1)), 0)


lane_conv2d.register_vmap(_conv_vmap)


@torch.library.custom_op("fedrelay::lane_linear", mutates_args=(), schema="(Tensor x, Tensor w, Tensor? b) -> Tensor")
def lane_linear(x, w, b):
    return torch.bmm(x, w.mT) if b is None else torch.baddbmm(b.unsqueeze(1), x, w.mT)


@lane_linear.register_fake
def _(x, w, b):
    return x.new_empty((x.shape[0], x.shape[1], w.shape[1]))


def _linear_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1])


def _linear_backward(ctx, d):
    x, w = ctx.saved_tensors
    wx, ww, wb = ctx.needs_input_grad[:3]
    return torch.bmm(d, w) if wx else None, torch.bmm(d.mT, x) if ww else None, d.sum(1) if wb else None


lane_linear.register_autograd(_linear_backward, setup_context=_linear_setup)


def _linear_vmap(info, dims, x, w, b):
    x, w, b, shared = _lanes(info, dims, x, w, b)
    out = lane_linear(x, w, b)
    return (out.unflatten(1, (info.batch_size, -1)), 1) if shared else (out.unflatten(0, (info.batch_size, -1)), 0)


lane_linear.register_vmap(_linear_vmap)


@torch.library.custom_op("fedrelay::row_cross_entropy", mutates_args=(), schema="(Tensor z, Tensor y) -> (Tensor, Tensor)")
def row_cross_entropy(z, y):
    t = z.mT - z.amax(1)
    truth = t.gather(0, y.unsqueeze(0)).squeeze(0)
    t = t.exp_()
    s = t.sum(0)
    return s.log() - truth, t.div_(s)


@row_cross_entropy.register_fake
def _(z, y):
    return z.new_empty(z.shape[0]), z.new_empty((z.shape[1], z.shape[0]))


def _ce_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], inputs[1])


def _ce_backward(ctx, d, _):
    p, y = ctx.saved_tensors
    return (p * d).scatter_add_(0, y.unsqueeze(0), -d.unsqueeze(0)).mT, None


row_cross_entropy.register_autograd(_ce_backward, setup_context=_ce_setup)


def _ce_vmap(info, dims, z, y):
    z, y = (t.movedim(k, 0) if k is not None else t.expand(info.batch_size, *t.shape) for t, k in zip((z, y), dims, strict=True))
    loss, p = row_cross_entropy(z.flatten(0, 1), y.flatten(0, 1))
    return (loss.unflatten(0, (info.batch_size, -1)), p.unflatten(1, (info.batch_size, -1))), (0, 1)


row_cross_entropy.register_vmap(_ce_vmap)


def _conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    def pair(v):
        return [v, v] if isinstance(v, int) else list(v)
    b = None if bias is None else bias[None]
    return lane_conv2d(input[None], weight[None], b, pair(stride), pair(padding), pair(dilation), groups).squeeze(0)


class LaneMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.conv2d:
            return _conv2d(*args, **kwargs)
        if func is F.linear:
            x, w, b = (*args, None)[:3]
            return lane_linear(x[None].flatten(1, -2), w[None], None if b is None else b[None]).squeeze(0).unflatten(0, x.shape[:-1])
        if func is F.cross_entropy:
            return row_cross_entropy(args[0], args[1])[0]
        return func(*args, **kwargs)


lane_operators = LaneMode
