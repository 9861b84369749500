"""The product beside FedAvg in plain PyTorch, and the plain loops that speed is compared with beside each other."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedrelay.data import digits, mnist
from fedrelay.models import DigitsMLP, LeNet5

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """The benchmarks are scripts beside each other: they import one another by their bare names."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.mark.parametrize("engine", ["lanes", "loop"])
def test_two_rounds_on_digits_are_those_of_plain_pytorch(engine):
    from mnist import compare

    pair = compare(digits(), DigitsMLP(inputs=64), clients=20, cohort=5, rounds=2, seed=1, engine=engine)
    assert pair.weights < 1e-5  # float32 after some thirty steps; wanted: 1e-4
    assert pair.accuracy <= 0.005
    assert pair.holds


def test_two_rounds_on_mnist_are_those_of_plain_pytorch():
    from mnist import compare

    try:
        dataset = mnist()
    except FileNotFoundError as e:
        pytest.skip(str(e))
    pair = compare(dataset, DigitsMLP(), rounds=2, seed=1)
    assert pair.weights < 1e-4
    assert pair.holds


def test_another_order_is_noticed():
    """Half the batches swapped: 1e-4 is no bound that anything would pass."""
    import mnist as script

    watched = script.Watched.rounds

    def swapped(self):
        return [[batches[::-1] for batches in cohort] for cohort in watched(self)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Watched, "rounds", swapped)
        pair = script.compare(digits(), DigitsMLP(inputs=64), clients=20, cohort=5, rounds=1, seed=1)
    assert pair.weights > 1e-4
    assert not pair.holds


@pytest.mark.parametrize("channels_last", [False, True])
def test_both_plain_loops_train_the_same_model(channels_last):
    """Two clients of 7 and 3 examples, batches of 4, two epochs: the same draws lead both loops to the same sum."""
    from torch import nn

    from plain import GradientLoop, SGDLoop, Task

    def network():
        segments = LeNet5(classes=3).segments().values()
        return nn.Sequential(*(layer for segment in segments for layer in segment.children()))

    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(n, 3, 32, 32, generator=generator), torch.randint(3, (n,), generator=generator)) for n in (7, 3)]
    task = Task(network, clients, cohort=2, batch=4, epochs=2, rate=0.05)
    sums = []
    for kind in (SGDLoop, GradientLoop):
        loop = kind(task, channels_last=channels_last)
        start = [v.clone() for v in loop.values]
        total = [torch.zeros_like(v) for v in start]
        torch.manual_seed(3)
        assert loop.share([1, 0], start, total) == 10
        sums.append(total)
        assert gap([t / 10 for t in total], start) > 1e-3
    assert gap(*sums) < 1e-6


def test_processes_merge_what_one_process_does(tmp_path):
    """Everybody takes part with one whole batch, so that no order matters: two processes make what one makes."""
    from plain import Alone, GradientLoop, How, Processes
    from workloads import W2

    workload = replace(W2, clients=5, examples=3, cohort=5).written(tmp_path)
    alone, split = Alone(workload.task(), How(GradientLoop)), Processes(workload.task, How(GradientLoop))
    start = [w.clone() for w in alone.weights]
    try:
        for _ in range(2):
            alone.round()
            split.round()
    finally:
        split.close()
    assert gap(split.weights, alone.weights) < 1e-6
    assert gap(alone.weights, start) > 1e-3


def test_a_run_without_data_says_so_in_a_sentence(monkeypatch, capsys):
    from mnist import main

    monkeypatch.delenv("FEDRELAY_DATA", raising=False)
    assert main(["--rounds", "1"]) == 2
    assert "FEDRELAY_DATA" in capsys.readouterr().err


def gap(a, b):
    return max(float((s - t).norm() / t.norm()) for s, t in zip(a, b, strict=True))
