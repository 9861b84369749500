"""Files in the idx format, in which MNIST and its relatives are published: a big-endian header, then the numbers."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""The third byte of an idx file -> what its numbers are."""


def read_idx(path: str | Path, dimensions: int | None = None) -> NDArray[Any]:
    """The array in an idx file, gzipped or plain (the content decides, not the name), in native byte order.

    With ``dimensions`` the file must hold unsigned bytes of so many dimensions: 3 for images (magic number 2051), 1 for
    labels (2049), so that a file of the one kind under a name of the other is found out here.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "labels-idx1-ubyte"
    >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
    >>> read_idx(path)
    array([7, 2, 1], dtype=uint8)
    >>> read_idx(path, dimensions=3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: .../labels-idx1-ubyte has magic number 2049 where 2051 (3 dimensions of unsigned bytes) is expected
    """
    path = Path(path)
    data = _content(path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in TYPES or data[3] == 0:
        raise ValueError(f"{path} is not an idx file: it begins with the bytes {data[:4].hex(' ') or '(none)'}")
    kind, dims = data[2], data[3]
    if dimensions is not None and (kind, dims) != (0x08, dimensions):
        plural = "dimension" if dimensions == 1 else "dimensions"
        raise ValueError(
            f"{path} has magic number {kind << 8 | dims} where {0x800 | dimensions}"
            f" ({dimensions} {plural} of unsigned bytes) is expected"
        )
    header = 4 + 4 * dims
    if len(data) < header:
        raise ValueError(f"{path} is truncated: its header needs {header} bytes and the file has {len(data)}; copy it again")
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", dims, 4))
    dtype = np.dtype(TYPES[kind])
    promised, found = prod(shape) * dtype.itemsize, len(data) - header
    if promised != found:
        problem = "is truncated" if found < promised else "is longer than it says"
        size = "x".join(map(str, shape))
        raise ValueError(f"{path} {problem}: its header promises {size} = {promised} bytes and {found} follow; copy it again")
    # A copy, because what frombuffer returns cannot be written to, and torch warns of such arrays.
    return np.frombuffer(data, dtype, offset=header).reshape(shape).astype(dtype.newbyteorder("="))


def find_idx(name: str, places: Sequence[Path], dataset: str) -> Path:
    """The file called ``name`` or ``name.gz`` in the first of ``places`` that has it."""
    for place in places:
        for file in (place / f"{name}.gz", place / name):
            if file.is_file():
                return file
    looked = " and in ".join(map(str, places))
    raise FileNotFoundError(
        f"{dataset}: {name}.gz was looked for in {looked} and is not there; put the {dataset} files there, or name the folder"
        " that has them with FEDRELAY_DATA or --data-dir"
    )


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = "truncated" if isinstance(error, EOFError) else "damaged"
        raise ValueError(f"{path} is {problem}: its gzip stream cannot be read to the end ({error}); copy it again") from error
