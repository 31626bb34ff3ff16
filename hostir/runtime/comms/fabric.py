"""Memory that all ranks of a machine can address, and 32-bit flags in it that order what the ranks do there.

Every rank has an arena; all ranks see all arenas. An arena is opened by the whole world at once, so parts for smaller teams are cut
from one that exists: each member takes a free piece of its own arena, and the members tell one another where. Flags only ever grow
(a wait asks for "at least"), so nothing is ever set back. How memory is mapped and how a flag is written or awaited differs: see
``symm_shim`` (CUDA) and ``symm_host`` (CPUs, over shared memory files).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from hostir.errors import DeviceMemoryError, RankMismatchError

ALIGNMENT: Final = 4096

Exchange = Callable[[str, str, Sequence[int]], list[str]]


class Turn(Protocol):
    """The place of a sequence of operations in the order of streams."""

    def take(self) -> None:
        """What the current stream does from now on comes after what was done at the last ``take``, on whatever stream that was."""


class Fabric(Protocol):
    """How one rank reaches the memory of all. ``write``, ``wait`` and copies happen in the order of the current stream."""

    device: torch.device

    def open(self, num_bytes: int) -> list[torch.Tensor]:
        """A new arena on every rank, zeroed, as bytes: this rank's view of all of them. A collective of the whole world; it blocks."""

    def write(self, address: int, value: int) -> None:
        """Write a flag, here or on a peer, after all that the stream has done so far."""

    def wait(self, address: int, value: int, where: Callable[[], str]) -> None:
        """Hold the stream until the own flag is at least ``value``. ``where`` says which statement waits."""

    def copier(self, out: torch.Tensor, x: torch.Tensor) -> Callable[[], object]:
        """A function that copies ``x`` to ``out`` (same shape and dtype, any strides, no overlap), as often as it is called."""

    def turn(self) -> Turn: ...

    def quiesce(self) -> None:
        """Block until all that this rank has queued is done."""


@dataclass(frozen=True, eq=False)
class Window:
    """``num_bytes`` of every member's arena, in team order, as this rank sees them."""

    ranks: tuple[int, ...]
    here: int
    parts: tuple[torch.Tensor, ...]
    serial: int

    @property
    def own(self) -> torch.Tensor:
        return self.parts[self.here]

    def at(self, position: int, offset: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in member ``position``'s part, ``offset`` bytes from its start."""
        length = math.prod(sizes) * dtype.itemsize
        return self.parts[position].narrow(0, offset, length).view(dtype).view(tuple(sizes))

    def address(self, position: int, offset: int = 0) -> int:
        return self.parts[position].data_ptr() + offset


class Heap:
    """Cuts windows out of arenas. Windows live as long as the world: a slow peer may still be reading one that its owner has left."""

    def __init__(self, fabric: Fabric, rank: int, size: int, arena_bytes: int, exchange: Exchange) -> None:
        self.fabric = fabric
        self.rank = rank
        self.size = size
        self._exchange = exchange
        self._arenas = [fabric.open(arena_bytes)]
        self._used = [0]
        self._left: dict[tuple[tuple[int, ...], int], dict[int, Window]] = {}
        self._count: dict[tuple[int, ...], int] = {}

    @property
    def used_bytes(self) -> int:
        return sum(self._used)

    def counts(self) -> dict[tuple[int, ...], int]:
        """How many windows each team has taken."""
        return dict(self._count)

    def take(self, ranks: Sequence[int], num_bytes: int, what: str) -> Window:
        """A zeroed window of ``num_bytes`` for ``ranks``, which all call this. Blocks until they have; ``what`` is for messages."""
        ranks, size = tuple(ranks), -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._count[ranks] = self._count.get(ranks, 0) + 1
        spare = self._left.get((ranks, size), {})
        offer = f"{size} {','.join(map(str, spare))} {self._place(size)}"
        answers = [a.split(" ") for a in self._exchange("symmetric memory", offer, ranks)]
        if any(a[0] != answers[0][0] for a in answers):
            raise RankMismatchError(
                f"the ranks need different amounts of symmetric memory for {what}", rank=self.rank,
                expected=f"rank {self.rank}: {size} bytes", got=[f"rank {r}: {a[0]} bytes" for r, a in zip(ranks, answers, strict=True)],
                cure="sizes of symmetric buffers must not depend on the rank",
            )  # fmt: skip
        common = set.intersection(*(set(a[1].split(",")) - {""} for a in answers))
        if not common:
            return self._fresh(ranks, size, [a[2] for a in answers], what)
        window = spare.pop(min(map(int, common)))
        self.fabric.quiesce()
        self._exchange("symmetric memory is idle", "", ranks)
        window.own.zero_()
        self.fabric.quiesce()
        self._exchange("symmetric memory is ready", "", ranks)
        return window

    def leave(self, window: Window) -> None:
        """The owner is done with ``window``; a later ``take`` of this size may have it again, once all its ranks have left it."""
        self._left.setdefault((window.ranks, window.own.numel()), {})[window.serial] = window

    def _place(self, size: int) -> str:
        at = next((i for i, used in enumerate(self._used) if used + size <= self._arenas[i][self.rank].numel()), None)
        return "none" if at is None else f"{at}:{self._used[at]}"

    def _fresh(self, ranks: tuple[int, ...], size: int, places: Sequence[str], what: str) -> Window:
        here = ranks.index(self.rank)
        if "none" in places:
            if len(ranks) < self.size:
                raise DeviceMemoryError(
                    f"no symmetric memory is left for {what} of ranks {list(ranks)}", rank=self.rank, expected=f"{size} bytes",
                    got=f"{self._arenas[0][self.rank].numel() - self._used[0]} bytes free on this rank",
                    cure="set HOSTIR_SYMM_BYTES to a larger number of bytes before the world is made",
                )  # fmt: skip
            self._arenas.append(self.fabric.open(max(size, self._arenas[0][self.rank].numel() // 4)))
            self._used.append(0)
            places = [f"{len(self._arenas) - 1}:0"] * len(ranks)
        found = [tuple(map(int, p.split(":"))) for p in places]
        self._used[found[here][0]] += size
        parts = tuple(self._arenas[a][r].narrow(0, at, size) for r, (a, at) in zip(ranks, found, strict=True))
        return Window(ranks, here, parts, self._count[ranks])
