"""Plans: the short way to write a chain."""

import numpy as np
import torch

from fedrelay.seam.plan import chain
from fedrelay.seam.recipe import Recipe


def test_a_chain_visits_in_order_with_one_recipe_for_all():
    w, recipe = {"w": torch.ones(1)}, Recipe()
    made = chain(w, np.array([3, 1]), recipe, {"c": 1}, 7)
    assert made.start is w
    assert [(v.client, type(v.client), v.lost, v.wait) for v in made.visits] == [(3, int, None, 0.0), (1, int, None, 0.0)]
    assert all(v.recipes is made.visits[0].recipes for v in made.visits)
    assert made.visits[0].recipes[0] is recipe
    assert (made.extra, made.seen) == ({"c": 1}, 7)


def test_nothing_beside_the_weights_unless_given():
    one, two = chain({}, [0], Recipe()), chain({}, [0], Recipe())
    assert (one.extra, one.seen) == ({}, 0)
    assert one.extra is not two.extra
