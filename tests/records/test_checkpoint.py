"""Checkpoints: what was saved comes back, only what is new is written, and no failure spoils the checkpoint before it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrelay.engine.memory import Memories, Spill
from fedrelay.records.checkpoint import SCHEMA, Checkpoints, _names
from fedrelay.seam.values import value
from fedrelay.testing import alike


def segments(folder: Path) -> dict[str, int]:
    """The segment files and how many tensors each holds."""
    from safetensors.torch import load_file

    return {p.name: len(load_file(p)) for p in sorted(folder.glob("tensors-*.safetensors"))}


def tensors(n: int) -> dict[str, torch.Tensor]:
    return {str(i): torch.full((3,), float(i)) for i in range(n)}


@value
class Refers:
    """A value whose fields are called as the codec's own words."""

    ref: Any = None
    map: Any = None


RICH = {
    "float32": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "float64": torch.tensor([1 / 3], dtype=torch.float64),
    "bfloat16": torch.arange(5).bfloat16() / 3,
    "float16": torch.arange(5).half() / 3,
    "int64": torch.tensor([[2**62], [-1]]),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
    "transposed": torch.arange(6.0).reshape(2, 3).mT,
    "not there": None,
    "nested": ({1: torch.ones(1)}, (), 3, 0.1, "text", Refers(torch.ones(2), {"ref": torch.zeros(1)})),
}


def test_what_was_saved_comes_back(tmp_path):
    Checkpoints(tmp_path).save("last", RICH)
    made = Checkpoints(tmp_path).load("last")
    assert alike(made, RICH)
    assert made["bfloat16"].dtype == torch.bfloat16
    assert made["scalar"].shape == ()
    assert made["empty"].shape == (0, 3)


def test_identity_survives(tmp_path):
    w = torch.ones(3)
    Checkpoints(tmp_path).save("last", {"weights": w, "start": w, "equal": torch.ones(3)})
    made = Checkpoints(tmp_path).load("last")
    assert made["weights"] is made["start"]
    assert made["equal"] is not made["start"]
    assert segments(tmp_path) == {"tensors-0.safetensors": 2}


def test_what_comes_back_lies_where_a_new_tensor_would(tmp_path):
    """The last bit of a product may depend on where in memory its factors begin, so a resumed run needs them where a run that
    was not stopped has them."""
    Checkpoints(tmp_path).save("last", {str(n): torch.ones(n) for n in range(1, 20)})
    at = torch.ones(3).data_ptr() % 64
    assert {t.data_ptr() % 64 for t in Checkpoints(tmp_path).load("last").values()} == {at}
    spill = Spill(budget=0, folder=str(tmp_path))
    rows = [spill.put({"rule": {"a": torch.ones(n), "b": torch.ones(n)}}) for n in (1, 3, 5)]
    assert {t.data_ptr() % 64 for row in rows for t in spill.get(row)["rule"].values()} == {at}


def test_a_view_is_saved_without_what_it_is_a_view_of(tmp_path):
    """Row 3 of a stack of 1000 rows of 1000 floats takes 4 kB, not 4 MB; two looks at a row are two tensors."""
    stacked = torch.randn(1000, 1000)
    Checkpoints(tmp_path).save("last", {"row": stacked[3], "column": stacked[:, 3], "again": stacked[3]})
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 14_000
    made = Checkpoints(tmp_path).load("last")
    assert torch.equal(made["row"], stacked[3])
    assert torch.equal(made["column"], stacked[:, 3])


# --- only what is new is written


def test_an_unchanged_tensor_is_not_written_again(tmp_path):
    store, old = Checkpoints(tmp_path), tensors(4)
    store.save("last", old)
    store.save("last", {**old, "new": torch.zeros(2)})
    assert segments(tmp_path) == {"tensors-0.safetensors": 4, "tensors-1.safetensors": 1}
    store.save("last", {**old, "round": 3})
    assert segments(tmp_path) == {"tensors-0.safetensors": 4}
    assert alike(Checkpoints(tmp_path).load("last"), {**old, "round": 3})


def test_what_was_loaded_is_not_written_again(tmp_path):
    Checkpoints(tmp_path).save("last", tensors(4))
    store = Checkpoints(tmp_path)
    store.save("last", {**store.load("last"), "new": torch.zeros(2)})
    assert segments(tmp_path) == {"tensors-0.safetensors": 4, "tensors-1.safetensors": 1}


def test_a_tensor_that_was_written_into_is_new(tmp_path):
    store, w = Checkpoints(tmp_path), torch.zeros(3)
    store.save("last", {"w": w})
    w += 1
    store.save("last", {"w": w})
    assert Checkpoints(tmp_path).load("last")["w"].tolist() == [1, 1, 1]


