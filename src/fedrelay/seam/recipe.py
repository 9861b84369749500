"""A recipe says how a visit trains: a *kind* (rules, optimizer, scope, shapes: what code is needed) and *numbers*.

The numbers (rate, batch size, epochs, mu, alpha ...) may differ from lane to lane: lanes bind one tensor element each into
the same rule, so ``self.mu`` works alone and side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fedrelay.seam.rules import Rule
from fedrelay.seam.values import value

if TYPE_CHECKING:
    pass


@value
class SGD:
    """v <- momentum v + g + decay w;  w <- w - rate v (Nesterov: g + decay w + momentum v), as ``torch.optim.SGD``."""

    momentum: float = 0.0
    decay: float = 0.0
    nesterov: bool = False


@value
class Adam:
    """Kingma & Ba with coupled weight decay, as ``torch.optim.Adam``."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0


@value
class AdamW:
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.01


@value
class Constant:
    """The rate stays what it is during a visit."""

    def factor(self, step: Any, steps: Any) -> Any:
        return 1.0


@value
class Cosine:
    """The rate falls within a visit along a half cosine to ``floor`` times its start (``step`` counts from 0)."""

    floor: float = 0.0

    def factor(self, step: Any, steps: Any) -> Any:
        import math

        angle = step / steps * math.pi
        cos = math.cos(angle) if isinstance(angle, float) else angle.cos()
        return self.floor + (1 - self.floor) * (1 + cos) / 2


@value
class Exponential:
    """The rate is multiplied by ``gamma`` after every step of a visit."""

    gamma: float = 0.99

    def factor(self, step: Any, steps: Any) -> Any:
        if isinstance(self.gamma, float | int):
            return self.gamma**step
        return (step * self.gamma.clamp(min=1e-30).log()).exp()  # a power's bits depend on where in the tensor a lane lies


Optimizer = SGD | Adam | AdamW
Schedule = Constant | Cosine | Exponential
_KINDS: dict[Recipe, Recipe] = {}
OFF_AT_ZERO = ("optimizer.momentum", "optimizer.decay", "steps")
"""Numbers whose zero means that there is nothing to compute: whether they are zero belongs to the kind."""
PLAIN = ("learning_rate", "batch_size", "epochs", "steps")


