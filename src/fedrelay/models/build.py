"""From what a user writes to a model: a network's description, a module, modules by name, or a model that is built already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedrelay.models.model import Model, Network

if TYPE_CHECKING:
    from torch import nn


def build(what: Network | nn.Module | Mapping[str, nn.Module] | Model, seed: int) -> Model:
    """A model. A network's weights follow from ``seed`` alone; a module keeps the weights it has.

    >>> import torch
    >>> from fedrelay.models import Logistic
    >>> one, two = build(Logistic(), seed=1).initial(), build(Logistic(), seed=1).initial()
    >>> all(torch.equal(one[leaf], two[leaf]) for leaf in one)
    True
    >>> list(build(torch.nn.Linear(2, 1), seed=1).segments)
    ['model']
    """
    import torch
    from torch import nn

    if isinstance(what, Model):
        return what
    if isinstance(what, nn.ModuleDict):  # a module without a forward, so it can only mean its entries
        what = dict(what.items())
    if isinstance(what, nn.Module):
        return Model(what)
    if isinstance(what, Mapping):
        return Model(_segments(what))
    if isinstance(what, type) or not callable(getattr(what, "segments", None)):
        known = "a network such as LeNet5(classes=10), an nn.Module, a mapping of names to modules, or a Model"
        raise TypeError(f"a model can be built from {known}, not from {_said(what)}")
    # The CPU's generator alone is seeded and put back: torch.manual_seed would seed every GPU as well, which fork_rng with
    # no devices does not put back. Drawing on the CPU also gives the same weights whatever the default device is.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return Model(_segments(what.segments()))


def count_parameters(network: Network) -> dict[str, int]:
    """The trainable numbers in each segment, without drawing or storing one.

    >>> from fedrelay.models import FemnistCNN
    >>> count_parameters(FemnistCNN())
    {'extractor': 6681572, 'classifier': 6262}
    """
    import torch

    with torch.device("meta"):
        return {name: sum(p.numel() for p in segment.parameters()) for name, segment in network.segments().items()}


def _segments(modules: Mapping[str, nn.Module]) -> Mapping[str, nn.Module]:
    """``modules`` if they can be a model's segments: a leaf is called ``segment.leaf``, so a name holds no dot."""
    from torch import nn

    if not modules:
        raise TypeError("a model needs at least one segment, and this mapping is empty")
    for name, module in modules.items():
        if not isinstance(name, str) or not name or "." in name:
            raise TypeError(f"a segment's name is a word without a dot, not {name!r}")
        if not isinstance(module, nn.Module):
            raise TypeError(f"segment {name!r} must be an nn.Module, not {_said(module)}")
    return modules


def _said(what: object) -> str:
    if isinstance(what, type):
        return f"the class {what.__name__}; did you mean {what.__name__}()?"
    return f"{what!r} ({type(what).__name__})"
