"""Recipes: kind and numbers are told apart, numbers are found by their path, and nonsense is refused in one sentence."""

import math
import re
from dataclasses import replace

import pytest
import torch

from fedrelay.methods import ControlVariate, Dynamic, Proximal
from fedrelay.seam.recipe import SGD, Adam, AdamW, Cosine, Exponential, Recipe, numeric, rebind
from fedrelay.seam.rules import Rule
from fedrelay.seam.values import value

BASE = Recipe(rules=(Proximal(0.25),), schedule=Cosine(0.5))


@value
class Mixed(Rule):
    """A rule with a number and two things that are kind."""

    weight: float = 1.0
    order: int = 2
    norm: str = "l2"


NUMBERS = {
    "rate": {"learning_rate": 0.3},
    "batch size below the rows": {"batch_size": 7},
    "epochs": {"epochs": 5},
    "mu": {"rules": (Proximal(3.0),)},
    "mu of zero": {"rules": (Proximal(0.0),)},
    "floor": {"schedule": Cosine(0.0)},
    "beta": {"optimizer": SGD()},
}
KINDS = {
    "batch shape": {"rows": 33},
    "another rule": {"rules": (Dynamic(0.25),)},
    "one rule more": {"rules": (Proximal(0.25), Dynamic())},
    "optimizer": {"optimizer": Adam()},
    "schedule": {"schedule": Exponential(0.5)},
    "scope": {"scope": ("classifier",)},
    "cut": {"cut": "classifier"},
    "optimizer state": {"optimizer_state": "travels"},
    "held out": {"held_out": True},
    "nesterov": {"optimizer": SGD(nesterov=True)},
    "some momentum": {"optimizer": SGD(momentum=0.9)},
    "some decay": {"optimizer": SGD(decay=1e-4)},
    "some steps": {"steps": 3},
}


@pytest.mark.parametrize("change", NUMBERS.values(), ids=NUMBERS)
def test_numbers_do_not_make_another_kind(change):
    assert replace(BASE, rows=32, **change).kind is BASE.kind


@pytest.mark.parametrize("change", KINDS.values(), ids=KINDS)
def test_everything_else_does(change):
    other = replace(BASE, **change)
    assert other.kind is not BASE.kind
    assert other.kind != BASE.kind
    assert replace(BASE, **change).kind is other.kind


def test_a_batch_size_is_a_shape_unless_rows_say_otherwise():
    assert Recipe(batch_size=20).kind is Recipe(batch_size=32, rows=20).kind
    assert Recipe(batch_size=20).kind is not Recipe(batch_size=32).kind


@pytest.mark.parametrize("path", ["optimizer.momentum", "optimizer.decay", "steps"])
def test_a_number_that_is_off_at_zero_is_kind_only_in_being_on(path):
    """Momentum 0.9 and 0.5 share code; momentum 0 needs none."""
    on, more, off = (Recipe().bind({path: n}) for n in (1.0, 5.0, 0.0))
    assert on.kind is more.kind
    assert on.kind is not off.kind
    assert off.kind is Recipe().kind


def test_a_kind_is_its_own_kind_with_its_numbers_blanked():
    kind = replace(BASE, optimizer=SGD(0.9)).kind
    assert kind.kind is kind
    assert kind.rows == 32
    assert {n: v for n, v in kind.numbers.items() if v} == {"optimizer.momentum": 1.0}


def test_fields_annotated_float_are_numbers_and_others_are_kind():
    assert numeric(Mixed) == ("weight",)
    one, two = Recipe(rules=(Mixed(2.0),)), Recipe(rules=(Mixed(3.0),))
    assert one.kind is two.kind
    assert one.kind is not Recipe(rules=(Mixed(2.0, order=1),)).kind
    assert one.kind is not Recipe(rules=(Mixed(2.0, norm="l1"),)).kind


