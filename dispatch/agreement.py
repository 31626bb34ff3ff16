"""Ranks compare what they are about to run before the first communication of a program with given sizes.

A rank whose call was refused takes part as well, with its error: so all ranks stop with a reason, and none is left waiting.
"""

from __future__ import annotations

from hostir.dispatch.binding import Binding
from hostir.errors import InputError, RankMismatchError
from hostir.ir.nodes import Program
from hostir.mesh import Mesh
from hostir.runtime.comms.protocol import Comms

_REFUSED = "refused: "


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

    def reach(self, comms: Comms, mesh: Mesh, binding: Binding) -> None:
        """RankMismatchError where any rank would run something else."""
        facts = f"{binding.shapes()}\n{mesh} ranks {list(mesh.layout)}\n{self._program}"
        if facts in self._known:
            return
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


def _in_one_line(e: InputError) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in (("expected", e.expected), ("got", e.got)) if value is not None)
    return f"{e.message} ({facts})" if facts else e.message


def _first_difference(a: str, b: str) -> tuple[str, str]:
    for x, y in zip(a.splitlines(), b.splitlines(), strict=False):
        if x != y:
            return x.strip(), y.strip()
    return f"{len(a.splitlines())} lines", f"{len(b.splitlines())} lines"
