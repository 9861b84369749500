"""What happens before a visit's first step and after its last, for many visits of one kind at once.

A rule that reads only weights, memory, extras and numbers is vectorised over the visits; one that reads rows, or prepares
them, is called once per client with exactly that client's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedrelay.engine.visits import OPTIMIZER, Boarding, Outcome, Site
from fedrelay.seam.folds import Slice, stack
from fedrelay.seam.recipe import Recipe, numeric, rebind
from fedrelay.seam.rules import ClientView, End, Rows, Rule
from fedrelay.seam.values import leaves, tmap

Leaves = Mapping[str, Tensor]
Forward = Callable[..., Tensor]
NOT_FINITE = "not finite"


class Prepared:
    """The rows that one client trains on, where a rule makes them."""

    def __init__(self, site: Site, boarding: Boarding) -> None:
        self.x, self.y = site.data.of(boarding.client)
        self.forward: Forward = site.model.forward
        for rule in boarding.recipe.rules:
            if rule.has("prepare"):
                self.x, self.y = rule.prepare(alone(site, rule, boarding, self))
        if segment := enters(boarding.recipe):
            self.forward = partial(site.model.forward, enters=segment)


def prepares(recipe: Recipe) -> bool:
    """Whether a rule of this recipe makes the rows that are trained on."""
    return any(r.has("prepare") for r in recipe.rules)


def enters(recipe: Recipe) -> str | None:
    """The segment where the rows enter the model."""
    return next((r.enters for r in recipe.rules if r.enters), None)


def name(rule: Rule) -> str:
    return type(rule).__name__


def memory_of(rule: Rule, b: Boarding) -> Leaves:
    """What a rule kept on this client, or what it starts from."""
    kept = b.memory.get(name(rule))
    return kept if kept is not None else rule.memory(b.trip.weights)


def alone(site: Site, rule: Rule, b: Boarding, rows: Prepared | None, steps: int = 0, reads: bool = True) -> ClientView:
    """One visit as a rule sees it, with its rows if it reads them."""
    x, y = (rows.x, rows.y) if rows else site.data.of(b.client) if reads else (None, None)
    forward = rows.forward if rows else site.model.forward
    received = b.trip.weights
    if x is not None and isinstance(received, Slice):
        received = received.settled()  # bits may depend on where a tensor lies: it lies here as it would on a device
    examples = b.trip.tally.sizes[b.trip.first + b.trip.position]
    return ClientView(
        received=received,
        memory=memory_of(rule, b),
        extra=b.trip.chain.extra,
        along=b.trip.along.get(name(rule), {}),
        rate=b.recipe.learning_rate,
        steps=steps,
        handed=b.trip.handed,
        examples=examples,
        rows=Rows(x, y, forward, site.model.criterion) if x is not None and y is not None else None,
    )


def begin(site: Site, batch: Sequence[Boarding], prepared: Sequence[Prepared | None]) -> dict[str, Any]:
    """The contexts of these visits: rule -> tree of [n, ...]."""
    context: dict[str, Any] = {}
    for i, rule in enumerate(batch[0].recipe.rules):
        if not rule.has("begin"):
            context[name(rule)] = {}
        elif rule.reads_rows:
            trees = [b.recipe.rules[i].begin(alone(site, b.recipe.rules[i], b, p)) for b, p in zip(batch, prepared, strict=True)]
            context[name(rule)] = tmap(lambda *ts: torch.stack(ts), *trees)
        else:
            context[name(rule)] = by_what_came(batch, rule, lambda part, _, i=i: vectorised(part, i, {}, {}, None))  # type: ignore[misc]
    return context


def vectorised(batch: Sequence[Boarding], i: int, params: Leaves, context: Any, steps: Tensor | None) -> Any:
    """Rule i of every visit at once: its ``begin`` (steps None), else its ``end`` as (weights, memory, up, along)."""
    rule, n = batch[0].recipe.rules[i], len(batch)
    first = batch[0].trip
    dtype = next(iter(first.weights.values())).dtype
    received, dims = together([b.trip.weights for b in batch])
    memory, memory_dims = together([memory_of(rule, b) for b in batch])
    along, along_dims = together([b.trip.along.get(name(rule), {}) for b in batch])

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=next(iter(first.weights.values())).device)

    plain: dict[str, Any] = {
        "rate": column([b.recipe.learning_rate for b in batch]),
        "steps": steps.to(dtype) if steps is not None else column([0.0] * n),
        "handed": column([b.trip.handed for b in batch]),
        "examples": column([float(b.trip.tally.sizes[b.trip.first + b.trip.position]) for b in batch]),
    }
    numbers = {f"rule.{f}": column([getattr(b.recipe.rules[i], f) for b in batch]) for f in numeric(type(rule))}
    kept: list[End] = []

    def one(p: Leaves, w: Leaves, m: Leaves, a: Leaves, c: Any, numbers: Mapping[str, Tensor], plain: Mapping[str, Any]) -> Any:
        bound = rebind(rule, "rule", numbers)
        see = ClientView(received=w, memory=m, extra=first.chain.extra, along=a, **plain)
        if steps is None:
            return bound.begin(see)
        end = bound.end(p, see, c)
        kept.append(end)
        return dict(end.weights), dict(end.memory or {}), {k: dict(u) for k, u in end.up.items()}, dict(end.along or {})

    made = vmap(one, in_dims=(0, dims, memory_dims, along_dims, 0, 0, 0))(
        params, received, memory, along, context, numbers, plain
    )
    if steps is None:
        return made
    return (*made[:3], None if kept[0].along is None else made[3], kept[0].memory is not None)


def together(models: Sequence[Leaves]) -> tuple[dict[str, Tensor], dict[str, int | None]]:
    """Models as vmap takes them: a leaf that all share is passed once."""
    first = models[0]
    if all(m is first for m in models):
        return dict(first.items()), dict.fromkeys(first)
    out: dict[str, Tensor] = {}
    dims: dict[str, int | None] = {}
    for leaf in first:
        ours = stack(models, leaf)
        shared = ours.ndim > 0 and len(ours) > 1 and ours.stride(0) == 0 and ours[0].numel() > 0
        out[leaf], dims[leaf] = (models[0][leaf], None) if shared else (ours, 0)
    return out, dims


def stamp(tree: Any) -> Any:
    """What makes two extras the same: equal structure, equal plain data and identical tensors."""
    if isinstance(tree, Mapping):
        return tuple((k, stamp(v)) for k, v in tree.items())
    return id(tree) if isinstance(tree, Tensor) else tree


def by_what_came(batch: Sequence[Boarding], rule: Rule, f: Callable[[list[Boarding], list[int]], Any]) -> Any:
    """``f`` over the visits that were sent the same extra and that all have, or all have not, something of this rule's
    travelling along; the results put back in order."""
    extras = {id(b.trip.chain.extra): b.trip.chain.extra for b in batch}
    travels = [name(rule) in b.trip.along for b in batch]
    if len(extras) == 1 and len(set(travels)) == 1:
        return f(list(batch), list(range(len(batch))))
    stamps = {key: stamp(extra) for key, extra in extras.items()} if len(extras) > 1 else dict.fromkeys(extras)
    parts: dict[Any, list[int]] = {}
    for i, b in enumerate(batch):
        parts.setdefault((stamps[id(b.trip.chain.extra)], travels[i]), []).append(i)
    if len(parts) == 1:
        return f(list(batch), list(range(len(batch))))
    made = [f([batch[i] for i in rows], rows) for rows in parts.values()]
    order = torch.tensor([i for rows in parts.values() for i in rows]).argsort()

    def back(*ts: Any) -> Any:
        return torch.cat(ts)[order] if isinstance(ts[0], Tensor) else ts[0]

    if isinstance(made[0], tuple):
        return tuple(None if part[0] is None else tmap(back, *part) for part in zip(*made, strict=True))
    return tmap(back, *made)


class Staged(NamedTuple):
    """What visits hand on, stacked: trained leaves, memories and travellers by rule, uploads by name."""

    params: Leaves
    memory: Mapping[str, Leaves]
    up: Mapping[str, Leaves]
    along: Mapping[str, Leaves]

    def with_optimizer(self, recipe: Recipe, state: Leaves) -> Staged:
        """The same with the optimizer's state, which travels along the chain or stays on the client."""
        if recipe.optimizer_state == "travels":
            return self._replace(along={**self.along, OPTIMIZER: state})
        return self._replace(memory={**self.memory, OPTIMIZER: state})