def test_an_id_that_was_given_to_another_tensor_is_not_taken_for_the_old_one(tmp_path):
    store = Checkpoints(tmp_path)
    for i in range(50):  # each is gone when the next is made, most often in the same place
        store.save("last", {"w": torch.full((3,), float(i))})
        assert Checkpoints(tmp_path).load("last")["w"].tolist() == [i] * 3


def test_segments_go_when_nothing_refers_to_them(tmp_path):
    store = Checkpoints(tmp_path)
    for i in range(5):
        store.save("last", {"w": torch.full((3,), float(i))})
        assert segments(tmp_path) == {f"tensors-{i}.safetensors": 1}


def test_a_segment_that_another_checkpoint_needs_stays(tmp_path):
    store, w = Checkpoints(tmp_path), torch.ones(2)
    store.save("best", {"w": w})
    for i in range(3):
        store.save("last", {"w": torch.full((3,), float(i))})
    assert segments(tmp_path) == {"tensors-0.safetensors": 1, "tensors-3.safetensors": 1}
    other = Checkpoints(tmp_path)  # which has not seen `best`
    other.save("last", {"w": torch.zeros(1)})
    assert other.load("best")["w"].tolist() == [1, 1]


def test_a_sparse_segment_is_rewritten(tmp_path):
    """Of ten tensors one is left. The save that leaves it alone sees that; the next one writes it beside what is new."""
    store, ten = Checkpoints(tmp_path), tensors(10)
    store.save("last", ten)
    store.save("last", {"0": ten["0"]})
    assert segments(tmp_path) == {"tensors-0.safetensors": 10}
    store.save("last", {"0": ten["0"], "new": torch.ones(1)})
    assert segments(tmp_path) == {"tensors-2.safetensors": 2}
    assert Checkpoints(tmp_path).load("last")["0"].tolist() == [0, 0, 0]


def test_a_segment_that_is_half_in_use_stays(tmp_path):
    store, ten = Checkpoints(tmp_path), tensors(10)
    for _ in range(3):
        store.save("last", {k: ten[k] for k in "01234"} if segments(tmp_path) else ten)
    assert segments(tmp_path) == {"tensors-0.safetensors": 10}


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    for name, text in (("config.json", '{"rounds": 3}'), ("list.json", "[1]"), ("broken.json", "{"), ("notes.txt", "")):
        (tmp_path / name).write_text(text)
    store = Checkpoints(tmp_path)
    store.save("last", {"w": torch.ones(1)})
    store.save("last", {"w": torch.zeros(1)})
    assert {p.name for p in tmp_path.iterdir()} == {
        *("config.json", "list.json", "broken.json", "notes.txt"),
        *("last.json", "tensors-1.safetensors"),
    }


def test_client_memories_are_written_once_and_read_one_at_a_time(tmp_path):
    """Memories lie partly on disk: a checkpoint of a hundred clients of which one changed writes that one row."""
    memories, store = Memories(Spill(budget=100, folder=str(tmp_path))), Checkpoints(tmp_path / "checkpoints")

    def commit(client: int, version: int) -> None:
        memories.commit((), client, version, memories.spill.put({"rule": {"c": torch.full((10,), float(client + version))}}))

    for client in range(100):
        commit(client, 1)
    store.save("last", {"memory": memories.state()})
    assert segments(store.folder) == {"tensors-0.safetensors": 100}
    commit(7, 2)
    store.save("last", {"memory": memories.state()})
    assert segments(store.folder) == {"tensors-0.safetensors": 100, "tensors-1.safetensors": 1}
    again = Memories(Spill(budget=100, folder=str(tmp_path)))
    again.restore(Checkpoints(store.folder).load("last")["memory"])
    kept = {c: float(m["rule"]["c"][0]) for c, m in again.clients().items()}
    assert kept == {**{c: c + 1.0 for c in range(100)}, 7: 9.0}
    assert again.version((), 7) == 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 12), max_size=8)), max_size=12))
def test_any_sequence_of_saves_leaves_what_was_saved_last(tmp_path_factory, saves):
    """Tensors come, stay and go, under two names; after every save both are whole for whoever opens the folder."""
    folder = tmp_path_factory.mktemp("checkpoints")
    store, pool, saved = Checkpoints(folder), tensors(13), {}
    for name, which in saves:
        saved[name] = {str(i): pool[str(i)] for i in which}
        store.save(name, saved[name])
        for known, made in saved.items():
            assert alike(Checkpoints(folder).load(known), made)
    referred = {int(n.partition("/")[0]) for p in folder.glob("*.json") for n in _names(json.loads(p.read_text()))}
    assert [*segments(folder)] == sorted(f"tensors-{s}.safetensors" for s in referred)


