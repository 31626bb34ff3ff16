"""Symmetric memory of processes on CPUs: every rank maps every rank's shared memory file, and waits by looking at the flag.

There is no stream to hold, so a wait holds the caller, and looks at the world in between: it ends with the reason when another rank
fails, or after the timeout. Meant for machines with x86's order of stores, where data written before a flag is seen before it.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from hostir.runtime.comms.fabric import Exchange

_SPINS: Final = 2000  # looks at a flag before the first pause
_LOOK: Final = 0.05  # seconds between two looks at the world


class HostTurn:
    """Everything happens in the order of the calls."""

    def take(self) -> None: ...


class HostFabric:
    """Arenas as files in memory. ``look(where, seconds)`` raises when the world has failed or too much time has passed."""

    def __init__(self, rank: int, size: int, exchange: Exchange, look: Callable[[Callable[[], str], float], None]) -> None:
        self.device = torch.device("cpu")
        self._ranks: Sequence[int] = range(size)
        self._rank = rank
        self._exchange = exchange
        self._look = look

    def open(self, num_bytes: int) -> list[torch.Tensor]:
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.NamedTemporaryFile(prefix="hostir-", dir=folder) as file:  # its name is gone once all have mapped it
            file.truncate(num_bytes)
            names = self._exchange("arena", file.name, self._ranks)
            arenas = [torch.from_file(name, shared=True, size=num_bytes, dtype=torch.uint8, device="cpu") for name in names]
            self._exchange("arena is mapped", "", self._ranks)
        return arenas

    def write(self, address: int, value: int) -> None:
        ctypes.c_int32.from_address(address).value = value

    def wait(self, address: int, value: int, where: Callable[[], str]) -> None:
        flag = ctypes.c_int32.from_address(address)
        for _ in range(_SPINS):
            if flag.value >= value:
                return
        start = last = time.monotonic()
        while flag.value < value:
            time.sleep(0.00005)
            now = time.monotonic()
            if now - last > _LOOK:
                last = now
                self._look(where, now - start)

    def copier(self, out: torch.Tensor, x: torch.Tensor) -> Callable[[], object]:
        return lambda: out.copy_(x)

    def turn(self) -> HostTurn:
        return HostTurn()

    def quiesce(self) -> None:
        """Nothing is ever queued."""