def test_numbers_are_listed_by_their_paths():
    recipe = Recipe(0.1, 20, 3, 4, (Proximal(0.25), Mixed(7.0)), AdamW(decay=0.5), Exponential(0.75))
    assert recipe.numbers == {
        "learning_rate": 0.1,
        "batch_size": 20,
        "epochs": 3,
        "steps": 4,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.999,
        "optimizer.eps": 1e-8,
        "optimizer.decay": 0.5,
        "schedule.gamma": 0.75,
        "Proximal.mu": 0.25,
        "Mixed.weight": 7.0,
    }


def test_binding_replaces_exactly_what_is_given():
    rules = (Proximal(0.25), Mixed(7.0, order=3))
    recipe = Recipe(rules=rules, optimizer=SGD(0.5, 0.1), schedule=Cosine(0.5))
    bound = recipe.bind({"learning_rate": 9.0, "Mixed.weight": 8.0, "optimizer.decay": 0.2, "schedule.floor": 0.1})
    expected = Recipe(9.0, rules=(Proximal(0.25), Mixed(8.0, order=3)), optimizer=SGD(0.5, 0.2), schedule=Cosine(0.1), rows=32)
    assert bound == expected
    assert recipe.rules is rules
    assert bound.rules[0] is rules[0]


def test_binding_a_batch_size_keeps_the_shape():
    assert Recipe(batch_size=32).bind({"batch_size": 5.0}).shape == 32


def test_tensors_may_be_bound():
    mu = torch.tensor([0.1, 0.2])
    assert BASE.bind({"Proximal.mu": mu}).rules[0].mu is mu
    assert rebind(Mixed(), "rule", {"rule.weight": mu, "rule.order": 1}).weight is mu


def test_an_unknown_number_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^no number 'Proximal\.my' in this recipe: it has learning_rate, .*, Proximal\.mu$"):
        BASE.bind({"learning_rate": 1.0, "Proximal.my": 1.0})


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("learning-rate", "learning_rate"),
        ("learning_rate", "learning_rate"),
        ("batch-size", "batch_size"),
        ("rule.mu", "Proximal.mu"),
        ("Proximal.mu", "Proximal.mu"),
        ("rule.weight", "Mixed.weight"),
        ("schedule.floor", "schedule.floor"),
    ],
)
def test_paths_as_people_write_them(path, found):
    assert replace(BASE, rules=(Proximal(), Mixed())).resolve(path) == found


@value
class Other(Rule):
    """Has a mu too."""

    mu: float = 1.0


@pytest.mark.parametrize("path", ["rule.mu", "mu", "rule.floor", "rule.order", "optimizer.mu", "rule.learning_rate"])
def test_paths_that_name_no_number_or_two_are_refused(path):
    recipe = replace(BASE, rules=(Proximal(), Other(), Mixed()))
    with pytest.raises(ValueError, match=f"^no number '{re.escape(path)}' in this recipe: it has learning_rate, "):
        recipe.resolve(path)


@pytest.mark.parametrize(
    ("size", "rows"), [(1, 16), (15, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 128), (128, 128)]
)
def test_a_batch_size_gene_takes_the_next_shape(size, rows):
    made = Recipe(batch_size=50).gene("batch-size", size)
    assert (made.batch_size, made.shape) == (size, rows)
    assert made.check() is made


def test_other_genes_stay_within_their_kind():
    made = BASE.gene("rule.mu", 3).gene("learning-rate", 0.5)
    assert made.kind is BASE.kind
    assert (made.rules, made.learning_rate) == ((Proximal(3.0),), 0.5)


@pytest.mark.parametrize("path", ["rule.alpha", "Dynamic.alpha"])
def test_a_number_that_the_server_computes_with_too_cannot_evolve(path):
    sentence = r"^Dynamic\.alpha cannot evolve: the server's half of Dynamic needs one value for everybody$"
    recipe = BASE.adding(Dynamic(0.5))
    with pytest.raises(ValueError, match=sentence):
        recipe.gene(path, 1.0)
    assert recipe.gene("rule.mu", 1.0).rules == (Proximal(1.0), Dynamic(0.5))


