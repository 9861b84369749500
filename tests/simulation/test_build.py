"""The front door: what a user may hand over, what is refused in one sentence, and what every option does."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedrelay.algorithms import Everyone, FedAvg
from fedrelay.data import CropFlip, Dataset, DirichletPartitioner, IidPartitioner, OneClassPartitioner, Partition, blobs
from fedrelay.engine.auto import Auto
from fedrelay.engine.engine import Engine, Pick
from fedrelay.models import MLP, LeNet5, Logistic, Model
from fedrelay.seam.federation import Run
from fedrelay.seam.folds import Bank
from fedrelay.seam.plan import chain
from fedrelay.seam.recipe import Recipe
from fedrelay.simulation import build
from fedrelay.simulation.build import simulate, split
from fedrelay.testing import alike
from fedrelay.testing.hostile import apart

EVERYBODY = FedAvg(Everyone(), Recipe(batch_size=16))
BLOBS = blobs(n=200)


def trained(rounds=1, algorithm=EVERYBODY, **options):
    """The weights of a run, by the loop engine unless told otherwise."""
    return algorithm.fit(simulate(**{"engine": "loop", **options}), rounds, evaluate_every=0).weights


# --- data


def test_named_data():
    fed = simulate("digits", engine="loop")
    assert (len(fed.sizes), int(fed.sizes.sum())) == (10, 1438)
    assert fed.test(fed.initial()).n == 359


@pytest.mark.parametrize(
    ("data", "error", "sentence"),
    [
        ("digit", ValueError, "no dataset is called 'digit'; did you mean 'digits'?"),
        ("minst", ValueError, "no dataset is called 'minst'; did you mean 'mnist'?"),
        ("cifar", ValueError, "no dataset is called 'cifar': there are digits, mnist"),
        (np.zeros((3, 2)), TypeError, "data is a ndarray: give a name (digits, mnist) or Dataset.of(x, y, test_x, test_y)"),
        (None, TypeError, "data is a NoneType: give a name (digits, mnist) or Dataset.of(x, y, test_x, test_y)"),
    ],
)
def test_other_data_are_refused(data, error, sentence):
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        simulate(data)


def test_named_data_are_looked_for_where_one_says(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'nowhere'} does not exist"):
        simulate("mnist", data_dir=tmp_path / "nowhere")


X, Y = np.random.default_rng(0).normal(size=(40, 6)), np.arange(40) % 3


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (X, torch.float32),
        (X.astype(np.float32), torch.float32),
        (torch.from_numpy(X), torch.float32),
        (X.tolist(), torch.float32),
    ],
    ids=["float64", "float32", "tensor", "lists"],
)
def test_arrays_of_ones_own(x, dtype):
    fed = simulate(Dataset.of(x, Y, x, Y), IidPartitioner(num_partitions=4), engine="loop")
    assert fed.site.data.train.x.dtype == dtype
    assert [t.shape for t in fed.initial().values()] == [(32, 6), (32,), (3, 32), (3,)]
    record = EVERYBODY.fit(fed, 1)
    assert {t.dtype for t in record.weights.values()} == {torch.float32}
    assert 0 < record.accuracy <= 1


def test_without_test_rows_there_is_no_evaluation():
    fed = simulate(Dataset.of(X, Y), IidPartitioner(num_partitions=4), engine="loop")
    assert "global/accuracy" not in EVERYBODY.fit(fed, 1).rounds[0]


def images(n=60):
    rng = np.random.default_rng(1)
    return Dataset.of(
        rng.integers(0, 256, (n, 3, 8, 8), dtype=np.uint8), np.arange(n) % 4, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)
    )


def test_stored_bytes_are_scaled_and_normalised():
    """(byte / 255 - mean) / std, channel by channel."""
    data = images()
    fed = simulate(data, engine="loop")
    x, _ = fed.site.data.of(0)
    own = data.x[fed.site.data.train.rows(0).numpy()]
    expected = (own / 255 - np.array([0.5, 0.4, 0.3])[:, None, None]) / np.array([0.2, 0.3, 0.4])[:, None, None]
    assert np.allclose(x.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("engine", ["loop", "lanes"])
def test_rows_normalised_once_and_as_they_are_gathered_give_the_same_bits(monkeypatch, engine):
    once = trained(data=images(), engine=engine)
    monkeypatch.setattr(build, "RESIDENT", 0)
    fed = simulate(images(), engine=engine)
    assert fed.site.data.train.x.dtype == torch.uint8
    assert alike(trained(data=images(), engine=engine), once)


class Words(nn.Module):
    """The mean of embeddings."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 5), nn.Linear(5, 3)

    def forward(self, tokens):
        return self.out(self.embed(tokens).mean(1))


