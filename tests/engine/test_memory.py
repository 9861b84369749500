"""What clients keep: a budget that holds, bits that come back from disk, places in the file that are used again."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrelay.engine.memory import Memories, Row, Spill
from fedrelay.seam.codec import Store, decode, encode
from fedrelay.testing.hostile import alike

SIZE = 40  # bytes of ten floats


def kept(value: float, n: int = 10):
    return {"rule": {"c": torch.full((n,), float(value))}}


def number(spill: Spill, row: Row) -> float:
    values = spill.get(row)["rule"]["c"]
    assert (values == values[0]).all()
    return float(values[0])


def on_disk(spill: Spill) -> int:
    return 0 if spill._file is None else os.fstat(spill._file).st_size


USES = st.lists(st.tuples(st.sampled_from(["put", "get", "drop"]), st.integers(0, 9), st.sampled_from([1, 10, 25])), max_size=60)


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(st.integers(0, 400), USES)
def test_any_order_of_use_keeps_the_budget_and_the_bits(budget: int, uses) -> None:
    """Rows of three sizes are put, read and dropped: what is held fits (one row always may), what comes back is right."""
    spill, rows = Spill(budget), {}
    largest, written = 0, 0
    for at, (use, which, n) in enumerate(uses):
        if use == "put":
            rows[at] = (spill.put(kept(float(at), n)), n)
            largest, written = max(largest, 4 * n), written + 4 * n
        elif rows:
            name = list(rows)[which % len(rows)]
            if use == "get":
                got = spill.get(rows[name][0])["rule"]["c"]
                assert torch.equal(got, torch.full((rows[name][1],), float(name)))
            else:
                spill.drop(rows.pop(name)[0])
        assert spill.resident <= max(budget, largest)
        assert spill.resident == sum(t.nbytes for ts in spill._cache.values() for t in ts)
        assert on_disk(spill) <= written
    for name, (row, n) in rows.items():
        assert torch.equal(spill.get(row)["rule"]["c"], torch.full((n,), float(name)))
    for row, _ in rows.values():
        spill.drop(row)
    assert spill.resident == 0


def test_nothing_is_written_within_the_budget() -> None:
    spill = Spill(10 * SIZE)
    rows = [spill.put(kept(i)) for i in range(10)]
    assert spill.resident == 10 * SIZE
    assert on_disk(spill) == 0
    rows.append(spill.put(kept(10)))
    assert spill.resident == 10 * SIZE
    assert on_disk(spill) == SIZE
    assert [number(spill, r) for r in rows] == list(range(11))


def test_the_least_recently_used_goes_first() -> None:
    spill = Spill(3 * SIZE)
    a, b, c = (spill.put(kept(i)) for i in range(3))
    spill.get(a)
    spill.put(kept(3))
    assert {r.number for r in (a, c)} < spill._cache.keys()
    assert b.number not in spill._cache


def test_a_row_is_written_once() -> None:
    """Read back and pushed out again it costs no second write, for rows never change."""
    spill = Spill(SIZE)
    rows = [spill.put(kept(i)) for i in range(3)]
    for _ in range(5):
        assert [number(spill, r) for r in rows] == [0, 1, 2]
    assert on_disk(spill) <= 3 * SIZE


def test_places_in_the_file_are_used_again() -> None:
    """A thousand rows come and go, four at a time: the file stays as long as four rows."""
    spill, rows = Spill(SIZE), []
    for i in range(1000):
        rows.append(spill.put(kept(i)))
        if len(rows) > 4:
            assert number(spill, rows[0]) == i - 4
            spill.drop(rows.pop(0))
    assert on_disk(spill) <= 6 * SIZE
    assert [number(spill, r) for r in rows] == [996, 997, 998, 999]


def test_a_place_is_used_again_only_for_what_fits() -> None:
    spill = Spill(SIZE)
    small, other = spill.put(kept(1.0, 5)), spill.put(kept(2.0))
    spill.put(kept(3.0))
    spill.drop(small)
    large = spill.put(kept(4.0, 20))
    spill.put(kept(5.0, 20))
    assert number(spill, other) == 2
    assert number(spill, large) == 4


TENSORS = {
    "double": torch.tensor([1e-300, -0.0, torch.inf], dtype=torch.float64),
    "not a number": torch.tensor([torch.nan, 1.0]),
    "half": torch.tensor([1.5, -2.0], dtype=torch.float16),
    "brain": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "whole": torch.tensor([2**62, -1]),
    "bytes": torch.tensor([255, 0], dtype=torch.uint8),
    "truths": torch.tensor([True, False]),
    "one": torch.tensor(3.25),
    "none": torch.empty(0, 4),
    "matrix": torch.arange(6.0).view(2, 3),
    "turned": torch.arange(6.0).view(2, 3).T,
    "spread": torch.ones(1, 1).expand(3, 2),
}


def test_every_kind_of_tensor_comes_back_bit_for_bit() -> None:
    spill = Spill(0)
    row = spill.put({"a": TENSORS, "b": {"alone": torch.tensor(7)}})
    others = [spill.put({"c": {"t": t}}) for t in TENSORS.values()]
    assert row.number not in spill._cache
    assert alike(spill.get(row), {"a": TENSORS, "b": {"alone": torch.tensor(7)}})
    assert torch.signbit(spill.get(row)["a"]["double"])[1]
    assert alike([spill.get(r)["c"]["t"] for r in others].pop(), [*TENSORS.values()].pop())


def test_what_is_kept_is_a_copy() -> None:
    spill, t = Spill(), torch.ones(3)
    row = spill.put({"rule": {"c": t}})
    t.zero_()
    assert torch.equal(spill.get(row)["rule"]["c"], torch.ones(3))


def test_a_disk_that_takes_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, bytes(data)[:7], at))
    spill = Spill(SIZE)
    rows = [spill.put(kept(i)) for i in range(4)]
    assert [number(spill, r) for r in rows] == [0, 1, 2, 3]


def test_a_full_disk_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    spill = Spill(SIZE, str(tmp_path))
    spill.put(kept(0))
    with pytest.raises(OSError, match=rf"could not be spilled to {tmp_path} \(No space left on device\): free some space, or"):
        spill.put(kept(1))


def test_the_file_has_no_name_and_ends_with_the_spill(tmp_path: Path) -> None:
    spill = Spill(0, str(tmp_path))
    for i in range(3):
        spill.put(kept(i))
    assert on_disk(spill) > 0
    assert not list(tmp_path.iterdir())
    fd = spill._file
    del spill
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# --- versions


def test_the_same_version_twice_is_once_and_none_is_skipped() -> None:
    memories = Memories(Spill())
    first, second = (memories.spill.put(kept(i)) for i in (1, 2))
    assert memories.version((), 3) == 0
    assert memories.read((), 3) == {}
    memories.commit((), 3, 1, first)
    memories.commit((), 3, 1, first)
    assert memories.version((), 3) == 1
    with pytest.raises(ValueError, match="keeps version 1 of its memory; version 3 does not follow"):
        memories.commit((), 3, 3, second)
    with pytest.raises(ValueError, match="keeps version 0 of its memory; version 2 does not follow"):
        memories.commit((), 4, 2, second)
    memories.commit((), 3, 2, second)
    assert float(memories.read((), 3)["rule"]["c"][0]) == 2
    assert len(memories) == 1
    assert memories.spill.resident == SIZE  # the first version is gone


def test_paths_are_apart() -> None:
    memories = Memories(Spill())
    for i, path in enumerate([(), ("a",), ("a", "b"), ("ab",)]):
        memories.commit(path, 3, 1, memories.spill.put(kept(i)))
    assert [float(memories.read(p, 3)["rule"]["c"][0]) for p in [(), ("a",), ("a", "b"), ("ab",)]] == [0, 1, 2, 3]
    memories.forget(("a",))
    assert [memories.version(p, 3) for p in [(), ("a",), ("a", "b"), ("ab",)]] == [1, 0, 0, 1]
    assert memories.spill.resident == 2 * SIZE
    assert [*memories.clients(("ab",))] == [3]


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_a_checkpoint_goes_through_the_codec_a_row_at_a_time(budget: int) -> None:
    """Its tensors are loaded once each, and never more than the budget at a time; another federation reads the same."""
    memories, other, store = Memories(Spill(budget)), Memories(Spill(0)), Store()
    for c in range(5):
        memories.commit(("x",), c, 1, memories.spill.put(kept(c)))
    data = encode(memories.state(), store)
    assert len(store) == 5
    assert encode(memories.state(), store) == data
    assert len(store) == 5  # known already
    assert memories.spill.resident <= max(budget, SIZE)
    other.commit(("old",), 1, 1, other.spill.put(kept(9)))
    other.restore(decode(data, store))
    assert alike(dict(other.clients(("x",))), dict(memories.clients(("x",))))
    assert other.version(("old",), 1) == 0
    assert alike(other.state(), memories.state())


def test_two_spills_have_no_key_in_common() -> None:
    """Also when one is gone and the other has taken its place in memory: a store that lives on knows both apart."""
    store = Store()
    for i in range(50):
        memories = Memories(Spill())
        memories.commit((), 0, 1, memories.spill.put(kept(i)))
        made = decode(encode(memories.state(), store), store)
        assert float(made[0][3]["rule"]["c"][0]) == i
