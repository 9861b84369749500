"""Checkpoints: a state as JSON with its tensors beside it. Each one writes what is new, and none is ever half there.

A checkpoint is ``<name>.json``, replaced atomically; the tensors lie in segment files that never change. A tensor that lay in
an earlier checkpoint is not written again; a segment that nothing refers to is deleted, one that is mostly unused is rewritten.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrelay.seam.codec import Lazy, Store, decode, encode

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
SPARSE = 0.5  # a segment with a smaller share of its tensors in use is rewritten


class Checkpoints(Store):
    """Named checkpoints in one folder.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> Checkpoints(folder).save("last", {"w": torch.ones(2), "round": 3})
    >>> Checkpoints(folder).load("last")
    {'w': tensor([1., 1.]), 'round': 3}
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._alive: dict[int, tuple[weakref.ref[Tensor], int, str]] = {}
        self._new: dict[str, Tensor] = {}
        self._segment = 0
        self._sizes: dict[int, int] = {}
        self._data: dict[str, Any] = {}

    # --- the store that the codec writes to

    def put(self, t: Tensor) -> str:
        known = self._alive.get(id(t))
        if known and known[0]() is t and known[1] == t._version:  # the same tensor, and nobody wrote into it
            return known[2]
        name = f"{self._segment}/{len(self._new)}"
        self._new[name] = t
        self._alive[id(t)] = weakref.ref(t), t._version, name
        return name

    def put_lazy(self, lazy: Lazy) -> str:
        name = self._lazy.get(lazy.key)
        if name is None:
            name = self._lazy[lazy.key] = self.put(lazy.load())
        return name

    def get(self, name: str) -> Tensor:
        return self._tensors[name]

    # --- saving

    def save(self, name: str, value: Any) -> None:
        """Make this the checkpoint of that name. What was there before stays whole until this one is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._number()
        data = encode(value, self)
        self._write_segment()
        self._replace(self.folder / f"{name}.json", json.dumps({"schema": SCHEMA, "state": data}).encode())
        self._data[name] = data  # only now: what this name refers to is what must not be deleted
        self._tidy()

    def _number(self) -> None:
        taken = [int(p.stem.partition("-")[2]) for p in self.folder.glob("tensors-*.safetensors")]
        self._segment = max([self._segment, *(n + 1 for n in taken)])

    def _write_segment(self) -> None:
        from safetensors.torch import save

        if self._new:
            tensors = {n.partition("/")[2]: t.detach().cpu().contiguous().clone() for n, t in self._new.items()}
            self._replace(self._file(self._segment), save(tensors))
            self._sizes[self._segment] = len(tensors)
        self._new = {}
        self._segment += 1

    def _file(self, segment: int) -> Path:
        return self.folder / f"tensors-{segment}.safetensors"

    def _replace(self, path: Path, data: bytes) -> None:
        new = path.with_name(path.name + ".new")
        try:
            with new.open("wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            new.replace(path)
        except OSError as e:
            new.unlink(missing_ok=True)
            raise OSError(
                e.errno, f"the checkpoint could not be written to {path.parent} ({e.strerror}); the one before it is whole"
            ) from e

    def _tidy(self) -> None:
        """Delete segments that no checkpoint refers to; forget names whose tensors are gone or sparse."""
        used: dict[int, int] = {}
        live: set[str] = set()
        for path in self.folder.glob("*.json"):
            live |= set(_names(self._data.get(path.stem) or _state(path)))
        for n in live:
            segment = int(n.partition("/")[0])
            used[segment] = used.get(segment, 0) + 1
        for path in self.folder.glob("tensors-*.safetensors"):
            if int(path.stem.partition("-")[2]) not in used:
                path.unlink()
        sparse = {s for s, n in used.items() if n < SPARSE * self._sizes.get(s, n)}

        def keep(name: str) -> bool:  # what is forgotten is written again with the next checkpoint
            return name in live and int(name.partition("/")[0]) not in sparse

        self._alive = {i: known for i, known in self._alive.items() if known[0]() is not None and keep(known[2])}
        self._lazy: dict[Hashable, str] = {k: n for k, n in self._lazy.items() if keep(n)}

    # --- loading

    def load(self, name: str) -> Any:
        """The value of a checkpoint."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.folder / f"{name}.json"
        try:
            data = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise FileNotFoundError(
                f"no checkpoint {name!r} in {self.folder}: the run was stopped before its first one"
            ) from None
        except ValueError as e:
            raise ValueError(f"{path} is not a checkpoint ({e})") from None
        if data.get("schema") != SCHEMA:
            raise ValueError(f"{path} has schema {data.get('schema')}; this version reads schema {SCHEMA}")
        wanted = set(_names(data["state"]))
        for segment in sorted({int(n.partition("/")[0]) for n in wanted}):
            try:
                tensors = load_file(self._file(segment))
            except (OSError, SafetensorError) as e:
                raise ValueError(f"{path} cannot be read: {self._file(segment).name} is damaged or gone ({e})") from None
            self._sizes[segment] = len(tensors)
            # cloned: bits may depend on where a tensor lies, and in a segment it lies anywhere
            self._tensors.update({f"{segment}/{k}": t.clone() for k, t in tensors.items() if f"{segment}/{k}" in wanted})
        self._data[name] = data["state"]
        made = decode(data["state"], self)
        self._alive = {id(t): (weakref.ref(t), t._version, n) for n, t in self._tensors.items()}
        self._tensors = {}
        return made


def _state(path: Path) -> Any:
    """What a checkpoint refers to; nothing if it is another kind of file."""
    try:
        data = json.loads(path.read_bytes())
    except ValueError:
        return None
    return data.get("state") if isinstance(data, dict) and "schema" in data else None


def _names(data: Any) -> list[str]:
    """The references in encoded data."""
    if isinstance(data, list):
        return [n for x in data for n in _names(x)]
    if isinstance(data, dict):
        return [data["ref"]] if "ref" in data and "is" not in data else [n for x in data.values() for n in _names(x)]
    return []
