"""Names for FedAvg with another method: whose option is whose, and nothing swallowed."""

import pytest

import fedrelay.algorithms as fa
from fedrelay.algorithms import Everyone, FedAvg, named
from fedrelay.algorithms.named import METHODS
from fedrelay.seam.recipe import Recipe


@pytest.mark.parametrize("name", METHODS)
def test_every_name_is_fedavg_with_that_method(name):
    recipe, method = Recipe(learning_rate=0.5), METHODS[name]
    expected = FedAvg(Everyone(), recipe, method())
    assert named(name, sampling=Everyone(), recipe=recipe) == getattr(fa, name)(recipe=recipe, sampling=Everyone()) == expected
    assert method.__name__.lower() == name


@pytest.mark.parametrize(
    ("name", "option", "number"),
    [
        ("fedprox", "mu", 0.5),
        ("scaffold", "option", 1),
        ("feddyn", "alpha", 0.5),
        ("fedavgm", "beta", 0.5),
        ("fedadagrad", "tau", 0.5),
        ("fedadam", "variant", "flower"),
        ("fedyogi", "eta", 0.5),
    ],
)
def test_other_options_are_the_methods(name, option, number):
    assert getattr(getattr(fa, name)(**{option: number}).method, option) == number


def test_an_option_that_nobody_has_is_refused():
    with pytest.raises(TypeError, match="myu"):
        named("fedprox", myu=0.1)


def test_a_method_that_nobody_has_is_refused():
    with pytest.raises(ValueError, match=r"^no method is called 'fedpox': there are fedprox, scaffold, feddyn, "):
        named("fedpox")
