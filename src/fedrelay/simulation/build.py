"""The front door: a federation on this machine from data, a partition and a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedrelay.data.augment import Normalise, Transform, Transforms
from fedrelay.data.dataset import Dataset
from fedrelay.data.partition import Partition
from fedrelay.data.partitioners import IidPartitioner, Partitioner
from fedrelay.data.sources import digits, mnist
from fedrelay.engine.auto import picker
from fedrelay.engine.engine import Engine
from fedrelay.engine.examples import Examples, Part
from fedrelay.engine.visits import Site
from fedrelay.models.build import build
from fedrelay.models.model import Model, Network, cross_entropy
from fedrelay.simulation.simulation import Clock, Simulation

if TYPE_CHECKING:
    from torch import nn

NAMED = ("digits", "mnist")
RESIDENT = 1 << 30  # normalised floats are kept up to this size; beyond it rows are normalised as they are gathered
BLOCK_BYTES, MOST_BLOCK = 64 << 20, 32


def simulate(
    data: str | Dataset = "digits",
    partition: Partitioner | Partition | Sequence[Any] | None = None,
    model: Network | nn.Module | Mapping[str, nn.Module] | Model | None = None,
    *,
    seed: int = 0,
    data_seed: int = 0,
    engine: str | Engine = "auto",
    width: int | None = None,
    precision: str = "float32",
    device: str | torch.device = "cpu",
    augment: Transform | None = None,
    held_out: float = 0.0,
    buffers: str = "average",
    speed: Sequence[float] | None = None,
    clock: Clock | None = None,
    memory_budget: int = 256 << 20,
    data_dir: str | Path | None = None,
) -> Simulation:
    """A federation on this machine.

    Args:
        data: The name of a dataset, or one of your own (``Dataset.of(x, y, test_x, test_y)``).
        partition: How rows are dealt to clients; by default evenly to 10.
        model: A network, any ``nn.Module``, modules by segment name, or a Model; by default an MLP with 32 hidden units.
        seed: Of everything that training draws.
        data_seed: Of everything that the data draw: the partition and the held-out parts.
        engine: "auto" measures once and keeps what is fastest; "lanes", "loop", or an engine of your own.
        width: Models side by side in lanes.
        precision: "float32" or "bf16" (products in bfloat16 over float32 weights).
        device: Where every tensor lives.
        augment: What training rows go through besides normalisation, such as ``CropFlip(4)``.
        held_out: The share of its rows that every client holds out to judge a visit by.
        buffers: BatchNorm's statistics: "average" or "local".
        speed: Examples per second of each client, for the virtual clock; 1 each by default.
        clock: A time model of your own instead.
        memory_budget: Bytes of client memories held in memory; the rest lies on disk.
        data_dir: Where named datasets are looked for.

    >>> fed = simulate("digits", IidPartitioner(num_partitions=5), engine="loop")
    >>> len(fed.sizes), int(fed.sizes.sum())
    (5, 1438)
    """
    dataset = named(data, data_dir) if isinstance(data, str) else data
    if not isinstance(dataset, Dataset):
        raise TypeError(f"data is a {type(data).__name__}: give a name ({', '.join(NAMED)}) or Dataset.of(x, y, test_x, test_y)")
    if precision not in ("float32", "bf16"):
        raise ValueError(f"precision {precision!r} is neither 'float32' nor 'bf16'")
    if buffers not in ("average", "local"):
        raise ValueError(f"buffers = {buffers!r} is neither 'average' nor 'local'")
    dealt = deal(dataset, partition, data_seed)
    built = on(build(fitted(model, dataset), seed), device)
    examples = resident(dataset, dealt, device, augment, held_out, data_seed)
    takes_rows(built, examples)
    size = sum(t.nbytes for t in built.initial().values())
    site = Site(built, examples, block=max(1, min(MOST_BLOCK, BLOCK_BYTES // max(size, 1))), buffers=buffers)
    if speed is not None:
        if clock is not None or len(speed) != len(dealt) or min(speed) <= 0:
            raise ValueError(f"speed needs {len(dealt)} positive numbers, one per client, and no clock beside it")
        pace = np.asarray(speed, float)
        clock = lambda clients, work: work / pace[clients]
    if isinstance(engine, str):
        engine = Engine(picker(engine, width, precision))
    return Simulation(site, engine, seed, clock, memory_budget)


def named(name: str, data_dir: str | Path | None = None) -> Dataset:
    """A dataset by its name."""
    if name not in NAMED:
        import difflib

        close = difflib.get_close_matches(name, NAMED, 1)
        hint = f"; did you mean {close[0]!r}?" if close else f": there are {', '.join(NAMED)}"
        raise ValueError(f"no dataset is called {name!r}{hint}")
    return mnist(data_dir) if name == "mnist" else digits()


def deal(dataset: Dataset, partition: Any, data_seed: int) -> Partition:
    """Who owns which rows."""
    if partition is None:
        partition = IidPartitioner(num_partitions=10)
    if isinstance(partition, Partition):
        return partition.check(len(dataset))
    if hasattr(partition, "split"):
        return partition.split(dataset.y, np.random.default_rng(data_seed)).check(len(dataset))  # type: ignore[no-any-return]
    return Partition.of(partition).check(len(dataset))


def fitted(model: Any, dataset: Dataset) -> Any:
    """The model, or its description with the data's shape and number of classes where it was left at its own default."""
    from fedrelay.models.mlp import MLP

    row = dataset.x.shape[1:]
    if model is None:
        return MLP(inputs=int(np.prod(row)), hidden=(32,), classes=dataset.classes)
    if not hasattr(model, "segments") or isinstance(model, Model | type):
        return model
    fits = {"image": tuple(row), "inputs": int(np.prod(row)), "classes": dataset.classes}
    own = {f: v for f, v in fits.items() if getattr(model, f, v) == getattr(type(model)(), f, v) != v}
    return replace(model, **own) if own else model


