"""Places: the generator is splitmix64, the same bits in NumPy and in torch, and everything in a place's name matters."""

import hashlib
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrelay.seam.places import Place, child

WORD = 2**64


def reference(state):
    """splitmix64 as Steele, Lea and Flood give it, in integers of any size."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % WORD
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
        yield z ^ (z >> 31)


def signed(z):
    return (z + WORD // 2) % WORD - WORD // 2


def test_the_reference_is_the_published_one():
    """The numbers that are printed everywhere for the seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert list(islice(reference(1234567), 5)) == published


@settings(deadline=None)
@given(st.integers(0, WORD - 1), st.integers(1, 30))
def test_the_generator_is_splitmix64(seed, n):
    expected = [signed(z) for z in islice(reference(seed), n)]
    assert child(np.array([signed(seed)]), np.arange(n)).tolist() == expected
    assert child(torch.tensor([signed(seed)]), torch.arange(n)).tolist() == expected
    assert [int(child(np.array([signed(seed)]), i)[0]) for i in range(n)] == expected  # a Python integer as index
    assert [int(child(torch.tensor([signed(seed)]), i)[0]) for i in range(n)] == expected


@settings(deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
    st.lists(st.integers(0, 2**63 - 2), min_size=1, max_size=20),
)
def test_numpy_equals_torch_over_whole_grids(keys, indices):
    k, i = np.array(keys)[:, None], np.array(indices)
    made = child(k, i)
    assert made.dtype == np.int64
    assert made.shape == (len(keys), len(indices))
    assert torch.equal(torch.from_numpy(made), child(torch.from_numpy(k), torch.from_numpy(i)))


def test_no_two_children_of_neighbouring_keys_meet():
    made = child(np.arange(1000)[:, None], np.arange(100))
    assert len(np.unique(made)) == made.size


def test_every_bit_of_a_child_is_fair():
    """Over 20,000 draws the share of ones in each of 64 bits is 1/2 give or take 5 standard deviations (0.0177)."""
    bits = np.unpackbits(child(np.array([7]), np.arange(20_000)).view(np.uint8)).reshape(20_000, 64)
    assert np.abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / 20_000**0.5


HERE = (0, Place(("warmup", "inner"), "cohort", 3), ())
ELSEWHERE = [
    (1, Place(("warmup", "inner"), "cohort", 3), ()),
    (0, Place(("warmup",), "cohort", 3), ()),
    (0, Place(("warmupinner",), "cohort", 3), ()),
    (0, Place(("inner", "warmup"), "cohort", 3), ()),
    (0, Place(("warmup", "inner"), "plan", 3), ()),
    (0, Place(("warmup", "inner"), "cohort", 4), ()),
    (0, Place(("warmup", "inner", "cohort"), "", 3), ()),
    (0, Place(("warmup", "inner"), "cohort", 3), ("Fleet",)),
    (0, Place(("warmup", "inner"), "cohort", 3), ("Fleet", "Genes")),
]


@pytest.mark.parametrize(("seed", "place", "more"), ELSEWHERE, ids=lambda v: repr(v))
def test_seed_path_purpose_number_and_layer_all_matter(seed, place, more):
    assert HERE[1].key(HERE[0]) != place.key(seed, *more)
    assert HERE[1].rng(HERE[0]).random() != place.rng(seed, *more).random()


def test_keys_of_many_places_differ_and_fill_the_signed_range():
    keys = {
        Place(path, purpose, number).key(seed)
        for seed in range(5)
        for path in ((), ("a",), ("a", "b"))
        for purpose in ("plan", "cohort")
        for number in range(20)
    }
    assert len(keys) == 5 * 3 * 2 * 20
    assert min(keys) < -(2**62)
    assert max(keys) > 2**62
    assert max(map(abs, keys)) < 2**63


def test_the_same_place_draws_the_same():
    again = Place(("warmup", "inner"), "cohort", 3)
    assert HERE[1].key(0) == again.key(0)
    assert HERE[1].rng(0, "x").random(5).tolist() == again.rng(0, "x").random(5).tolist()


def test_keys_last_beyond_this_process():
    """A run that is resumed years later must find its draws again: the keys are a part of the format."""
    name = b"(7, ('warmup',), 'plan', 3, 'Fleet')"
    expected = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)
    assert Place(("warmup",), "plan", 3).key(7, "Fleet") == expected == -4145413213827052675
