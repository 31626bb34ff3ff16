"""Collectives of a team as pulls out of memory that its members can address.

Every member copies what it gives into its half of the team's workspace, writes the number of the collective into a flag on every other
member, and pulls what it needs from a member once that one's number has come. Halves alternate, and nobody fills a half before
everybody has come to the collective in between, so a fast member never overwrites what a slow one still reads.

Reductions add the members' parts in rank order, as every other transport of this package that reduces by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import torch

from hostir.runtime.comms.fabric import ALIGNMENT, Fabric, Heap, Turn, Window
from hostir.runtime.comms.moves import at_least_1d, part
from hostir.runtime.comms.protocol import CommCall, _nowhere, show_call, wrapped_dim
from hostir.runtime.comms.reduce import ordered

FLAG_BYTES: Final = 64  # flags of different writers are on different cache lines
LEAST_HALF: Final = 1 << 18
ONE_STEP_BYTES: Final = 1 << 20  # an allreduce up to this size pulls everything from everybody, a larger one goes in two steps

Copy: TypeAlias = Callable[[], object]
Pulls: TypeAlias = Sequence[tuple[int, Copy | None]]


class Runner(Protocol):
    """A communication that is bound to its tensors and can run again and again."""

    def run(self) -> None: ...


def num_bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def place_of(call: CommCall) -> Callable[[], str]:
    """Which communication this is, for messages; keeps nothing of ``call`` alive."""
    if call.where is not _nowhere:
        return call.where
    text = show_call(call)
    return lambda: text


class Team:
    """One team's workspace: a flag for each member, and two halves that grow with what is sent."""

    def __init__(self, heap: Heap, ranks: tuple[int, ...]) -> None:
        self.fabric: Fabric = heap.fabric
        self.here = ranks.index(heap.rank)
        self.others = [(self.here + i) % len(ranks) for i in range(1, len(ranks))]
        self.window: Window | None = None
        self._heap = heap
        self._ranks = ranks
        self._header = -(-len(ranks) * FLAG_BYTES // ALIGNMENT) * ALIGNMENT
        self._half = 0
        self.number = 0
        self._first = 0  # number of the last collective before this window
        self._come = [0] * len(ranks)  # up to where each member is known to have come
        self._turn: Turn = heap.fabric.turn()

    def begin(self, size: int, where: Callable[[], str]) -> int:
        """Start the next collective; the offset of a half that is free and holds ``size`` bytes."""
        self._turn.take()
        if self.window is None or size > self._half:
            self._grow(size)
        before = self.number
        if before > self._first:
            for j in self.others:
                self._await(j, before, where)
        self.number = before + 1
        return self._header + (self.number % 2) * self._half

    def publish(self) -> None:
        """What this member gives is in its half: tell the others."""
        for j in self.others:
            self.fabric.write(self._flag(j, self.here), self.number)

    def arrive(self, position: int, where: Callable[[], str]) -> None:
        """Wait until member ``position`` has published."""
        if position != self.here:
            self._await(position, self.number, where)

    def _await(self, position: int, number: int, where: Callable[[], str]) -> None:
        if self._come[position] < number:
            self.fabric.wait(self._flag(self.here, position), number, where)
            self._come[position] = number

    def _flag(self, owner: int, writer: int) -> int:
        assert self.window is not None
        return self.window.address(owner, writer * FLAG_BYTES)

    def _grow(self, size: int) -> None:
        """A window with larger halves. The old one stays as it is: others may still be reading it."""
        half = max(LEAST_HALF, 1 << max(size - 1, 0).bit_length())
        self.window = self._heap.take(self._ranks, self._header + 2 * half, f"a communication of {size} bytes")
        self._half = half
        self._first = self.number


class Collective:
    """One collective of a team, ready to run again and again: what is stored, what is pulled from whom, what is done with it."""

    def __init__(self, team: Team, call: CommCall) -> None:
        self._team = team
        self._where = place_of(call)
        self._layout = _Layout(call, team.here)
        self._copies: dict[tuple[int, int], tuple[Copy | None, Pulls, Copy | None]] = {}

    def run(self) -> None:
        team, size = self._team, self._layout.size
        if size == 0 and not self._layout.is_barrier:
            return
        at = team.begin(size, self._where)
        assert team.window is not None
        key = (team.window.serial, at)
        if (found := self._copies.get(key)) is None:
            if len(self._copies) > 1:  # those of a smaller window
                self._copies.clear()
            found = self._copies[key] = self._layout.bind(team.fabric, team.window, at)
        store, pulls, finish = found
        if store is not None:
            store()
        team.publish()
        for position, pull in pulls:
            team.arrive(position, self._where)
            if pull is not None:
                pull()
        if finish is not None:
            finish()


class _Layout:
    """What one member gives (``size`` bytes of room) and takes in a collective."""

    def __init__(self, call: CommCall, here: int) -> None:
        self.kind = call.kind
        self.here = here
        self.num = len(call.team)
        self.op = call.op
        self.is_barrier = call.kind == "barrier"
        self.x = call.ins[0] if call.ins else None
        self.out = call.outs[0] if call.outs else None
        self.root = call.to if call.kind in ("gather", "reduce") else call.source
        given = self.x if self.x is not None else self.out
        assert given is not None or self.is_barrier
        one = 0 if given is None else num_bytes(given)
        if call.kind == "broadcast":
            assert self.out is not None
            one = num_bytes(self.out)
        if call.kind == "scatter":
            assert self.out is not None
            one = num_bytes(self.out) * self.num
        self.size = one
        self.dim = wrapped_dim(call, call.dim, given) if given is not None else 0
        self.split = wrapped_dim(call, call.split, given) if call.kind == "alltoall" and given is not None else 0
        self.cat = wrapped_dim(call, call.cat, given) if call.kind == "alltoall" and given is not None else 0
        self.order = [here, *((here + i) % self.num for i in range(1, self.num))]

    def bind(self, fabric: Fabric, window: Window, at: int) -> tuple[Copy | None, Pulls, Copy | None]:
        """Store, pulls (by position, own first) and finish, in the half that begins at ``at``."""
        x, out = self.x, self.out
        everybody: Pulls = [(j, None) for j in self.order]

        def half(position: int, like: torch.Tensor, offset: int = 0) -> torch.Tensor:
            return window.at(position, at + offset, like.shape, like.dtype)

        def into(target: torch.Tensor, source: torch.Tensor) -> Copy:
            return fabric.copier(target, source.view(target.shape))

        if self.is_barrier:
            return None, everybody, None
        if self.kind in ("allgather", "gather"):
            assert x is not None
            store = into(half(self.here, x), x)
            if out is None or (self.kind == "gather" and self.here != self.root):
                return store, [], None
            return store, [(j, into(part(out, self.dim, j, self.num), half(j, x))) for j in self.order], None
        if self.kind == "broadcast":
            assert out is not None
            assert self.root is not None
            if self.here != self.root:
                return None, [(self.root, into(out, half(self.root, out)))], None
            assert x is not None
            return into(half(self.here, out), x), [], None if x is out else into(out, half(self.here, out))
        if self.kind == "scatter":
            assert out is not None
            assert self.root is not None
            pull = [(self.root, into(out, half(self.root, out, self.here * num_bytes(out))))]
            if self.here != self.root:
                return None, pull, None
            assert x is not None
            return self._parts(fabric, half(self.here, x).view(-1), x, self.dim), pull, None
        assert x is not None
        if self.kind in ("alltoall", "reduce_scatter"):
            assert out is not None
            dim = self.split if self.kind == "alltoall" else self.dim
            store = self._parts(fabric, half(self.here, x).view(-1), x, dim)
            mine = part(x, dim, self.here, self.num)
            offset = self.here * num_bytes(mine)
            if self.kind == "alltoall":
                return store, [(j, into(part(out, self.cat, j, self.num), half(j, mine, offset))) for j in self.order], None
            sources = [half(j, mine, offset) for j in range(self.num)]
            target = at_least_1d(out)
            return store, everybody, lambda: target.copy_(ordered(sources, self.op))
        assert self.kind in ("allreduce", "reduce")
        store = into(half(self.here, x), x)
        if out is None or (self.kind == "reduce" and self.here != self.root):
            return store, [], None
        all_of_it = [half(j, x) for j in range(self.num)]
        return store, everybody, lambda: out.copy_(ordered(all_of_it, self.op))

    def _parts(self, fabric: Fabric, target: torch.Tensor, x: torch.Tensor, dim: int) -> Copy:
        """Store ``x`` as its equal parts along ``dim``, one after another."""
        length = x.numel() // self.num
        copies = []
        for i in range(self.num):
            piece = part(x, dim, i, self.num)
            copies.append(fabric.copier(target.narrow(0, i * length, length).view(piece.shape), piece))

        def store() -> None:
            for copy in copies:
                copy()

        return store


class LargeAllreduce:
    """Two collectives: every member reduces its chunk of the elements, then pulls the chunks of the others."""

    def __init__(self, team: Team, call: CommCall) -> None:
        self._team = team
        self._x, self._out = call.ins[0], call.outs[0]
        self._op = call.op
        self._where = place_of(call)
        num, numel = len(call.team), self._x.numel()
        length = -(-numel // num)
        self._spans = [(min(i * length, numel), max(min(length, numel - i * length), 0)) for i in range(num)]

    def run(self) -> None:
        team, x, out, size = self._team, self._x, self._out, num_bytes(self._x)
        first = team.begin(size, self._where)
        window = team.window
        assert window is not None

        def chunk(position: int, at: int, span: tuple[int, int]) -> torch.Tensor:
            return window.at(position, at + span[0] * x.element_size(), (span[1],), x.dtype)

        team.fabric.copier(window.at(team.here, first, x.shape, x.dtype), x)()
        team.publish()
        mine = self._spans[team.here]
        for j in team.others:
            team.arrive(j, self._where)
        total = ordered([chunk(j, first, mine) for j in range(len(self._spans))], self._op)
        second = team.begin(size, self._where)
        chunk(team.here, second, mine).copy_(total)
        team.publish()
        landing = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
        for j in (team.here, *team.others):
            team.arrive(j, self._where)
            if self._spans[j][1]:
                team.fabric.copier(landing.narrow(0, *self._spans[j]), chunk(j, second, self._spans[j]))()
        if not out.is_contiguous():
            out.copy_(landing.view(out.shape))


def collective_of(team: Team, call: CommCall) -> Runner:
    """The collective, bound to its tensors."""
    if call.kind == "allreduce" and num_bytes(call.ins[0]) > ONE_STEP_BYTES:
        return LargeAllreduce(team, call)
    return Collective(team, call)
