"""The server that forks rank processes: it has torch loaded, so a rank starts in milliseconds. Loads nothing heavy into this process."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from types import ModuleType
from typing import Any, Final

# Tracing a unit loads torch._dynamo, which takes longer than torch itself.
_PRELOAD: Final = ("torch", "torch.distributed", "torch._dynamo", "hostir.trace", "hostir.dispatch", "hostir.launch.child")
_STARTING: Final = threading.Lock()


def start_server(preload: Sequence[str] = ()) -> None:
    """Start it now, so that it loads while this process does other things. ``preload``: further modules that all ranks need; only the
    first call in this process can choose them."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOAD, *preload])
    forkserver.ensure_running()


def start_process(target: Callable[..., Any], args: Sequence[Any], name: str) -> tuple[ForkServerProcess, Connection]:
    """A process that calls ``target(*args, pipe)``, and this end of the pipe.

    It is not told which file is the main module: it must not run the caller's script again.
    """
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    process = context.Process(target=target, args=(*args, theirs), name=name, daemon=True)
    with _STARTING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
    theirs.close()
    return process, mine
