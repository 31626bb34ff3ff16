"""Triton reads TRITON_INTERPRET when it is imported, so interpreted and compiled kernels cannot share a process.

Files named ``test_interpret_*`` run only with the variable set, all others only without it; ``test_process`` starts the former.
"""

from __future__ import annotations

import os

import pytest

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take out what belongs to the other process."""
    here = os.path.dirname(__file__)
    items[:] = [i for i in items if not str(i.path).startswith(here) or i.path.name.startswith("test_interpret_") == INTERPRET]
