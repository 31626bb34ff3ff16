"""``python -m hostir.launch.script FILE ARGS…``: run a script as the main module of one rank that does not outlive its launcher."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_launcher(launcher: int) -> None:
    """Ask the kernel to end this process when the process ``launcher``, its parent, does (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it has ended already
            os._exit(1)


def main() -> None:
    """The command."""
    if (launcher := os.environ.pop("HOSTIR_LAUNCHER", "")).isdigit():
        end_with_launcher(int(launcher))
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
