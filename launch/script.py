"""``python -m hostir.launch.script FILE ARGS…``: run a script as the main module of one rank that does not outlive its launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import ModuleType
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


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
    path = os.path.abspath(sys.argv[0])
    sys.path[0] = os.path.dirname(path)
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    try:
        exec(code, module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  shown as the interpreter would, without this file's own frame
        sys.excepthook(type(error), error, error.__traceback__.tb_next if error.__traceback__ else None)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


if __name__ == "__main__":
    main()
