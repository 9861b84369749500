"""The ledger: totals by hand, a bit per client for what was disclosed, and the same after a restart."""

import json

import numpy as np
import pytest

from fedrelay.seam.codec import Store, decode, encode
from fedrelay.seam.landing import Receipts
from fedrelay.seam.ledger import Ledger

N = np.array


def landed() -> Receipts:
    """Two visits of which one failed: 10 + 20 examples, 3 + 4 steps, 100 + 200 bytes down, 50 + 0 up."""
    ids, loss = N([0, 4]), N([0.5, np.nan])
    return Receipts(ids, ids, ids, N([10, 20]), N([3, 4]), loss, loss, {}, {"down": N([100, 200]), "up": N([50, 0])}, {1: "lost"})


def test_totals_add_up_over_landings():
    ledger = Ledger(11)
    ledger.commit(landed())
    once = {"visits": 2, "failed": 1, "examples": 30, "steps": 7, "down": 300, "up": 50}
    assert ledger.totals == once
    ledger.commit(landed())
    ledger.add("flops", 1.5)
    assert ledger.totals == {**{k: 2 * v for k, v in once.items()}, "flops": 1.5}


def test_who_revealed_what():
    ledger = Ledger(11)
    ledger.disclose("weights", [3, 10])
    ledger.disclose("weights", (k for k in [0, 3]))
    ledger.disclose("label counts", np.array([1]))
    assert ledger.who("weights") == [0, 3, 10]
    assert ledger.who("label counts") == [1]
    assert ledger.who("raw data") == []
    assert ledger.disclosed == {"label counts": 1, "weights": 3}
    assert list(ledger.disclosed) == ["label counts", "weights"]


def test_a_restart_forgets_nothing():
    """Eleven clients: bits are kept in bytes, and the last byte is not full."""
    ledger = Ledger(11)
    ledger.commit(landed())
    ledger.disclose("weights", [0, 7, 8, 10])
    ledger.disclose("size", range(11))
    store = Store()
    state = decode(json.loads(json.dumps(encode(ledger.state(), store))), store)
    again = Ledger(11)
    again.disclose("label counts", [5])  # a restore replaces
    again.restore(state)
    assert again.totals == ledger.totals
    assert again.who("weights") == [0, 7, 8, 10]
    assert again.disclosed == {"size": 11, "weights": 4}
    again.commit(landed())
    again.disclose("weights", [1])
    assert again.totals["visits"] == 4
    assert again.who("weights") == [0, 1, 7, 8, 10]
    assert ledger.totals["visits"] == 2  # the state is a copy
    with pytest.raises(IndexError):
        again.disclose("weights", [11])


def test_a_state_is_a_snapshot():
    ledger = Ledger(3)
    ledger.disclose("size", [0])
    state = ledger.state()
    ledger.disclose("size", [1])
    ledger.add("visits", 1)
    again = Ledger(3)
    again.restore(state)
    assert (again.who("size"), again.totals) == ([0], {})