@value
class Recipe:
    """How a visit trains.

    >>> recipe = Recipe(learning_rate=0.05, batch_size=10)
    >>> recipe.bind({"learning_rate": 0.1}).kind is recipe.kind
    True
    """

    learning_rate: float = 0.1
    batch_size: float = 32
    epochs: float = 1
    steps: float = 0
    """Local steps instead of epochs; 0: by epochs."""
    rules: tuple[Rule, ...] = ()
    """The method's first, then the algorithm's: each ``end`` sees the weights that the one before handed on."""
    optimizer: Optimizer = SGD()
    schedule: Schedule = Constant()
    scope: tuple[str, ...] | None = None
    """The segments that train and travel; None: all."""
    cut: str | None = None
    """The first segment that a split server runs; None: the device runs them all."""
    rows: int = 0
    """The shape of a batch, which ``batch_size`` only masks; 0: the batch size itself."""
    optimizer_state: str = "fresh"
    """At each visit the optimizer starts "fresh", or its state "travels" along the chain, or "stays" on the client."""
    held_out: bool = False
    """A visit's loss is measured on the client's held-out part after training; else it is its mean training loss."""

    @cached_property
    def parts(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "schedule": self.schedule, **{type(r).__name__: r for r in self.rules}}

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """Every number of the recipe by its path; a gene is such a path.

        >>> Recipe(optimizer=SGD(0.9)).numbers["optimizer.momentum"]
        0.9
        """
        own = {n: getattr(self, n) for n in PLAIN}
        return own | {f"{p}.{f}": getattr(v, f) for p, v in self.parts.items() for f in numeric(type(v))}

    def bind(self, numbers: Mapping[str, Any]) -> Recipe:
        """The same kind with other numbers: floats, or tensors with an element per lane."""
        if unknown := [n for n in numbers if n not in self.numbers]:
            raise ValueError(f"no number {unknown[0]!r} in this recipe: it has {', '.join(self.numbers)}")
        own = {p: v for p, v in numbers.items() if "." not in p}
        optimizer = rebind(self.optimizer, "optimizer", numbers)
        schedule = rebind(self.schedule, "schedule", numbers)
        rules = tuple(rebind(r, type(r).__name__, numbers) for r in self.rules)
        return replace(self, rows=self.shape, optimizer=optimizer, schedule=schedule, rules=rules, **own)

    @property
    def shape(self) -> int:
        """Rows of a batch: a property of the kind, never of who else trains."""
        return self.rows or int(self.batch_size)

    @cached_property
    def kind(self) -> Recipe:
        """This recipe with its numbers blanked; equal kinds are one object."""
        blank = self.bind({p: float(p in OFF_AT_ZERO and v != 0) for p, v in self.numbers.items()})
        return _KINDS.setdefault(blank, blank)

    def gene(self, path: str, number: float) -> Recipe:
        """The recipe with one number rewritten by evolution. A batch size takes the next shape of 16, 32, 64 ...

        >>> Recipe(batch_size=32).gene("batch_size", 37).rows
        64
        """
        path = self.resolve(path)
        if path == "batch_size":
            return replace(self, batch_size=float(number), rows=max(16, 1 << (int(number) - 1).bit_length()))
        if shared := [r for r in self.rules if path in [f"{_name(r)}.{n}" for n in r.shared]]:
            raise ValueError(f"{path} cannot evolve: the server's half of {_name(shared[0])} needs one value for everybody")
        return self.bind({path: float(number)})

    def resolve(self, path: str) -> str:
        """``rule.mu`` names the number ``mu`` of whichever rule has one; ``learning-rate`` is ``learning_rate``."""
        path = path.replace("-", "_")
        if path.startswith("rule."):
            owners = [
                n for n in self.numbers if n.partition(".")[2] == path[5:] and n.partition(".")[0] in map(_name, self.rules)
            ]
            if len(owners) == 1:
                return owners[0]
        if path not in self.numbers:
            raise ValueError(f"no number {path!r} in this recipe: it has {', '.join(self.numbers)}")
        return path

    @property
    def keeps(self) -> bool:
        """Whether a visit leaves something on the client."""
        return self.optimizer_state == "stays" or any(r.has("memory") for r in self.rules)

    @cached_property
    def adds(self) -> bool:
        """Whether a rule adds leaves to the model."""
        return any(r.has("leaves") for r in self.rules)

    def adding(self, *rules: Rule) -> Recipe:
        """This recipe with further rules at the end."""
        return replace(self, rules=self.rules + rules)

    def check(self) -> Recipe:
        """Refuse in one sentence what cannot train. (Not in ``__post_init__``, which would refuse bound tensors.)"""
        names = list(map(_name, self.rules))
        if twice := [n for n in names if names.count(n) > 1]:
            raise ValueError(f"two {twice[0]} rules in one recipe would share their memory and their numbers: keep one of them")
        if not float(self.batch_size).is_integer():
            raise ValueError(f"batch_size {self.batch_size:g} is not a whole number")
        if not 1 <= self.batch_size <= self.shape:
            raise ValueError(f"batch_size {self.batch_size:g} is outside 1 ... {self.shape} (rows, the shape of a batch)")
        if not self.learning_rate >= 0 or self.learning_rate == float("inf"):
            raise ValueError(f"learning_rate {self.learning_rate:g} is not a finite number of at least 0")
        if not all(n >= 0 and float(n).is_integer() for n in (self.epochs, self.steps)):
            raise ValueError(f"epochs {self.epochs:g} and steps {self.steps:g} must be whole numbers of at least 0")
        if self.optimizer_state not in ("fresh", "travels", "stays"):
            raise ValueError(f"optimizer_state = {self.optimizer_state!r} is none of 'fresh', 'travels', 'stays'")
        if isinstance(self.optimizer, SGD) and self.optimizer.nesterov and not self.optimizer.momentum:
            raise ValueError("SGD(nesterov=True) needs a momentum: set one, or leave nesterov off")
        for r in self.rules:
            r.check(self)
        return self


def _name(rule: Rule) -> str:
    return type(rule).__name__


_NUMERIC: dict[type, tuple[str, ...]] = {}


def numeric(cls: type) -> tuple[str, ...]:
    """The fields of a value that are numbers: those annotated ``float``. Everything else is kind."""
    if cls not in _NUMERIC:
        _NUMERIC[cls] = tuple(f.name for f in fields(cls) if f.type in ("float", float))
    return _NUMERIC[cls]


def rebind(part: Any, name: str, numbers: Mapping[str, Any]) -> Any:
    """``part`` with those of its numbers that are given under ``name.``."""
    mine = {f: numbers[p] for f in numeric(type(part)) if (p := f"{name}.{f}") in numbers}
    return replace(part, **mine) if mine else part
