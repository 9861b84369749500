"""Every Python block of the README and of docs/ runs, in the order in which a reader meets it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedrelay.seam import codec, values
from fedrelay.seam.values import KNOWN

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_every_block_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDRELAY_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ours = {name: cls for name, cls in KNOWN.items() if cls.__module__.startswith("fedrelay.")}
    monkeypatch.setattr(values, "KNOWN", ours)  # other tests have values of the same names
    monkeypatch.setattr(codec, "KNOWN", ours)
    module = ModuleType("page")  # in sys.modules, because dataclasses look their module up there
    monkeypatch.setitem(sys.modules, "page", module)
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), module.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
