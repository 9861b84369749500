"""engine = "auto": what is measured is measured once, kept, and read again; the clock itself is faked here."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from fedrelay.algorithms import FedAvg, Uniform
from fedrelay.data import IidPartitioner, blobs
from fedrelay.engine import auto
from fedrelay.engine.auto import Auto, default_cache, identity, picker
from fedrelay.engine.engine import Engine, Pick
from fedrelay.methods import SCAFFOLD, FedProx
from fedrelay.seam.codec import Store, decode, encode
from fedrelay.seam.recipe import SGD, Recipe
from fedrelay.simulation.build import simulate
from fedrelay.testing import alike
from fedrelay.testing.promises import rounds
from fedrelay.testing.world import LOOP, world

RECIPE = Recipe(batch_size=8)
FOUR = FedAvg(Uniform(count=4), RECIPE)
REAL = auto.seconds_per_step


class Stopwatch:
    """Says how long a candidate takes, and remembers who was asked about."""

    def __init__(self):
        self.seconds = {("lanes", 16): 1.0}
        self.asked: list[Pick] = []

    def __call__(self, site, kind, pick, queue):
        self.asked.append(pick)
        return self.seconds.get((pick.engine, pick.width), 2.0)

    def fastest(self, engine, width):
        self.seconds = {(engine, width): 1.0}


@pytest.fixture
def watch(monkeypatch):
    made = Stopwatch()
    monkeypatch.setattr(auto, "seconds_per_step", made)
    monkeypatch.setattr(auto, "WORSE", 10.0)  # all candidates are asked about
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return made


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "picks.json"


def run(cache, algorithm=FOUR, turns=1, precision="float32", **options):
    """A run with a picker of its own: (weights, federation)."""
    fed = world(**options)
    fed.engine = Engine(Auto(precision, cache))
    return algorithm.fit(fed, turns).weights, fed


def only(picks):
    ((_, pick),) = picks.items()
    return pick


# --- measured once


@pytest.mark.parametrize(("engine", "width"), [("loop", 1), ("lanes", 8)])
def test_the_fastest_is_picked_and_trains(watch, cache, engine, width):
    watch.fastest(engine, width)
    _, fed = run(cache)
    assert only(fed.picks()) == Pick(engine, width)
    assert bool(fed.engine._lanes) == (engine == "lanes")


def test_a_kind_is_measured_once(watch, cache):
    _, fed = run(cache, turns=4)
    asked = len(watch.asked)
    assert asked == len(set(watch.asked)) > 1
    FOUR.fit(fed, 2)
    assert len(watch.asked) == asked


def test_other_numbers_are_the_same_kind(watch, cache):
    _, fed = run(cache, FedAvg(Uniform(count=4), RECIPE, FedProx(mu=0.1)))
    asked = len(watch.asked)
    FedAvg(Uniform(count=4), replace(RECIPE, learning_rate=0.3, epochs=2), FedProx(mu=0.5)).fit(fed, 1)
    assert len(watch.asked) == asked
    assert len(fed.picks()) == 1


def test_the_same_seed_gives_the_same_bits_twice_though_the_clock_says_otherwise(watch, cache):
    watch.fastest("loop", 1)
    first, _ = run(cache, turns=3)
    watch.fastest("lanes", 8)
    again, fed = run(cache, turns=3)
    assert alike(first, again)
    assert only(fed.picks()) == Pick("loop", 1)


def test_what_is_measured_is_not_trained(watch, monkeypatch, cache):
    """The measuring runs on the very visits that are to come, and leaves no trace in their bits."""
    monkeypatch.setattr(auto, "seconds_per_step", REAL)
    monkeypatch.setattr(auto, "REPEATS", 1)
    scaffold = FedAvg(Uniform(count=4), RECIPE, SCAFFOLD())
    measured, fed = run(cache, scaffold, turns=2)
    plain = world(only(fed.picks()), stride=1)
    assert alike(scaffold.fit(plain, 2).weights, measured)
    assert alike(plain.state(), fed.state())


def test_measuring_moves_no_generator(monkeypatch, cache):
    monkeypatch.setattr(auto, "REPEATS", 1)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 4))
    fed = simulate(blobs(n=100), IidPartitioner(num_partitions=4), model, engine=Engine(Auto(cache=cache)))
    before = torch.get_rng_state()
    FOUR.fit(fed, 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("pick", [Pick("loop", 1), Pick("loop", 2), Pick("lanes", 8)])
def test_a_candidate_takes_time(pick):
    """The real measuring, of every kind of candidate: a positive number of seconds, far below one."""
    queues = []

    class Listens(Auto):
        def __call__(self, site, kind, queue):
            queues.append(auto.seconds_per_step(site, kind, pick, queue))
            return LOOP

    fed = world()
    fed.engine = Engine(Listens())
    FOUR.fit(fed, 1)
    assert 0 < queues[0] < 1


# --- who is a candidate


def widths(watch):
    return [p.width for p in watch.asked if p.engine == "lanes"]


def test_lanes_are_no_wider_than_there_is_work(watch, cache):
    run(cache, FedAvg(Uniform(count=12), RECIPE))
    assert widths(watch) == [8]


def test_lanes_take_no_more_memory_than_they_may(watch, cache, monkeypatch):
    """Eight copies of 84 floats: 2688 bytes a lane; 26 lanes fit into 72 kB, of which 8, 16 and 25 are candidates."""
    algorithm, sizes = FedAvg(Uniform(count=60), RECIPE), (5,) * 60
    run(cache, algorithm, sizes=sizes)
    assert widths(watch) == list(auto.WIDTHS)
    watch.asked.clear()
    cache.unlink()
    monkeypatch.setattr(auto, "MEMORY", 72_000)
    run(cache, algorithm, sizes=sizes)
    assert widths(watch) == [8, 16, 25]


def test_a_model_too_large_for_any_width_has_the_narrowest(watch, cache, monkeypatch):
    monkeypatch.setattr(auto, "MEMORY", 0)
    run(cache)
    assert widths(watch) == [8]


def test_wider_lanes_are_not_tried_when_they_get_slower(watch, cache, monkeypatch):
    monkeypatch.setattr(auto, "WORSE", 1.1)
    watch.seconds = {("loop", 1): 9.0, ("lanes", 8): 1.0, ("lanes", 16): 1.2, ("lanes", 25): 0.1}
    _, fed = run(cache, FedAvg(Uniform(count=60), RECIPE), sizes=(5,) * 60)
    assert widths(watch) == [8, 16]
    assert only(fed.picks()) == Pick("lanes", 8)


@pytest.mark.parametrize(("threads", "workers"), [(1, [1]), (2, [1, 2]), (4, [1, 4])])
def test_several_threads_are_several_workers(watch, cache, monkeypatch, threads, workers):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    run(cache)
    assert [p.width for p in watch.asked if p.engine == "loop"] == workers


def test_what_draws_has_one_worker(watch, cache, monkeypatch):
    """torch has one generator for all threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 4))
    FOUR.fit(simulate(blobs(n=100), IidPartitioner(num_partitions=4), model, engine=Engine(Auto(cache=cache))), 1)
    assert [(p.engine, p.width) for p in watch.asked] == [("loop", 1)]


