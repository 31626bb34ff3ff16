"""One thread at a time runs a program over a team: of two runs at once it would be chance which one the other ranks meet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from hostir.errors import InputError
from hostir.runtime.comms.protocol import Comms

_MAKING: Final = threading.Lock()


class Alone:
    """A context that one thread of this rank can be in; another one gets an InputError, and so do the other ranks, which would wait for
    it. A thread may enter it again."""

    __slots__ = ("_comms", "_lock", "_team")

    def __init__(self, comms: Comms, team: Sequence[int]) -> None:
        self._team = tuple(team)
        self._comms = comms
        with _MAKING:
            self._lock = comms.run_locks.setdefault(self._team, threading.RLock())

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            error = InputError(
                f"two threads run programs over team {list(self._team)} at the same time: which of them the other ranks would meet is chance",
                rank=self._comms.rank,
                cure="run them one after another, or on meshes without common ranks",
            )
            self._comms.fail(error)
            raise error

    def __exit__(self, *_: object) -> None:
        self._lock.release()
