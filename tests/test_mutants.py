"""The mutants still break what they say: the text that each replaces is there, once at least, and what replaces it differs."""

from __future__ import annotations

import pytest

from mutants import MUTANTS, ROOT, Mutant, applies


def test_there_are_at_least_sixty() -> None:
    assert len({m.what for m in MUTANTS}) == len(MUTANTS) >= 60


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.what)
def test_a_mutant_applies(mutant: Mutant) -> None:
    assert applies(mutant)
    assert mutant.old != mutant.new
    assert all((ROOT / t.partition("::")[0]).exists() for t in mutant.tests.split())