def test_images_are_tried_in_channels_last(watch, cache):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10))
    FOUR.fit(simulate("digits", model=model, engine=Engine(Auto(cache=cache))), 1)
    assert {(p.engine, p.channels_last) for p in watch.asked} == {("loop", True), ("lanes", False)}


def test_a_precision_is_every_candidates(watch, cache):
    _, fed = run(cache, precision="bf16")
    assert {p.precision for p in watch.asked} == {"bf16"}
    assert only(fed.picks()).precision == "bf16"


# --- what a pick depends on

OTHERS = {
    "kind": {"algorithm": FedAvg(Uniform(count=4), replace(RECIPE, optimizer=SGD(0.9)))},
    "method": {"algorithm": FedAvg(Uniform(count=4), RECIPE, FedProx(mu=0.1))},
    "batch shape": {"algorithm": FedAvg(Uniform(count=4), Recipe(batch_size=9))},
    "scope": {"algorithm": FedAvg(Uniform(count=4), replace(RECIPE, scope=("classifier",)))},
    "type of the data": {"dtype": torch.float64},
    "precision": {"precision": "bf16"},
}
ALIKE = {
    "cohort": {"algorithm": FedAvg(Uniform(count=5), RECIPE)},
    "numbers": {"algorithm": FedAvg(Uniform(count=4), replace(RECIPE, learning_rate=0.3))},
    "clients": {"sizes": (5, 9, 2, 8, 1)},
    "seed": {"seed": 3},
    "nothing": {},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_another_kind_model_or_shape_is_measured_anew(watch, cache, options):
    run(cache)
    asked = len(watch.asked)
    run(cache, **options)
    assert len(watch.asked) > asked
    assert len(json.loads(cache.read_text())) == 2


@pytest.mark.parametrize("options", ALIKE.values(), ids=ALIKE)
def test_whatever_else_changes_the_pick_is_kept(watch, cache, options):
    run(cache)
    asked = len(watch.asked)
    run(cache, **options)
    assert len(watch.asked) == asked


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("fedrelay.engine.auto.processor", lambda: ("another processor", frozenset())),
        ("torch.get_num_threads", lambda: 7),
        ("torch.__version__", "9.9"),
    ],
)
def test_another_machine_is_measured_anew(watch, cache, monkeypatch, what, value):
    run(cache)
    asked = len(watch.asked)
    monkeypatch.setattr(what, value)
    run(cache)
    assert len(watch.asked) > asked


