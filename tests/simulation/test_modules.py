"""Modules whose training differs from their evaluation: BatchNorm, dropout, and whatever draws by itself."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedrelay.algorithms import Everyone, FedAvg
from fedrelay.data import Dataset, blobs
from fedrelay.engine.engine import Engine, Pick
from fedrelay.seam.federation import Run
from fedrelay.seam.folds import Bank
from fedrelay.seam.plan import chain
from fedrelay.seam.recipe import Recipe
from fedrelay.simulation.build import simulate
from fedrelay.testing import HostileFederation, alike
from fedrelay.testing.hostile import apart

BLOBS = blobs(n=200)
RECIPE = Recipe(batch_size=16)
EVERYBODY = FedAvg(Everyone(), RECIPE)
LOOP = Pick("loop", 1)


def normed(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(8, **options), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


def trained(model, rounds=2, seed=0, pick=LOOP, partition=None, **options):
    fed = simulate(BLOBS, partition, model, engine=Engine(pick), seed=seed, **options)
    return EVERYBODY.fit(fed, rounds).weights, fed


# --- BatchNorm


def test_running_statistics_are_averaged_like_weights():
    """Two clients of 16 and 32 rows, one batch each: running <- 0.9 running + 0.1 (mean of the batch), from 0;
    (16 r_0 + 32 r_1) / 48 is what the server has then. The variance starts from 1 and is the unbiased one."""
    dealt = [range(16), range(16, 48)]
    fed = simulate(BLOBS, dealt, normed(), engine="loop")
    w = FedAvg(Everyone(), Recipe(batch_size=32)).fit(fed, 1).weights
    x = BLOBS.x
    means = [0.1 * x[rows].mean(0) for rows in map(list, dealt)]
    variances = [0.9 + 0.1 * x[rows].var(0, ddof=1) for rows in map(list, dealt)]
    assert np.allclose(w["model.0.running_mean"], (16 * means[0] + 32 * means[1]) / 48, atol=1e-6)
    assert np.allclose(w["model.0.running_var"], (16 * variances[0] + 32 * variances[1]) / 48, atol=1e-6)


def test_statistics_that_stay_local_stay_on_their_client():
    """The server's are what they were; a client's second visit goes on from its first: 0.9 (0.1 mean) + 0.1 mean."""
    dealt = [range(16), range(16, 48)]
    fed = simulate(BLOBS, dealt, normed(), engine="loop", buffers="local")
    record = FedAvg(Everyone(), Recipe(batch_size=32)).fit(fed, 2)
    assert not record.weights["model.0.running_mean"].any()
    assert record.weights["model.0.running_var"].eq(1).all()
    kept_by = fed.memories.clients()
    assert [*kept_by] == [0, 1]
    for client, kept in kept_by.items():
        expected = (0.9 * 0.1 + 0.1) * BLOBS.x[list(dealt[client])].mean(0)
        assert np.allclose(kept["buffers"]["model.0.running_mean"], expected, atol=1e-6)


def test_in_a_chain_averaged_statistics_travel():
    """Client 0, then client 1: 0.9 (0.1 mean_0) + 0.1 mean_1."""
    fed = simulate(BLOBS, [range(16), range(16, 48)], normed(), engine="loop")
    [(w, _)] = Run(fed).train([chain(fed.initial(), [0, 1], Recipe(batch_size=32))], Bank())[Bank()]
    expected = 0.09 * BLOBS.x[:16].mean(0) + 0.1 * BLOBS.x[16:48].mean(0)
    assert np.allclose(w["model.0.running_mean"], expected, atol=1e-6)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_counters_are_never_averaged_nor_sent(buffers):
    model = normed()
    w, fed = trained(model, buffers=buffers)
    assert all(t.is_floating_point() for t in w.values())
    assert not any("num_batches" in n for n in w)
    assert not any("num_batches" in n for kept in fed.memories.clients().values() for n in kept.get("buffers", {}))
    assert model[0].num_batches_tracked == 0  # nor does a visit leave a trace on the module itself


def test_cumulative_statistics_start_anew_at_every_visit():
    """``momentum=None`` averages over the batches seen, by the counter: a run must not hear of the one before it."""
    model = normed(momentum=None)
    first, again = (trained(model)[0] for _ in range(2))
    assert alike(first, again)
    fed = simulate(BLOBS, [range(16)], normed(momentum=None), engine="loop")
    w = FedAvg(Everyone(), Recipe(batch_size=16)).fit(fed, 1).weights
    assert np.allclose(w["model.0.running_mean"], BLOBS.x[:16].mean(0), atol=1e-6)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_a_hostile_federation_gives_the_same_bits(buffers):
    plain = simulate(BLOBS, None, normed(), engine="loop", buffers=buffers)
    hostile = HostileFederation(plain.site, Engine(LOOP))
    assert alike(EVERYBODY.fit(plain, 2).state, EVERYBODY.fit(hostile, 2).state)
    assert alike(plain.state(), hostile.state())


def test_statistics_that_stay_local_come_back_from_a_checkpoint(tmp_path):
    def fed():
        return simulate(BLOBS, None, normed(), engine="loop", buffers="local")

    straight = fed()
    want = EVERYBODY.fit(straight, 3)
    EVERYBODY.fit(fed(), 1, folder=tmp_path)
    resumed = fed()
    assert alike(EVERYBODY.fit(resumed, 3, folder=tmp_path).state, want.state)
    assert alike(resumed.state(), straight.state())


@pytest.mark.parametrize(("size", "batch"), [(17, 16), (1, 16), (33, 16), (5, 1)])
def test_a_batch_of_one_example_fails_and_is_reported(size, batch):
    """Client 0's last batch (or its only one) would have one example; the others go on without it."""
    fed = simulate(BLOBS, [range(size), range(40, 72)], normed(), engine="loop")
    record = FedAvg(Everyone(), Recipe(batch_size=batch)).fit(fed, 1)
    why = "BatchNorm cannot train on a batch of one example: choose another batch size, or GroupNorm"
    failed = [0, 1] if batch == 1 else [0]
    assert [(f["client"], f["reason"]) for f in record.rounds[0]["failures"]] == [(c, why) for c in failed]
    assert all(t.isfinite().all() for t in record.weights.values())
    assert (apart(record.weights, fed.initial()) > 0) == (batch != 1)


