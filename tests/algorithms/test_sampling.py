"""Sampling: how many, who, with which probability, and one sentence where it cannot be done."""

import re

import numpy as np
import pytest

from byhand import These, federation
from fedrelay.algorithms import Available, BySize, Everyone, Uniform
from fedrelay.seam.federation import Run


def fed(*sizes: int, seed: int = 0) -> Run:
    base = federation([0.0] * len(sizes), sizes=sizes)
    base.seed = seed
    return Run(base)


EVEN = fed(*[1] * 100)


@pytest.mark.parametrize(
    ("fraction", "clients", "expected"),
    [(0.1, 100, 10), (0.29, 100, 29), (0.7, 90, 63), (0.57, 100, 57), (0.1, 19, 1), (0.1, 5, 1), (0.001, 100, 1), (1.0, 7, 7)],
)
@pytest.mark.parametrize("cls", [Uniform, BySize])
def test_a_fraction_is_rounded_down_but_not_by_rounding_errors(cls, fraction, clients, expected):
    """0.29 * 100 and 0.57 * 100 fall just below, and 0.7 * 90 too; at least one client takes part."""
    assert len(cls(fraction=fraction).draw(fed(*[1] * clients))) == expected


@pytest.mark.parametrize("cls", [Uniform, BySize])
def test_a_count_comes_before_a_fraction(cls):
    assert len(cls(count=7, fraction=0.5).draw(EVEN)) == 7


@pytest.mark.parametrize("sampling", [Uniform(count=30), BySize(count=30), Everyone(), Available(Uniform(count=30))], ids=repr)
def test_nobody_twice_and_nobody_without_examples(sampling):
    sizes = [3, 0] * 40
    drawn = sampling.draw(fed(*sizes))
    assert len(set(drawn)) == len(drawn) > 0
    assert all(sizes[k] for k in drawn)
    assert all(type(k) is int for k in drawn)


def test_everyone_is_everyone_in_order():
    assert Everyone().draw(fed(2, 0, 1, 5)) == [0, 2, 3]


@pytest.mark.parametrize("sampling", [Uniform(count=3), BySize(count=3), Available(Uniform(count=3))], ids=repr)
def test_asking_for_more_than_there_are_is_one_sentence(sampling):
    sentence = "3 clients a round were asked for, and 2 have examples: lower `count` (or `fraction`)"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        sampling.draw(fed(1, 0, 1))


@pytest.mark.parametrize("sampling", [Uniform(), BySize()], ids=repr)
def test_a_federation_without_examples_is_one_sentence(sampling):
    with pytest.raises(ValueError, match=r"^1 clients a round were asked for, and 0 have examples"):
        sampling.draw(fed(0, 0))


@pytest.mark.parametrize("sampling", [Uniform(count=5), BySize(count=5), Available(Everyone(), 0.5)], ids=repr)
def test_a_draw_depends_on_seed_path_and_turn_only(sampling):
    def draws(seed=0, path=()):
        run = Run(fed(*[1] * 60, seed=seed).base, path)
        return [tuple(sampling.draw(run)) for _ in range(3)]

    assert draws() == draws()
    assert len({*draws(), *draws(seed=1), *draws(path=("warmup",))}) == 9


def shares(sampling, run, rounds=400) -> np.ndarray:
    """How often each client was drawn."""
    drawn = np.zeros(len(run.sizes))
    for _ in range(rounds):
        drawn[list(sampling.draw(run))] += 1
    return drawn / rounds


def test_uniform_draws_do_not_look_at_sizes():
    """2 of 5 clients: each in 0.4 of the rounds, give or take 5 standard deviations of 0.0245."""
    assert shares(Uniform(count=2), fed(1, 1, 1, 1, 40)) == pytest.approx(np.full(5, 0.4), abs=0.12)


def test_draws_by_size_are_in_proportion_to_examples():
    """1, 3, 0 and 6 of 10 examples, one client a round, give or take 5 standard deviations of at most 0.0245."""
    assert shares(BySize(count=1), fed(1, 3, 0, 6)) == pytest.approx([0.1, 0.3, 0, 0.6], abs=0.12)


def test_a_cohort_by_size_may_be_everybody():
    assert sorted(BySize(fraction=1.0).draw(fed(1, 0, 500))) == [0, 2]


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_each_of_a_cohort_is_there_with_the_given_probability(share):
    """Over 400 rounds of 20 clients, each within 5 standard deviations (at most 0.125) and all together within 0.03."""
    made = shares(Available(Everyone(), share), fed(*[1] * 20))
    assert made == pytest.approx(np.full(20, share), abs=0.125)
    assert made.mean() == pytest.approx(share, abs=0.03)


def test_who_is_there_does_not_change_whom_the_inner_sampling_drew():
    alone, there = fed(*[1] * 50), fed(*[1] * 50)
    for _ in range(5):
        drawn, kept = Uniform(count=20).draw(alone), Available(Uniform(count=20), 0.6).draw(there)
        assert kept == [k for k in drawn if k in set(kept)]
        assert 0 < len(kept) < 20


def test_if_nobody_is_there_one_comes_all_the_same():
    assert Available(These((4, 2, 3)), share=0.0).draw(fed(*[1] * 5)) == [2]
    assert Available(These((4, 2, 3)), share=1.0).draw(fed(*[1] * 5)) == [4, 2, 3]