def test_the_model_belongs_to_the_identity():
    small, large = (simulate(blobs(n=100), model=nn.Sequential(nn.Linear(8, n), nn.Linear(n, 4))).site for n in (5, 6))
    assert identity(small, RECIPE.kind, "float32") != identity(large, RECIPE.kind, "float32")
    assert identity(small, RECIPE.kind, "float32") == identity(small, RECIPE.kind, "float32")


def test_layers_of_the_same_shapes_are_not_the_same_model():
    """ReLU and Tanh have no leaves, and a convolution's stride shows in none; but they take different time."""
    made = [nn.ReLU(), nn.Tanh()]
    sites = [simulate(blobs(n=100), model=nn.Sequential(nn.Linear(8, 5), m, nn.Linear(5, 4))).site for m in made]
    assert identity(sites[0], RECIPE.kind, "float32") != identity(sites[1], RECIPE.kind, "float32")


# --- the cache


def test_the_cache_is_read_by_the_next_run(watch, cache):
    watch.fastest("lanes", 8)
    _, fed = run(cache)
    assert json.loads(cache.read_text()) == {key: asdict(pick) for key, pick in fed.picks().items()}
    asked = len(watch.asked)
    _, later = run(cache)
    assert later.picks() == fed.picks()
    assert len(watch.asked) == asked


def test_a_cache_keeps_the_picks_of_others(watch, cache):
    run(cache)
    run(cache, FedAvg(Uniform(count=4), RECIPE, FedProx()))
    assert len(json.loads(cache.read_text())) == 2
    assert [p.name for p in cache.parent.iterdir()] == ["picks.json"]


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "3", '{"a": 1}', '{"a": {"engine": "loop", "speed": 9}}', "\x00"])
def test_a_damaged_cache_is_one_warning_and_measured_again(watch, cache, caplog, text):
    cache.parent.mkdir()
    cache.write_text(text)
    with caplog.at_level(logging.WARNING, "fedrelay"):
        _, fed = run(cache)
    [line] = [r.getMessage() for r in caplog.records]
    assert line.startswith(f"the engine cache {cache} cannot be read (")
    assert line.endswith("); measuring again")
    assert len(watch.asked) > 0
    assert list(json.loads(cache.read_text())) == list(fed.picks())


