"""Randomness is named by place: (seed, path, purpose, number), then (chain, position) for a visit.

Keys are 64-bit integers of a counter-based generator (splitmix64), computed for all lanes at once with integer arithmetic
only: the same bits in NumPy and in torch, on a processor, a graphics card or a device.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from fedrelay.seam.values import value

GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
_M1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_M2 = -7723592293110705685  # 0x94D049BB133111EB


def splitmix(z: Any) -> Any:
    """splitmix64's finaliser on an int64 array or tensor; products wrap, shifts are logical."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _M1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _M2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def child(key: Any, index: Any) -> Any:
    """The generator's output number ``index`` (from 0) at the state ``key``: arrays or tensors of int64, broadcast.

    The reference implementation with seed 0 begins with e220a8397b1dcdaf:

    >>> int(child(np.array([0]), 0)[0]) & (2**64 - 1) == 0xE220A8397B1DCDAF
    True
    """
    step = (index + 1) * GAMMA
    if isinstance(step, int):  # a Python integer does not wrap by itself
        step = (step + 2**63) % 2**64 - 2**63
    return splitmix(key + step)


@value
class Place:
    """Where in a run something is drawn. The number comes from the federation's counter for (path, purpose)."""

    path: tuple[str, ...]
    purpose: str
    number: int

    def key(self, seed: int, *more: str) -> int:
        """A 64-bit key, independent of every other place's."""
        text = repr((seed, self.path, self.purpose, self.number, *more)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)

    def rng(self, seed: int, *more: str) -> np.random.Generator:
        """A NumPy generator for draws that happen a few times a round.

        >>> place = Place(("warmup",), "cohort", 3)
        >>> bool(place.rng(0).integers(100) == place.rng(0).integers(100))
        True
        """
        return np.random.default_rng(self.key(seed, *more) & (1 << 63) - 1)
