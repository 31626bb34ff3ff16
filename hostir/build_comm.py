"""Communication methods of the builder: one for each kind, over mesh axes or a list of ranks, each returning its event."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from hostir.buffers import Buffer
from hostir.errors import BuildError, caller_location
from hostir.ir import nodes
from hostir.ir.nodes import Comm, Event, Stmt, Stream, Team
from hostir.types import Operand, operand

On = str | Stream | None
Over = str | Sequence[str] | Sequence[int] | None


def _dim(x: Buffer, dim: int) -> int:
    return dim + max(x.ndim, 1) if isinstance(x, Buffer) and dim < 0 else dim


def _team(over: Over) -> Team:
    if over is None:
        return None
    if isinstance(over, str):
        return (over,)
    if not isinstance(over, Sequence):
        raise BuildError("over takes a mesh axis, a tuple of axes or a list of ranks", got=over)
    if all(isinstance(r, int) for r in over):
        return tuple(int(r) for r in over)
    return tuple(str(a) for a in over)


class Communication:
    """What ``Program`` inherits. Every method takes ``over`` (axis, axes or ranks; default the whole mesh) and ``on`` (a stream)."""

    def _need_open(self) -> None:
        raise NotImplementedError

    def _node(self, b: object) -> nodes.Buffer:
        raise NotImplementedError

    def _on(self, on: On) -> Stream:
        raise NotImplementedError

    def _located(self, statement: str | None = None) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _add(self, s: Stmt) -> None:
        raise NotImplementedError

    def _comm(self, kind: str, ins: Sequence[Any], outs: Sequence[Any], over: Over, on: On, **fields: Any) -> Event:
        self._need_open()
        loc = caller_location()
        event = Event("e")
        source = tuple(self._node(b) for b in ins)
        target = tuple(self._node(b) for b in outs)
        stream = self._on(on)
        with self._located(kind):
            team = _team(over)
            numbers = {k: operand(v) for k, v in fields.items() if k in ("to", "source", "value")}
        self._add(Comm(kind, target, source, team=team, stream=stream, event=event, loc=loc, **(fields | numbers)))
        return event

    def allgather(self, x: Buffer, out: Buffer, *, dim: int = 0, over: Over = None, on: On = None) -> Event:
        """Concatenate every member's ``x`` along ``dim`` into ``out`` on all."""
        return self._comm("allgather", [x], [out], over, on, dim=_dim(x, dim))

    def reduce_scatter(self, x: Buffer, out: Buffer, *, op: str = "sum", dim: int = 0, over: Over = None, on: On = None) -> Event:
        """Reduce over the team, then member i keeps part i of ``dim``."""
        return self._comm("reduce_scatter", [x], [out], over, on, op=op, dim=_dim(x, dim))

    def allreduce(self, x: Buffer, out: Buffer | None = None, *, op: str = "sum", over: Over = None, on: On = None) -> Event:
        """Reduce over the team, on all members; in place without ``out``."""
        return self._comm("allreduce", [x], [x if out is None else out], over, on, op=op)

    def reduce(self, x: Buffer, out: Buffer, *, to: Operand, op: str = "sum", over: Over = None, on: On = None) -> Event:
        """Reduce over the team into ``out`` of member ``to`` only."""
        return self._comm("reduce", [x], [out], over, on, to=to, op=op)

    def broadcast(self, x: Buffer, out: Buffer, *, source: Operand, over: Over = None, on: On = None) -> Event:
        """``x`` of member ``source`` into ``out`` of all."""
        return self._comm("broadcast", [x], [out], over, on, source=source)

    def gather(self, x: Buffer, out: Buffer, *, to: Operand, dim: int = 0, over: Over = None, on: On = None) -> Event:
        """Concatenate along ``dim`` into ``out`` of member ``to`` only."""
        return self._comm("gather", [x], [out], over, on, to=to, dim=_dim(x, dim))

    def scatter(self, x: Buffer, out: Buffer, *, source: Operand, dim: int = 0, over: Over = None, on: On = None) -> Event:
        """Part i of ``x`` of member ``source`` along ``dim`` into ``out`` of member i."""
        return self._comm("scatter", [x], [out], over, on, source=source, dim=_dim(x, dim))

    def alltoall(self, x: Buffer, out: Buffer, *, split_dim: int = 0, cat_dim: int = 0, over: Over = None, on: On = None) -> Event:
        """Part j of ``split_dim`` goes to member j; what arrives is concatenated along ``cat_dim`` in team order."""
        return self._comm("alltoall", [x], [out], over, on, split=_dim(x, split_dim), cat=_dim(x, cat_dim))

    def alltoallv(self, x: Buffer, out: Buffer, *, send_counts: Any, recv_counts: Any, over: Over = None, on: On = None) -> Event:
        """``send_counts[j]`` rows of ``x`` go to member j, ``recv_counts[i]`` rows come from member i; tuples or an i64 buffer."""
        return self._comm("alltoallv", [x], [out], over, on, send=self._counts(send_counts), recv=self._counts(recv_counts))

    def _counts(self, counts: Any) -> nodes.Counts:
        with self._located("alltoallv"):
            return self._node(counts) if isinstance(counts, Buffer) else tuple(operand(c) for c in counts)

    def permute(self, x: Buffer, out: Buffer, *, to: Operand, source: Operand, over: Over = None, on: On = None) -> Event:
        """Send ``x`` to member ``to`` and receive ``out`` from member ``source``, at once. To oneself is a copy."""
        return self._comm("permute", [x], [out], over, on, to=to, source=source)

    def send(self, x: Buffer, *, to: Operand, over: Over = None, on: On = None) -> Event:
        return self._comm("send", [x], [], over, on, to=to)

    def recv(self, out: Buffer, *, source: Operand, over: Over = None, on: On = None) -> Event:
        return self._comm("recv", [], [out], over, on, source=source)

    def barrier(self, *, over: Over = None, on: On = None) -> Event:
        return self._comm("barrier", [], [], over, on)

    def signal(self, flag: Buffer, *, to: Operand, value: Operand, over: Over = None, on: On = None) -> Event:
        """Write ``value`` into member ``to``'s ``flag`` (0-d, symmetric), after what this stream has done so far."""
        return self._comm("signal", [flag], [], over, on, to=to, value=value)

    def wait(self, flag: Buffer, *, value: Operand, over: Over = None, on: On = None) -> Event:
        """Hold the stream until the own ``flag`` is at least ``value``."""
        return self._comm("wait", [flag], [], over, on, value=value)

    def copy(self, x: Buffer, out: Buffer, *, on: On = None) -> Event:
        """A local copy, same shape and dtype."""
        return self._comm("copy", [x], [out], None, on)
