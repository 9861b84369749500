"""Seconds per round of the product and of plain PyTorch loops, side by side on the same processors.

    python benchmarks/rounds.py W2
    python benchmarks/rounds.py W1 --cohort 20 --rounds 5 --only auto --only "sgd, 2 processes"

A ratio says how many times as fast a variant is as the reference: the median over pairs of neighbouring rounds, and quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from machine import machine, machine_line
from plain import Alone, GradientLoop, How, Processes, SGDLoop
from product import PICKS, product
from side_by_side import Measured, Variant, measure
from workloads import WORKLOADS, Workload

CORES = 2  # what every variant is given
KEEP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}  # glibc: keep what was freed

THREAD, THREADS, PROCESSES, KEPT = "1 thread", f"{CORES} threads", f"{CORES} processes", f"{CORES} processes, memory kept"
PLAIN: dict[str, list[tuple[str, How, list[str]]]] = {
    "W2": [
        ("sgd", How(SGDLoop), [THREAD, THREADS, PROCESSES]),
        ("best", How(GradientLoop), [THREAD, THREADS, PROCESSES]),
    ],
    "W1": [
        ("sgd", How(SGDLoop), [THREADS, PROCESSES]),
        ("best", How(GradientLoop), [PROCESSES]),
        ("sgd, channels last", How(SGDLoop, channels_last=True), [THREADS, PROCESSES]),
        ("best, channels last", How(GradientLoop, channels_last=True), [PROCESSES, KEPT]),
        ("best, channels last, bf16", How(GradientLoop, channels_last=True, bf16=True), [THREADS, PROCESSES, KEPT]),
    ],
}
"""The plain loops: what they are called, how they train, and on what."""
PRODUCT = {
    "W2": ["auto", "lanes 25", "lanes 50", "loop, 2 threads"],
    "W1": ["auto", "auto, bf16", *(n for n in PICKS if n.startswith("loop"))],
}
ROUNDS, WARMUP, TOGETHER = {"W2": 30, "W1": 5}, {"W2": 2, "W1": 1}, {"W2": 4, "W1": 1}
REFERENCES = {"W2": [[f"sgd, {THREAD}"], [f"best, {PROCESSES}"]], "W1": [[f"sgd, {THREADS}", f"sgd, {PROCESSES}"]]}
"""What the product is compared with; of several the faster."""


def plain_threads(workload: Workload, how: How) -> Callable[[], Any]:
    """A plain loop in one process."""
    return Alone(workload.task(), how).round


def plain_processes(workload: Workload, how: How) -> Callable[[], Any]:
    """A plain loop split over processes."""
    return Processes(workload.task, how, CORES).round


def variants(workload: Workload, cache: str) -> list[Variant]:
    """Everything that can be measured on a workload; ``cache``: where the engine keeps its picks."""
    made = []
    for name, how, ways in PLAIN[workload.name]:
        for way in ways:
            run = plain_processes if "processes" in way else plain_threads
            threads = CORES if way == THREADS else 1
            made.append(Variant(f"{name}, {way}", partial(run, workload, how), threads, KEEP if way == KEPT else {}))
    for name in PRODUCT[workload.name]:
        made.append(Variant(f"product: {name}", partial(product, workload, name), CORES, {"FEDRELAY_CACHE": cache}))
    return made


@dataclass(frozen=True)
class Result:
    """Rounds measured side by side."""

    workload: Workload
    measured: Measured
    threads: dict[str, int]

    @property
    def references(self) -> list[str]:
        """The plain variants to compare with that were measured."""
        groups = ([n for n in group if n in self.measured.seconds] for group in REFERENCES[self.workload.name])
        return [self.measured.fastest(group) for group in groups if group]

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        m = self.measured
        return {
            "workload": str(self.workload),
            "machine": machine(),
            "load of others": m.others,
            "variants": {
                name: {
                    "threads": self.threads[name],
                    "seconds": asdict(m.spread(name)),
                    "times as fast as": {r: asdict(m.times(name, r)) for r in self.references},
                    "note": m.notes.get(name),
                    "rounds": seconds,
                }
                for name, seconds in m.seconds.items()
            },
        }

    def table(self) -> str:
        """For people."""
        m, wide = self.measured, max(map(len, self.measured.seconds))
        lines = [str(self.workload), machine_line(machine()), f"others used {m.others:.0%} of the processors meanwhile", ""]
        heads = "".join(f"  {'x ' + r:>24}" for r in self.references)
        lines.append(f"{'':{wide}}  {'ms a round (quartiles)':>26}{heads}")
        for name in m.seconds:
            s = m.spread(name)
            row = f"{name:{wide}}  {1e3 * s.median:9.1f} ({1e3 * s.low:.1f} - {1e3 * s.high:.1f})".ljust(wide + 28)
            for r in self.references:
                t = m.times(name, r)
                row += "  " + f"{t.median:.2f} ({t.low:.2f} - {t.high:.2f})".rjust(24)
            note = m.notes.get(name)
            lines.append(row + (f"  {', '.join(note)}" if note else ""))
        return "\n".join(lines)


def compare(workload: Workload, rounds: int = 0, only: Sequence[str] = ()) -> Result:
    """Measure a workload; ``only`` these variants, by their names or the beginnings of their names."""
    with tempfile.TemporaryDirectory(prefix="fedrelay-rounds-") as folder:
        written = workload.written(Path(folder))
        chosen = variants(written, folder)
        chosen = select(chosen, only) if only else chosen
        measured = measure(chosen, rounds or ROUNDS[workload.name], WARMUP[workload.name], TOGETHER[workload.name])
        return Result(workload, measured, {v.name: v.threads for v in chosen})


def select(variants: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    """The variants of these names; a name that is nobody's stands for all that begin with it."""
    all_names, wanted = [v.name for v in variants], set()
    for name in names:
        found = [name] if name in all_names else [n for n in all_names if n.startswith(name)]
        if not found:
            raise ValueError(f"no variant is called {name!r}; there are: {'; '.join(all_names)}")
        wanted.update(found)
    return [v for v in variants if v.name in wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=0, help=f"measured turns of each variant {ROUNDS}, of {TOGETHER} rounds")
    parser.add_argument("--cohort", type=int, default=100, help="clients a round")
    parser.add_argument("--only", action="append", default=[], help="a variant's name, or how it begins; may be repeated")
    parser.add_argument("--list", action="store_true", help="name the variants and measure nothing")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args(arguments)
    workload = replace(WORKLOADS[args.workload], cohort=args.cohort)
    if args.list:
        print("\n".join(v.name for v in variants(workload, "")))
        return 0
    try:
        result = compare(workload, args.rounds, args.only)
    except ValueError as e:
        print(e, file=sys.stderr)
        return 2
    print(json.dumps(result.plain()) if args.json else result.table())
    return 0


if __name__ == "__main__":
    os.environ.pop("OMP_NUM_THREADS", None)  # every variant says itself how many threads it uses
    sys.exit(main())