# --- what goes wrong


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(tmp_path):
    """What it may leave behind: a segment, or a file half written under another name. The next save takes their place."""
    store, w = Checkpoints(tmp_path), torch.ones(3)
    store.save("last", {"w": w, "round": 1})
    whole = (tmp_path / "tensors-0.safetensors").read_bytes()
    (tmp_path / "tensors-1.safetensors").write_bytes(whole)  # the segment was there, last.json was not yet
    (tmp_path / "tensors-2.safetensors.new").write_bytes(whole[:40])
    (tmp_path / "last.json.new").write_bytes(b'{"schema": 1, "st')
    after = Checkpoints(tmp_path)
    made = after.load("last")
    assert made["round"] == 1
    after.save("last", {"w": made["w"], "new": torch.zeros(2), "round": 2})
    assert segments(tmp_path) == {"tensors-0.safetensors": 1, "tensors-2.safetensors": 1}
    assert alike(Checkpoints(tmp_path).load("last"), {"w": w, "new": torch.zeros(2), "round": 2})
    assert not list(tmp_path.glob("*.new"))


FULL = Path("/dev/full")
full = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")


@full
@pytest.mark.parametrize("file", ["tensors-1.safetensors", "last.json"])
def test_a_full_disk_leaves_the_one_before(tmp_path, file):
    store, w = Checkpoints(tmp_path), torch.ones(3)
    store.save("last", {"w": w, "round": 1})
    (tmp_path / f"{file}.new").symlink_to(FULL)
    sentence = f"the checkpoint could not be written to {tmp_path} (No space left on device); the one before it is whole"
    with pytest.raises(OSError, match=re.escape(sentence)):
        store.save("last", {"w": torch.zeros(3), "round": 2})
    assert alike(Checkpoints(tmp_path).load("last"), {"w": w, "round": 1})
    assert not list(tmp_path.glob("*.new"))


@full
@pytest.mark.parametrize("file", ["tensors-1.safetensors", "last.json"])
def test_after_a_full_disk_saving_goes_on(tmp_path, file):
    """The next save, of this name or another, spoils nothing either."""
    store, old, new = Checkpoints(tmp_path), torch.ones(3), torch.zeros(3)
    store.save("last", {"w": old})
    (tmp_path / f"{file}.new").symlink_to(FULL)
    with pytest.raises(OSError, match="No space"):
        store.save("last", {"w": new})
    store.save("engine", {"pick": torch.ones(1)})
    assert torch.equal(Checkpoints(tmp_path).load("last")["w"], old)
    store.save("last", {"w": new, "old": old})
    assert alike(Checkpoints(tmp_path).load("last"), {"w": new, "old": old})


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):  # noqa: PT011 (which one is up to the system)
        Checkpoints(tmp_path / "file" / "checkpoints").save("last", {})


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc")
def test_every_file_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda f: synced.append(os.readlink(f"/proc/self/fd/{f}")) or real_sync(f))

    def named(self: Path, target: Path) -> Path:
        assert str(self) in synced
        return real_replace(self, target)

    monkeypatch.setattr(Path, "replace", named)
    Checkpoints(tmp_path).save("last", {"w": torch.ones(1)})
    assert [Path(p).name for p in synced] == ["tensors-0.safetensors.new", "last.json.new"]


def spoil(folder: Path, how: str) -> None:
    last, segment = folder / "last.json", folder / "tensors-0.safetensors"
    if how == "cut short":
        last.write_bytes(last.read_bytes()[:20])
    elif how == "newer":
        last.write_text(json.dumps({**json.loads(last.read_text()), "schema": SCHEMA + 1}))
    elif how == "no schema":
        last.write_text("{}")
    elif how == "segment cut short":
        segment.write_bytes(segment.read_bytes()[:-4])
    elif how == "segment gone":
        segment.unlink()
    elif how == "gone":
        last.unlink()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("gone", "no checkpoint 'last' in {folder}: the run was stopped before its first one"),
        ("cut short", "{folder}/last.json is not a checkpoint ("),
        ("newer", "{folder}/last.json has schema 2; this version reads schema 1"),
        ("no schema", "{folder}/last.json has schema None; this version reads schema 1"),
        ("segment cut short", "{folder}/last.json cannot be read: tensors-0.safetensors is damaged or gone ("),
        ("segment gone", "{folder}/last.json cannot be read: tensors-0.safetensors is damaged or gone ("),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_sentence(tmp_path, how, sentence):
    Checkpoints(tmp_path).save("last", {"w": torch.ones(3)})
    spoil(tmp_path, how)
    with pytest.raises((ValueError, FileNotFoundError), match=f"^{re.escape(sentence.format(folder=tmp_path))}") as said:
        Checkpoints(tmp_path).load("last")
    assert "\n" not in str(said.value)