def end(
    site: Site,
    batch: Sequence[Boarding],
    prepared: Sequence[Prepared | None],
    params: dict[str, Tensor],
    context: Mapping[str, Any],
    steps: Tensor,
) -> Staged:
    """What the rules make of these visits, whose trained leaves lie stacked in ``params``: each sees what the one before made."""
    memory: dict[str, Leaves] = {}
    up: dict[str, Leaves] = {}
    along: dict[str, Leaves] = {}
    for i, rule in enumerate(batch[0].recipe.rules):
        if not rule.has("end"):
            continue
        if rule.reads_rows:
            ended = _one_by_one(site, batch, prepared, i, params, context[name(rule)], steps)
        else:

            def some(part: list[Boarding], rows: list[int], i: int = i, params: Leaves = params) -> Any:
                whole = len(rows) == len(batch)
                own, c, s = (params, context[name(batch[0].recipe.rules[i])], steps)
                if not whole:
                    own, c, s = (tmap(lambda t: t[rows], x) for x in (own, c, s))
                return vectorised(part, i, own, c, s)

            ended = by_what_came(batch, rule, some)
        params, kept, sent, passed, changed = ended
        up.update(sent)
        if changed:
            memory[name(rule)] = kept
        if passed is not None:
            along[name(rule)] = passed
    return Staged(params, memory, up, along)