@pytest.mark.parametrize("engine", ["loop", "lanes"])
def test_tokens_stay_integers(engine):
    tokens = np.random.default_rng(0).integers(0, 20, (40, 7))
    torch.manual_seed(0)
    model = Words()
    fed = simulate(Dataset.of(tokens, Y), IidPartitioner(num_partitions=4), model, engine=engine)
    assert fed.site.data.of(0)[0].dtype == torch.int64
    w = EVERYBODY.fit(fed, 1).weights
    assert apart(w, fed.initial()) > 0


# --- partitions


@pytest.mark.parametrize(
    ("partition", "sizes"),
    [
        (None, [16] * 10),
        (IidPartitioner(num_partitions=5), [32] * 5),
        (Partition.of([[0, 1, 2], [5], [7, 6]]), [3, 1, 2]),
        ([[0, 1, 2], [], [7, 6]], [3, 0, 2]),
        ([np.arange(9), np.arange(9)], [9, 9]),
    ],
)
def test_partitions(partition, sizes):
    assert simulate(BLOBS, partition, engine="loop").sizes.tolist() == sizes


def test_a_client_owns_the_rows_that_it_was_dealt():
    fed = simulate(BLOBS, [[5, 3], [], [7, 6, 5]], engine="loop")
    assert [fed.site.data.train.rows(c).tolist() for c in range(3)] == [[5, 3], [], [7, 6, 5]]
    assert Run(fed).clients.tolist() == [0, 2]


def test_rows_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r"^client 1 owns row 160, but the rows run from 0 to 159$"):
        simulate(BLOBS, [[0], [160]])


def test_the_data_seed_deals_and_the_seed_trains():
    """One draws who owns what, the other the start, the cohorts and the batches; neither touches what is the other's."""
    partition = DirichletPartitioner(num_partitions=5, alpha=0.5, min_partition_size=1)
    feds = {(s, d): simulate(BLOBS, partition, seed=s, data_seed=d, held_out=0.2, engine="loop") for s in (0, 1) for d in (0, 1)}

    def dealt(fed):
        return [sorted(r for part in fed.site.data.parts.values() for r in part.rows(c).tolist()) for c in range(5)]

    assert dealt(feds[0, 0]) == dealt(feds[1, 0]) != dealt(feds[0, 1])
    assert alike(feds[0, 0].initial(), feds[0, 1].initial())
    assert not alike(feds[0, 0].initial(), feds[1, 0].initial())
    start = feds[0, 0].initial()
    ends = {key: EVERYBODY.fit(fed, 1, weights=start).weights for key, fed in feds.items()}
    assert not alike(ends[0, 0], ends[1, 0])
    assert not alike(ends[0, 0], ends[0, 1])


# --- models


def own_layers():
    torch.manual_seed(3)
    return {"extractor": nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.Tanh()), "classifier": nn.Linear(6, 4)}


@pytest.mark.parametrize(
    ("model", "leaves"),
    [
        (None, {"extractor.fc1.weight": (32, 8), "classifier.fc2.weight": (4, 32)}),
        (Logistic(), {"classifier.fc1.weight": (4, 8)}),
        (MLP(hidden=(7, 5)), {"extractor.fc1.weight": (7, 8), "extractor.fc2.weight": (5, 7), "classifier.fc3.weight": (4, 5)}),
        (MLP(classes=9), {"extractor.fc1.weight": (32, 8), "classifier.fc2.weight": (9, 32)}),
        (nn.Sequential(nn.Linear(8, 4)), {"model.0.weight": (4, 8)}),
        (own_layers(), {"extractor.1.weight": (6, 8), "classifier.weight": (4, 6)}),
        (Model(own_layers()), {"extractor.1.weight": (6, 8), "classifier.weight": (4, 6)}),
    ],
    ids=["none", "a network fits the data", "layers of one's own", "classes of one's own", "a module", "modules", "a model"],
)
def test_models(model, leaves):
    fed = simulate(BLOBS, model=model, engine="loop")
    assert {n: tuple(t.shape) for n, t in fed.initial().items() if "weight" in n} == leaves
    assert apart(EVERYBODY.fit(fed, 1).weights, fed.initial()) > 0


def test_a_convolutional_network_fits_the_images():
    fed = simulate(Dataset.of(np.zeros((12, 3, 20, 20), np.float32), np.arange(12) % 6), model=LeNet5(hidden=(5,)), engine="loop")
    assert fed.initial()["extractor.conv1.weight"].shape == (64, 3, 5, 5)
    assert fed.initial()["classifier.fc2.weight"].shape == (6, 5)


