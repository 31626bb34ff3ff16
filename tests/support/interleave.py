"""Other orders in which a program may run: all its ranks in one process, on real memory, step by step in any order that it allows.

A ``World`` is a program's dry run on every rank as a graph of small actions. A step begins when its stream comes to it, reads its
inputs, and writes its outputs; syncs and events hold streams back; a communication's data arrives after it was read where it comes
from. Nothing else is ordered: a run picks a ready action by a seeded rule until none is left. The graph is made from the steps alone,
with lists of predecessors and no clocks, so that it can judge the checks.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from hostir.ir.nodes import Alloc, Buffer, Call, Comm, Event, For, Free, Group, If, Program, Sync, View
from hostir.ir.regions import Layout
from hostir.ir.walk import Instance, Lane, Region, Scope, Step, Walker, resolve_mesh
from hostir.mesh import Mesh
from hostir.types import Var
from tests.support.machine import Free as FreeMachine
from tests.support.machine import Machine, moved

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


@dataclass(frozen=True)
class Outcome:
    """What a run did. ``outputs``: results and inout inputs of all ranks; ``seen``: what every read saw; ``memory``: what was written."""

    outputs: bytes
    seen: tuple[int, ...]
    memory: bytes

    def agrees(self, other: Outcome) -> bool:
        return self.outputs == other.outputs and self.seen == other.seen and self.memory == other.memory


@dataclass(eq=False, slots=True)
class _Part:
    """A communication of one rank: what it reads and writes, and its actions."""

    step: Step
    position: int
    ins: list[Array]
    outs: list[Array]
    begin: Node
    read: Node
    write: Node
    data: list[Array] = field(default_factory=list)


class World:
    """A program on all its ranks. ``loose``: a communication ends when its own data has moved; else when all its members are there.
    ``serial``: every rank in program order, which is what the program means. ``tagged``: whatever writes, also a copy, marks what it
    writes as its own, so that no two writes are alike (for the machine ``Free``)."""

    def __init__(
        self, p: Program, mesh: Mesh | int | Mapping[str, int] | None = None, *, dims: Mapping[str, int] | None = None,
        scalars: Mapping[str, int] | None = None, loose: bool = True, serial: bool = False, machine: Machine | None = None, tagged: bool = False,
    ) -> None:  # fmt: skip
        self.program = p
        self.mesh = resolve_mesh(p, mesh)
        self.machine = machine or FreeMachine()
        self.loose = loose
        self.tagged = tagged
        self.serial = serial or not p.scheduled
        self.nodes: list[Node] = []
        self.parts: dict[int, list[_Part]] = {}
        self._seen: dict[int, int] = {}
        self._poisoned: dict[tuple[int, int], bytes] = {}
        named = {v.name: v for v in p.params if isinstance(v, Var)}
        given = {named[k]: v for k, v in (scalars or {}).items()}
        walks = {r: Walker(p, Scope(self.mesh, r, dims, given)) for r in self.mesh.layout}
        self._places: dict[tuple[int, int, int], tuple[int, int]] = {}  # (rank, buffer, life) -> (start, length)
        self._lives: dict[tuple[int, Instance], int] = {}
        self._size = 0
        self.numbers: dict[int, list[Any]] = {}  # by id of a step: the host numbers among its arguments
        steps = {r: self._walked(r, w) for r, w in walks.items()}
        self._memory = np.zeros(self._size, self.machine.dtype)
        self._bits = np.zeros(self._size, np.bool_)
        self._fill(p, walks)
        for rank, found in steps.items():
            _Rank(self, rank).build(found)
        self._meet()
        self._outputs = [self.view(r, w.region(b)) for r, w in walks.items() for b in (*p.results, *sorted(p.inout, key=lambda b: b.name))]
        for i, n in enumerate(self.nodes):
            n.number = i

    # ---- memory

    def _walked(self, rank: int, walker: Walker) -> list[Step]:
        lives: dict[int, int] = {}
        for b in self.program.params:
            if isinstance(b, Buffer):
                self._place(rank, walker.region(b), 0)
        steps = []
        for step in walker.steps():
            if isinstance(step.op, Alloc):
                b = step.op.out
                lives[id(b)] = lives.get(id(b), -1) + 1
                self._place(rank, walker.region(b), lives[id(b)])
            if isinstance(step.op, Call):
                self.numbers[id(step)] = [walker.scope.value(a) for a in step.op.args if not isinstance(a, Buffer)]
            steps.append(step)
        return steps

    def _place(self, rank: int, region: Region, life: int) -> None:
        self._lives[rank, region.root] = life
        self._places[rank, id(region.root.buffer), life] = (self._size, region.layout.numel)
        self._size += region.layout.numel

    def where(self, rank: int, region: Region) -> tuple[int, int]:
        """First element and length of the region's whole buffer."""
        owner = rank if region.peer is None else region.peer
        return self._places[owner, id(region.root.buffer), self._lives[rank, region.root]]

    def view(self, rank: int, region: Region, layout: Layout | None = None) -> Array:
        start, _ = self.where(rank, region)
        return _strided(self._memory, start, layout or region.layout)

    def bits(self, rank: int, regions: Sequence[Region]) -> int:
        self._bits[:] = False
        for r in regions:
            _strided(self._bits, self.where(rank, r)[0], r.layout)[...] = True
        return int.from_bytes(np.packbits(self._bits, bitorder="little").tobytes(), "little")

    def _fill(self, p: Program, walks: Mapping[int, Walker]) -> None:
        """Inputs hold values of their own, everything else garbage that changes from run to run."""
        self._given = np.zeros(self._size, np.bool_)
        self._initial = np.arange(self._size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for rank, w in walks.items():
            for k, b in enumerate(x for x in p.params if isinstance(x, Buffer)):
                start, length = self.where(rank, w.region(b))
                self._given[start : start + length] = True
                self._initial[start : start + length] = self.machine.initial(rank, k, length)

    def poison(self, where: tuple[int, int]) -> None:
        start, length = where
        mine = self._memory[start : start + length]
        mine[:] = (np.arange(length, dtype=np.uint64) * np.uint64(self._salt) + np.uint64(len(self._poisoned))).view(mine.dtype)
        self._poisoned[where] = mine.tobytes()

    # ---- the graph

    def node(self, key: tuple[Any, ...], rank: int, lane: Lane, step: Step, *before: Node) -> Node:
        n = Node(key, rank, lane, step)
        n.after(*before)
        self.nodes.append(n)
        return n

    def into(self, n: Node, out: Array, x: Any) -> None:
        """Node ``n`` writes ``x``."""
        out[...] = x ^ np.uint64(hash(n.key[:2]) & 0x7FFFFFFFFFFFFFFF) if self.tagged else x

    def saw(self, n: Node, arrays: Sequence[Array]) -> None:
        self._seen[n.number] = self.machine.digest(arrays)

    def _meet(self) -> None:
        """Match communications by number: the k-th collective of a team, the k-th message from a to b, in program order."""
        slots: dict[tuple[Any, ...], dict[int, _Part]] = {}
        for rank, parts in self.parts.items():
            count: dict[tuple[Any, ...], int] = {}
            for part in parts:
                c, team = part.step.op, part.step.team
                assert isinstance(c, Comm)
                if rank not in team:
                    raise Malformed(f"rank {rank} is outside {team}")
                if c.kind in ("send", "recv"):
                    ends = (rank, part.step.peer) if c.kind == "send" else (part.step.peer, rank)
                    key: tuple[Any, ...] = ("message", team, *ends)
                    mine = c.kind
                else:
                    key, mine = ("collective", team), ""
                number = count.get((*key, mine), 0)
                count[*key, mine] = number + 1
                slot = slots.setdefault((*key, number), {})
                slot[(0 if c.kind == "send" else 1) if mine else rank] = part
        for (kind, team, *_), slot in slots.items():
            if kind == "message":
                self._message(slot.get(0), slot.get(1))
            else:
                self._collective(team, slot)

    def _message(self, send: _Part | None, recv: _Part | None) -> None:
        if send is None or recv is None:
            lost = send or recv
            assert lost is not None
            lost.write.num_before += NEVER
            return
        if send.ins[0].shape != recv.outs[0].shape or send.step.op.ins[0].type.dtype != recv.step.op.outs[0].type.dtype:
            raise Malformed("a message of another type")
        recv.write.after(send.read)
        recv.write.run = lambda: self.into(recv.write, recv.outs[0], send.data[0])
        if not self.loose and send.step.peer != send.begin.rank:
            send.write.after(recv.begin)

    def _collective(self, team: tuple[int, ...], slot: dict[int, _Part]) -> None:
        missing = [r for r in team if r not in slot]
        parts = [slot[r] for r in team if r in slot]
        kinds = {(q.step.op.kind, q.step.op.op, q.step.op.dim, q.step.op.split, q.step.op.cat) for q in parts}  # type: ignore[union-attr]
        if len(kinds) > 1:
            raise Malformed(f"{kinds} meet")
        for q in parts:
            q.write.num_before += NEVER if missing else 0
        if missing:
            return
        _agreed(parts)
        for at, q in enumerate(parts):
            sources = _sources(parts, at)
            q.write.after(*(parts[i].read for i in sources if i != at))
            if not self.loose or q.step.op.kind == "barrier":  # type: ignore[union-attr]
                q.write.after(*(other.begin for other in parts if other is not q))
            q.write.run = self._mover(parts, at)

    def _mover(self, parts: list[_Part], at: int) -> Callable[[], None] | None:
        q = parts[at]
        if not q.step.writes:
            return None
        move, out = moved(self.machine, [x.step for x in parts], at), q.outs[0]
        rows = q.step.counts is not None

        def run() -> None:
            x = move([x.data for x in parts])
            self.into(q.write, out[: len(x)] if rows else out, x if rows else x.reshape(out.shape))

        return run

    # ---- runs

    def run(self, seed: int | None = None, *, delay: int | None = None, garbage: int = 0) -> Outcome:
        """One run in the order that ``seed`` picks. ``delay``: the action with this number goes last of all that are ready."""
        self._salt = (garbage * 2 + 1) * 0x2545F4914F6CDD1D % 2**64 | 1
        initial = np.where(self._given, self._initial, self._initial * np.uint64(self._salt) + np.uint64(garbage + 1))
        self._memory[:] = initial.view(self._memory.dtype)
        self._seen.clear()
        self._poisoned = {}
        self._execute(_Order(seed, delay, self.nodes))
        seen = tuple(self._seen.get(i, 0) for i in range(len(self.nodes)))
        outputs = b"".join(np.ascontiguousarray(x).tobytes() for x in self._outputs)
        whole = np.where(self._memory.view(np.uint64) == initial.view(np.uint64), 0, self._memory.view(np.uint64))
        for (start, length), held in self._poisoned.items():
            if self._memory[start : start + length].tobytes() != held:
                raise Malformed("written after it was freed")
            whole[start : start + length] = 0
        return Outcome(outputs, seen, whole.tobytes())

    def _execute(self, order: _Order) -> None:
        left = [n.num_before for n in self.nodes]
        ready = [(order.key(n), n.number) for n in self.nodes if not n.num_before]
        heapq.heapify(ready)
        closed: list[Node] = []  # came to a flag that was not set yet
        done = 0
        while ready:
            n = self.nodes[heapq.heappop(ready)[1]]
            if n.gate is not None and not n.gate():
                closed.append(n)
                continue
            if n.run is not None:
                n.run()
            done += 1
            for m in (*closed, *n.next):
                left[m.number] -= m not in closed
                if not left[m.number]:
                    heapq.heappush(ready, (order.key(m), m.number))
            closed.clear()
        if done < len(self.nodes):
            stuck = next(n for n in self.nodes if left[n.number] > 0 or n in closed)
            raise Stuck(f"{len(self.nodes) - done} actions never run, {stuck} among them")

    # ---- by definition

    def unordered(self) -> list[tuple[Node, Node]]:
        """Conflicting actions that no path of the graph orders. Waits for flags count as no order here."""
        before = [0] * len(self.nodes)
        left = [n.num_before for n in self.nodes]
        queue = [n for n in self.nodes if not n.num_before]
        while queue:
            n = queue.pop()
            known = before[n.number] | 1 << n.number
            for m in n.next:
                before[m.number] |= known
                left[m.number] -= 1
                if not left[m.number]:
                    queue.append(m)
        touching = [n for n in self.nodes if n.reads or n.writes]
        found = []
        for j, b in enumerate(touching):
            for a in touching[:j]:
                if (a.writes & (b.reads | b.writes) or a.reads & b.writes) and not (before[b.number] >> a.number & 1 or before[a.number] >> b.number & 1):
                    found.append((a, b))
        return found


    def suspects(self) -> list[int]:
        """The actions that are worth a run in which they come late: those without an order, or all where flags order them."""
        if any(n.gate is not None for n in self.nodes):
            return [n.number for n in self.nodes]
        return sorted({n.number for pair in self.unordered() for n in pair})


class _Rank:
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
        part = _Part(step, self.position, [world.view(rank, r) for r in step.reads], [world.view(rank, r) for r in step.writes], begin, read, write)

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


def _agreed(parts: Sequence[_Part]) -> None:
    """Everyone has the same root, knows from whom it receives, counts the rows that come."""
    steps = [q.step for q in parts]
    kind = steps[0].op.kind  # type: ignore[union-attr]
    if kind == "permute":
        if any(steps[s.to or 0].source != at for at, s in enumerate(steps)):
            raise Malformed("a permute that does not mirror")
        if any(q.outs[0].shape != parts[q.step.source or 0].ins[0].shape for q in parts):
            raise Malformed("a permute of other shapes")
    elif len({(s.to, s.source) for s in steps}) > 1:
        raise Malformed("several roots")
    elif kind == "alltoallv":
        counts = [s.counts for s in steps]
        if None in counts or any(a[0][j] != b[1][i] for i, a in enumerate(counts) for j, b in enumerate(counts)):  # type: ignore[index]
            raise Malformed("counts that do not match")
        if any(sum(n) > len(x) for s, q in zip(steps, parts, strict=True) for n, x in zip(s.counts or (), (q.ins[0], q.outs[0]), strict=True)):
            raise Malformed("more rows than there are")
    types = {(s.op.ins[0].type.dtype.name, s.op.outs[0].type.dtype.name) for s in steps if s.op.ins}  # type: ignore[union-attr]
    if len(types) > 1:
        raise Malformed("several dtypes")


def _sources(parts: Sequence[_Part], at: int) -> Sequence[int]:
    """The members of a collective whose data member ``at`` gets."""
    step = parts[at].step
    assert isinstance(step.op, Comm)
    match step.op.kind:
        case "broadcast" | "scatter" | "permute":
            return [step.source or 0]
        case "reduce" | "gather":
            return range(len(parts)) if step.to == at else []
        case _:
            return range(len(parts))


def _strided(flat: Array, start: int, layout: Layout) -> Array:
    if not layout.numel:
        return np.zeros(layout.sizes, flat.dtype)
    base = flat[start + layout.offset :]
    return np.lib.stride_tricks.as_strided(base, layout.sizes, tuple(s * flat.itemsize for s in layout.strides))


class _Order:
    """Which ready action goes first: a key for each, smaller is sooner."""

    def __init__(self, seed: int | None, delay: int | None, nodes: Sequence[Node]) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.delay = delay
        self.lanes: dict[tuple[int, Lane], float] = {}
        self.rule = "number" if seed is None else self.rng.choice(["any", "any", "lanes", "lanes", "delay"])
        self.whole = self.rng.random() < 0.4  # what was read is written at once
        if seed is not None and self.rule == "delay" and delay is None and nodes:
            self.delay = self.rng.randrange(len(nodes))

    def key(self, n: Node) -> float:
        if n.number == self.delay:
            return 2.0
        if self.rule == "number":
            return 0.0
        if self.whole and n.key[2] == "write":
            return -1.0
        if self.rule == "lanes":
            if self.rng.random() < 0.05:
                self.lanes.clear()
            return self.lanes.setdefault((n.rank, n.lane), self.rng.random()) + 1e-3 * self.rng.random()
        return self.rng.random()
