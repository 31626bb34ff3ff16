"""How a rank that a launcher started ends: it tells the others why, says its rank, leaves its worlds, and under MPI ends the job.

One object for the process does this, as its excepthook and at its exit; worlds register while they are open.
"""

from __future__ import annotations

import atexit
import functools
import io
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from hostir.errors import PeerError
from hostir.runtime.world import World

_LAST_WORDS: Final = 0.5  # seconds for the other ranks to say what they were doing before an MPI job ends


class Ending:
    """What happens when the script ends."""

    def __init__(self) -> None:
        self.worlds: list[World] = []
        self.error: BaseException | None = None
        self.prefix = ""
        self._linger: Callable[[], None] | None = None
        self._before = sys.excepthook

    def add(self, world: World, linger: Callable[[], None]) -> None:
        """``world`` is left at the end at the latest. ``linger`` is called at the end after an exception."""
        self.worlds.append(world)
        self._linger = linger

        def gone() -> None:
            if world in self.worlds:
                self.worlds.remove(world)

        world.on_close.append(gone)

    def on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show the exception, each line after this rank, and tell the other ranks, who would wait for this one."""
        self.error = error
        stderr = sys.stderr
        sys.stderr = text = io.StringIO()
        try:
            self._before(kind, error, trace)
        finally:
            sys.stderr = stderr
        lines = text.getvalue().splitlines()
        stderr.write("".join(f"{'' if not line or line.startswith(self.prefix) else self.prefix}{line}\n" for line in lines))
        stderr.flush()
        for world in self.worlds:
            world.comms.fail(error)

    def at_exit(self) -> None:
        """Leave what is open. After an exception MPI would wait for ranks that wait for this one."""
        for world in list(self.worlds):
            world.close()
        if self.error is not None and self._linger is not None:
            self._linger()
        if self.error is not None and "mpi4py.MPI" in sys.modules:
            from hostir.launch.mpi import end_job

            sys.stdout.flush()
            time.sleep(2 * _LAST_WORDS if isinstance(self.error, PeerError) else _LAST_WORDS)
            end_job(130 if isinstance(self.error, KeyboardInterrupt) else 1)


@functools.cache
def ending() -> Ending:
    """The one of this process."""
    made = Ending()
    sys.excepthook = made.on_exception
    atexit.register(made.at_exit)
    return made
