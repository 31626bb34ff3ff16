"""Ranks compare what they are about to run before the first communication of a program with given sizes.

A rank whose call was refused takes part as well, with its error: so all ranks stop with a reason, and none is left waiting.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

from hostir.dispatch.binding import Binding
from hostir.errors import HostIrError, InputError, PeerError, RankMismatchError
from hostir.ir.nodes import Program
from hostir.mesh import Mesh
from hostir.runtime.comms.protocol import Comms

PREPARING: Final = 1800.0  # seconds that ranks may differ in the time they take to compile; a rank that dies is noticed at once
_NEWS: Final = 10.0  # seconds between two lines that say what this rank is doing
_REFUSED: Final = "refused: "
_FAILED: Final = "failed: "


class Agreement:
    """What the ranks of a program have agreed on so far: text, mesh, symbols, scalars."""

    def __init__(self, p: Program) -> None:
        self._program = p
        self._known: set[str] = set()

    def refuse(self, comms: Comms, mesh: Mesh, error: InputError) -> None:
        """This rank's call was refused. Before the first agreement the others hear of it there; later they may already be under way."""
        if self._known:
            comms.fail(error)
        else:
            comms.exchange("hostir.program", _REFUSED + _in_one_line(error), mesh.layout)

    def reach(self, comms: Comms, mesh: Mesh, binding: Binding) -> bool:
        """Whether this was new. RankMismatchError where any rank would run something else."""
        facts = f"{binding.shapes()}\n{mesh} ranks {list(mesh.layout)}\n{self._program}"
        if facts in self._known:
            return False
        texts = comms.exchange("hostir.program", facts, mesh.layout)
        for rank, text in zip(mesh.layout, texts, strict=True):
            if text.startswith(_REFUSED):
                raise RankMismatchError(f"rank {rank} refused its inputs: {text.removeprefix(_REFUSED)}", program=self._program.name, rank=comms.rank)
            if text != facts:
                mine, theirs = _first_difference(facts, text)
                raise RankMismatchError(
                    f"ranks {comms.rank} and {rank} run different programs", program=self._program.name, rank=comms.rank,
                    expected=f"rank {comms.rank}: {mine}", got=f"rank {rank}: {theirs}",
                    cure="build the same text on every rank: p.rank() instead of world.rank, equal sizes and scalars",
                )  # fmt: skip
        self._known.add(facts)
        return True

    @contextlib.contextmanager
    def prepared_together(self, comms: Comms, mesh: Mesh) -> Iterator[None]:
        """Around what a rank does before its first communication: compiling may take minutes on one rank, and no clock runs meanwhile.

        A rank that fails here raises its own error, the others a PeerError that names it; the world remains usable.
        """
        name, rank = self._program.name, comms.rank
        try:
            with _news(f"hostir: rank {rank} prepares @{name}"):
                yield
        except Exception as error:
            with contextlib.suppress(HostIrError):
                comms.exchange("hostir.ready", f"{_FAILED}{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", mesh.layout, PREPARING)
            raise
        with _news(f"hostir: rank {rank} waits until all ranks have prepared @{name}"):
            texts = comms.exchange("hostir.ready", "", mesh.layout, PREPARING)
        for other, text in zip(mesh.layout, texts, strict=True):
            if text:
                raise PeerError(f"rank {other} could not prepare: {text.removeprefix(_FAILED)}", program=name, rank=rank, ranks=(other,))


@contextlib.contextmanager
def _news(what: str) -> Iterator[None]:
    """A line on stderr now and then, for as long as it takes."""
    start, ended = time.monotonic(), threading.Event()

    def tell() -> None:
        while not ended.is_set():
            sys.stderr.write(f"{what} ({time.monotonic() - start:.0f} s)\n")
            sys.stderr.flush()
            ended.wait(_NEWS)

    teller = threading.Timer(_NEWS, tell)
    teller.name, teller.daemon = "hostir: news", True
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.cancel()
        teller.join()


def _in_one_line(e: InputError) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in (("expected", e.expected), ("got", e.got)) if value is not None)
    return f"{e.message} ({facts})" if facts else e.message


def _first_difference(a: str, b: str) -> tuple[str, str]:
    for x, y in zip(a.splitlines(), b.splitlines(), strict=False):
        if x != y:
            return x.strip(), y.strip()
    return f"{len(a.splitlines())} lines", f"{len(b.splitlines())} lines"
