"""A model is named segments in order, and a loss per row. Any ``nn.Module`` may be a segment and need not know about us."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedrelay.seam.values import Weights

    Criterion = Callable[[Tensor, Tensor], Tensor]
    """``(outputs, labels) -> a loss per row``."""


class Network(Protocol):
    """A description of a model that can be built: a frozen value, so that it fits into a TOML file and loads no torch."""

    def segments(self) -> Mapping[str, nn.Module]: ...


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy per row."""
    from torch.nn import functional as F

    return F.cross_entropy(z, y, reduction="none")


def squared_error(z: Tensor, y: Tensor) -> Tensor:
    """Half the squared error per row."""
    return ((z - y.reshape(z.shape)) ** 2).flatten(1).sum(1) / 2


class Model:
    """Segments in order, and what a row's error costs.

    >>> import torch
    >>> model = Model({"extractor": torch.nn.Linear(4, 3), "classifier": torch.nn.Linear(3, 2)})
    >>> sorted(model.initial())
    ['classifier.bias', 'classifier.weight', 'extractor.bias', 'extractor.weight']
    >>> model.scope(["classifier"])
    ('classifier.weight', 'classifier.bias')
    >>> model.forward(model.initial(), torch.zeros(5, 4), until="classifier").shape
    torch.Size([5, 3])
    """

    def __init__(self, segments: Mapping[str, nn.Module] | nn.Module, criterion: Criterion = cross_entropy) -> None:
        self.segments: dict[str, nn.Module] = dict(segments) if isinstance(segments, Mapping) else {"model": segments}
        self.criterion = criterion
        self._scopes: dict[tuple[str, ...] | None, tuple[str, ...]] = {}

    def initial(self) -> dict[str, Tensor]:
        """The weights that the modules hold now, buffers included; integer counters stay with the module."""
        return {
            f"{s}.{n}": t.detach().clone()
            for s, module in self.segments.items()
            for n, t in (*module.named_parameters(), *module.named_buffers())
            if t.is_floating_point()
        }

    def scope(self, segments: Sequence[str] | None = None) -> tuple[str, ...]:
        """The names of the trainable leaves of these segments (None: of all), as they were at the first call."""
        key = None if segments is None else tuple(segments)
        if key not in self._scopes:
            self._scopes[key] = self._scope(segments)
        return self._scopes[key]

    def _scope(self, segments: Sequence[str] | None) -> tuple[str, ...]:
        if segments is not None and (unknown := [s for s in segments if s not in self.segments]):
            raise ValueError(f"no segment {unknown[0]!r} in this model: it has {', '.join(self.segments)}")
        return tuple(
            f"{s}.{n}"
            for s, m in self.segments.items()
            if segments is None or s in segments
            for n, p in m.named_parameters()
            if p.requires_grad
        )

    def buffers(self, segments: Sequence[str] | None = None) -> tuple[str, ...]:
        """The names of the floating-point buffers (BatchNorm's running statistics) of these segments."""
        return tuple(
            f"{s}.{n}"
            for s, m in self.segments.items()
            if segments is None or s in segments
            for n, t in m.named_buffers()
            if t.is_floating_point()
        )

    def counters(self) -> dict[str, Tensor]:
        """The buffers that are not floating-point (BatchNorm counts its batches), as the modules hold them; they never travel."""
        return {
            f"{s}.{n}": t.clone() for s, m in self.segments.items() for n, t in m.named_buffers() if not t.is_floating_point()
        }

    def between(self, enters: str | None = None, until: str | None = None) -> list[str]:
        """The segments that run when rows enter at ``enters`` and leave before ``until``."""
        names = list(self.segments)
        for s in (enters, until):
            if s is not None and s not in names:
                raise ValueError(f"no segment {s!r} in this model: it has {', '.join(names)}")
        return names[names.index(enters) if enters else 0 : names.index(until) if until else None]

    def forward(
        self, w: Weights, x: Tensor, enters: str | None = None, until: str | None = None, training: bool = False
    ) -> Tensor:
        """Run the segments from ``enters`` up to, not including, ``until`` with the weights ``w``.

        In training, BatchNorm writes its statistics into the buffers of ``w``: hand it buffers of your own.
        """
        from torch.func import functional_call

        segments = self._modules(training)
        for s in self.between(enters, until):
            own = {n[len(s) + 1 :]: t for n, t in w.items() if n.startswith(s + ".")}
            own |= {other: own[n] for other, n in self._ties[s].items() if n in own}
            # torch's own way with ties leaves a module that stands at two places with what it was lent
            x = functional_call(segments[s], own, (x,), tie_weights=False)
        return x

    @cached_property
    def _ties(self) -> dict[str, dict[str, str]]:
        """By segment: where two modules share a tensor, its other names and the name it goes by."""
        ties: dict[str, dict[str, str]] = {}
        for s, segment in self.segments.items():
            names: dict[int, str] = {}
            ties[s] = {}
            for path, module in segment.named_modules():
                for n, t in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                    known = names.setdefault(id(t), full := f"{path}.{n}".lstrip("."))
                    if known != full:
                        ties[s][full] = known
        return ties

    @cached_property
    def moody(self) -> bool:
        """Whether training and evaluation differ (BatchNorm, dropout)."""
        from torch import nn

        moods = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
        return any(isinstance(m, moods) for s in self.segments.values() for m in s.modules())

    def _modules(self, training: bool) -> Mapping[str, nn.Module]:
        """The modules in this mood for this thread: a module is lent its weights while it runs, so no two threads may share one.

        Copies share the tensors. Evaluation always has copies: only a module itself knows whether it drops out.
        """
        if training and threading.current_thread() is threading.main_thread():
            return self.segments
        mine: dict[bool, dict[str, nn.Module]] = _own().setdefault(self, {})
        if training not in mine:
            copies = {s: deepcopy(m, {id(t): t for t in (*m.parameters(), *m.buffers())}) for s, m in self.segments.items()}
            mine[training] = copies if training else {s: m.eval() for s, m in copies.items()}
        return mine[training]


_LOCAL = threading.local()


def _own() -> WeakKeyDictionary[Model, Any]:
    """This thread's copies of modules, by model."""
    if not hasattr(_LOCAL, "copies"):
        _LOCAL.copies = WeakKeyDictionary()
    copies: WeakKeyDictionary[Model, Any] = _LOCAL.copies
    return copies
