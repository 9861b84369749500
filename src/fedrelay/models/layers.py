"""What the networks here are made of, and the sentence they say to a number that makes no sense. Loads torch only when called."""

from __future__ import annotations

import difflib
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import nn

    Layers: TypeAlias = list[tuple[str, nn.Module]]
    """Layers in order, each with a name of its own: ``conv1, conv1_norm, conv1_relu, pool1, flatten, fc1 ...``."""

NORMS = ("none", "group", "batch")
ACTIVATIONS = {"relu": "ReLU", "tanh": "Tanh", "gelu": "GELU", "sigmoid": "Sigmoid", "none": ""}
STARTS = ("torch", "xavier")


def normalisation(norm: str, channels: int) -> nn.Module:
    """GroupNorm or BatchNorm; the groups are two, as in Reddi et al. (2021), so that they divide any even width."""
    from torch import nn

    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(math.gcd(2, channels), channels)


def activated(layer: str, name: str) -> Layers:
    """The activation that follows ``layer``; ``"none"`` is no layer at all."""
    from torch import nn

    return [(f"{layer}_{name}", getattr(nn, ACTIVATIONS[name])())] if ACTIVATIONS[name] else []


def dense(widths: Sequence[int], activations: Sequence[str]) -> Layers:
    """Fully connected layers ``fc1, fc2 ...`` through these widths; every one but the last has an activation."""
    from torch import nn

    made: Layers = []
    for i, (a, b, name) in enumerate(zip(widths[:-1], widths[1:], (*activations, "none"), strict=True), 1):
        made += [(f"fc{i}", nn.Linear(a, b)), *activated(f"fc{i}", name)]
    return made


def xavier(modules: Iterable[nn.Module]) -> None:
    """Glorot's uniform weights and zero biases, what MXNet and Keras start from; norms keep their ones and zeros."""
    from torch import nn

    for module in modules:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def cut(who: object, layers: Layers, at: str, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """Two segments: the layers before ``at``, and the others (``"last"``: the last layer alone)."""
    from torch import nn

    words = isinstance(names, tuple) and all(isinstance(n, str) and n and "." not in n for n in names)
    if not words or len(names) != 2 or names[0] == names[1]:
        raise ValueError(f"{type(who).__name__}: names must be a tuple of two different words without a dot, not {names!r}")
    order = [name for name, _ in layers]
    # A first segment without weights would have nothing to train, and a norm belongs to its convolution.
    weighty = [name for name, module in layers if any(True for _ in module.parameters()) and not name.endswith("_norm")]
    one_of(who, cut=at, allowed=("last", *weighty[1:]))
    place = order.index(weighty[-1] if at == "last" else at)
    halves = layers[:place], layers[place:]
    return {name: nn.Sequential(OrderedDict(half)) for name, half in zip(names, halves, strict=True)}


def one_of(who: object, allowed: Iterable[str], **given: object) -> None:
    """Each of ``given`` is one of the words ``allowed``.

    >>> from fedrelay.models import CNN
    >>> one_of(CNN(), ("none", "group", "batch"), norm="grop")
    Traceback (most recent call last):
    ValueError: CNN: norm must be one of none, group, batch, not 'grop'; did you mean 'group'?
    """
    allowed = tuple(allowed)
    for what, it in given.items():
        if it not in allowed:
            close = difflib.get_close_matches(str(it).lower(), allowed, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{type(who).__name__}: {what} must be one of {', '.join(allowed)}, not {it!r}{hint}")


def whole(who: object, least: int = 1, **given: object) -> None:
    """Each of ``given`` is a whole number of at least ``least``."""
    for what, it in given.items():
        if not _is_whole(it, least):
            raise ValueError(f"{type(who).__name__}: {what} must be a whole number of at least {least}, not {it!r}")


def wholes(who: object, least: int = 0, most: int | None = None, **given: object) -> None:
    """Each of ``given`` is a tuple of ``least`` to ``most`` whole numbers of at least 1; a list could not travel."""
    kind = f"a tuple of {least}" if most == least else "a non-empty tuple of" if least else "a tuple of"
    for what, it in given.items():
        if not (isinstance(it, tuple) and least <= len(it) <= (most or len(it)) and all(_is_whole(n, 1) for n in it)):
            raise ValueError(f"{type(who).__name__}: {what} must be {kind} positive whole numbers, not {it!r}")


def _is_whole(it: object, least: int) -> bool:
    return isinstance(it, int) and not isinstance(it, bool) and it >= least


def each(who: object, activation: str | tuple[str, ...], layers: int) -> tuple[str, ...]:
    """One activation per layer: a single word stands for all of them."""
    words = activation if isinstance(activation, tuple) else (activation,)
    for word in words:
        one_of(who, allowed=ACTIVATIONS, activation=word)
    if not isinstance(activation, tuple):
        words *= layers
    if len(words) != layers:
        raise ValueError(f"{type(who).__name__}: activation must be one word or one per layer, {layers} here, not {activation!r}")
    return words