def commit(
    site: Site, batch: Sequence[Boarding], made: Staged, steps: Tensor, losses: Tensor, cut: Sequence[int] | None = None
) -> list[bool]:
    """Hand over what is finite; what is not fails. Says of each visit whether its chain may go on."""
    params, memory, up, along = made
    if batch[0].recipe.held_out or any(len(b.trip.chain.visits[b.trip.position].recipes) > 1 for b in batch):
        judged = [held_out_loss(site, b, Slice(b.trip.weights, params, i)) for i, b in enumerate(batch)]
        losses = torch.tensor(judged, dtype=torch.float64, device=steps.device)
    good = finite([*leaves(params), *leaves(memory), *leaves(up), *leaves(along), losses])
    plain_losses, plain_steps = losses.tolist(), steps.tolist()
    goes_on = []
    for i, b in enumerate(batch):
        crossed = cut[i] if cut else 0
        if good[i]:
            o = Outcome(Slice(_base(b, params), params, i), plain_losses[i], int(plain_steps[i]), cut=crossed)
            if memory:
                o.memory = {rule: Slice({}, tree, i) for rule, tree in memory.items()}
            if up:
                o.up = {key: Slice({}, tree, i) for key, tree in up.items()}
            if along:
                o.along = {rule: Slice({}, tree, i) for rule, tree in along.items()}
        else:
            o = Outcome(b.trip.weights, plain_losses[i], int(plain_steps[i]), NOT_FINITE, cut=crossed)
        goes_on.append(b.trip.close(b.which, o))
    return goes_on


def _base(b: Boarding, params: Leaves) -> Leaves:
    """What lies below the leaves just trained. It never refers to an older end that these leaves replace."""
    w = b.trip.weights
    if not isinstance(w, Slice):
        return w
    still = {n: w[n] for n in w.stacked if n not in params}
    return {**w.base, **still} if still else w.base


def _one_by_one(
    site: Site,
    batch: Sequence[Boarding],
    prepared: Sequence[Prepared | None],
    i: int,
    params: Leaves,
    context: Any,
    steps: Tensor,
) -> Any:
    """``end`` of a rule that reads rows, client by client."""
    ends = []
    for k, (b, p) in enumerate(zip(batch, prepared, strict=True)):
        rule = b.recipe.rules[i]
        own = {n: t[k].clone() for n, t in params.items()}
        ends.append(rule.end(own, alone(site, rule, b, p, int(steps[k])), tmap(lambda t, k=k: t[k], context)))

    def gather(trees: list[Any]) -> Any:
        return tmap(lambda *ts: torch.stack(ts), *trees) if trees[0] else {}

    passed = None if ends[0].along is None else gather([e.along for e in ends])
    changed = ends[0].memory is not None
    return (
        gather([e.weights for e in ends]),
        gather([e.memory for e in ends]) if changed else {},
        gather([e.up for e in ends]),
        passed,
        changed,
    )


def held_out_loss(site: Site, b: Boarding, w: Leaves) -> float:
    """The mean loss on the client's own held-out part (on its training part where it has none)."""
    x, y = site.data.of(b.client, "validation")
    if not len(y):
        x, y = site.data.of(b.client)
    return float(site.model.criterion(site.model.forward(w, x), y).mean())


def finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Per visit, whether everything it hands on is finite. Sums find every NaN and infinity; a suspicious sum is looked at."""
    n = len(tensors[0])
    floats = [t for t in tensors if t.is_floating_point() and t.numel()]
    sums = torch.stack([t.reshape(n, -1).sum(1).double() for t in floats])
    good: list[bool] = sums.isfinite().all(0).tolist()
    for i in (i for i, ok in enumerate(good) if not ok):
        good[i] = all(bool(t[i].isfinite().all()) for t in floats)
    return good
