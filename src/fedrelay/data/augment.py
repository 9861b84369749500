"""How stored rows become what a model sees: on the device, all rows of a batch at once.

A transform is a value that is called with rows and one int64 key per row. All its randomness is a function of the key, so a
row looks the same in a batch of one and in a batch of a thousand lanes, on a CPU and on a GPU. Keys are named by the caller
(by client, epoch, row ...); a transform draws only children of them. Without keys nothing is drawn and rows are seen as they
are: so models are evaluated.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from fedrelay.seam.values import value

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Transform(Protocol):
    """Rows in, as many rows out; ``keys`` are ``[n]`` int64, one for each row, or None: no augmentation."""

    def __call__(self, x: Tensor, keys: Tensor | None = None) -> Tensor: ...


@value
class Transforms:
    """One transform after another, each with its own children of the keys.

    Crop before normalising: a border of stored zeros is black, after normalising it would be the mean grey.

    >>> import torch
    >>> seen = Transforms((CropFlip(pad=1), Normalise(scale=0.5)))
    >>> seen(torch.ones(1, 1, 2, 2))
    tensor([[[[0.5000, 0.5000],
              [0.5000, 0.5000]]]])
    """

    steps: tuple[Transform, ...]

    def __call__(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        for i, step in enumerate(self.steps):
            x = step(x, None if keys is None else _child(keys, i))
        return x


@value
class Normalise:
    """``(scale x - mean) / std``, channel by channel. Nothing random.

    Integers become float32 and floats stay as wide as they are: for a run in float64 hand over float64. Where there is
    nothing to do, ``x`` is handed on as it is, so that tokens stay integers.

    >>> import torch
    >>> Normalise(mean=(0.5,), std=(0.25,), scale=1 / 255)(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    tensor([[[[-2.,  2.]]]])
    """

    mean: tuple[float, ...] = ()
    """What is subtracted from each channel: a number each, one for all, or none."""
    std: tuple[float, ...] = ()
    """What each channel is divided by."""
    scale: float = 1.0
    """What stored numbers are multiplied by first."""

    def __call__(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        if not self.mean and not self.std and self.scale == 1:
            return x
        if not x.is_floating_point():
            x = x.float()
        channels = max(len(self.mean), len(self.std), 1)
        mean, std = _each(self.mean or (0.0,), channels), _each(self.std or (1.0,), channels)
        # Folded into one multiplication and one addition; the folding is in double precision.
        factor = tuple(self.scale / s for s in std)
        shift = tuple(-m / s for m, s in zip(mean, std, strict=True))
        if channels == 1:
            return x * factor[0] + shift[0]
        if x.shape[1] != channels:  # one channel would broadcast to three without a word
            raise ValueError(f"Normalise has numbers for {channels} channels, but x has {x.shape[1]}")
        shape = (1, channels, *(1,) * (x.ndim - 2))
        return x * _constant(factor, x.dtype, x.device).view(shape) + _constant(shift, x.dtype, x.device).view(shape)


@value
class CropFlip:
    """Pad images with zeros by ``pad`` on every side, cut out a window of the old size at random, mirror every second one.

    The usual augmentation of CIFAR. Any number type; images ``[n, channels, height, width]``.

    >>> import torch
    >>> x, keys = torch.arange(8.0).reshape(2, 1, 2, 2), torch.tensor([3, 4])
    >>> seen = CropFlip(pad=1)(x, keys)
    >>> seen.shape, bool((seen[1:] == CropFlip(pad=1)(x[1:], keys[1:])).all())
    (torch.Size([2, 1, 2, 2]), True)
    """

    pad: int = 4

    def __call__(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        import torch

        if self.pad < 0:
            raise ValueError(f"CropFlip: pad must be at least 0, not {self.pad}")
        if keys is None:
            return x
        # Three draws a row: down, right, mirrored. The upper bits of the hash, without the sign; modulo a number this small
        # is uniform to 1 part in 10^8.
        draws = (_child(keys[:, None], torch.arange(3, device=keys.device)) >> 32) & 0x7FFFFFFF
        moved = draws % (2 * self.pad + 1) - self.pad
        high, wide = (torch.arange(size, device=x.device) for size in x.shape[2:])
        rows = high + moved[:, :1]
        columns = torch.where(draws[:, 2:] % 2 == 1, wide.flip(0), wide) + moved[:, 1:2]
        inside = ((rows >= 0) & (rows < len(high)))[:, :, None] & ((columns >= 0) & (columns < len(wide)))[:, None, :]
        # One gather: the place of every pixel of the window in its flattened image, the border read from anywhere and blanked.
        places = rows.clamp(0, len(high) - 1)[:, :, None] * len(wide) + columns.clamp(0, len(wide) - 1)[:, None, :]
        flat = places.flatten(1)[:, None, :].expand(-1, x.shape[1], -1)
        return x.flatten(2).gather(2, flat).reshape(x.shape).masked_fill_(~inside[:, None], 0)


def _child(keys: Tensor, index: Tensor | int) -> Tensor:
    """The engine's generator, imported when something is drawn: datasets are described where no engine is loaded."""
    from fedrelay.seam.places import child

    drawn: Tensor = child(keys, index)
    return drawn


def _each(numbers: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """A number for each channel, where there may be one for all."""
    return tuple(numbers) * channels if len(numbers) == 1 else tuple(numbers)


@lru_cache(maxsize=64)
def _constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor, made once per device: a copy to a GPU in every batch would wait for it, and cannot be captured."""
    import torch

    # A tensor born in inference mode could not take part in a backward pass later.
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)
