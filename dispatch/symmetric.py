"""A program's symmetric buffers: made once for its sizes, on all ranks of its mesh at once, so that each can address them on all.

At every run the ranks meet before the first statement, because a fast one would otherwise write into a buffer that a slow one still
reads in the run before. From there on the program's own signals, waits and barriers keep order, which the verifier has checked.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, runtime_checkable

import torch

from hostir.errors import HostIrError, InputError, RankMismatchError
from hostir.ir.nodes import Alloc, Buffer, Comm, Peer, Program, View, every
from hostir.ir.walk import Instance, Region, Scope, Walker
from hostir.runtime.comms.fabric import Window
from hostir.runtime.comms.protocol import CommCall, Comms
from hostir.torch_types import to_torch

ALIGNMENT: Final = 512


@runtime_checkable
class Reaching(Protocol):
    """What a transport has whose ranks reach each other's memory."""

    def symmetric(self, ranks: tuple[int, ...], size: int, what: str) -> Window: ...

    def leave(self, window: Window) -> None: ...

    def signal(self, address: int, value: int) -> None: ...

    def await_flag(self, address: int, value: int, where: Callable[[], str]) -> None: ...


def is_one_sided(p: Program) -> bool:
    """Whether ``p`` touches peers' memory or waits for flags in its own."""
    return any((isinstance(s, Comm) and s.kind in ("signal", "wait")) or (isinstance(s, View) and isinstance(s.op, Peer)) for s in every(p.body))


def has_symmetric(p: Program) -> bool:
    return is_one_sided(p) or any(isinstance(s, Alloc) and s.out.type.memory == "symmetric" for s in every(p.body))


class SymmetricBuffers:
    """The symmetric buffers of one program for one set of sizes. All ranks of the mesh make them together."""

    def __init__(self, p: Program, scope: Scope, dims: Mapping[str, int], comms: Comms | None, device: torch.device) -> None:
        for x in p.params:
            if isinstance(x, Buffer) and x.type.memory == "symmetric" and is_one_sided(p):
                cure = f"allocate a symmetric buffer in the program and copy %{x.name} into it"
                raise InputError(f"%{x.name} is an input, and peers cannot address a caller's tensor", program=p.name, cure=cure)
        self._program = p.name
        self._ranks = scope.mesh.layout
        self._meets = is_one_sided(p) and len(self._ranks) > 1
        self._offsets: dict[Instance, tuple[int, tuple[int, ...], torch.dtype]] = {}
        size = 0
        lines = []
        for root, sizes in _roots(p, scope, dims):
            dtype = to_torch(root.buffer.type.dtype)
            self._offsets[root] = (size, sizes, dtype)
            lines.append(f"%{root.buffer.name} {root.buffer.type.dtype}{list(sizes)}")
            size += -(-math.prod(sizes) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        size = max(size, ALIGNMENT)
        self._comms: Any = None
        if len(self._ranks) == 1:
            here = 0
            self.window = Window(self._ranks, 0, (torch.zeros(size, dtype=torch.uint8, device=device),), 0)
            self._comms = _Alone(device)
        else:
            if not isinstance(comms, Reaching):
                raise HostIrError(
                    "peers' memory is addressed with the transport symm only", program=p.name, got=None if comms is None else comms.name,
                    cure='spawn(…, transport="symm"), or hostir run --transport symm',
                )  # fmt: skip
            assert comms is not None
            self._agree(comms, "\n".join(lines))
            self.window = comms.symmetric(self._ranks, size, f"the program @{p.name}")
            here = self.window.here
            self._comms = comms
            weakref.finalize(self, comms.leave, self.window).atexit = False
        self.rank = self._ranks[here]
        self._barrier = CommCall("barrier", self._ranks, where=lambda: f"@{p.name}: all ranks are at its start", agreed=True)

    def _agree(self, comms: Comms, mine: str) -> None:
        texts = comms.exchange("symmetric buffers", mine, self._ranks)
        for rank, text in zip(self._ranks, texts, strict=True):
            if text != mine:
                raise RankMismatchError(
                    f"ranks {comms.rank} and {rank} allocate different symmetric buffers", program=self._program, rank=comms.rank,
                    expected=f"rank {comms.rank}: {mine or 'none'}", got=f"rank {rank}: {text or 'none'}",
                    cure="allocate symmetric buffers outside branches, with sizes that do not depend on the rank",
                )  # fmt: skip

    # ---- where things are

    def tensor(self, root: Instance, rank: int | None = None) -> torch.Tensor:
        """The whole buffer, here or on world rank ``rank``."""
        at, sizes, dtype = self._offsets[root]
        position = self.window.here if rank is None else self._ranks.index(rank)
        return self.window.at(position, at, sizes, dtype)

    def view(self, region: Region) -> torch.Tensor:
        """The elements of a region, on the rank that it says."""
        whole = self.tensor(region.root, region.peer)
        layout = region.layout
        return whole.as_strided(layout.sizes, layout.strides, int(whole.storage_offset()) + layout.offset)

    def address(self, region: Region) -> int:
        """Where a flag is."""
        return self.view(region).data_ptr()

    # ---- during a run

    def enter(self, *, poison: bool = False) -> None:
        """Meet the other ranks, in the order of the current stream. ``poison``: then fill what holds floats with NaN, and meet again."""
        if self._meets:
            self._comms.issue(self._barrier).wait()
        if poison:
            for root, (_, _, dtype) in self._offsets.items():
                if dtype.is_floating_point or dtype.is_complex:
                    self.tensor(root).fill_(float("nan"))
            if self._meets:
                self._comms.issue(self._barrier).wait()

    def signal(self, address: int, value: int) -> None:
        self._comms.signal(address, value)

    def wait(self, address: int, value: int, where: Callable[[], str]) -> None:
        self._comms.await_flag(address, value, where)


class _Alone:
    """Flags of a world of one: on a CPU what waits has been signalled before, on a GPU streams keep the order."""

    def __init__(self, device: torch.device) -> None:
        self._fabric: Any = None
        if device.type == "cuda":
            from hostir.runtime.comms.symm_shim import CudaFabric

            self._fabric = CudaFabric(device, 1)
        else:
            from hostir.runtime.comms.symm_host import HostFabric

            def never(where: Callable[[], str], _seconds: float) -> None:
                raise HostIrError("no other rank will ever signal this", statement=where())

            self._fabric = HostFabric(0, 1, lambda _tag, text, _ranks: [text], never)

    def signal(self, address: int, value: int) -> None:
        self._fabric.write(address, value)

    def await_flag(self, address: int, value: int, where: Callable[[], str]) -> None:
        self._fabric.wait(address, value, where)


def _roots(p: Program, scope: Scope, dims: Mapping[str, int]) -> list[tuple[Instance, tuple[int, ...]]]:
    """Every life of a symmetric buffer in a run, in order; numbered as every other walk of the program numbers them."""
    if not any(isinstance(s, Alloc) and s.out.type.memory == "symmetric" for s in every(p.body)):
        return []
    walker = Walker(p, Scope(scope.mesh, scope.rank, dims, scope.vars))
    found = []
    for step in walker.steps():
        if isinstance(step.op, Alloc) and step.op.out.type.memory == "symmetric":
            region = walker.region(step.op.out)
            found.append((region.root, region.layout.sizes))
    return found
