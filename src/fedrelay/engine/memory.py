"""What clients keep between visits: in memory up to a budget, the rest on disk. A row is written once and never changed."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrelay.engine.visits import Kept
from fedrelay.seam.folds import Slice

Layout = tuple[tuple[str, str, str, tuple[int, ...]], ...]
"""(rule, leaf, dtype, shape) of a row's tensors, in order."""


@dataclass(frozen=True, eq=False)
class Row:
    """One client's memory, wherever it lies."""

    spill: Spill
    number: int


class Spill:
    """Rows of bytes under a memory budget: the least recently used go to an append-only file.

    >>> spill = Spill(budget=100)
    >>> rows = [spill.put({"rule": {"c": torch.full((10,), float(i))}}) for i in range(9)]
    >>> spill.resident <= 100, float(spill.get(rows[0])["rule"]["c"].sum())
    (True, 0.0)
    """

    def __init__(self, budget: int = 256 << 20, folder: str | None = None) -> None:
        self.budget, self.folder = budget, folder
        self.resident = 0
        self._cache: OrderedDict[int, tuple[Tensor, ...]] = OrderedDict()
        self._layouts: dict[Layout, int] = {}
        self._kinds: list[Layout] = []
        self._kind_of: dict[int, int] = {}
        self._where: dict[int, int] = {}
        self._free: dict[int, list[int]] = {}
        self._next = 0
        self._end = 0
        self._file: int | None = None

    def put(self, kept: Kept) -> Row:
        """Take a client's memory."""
        layout = tuple((rule, leaf, str(t.dtype)[6:], tuple(t.shape)) for rule, m in kept.items() for leaf, t in m.items())
        kind = self._layouts.setdefault(layout, len(self._layouts))
        if kind == len(self._kinds):
            self._kinds.append(layout)
        tensors = tuple(m[leaf].detach().clone() for m in kept.values() for leaf in m)
        number, self._next = self._next, self._next + 1
        self._kind_of[number] = kind
        self._hold(number, tensors)
        return Row(self, number)

    def get(self, row: Row) -> dict[str, dict[str, Tensor]]:
        """A client's memory, read back if it was on disk."""
        layout = self._kinds[self._kind_of[row.number]]
        tensors = self._cache.get(row.number)
        if tensors is None:
            tensors = self._read(row.number, layout)
            self._hold(row.number, tensors)
        else:
            self._cache.move_to_end(row.number)
        out: dict[str, dict[str, Tensor]] = {}
        for (rule, leaf, _, _), t in zip(layout, tensors, strict=True):
            out.setdefault(rule, {})[leaf] = t
        return out

    def lazily(self, row: Row) -> dict[str, dict[str, LazyLeaf]]:
        """The same without reading anything yet."""
        out: dict[str, dict[str, LazyLeaf]] = {}
        for rule, leaf, _, _ in self._kinds[self._kind_of[row.number]]:
            out.setdefault(rule, {})[leaf] = LazyLeaf(row, rule, leaf)
        return out

    def drop(self, row: Row) -> None:
        """Nobody refers to this row any more; its place in the file is used again."""
        tensors = self._cache.pop(row.number, None)
        self.resident -= sum(t.nbytes for t in tensors) if tensors else 0
        if (at := self._where.pop(row.number, None)) is not None:
            self._free.setdefault(self._bytes(row.number), []).append(at)
        self._kind_of.pop(row.number, None)

    def _hold(self, number: int, tensors: tuple[Tensor, ...]) -> None:
        self._cache[number] = tensors
        self.resident += sum(t.nbytes for t in tensors)
        while self.resident > self.budget and len(self._cache) > 1:
            oldest, cold = self._cache.popitem(last=False)
            self.resident -= sum(t.nbytes for t in cold)
            if oldest not in self._where:
                self._write(oldest, cold)

    def _bytes(self, number: int) -> int:
        return sum(
            getattr(torch, d).itemsize * int(np.prod(s, dtype=np.int64)) for _, _, d, s in self._kinds[self._kind_of[number]]
        )

    def _open(self) -> int:
        """The file, made when the first row is spilled; it has no name, so that nothing is left behind whatever happens."""
        if self._file is None:
            self._file, path = tempfile.mkstemp(prefix="fedrelay-", dir=self.folder)
            os.unlink(path)
            weakref.finalize(self, os.close, self._file)
        return self._file

    def _write(self, number: int, tensors: tuple[Tensor, ...]) -> None:
        size = self._bytes(number)
        places = self._free.get(size)
        at = places.pop() if places else self._end
        self._end = max(self._end, at + size)
        data = b"".join(t.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"" for t in tensors)
        try:
            done = 0
            while done < size:  # a disk that is nearly full takes a part, and says no the next time
                done += os.pwrite(self._open(), memoryview(data)[done:], at + done)
        except OSError as e:
            where = self.folder or tempfile.gettempdir()
            raise OSError(
                e.errno,
                f"client memory could not be spilled to {where} ({e.strerror}): free some space, or raise the memory budget",
            ) from e
        self._where[number] = at

    def _read(self, number: int, layout: Layout) -> tuple[Tensor, ...]:
        data = bytearray(os.pread(self._open(), self._bytes(number), self._where[number]))
        out, at = [], 0
        for _, _, name, shape in layout:
            dtype = getattr(torch, name)
            n = int(np.prod(shape, dtype=np.int64))
            out.append(
                torch.frombuffer(data, dtype=dtype, count=n, offset=at).reshape(shape).clone()  # bits may depend on where it lies
                if n
                else torch.empty(shape, dtype=dtype)
            )
            at += n * dtype.itemsize
        return tuple(out)