@pytest.mark.parametrize(
    ("fields", "keeps"),
    [
        ({}, False),
        ({"rules": (Proximal(),)}, False),
        ({"rules": (Proximal(), Dynamic())}, True),
        ({"optimizer_state": "travels"}, False),
        ({"optimizer_state": "stays"}, True),
    ],
)
def test_who_leaves_something_on_the_client(fields, keeps):
    assert Recipe(**fields).keeps is keeps


def test_adding_rules_puts_them_last():
    assert BASE.adding(Mixed(), Other()).rules == (Proximal(0.25), Mixed(), Other())


NONSENSE = {
    "two of a class": (
        {"rules": (Mixed(1.0), Proximal(), Mixed(2.0))},
        "two Mixed rules in one recipe would share their memory and their numbers: keep one of them",
    ),
    "an empty batch": ({"batch_size": 0, "rows": 4}, "batch_size 0 is outside 1 ... 4 (rows, the shape of a batch)"),
    "more than the rows": ({"batch_size": 5, "rows": 4}, "batch_size 5 is outside 1 ... 4 (rows, the shape of a batch)"),
    "half a row": ({"batch_size": 2.5, "rows": 4}, "batch_size 2.5 is not a whole number"),
    "a negative rate": ({"learning_rate": -0.1}, "learning_rate -0.1 is not a finite number of at least 0"),
    "an infinite rate": ({"learning_rate": math.inf}, "learning_rate inf is not a finite number of at least 0"),
    "no rate": ({"learning_rate": math.nan}, "learning_rate nan is not a finite number of at least 0"),
    "negative epochs": ({"epochs": -1}, "epochs -1 and steps 0 must be whole numbers of at least 0"),
    "half an epoch": ({"epochs": 0.5}, "epochs 0.5 and steps 0 must be whole numbers of at least 0"),
    "endless epochs": ({"epochs": math.inf}, "epochs inf and steps 0 must be whole numbers of at least 0"),
    "unknown epochs": ({"epochs": math.nan}, "epochs nan and steps 0 must be whole numbers of at least 0"),
    "half a step": ({"steps": 1.5}, "epochs 1 and steps 1.5 must be whole numbers of at least 0"),
    "Nesterov without momentum": (
        {"optimizer": SGD(nesterov=True)},
        "SGD(nesterov=True) needs a momentum: set one, or leave nesterov off",
    ),
    "an unknown state": (
        {"optimizer_state": "flies"},
        "optimizer_state = 'flies' is none of 'fresh', 'travels', 'stays'",
    ),
    "a rule's own": (
        {"rules": (ControlVariate(),), "learning_rate": 0.0},
        "SCAFFOLD divides by the learning rate: it must be positive",
    ),
}


@pytest.mark.parametrize(("fields", "sentence"), NONSENSE.values(), ids=NONSENSE)
def test_what_cannot_train_is_refused_in_one_sentence(fields, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Recipe(**fields).check()


@pytest.mark.parametrize(
    "fields", [{}, {"learning_rate": 0.0}, {"epochs": 0}, {"batch_size": 4, "rows": 4}, {"batch_size": 1}, {"epochs": 2.0}]
)
def test_what_can_train_is_returned(fields):
    recipe = Recipe(**fields)
    assert recipe.check() is recipe


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [
        (Cosine(), 0, 1.0),
        (Cosine(), 2, 0.5),
        (Cosine(), 4, 0.0),
        (Cosine(0.5), 0, 1.0),
        (Cosine(0.5), 2, 0.75),
        (Cosine(0.5), 4, 0.5),
        (Exponential(0.5), 0, 1.0),
        (Exponential(0.5), 3, 0.125),
    ],
)
def test_schedules_over_four_steps(schedule, step, factor):
    """Cosine: floor + (1 - floor)(1 + cos(pi step/4))/2, halfway at step 2; exponential: gamma^step."""
    assert schedule.factor(float(step), 4.0) == pytest.approx(factor, abs=1e-15)
    lanes = schedule.factor(torch.tensor([float(step)], dtype=torch.float64), torch.tensor([4.0], dtype=torch.float64))
    assert float(lanes) == pytest.approx(factor, abs=1e-15)
