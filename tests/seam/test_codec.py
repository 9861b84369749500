"""The codec: whatever is registered comes back as it was, whatever is not is refused in one sentence, and bytes are counted."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch

from fedrelay.methods import Dynamic, Proximal
from fedrelay.seam.codec import Store, decode, encode, lookup, unwire, wire
from fedrelay.seam.folds import Bank, Mean, Sum
from fedrelay.seam.landing import Flight, Landing, Receipts
from fedrelay.seam.plan import Plan, Visit, chain
from fedrelay.seam.recipe import SGD, Adam, Cosine, Recipe
from fedrelay.seam.values import KNOWN, value

ROOMS = ("seam", "methods", "algorithms", "parts", "models")
for room in ROOMS:
    for module in pkgutil.walk_packages(importlib.import_module(f"fedrelay.{room}").__path__, f"fedrelay.{room}."):
        importlib.import_module(module.name)
PLACES = (*(f"fedrelay.{room}." for room in ROOMS), "fedrelay.engine.engine", "fedrelay.simulation.simulation")
REGISTERED = sorted(n for n, c in KNOWN.items() if c.__module__.startswith(PLACES))


def there_and_back(v: Any) -> Any:
    store = Store()
    return decode(json.loads(json.dumps(encode(v, store))), store)


def same(a: Any, b: Any) -> bool:
    """Equal in every type, order and bit; a NaN equals itself, -0.0 does not equal 0.0, 1 is neither 1.0 nor True."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return [*map(repr, a)] == [*map(repr, b)] and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and repr(a.tolist()) == repr(b.tolist())
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return repr(a) == repr(b)


W = {"extractor.w": torch.arange(6.0).reshape(2, 3), "classifier.b": torch.tensor([1, -1], dtype=torch.int8)}
RICH = {"w": W, ("warmup", 3): (1, 2.5, None, True, "θ", ()), -1: {}, "column": np.array([1.5, math.nan])}
RULES = (Proximal(0.25), Dynamic(3.0))
RECIPE = Recipe(rules=RULES, optimizer=Adam(beta2=0.5), schedule=Cosine(0.125), scope=("classifier",), cut="classifier", rows=64)
CHAINS = chain(W, [3, 1], RECIPE, {"c": W, "past": {0: W}}, seen=7), chain(W, [2], RECIPE)
PLAN = Plan(CHAINS, (Mean("count"), Sum("change"), Bank("classifier.b")))
COLUMN = np.array([4, 5])
RECEIPTS = Receipts(*[COLUMN] * 5, COLUMN / 3, COLUMN / 7, {"rule.mu": COLUMN / 3}, {"down": COLUMN}, {1: "not finite"})


def example(name: str) -> Any:
    """A value of this name: its defaults, and something rich for every field without one."""
    cls = KNOWN[name]
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    return cls(**dict.fromkeys(needed, RICH))


@pytest.mark.parametrize("name", REGISTERED)
def test_every_registered_value_comes_back(name):
    made = example(name)
    assert type(there_and_back(made)) is KNOWN[name]
    assert same(there_and_back(made), made)


@pytest.mark.parametrize(
    "v",
    [
        RECIPE,
        PLAN,
        Landing(Flight(3), 2.5, {Mean(): {"n": 3, "sum": W}, Bank(): ((W, 4),)}, RECEIPTS),
        (0.1, -0.0, math.inf, -math.inf, math.nan, 1e-320, 2**63 - 1, -(2**70), 1, 1.0, True, None, "", "ü\n\"'"),
        ((), ((),), {}, {(): {}}, {("a", ("b", 2)): {1: {None: {True: 0.5}}}}),
        {Flight(1): Flight(2), 1.5: (W, (W,))},
    ],
    ids=["recipe with rules", "plan", "landing", "scalars", "nests", "values as keys"],
)
def test_what_travels_comes_back(v):
    assert same(there_and_back(v), v)
    assert same(unwire(wire(v)), v)


def test_a_recipe_that_came_back_is_of_the_same_kind():
    """Kinds are interned: a visit decoded on a worker must meet the lanes of its own kind."""
    assert there_and_back(RECIPE).kind is RECIPE.kind


ARRAYS = [
    np.array([], np.float32),
    np.zeros((2, 0), np.int64),
    np.array(7, np.int16),
    np.array([[True], [False]]),
    np.array([2**63 - 1, -(2**63)]),
    np.array([0.1, np.nan, -np.inf], np.float32),
    np.array([0, 255], np.uint8),
    np.array([1, 2], ">i4"),
    np.array(["a", "bcd"]),
    np.arange(6).reshape(2, 3).T,
]


@pytest.mark.parametrize("a", ARRAYS, ids=lambda a: f"{a.dtype}{list(a.shape)}")
def test_numpy_columns_keep_type_shape_and_bits(a):
    assert same(there_and_back(a), a)


TENSORS = [
    torch.empty(0),
    torch.empty(2, 0, 3, dtype=torch.bfloat16),
    torch.tensor(2.5),
    torch.tensor([True, False]),
    torch.tensor([-(2**63), 2**63 - 1]),
    torch.tensor([1.5, -0.0, math.inf], dtype=torch.bfloat16),
    torch.tensor([[0.1], [0.2]], dtype=torch.float16),
    torch.tensor([1, 255], dtype=torch.uint8),
    torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T,
    torch.ones(3).expand(2, 3),
    torch.nn.Parameter(torch.ones(2)).detach(),
]


