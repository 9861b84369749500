"""The residual block of He et al. (2016). It is a torch module, so this file loads torch: import it where a network is built."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from fedrelay.models.layers import normalisation


class Residual(nn.Module):
    """relu(body(x) + shortcut(x)), the body being two 3x3 convolutions, each with its norm.

    >>> import torch
    >>> Residual(4, 8, stride=2, norm="group")(torch.zeros(1, 4, 6, 6)).shape
    torch.Size([1, 8, 3, 3])
    """

    def __init__(self, before: int, width: int, stride: int, norm: str) -> None:
        super().__init__()
        self.body = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(before, width, 3, stride, padding=1, bias=False),
                conv1_norm=normalisation(norm, width),
                conv1_relu=nn.ReLU(),
                conv2=nn.Conv2d(width, width, 3, padding=1, bias=False),
                conv2_norm=normalisation(norm, width),
            )
        )
        self.shortcut = nn.Sequential()  # the row itself, where the shape stays
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(
                OrderedDict(conv=nn.Conv2d(before, width, 1, stride, bias=False), conv_norm=normalisation(norm, width))
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return y
