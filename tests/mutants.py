"""Break one thing at a time in a copy of the project; a named test must notice.

    python tests/mutants.py [--json FILE] [WORD ...]     only the mutants whose description holds one of the words

A mutant is a sentence, a file below src/fedrelay, the text to replace, what replaces it, and the tests that should notice.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ENGINES = "tests/engine/test_equal_engines.py"
TRACER = "tests/tracer"
BY_HAND = "tests/tracer/test_by_hand.py"
SYSTEMS = "tests/tracer/test_systems.py"
FAILURES = "tests/tracer/test_failures.py"


class Mutant(NamedTuple):
    what: str
    file: str
    old: str
    new: str
    tests: str


def m(*fields: str) -> Mutant:
    return Mutant(*fields)


# fmt: off
MUTANTS = [
    # --- the seam
    m("places forget their number", "seam/places.py", "self.purpose, self.number, *more", "self.purpose, *more", "tests/seam/test_places.py"),
    m("places forget their path", "seam/places.py", "(seed, self.path, self.purpose", "(seed, self.purpose", "tests/seam/test_places.py"),
    m("places forget the seed", "seam/places.py", "repr((seed, self.path", "repr((0, self.path", "tests/seam/test_places.py"),
    m("the generator's shift is arithmetic", "seam/places.py", "((z >> 30) & ((1 << 34) - 1))", "(z >> 30)", "tests/seam/test_places.py"),
    m("a layer draws under no name", "seam/federation.py", "partial(place.rng, self.base.seed, *own)", "partial(place.rng, self.base.seed)", "tests/seam/test_federation.py"),
    m("a path is not pushed", "seam/federation.py", "path=(*self.path, name)", "path=self.path", "tests/seam/test_federation.py tests/tracer/test_compositions.py"),
    m("layers see plans in the wrong order", "seam/federation.py", "layers=(layer, *self.layers)", "layers=(*self.layers, layer)", "tests/seam/test_federation.py"),
    m("the codec loses a number", "seam/codec.py", 'for k, x in d.items() if k != "is"})', 'for k, x in d.items() if k not in ("is", "mu", "epochs")})', "tests/seam/test_codec.py"),
    m("the same tensor gets two names", "seam/codec.py", "name = self._names.get(id(t))", "name = None", "tests/seam/test_codec.py"),
    m("closures travel", "seam/codec.py", "    raise TypeError(\n", "    return None\n    raise TypeError(\n", "tests/seam/test_codec.py tests/tracer/test_refusals.py"),
    m("two rules of one class are accepted", "seam/recipe.py", "if names.count(n) > 1]", "if names.count(n) > 2]", "tests/seam/test_recipe.py"),
    m("a kind keeps its numbers", "seam/recipe.py", "float(p in OFF_AT_ZERO and v != 0)", "float(v)", "tests/seam/test_recipe.py"),
    m("a gene's batch shape is its value", "seam/recipe.py", "rows=max(16, 1 << (int(number) - 1).bit_length())", "rows=int(number)", "tests/seam/test_recipe.py"),
    m("the mean forgets the weights of its parts", "seam/folds.py", '{"n": a["n"] + b["n"], "sum"', '{"n": a["n"], "sum"', "tests/seam/test_folds.py"),
    m("the mean by count counts examples", "seam/folds.py", 'ends.examples if self.by == "examples" else [1] * len(ends.weights)', "ends.examples", "tests/seam/test_folds.py"),
    m("chains of different scope are averaged", "seam/folds.py", "if any(s != self.scopes[0] for s in self.scopes):", "if False:", "tests/seam/test_folds.py"),
    m("a slice reads its neighbour", "seam/folds.py", "return self.stacked[name][self.row] if", "return self.stacked[name][self.row - 1] if", "tests/seam/test_folds.py"),
    m("stacking takes rows in order of the batch", "seam/folds.py", "return whole[rows]", "return whole[: len(rows)]", "tests/seam/test_folds.py"),
    m("joined receipts keep their rows", "seam/landing.py", "{int(at) + i: why", "{i: why", "tests/seam/test_landing.py"),
    m("the ledger forgets failures", "seam/ledger.py", 'self.add("failed", len(receipts.reasons))', "pass", "tests/seam/test_ledger.py"),
    # --- methods
    m("SCAFFOLD divides by the epochs", "methods/scaffold.py", "see.steps * see.rate", "1 * see.rate", "tests/methods/test_scaffold.py"),
    m("SCAFFOLD's drift has the other sign", "methods/scaffold.py", 'minus(see.extra["c"], see.memory)}', 'minus(see.memory, see.extra["c"])}', "tests/methods/test_scaffold.py"),
    m("SCAFFOLD divides by the cohort", "methods/scaffold.py", '1 / m["N"]', "1 / max(1, len(got.receipts))", "tests/methods/test_scaffold.py"),
    m("SCAFFOLD accepts momentum", "methods/scaffold.py", "not isinstance(o, SGD) or o.momentum or", "not isinstance(o, SGD) or", "tests/methods/test_scaffold.py"),
    m("SCAFFOLD forgets c_i", "methods/scaffold.py", "return End(params, memory=plus(see.memory, change), up={\"change\": change})\n\n    def check(self, recipe: Recipe) -> None:\n        o", "return End(params, memory=change, up={\"change\": change})\n\n    def check(self, recipe: Recipe) -> None:\n        o", "tests/methods/test_scaffold.py"),
    m("FedDyn's printed sign", "methods/feddyn.py", "- h_k[n] * w).sum()", "+ h_k[n] * w).sum()", "tests/methods/test_feddyn.py"),
    m("FedDyn's m is the clients", "methods/feddyn.py", '"m": who.units', '"m": who.clients', "tests/methods/test_feddyn.py tests/tracer/test_by_hand.py"),
    m("FedDyn's server half has no alpha", "methods/feddyn.py", "t - h[n] / self.alpha", "t - h[n]", "tests/methods/test_feddyn.py"),
    m("FedProx forgets the half", "methods/fedprox.py", "self.mu / 2 *", "self.mu *", "tests/methods/test_fedprox.py"),
    m("Yogi is Adam", "methods/server.py", "v - (1 - self.beta2) * square * (v - square).sign()", "self.beta2 * v + (1 - self.beta2) * square", "tests/methods/test_server.py"),
    m("server moments start at zero", "methods/server.py", "t + self.tau**2", "t", "tests/methods/test_server.py"),
    m("IDA weighs by distance", "methods/ida.py", "[1 / max(d, least) for d in distance]", "[max(d, least) for d in distance]", "tests/methods/test_ida.py"),
    # --- engines
    m("a masked step is a step (SGD)", "engine/optimizers.py", "t.sub_(torch.where(beside(active, t), beside(rate, t) * d, torch.zeros_like(t)))", "t.sub_(beside(rate, t) * d)", ENGINES),
    m("momentum of an idle lane moves", "engine/optimizers.py", "v.copy_(torch.where(on, beside(o.momentum, t) * v + d, v))", "v.copy_(beside(o.momentum, t) * v + d)", "tests/engine"),
    m("Adam's count is shared by lanes", "engine/optimizers.py", "count.add_(active.to(count.dtype))", "count.add_(1)", "tests/engine"),
    m("Adam's moments of an idle lane move", "engine/optimizers.py", "m.copy_(torch.where(on, beside(o.beta1, p) * m + (1 - beside(o.beta1, p)) * d, m))", "m.copy_(beside(o.beta1, p) * m + (1 - beside(o.beta1, p)) * d)", "tests/engine"),
    m("weight decay of AdamW is coupled", "engine/optimizers.py", "change = change + beside(rate, p) * beside(o.decay, p) * p", "change = change + 0 * p", "tests/engine"),
    m("a partial batch divides by the shape", "engine/steps.py", "per_row = 1 / mask.sum(1).clamp(min=1).to(rate.dtype)", "per_row = torch.full_like(rate, 1 / mask.shape[1])", ENGINES),
    m("a partial batch divides by the shape (generic step)", "engine/steps.py", "loss = data / mask.sum().clamp(min=1)", "loss = data / mask.shape[0]", ENGINES),
    m("lanes share lane 0's rate", "engine/steps.py", 'rate = numbers["learning_rate"]', 'rate = numbers["learning_rate"][:1].expand_as(numbers["learning_rate"])', "tests/tracer tests/engine"),
    m("penalties are left out of the written-out step", "engine/steps.py", "grads[n] = grads[n] + g", "grads[n] = grads[n]", ENGINES),
    m("the schedule is forgotten", "engine/steps.py", "if not isinstance(self.kind.schedule, Constant):", "if False:", ENGINES),
    m("tanh's derivative is one", "engine/linear.py", "return d.addcmul_(d, a * a, value=-1)", "return d", "tests/engine"),
    m("the written-out bias has no gradient", "engine/linear.py", "w[layer.bias].sub_(dt.sum(2))", "pass", "tests/engine"),
    m("bits depend on the slot", "engine/lanes.py", "w, context = {n: t[slots] for n, t in self.w.items()}", "w, context = {n: t[slots] * (1 + 1e-6 * slots[0]) for n, t in self.w.items()}", SYSTEMS + " tests/engine"),
    m("optimizer state is kept across visits", "engine/lanes.py", "put(lane, torch.stack([s.get(part, fresh) for s in states]))", "pass", ENGINES),
    m("an idle lane looks at row 0", "engine/lanes.py", "self.column < count[:, None]", "self.column < count[:, None].clamp(min=1)", ENGINES),
    m("a long visit repeats its first epochs", "engine/lanes.py", "laid = batches(self.keys[which], size, batch, total, first, epochs, self.shape)", "laid = batches(self.keys[which], size, batch, total, 0, epochs, self.shape)", "tests/engine"),
    m("a partial batch is dropped", "engine/batches.py", "per_epoch = (sizes + batch - 1) // batch  # a last partial batch is not dropped\n", "per_epoch = (sizes // batch).clamp(min=1)\n", "tests/engine"),
    m("every epoch has the same order", "engine/batches.py", "child(child(keys, SHUFFLE)[:, None], epochs)", "child(child(keys, SHUFFLE)[:, None], 0 * epochs)", "tests/engine"),
    m("local steps are ignored", "engine/batches.py", "torch.where(steps > 0, steps, epochs", "torch.where(steps > 1e9, steps, epochs", ENGINES),
    m("groups mix untrained leaves", "engine/engine.py", "id(recipe.kind), () if whole else self.frozen(b, w))", "id(recipe.kind))", "tests/tracer/test_engines.py"),
    m("no window: whatever ends waits", "engine/engine.py", "self.window = AHEAD * 32", "self.window = 10**9", "tests/tracer/test_bounds.py tests/engine"),
    m("a NaN is handed on", "engine/boundary.py", "        if good[i]:\n", "        if True:\n", FAILURES),
    m("the ring forgets its own memory", "engine/visits.py", "return self.trip.kept.get(self.client) or self.trip.tally.memory(self.client)", "return self.trip.tally.memory(self.client)", "tests/engine/test_recipes.py"),
    m("a failed visit counts", "engine/visits.py", "        if o.reason is not None:\n            return\n", "        if o.reason is not None:\n            self.examples += n\n            self.handed += 1\n            return\n", FAILURES + " " + BY_HAND),
    m("what travels along is lost", "engine/visits.py", "self.along = {**self.along, **o.along}", "pass", "tests/tracer/test_engines.py"),
    m("alternatives: the first instead of the best", "engine/visits.py", "(done[i].reason is not None, done[i].loss)", "0", BY_HAND),
    m("lost visits train anyway", "engine/visits.py", "visits[self.position].lost is not None:", "visits[self.position].lost == 'x':", FAILURES),
    m("blocks are merged in the order of ending", "engine/visits.py", "while self._merged in self._ready:\n            part = self._ready.pop(self._merged)", "while self._ready:\n            part = self._ready.popitem()[1]", SYSTEMS + " tests/tracer"),
    m("a key forgets its position", "engine/visits.py", "lengths), position).tolist()", "lengths), 0 * position).tolist()", "tests/tracer"),
    m("chains share their keys", "engine/visits.py", "child(np.array([key]), np.arange(len(chains)))", "child(np.array([key]), 0 * np.arange(len(chains)))", "tests/tracer"),
    m("the device's half has no penalty", "engine/cut.py", "also = [penalty] if", "also = [] if True else [penalty] if", "tests/tracer/test_engines.py"),
    m("what crosses the cut is not counted", "engine/cut.py", "self.crossed += sum(", "self.crossed = 0 * sum(", "tests/tracer/test_engines.py"),
    m("a spilled row is read from elsewhere", "engine/memory.py", "self._where[number] = at", "self._where[number] = 0", "tests/engine tests/tracer/test_bounds.py"),
    m("a version may be skipped", "engine/memory.py", "if version != (known[0] if known else 0) + 1:", "if False:", "tests/engine tests/tracer"),
    # --- federations, records
    m("a busy client may be launched", "simulation/simulation.py", "if a.place.path == place.path and (both := keeps & a.began.keys()):", "if False and (both := keeps & a.began.keys()):", "tests/tracer/test_refusals.py"),
    m("memory knows no path", "simulation/simulation.py", "self.memories.commit(a.place.path, c,", "self.memories.commit((), c,", "tests/tracer"),
    m("restore forgets the counters", "simulation/simulation.py", 'dict(state["counters"]), dict(state["air"])', '{}, dict(state["air"])', SYSTEMS),
    m("restore forgets the memories", "simulation/simulation.py", 'self.memories.restore(state["memory"])', "self.memories.restore(())", SYSTEMS),
    m("restore forgets the clock", "simulation/simulation.py", 'self.now, self._flown = state["now"]', 'self.now, self._flown = 0.0', SYSTEMS),
    m("flights land in the order of launch", "simulation/simulation.py", "if self._air[f.id].lands <= self.now}", "}", "tests/tracer tests/simulation"),
    m("a chain takes as long as its longest visit", "simulation/simulation.py", "longest = max(sum(", "longest = max(max(", "tests/tracer tests/simulation"),
    m("a phase ends without forgetting", "algorithms/then.py", 'fed.under("first").forget()', "pass", "tests/algorithms tests/tracer/test_compositions.py"),
    m("phases share their randomness", "algorithms/then.py", 'self.after.round(fed.under("after"), inner)', 'self.after.round(fed.under("first"), inner)', "tests/algorithms tests/tracer/test_compositions.py"),
    m("a checkpoint is written in place", "records/checkpoint.py", "            new.replace(path)\n", "            path.write_bytes(data[: len(data) // 2])\n", "tests/records"),
    m("a resumed run starts again", "records/driver.py", "range(len(record.rounds) + 1, rounds + 1)", "range(1, rounds + 1)", "tests/records"),
]
# fmt: on


def applies(mutant: Mutant) -> bool:
    """Whether the text that a mutant replaces is still there."""
    return mutant.old in (ROOT / "src" / "fedrelay" / mutant.file).read_text()


def run(mutant: Mutant) -> dict[str, str]:
    """Break a copy and see which test notices first."""
    if not applies(mutant):
        return {"mutant": mutant.what, "caught by": "", "note": "does not apply any more"}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("src", "tests", "docs", "benchmarks"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "src" / "fedrelay" / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *mutant.tests.split()]
        path_list = os.pathsep.join([str(copy / "src"), str(copy / "tests")])
        env = {**os.environ, "PYTHONPATH": path_list, "OMP_NUM_THREADS": "1", "FEDRELAY_CACHE": str(copy / "cache")}
        try:
            got = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=900)
        except subprocess.TimeoutExpired:
            return {"mutant": mutant.what, "caught by": "a test that does not end", "note": ""}
        noticed = re.findall(r"^(?:FAILED|ERROR) (\S+)", got.stdout, re.M)
        if noticed and "test_" in noticed[0]:
            return {"mutant": mutant.what, "caught by": noticed[0], "note": ""}
        note = "survived" if got.returncode == 0 else (got.stdout + got.stderr).strip().splitlines()[-1][:150]
        return {"mutant": mutant.what, "caught by": "", "note": note}


def main() -> int:
    parser = argparse.ArgumentParser(description="Break one thing at a time; a named test must notice.")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    chosen = [x for x in MUTANTS if not options.words or any(w in x.what for w in options.words)]
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(run, chosen):
            results.append(result)
            print(f"{result['mutant']}: {result['caught by'] or 'NOT CAUGHT, ' + result['note']}", flush=True)
    caught = sum(bool(r["caught by"]) for r in results)
    print(f"{caught} of {len(results)} mutants caught")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"mutants": len(results), "caught": caught, "results": results}, indent=1) + "\n")
    return 0 if caught == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
