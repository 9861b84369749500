"""What holds for every method: rounds in which nobody came back, leaves that nobody trained, states that travel, refusals."""

import json
import re
from math import nan

import pytest
import torch

from byhand import federation, landed, model, play
from fedrelay.methods import (
    IDA,
    SCAFFOLD,
    ControlVariate,
    Dynamic,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedDyn,
    FedProx,
    FedYogi,
    GradientVariate,
    Plain,
    Proximal,
)
from fedrelay.seam.codec import Store, decode, encode
from fedrelay.seam.methods import Population
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import leaves

METHODS = [
    Plain(),
    Plain("count"),
    FedProx(),
    SCAFFOLD(),
    SCAFFOLD(option=1),
    FedDyn(),
    IDA(),
    IDA(FedProx()),
    FedAvgM(),
    FedAvgM(inner=FedDyn()),
    FedAdagrad(),
    FedYogi(),
    FedAdam(),
    FedAdam(variant="flower"),
]
every = pytest.mark.parametrize("method", METHODS, ids=repr)
ALL = Population(3, 3)


@every
def test_after_a_round_in_which_everybody_failed_the_model_is_what_it_was(method):
    fed, w = federation([nan, nan, 1]), model(3)
    new, m = play(method, fed, w, method.init(w, ALL), [[0], [1]])
    assert new.keys() == w.keys()
    assert all(new[n] is w[n] for n in w)
    assert all(torch.as_tensor(t).isfinite().all() for t in leaves(m) if t is not None)
    after, _ = play(method, fed, new, m, [[2]])  # and training goes on
    assert all(t.isfinite().all() for t in after.values())


@every
def test_leaves_that_nobody_trained_stay_the_tensors_they_are(method):
    w = {n: torch.ones(2, dtype=torch.float64) for n in ("extractor.w", "classifier.w")}
    got = landed(method.folds, w, [{"classifier.w": torch.zeros(2, dtype=torch.float64)}])
    new, _ = method.merge(w, method.init(w, ALL), got)
    assert new["extractor.w"] is w["extractor.w"]
    assert not torch.equal(new["classifier.w"], w["classifier.w"])
    assert list(new) == list(w)


@every
def test_a_state_travels(method):
    """Two rounds in a row, or a restart between them: the same bits."""

    def second(restart):
        fed, w = federation([2, -6, 1]), model(0)
        w, m = play(method, fed, w, method.init(w, ALL), [[0], [1]])
        if restart:
            store = Store()
            w, m = decode(json.loads(json.dumps(encode((w, m), store))), store)
        return play(method, fed, w, m, [[1], [2]])

    assert [*map(plain, second(False))] == [*map(plain, second(True))]


def plain(tree) -> list[float | None]:
    return [None if t is None else float(t) for t in leaves(tree)]


@pytest.mark.parametrize(
    ("method", "rules"),
    [
        (Plain(), ()),
        (FedProx(mu=0.5), (Proximal(0.5),)),
        (SCAFFOLD(), (ControlVariate(),)),
        (SCAFFOLD(option=1), (GradientVariate(),)),
        (FedDyn(alpha=0.5), (Dynamic(0.5),)),
        (IDA(FedProx(mu=0.5)), (Proximal(0.5),)),
        (FedAvgM(inner=SCAFFOLD()), (ControlVariate(),)),
        (FedYogi(inner=FedProx(mu=0.5)), (Proximal(0.5),)),
    ],
    ids=repr,
)
def test_the_clients_half_is_a_rule_in_the_recipe(method, rules):
    base = Recipe(learning_rate=0.3, epochs=7)
    recipe, extra = method.visit(method.init(model(0), ALL), base)
    assert recipe == base.adding(*rules)
    assert list(extra) == ["c"] * any(isinstance(r, ControlVariate) for r in rules)


@every
def test_a_method_checks_itself(method):
    assert method.check() is None


REFUSED = [
    (Plain("size"), "by = 'size' is neither 'examples' nor 'count'"),
    (FedProx(by="size"), "by = 'size' is neither 'examples' nor 'count'"),
    (FedProx(mu=-0.1), "mu = -0.1 is not at least 0"),
    (FedProx(mu=nan), "mu = nan is not at least 0"),
    (SCAFFOLD(option=3), "option = 3 is neither 1 nor 2"),
    (FedDyn(alpha=0.0), "alpha = 0.0 is not above 0"),
    (FedDyn(alpha=nan), "alpha = nan is not above 0"),
    (FedAvgM(eta=0.0), "eta = 0.0 is not above 0"),
    (FedAdam(eta=-1.0), "eta = -1.0 is not above 0"),
    (FedAdam(variant="Flower"), "variant = 'Flower' is neither 'reddi' nor 'flower'"),
    (FedAvgM(inner=FedProx(mu=-1.0)), "mu = -1.0 is not at least 0"),
    (IDA(FedProx(mu=-1.0)), "mu = -1.0 is not at least 0"),
    (
        IDA(FedDyn()),
        "FedDyn has a server half of its own, which IDA would replace: use a client rule such as FedProx in it",
    ),
    (
        IDA(FedAvgM()),
        "FedAvgM has a server half of its own, which IDA would replace: use a client rule such as FedProx in it",
    ),
]


@pytest.mark.parametrize(("method", "sentence"), REFUSED, ids=[repr(m) for m, _ in REFUSED])
def test_parameters_that_make_no_sense_are_refused_in_one_sentence(method, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        method.check()