def test_a_module_keeps_its_weights_and_is_not_written_to():
    model = nn.Linear(8, 4)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    fed = simulate(BLOBS, model=model, engine="loop", seed=7)
    assert torch.equal(fed.initial()["model.weight"], before["weight"])
    EVERYBODY.fit(fed, 2)
    assert alike(dict(model.state_dict()), before)


def test_a_class_is_not_a_model():
    with pytest.raises(TypeError, match=r"not from the class LeNet5; did you mean LeNet5\(\)\?$"):
        simulate(model=LeNet5)


class Strange(nn.Module):
    """Knows nothing of fedrelay: shared layers, a branch on its own parameter's shape, keyword arguments."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.full((8,), 0.5))
        self.out = nn.Linear(8, 4, bias=False)

    def forward(self, x, bias=None):
        for _ in range(2):
            x = torch.relu(self.twice(x) * self.scale + self.shift)
        return self.out(x) if bias is None else self.out(x) + bias


def test_any_module_trains_alike_on_both_engines():
    torch.manual_seed(0)
    model = Strange()
    loop, lanes = (trained(2, data=BLOBS, model=model, engine=e) for e in ("loop", "lanes"))
    assert apart(lanes, loop) < 2e-6
    assert torch.equal(loop["model.shift"], model.shift)


# --- what is held out


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.floats(0.01, 0.99), st.integers(0, 3))
def test_every_client_keeps_a_row_and_holds_out_its_share(sizes, share, seed):
    index = np.random.default_rng(seed).permutation(sum(sizes)).astype(np.int32)
    dealt = Partition(index, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
    train, held = split(dealt, share, seed)
    for own, kept, out in zip(dealt, train, held, strict=True):
        assert sorted([*kept, *out]) == sorted(own)
        if len(own) < 2:
            assert len(out) == 0
        else:
            assert len(out) == min(max(1, int(np.floor(share * len(own) + 0.5))), len(own) - 1)


def test_what_is_held_out_depends_on_the_data_seed_only():
    dealt = Partition.of([range(30), range(30, 50)])
    assert split(dealt, 0.3, 1)[1] == split(dealt, 0.3, 1)[1]
    assert split(dealt, 0.3, 1)[1] != split(dealt, 0.3, 2)[1]
    assert split(dealt, 0.0, 1) == (dealt, None)


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0])
def test_a_share_that_is_none(share):
    with pytest.raises(ValueError, match=rf"^held_out = {share} is not a share of at least 0 and below 1$"):
        simulate(BLOBS, held_out=share)


def test_a_visit_is_judged_by_what_its_client_held_out():
    fed = simulate(BLOBS, held_out=0.25, engine="loop")
    assert fed.sizes.tolist() == [12] * 10
    got = Run(fed).train([chain(fed.initial(), [3], Recipe(batch_size=16, held_out=True))], Bank())
    [(w, examples)] = got[Bank()]
    x, y = fed.site.data.of(3, "validation")
    assert (examples, len(y)) == (12, 4)
    loss = torch.nn.functional.cross_entropy(fed.site.model.forward(w, x), y)
    assert got.receipts.loss[0] == pytest.approx(float(loss), rel=1e-5)


# --- time and engines


def test_speed():
    fed = simulate(BLOBS, [range(10), range(30)], speed=[0.5, 10], engine="loop")
    EVERYBODY.fit(fed, 1)
    assert fed.now == 10 / 0.5


@pytest.mark.parametrize(
    "options", [{"speed": [1.0]}, {"speed": [1.0, 0.0]}, {"speed": [1.0, 2.0], "clock": lambda c, work: work}]
)
def test_a_speed_that_makes_no_sense(options):
    with pytest.raises(ValueError, match=r"^speed needs 2 positive numbers, one per client, and no clock beside it$"):
        simulate(BLOBS, [range(10), range(30)], **options)


def test_a_clock_of_ones_own():
    fed = simulate(BLOBS, clock=lambda clients, work: 7.0 + 0 * work, engine="loop")
    EVERYBODY.fit(fed, 2)
    assert fed.now == 14


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"precision": "half"}, "precision 'half' is neither 'float32' nor 'bf16'"),
        ({"buffers": "global"}, "buffers = 'global' is neither 'average' nor 'local'"),
        ({"engine": "fast"}, "engine 'fast' is none of auto, lanes, loop, cut"),
    ],
)
def test_options_that_are_none(options, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        simulate(BLOBS, **options)


@pytest.mark.parametrize(
    ("options", "pick"),
    [
        ({"engine": "loop"}, Pick("loop", 1)),
        ({"engine": "lanes"}, Pick("lanes", 16)),
        ({"engine": "lanes", "width": 5}, Pick("lanes", 5)),
        ({"engine": "lanes", "precision": "bf16"}, Pick("lanes", 16, precision="bf16")),
        ({"engine": Engine(Pick("lanes", 3))}, Pick("lanes", 3)),
    ],
)
def test_engines_by_name(options, pick):
    assert simulate(BLOBS, **options).engine.picker.pick == pick


def test_engines_are_measured_unless_told_otherwise():
    picker = simulate(BLOBS, precision="bf16").engine.picker
    assert isinstance(picker, Auto)
    assert picker.precision == "bf16"


@pytest.mark.parametrize("engine", ["loop", "lanes"])
def test_bf16_computes_in_bf16_and_keeps_float32(engine):
    exact, rough = (trained(3, data=BLOBS, engine=engine, precision=p) for p in ("float32", "bf16"))
    assert {t.dtype for t in rough.values()} == {torch.float32}
    assert 1e-5 < apart(rough, exact) < 0.05
    fed = simulate(BLOBS, engine=engine, precision="bf16")
    assert EVERYBODY.fit(fed, 10).accuracy > 0.9


def test_one_device_argument_decides_where_every_tensor_lives():
    """The meta device has no data, so nothing can train there; but it tells where everything was put."""
    fed = simulate(BLOBS, held_out=0.2, device="meta", engine="loop")
    data = fed.site.data
    placed = [*fed.initial().values(), *(t for p in data.parts.values() for t in (p.x, p.y, p.index)), *data.server]
    assert {t.device.type for t in placed} == {"meta"}
    assert alike(trained(data=BLOBS, device=torch.device("cpu")), trained(data=BLOBS))


class Wide(nn.Module):
    """Wide enough that two threads are inside it at once."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 10)

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x.flatten(1))))))