def test_a_batch_of_one_example_is_fine_where_nothing_is_normalised_by_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(6, 4))
    for engine in ("loop", "lanes"):
        fed = simulate(BLOBS, [range(17), range(40, 41)], model, engine=engine)
        assert "failures" not in EVERYBODY.fit(fed, 1).rounds[0]


def test_evaluation_uses_the_running_statistics():
    """A row's outputs do not depend on the rows beside it, and nothing is written."""
    w, fed = trained(normed())
    x = torch.from_numpy(BLOBS.test_x)
    before = {n: t.clone() for n, t in w.items()}
    whole = fed.site.model.forward(w, x)
    assert torch.allclose(whole[3:4], fed.site.model.forward(w, x[3:4]), atol=1e-6)
    model = normed().eval()
    model.load_state_dict({**{n[6:]: t for n, t in w.items()}, "0.num_batches_tracked": torch.tensor(0)})
    assert torch.allclose(model(x), whole, atol=1e-6)
    assert fed.test(w).accuracy == float((model(x).argmax(1).numpy() == BLOBS.test_y).mean())
    assert alike(w, before)


def test_it_learns():
    learner = FedAvg(Everyone(), Recipe(learning_rate=0.3, batch_size=8, epochs=2))
    assert learner.fit(simulate(BLOBS, None, normed(), engine="loop"), 10).accuracy > 0.9


# --- dropout, and other modules that draw


class Draws(nn.Module):
    """Drops out without owning such a layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.b(F.dropout(torch.relu(self.a(x)), 0.5, self.training))


def drops():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))


both = pytest.mark.parametrize("made", [drops, Draws], ids=["nn.Dropout", "F.dropout"])


@both
def test_dropout_is_drawn_from_the_seed(made):
    torch.manual_seed(0)
    model = made()
    one, again, other = (trained(model, seed=s)[0] for s in (0, 0, 1))
    assert alike(one, again)
    assert not alike(one, other)


@both
def test_dropout_drops(made):
    """Against the same module without: the same batches, other weights."""
    torch.manual_seed(0)
    model = made()
    dropped, _ = trained(model)
    plain = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Identity(), nn.Linear(64, 4))
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    kept, _ = trained(plain)
    assert apart(tuple(dropped.values()), tuple(kept.values())) > 1e-3


@both
def test_dropout_depends_on_the_visit_alone(made):
    """Two workers, other threads, a hostile federation, a global generator in another state: the same bits."""
    torch.manual_seed(0)
    model = made()
    one, fed = trained(model)
    torch.manual_seed(1234)
    assert alike(trained(model, pick=Pick("loop", 2))[0], one)
    hostile = HostileFederation(fed.site, Engine(LOOP))
    assert alike(EVERYBODY.fit(hostile, 2).weights, one)


@both
def test_nobody_elses_generator_is_moved(made):
    torch.manual_seed(5)
    model = made()
    before = torch.get_rng_state()
    trained(model)
    assert torch.equal(torch.get_rng_state(), before)


@both
def test_evaluation_drops_nothing(made):
    torch.manual_seed(0)
    w, fed = trained(made())
    x = torch.from_numpy(BLOBS.test_x)
    first = fed.site.model.forward(w, x)
    assert torch.equal(first, fed.site.model.forward(w, x))
    a, b = (n for n in w if n.endswith("weight"))
    expected = F.linear(torch.relu(F.linear(x, w[a], w[a.replace("weight", "bias")])), w[b], w[b.replace("weight", "bias")])
    assert torch.allclose(first, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (normed(), "its BatchNorm or dropout layers cannot be vectorised (GroupNorm can)"),
        (drops(), "its BatchNorm or dropout layers cannot be vectorised (GroupNorm can)"),
        (Draws(), "this kind of visit (no rule) trains in the loop engine, because it cannot be vectorised: "),
    ],
    ids=["BatchNorm", "dropout", "F.dropout"],
)
def test_what_cannot_be_vectorised_falls_back_with_one_line(model, why, caplog):
    with caplog.at_level(logging.WARNING, "fedrelay"):
        w, _ = trained(model, pick=Pick("lanes", 4))
    [line] = [r.getMessage() for r in caplog.records]
    assert why in line
    assert "\n" not in line
    assert alike(w, trained(model)[0])


def test_frozen_leaves_are_neither_trained_nor_sent():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    model[0].requires_grad_(False)
    for engine in ("loop", "lanes"):
        fed = simulate(Dataset.of(BLOBS.x, BLOBS.y), None, model, engine=engine)
        w = EVERYBODY.fit(fed, 1).weights
        assert all(w[n] is fed.initial()[n] for n in w if n.startswith("model.0"))
        assert fed.ledger.totals["up"] == 10 * (6 * 4 + 4) * 4
        assert not torch.equal(w["model.2.weight"], fed.initial()["model.2.weight"])
