"""Everyone's data, resident: one tensor on the device, and clients as offsets into one index. Nothing is kept per client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


class Transform(Protocol):
    """How gathered rows become what the model sees. ``keys``: one per row, for augmentation; None: rows are seen as they are."""

    def __call__(self, x: Tensor, keys: Tensor | None) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Part:
    """One part (train, validation, test) of every client's data."""

    x: Tensor
    y: Tensor
    index: Tensor
    """int32: which rows; the rows of client k lie at offsets[k] ... offsets[k + 1]."""
    offsets: Ints

    @cached_property
    def sizes(self) -> Ints:
        """Rows of each client."""
        return np.diff(self.offsets)

    @cached_property
    def starts(self) -> Ints:
        """Where each client's rows begin in the index; at EVERYBODY (-1) everybody's do."""
        return np.append(self.offsets[:-1], 0)

    @cached_property
    def lengths(self) -> Ints:
        """How many rows each client has, and at EVERYBODY (-1) all of them together."""
        return np.append(self.sizes, self.offsets[-1])

    def rows(self, client: int) -> Tensor:
        """The numbers of this client's rows."""
        return self.index[self.starts[client] : self.starts[client] + self.lengths[client]].long()

    @property
    def nbytes(self) -> int:
        """Bytes of the index: the only thing here that grows with the number of clients."""
        return self.index.nbytes + self.offsets.nbytes


@dataclass(frozen=True, eq=False)
class Examples:
    """The clients' data by part, and how rows become inputs."""

    parts: Mapping[str, Part]
    transform: Transform | None = None
    augments: bool = False
    """Whether the transform draws: only then rows get keys."""
    classes: int = 0
    dtype: torch.dtype = torch.float32
    server: tuple[Tensor, Tensor] | None = None
    """The server's own test rows."""

    @property
    def train(self) -> Part:
        return self.parts["train"]

    def inputs(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Gathered rows as the model sees them."""
        if self.transform is not None:
            return self.transform(x, keys).to(self.dtype)
        return x.to(self.dtype) if x.is_floating_point() else x

    def of(self, client: int, part: str = "train") -> tuple[Tensor, Tensor]:
        """A client's rows as the model sees them, unaugmented, and their labels."""
        own = self.parts.get(part) or self.train
        rows = own.rows(client)
        return self.inputs(own.x[rows]), own.y[rows]

    @staticmethod
    def of_lists(xs: list[Tensor], ys: list[Tensor], held: list[tuple[Tensor, Tensor]] | None = None) -> Examples:
        """From a list of tensors per client."""
        parts = {"train": _part(xs, ys)}
        if held is not None:
            parts["validation"] = _part([x for x, _ in held], [y for _, y in held])
        dtype = xs[0].dtype if xs[0].is_floating_point() else torch.float32
        return Examples(parts, dtype=dtype)


def _part(xs: list[Tensor], ys: list[Tensor]) -> Part:
    offsets = np.cumsum([0, *map(len, ys)])
    return Part(torch.cat(xs), torch.cat(ys), torch.arange(int(offsets[-1]), dtype=torch.int32), offsets)
