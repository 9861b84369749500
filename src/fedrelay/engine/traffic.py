"""What a visit sends, counted twice: payload (elements times width) and wire (as the codec serialises it, envelope included)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedrelay.seam.codec import Store, encode
from fedrelay.seam.plan import Chain
from fedrelay.seam.recipe import Recipe

if TYPE_CHECKING:
    from fedrelay.engine.visits import Outcome

COLUMNS = ("down", "up", "wire down", "wire up", "cut")


def traffic(recipe: Recipe, scope: tuple[str, ...], chain: Chain, along: Any, o: Outcome) -> tuple[int, ...]:
    """Bytes of a visit's two messages. A client that was lost sent nothing up; what it was sent down is counted."""
    weights = {n: chain.start[n] for n in scope if n in chain.start}
    down = message_bytes({"recipe": recipe, "weights": weights, "extra": chain.extra, "along": dict(along)})
    up = (0, 0)
    if o.reason is None:
        sent_up = {name: dict(w.items()) for name, w in o.up.items()}
        sent_along = {rule: dict(m.items()) for rule, m in o.along.items()}
        up = message_bytes(
            {"weights": {n: o.weights[n] for n in scope}, "up": sent_up, "along": sent_along, "loss": 0.0, "steps": 0}
        )
    return down[0], up[0], down[1], up[1], o.cut


def shape(tree: Any) -> Any:
    """What of a tree decides its size on the wire."""
    if isinstance(tree, Mapping):
        return tuple((k, shape(v)) for k, v in tree.items())
    return (tree.dtype, tree.shape) if hasattr(tree, "dtype") else tree


def message_bytes(message: Any) -> tuple[int, int]:
    """(payload, wire) of a message, without making it."""
    store = Store()
    data = encode(message, store)
    tensors = [store.get(f"t{i}") for i in range(len(store))]
    payload = sum(t.nbytes for t in tensors)
    head = {"v": data, "t": [[str(t.dtype)[6:], list(t.shape)] for t in tensors]}
    return payload, payload + 8 + len(json.dumps(head, separators=(",", ":")).encode())
