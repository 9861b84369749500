"""What the seam promises, measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bars import ROOT, Measurement, NotHereError, Row, last_line, lines, python, script

AUTO, AUTO_BF16 = "product: auto", "product: auto, bf16"
SGD_ALONE, BEST_SPLIT = "sgd, 1 thread", "best, 2 processes"
SGD_EITHER = ("sgd, 2 threads", "sgd, 2 processes")
BESIDE_W1 = "best, channels last, 2 processes"  # listed, and no bar
BF16 = {"amx_bf16": 2.5, "avx512_bf16": 1.8}


def w2() -> Iterator[Row]:
    """Small models: many visits of little arithmetic."""
    beside = ("sgd, 2 processes", "best, 1 thread", "best, 2 threads")
    found = script("rounds.py", "W2", *only(AUTO, SGD_ALONE, BEST_SPLIT, *beside))
    yield speed("W2, a round against a plain torch.optim.SGD loop on one thread", found, AUTO, SGD_ALONE, 3)
    yield speed("W2, a round against the best plain loop in two processes", found, AUTO, BEST_SPLIT, 1.3)


def w1() -> Iterator[Row]:
    """Convolutions."""
    from machine import machine

    least = next((times for flag, times in BF16.items() if flag in machine()["bf16"]), None)
    found = script("rounds.py", "W1", *only(AUTO, *([AUTO_BF16] if least else []), *SGD_EITHER, BESIDE_W1))
    (reference,) = found["variants"][AUTO]["times as fast as"]
    yield speed(f"W1, a round in float32 against the better plain NCHW SGD loop ({reference})", found, AUTO, reference, 1)
    bar = f"W1, a round in bf16 against the same float32 loop ({reference})"
    if least is None:
        yield Row(bar, "not measured: this processor has no bf16 instructions", "at least 1.8 times where it has", None)
    else:
        yield speed(bar, found, AUTO_BF16, reference, least)


def only(*names: str) -> list[str]:
    """Arguments that choose variants."""
    return [word for name in names for word in ("--only", name)]


def speed(bar: str, found: dict[str, Any], variant: str, reference: str, least: float) -> Row:
    """A ratio and its spread, on what, and beside how much other load."""
    times = found["variants"][variant]["times as fast as"][reference]
    machine, others = found["machine"], found["load of others"]
    note = ", ".join(found["variants"][variant]["note"] or ["no note"])
    spread = f"{times['median']:.2f} times (quartiles {times['low']:.2f} - {times['high']:.2f})"
    load = f"others used {others:.0%} of the processors" if others > 0.05 else "no other load"
    value = f"{spread}, picked {note}; {machine['processor']}, {machine['cores']} cores, {load}"
    seconds = {name: v["seconds"] for name, v in found["variants"].items()}
    detail = {"times": times, "seconds": seconds, "machine": machine, "load of others": others, "workload": found["workload"]}
    return Row(bar, value, f"at least {least:g} times", times["median"] >= least, detail)


def memory() -> Iterator[Row]:
    """Peak memory does not grow with the clients, nor with the rounds."""
    found = script("memory.py")
    runs, index = found["runs"], found["index"]
    peaks = ", ".join(f"{r['clients']:,} clients: {r['peaks']['100'] / 2**20:.0f} MB" for r in runs)
    value = f"{found['between populations']:+.1%} ({peaks}; index {index[0]:,} and {index[1]:,} bytes)"
    populations, rounds = abs(found["between populations"]) < 0.1, abs(found["between rounds"]) < 0.1
    yield Row("peak memory of 100,000 against 10,000 clients", value, "differs by less than 10 %", populations, found)
    after = ", ".join(f"{r['peaks']['20'] / 2**20:.0f} and {r['peaks']['100'] / 2**20:.0f} MB" for r in runs)
    value = f"{found['between rounds']:+.1%} ({after})"
    yield Row("peak memory after 100 against 20 rounds", value, "differs by less than 10 %", rounds)


def mnist() -> Iterator[Row]:
    """Against plain PyTorch on the same cohorts and batches."""
    bar = "FedAvg on MNIST, 100 clients of Dirichlet 0.1, 60 rounds, 3 seeds, beside plain PyTorch on the same batches"
    wants = "weights within 1e-4 after round 1, accuracy within 0.5 points after every round"
    try:
        found = script("mnist.py")
    except NotHereError as e:
        yield Row(bar, f"not measured: {e}", wants, None)
        return
    last = ", ".join(f"{100 * a:.2f} %" for a in found["accuracy"])
    value = f"weights {found['weights']:.1e}, accuracy {found['points']:.2f} points; after round 60: {last}"
    yield Row(bar, value, wants, found["holds"], found)


def cuda() -> Iterator[Row]:
    """The same code on a GPU."""
    bar, wants = "a run on CUDA against the processor, float32 without TF32", "equal by norm within 1e-5"
    try:
        found = script("devices.py")
    except NotHereError as e:
        yield Row(bar, str(e), wants, None)
        return
    gaps = ", ".join(f"{engine} {gap:.1e}" for engine, gap in found["gaps"].items())
    times = ", ".join(f"{t:.1f} times the {loop} loop" for loop, t in found["times"].items())
    yield Row(bar, f"{gaps} on {found['device']}; W2: {times}", wants, found["holds"], found)


def code() -> Iterator[Row]:
    """How long things are."""
    source, tests = sorted((ROOT / "src").rglob("*.py")), sorted((ROOT / "tests").rglob("*.py"))
    for name, most in (("algorithms/fedavg.py", 50), ("methods/scaffold.py", 100)):
        n = lines([ROOT / "src" / "fedrelay" / name])
        yield Row(name, f"{n} lines", f"at most {most} lines", n <= most)
    n, longest = max((lines([p]), str(p.relative_to(ROOT))) for p in source)
    yield Row("the longest source file", f"{n} lines, {longest}", "at most 400 lines", n <= 400)
    share = lines(tests) / lines(source)
    value = f"{share:.2f} ({lines(tests):,} of tests, {lines(source):,} of source)"
    yield Row("lines of tests per line of source", value, "at least 0.8", share >= 0.8)


def checks() -> Iterator[Row]:
    """Types and style."""
    tools = {"mypy --strict": ["mypy"], "ruff check": ["ruff", "check"], "ruff format": ["ruff", "format", "--check"]}
    for bar, arguments in tools.items():
        done = python("-m", *arguments)
        found = [line for line in done.stdout.splitlines() if line.startswith("Found")]  # ruff goes on to offer help
        yield Row(bar, found[-1] if found else last_line(done.stdout or done.stderr), "clean", done.returncode == 0)


def suite(bar: str, *paths: str) -> Row:
    """A part of the tests that a bar names."""
    done = python("-m", "pytest", "-q", "-n", "2", *paths, threads=1)
    value = last_line(done.stdout or done.stderr).strip("= ")
    return Row(bar, value, "all pass", done.returncode == 0, {"tests": paths})


def suites() -> Iterator[Row]:
    """What the tests promise."""
    yield suite("one round of every system through both engines and the hostile federation", "tests/tracer")
    yield suite("every method inside every algorithm, or refused in one sentence", "tests/test_grid.py")
    yield suite("lanes equal the loop on random plans, by norm per tensor", "tests/engine/test_equal_engines.py")
    yield suite("FedDyn and SCAFFOLD reach the optimum that FedAvg misses", "tests/methods/test_drift.py")
    yield suite("the step of every method is captured, once", "tests/engine/test_capture.py")


def mutants() -> Iterator[Row]:
    """What is broken on purpose is noticed."""
    bar, wants = "mutants of seam, engines, methods and federations", "at least 60, each caught by a named test"
    path = ROOT / "docs" / "results" / "mutants.json"
    python("tests/mutants.py", "--json", str(path))
    every = json.loads(path.read_text())["results"]
    survive = [m for m in every if not m["caught by"]]
    value = f"{len(every)} mutants, {len(survive)} survive"
    yield Row(bar, value, wants, len(every) >= 60 and not survive, {"survive": survive})


MEASUREMENTS = [
    Measurement(w2),
    Measurement(w1),
    Measurement(memory),
    Measurement(mnist),
    Measurement(cuda),
    Measurement(suites),
    Measurement(mutants, costly=True),
    Measurement(code),
    Measurement(checks),
]
