"""Values: frozen, known by name, one class per name; and trees of tensors that keep the identity of what nobody touched."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from fedrelay.seam.values import KNOWN, leaves, minus, plus, tmap, value, zeros


def test_a_value_is_frozen_and_known_by_its_name():
    @value
    class Quartered:
        rate: float = 0.25

    assert KNOWN["Quartered"] is Quartered
    with pytest.raises(FrozenInstanceError):
        Quartered().rate = 1.0


def test_two_values_of_one_name_are_refused_and_the_first_stays():
    def first():
        @value
        class Clashing:
            pass

        return Clashing

    def second():
        @value
        class Clashing:
            pass

    known = first()
    with pytest.raises(TypeError, match=r"^two values are called Clashing: \S+ and \S+; rename one of them$"):
        second()
    assert KNOWN["Clashing"] is known


def test_the_same_class_made_again_replaces_itself():
    def make():
        @value
        class Reloaded:
            pass

        return Reloaded

    old, new = make(), make()
    assert KNOWN["Reloaded"] is new is not old


def test_arithmetic_on_the_leaves_of_the_second():
    """{a: 1, b: 2} + 3 {b: 10, c: 1} = {a: 1, b: 32, c: 3}; the untouched a stays the tensor it was."""
    a, b = torch.tensor(1.0), torch.tensor(2.0)
    made = plus({"a": a, "b": b}, {"b": torch.tensor(10.0), "c": torch.tensor(1.0)}, 3)
    assert {n: float(t) for n, t in made.items()} == {"a": 1, "b": 32, "c": 3}
    assert made["a"] is a
    assert float(b) == 2
    assert {n: float(t) for n, t in minus({"b": b}, {"a": a, "b": torch.tensor(5.0)}).items()} == {"b": -3}


def test_zeros_keep_shape_and_type():
    w = {"a": torch.ones(2, 3, dtype=torch.float64), "b": torch.ones((), dtype=torch.bfloat16)}
    made = zeros(w)
    assert [(n, t.shape, t.dtype, float(t.sum())) for n, t in made.items()] == [(n, t.shape, t.dtype, 0.0) for n, t in w.items()]


def test_trees_are_walked_in_the_order_of_their_keys():
    tree = {"x": {"b": 1, "a": 2}, "w": 3}
    assert list(leaves(tree)) == [1, 2, 3]
    assert tmap(lambda p, q: p * q, tree, {"w": 10, "x": {"a": 100, "b": 1000}}) == {"x": {"b": 1000, "a": 200}, "w": 30}