def takes_rows(model: Model, examples: Examples) -> None:
    """Refuse, before anything trains, a model that the data do not fit."""
    x = examples.inputs(examples.train.x[:1])
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            made = model.forward(model.initial(), x)
    except RuntimeError as e:
        said = str(e).strip().splitlines()[0]
        raise ValueError(f"the model does not take rows of shape {tuple(x.shape[1:])}: {said}") from e
    if model.criterion is cross_entropy and (made.ndim < 2 or made.shape[1] < examples.classes):
        raise ValueError(f"the data have {examples.classes} classes, but for a row the model returns {tuple(made.shape[1:])}")


def on(model: Model, device: str | torch.device) -> Model:
    """The model's modules on a device."""
    for segment in model.segments.values():
        segment.to(device)
    return model


def resident(
    dataset: Dataset, dealt: Partition, device: Any, augment: Transform | None, held_out: float, data_seed: int
) -> Examples:
    """All rows on the device, and who owns which."""
    normalise = dataset.normalise
    x, test_x = torch.from_numpy(dataset.x), torch.from_numpy(dataset.test_x)
    if x.dtype == torch.float64:
        x, test_x = x.float(), test_x.float()
    transform: Transform | None = normalise if normalise != Normalise() else None
    if augment is not None:
        transform = Transforms((augment, normalise))
    elif transform is not None and 4 * x.numel() <= RESIDENT:
        x, test_x, transform = transform(x, None), transform(test_x, None), None
    x, y = x.to(device), torch.from_numpy(dataset.y).to(device)
    train, held = split(dealt, held_out, data_seed)
    parts = {"train": part(x, y, train)}
    if held is not None:
        parts["validation"] = part(x, y, held)
    server = (test_x.to(device), torch.from_numpy(dataset.test_y).to(device)) if len(dataset.test_y) else None
    return Examples(parts, transform, augment is not None, dataset.classes, server=server)


def part(x: torch.Tensor, y: torch.Tensor, owned: Partition) -> Part:
    return Part(x, y, torch.from_numpy(np.ascontiguousarray(owned.index)).to(x.device), np.asarray(owned.offsets))


def split(dealt: Partition, share: float, data_seed: int) -> tuple[Partition, Partition | None]:
    """Every client's training rows and, where a share is held out, its held-out rows (at least one of each if it has two)."""
    if not 0 <= share < 1:
        raise ValueError(f"held_out = {share} is not a share of at least 0 and below 1")
    if not share:
        return dealt, None
    rng = np.random.default_rng([data_seed, 1])
    sizes = np.asarray(dealt.sizes)
    client = np.repeat(np.arange(len(sizes)), sizes)
    order = np.lexsort((rng.random(len(client)), client))
    rank = np.arange(len(client)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    held = np.where(sizes > 1, np.clip(np.floor(share * sizes + 0.5), 1, sizes - 1), 0).astype(np.int64)
    out = rank < np.repeat(held, sizes)
    rows = np.asarray(dealt.index)[order]

    def own(which: Any, n: Any) -> Partition:
        return Partition(rows[which].astype(np.int32), np.concatenate([[0], np.cumsum(n)]).astype(np.int64))

    return own(~out, sizes - held), own(out, held)
