"""What `fedrelay.data` shows, and what importing it loads."""

from __future__ import annotations

import subprocess
import sys

import fedrelay.data


def test_public_names_are_listed_sorted_and_there() -> None:
    assert fedrelay.data.__all__ == sorted(fedrelay.data.__all__)
    assert all(hasattr(fedrelay.data, name) for name in fedrelay.data.__all__)


def test_importing_loads_neither_torch_nor_sklearn() -> None:
    program = "import fedrelay.data, sys; print([m for m in ('torch', 'sklearn', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
