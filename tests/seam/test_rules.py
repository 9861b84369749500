"""Rules: what the base does by default, and rows only for those who ask for them."""

import pytest
import torch

from fedrelay.methods import Dynamic, GradientVariate, Proximal
from fedrelay.seam.rules import ClientView, Rows, Rule

HOOKS = ("memory", "leaves", "prepare", "begin", "penalty", "loss", "end")
X, Y = torch.ones(3, 2), torch.zeros(3)


def view(rows=None):
    return ClientView(received={}, memory={}, extra={}, along={}, rate=0.1, steps=1, handed=0, examples=3, rows=rows)


def test_the_base_rule_does_nothing():
    rule, w = Rule(), {"w": torch.ones(2)}
    see = view(Rows(X, Y, None, None))
    end = rule.end(w, see, {})
    assert (rule.memory(w), rule.begin(see), rule.penalty(w, {}), rule.loss(w, None, X, Y, Y > 0, {})) == ({}, {}, 0.0, 0.0)
    assert (rule.leaves(w), rule.shared, rule.enters, rule.reads_rows) == ({}, (), None, False)
    assert rule.prepare(see) == (X, Y)
    assert end.weights is w
    assert (end.memory, end.up, end.along) == (None, {}, None)


@pytest.mark.parametrize(
    ("cls", "hooks"),
    [
        (Rule, set()),
        (Proximal, {"begin", "penalty"}),
        (Dynamic, {"memory", "begin", "penalty", "end"}),
        (GradientVariate, {"memory", "begin", "penalty", "end"}),
    ],
)
def test_a_class_knows_where_it_says_something_of_its_own(cls, hooks):
    assert {h for h in HOOKS if cls.has(h)} == hooks


@pytest.mark.parametrize("what", ["x", "y", "forward", "criterion"])
def test_rows_are_only_for_rules_that_say_so(what):
    sentence = "^a rule that reads the client's rows must say so: set `reads_rows = True` on its class$"
    with pytest.raises(LookupError, match=sentence):
        getattr(view(), what)
    assert getattr(view(Rows(*([what] * 4))), what) == what