def test_two_workers_of_the_loop_do_not_train_on_each_others_weights():
    """A module is lent its weights while it runs: threads that share one would compute with a mixture."""
    torch.manual_seed(0)
    model = Wide()
    one, *two = (trained(model=model, engine=Engine(Pick("loop", workers))) for workers in (1, 2, 2, 2))
    assert all(alike(w, one) for w in two)


# --- augmentation


CONV = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 4))


def test_augmented_rows_are_the_same_in_lanes_and_in_the_loop():
    loop, lanes = (trained(2, data=images(), model=CONV, augment=CropFlip(2), engine=e) for e in ("loop", "lanes"))
    assert apart(lanes, loop) < 2e-6
    assert apart(trained(2, data=images(), model=CONV), loop) > 1e-3


def test_the_border_that_a_crop_adds_is_black():
    """It is cropped before it is normalised: where there was no picture a row shows a stored zero, (0 - mean) / std."""
    white = Dataset.of(np.full((60, 1, 4, 4), 255, np.uint8), np.arange(60) % 4, mean=(0.25,), std=(0.5,))
    data = simulate(white, augment=CropFlip(2), engine="loop").site.data
    seen = data.inputs(data.train.x, torch.arange(60))
    assert set(seen.unique().tolist()) == {(1 - 0.25) / 0.5, (0 - 0.25) / 0.5}


def test_augmentation_is_for_training_only():
    plain, augmented = (simulate(images(), model=CONV, augment=a, engine="loop") for a in (None, CropFlip(2)))
    assert alike(plain.site.data.of(0), augmented.site.data.of(0))


def test_a_seed_augments_alike_and_another_one_does_not():
    one, again, other = (trained(data=images(), model=CONV, augment=CropFlip(2), seed=s) for s in (0, 0, 1))
    assert alike(one, again)
    assert not alike(one, other)


def test_partitioners_of_one_class_leave_clients_with_one_class():
    fed = simulate("digits", OneClassPartitioner(num_partitions=20), engine="loop")
    assert all(len(fed.site.data.of(c)[1].unique()) == 1 for c in range(20))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (torch.nn.Linear(5, 3), r"the model does not take rows of shape \(3,\): mat1 and mat2 shapes cannot be multiplied"),
        (torch.nn.Linear(3, 2), r"the data have 3 classes, but for a row the model returns \(2,\)"),
    ],
)
def test_a_model_that_the_data_do_not_fit_is_refused_before_anything_trains(model, sentence):
    data = Dataset.of(np.zeros((9, 3), np.float32), np.arange(9) % 3)
    with pytest.raises(ValueError, match=sentence):
        simulate(data, IidPartitioner(num_partitions=3), model, engine="loop")
