"""A bar, what was found, and how evidence runs what it measures with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """One bar: what is wanted, what was found, and whether that holds (None: it could not be measured here)."""

    bar: str
    value: str
    wants: str
    holds: bool | None
    detail: dict[str, Any] = field(default_factory=dict)
    """The numbers behind ``value``, on what they were measured, and when."""

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {k: v for k, v in asdict(self).items() if k != "detail" or v}


@dataclass(frozen=True)
class Measurement:
    """A function that makes rows. A costly one is run once, and its rows are kept until a rerun is asked for."""

    make: Callable[[], Iterator[Row]]
    costly: bool = False

    @property
    def name(self) -> str:
        """What its rows are kept under."""
        return self.make.__name__


class NotHereError(Exception):
    """Something that cannot be measured on this machine, and why."""


def python(*arguments: str, threads: int | None = None) -> subprocess.CompletedProcess[str]:
    """This interpreter at the root of the project, from a process of its own."""
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environment.pop("OMP_NUM_THREADS", None)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def script(name: str, *arguments: str) -> dict[str, Any]:
    """What a benchmark prints as JSON. (It ends with 1 where its bar does not hold, with 2 where it cannot run here.)"""
    done = python(f"benchmarks/{name}", "--json", *arguments)
    if done.returncode == 2 and not done.stdout:
        raise NotHereError(last_line(done.stderr))
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{name} failed: {last_line(done.stderr)}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing was said"


def lines(paths: Sequence[Path]) -> int:
    """How many lines these files have together."""
    return sum(len(p.read_text().splitlines()) for p in paths)