class Spilled(Mapping[str, Tensor]):
    """A model whose trained leaves may lie on disk; the others are the tensors they were. Its row goes when it does."""

    def __init__(self, spill: Spill, w: Slice) -> None:
        self._base = {n: t for n, t in w.base.items() if n not in w.stacked}
        self._names = tuple(w)
        self._row = spill.put({"": {n: w[n] for n in w.stacked}})
        weakref.finalize(self, spill.drop, self._row)

    def __getitem__(self, leaf: str) -> Tensor:
        return self._base[leaf] if leaf in self._base else self._row.spill.get(self._row)[""][leaf]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Memories:
    """(path, client) -> version and row: the memories of all clients, as a simulation commits them."""

    def __init__(self, spill: Spill) -> None:
        self.spill = spill
        self._rows: dict[tuple[tuple[str, ...], int], tuple[int, Row]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def version(self, path: tuple[str, ...], client: int) -> int:
        known = self._rows.get((path, client))
        return known[0] if known else 0

    def read(self, path: tuple[str, ...], client: int) -> Kept:
        known = self._rows.get((path, client))
        return self.spill.get(known[1]) if known else {}

    def commit(self, path: tuple[str, ...], client: int, version: int, row: Row) -> None:
        """Make this the client's memory. The same version twice is once."""
        known = self._rows.get((path, client))
        if known and known[0] == version:
            return
        if version != (known[0] if known else 0) + 1:
            raise ValueError(
                f"client {client} keeps version {known[0] if known else 0} of its memory; version {version} does not follow it"
            )
        if known:
            self.spill.drop(known[1])
        self._rows[path, client] = version, row

    def row(self, kept: Mapping[str, Mapping[str, Tensor | LazyLeaf]]) -> Row:
        """Where a staged memory lies; one that comes from a checkpoint is put there."""
        first = next((t for m in kept.values() for t in m.values()), None)
        if isinstance(first, LazyLeaf) and first.row.spill is self.spill:
            return first.row
        return self.spill.put(loaded(kept))

    def forget(self, path: tuple[str, ...]) -> None:
        """Drop the memories of a path and everything below it."""
        for key in [k for k in self._rows if k[0][: len(path)] == path]:
            self.spill.drop(self._rows.pop(key)[1])

    def clients(self, path: tuple[str, ...] = ()) -> Mapping[int, Kept]:
        """The memories of a path, by client."""
        return {c: self.spill.get(row) for (p, c), (_, row) in self._rows.items() if p == path}

    def state(self) -> Any:
        """As a value whose tensors are read from disk one row at a time."""
        return tuple((path, client, version, self.spill.lazily(row)) for (path, client), (version, row) in self._rows.items())

    def restore(self, state: Any) -> None:
        before = [row for _, row in self._rows.values()]
        self._rows = {(path, client): (version, self.spill.put(loaded(kept))) for path, client, version, kept in state}
        for row in before:
            self.spill.drop(row)


def loaded(kept: Mapping[str, Mapping[str, Tensor | LazyLeaf]]) -> Kept:
    """A memory whose tensors are there."""
    return {rule: {leaf: t.load() if isinstance(t, LazyLeaf) else t for leaf, t in m.items()} for rule, m in kept.items()}


@dataclass(frozen=True)
class LazyLeaf:
    """One tensor of a row, read when it is needed. Rows never change, so its key names its bits."""

    row: Row
    rule: str
    leaf: str

    @property
    def key(self) -> Hashable:
        return self.row, self.rule, self.leaf  # the row itself: the id of a spill that is gone may be another's

    def load(self) -> Tensor:
        return self.row.spill.get(self.row)[self.rule][self.leaf]
