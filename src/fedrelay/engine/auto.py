"""``engine = "auto"``: measure once per machine how a kind of visit trains fastest, and keep the answer.

A second run of a seed must not time its way to other bits, so a pick is kept per (kind, model, data shape, processor, threads,
versions) in a cache that later runs read, and it belongs to the run's record.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fedrelay.engine.engine import Pick, untrained
from fedrelay.engine.examples import Examples
from fedrelay.engine.lanes import Lanes, cannot
from fedrelay.engine.loop import Visiting
from fedrelay.engine.visits import Boarding, Site
from fedrelay.models.model import Model
from fedrelay.seam.codec import Store, encode
from fedrelay.seam.recipe import Recipe

log = logging.getLogger("fedrelay")
WIDTHS = (8, 16, 25, 32, 50)
MEMORY = 1 << 30  # lanes hold some eight copies of the trained leaves: weights, gradients, optimizer state, what was received
STEPS, REPEATS, PATIENCE = 4, 3, 0.5
WORSE = 1.1  # how much slower than the narrower lanes still counts as noise
AMX, AVX512 = "amx_bf16", "avx512_bf16"


@cache
def processor() -> tuple[str, frozenset[str]]:
    """The processor's name and its bf16 instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        import platform

        return platform.processor() or platform.machine(), frozenset()
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    stripped = {k.strip(): v.strip() for k, v in fields.items()}
    return stripped.get("model name", "unknown"), frozenset({AMX, AVX512} & set(stripped.get("flags", "").split()))


def identity(site: Site, kind: Recipe, precision: str) -> str:
    """What a pick depends on, as text."""
    train = site.data.train
    leaves = [[n, list(t.shape), str(t.dtype)] for n, t in site.model.initial().items()]
    name = processor()[0] if train.x.device.type == "cpu" else torch.cuda.get_device_name(train.x.device)
    layers = [repr(module) for module in site.model.segments.values()]  # a ReLU and a Tanh have no leaves
    parts = [
        encode(kind, Store()),
        layers,
        leaves,
        list(train.x.shape[1:]),
        str(train.x.dtype),
        repr(site.data.transform),
        precision,
    ]
    return json.dumps([*parts, name, torch.get_num_threads(), torch.__version__])


def default_cache() -> Path:
    """Where picks are kept between runs."""
    base = os.environ.get("FEDRELAY_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fedrelay"
    )
    return Path(base) / "picks.json"


