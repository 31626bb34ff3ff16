"""Other orders in which a program may run: all its ranks in one process, on real memory, step by step in any order that it allows.

A ``World`` is a program's dry run on every rank as a graph of small actions. A step begins when its stream comes to it, reads its
inputs, and writes its outputs; syncs and events hold streams back; a communication's data arrives after it was read where it comes
from. Nothing else is ordered: a run picks a ready action by a seeded rule until none is left. The graph is made from the steps alone,
with lists of predecessors and no clocks, so that it can judge the checks.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostir.ir.nodes import Alloc, Buffer, Call, Program
from hostir.ir.regions import Layout
from hostir.ir.walk import Instance, Lane, Region, Scope, Step, Walker, resolve_mesh
from hostir.mesh import Mesh
from hostir.types import Var
from tests.support.actions import Array, Malformed, Node, Part, RankActions, Stuck
from tests.support.machine import Free, Machine
from tests.support.meetings import meet


@dataclass(frozen=True)
class Outcome:
    """What a run did. ``outputs``: results and inout inputs of all ranks; ``seen``: what every read saw; ``memory``: what was written."""

    outputs: bytes
    seen: tuple[int, ...]
    memory: bytes

    def agrees(self, other: Outcome) -> bool:
        return self.outputs == other.outputs and self.seen == other.seen and self.memory == other.memory


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
        self.machine = machine or Free()
        self.loose = loose
        self.tagged = tagged
        self.serial = serial or not p.scheduled
        self.nodes: list[Node] = []
        self.parts: dict[int, list[Part]] = {}
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
            RankActions(self, rank).build(found)
        meet(self)
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

        def ordered(a: Node, b: Node) -> bool:
            return bool(before[b.number] >> a.number & 1 or before[a.number] >> b.number & 1)

        pairs = ((a, b) for j, b in enumerate(touching) for a in touching[:j] if a.writes & (b.reads | b.writes) or a.reads & b.writes)
        return [(a, b) for a, b in pairs if not ordered(a, b)]

    def suspects(self) -> list[int]:
        """The actions that are worth a run in which they come late: those without an order, or all where flags order them."""
        if any(n.gate is not None for n in self.nodes):
            return [n.number for n in self.nodes]
        return sorted({n.number for pair in self.unordered() for n in pair})


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
