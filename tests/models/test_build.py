"""Building: what a seed fixes, what is kept as it is, and what is refused."""

import pytest
import torch
from torch import nn

from fedrelay.models import MLP, FemnistCNN, LeNet5, Model, ResNet18, ShallowCNN, build, count_parameters


def same(a: Model, b: Model) -> bool:
    one, two = a.initial(), b.initial()
    return one.keys() == two.keys() and all(torch.equal(one[leaf], two[leaf]) for leaf in one)


@pytest.mark.parametrize("network", [MLP(), LeNet5(), ShallowCNN(norm="batch"), ResNet18()], ids=repr)
def test_a_seed_fixes_the_weights_and_touches_nothing_else(network, monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the GPUs' random state was seeded"))
    before = torch.get_rng_state()
    first = build(network, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)  # whatever happened before
    assert same(first, build(network, seed=1))
    assert not same(first, build(network, seed=2))
    with torch.device("meta"):  # whatever the default device
        assert same(first, build(network, seed=1))


def test_seeds_are_those_of_torch():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        assert same(Model(LeNet5().segments()), build(LeNet5(), seed=11))


def test_counting_draws_nothing():
    before = torch.get_rng_state()
    count_parameters(FemnistCNN())
    assert torch.equal(torch.get_rng_state(), before)


def test_build_keeps_a_module_as_it_is():
    linear, head = nn.Linear(3, 2), nn.Linear(2, 2)
    model = build(linear, seed=0)
    assert model.segments == {"model": linear}
    assert torch.equal(model.initial()["model.weight"], linear.weight)
    assert build(model, seed=1) is model
    assert [*build(nn.Sequential(linear, head), seed=0).segments] == ["model"]
    for modules in ({"b": linear, "a": head}, nn.ModuleDict({"b": linear, "a": head})):
        built = build(modules, seed=0)
        assert built.segments == {"b": linear, "a": head}
        assert [*built.segments] == ["b", "a"]


def test_build_takes_a_users_own_network():
    class Mine:
        def segments(self) -> dict[str, nn.Module]:
            return {"all": nn.Linear(3, 2)}

    assert build(Mine(), seed=4).initial().keys() == {"all.weight", "all.bias"}
    assert same(build(Mine(), seed=4), build(Mine(), seed=4))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (LeNet5, r"not from the class LeNet5; did you mean LeNet5\(\)\?"),
        ("lenet", r"not from 'lenet' \(str\)$"),
        (None, r"not from None \(NoneType\)$"),
        ({}, "at least one segment"),
        ({"a": nn.ReLU}, "segment 'a' must be an nn.Module, not the class ReLU"),
        ({"a": LeNet5()}, "segment 'a' must be an nn.Module"),
        ({"a.b": nn.ReLU()}, "a word without a dot, not 'a.b'"),
        ({1: nn.ReLU()}, "a word without a dot, not 1"),
    ],
    ids=repr,
)
def test_build_refuses_what_is_no_model_in_one_sentence(what, says):
    with pytest.raises(TypeError, match=says) as error:
        build(what, seed=0)
    assert "\n" not in str(error.value)
