"""The layout holds: who may import whom, what loads torch, and how long a file may grow.

Imports are read from the source with ``ast``, wherever they stand: at the top, inside a function, under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
ANYTHING = "*"

# A room (or one module of it, which then has a rule of its own) and what of ours it may import. Its own room it always may.
MAY_IMPORT = {
    "seam": "",
    "parts": "seam.values",
    "methods": "seam",
    "algorithms": "seam methods parts",
    "data": "seam",
    "models": "seam",
    "engine": "seam methods data models",
    "simulation": "seam data models engine",
    "flower": "seam data models engine",
    "records": "seam algorithms",
    "report": "records",
    "testing": ANYTHING,
    "cli": ANYTHING,
    "demo": ANYTHING,
    "__main__": ANYTHING,
    "": ANYTHING,  # fedrelay/__init__.py, the public names
}

# The one way up: `fit` reaches for the driver of a run when it is called, never on import.
MAY_IMPORT_LATE = {
    "seam.algorithm": "records.driver",
    "algorithms": "records.driver",
}

LOADS_NO_TORCH = ("", "seam", "parts", "algorithms", "methods", "data.partitioners")
MAY_PRINT = ("cli", "demo")
MOST_LINES = 400


def module_name(path: Path) -> str:
    """The dotted name below ``fedrelay``; the package itself is the empty name."""
    parts = path.relative_to(SRC / "fedrelay").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {path: module_name(path) for path in sorted((SRC / "fedrelay").rglob("*.py"))}


def within(name: str, rooms: str) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms.split())


def absolute(node: ast.ImportFrom, package: str) -> str:
    """The full dotted name that ``from ... import`` imports from."""
    if not node.level:
        return node.module or ""
    above = ["fedrelay", *package.split(".")] if package else ["fedrelay"]
    return ".".join([*above[: len(above) - node.level + 1], *([node.module] if node.module else [])])


def imported(node: ast.AST, package: str) -> list[str]:
    """The full dotted names one node imports; ``from a import b`` counts as ``a.b``."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(names=names):
            return [f"{absolute(node, package)}.{alias.name}" for alias in names]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return [name]
    return []


def imports(node: ast.AST, package: str, late: bool = False) -> Iterator[tuple[int, str, bool]]:
    """(line, name below ``fedrelay``, late) of every import of ours; late: it does not happen when the module is imported."""
    for child in ast.iter_child_nodes(node):
        for name in imported(child, package):
            if within(name, "fedrelay"):
                yield getattr(child, "lineno", 0), name.removeprefix("fedrelay").removeprefix("."), late
        typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(child, package, late or function or typing_only)


def rule(table: dict[str, str], module: str) -> str | None:
    """What the longest entry of ``table`` that holds ``module`` says."""
    entries = [entry for entry in table if module == entry or within(module, entry)]
    return table[max(entries, key=len)] if entries else None


def trespasses(source: str, module: str, package: str) -> Iterator[str]:
    """One sentence for each import that the tables do not allow."""
    allowed = rule(MAY_IMPORT, module)
    if allowed is None:
        yield f"{module}: no rule for this room; add it to MAY_IMPORT"
        return
    now = f"{module.split('.')[0]} {allowed}"
    later = f"{now} {rule(MAY_IMPORT_LATE, module) or ''}"
    for line, name, late in imports(ast.parse(source), package):
        if allowed != ANYTHING and not within(name, later if late else now):
            yield f"{module}, line {line}: imports {name or 'fedrelay itself'}; may import: {allowed or 'nothing of ours'}"


def package_of(path: Path, module: str) -> str:
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def test_rooms_import_only_what_they_may() -> None:
    found = [line for path, module in FILES.items() for line in trespasses(path.read_text(), module, package_of(path, module))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "trespass"),
    [
        ("seam.plan", "from fedrelay.seam.values import value", False),
        ("seam.plan", "from .values import value", False),
        ("seam.plan", "from ..engine import lanes", True),
        ("seam.plan", "from .. import engine", True),
        ("seam.plan", "import fedrelay", True),
        ("seam.plan", "def f():\n    import fedrelay.engine.lanes as x", True),
        ("seam.plan", "if TYPE_CHECKING:\n    from fedrelay.engine import lanes", True),
        ("seam.plan", "import importlib\nimportlib.import_module('fedrelay.engine')", True),
        ("seam.plan", "import numpy, fedrelayed.engine", False),
        ("parts.grouping", "from fedrelay.seam.values import value", False),
        ("parts.grouping", "from fedrelay.seam import values", False),
        ("parts.grouping", "from fedrelay.seam import Plan", True),
        ("parts.grouping", "from fedrelay.seam.values_more import x", True),
        ("methods.scaffold", "from fedrelay.seam.plan import Plan", False),
        ("methods.scaffold", "from fedrelay import FedAvg", True),
        ("methods.scaffold", "from fedrelay.engine import batches", True),
        ("algorithms.fedseq", "from fedrelay.parts.grouping import Greedy", False),
        ("algorithms.fedseq", "def fit():\n    from fedrelay.records.driver import drive", False),
        ("algorithms.fedseq", "from fedrelay.records.driver import drive", True),
        ("algorithms.fedseq", "def fit():\n    from fedrelay.records.folder import Folder", True),
        ("seam.algorithm", "def fit():\n    from fedrelay.records.driver import drive", False),
        ("seam.algorithm", "if TYPE_CHECKING:\n    from fedrelay.records.driver import Run", False),
        ("seam.algorithm", "from fedrelay.records.driver import drive", True),
        ("seam.plan", "def fit():\n    from fedrelay.records.driver import drive", True),
        ("data.augment", "from fedrelay.seam.places import draw", False),
        ("data.augment", "from fedrelay.engine.lanes import run", True),
        ("data.mnist", "from fedrelay.engine.batches import draw", True),
        ("cli.main", "from fedrelay.simulation import Simulation", False),
        ("cellar.wine", "import numpy", True),
    ],
)
def test_a_trespass_is_seen(module: str, source: str, trespass: bool) -> None:
    assert bool([*trespasses(source, module, module.rpartition(".")[0])]) is trespass


def test_light_rooms_load_no_torch() -> None:
    names = [f"fedrelay.{m}".rstrip(".") for m in FILES.values() if m == "" or within(m, " ".join(LOADS_NO_TORCH))]
    probe = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {name} loads torch")
"""
    path = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-c", probe, *names], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_file_says_what_it_is_for() -> None:
    found = [module or "fedrelay" for path, module in FILES.items() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not found, f"no module docstring: {', '.join(found)}"


def test_no_file_outgrows_its_room() -> None:
    lengths = {module: len(path.read_text().splitlines()) for path, module in FILES.items()}
    found = [f"{module}: {lines}" for module, lines in lengths.items() if lines > MOST_LINES]
    assert not found, f"over {MOST_LINES} lines: {', '.join(found)}"


def test_only_the_command_line_prints() -> None:
    found = [
        f"{module}, line {node.lineno}"
        for path, module in FILES.items()
        if not within(module, " ".join(MAY_PRINT))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not found, f"print( in {'; '.join(found)}"
