"""Datasets by name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fedrelay.data import blobs, data_folder, digits, held_out, mnist

needs_data = pytest.mark.skipif("FEDRELAY_DATA" not in os.environ, reason="FEDRELAY_DATA names no folder with MNIST's files")


@needs_data
def test_mnist_is_the_canonical_one() -> None:
    d = mnist()
    assert d.x.shape == (60_000, 1, 28, 28)
    assert d.test_x.shape == (10_000, 1, 28, 28)
    assert np.bincount(d.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(d.test_y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert d.x.dtype == np.uint8
    assert (d.classes, d.scale) == (10, 1 / 255)
    assert d.x.mean() / 255 == pytest.approx(d.mean[0], abs=5e-5)
    assert d.x.std() / 255 == pytest.approx(d.std[0], abs=5e-5)


@needs_data
def test_mnist_in_the_folder_itself() -> None:
    assert len(mnist(Path(os.environ["FEDRELAY_DATA"]) / "mnist")) == 60_000


def test_mnist_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        mnist(tmp_path)
    assert str(error.value).startswith(
        f"MNIST: train-images-idx3-ubyte.gz was looked for in {tmp_path / 'mnist'} and in {tmp_path} and is not there;"
    )


def test_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDRELAY_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"^MNIST: no data folder is known; set FEDRELAY_DATA or pass --data-dir$"):
        mnist()
    monkeypatch.setenv("FEDRELAY_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    (tmp_path / "other").mkdir()
    assert data_folder(tmp_path / "other") == tmp_path / "other"  # the argument comes first
    with pytest.raises(FileNotFoundError, match=r"gone does not exist; correct --data-dir$"):
        data_folder(tmp_path / "gone")
    monkeypatch.setenv("FEDRELAY_DATA", str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match=r"gone does not exist; correct FEDRELAY_DATA$"):
        data_folder()


def test_digits() -> None:
    pytest.importorskip("sklearn")
    d = digits()
    assert (d.x.shape, d.test_x.shape) == ((1438, 1, 8, 8), (359, 1, 8, 8))
    assert d.x.dtype == np.float32
    assert (d.x.min(), d.x.max()) == (0, 1)
    both = np.concatenate([d.x, d.test_x])
    assert both.mean() == pytest.approx(d.mean[0], abs=5e-5)
    assert both.std() == pytest.approx(d.std[0], abs=1e-4)
    # Stratified: a fifth of each class, to the nearest example.
    counts = np.bincount(np.concatenate([d.y, d.test_y]))
    assert np.bincount(d.test_y).tolist() == np.rint(counts * 0.2).tolist()


def test_digits_is_seeded() -> None:
    pytest.importorskip("sklearn")
    a, b, c = digits(), digits(), digits(seed=1)
    assert np.array_equal(a.test_x, b.test_x)
    assert not np.array_equal(a.test_x, c.test_x)
    assert len(digits(test_share=0).test_y) == 0
    with pytest.raises(ValueError, match=r"^test_share must be at least 0 and below 1, not 1\.5$"):
        digits(test_share=1.5)


def test_blobs_can_be_told_apart() -> None:
    d = blobs(n=400)
    centres = np.stack([d.x[d.y == c].mean(0) for c in range(d.classes)])
    nearest = ((d.test_x[:, None] - centres) ** 2).sum(2).argmin(1)
    assert (nearest == d.test_y).mean() > 0.9


def test_held_out_without_a_class_in_the_middle() -> None:
    y = np.array([0] * 8 + [2] * 4)
    assert np.bincount(y[held_out(y, 0.5, np.random.default_rng(0))]).tolist() == [4, 0, 2]
