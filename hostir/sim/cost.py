"""What a step costs on a machine: kernels by roofline, communications by the alpha-beta model of ring algorithms.

A ring passes the whole round in n - 1 steps, each as long as one hop. Within a node a hop is NVLink; a team that spans nodes is bound by
the ports of the node that has fewest of its members, because each device drives its own. Messages go at the rate of one port.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable

from hostir.ir.cohort import Move, PerRank
from hostir.ir.nodes import Alloc, Call, Comm
from hostir.sim.clock import Costs
from hostir.sim.machine import Machine
from hostir.sim.work import works

_BY_ENGINE = ("signal", "wait", "barrier")  # kinds that take no multiprocessors worth counting


class Prices:
    """The costs of one machine; equal steps are worked out once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._calls: dict[Hashable, tuple[float, float]] = {}
        self._kept: list[Move] = []  # so that the ids in the keys stay theirs
        self._rings: dict[tuple[int, ...], _Ring] = {}

    def costs(self) -> Costs:
        machine = self.machine
        return Costs(
            self.seconds, self.seconds, wire=self.wire, copy_links=self.copy_links, share=self.share, issue=machine.issue, launch=machine.launch,
            fills=True,
        )  # fmt: skip

    def seconds(self, m: Move, among: tuple[int, ...] | None = None) -> float:
        op = m.step.op
        if isinstance(op, Call):
            return self._call(m)[0]
        if isinstance(op, Alloc):
            return max(self.machine.kernel, _use_bytes(m) / self.machine.memory)
        assert isinstance(op, Comm)
        if op.kind == "copy":
            return self._copy(m, among)
        return self._comm(m, op, m.step.team if among is None else among)

    def share(self, m: Move) -> float:
        """The part of the multiprocessors that a move uses."""
        op = m.step.op
        if isinstance(op, Call):
            return self._call(m)[1]
        if isinstance(op, Alloc):
            return 1.0
        assert isinstance(op, Comm)
        if op.kind in _BY_ENGINE or (op.kind == "copy" and _path(m) != "local"):
            return 0.0
        return self.machine.comm_share

    # ---- calls

    def _call(self, m: Move) -> tuple[float, float]:
        key = (id(m.step.op), tuple((u.layout.sizes, tuple(bool(s) for s in u.layout.strides)) for u in m.uses))
        if key not in self._calls:
            found = [self.machine.kernel_cost(w) for w in works(m)]
            total = sum(seconds for seconds, _ in found)
            share = sum(seconds * share for seconds, share in found) / total if total else 0.0
            self._calls[key] = total, share
            self._kept.append(m)
        return self._calls[key]

    # ---- copies

    def _copy(self, m: Move, among: tuple[int, ...] | None) -> float:
        machine, one = self.machine, _use_bytes(m) / 2
        match _path(m):
            case "local":
                return max(machine.kernel, 2 * one / machine.memory)
            case "host":
                return machine.pcie.seconds(one)
            case _:
                peer = _peer(m)
                near = among is None or peer is None or machine.node(among[0]) == machine.node(peer)
                return (machine.nvlink if near else machine.infiniband).seconds(one)

    def copy_links(self, m: Move, rank: int) -> tuple[Hashable, ...]:
        match _path(m):
            case "host":
                to_host = any(u.write and u.root.buffer.type.memory == "host" for u in m.uses)
                return (("pcie", "out" if to_host else "in", rank),)
            case "peer":
                peer = _peer(m)
                assert peer is not None
                pushes = any(u.write and u.peer is not None for u in m.uses)
                a, b = (rank, peer) if pushes else (peer, rank)
                return () if a == b else (("out", self.wire(a, b), a), ("in", self.wire(a, b), b))
            case _:
                return ()

    def wire(self, a: int, b: int) -> str:
        return "nvlink" if self.machine.node(a) == self.machine.node(b) else "infiniband"

    # ---- communications

    def _comm(self, m: Move, op: Comm, among: tuple[int, ...]) -> float:
        if op.kind == "wait":
            return 0.0
        ring = self._ring(among)
        if op.kind == "signal":
            return ring.alpha
        if op.kind == "barrier":
            return 0.0 if ring.n == 1 else self.machine.kernel + 2 * math.ceil(math.log2(ring.n)) * ring.alpha
        whole = _whole(m, op)
        if ring.n == 1 or (op.kind in ("permute", "send", "recv") and len(set(among)) == 1):
            return max(self.machine.kernel, 2 * whole / self.machine.memory)
        return self.machine.kernel + ring.seconds(op.kind, whole)

    def _ring(self, team: tuple[int, ...]) -> _Ring:
        if team not in self._rings:
            self._rings[team] = _Ring(self.machine, team)
        return self._rings[team]


class _Ring:
    """A team by how it lies on nodes: ``alpha`` of its longest hop, ``latency`` once round, ``rate`` of the ring through its members."""

    def __init__(self, machine: Machine, team: tuple[int, ...]) -> None:
        on_node = Counter(machine.node(r) for r in team)
        self.n, self.nodes, self.least = len(team), len(on_node), min(on_node.values())
        self.near, self.far = machine.nvlink, machine.infiniband
        self.alpha = self.near.alpha if self.nodes == 1 else self.far.alpha
        self.latency = (self.n - self.nodes) * self.near.alpha + (self.nodes - 1) * self.far.alpha
        across = self.far.bandwidth * self.least
        within = self.near.bandwidth if max(on_node.values()) > 1 else math.inf
        self.rate = within if self.nodes == 1 else min(within, across)

    def seconds(self, kind: str, whole: float) -> float:
        """``whole``: bytes of the whole that the members hold together (allgather's output, reduce_scatter's input), or of one message."""
        part = whole * (self.n - 1) / self.n
        match kind:
            case "allgather" | "reduce_scatter":
                return self.latency + part / self.rate
            case "allreduce":
                return 2 * (self.latency + part / self.rate)
            case "broadcast" | "reduce":
                return self.latency + whole / self.rate
            case "gather" | "scatter" | "alltoall" | "alltoallv":  # messages at once through the ports of the busiest member
                inside, outside = (self.least - 1) / self.n * whole, (self.n - self.least) / self.n * whole
                return self.alpha + max(inside / self.near.bandwidth, outside / self.far.bandwidth)
            case _:  # permute, send, recv
                return self.alpha + whole / (self.near if self.nodes == 1 else self.far).bandwidth


def _whole(m: Move, op: Comm) -> float:
    sized = [math.prod(sizes) * b.type.dtype.itemsize for b, sizes in zip((*op.ins, *op.outs), m.sizes, strict=True)]
    if op.kind != "alltoallv" or m.counts is None:
        return float(max(sized, default=0))
    rows = max(sum(_most(c) for c in counts) for counts in m.counts)
    return float(rows * math.prod(m.sizes[0][1:]) * op.ins[0].type.dtype.itemsize)


def _most(count: PerRank) -> int:
    return count if isinstance(count, int) else int(count.max())


def _use_bytes(m: Move) -> float:
    return float(sum(u.layout.numel * u.root.buffer.type.dtype.itemsize for u in m.uses))


def _peer(m: Move) -> int | None:
    return next((u.peer for u in m.uses if u.peer is not None), None)


def _path(m: Move) -> str:
    """What a copy goes through: ``local``, ``host`` or ``peer``."""
    if _peer(m) is not None:
        return "peer"
    return "host" if any(u.root.buffer.type.memory == "host" for u in m.uses) else "local"
