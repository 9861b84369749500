"""Every bar, what was found, and whether it holds.

    python benchmarks/evidence.py seam
    python benchmarks/evidence.py seam --json --rerun

Everything is measured now, but for what takes longer than ten minutes: that is kept in docs/results/<slug>.json with its
command, date, commit and machine, and --rerun measures it again.
Ends with 1 where a bar does not hold.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bars import ROOT, Measurement, Row
from machine import machine

SLUGS = {"seam": "evidence_seam"}
"""What there is evidence for, and the module that measures it."""


def rows(slug: str, results: Path, rerun: bool, only: str | None = None) -> Iterator[Row]:
    """The rows of a slug, measured or as they were kept."""
    kept = Kept(results / f"{slug}.json")
    measurements: Sequence[Measurement] = importlib.import_module(SLUGS[slug]).MEASUREMENTS
    for measurement in [m for m in measurements if only in (None, m.name)]:
        known = None if rerun or not measurement.costly else kept.get(measurement.name)
        if known is not None:
            yield from known
            continue
        made: list[Row] = []
        try:
            for row in measurement.make():
                made.append(row)
                yield row
            if measurement.costly:
                kept.put(measurement.name, made)
        except Exception as e:  # one that fails hides no other
            bar = (measurement.make.__doc__ or measurement.name).rstrip(".")
            yield Row(bar, f"failed: {e}", "to be measured", False)


class Kept:
    """Rows by measurement, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, name: str) -> list[Row] | None:
        """The rows of a measurement, with their date and commit."""
        if name not in self.found:
            return None
        stamp = {k: v for k, v in self.found[name].items() if k != "rows"}
        return [Row(**{**row, "detail": {**row.get("detail", {}), **stamp}}) for row in self.found[name]["rows"]]

    def put(self, name: str, made: Sequence[Row]) -> None:
        """Keep them."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        command = f"python benchmarks/evidence.py {self.path.stem} --only {name} --rerun"
        on = {"command": command, "measured": when, "commit": commit(), "machine": machine()}
        self.found[name] = {**on, "rows": [r.plain() for r in made]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")


def commit() -> str:
    """What was measured."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def shown(row: Row) -> str:
    """A row for people."""
    holds = {True: "holds", False: "FAILS", None: "  -  "}[row.holds]
    when = f" (measured {row.detail['measured'][:10]} at {row.detail['commit']})" if "measured" in row.detail else ""
    return f"{holds}  {row.bar}: {row.wants}\n{textwrap.indent(textwrap.fill(row.value + when, 120), ' ' * 7)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slug", nargs="?", help=f"one of: {', '.join(SLUGS)}; all where none is named")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    parser.add_argument("--rerun", action="store_true", help="measure again what was kept")
    parser.add_argument("--only", metavar="NAME", help="one measurement of the slug, by its function's name")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results", help="where results are kept")
    args = parser.parse_args(arguments)
    if args.slug is not None and args.slug not in SLUGS:
        close = difflib.get_close_matches(args.slug, SLUGS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there is: {', '.join(SLUGS)}"
        print(f"no evidence is called {args.slug!r}; {hint}", file=sys.stderr)
        return 2
    fails = 0
    for slug in [args.slug] if args.slug else SLUGS:
        for row in rows(slug, args.results, args.rerun, args.only):
            print(json.dumps(row.plain()) if args.json else shown(row), flush=True)
            fails += row.holds is False
    return 1 if fails else 0


if __name__ == "__main__":
    sys.exit(main())