def test_a_cache_that_cannot_be_written_is_one_warning(watch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "picks.json"
    with caplog.at_level(logging.WARNING, "fedrelay"):
        _, fed = run(cache, turns=2)
    lines = [r.getMessage() for r in caplog.records if "written" in r.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith(f"the engine cache {cache} cannot be written (")
    assert lines[0].endswith("); the next run measures again")
    assert only(fed.picks()) is not None


@pytest.mark.parametrize(
    ("environment", "where"),
    [
        ({"FEDRELAY_CACHE": "/a"}, "/a/picks.json"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/fedrelay/picks.json"),
        ({"FEDRELAY_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/picks.json"),
        ({"HOME": "/c"}, "/c/.cache/fedrelay/picks.json"),
    ],
)
def test_where_the_cache_is(monkeypatch, environment, where):
    for name in ("FEDRELAY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(default_cache()) == where
    assert picker("auto").cache == default_cache()


# --- what cannot be vectorised


class Branches(nn.Module):
    """Looks at its data before it decides."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


CANNOT = {
    "BatchNorm": (
        nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)),
        "this model trains in the loop engine: its BatchNorm or dropout layers cannot be vectorised (GroupNorm can)",
    ),
    "data-dependent control flow": (
        Branches(),
        "this kind of visit (no rule) trains in the loop engine, because it cannot be vectorised: ",
    ),
}


@pytest.mark.parametrize(("model", "why"), CANNOT.values(), ids=CANNOT)
def test_what_cannot_be_vectorised_trains_in_the_loop_with_one_line_that_says_why(watch, cache, caplog, model, why):
    """Even where lanes would be faster; a run that reads the cache says so too."""
    watch.fastest("lanes", 8)
    for _ in range(2):
        fed = simulate(blobs(n=100), IidPartitioner(num_partitions=4), model, engine=Engine(Auto(cache=cache)))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fedrelay"):
            FOUR.fit(fed, 2)
        [line] = [r.getMessage() for r in caplog.records]
        assert line.startswith(why)
        assert "\n" not in line
        pick = only(fed.picks())
        assert (pick.engine, pick.width, pick.why) == ("loop", 1, line)
        assert [p.engine for p in watch.asked] == ["loop"]


def test_a_pick_is_part_of_the_record():
    pick, store = Pick("lanes", 25, True, "bf16", "because"), Store()
    assert decode(encode({"key": pick}, store), store) == {"key": pick}


# --- handed on to whoever records the run


def test_a_pick_is_told_before_the_first_step(watch, cache):
    told = []
    fed = world()
    fed.engine = Engine(Auto(cache=cache))
    fed.use({}, lambda picks: told.append((dict(picks), fed.ledger.totals.get("steps"), bool(fed.engine._lanes))))
    rounds(FOUR, fed, 3)  # (`fit` would tell somebody else)
    assert told == [(fed.picks(), None, False)]


def test_what_a_run_recorded_comes_before_cache_and_clock(watch, cache):
    watch.fastest("lanes", 8)
    _, fed = run(cache)
    ((key, _),) = fed.picks().items()
    again = world()
    again.engine = Engine(Auto(cache=cache))
    again.use({key: Pick("loop", 1)}, None)
    asked = len(watch.asked)
    rounds(FOUR, again, 1)
    assert again.picks() == {key: Pick("loop", 1)}
    assert not again.engine._lanes
    assert len(watch.asked) == asked
    fed.use({key: Pick("loop", 1)}, None)  # even where this very federation has trained otherwise
    rounds(FOUR, fed, 1)
    assert fed.picks() == {key: Pick("loop", 1)}
