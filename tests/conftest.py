"""What the tests share: which files hold tests, and a cache of their own."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Only test_*.py holds tests: the doctest collector would import the others a second time under other names."""
    if collection_path.suffix == ".py" and not collection_path.name.startswith(("test_", "conftest")):
        return Path(__file__).parent in collection_path.parents or None
    return None


@pytest.fixture(autouse=True, scope="session")
def _cache_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Picks of the engine that the tests measure are not those of the user."""
    patch = pytest.MonkeyPatch()
    patch.setenv("FEDRELAY_CACHE", str(tmp_path_factory.mktemp("cache")))
