"""Simulation: one machine and a virtual clock. What it knows between two calls is plain data: its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from fedrelay.engine.engine import Engine
from fedrelay.engine.memory import Memories, Spill, Spilled
from fedrelay.engine.visits import Site, Tally
from fedrelay.seam.folds import Slice
from fedrelay.seam.landing import Flight, Landing, Receipts
from fedrelay.seam.ledger import Ledger
from fedrelay.seam.places import Place
from fedrelay.seam.plan import EVERYBODY, Plan
from fedrelay.seam.questions import Counts, Question
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.rules import Rows
from fedrelay.seam.values import value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedrelay.seam.values import Weights

T = TypeVar("T")
Clock = Callable[["NDArray[np.int64]", "NDArray[np.float64]"], "NDArray[np.float64]"]
"""(clients, examples to go through) -> seconds."""


@value
class Work:
    """What training made, staged: nothing of it is visible before its flight lands."""

    made: Mapping[Any, Any]
    receipts: Receipts
    memory: Mapping[int, Any]
    """Client -> what it keeps, for the clients whose memory changed."""


@value
class Air:
    """A flight: its plan, and the versions of the memories it starts from. Whoever it writes is refused to others until it
    lands, so nothing of a memory is copied and the flight can be trained again until then."""

    place: Place
    plan: Plan
    lands: float
    began: Mapping[int, int]
    seconds: tuple[float, ...]
    work: Work | None = None


class Simulation:
    """A federation on this machine."""

    def __init__(
        self,
        site: Site,
        engine: Engine | None = None,
        seed: int = 0,
        clock: Clock | None = None,
        memory_budget: int = 256 << 20,
        spill_folder: str | None = None,
        refuses: Callable[[int, Question[Any]], bool] | None = None,
    ) -> None:
        self.refuses = refuses or (lambda client, question: False)
        self.site, self.engine, self.seed = site, engine or Engine(), seed
        self.clock: Clock = clock or (lambda clients, examples: examples)
        self.memories = Memories(Spill(memory_budget, spill_folder))
        self.ledger = Ledger(len(self.sizes))
        self.now = 0.0
        self._flown = 0
        self._counters: dict[tuple[tuple[str, ...], str], int] = {}
        self._air: dict[int, Air] = {}
        self._initial: dict[str, torch.Tensor] | None = None

    # --- the seam

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self.site.data.train.sizes

    def initial(self) -> Weights:
        if self._initial is None:
            self._initial = self.site.model.initial()
        return self._initial

    def place(self, path: tuple[str, ...], purpose: str) -> Place:
        n = self._counters.get((path, purpose), 0)
        self._counters[path, purpose] = n + 1
        return Place(path, purpose, n)

    def launch(self, place: Place, plan: Plan) -> Flight:
        if place.number >= self._counters.get((place.path, place.purpose), 0):
            raise ValueError(f"{place} was not handed out by this federation")
        if any(a.place == place for a in self._air.values()):
            raise ValueError(f"{place} is in the air already: every plan needs a place of its own")
        if not plan.chains:
            raise ValueError(f"the plan at {place} has no chains: draw at least one client")
        keeps = self._keeping(place, plan)
        seconds = self._seconds(plan)
        ends = accumulate(len(c.visits) for c in plan.chains)
        longest = max(sum(seconds[end - len(c.visits) : end]) for c, end in zip(plan.chains, ends, strict=True))
        air = Air(
            place,
            plan,
            self.now + longest,
            {c: self.memories.version(place.path, c) for c in sorted(keeps)},
            tuple(seconds),
        )
        self._air[self._flown] = air
        self._flown += 1
        return Flight(self._flown - 1)

    def land(self, any_of: Sequence[Flight], also: Sequence[Flight] = ()) -> list[Landing]:
        if not any_of:
            raise ValueError("there is no flight to wait for")
        if unknown := [f.id for f in (*any_of, *also) if f.id not in self._air]:
            raise ValueError(f"flight {unknown[0]} is not in the air")
        self._train([i for i, a in self._air.items() if a.work is None])  # whatever is untrained trains together
        self.now = max(self.now, min(self._air[f.id].lands for f in any_of))
        down = {f.id for f in (*any_of, *also) if self._air[f.id].lands <= self.now}
        return [self._commit(i) for i in sorted(down, key=lambda i: (self._air[i].lands, i))]

    def ask(self, clients: Sequence[int], question: Question[T], weights: Weights | None = None) -> Mapping[int, T]:
        if unknown := [c for c in clients if not 0 <= c < len(self.sizes)]:
            raise ValueError(f"client {unknown[0]} does not exist: there are clients 0 ... {len(self.sizes) - 1}")
        if question.part not in (parts := self.site.data.parts):
            raise ValueError(f"clients have no {question.part!r} part: they have {', '.join(parts)}")
        willing = [c for c in map(int, clients) if not self.refuses(c, question)]
        self.ledger.disclose(question.discloses, willing)
        model = self.site.model
        with torch.no_grad():
            answers = {}
            for c in willing:
                x, y = self.site.data.of(c, question.part)
                answers[c] = question.answer(Rows(x, y, model.forward, model.criterion), weights)
        return answers

    def forget(self, path: tuple[str, ...]) -> tuple[Flight, ...]:
        over = [i for i, a in self._air.items() if a.place.path[: len(path)] == path]
        for i in over:
            del self._air[i]
        self.memories.forget(path)
        return tuple(map(Flight, over))

    # --- beyond the seam: what a server can do alone

    def test(self, weights: Weights, batch: int = 2048) -> Counts | None:
        """How well these weights do on the server's test rows; None if it has none."""
        data, model = self.site.data, self.site.model
        if data.server is None:
            return None
        x, y = data.server
        total = Counts(np.zeros((data.classes, data.classes), np.int64), 0.0)
        with torch.no_grad():
            for i in range(0, len(y), batch):
                z = model.forward(weights, data.inputs(x[i : i + batch]))
                total += Counts.of(z, y[i : i + batch], model.criterion(z, y[i : i + batch]), data.classes)
        return total

    def picks(self) -> Mapping[str, Any]:
        """How each kind of visit has been trained so far."""
        return self.engine.picks()

    def use(self, picks: Mapping[str, Any], told: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        """Train as recorded, and tell of every new pick before its first step."""
        self.engine.use(picks, told)

    def state(self) -> Any:
        """Everything it knows, as a value for the codec."""
        return {
            "now": self.now,
            "flown": self._flown,
            "counters": dict(self._counters),
            "air": dict(self._air),
            "memory": self.memories.state(),
            "ledger": self.ledger.state(),
        }

    def restore(self, state: Any) -> None:
        """Go on from a state, in this process or another."""
        self.now, self._flown = state["now"], state["flown"]
        self._counters, self._air = dict(state["counters"]), dict(state["air"])
        self.memories.restore(state["memory"])
        self.ledger.restore(state["ledger"])

    # --- inside

    def _keeping(self, place: Place, plan: Plan) -> set[int]:
        """The clients whose memory this plan writes. A memory has one writer at a time."""
        known, keeps, seen = {}, set[int](), dict[int, int]()
        last = len(self.sizes)
        for i, chain in enumerate(plan.chains):
            for v in chain.visits:
                if not 0 <= v.client < last and v.client != EVERYBODY:
                    raise ValueError(f"client {v.client} does not exist: there are clients 0 ... {last - 1}")
                for r in v.recipes:
                    if id(r) not in known:
                        known[id(r)] = r.check().keeps or self.site.keeps_buffers
                    if known[id(r)]:
                        if seen.setdefault(v.client, i) != i:
                            who = f"two chains of one plan would write the memory of client {v.client}"
                            raise ValueError(f"{who}: let it travel in one of them")
                        keeps.add(v.client)
        for a in self._air.values():
            if a.place.path == place.path and (both := keeps & a.began.keys()):
                who = f"client {min(both)} is under way in another flight that will write its memory"
                raise ValueError(f"{who}: wait until that has landed")
        return keeps

    def _seconds(self, plan: Plan) -> list[float]:
        visits = [v for c in plan.chains for v in c.visits]
        clients = np.fromiter((v.client for v in visits), np.int64, len(visits))
        sizes = self.site.data.train.lengths[clients].tolist()
        work = [float(sum(_examples(r, n) for r in v.recipes)) for v, n in zip(visits, sizes, strict=True)]
        wait = np.fromiter((v.wait for v in visits), float, len(visits))
        seconds: NDArray[np.float64] = self.clock(clients, np.array(work)) + wait
        return list(seconds.tolist())

    def _commit(self, i: int) -> Landing:
        a = self._air.pop(i)
        if a.work is None:
            raise RuntimeError(f"flight {i} lands untrained")
        for c, kept in a.work.memory.items():
            self.memories.commit(a.place.path, c, a.began[c] + 1, self.memories.row(kept))
        self.ledger.commit(a.work.receipts)
        self._disclosed(a)
        return Landing(Flight(i), a.lands, a.work.made, a.work.receipts)

    def _disclosed(self, a: Air) -> None:
        """Clients that handed a model on have disclosed its weights, and whatever their rules sent up."""
        work = a.work
        if work is None:
            return
        if any(v.client == EVERYBODY for c in a.plan.chains for v in c.visits):
            self.ledger.disclose("raw data", range(len(self.sizes)))
        scopes = {v.recipes[0].scope for c in a.plan.chains for v in c.visits}
        for scope in scopes:
            what = "weights" if scope is None else f"weights of {', '.join(scope)}"
            clients = [v.client for c in a.plan.chains for v in c.visits if v.recipes[0].scope == scope]
            ok = set(work.receipts.client[work.receipts.ok].tolist())
            if gave := [c for c in clients if c in ok and c != EVERYBODY]:
                self.ledger.disclose(what, gave)

    def _train(self, flights: Sequence[int]) -> None:
        tallies = {i: self._tally(self._air[i]) for i in flights}
        if tallies:
            self.engine.run(list(tallies.values()))
        for i, t in tallies.items():
            memory = {c: t.kept[c] for c in self._air[i].began if c in t.kept}
            self._air[i] = replace(self._air[i], work=Work(t.made, t.receipts(), memory))

    def _tally(self, a: Air) -> Tally:
        clients = [v.client for c in a.plan.chains for v in c.visits]
        sizes = self.site.data.train.lengths[clients].tolist()
        spill, path = self.memories.spill, a.place.path
        return Tally(
            self.site,
            a.plan,
            a.place.key(self.seed),
            sizes,
            a.seconds,
            memory=lambda c: self.memories.read(path, c),
            stage=lambda kept: spill.lazily(spill.put(kept)),
            spill=lambda w: Spilled(spill, w) if isinstance(w, Slice) else w,
        )


def _examples(recipe: Recipe, size: int) -> float:
    """How many examples a visit to a client of this size goes through."""
    if not recipe.steps:
        return recipe.epochs * size
    epochs, steps = divmod(int(recipe.steps), max(1, -(-size // int(recipe.batch_size))))
    return epochs * size + steps * recipe.batch_size
