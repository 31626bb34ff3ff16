"""The kinds of communication as data: what each takes, which modifiers its text may carry, how sizes change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class CommKind:
    """What one kind of communication takes. ``grows``: how a size changes along its dimension (out = in * team, / team, or same).

    ``uses`` are the modifiers that its text may carry, in the order of the grammar; ``needs`` must be there.
    """

    name: str
    num_ins: int
    num_outs: int
    uses: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    grows: str = "same"
    collective: bool = True


_KINDS: Final = (
    CommKind("allgather", 1, 1, ("dim",), grows="times"),
    CommKind("allreduce", 1, 1, ("op",)),
    CommKind("reduce_scatter", 1, 1, ("op", "dim"), grows="over"),
    CommKind("reduce", 1, 1, ("op", "to"), ("to",)),
    CommKind("broadcast", 1, 1, ("source",), ("source",)),
    CommKind("gather", 1, 1, ("dim", "to"), ("to",), grows="times"),
    CommKind("scatter", 1, 1, ("dim", "source"), ("source",), grows="over"),
    CommKind("alltoall", 1, 1, ("split", "cat"), grows="split"),
    CommKind("alltoallv", 1, 1, ("send", "recv"), ("send", "recv"), grows="rows"),
    CommKind("permute", 1, 1, ("to", "source"), ("to", "source")),
    CommKind("send", 1, 0, ("to",), ("to",), collective=False),
    CommKind("recv", 0, 1, ("source",), ("source",), collective=False),
    CommKind("copy", 1, 1, collective=False),
    CommKind("signal", 1, 0, ("to", "value"), ("to", "value"), collective=False),
    CommKind("wait", 1, 0, ("value",), ("value",), collective=False),
    CommKind("barrier", 0, 0),
)
COMMS: Final[Mapping[str, CommKind]] = {k.name: k for k in _KINDS}
REDUCTIONS: Final = ("sum", "avg", "prod", "min", "max")
DEFAULTS: Final[Mapping[str, object]] = {"op": "sum", "dim": 0, "split": 0, "cat": 0}
MODIFIERS: Final = ("op", "dim", "split", "cat", "to", "source", "send", "recv", "value")
