"""The actions of one rank, stream by stream: what each step does, and what it waits for on its own rank.

A call reads, then writes. A communication begins, reads, and writes; what it writes comes from the others, see
``tests.support.meetings``. The parts of a group begin together, and what follows on the stream waits for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from hostir.ir.nodes import Alloc, Buffer, Call, Comm, Event, For, Free, Group, If, Sync, View
from hostir.ir.walk import Instance, Lane, Step

if TYPE_CHECKING:
    from tests.support.interleave import World

Array: TypeAlias = npt.NDArray[Any]
MAIN: Final[Lane] = ("main", None)
NEVER: Final = 1 << 30


class Stuck(Exception):
    """No action is ready and some have not run."""


class Malformed(Exception):
    """Communications that cannot be matched at all."""


@dataclass(eq=False, slots=True)
class Node:
    """One action. ``key`` says what it is, the same in every graph of one program; ``begins`` marks the posting of a communication."""

    key: tuple[Any, ...]
    rank: int
    lane: Lane
    step: Step
    run: Callable[[], None] | None = None
    gate: Callable[[], bool] | None = None
    reads: int = 0  # elements of the world's memory, as bits
    writes: int = 0
    num_before: int = 0
    next: list[Node] = field(default_factory=list)
    number: int = 0

    def after(self, *before: Node) -> None:
        for b in before:
            b.next.append(self)
        self.num_before += len(before)

    def __repr__(self) -> str:
        return f"<{self.key}>"


@dataclass(eq=False, slots=True)
class Part:
    """A communication of one rank: what it reads and writes, and its actions."""

    step: Step
    position: int
    ins: list[Array]
    outs: list[Array]
    begin: Node
    read: Node
    write: Node
    data: list[Array] = field(default_factory=list)


class RankActions:
    """Makes one rank's actions, stream by stream."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.last: dict[Lane, list[Node]] = {}
        self.events: dict[Event, Node] = {}
        self.group: tuple[Group, Lane, list[Node], list[Node]] | None = None
        self.freed: set[Instance] = set()
        self.position = 0
        world.parts[rank] = []

    def build(self, steps: Sequence[Step]) -> None:
        for self.position, step in enumerate(steps):
            if self.group is not None and step.group is not self.group[0] and not isinstance(step.op, View):
                self._close_group()
            self._step(step)
        if self.group is not None:
            self._close_group()

    def _close_group(self) -> None:
        assert self.group is not None
        _, lane, before, ends = self.group
        self.last[lane] = ends or before
        self.group = None

    def _lane(self, lane: Lane) -> Lane:
        return MAIN if self.world.serial else lane

    def _node(self, what: str, lane: Lane, step: Step, *before: Node) -> Node:
        return self.world.node((self.rank, self.position, what), self.rank, lane, step, *before)

    def _step(self, step: Step) -> None:
        s, world, rank = step.op, self.world, self.rank
        lane = self._lane(MAIN if isinstance(s, (Alloc, Free)) else step.stream)
        before = self.last.setdefault(lane, [])
        if self.freed and any(r.root in self.freed for r in (*step.reads, *step.writes)):
            raise Malformed("used after it was freed")
        match s:
            case View():
                return
            case Sync(what, _):
                if not world.serial:
                    source = [self.events[what]] if isinstance(what, Event) and what in self.events else []
                    if not isinstance(what, Event):
                        source = self.last.get(step.waits or lane, [])
                    self.last[lane] = [*before, *(n for n in source if n not in before)]
            case Group():
                self.group = (s, lane, list(before), [])
            case Alloc(_, init):
                if init is not None:
                    n = self._node("fill", lane, step, *before)
                    out = world.view(rank, step.writes[0])
                    value = world.machine.constant(init, None if s.out.type.memory == "symmetric" else out)
                    n.run = lambda: out.__setitem__(..., value)
                    n.writes = world.bits(rank, step.writes)
                    self.last[lane] = [n]
            case Free():
                n = self._node("free", lane, step, *before)
                where = world.where(rank, step.writes[0])
                self.freed.add(step.writes[0].root)
                n.run = lambda: world.poison(where)
                n.writes = world.bits(rank, step.writes)
                self.last[lane] = [n]
            case Call():
                self._call(s, step, lane, before)
            case Comm():
                self._comm(s, step, lane, before)
            case For() | If():
                raise AssertionError("the walk opens loops and branches")
            case _:
                assert_never(s)

    def _call(self, s: Call, step: Step, lane: Lane, before: list[Node]) -> None:
        world, rank = self.world, self.rank
        read = self._node("read", lane, step, *before)
        write = self._node("write", lane, step, read)
        num = sum(isinstance(a, Buffer) for a in s.args)
        arrays = [world.view(rank, r) for r in step.reads[:num]]
        numbers = world.numbers[id(step)]
        outs = [world.view(rank, r) for r in step.writes]
        held: list[Array] = []

        def run_read() -> None:
            world.saw(read, arrays)
            held[:] = world.machine.call(s, arrays, numbers, outs)

        def run_write() -> None:
            for o, x in zip(outs, held, strict=True):
                world.into(write, o, x)

        if s.awaits is not None:
            flags = world.view(rank, step.reads[num])
            read.gate = lambda: bool((flags.view(np.int64) >= 1).all())
        read.run, write.run = run_read, run_write
        read.reads, write.writes = world.bits(rank, step.reads[:num]), world.bits(rank, step.writes)
        self._ended(s, lane, write)

    def _ended(self, s: Call | Comm, lane: Lane, end: Node) -> None:
        if self.group is not None:
            self.group[3].append(end)
        else:
            self.last[lane] = [end]
        if s.event is not None:
            self.events[s.event] = end

    def _comm(self, c: Comm, step: Step, lane: Lane, before: list[Node]) -> None:
        world, rank = self.world, self.rank
        if self.group is not None:
            before = self.group[2]
        if c.kind in ("signal", "wait"):
            n = self._node(c.kind, lane, step, *before)
            value = step.value or 0
            if c.kind == "signal":
                flag = world.view(rank, step.writes[0])
                n.run = lambda: flag.__setitem__(..., world.machine.constant(value))
            else:
                flag = world.view(rank, step.reads[0])
                n.gate = lambda: bool(flag.view(np.int64) >= value)
            self._ended(c, lane, n)
            return
        begin = self._node("begin", lane, step, *before)
        read = self._node("read", lane, step, begin)
        write = self._node("write", lane, step, read)
        part = Part(step, self.position, [world.view(rank, r) for r in step.reads], [world.view(rank, r) for r in step.writes], begin, read, write)

        def run_read() -> None:
            world.saw(read, part.ins)
            part.data = [x.copy() for x in part.ins]

        read.run = run_read
        read.reads, write.writes = world.bits(rank, step.reads), world.bits(rank, step.writes)
        if c.kind == "copy":
            write.run = lambda: world.into(write, part.outs[0], part.data[0])
        else:
            world.parts[rank].append(part)
        self._ended(c, lane, write)
