"""Datasets by name. Nothing is downloaded: a dataset is bundled with a library, made up, or found in the data folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedrelay.data.dataset import Dataset
from fedrelay.data.idx import find_idx, read_idx
from fedrelay.data.partition import Partition


def data_folder(folder: str | Path | None = None, dataset: str = "data") -> Path:
    """The folder that holds datasets: ``folder``, or else what the environment variable FEDRELAY_DATA names."""
    named = folder or os.environ.get("FEDRELAY_DATA")
    if not named:
        raise FileNotFoundError(f"{dataset}: no data folder is known; set FEDRELAY_DATA or pass --data-dir")
    path = Path(named).expanduser()
    if not path.is_dir():
        origin = "--data-dir" if folder else "FEDRELAY_DATA"
        raise FileNotFoundError(f"{dataset}: the data folder {path} does not exist; correct {origin}")
    return path


def mnist(folder: str | Path | None = None) -> Dataset:
    """MNIST: 60,000 and 10,000 handwritten digits of 28x28, from its four idx files in ``<folder>/mnist`` or ``<folder>``."""
    root = data_folder(folder, "MNIST")
    places = [root / "mnist", root]
    train_x, train_y, test_x, test_y = (
        read_idx(find_idx(f"{part}-{kind}", places, "MNIST"), dimensions)
        for part in ("train", "t10k")
        for kind, dimensions in (("images-idx3-ubyte", 3), ("labels-idx1-ubyte", 1))
    )
    # The mean and standard deviation of the training pixels, as everybody's MNIST example has them.
    return Dataset("mnist", train_x[:, None], train_y, test_x[:, None], test_y, 10, (0.1307,), (0.3081,))


def digits(test_share: float = 0.2, seed: int = 0) -> Dataset:
    """scikit-learn's bundled digits: 1,797 handwritten digits of 8x8 in 0..1, so that a first run needs no file.

    They come without a test part: ``test_share`` of every class is held out, which ones is up to ``seed``.

    >>> digits()
    Dataset('digits': 1438 train, 359 test, 1x8x8 float32, 10 classes)
    """
    from sklearn.datasets import load_digits

    images, y = load_digits(return_X_y=True)
    x = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    test = held_out(y, test_share, np.random.default_rng(seed))
    # Constants and not the split's own mean: a sum of floats may differ in its last bit from machine to machine.
    return Dataset("digits", x[~test], y[~test], x[test], y[test], 10, (0.3053,), (0.3761,))


def blobs(n: int = 1000, classes: int = 4, features: int = 8, seed: int = 0, test_share: float = 0.2) -> Dataset:
    """Made-up points around one random centre per class, as many in each: for tests and for trying things out.

    >>> blobs(n=100)
    Dataset('blobs': 80 train, 20 test, 8 float32, 4 classes)
    """
    rng = np.random.default_rng(seed)
    centres = 2 * rng.standard_normal((classes, features))
    y = np.arange(n) % classes
    x = (centres[y] + rng.standard_normal((n, features))).astype(np.float32)
    test = held_out(y, test_share, rng)
    return Dataset("blobs", x[~test], y[~test], x[test], y[test], classes)


def held_out(y: NDArray[np.int64], share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which rows to hold out so that ``share`` of every class is held out, rounded to whole examples.

    >>> y = np.repeat([0, 1], [10, 30])
    >>> np.bincount(y[held_out(y, 0.1, np.random.default_rng(0))])
    array([1, 3])
    """
    if not 0 <= share < 1:
        raise ValueError(f"test_share must be at least 0 and below 1, not {share}")
    mixed = rng.permutation(len(y))
    by_class = Partition.by_owner(y[mixed], int(y.max()) + 1, mixed)
    rank = np.arange(len(y)) - np.repeat(by_class.offsets[:-1], by_class.sizes)
    chosen = rank < np.repeat(np.rint(share * by_class.sizes), by_class.sizes)
    mask = np.zeros(len(y), np.bool_)
    mask[by_class.index[chosen]] = True
    return mask
