"""One codec for everything that travels: recipes, rules, questions, folds, plans and states as plain data.

A value becomes JSON-able data with its tensors by reference; the tensors themselves lie in a store. Names resolve through
the allow-list of :mod:`fedrelay.seam.values`, and nothing else decodes: no closure, no pickle, no surprise.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Hashable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np

from fedrelay.seam.values import KNOWN

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Lazy(Protocol):
    """Something that stands for a tensor which may lie on disk. Equal keys stand for the same bits."""

    @property
    def key(self) -> Hashable: ...
    def load(self) -> Tensor: ...


class Store:
    """Tensors by reference. The same tensor always gets the same name, so identity survives the codec."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._lazy: dict[Hashable, str] = {}

    def put(self, t: Tensor) -> str:
        name = self._names.get(id(t))
        if name is None:
            name = self._names[id(t)] = f"t{len(self._tensors)}"
            self._tensors[name] = t  # held, so that its id is not given to another tensor
        return name

    def put_lazy(self, lazy: Lazy) -> str:
        """The name of what it stands for, which is loaded at most once."""
        if lazy.key not in self._lazy:
            self._lazy[lazy.key] = self.put(lazy.load())
        return self._lazy[lazy.key]

    def get(self, name: str) -> Tensor:
        return self._tensors[name]

    def __len__(self) -> int:
        return len(self._tensors)


def encode(v: Any, store: Store) -> Any:
    """A value as JSON-able data. What cannot travel (a closure, a list, a NumPy scalar) is an error here, not on a device.

    >>> from fedrelay.seam.recipe import SGD
    >>> encode((SGD(momentum=0.9), {"a": 1}), Store())
    [{'is': 'SGD', 'momentum': 0.9, 'decay': 0.0, 'nesterov': False}, {'map': [['a', 1]]}]
    """
    if v is None or type(v) in (bool, int, float, str):
        return v
    if isinstance(v, tuple):
        return [encode(x, store) for x in v]
    if isinstance(v, Mapping):
        return {"map": [[encode(k, store), encode(x, store)] for k, x in v.items()]}
    if KNOWN.get(type(v).__name__) is type(v):
        return {"is": type(v).__name__, **{f.name: encode(getattr(v, f.name), store) for f in fields(cast(Any, v))}}
    if isinstance(v, np.ndarray):
        return {"array": v.ravel().tolist(), "type": v.dtype.str, "shape": list(v.shape)}
    if type(v).__module__.partition(".")[0] == "torch" and hasattr(v, "dtype"):
        return {"ref": store.put(v)}
    if isinstance(v, Lazy):
        return {"ref": store.put_lazy(v)}
    raise TypeError(
        f"{v!r} ({type(v).__name__}) cannot travel: it is not a registered value, a number, a string, a tuple or a mapping"
    )


def decode(d: Any, store: Store) -> Any:
    """The value that ``encode`` wrote.

    >>> decode(["x", {"map": [["a", 1.5]]}], Store())
    ('x', {'a': 1.5})
    """
    if isinstance(d, list):
        return tuple(decode(x, store) for x in d)
    if not isinstance(d, dict):
        return d
    if "is" in d:  # first, for a value may have a field called ref, map or array
        return lookup(d["is"])(**{k: decode(x, store) for k, x in d.items() if k != "is"})
    if "ref" in d:
        return store.get(d["ref"])
    if "map" in d:
        return {decode(k, store): decode(x, store) for k, x in d["map"]}
    return np.array(d["array"], dtype=np.dtype(d["type"])).reshape(d["shape"])


def lookup(name: str) -> type:
    """The registered value of this name, or one sentence that suggests what was meant."""
    if name in KNOWN:
        return KNOWN[name]
    close = difflib.get_close_matches(name, KNOWN, 1)
    raise LookupError(f"nothing called {name!r} is registered" + (f"; did you mean {close[0]!r}?" if close else ""))


def wire(v: Any) -> bytes:
    """The bytes that a network carries: a JSON header, then the tensors it refers to, in order of first mention.

    >>> import torch
    >>> message = {"w": torch.zeros(3), "again": 1}
    >>> unwire(wire(message))["w"]
    tensor([0., 0., 0.])
    """
    store = Store()
    data = encode(v, store)
    tensors = [store.get(f"t{i}") for i in range(len(store))]
    head = json.dumps({"v": data, "t": [[str(t.dtype)[6:], list(t.shape)] for t in tensors]}, separators=(",", ":")).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *map(raw, tensors)])


def unwire(message: bytes) -> Any:
    """The value in a message."""
    import torch

    size = int.from_bytes(message[:8], "little")
    head, at, store = json.loads(message[8 : 8 + size]), 8 + size, Store()
    for name, shape in head["t"]:
        dtype = getattr(torch, name)
        n = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        store.put(
            torch.frombuffer(bytearray(message[at : at + n]), dtype=dtype).reshape(shape)
            if n
            else torch.empty(shape, dtype=dtype)
        )
        at += n
    return decode(head["v"], store)


def raw(t: Tensor) -> bytes:
    """A tensor's bytes, in C order, wherever it lives."""
    import torch

    flat = t.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().data) if flat.numel() else b""
