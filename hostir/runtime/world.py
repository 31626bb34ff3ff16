"""The ranks that exist: who this one is, its device, and its way to talk to the others.

A World is entered with ``with``; inside, ``current_world()`` finds it, also when many ranks are threads of one process. Leaving it
closes the communication, and tells the other ranks when an exception is the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import torch

from hostir.errors import InputError
from hostir.mesh import Mesh
from hostir.runtime.comms.protocol import Comms

_CURRENT: Final[ContextVar[World | None]] = ContextVar("hostir_world", default=None)


@dataclass(eq=False)
class World:
    """``rank`` of ``size``; ``local_rank`` of ``local_size`` on this machine; ``backend`` names the transport."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    comms: Comms = field(repr=False)
    on_close: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _tokens: list[Token[World | None]] = field(default_factory=list, repr=False)

    def mesh(self, names: str | Sequence[str], shape: int | Sequence[int] | None = None, *, ranks: Sequence[int] | None = None) -> Mesh:
        """A mesh bound to these ranks: ``world.mesh(("tp",))`` over all, ``world.mesh(("dp", "tp"), (2, 4))``.

        ``ranks`` lists world ranks in mesh order where the mesh is not simply 0, 1, …; a rank outside it cannot run its programs.
        Local: no other rank is asked.
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        if shape is None:
            if len(names) != 1:
                raise InputError("a mesh of several axes needs its shape", got=list(names), cure=f"world.mesh({names}, (…))")
            shape = (self.size if ranks is None else len(ranks),)
        mesh = Mesh(shape, names, ranks=ranks, world=self)
        if ranks is None and len(mesh.layout) != self.size:
            cure = "give ranks= for a mesh over some of them"
            raise InputError(f"the mesh does not cover the world of {self.size} ranks", expected=self.size, got=str(mesh), cure=cure)
        if bad := [r for r in mesh.layout if not 0 <= r < self.size]:
            raise InputError(f"the world has no rank {bad[0]}", expected=f"0 .. {self.size - 1}", got=list(mesh.layout))
        return mesh

    @property
    def way(self) -> str:
        """How tensors travel between the ranks, in words."""
        if self.backend == "gloo" and self.device.type == "cuda" and self.size > 1:
            return "gloo, GPU tensors through pinned host memory"
        if self.backend == "symm" and self.size > 1:
            return "symm, each rank addressing the memory of all" + (" (shared memory of processes)" if self.device.type == "cpu" else "")
        return self.backend

    def close(self) -> None:
        """Leave in order; a second call does nothing."""
        self.comms.close()
        while self.on_close:
            self.on_close.pop()()

    def __enter__(self) -> Self:
        self._tokens.append(_CURRENT.set(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _CURRENT.reset(self._tokens.pop())
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self.comms.fail(error)
        if not self._tokens:
            self.close()


def current_world() -> World | None:
    """The World entered in this context (thread), or None."""
    return _CURRENT.get()
