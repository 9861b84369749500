"""idx files made by hand, byte by byte."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from fedrelay.data.idx import find_idx, read_idx

LABELS = bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1])
"""Magic number 2049 (unsigned bytes, 1 dimension), 3 of them: 7, 2, 1."""
IMAGES = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2, 10, 20, 30, 40])
"""Magic number 2051: two images of 1x2."""


PACKED = gzip.compress(IMAGES, mtime=0)


def written(folder: Path, content: bytes, name: str = "file") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
def test_reads(tmp_path: Path, pack: type[bytes]) -> None:
    labels = read_idx(written(tmp_path, pack(LABELS)), dimensions=1)
    assert labels.tolist() == [7, 2, 1]
    assert labels.dtype == np.uint8
    images = read_idx(written(tmp_path, pack(IMAGES)), dimensions=3)
    assert images.tolist() == [[[10, 20]], [[30, 40]]]
    images[0] = 0  # torch warns of arrays that cannot be written to


@pytest.mark.parametrize(
    ("kind", "content", "numbers", "dtype"),
    [
        (0x09, b"\xff\x01", [-1, 1], np.int8),
        (0x0B, b"\x01\x00\xff\xff", [256, -1], np.int16),
        (0x0C, b"\0\0\0\1\xff\xff\xff\xfe", [1, -2], np.int32),
        (0x0D, b"\x3f\x80\0\0\xc0\0\0\0", [1.0, -2.0], np.float32),
        (0x0E, b"\x3f\xf0\0\0\0\0\0\0\xc0\0\0\0\0\0\0\0", [1.0, -2.0], np.float64),
    ],
)
def test_every_type_in_native_byte_order(tmp_path: Path, kind: int, content: bytes, numbers: list[float], dtype: type) -> None:
    array = read_idx(written(tmp_path, bytes([0, 0, kind, 1, 0, 0, 0, 2]) + content))
    assert array.tolist() == numbers
    assert array.dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    ("content", "dimensions", "sentence"),
    [
        (b"", None, "is not an idx file: it begins with the bytes (none)"),
        (b"PK\3\4....", None, "is not an idx file: it begins with the bytes 50 4b 03 04"),
        (bytes([0, 0, 7, 1]), None, "is not an idx file: it begins with the bytes 00 00 07 01"),
        (IMAGES[:10], 3, "is truncated: its header needs 16 bytes and the file has 10; copy it again"),
        (IMAGES[:-1], 3, "is truncated: its header promises 2x1x2 = 4 bytes and 3 follow; copy it again"),
        (IMAGES + b"?", 3, "is longer than it says: its header promises 2x1x2 = 4 bytes and 5 follow; copy it again"),
        (LABELS, 3, "has magic number 2049 where 2051 (3 dimensions of unsigned bytes) is expected"),
        (IMAGES, 1, "has magic number 2051 where 2049 (1 dimension of unsigned bytes) is expected"),
        (PACKED[:-9], 3, "is truncated: its gzip stream cannot be read to the end"),
        (PACKED[:-8] + b"\0" * 8, 3, "is damaged: its gzip stream cannot be read to the end (CRC check failed"),
        (PACKED[:10] + b"\xff" * 40, 3, "is damaged: its gzip stream cannot be read to the end (Error -3"),
    ],
    ids=[
        "empty",
        "zip",
        "unknown type",
        "no header",
        "short",
        "long",
        "labels for images",
        "images for labels",
        "half a gzip",
        "wrong sum",
        "no gzip",
    ],
)
def test_errors(tmp_path: Path, content: bytes, dimensions: int | None, sentence: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ValueError, match=r"^" + re.escape(f"{path} {sentence}")) as error:
        read_idx(path, dimensions)
    assert "\n" not in str(error.value)


def test_find_looks_in_order_and_takes_either_name(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    second.mkdir()
    plain = written(second, LABELS, "labels")
    assert find_idx("labels", [first, second], "MNIST") == plain
    first.mkdir()
    packed = written(first, LABELS, "labels.gz")
    assert find_idx("labels", [first, second], "MNIST") == packed


def test_a_missing_file_says_which_where_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        find_idx("labels", [tmp_path / "a", tmp_path], "MNIST")
    assert str(error.value) == (
        f"MNIST: labels.gz was looked for in {tmp_path / 'a'} and in {tmp_path} and is not there; put the MNIST files there,"
        " or name the folder that has them with FEDRELAY_DATA or --data-dir"
    )
