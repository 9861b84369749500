"""The step of a chain of linear layers, written out in batched products: what vmap and autograd compute, in half the time.

Limit on a processor: two products per layer and step (three above the first), 2 x rows x in x out FLOPs each; a round of
100 clients with 128 padded rows through 784-32-10 is 1.3 GFLOP. Products stay in [lane, row, feature] order, the logits lie
transposed so that the softmax runs along contiguous rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedrelay.models.model import Model, cross_entropy

ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}


@dataclass(frozen=True)
class Layer:
    weight: str
    bias: str | None
    activation: str | None = None


def read(model: Model, enters: str | None) -> list[Layer] | None:
    """The model as linear layers with activations between them, ending in logits; None where it is anything else."""
    if model.criterion is not cross_entropy:
        return None
    layers: list[Layer] = []
    for segment in model.between(enters):
        for path, module in model.segments[segment].named_modules(remove_duplicate=False):
            if module._forward_hooks or module._forward_pre_hooks:
                return None
            if isinstance(module, nn.Sequential | nn.Identity) or (isinstance(module, nn.Flatten) and not layers):
                if type(module) not in (nn.Sequential, nn.Identity, nn.Flatten):
                    return None  # a subclass may do anything in its forward
                if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
                    return None
                continue
            if type(module) is nn.Linear:
                prefix = ".".join(p for p in (segment, path) if p)
                layers.append(Layer(f"{prefix}.weight", f"{prefix}.bias" if module.bias is not None else None))
            elif type(module) in ACTIVATIONS and layers and layers[-1].activation is None:
                layers[-1] = Layer(layers[-1].weight, layers[-1].bias, ACTIVATIONS[type(module)])
            else:
                return None
    plain = model.scope()  # a leaf that is shared or does not train is not here under this name
    if not layers or layers[-1].activation or any(n not in plain for a in layers for n in (a.weight, a.bias) if n):
        return None
    return layers


LINE = 16  # float32 in a cache line; twice as much as needed in double precision


def aligned(like: Tensor, lanes: int) -> Tensor:
    """Zeros of this shape for every lane, each beginning at a cache line: a product takes another way, with other last bits, to
    memory that does not, and no bit may depend on the lane."""
    n = like.numel()
    if n % LINE == 0 or not like.ndim:
        return like.new_zeros((lanes, *like.shape))
    padded: Tensor = like.new_zeros((lanes, -(-n // LINE) * LINE))[:, :n].unflatten(1, like.shape)
    return padded


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of every lane, laid where no bit depends on the lane."""
    if a.shape[1] * b.shape[2] % LINE == 0:
        return a @ b
    return aligned(a.new_empty((a.shape[1], b.shape[2])), len(a)).baddbmm_(a, b, beta=0)


def _activate(z: Tensor, activation: str | None) -> Tensor:
    if activation == "sigmoid":  # by way of tanh, whose bits do not depend on the lane: torch rounds its last few otherwise
        return z.mul_(0.5).tanh_().add_(1).mul_(0.5)
    return z.relu_() if activation == "relu" else z.tanh_() if activation == "tanh" else z


def _through(d: Tensor, a: Tensor, activation: str | None) -> Tensor:
    """The gradient before an activation from the one after it; ``a`` is the activation's output."""
    if activation == "relu":
        return d.mul_(a > 0)
    if activation == "tanh":
        return d.addcmul_(d, a * a, value=-1)
    return d.mul_(a * (1 - a)) if activation else d


def gradients(
    layers: list[Layer], w: Mapping[str, Tensor], x: Tensor, y: Tensor, mask: Tensor, scale: Tensor, fused: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of ``scale`` times the summed loss of every lane's rows, and that sum.

    ``fused``: instead of returning gradients, subtract them from ``w`` at once (with ``scale`` holding the rate, that is a
    plain SGD step, and the gradients are never written to memory).
    """
    inputs = [x.flatten(2)]
    for layer in layers[:-1]:
        weight = w[layer.weight].mT
        z = torch.baddbmm(w[layer.bias].unsqueeze(1), inputs[-1], weight) if layer.bias else inputs[-1] @ weight
        inputs.append(_activate(z, layer.activation))
    last = layers[-1]
    z = w[last.weight] @ inputs[-1].mT  # [lane, class, row]
    if last.bias:
        z += w[last.bias].unsqueeze(2)
    d = z.log_softmax(1)
    losses = torch.where(mask, d.gather(1, y.unsqueeze(1)).squeeze(1), 0).sum(1).neg_()
    weight = torch.where(mask, scale.unsqueeze(1), 0).unsqueeze(1)
    d.exp_().mul_(weight)  # softmax minus truth, times scale; nothing where a row is padding
    d.scatter_add_(1, y.unsqueeze(1), -weight)
    grads: dict[str, Tensor] = {}
    transposed = True  # whether d is [lane, feature, row]
    for i in range(len(layers) - 1, -1, -1):
        layer, h = layers[i], inputs[i]
        dt = d if transposed else d.mT
        below = None
        if i:
            below = _through(dt.mT @ w[layer.weight], h, layers[i - 1].activation)
        if fused:
            w[layer.weight].baddbmm_(dt, h, alpha=-1)
            if layer.bias:
                w[layer.bias].sub_(dt.sum(2))
        else:
            grads[layer.weight] = product(dt, h)
            if layer.bias:
                grads[layer.bias] = dt.sum(2)
        if below is not None:
            d, transposed = below, False
    return grads, losses


class LinearStep:
    """Losses and gradients of linear chains for many lanes; plain SGD without a penalty is done in place."""

    def __init__(self, layers: list[Layer], fused: bool) -> None:
        self.layers, self.fused = layers, fused

    def __call__(self, w: Mapping[str, Tensor], x: Tensor, y: Tensor, mask: Tensor, scale: Tensor) -> Any:
        with torch.no_grad():
            return gradients(self.layers, w, x, y, mask, scale, self.fused)