@pytest.mark.parametrize("t", TENSORS, ids=lambda t: f"{t.dtype}{list(t.shape)}")
def test_the_wire_keeps_tensors_and_costs_their_bytes(t):
    """A message is 8 bytes of length, a JSON header, and every tensor's elements times width."""
    message = wire({"t": t})
    head = int.from_bytes(message[:8], "little")
    assert json.loads(message[8 : 8 + head])["t"] == [[str(t.dtype)[6:], list(t.shape)]]
    assert len(message) == 8 + head + t.numel() * t.element_size()
    assert same(unwire(message)["t"], t.contiguous())


def test_tensors_lie_behind_each_other_in_order_of_first_mention():
    a, b, c = torch.tensor([1, 2], dtype=torch.uint8), torch.empty(0), torch.tensor([3], dtype=torch.uint8)
    assert wire((a, b, a, c))[-3:] == bytes([1, 2, 3])
    assert same(unwire(wire((a, b, a, c))), (a, b, a, c))


def test_what_was_unwired_may_be_written_to():
    t = unwire(wire((torch.zeros(2),)))[0]
    t += 1
    assert t.tolist() == [1, 1]


@pytest.mark.parametrize("trip", [there_and_back, lambda v: unwire(wire(v))], ids=["codec", "wire"])
def test_identity_survives(trip):
    """A leaf that two chains share is one tensor on the other side too; equal tensors that were two stay two."""
    t, twin = torch.ones(1000), torch.ones(1000)
    back = trip(Plan((chain({"w": t}, [0], Recipe()), chain({"w": t, "v": twin}, [1], Recipe(), {"again": (t,)})), ()))
    first, second = back.chains
    assert first.start["w"] is second.start["w"] is second.extra["again"][0]
    assert second.start["v"] is not second.start["w"]
    assert len(wire((t, t))) < len(wire((t, twin))) - 3900


def test_a_store_gives_a_tensor_one_name_for_good():
    store, t = Store(), torch.ones(2)
    names = [store.put(t), store.put(torch.ones(2)), store.put(t)]
    assert names[0] == names[2] != names[1]
    assert store.get(names[0]) is t
    assert len(store) == 2


def test_a_store_holds_its_tensors_so_that_no_later_one_takes_their_name():
    store = Store()
    names = [store.put(torch.full((3,), float(i))) for i in range(50)]
    assert [float(store.get(n)[0]) for n in names] == [*range(50)]


@value
class Awkward:
    """Its fields are called like the codec's own words."""

    ref: str
    map: int
    array: tuple[int, ...]
    type: str
    shape: None = None


def test_a_field_may_be_called_like_the_codecs_own_words():
    made = Awkward("t0", 1, (2, 3), "f8")
    assert same(there_and_back((made, {"ref": made})), (made, {"ref": made}))


@dataclass(frozen=True)
class Stranger:
    """Looks like a value, but is not registered."""

    mu: float = 1.0


def impostor() -> Any:
    """Of a class that is called like a registered one."""
    return type("SGD", (), {})()


REFUSED = {
    "a closure": lambda: RECIPE,
    "a list": [1, 2],
    "a set": {1},
    "bytes": b"x",
    "a NumPy integer": np.int64(3),
    "a NumPy float": np.float64(0.1),
    "a NumPy bool": np.bool_(True),
    "a class": SGD,
    "a stranger": Stranger(),
    "an impostor": impostor(),
    "a torch type": torch.float32,
    "a complex number": 1j,
}


WHERE = {"bare": lambda v: v, "tuple": lambda v: (1, v), "map": lambda v: {"x": {"y": v}}, "value": lambda v: Visit(v, ())}


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_travel_is_refused_in_one_sentence(what, where):
    v = REFUSED[what]
    sentence = f"{v!r} ({type(v).__name__}) cannot travel: it is not a registered value, a number, a string, a tuple or a mapping"
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        encode(where(v), Store())


def test_a_wrong_key_is_refused_too():
    with pytest.raises(TypeError, match="cannot travel"):
        encode({np.int64(1): 0}, Store())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Proximl", "nothing called 'Proximl' is registered; did you mean 'Proximal'?"),
        ("recipe", "nothing called 'recipe' is registered; did you mean 'Recipe'?"),
        ("os.system", "nothing called 'os.system' is registered"),
    ],
)
def test_a_name_that_is_not_on_the_list_does_not_decode(name, sentence):
    for attempt in (lambda: lookup(name), lambda: decode({"is": name, "mu": 1.0}, Store())):
        with pytest.raises(LookupError, match=f"^{re.escape(sentence)}$"):
            attempt()


class OnDisk:
    """Stands for a tensor; counts how often it is read."""

    reads = 0

    def __init__(self, key: str) -> None:
        self.key = key

    def load(self) -> torch.Tensor:
        OnDisk.reads += 1
        return torch.tensor([float(ord(self.key))])


def test_what_lies_on_disk_is_read_once_per_key():
    store, before = Store(), OnDisk.reads
    data = [encode({"m": OnDisk(k)}, store) for k in "aba"]
    assert OnDisk.reads - before == len(store) == 2
    assert data[0] == data[2] != data[1]
    assert [float(decode(d, store)["m"]) for d in data] == [97, 98, 97]
