"""Starts the tests that need Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(900)
def test_interpreted_kernels_pass_in_their_own_process() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", str(HERE)]
    run = subprocess.run(
        command,
        check=False,
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-5000:]
