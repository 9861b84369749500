"""Which rows make up which batch: a pure function of a visit's key, computed for many visits at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedrelay.seam.places import child

SHUFFLE, AUGMENT = 0, 1  # a visit's key has a stream per purpose


def permutations(keys: Tensor, sizes: Tensor, epochs: Tensor, longest: int) -> Tensor:
    """[visits, epochs, longest]: row (v, e) begins with a permutation of range(sizes[v]) drawn from (keys[v], epochs[e]) only."""
    at = torch.arange(longest, device=keys.device)
    draws = child(child(child(keys, SHUFFLE)[:, None], epochs)[..., None], at)
    draws = ((draws >> 1) & ~0x1FFFFF) | at  # the place breaks ties: no two are equal (so a client may own 2**21 examples)
    if bool((sizes < longest).any()):
        draws = draws.masked_fill(at >= sizes[:, None, None], torch.iinfo(torch.int64).max)
    order: Tensor = draws.argsort(-1)
    return order


class Batches(NamedTuple):
    """Batches of many visits, padded to one shape."""

    rows: Tensor
    """[visits, steps, shape]: places within the client's rows; padding repeats the batch's own first row."""
    counts: Tensor
    """[visits, steps]: true rows of each batch; 0: the visit has no such step."""


def batches(keys: Tensor, sizes: Tensor, batch: Tensor, limit: Tensor, first_epoch: int, epochs: int, shape: int) -> Batches:
    """The batches of some epochs of visits with these keys, sizes, batch sizes and total numbers of steps."""
    longest = int(sizes.max())
    perms = permutations(keys, sizes, torch.arange(first_epoch, first_epoch + epochs, device=keys.device), longest)
    per_epoch = (sizes + batch - 1) // batch  # a last partial batch is not dropped
    widest = int(per_epoch.max())
    step = torch.arange(widest * epochs, device=keys.device)
    epoch, within = step // per_epoch[:, None], step % per_epoch[:, None]
    first = (within * batch[:, None])[..., None]
    column = torch.arange(shape, device=keys.device)
    real = (column < batch[:, None, None]) & (first + column < sizes[:, None, None])
    real &= ((epoch < epochs) & (step + first_epoch * per_epoch[:, None] < limit[:, None]))[..., None]
    place = torch.where(real, first + column, first)
    visit = torch.arange(len(keys), device=keys.device)[:, None, None]
    return Batches(perms[visit, epoch.clamp(max=epochs - 1)[..., None], place], real.sum(-1))


def total_steps(sizes: Tensor, batch: Tensor, epochs: Tensor, steps: Tensor) -> Tensor:
    """Steps of a visit: as many as asked for, else by epochs."""
    return torch.where(steps > 0, steps, epochs * ((sizes + batch - 1) // batch))


def row_keys(keys: Tensor, step: Tensor, shape: int) -> Tensor:
    """[visits, shape]: a key per row of a batch, for augmentation."""
    made: Tensor = child(child(child(keys, AUGMENT), step)[:, None], torch.arange(shape, device=keys.device))
    return made
