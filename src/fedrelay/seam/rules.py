"""What a client does beyond descent: the rule, what it may see of its visit, and what it hands on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fedrelay.seam.values import Tree, value

if TYPE_CHECKING:
    from torch import Tensor

    from fedrelay.seam.recipe import Recipe
    from fedrelay.seam.values import Weights

    Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Rows:
    """A client's examples as its visit trains on them, and the model's way through them."""

    x: Tensor
    y: Tensor
    forward: Forward
    """``forward(weights, x, enters=segment, until=segment)``; unless told otherwise ``x`` enters where these rows do."""
    criterion: Callable[[Tensor, Tensor], Tensor]
    """``criterion(outputs, y)``: a loss per row."""


@dataclass(frozen=True)
class ClientView:
    """What a rule may see of its visit."""

    received: Weights
    """What the client was handed: every leaf, trained here or not."""
    memory: Tree
    """What this rule kept on this client since its last visit."""
    extra: Mapping[str, Any]
    """What the server sent beside the weights."""
    along: Tree
    """What this rule sent along the chain beside the model; empty at its first visit."""
    rate: Any
    """The learning rate that trains, whoever set it."""
    steps: Any
    """Steps of this visit."""
    handed: Any
    """Hand-overs that succeeded before this visit in its chain."""
    examples: Any
    """How many examples the client trains on."""
    rows: Rows | None = None

    @property
    def x(self) -> Tensor:
        return self._rows.x

    @property
    def y(self) -> Tensor:
        return self._rows.y

    @property
    def forward(self) -> Forward:
        return self._rows.forward

    @property
    def criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        return self._rows.criterion

    @property
    def _rows(self) -> Rows:
        if self.rows is None:
            raise LookupError("a rule that reads the client's rows must say so: set `reads_rows = True` on its class")
        return self.rows


@dataclass(frozen=True)
class End:
    """What a rule hands on when its visit is over."""

    weights: Weights
    """The trained leaves as handed on."""
    memory: Tree | None = None
    """What stays on the client; None: as it was."""
    up: Mapping[str, Weights] = field(default_factory=dict)
    """To the server's folds, by name."""
    along: Tree | None = None
    """To this rule at the chain's next visit; None: as it was."""


@value
class Rule:
    """What a client does beyond descent: a frozen value whose ``float`` fields are numbers and whose other fields are kind.

    Every function is pure and written for one model. ``penalty`` and ``loss`` are vectorised over many models at once, and so
    are ``begin`` and ``end`` unless the class says ``reads_rows = True``: then these two are called once per client, with
    exactly its rows. What is vectorised must not ask a tensor for a Python truth: write ``mu * (see.handed > 0)`` for an ``if``.
    """

    reads_rows: ClassVar[bool] = False
    """``begin`` and ``end`` look at the client's examples."""
    enters: ClassVar[str | None] = None
    """The segment at which the rows that ``prepare`` makes enter the model; static, because code is made for it."""

    shared: ClassVar[tuple[str, ...]] = ()
    """Numbers that the server's half computes with too: they are the same for everybody, so they cannot evolve."""

    def memory(self, w: Weights) -> Tree:
        """What a client keeps before its first visit: zeros of fixed shape."""
        return {}

    def leaves(self, w: Weights) -> Weights:
        """Leaves that this rule adds to the model, before anybody trained them: they train, travel and merge with it."""
        return {}

    def prepare(self, see: ClientView) -> tuple[Tensor, Tensor]:
        """The rows to train on; by default the client's own. Always called once per client."""
        return see.x, see.y

    def begin(self, see: ClientView) -> Tree:
        """The context of the visit: what ``penalty``, ``loss`` and ``end`` need."""
        return {}

    def penalty(self, params: Weights, context: Tree) -> Tensor | float:
        """Added to the loss; a sum over the leaves it is given, so that a cut may halve it."""
        return 0.0

    def loss(self, params: Weights, forward: Forward, x: Tensor, y: Tensor, mask: Tensor, context: Tree) -> Tensor | float:
        """Added to the loss; needs the whole model, so it is refused across a split. Rows outside ``mask`` are padding.

        ``forward(weights, x, until=segment)`` runs the model from where the rows enter it; ``params`` are the trained leaves.
        """
        return 0.0

    def end(self, params: Weights, see: ClientView, context: Tree) -> End:
        """What is handed on, kept and sent up after the last step."""
        return End(params)

    def check(self, recipe: Recipe) -> None:
        """Refuse, in one sentence, a recipe in which this rule makes no sense."""

    @classmethod
    def has(cls, hook: str) -> bool:
        """Whether this class says anything of its own at ``hook``.

        >>> Rule.has("penalty")
        False
        """
        return getattr(cls, hook) is not getattr(Rule, hook)