class Auto:
    """Measures, then remembers. ``picks`` is what this run uses: whoever records the run writes it before the first step, which
    ``told`` makes possible."""

    def __init__(
        self, precision: str = "float32", cache: Path | None = None, told: Callable[[Mapping[str, Pick]], None] | None = None
    ) -> None:
        self.precision, self.cache, self.told = precision, cache or default_cache(), told
        self.picks: dict[str, Pick] = {}
        self._known: dict[tuple[Model, Examples, int], Pick] = {}

    def __call__(self, site: Site, kind: Recipe, queue: Sequence[Boarding]) -> Pick:
        here = (site.model, site.data, id(kind))  # held, so that no other model gets its id
        if here not in self._known:
            text = identity(site, kind, self.precision)
            key = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
            pick = self.picks.get(key)
            if pick is None:
                kept = self._read()
                pick = kept.get(key)
                if pick is None:
                    pick = self.measure(site, kind, queue)
                    self._write({**kept, key: pick})
                elif pick.why:
                    log.warning("%s", pick.why)
            self.picks[key] = self._known[here] = pick
            if self.told:
                self.told(self.picks)
        return self._known[here]

    def use(self, picks: Mapping[str, Pick], told: Callable[[Mapping[str, Pick]], None] | None) -> None:
        """Go by these picks before any other, and tell of every kind that trains from now on."""
        self.picks.update(picks)
        self.told = told
        self._known.clear()

    def measure(self, site: Site, kind: Recipe, queue: Sequence[Boarding]) -> Pick:
        """The fastest of the candidates on the first steps of these very visits; nothing is committed."""
        images = any(t.ndim == 4 for t in site.model.initial().values())
        threads = torch.get_num_threads()
        candidates = [Pick("loop", 1, images, self.precision)]
        if threads > 1 and not site.draws:
            candidates.append(Pick("loop", threads, images, self.precision))
        why = cannot(site, kind, untrained(site, kind, queue[0]), queue[0])
        if why:
            log.warning("%s", why)
            candidates = [Pick(p.engine, p.width, p.channels_last, p.precision, why) for p in candidates]
        seconds = {p: seconds_per_step(site, kind, p, queue) for p in candidates}
        if not why:
            size = sum(t.nbytes for n, t in queue[0].trip.weights.items() if n in site.trains(kind))
            fitting = [w for w in WIDTHS if 8 * w * size <= MEMORY and w <= max(8, len(queue))]
            last = float("inf")
            for width in fitting or WIDTHS[:1]:
                pick = Pick("lanes", width, False, self.precision)
                seconds[pick] = seconds_per_step(site, kind, pick, queue)
                if seconds[pick] > WORSE * last or seconds[pick] > 2 * min(seconds.values()):
                    break  # wider lanes will not make up for that
                last = min(last, seconds[pick])
        best = min(seconds, key=lambda p: seconds[p])
        table = ", ".join(f"{p.engine} {p.width}: {1e6 * s:.0f} us" for p, s in seconds.items())
        log.info("engine for this kind of visit: %s %d (per visit and step: %s)", best.engine, best.width, table)
        return best

    def _read(self) -> dict[str, Pick]:
        try:
            kept = json.loads(self.cache.read_text())
            return {key: Pick(**fields) for key, fields in kept.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as e:
            log.warning("the engine cache %s cannot be read (%s); measuring again", self.cache, e)
            return {}

    def _write(self, picks: Mapping[str, Pick]) -> None:
        text = json.dumps({key: asdict(pick) for key, pick in picks.items()}, indent=1)
        try:
            self.cache.parent.mkdir(parents=True, exist_ok=True)
            new = self.cache.with_suffix(f".{os.getpid()}")
            new.write_text(text)
            new.replace(self.cache)
        except OSError as e:
            log.warning("the engine cache %s cannot be written (%s); the next run measures again", self.cache, e)


def seconds_per_step(site: Site, kind: Recipe, pick: Pick, queue: Sequence[Boarding]) -> float:
    """Seconds per visit and step of this candidate, boarding included; the best of a few tries."""
    some = [queue[i % len(queue)] for i in range(max(pick.width, 2))]

    def trial() -> float:
        with torch.random.fork_rng(devices=[]):  # dropout draws here as well
            return _lanes(site, kind, pick, some) if pick.engine == "lanes" else _loop(site, pick, some)

    trial()  # the first one also pays for what is made once
    best, began = float("inf"), time.perf_counter()
    for _ in range(REPEATS):
        best = min(best, trial())
        if time.perf_counter() - began > PATIENCE:
            break
    return best


def _lanes(site: Site, kind: Recipe, pick: Pick, some: Sequence[Boarding]) -> float:
    lanes = Lanes(site, kind, untrained(site, kind, some[0]), some[0], pick.width, precision=pick.precision)
    began = time.perf_counter()
    lanes.board(deque(some[: pick.width]))
    steps = max(1, min(STEPS, int(lanes.left.max())))
    done = min(int(lanes.left.sum()), int(lanes.left.clip(max=steps).sum()))
    for _ in range(steps):
        lanes.advance()
    _wait(site)
    return (time.perf_counter() - began) / max(done, 1)


def _loop(site: Site, pick: Pick, some: Sequence[Boarding]) -> float:
    def visit(b: Boarding) -> int:
        v = Visiting(site, b, pick.channels_last, pick.precision)
        v.begin()
        v.train(STEPS)
        return v.steps

    began = time.perf_counter()
    if pick.width == 1:
        done = sum(map(visit, some[:2]))
    else:
        with ThreadPoolExecutor(pick.width, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            done = sum(pool.map(visit, some[: 2 * pick.width]))
    _wait(site)
    return (time.perf_counter() - began) / max(done, 1)


def _wait(site: Site) -> None:
    if site.data.train.x.device.type == "cuda":
        torch.cuda.synchronize()


def picker(engine: str, width: int | None = None, precision: str = "float32", cache: Path | None = None) -> Any:
    """What a user names: "auto", "lanes", "loop" or "cut"."""
    if engine == "auto":
        return Auto(precision, cache)
    if engine not in ("lanes", "loop", "cut"):
        raise ValueError(f"engine {engine!r} is none of auto, lanes, loop, cut")
    return Pick(engine, width or (16 if engine == "lanes" else 1), False, precision)
