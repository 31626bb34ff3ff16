"""Ranks that take the same path are walked once.

Most programs run the same statements on every rank and differ only in where a view starts and whom a message goes to. A cohort is a
set of ranks that take every branch, count every loop and choose every stream and size alike: one dry run stands for all of them, and
what differs is kept as one number a rank. A rank that deviates leaves and is walked in a later cohort, so nothing is ever guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, assert_never

import numpy as np

from hostir.errors import HostIrError, InputError, VerifyError
from hostir.ir.diagnostics import loops_of
from hostir.ir.moves import Cohort, Mask, Move, PerRank, Use, apart, is_wide, kept, narrow, one_sided
from hostir.ir.nodes import (
    Alloc,
    Buffer,
    Call,
    Comm,
    For,
    Free,
    Group,
    If,
    Index,
    Peer,
    Program,
    Span,
    Sync,
    Team,
    View,
    every,
    stream_trees,
    trees,
)
from hostir.ir.teams import Ints, Teams
from hostir.ir.walk import Region, Scope, Step, Walker
from hostir.mesh import Mesh
from hostir.types import Bin, Both, Cmp, Either, Epoch, Expr, Negated, Operand, Predicate, Rank, Size, Sym, Tree, Truth, Var, leaves

__all__ = ["Cohort", "Mask", "Move", "PerRank", "Use", "cohorts", "one_sided"]


class _Deviation(Exception):
    """A value that cannot be computed for all ranks at once."""


class _Scope(Scope):
    """Values on the first rank; each is compared with its values on the others, and who differs leaves."""

    def __init__(self, teams: Teams, ranks: Sequence[int], dims: Mapping[str, int], scalars: Mapping[Var, Any], free: frozenset[int]) -> None:
        super().__init__(teams.mesh, ranks[0], dims, scalars)
        self.ranks = ranks
        self.teams = teams
        self.alive: Mask = np.ones(len(ranks), np.bool_)
        self.alone = len(ranks) == 1
        self._free = free
        self._depends: dict[int, tuple[Tree, bool]] = {}
        self._columns: dict[str, Ints] = {}
        self._positions: dict[Team, Ints] = {}
        self._teams: dict[Team, tuple[int, ...]] = {}

    # ---- what Scope answers

    def value(self, e: Tree) -> Any:
        found = super().value(e)
        self._same(e, found)
        return found

    def number(self, e: Operand) -> int:
        if type(e) is int:
            return e
        found = int(super().value(e))
        if id(e) not in self._free:
            self._same(e, found)
        return found

    def team(self, c: Comm) -> tuple[int, ...]:
        if c.kind in ("copy", "wait"):
            return (self.rank,)
        if c.team not in self._teams:
            self._teams[c.team] = self.teams.of(c.team, self.rank)
        return self._teams[c.team]

    # ---- the other ranks

    def keep(self, those: Mask) -> None:
        """The others leave."""
        self.alive &= those
        self.alone = not self.alive[1:].any()

    def _same(self, e: Tree, mine: Any) -> None:
        if (values := self.vector(e)) is not None:
            self.keep(values == mine)

    def vector(self, e: Tree) -> Ints | None:
        """The value on each rank, or None where it is the same on all."""
        if self.alone or not isinstance(e, (Expr, Predicate)):
            return None
        known = self._depends.get(id(e))
        if known is None:
            known = self._depends[id(e)] = (e, any(isinstance(leaf, Rank) for leaf in leaves(e)))
        if not known[1]:
            return None
        try:
            found = self._vector(e)
        except _Deviation:
            return self._one_by_one(e)
        return found if isinstance(found, np.ndarray) else np.full(len(self.ranks), found)

    def _one_by_one(self, e: Tree) -> Ints:
        """For expressions that divide by zero somewhere: such a rank leaves, and its own walk says what happens there."""
        values = np.zeros(len(self.ranks), np.int64)
        for i, rank in enumerate(self.ranks):
            scope = Scope(self.mesh, rank, self._dims, self.vars)
            try:
                values[i] = int(scope.value(e))
            except VerifyError:
                self.alive[i] = False
        return values

    def _vector(self, e: Tree) -> Any:
        match e:
            case Rank(axis):
                if axis not in self._columns:
                    self._columns[axis] = self.teams.coordinates(axis, self.ranks)
                return self._columns[axis]
            case Var() | Sym() | Size() | Epoch():
                return self.leaf(e)
            case Bin(op, a, b):
                return _arithmetic(op, self._vector(a), self._vector(b))
            case Cmp(op, a, b):
                return _COMPARE[op](self._vector(a), self._vector(b))
            case Both(a, b):
                return np.logical_and(self._vector(a), self._vector(b))
            case Either(a, b):
                return np.logical_or(self._vector(a), self._vector(b))
            case Negated(a):
                return np.logical_not(self._vector(a))
            case Truth(v):
                return self.leaf(v) if isinstance(v, Var) else v
            case _:
                return e

    def positions(self, team: Team) -> Ints:
        if team not in self._positions:
            self._positions[team] = self.teams.positions(team, self.ranks)
        return self._positions[team]


_COMPARE: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "==": np.equal, "!=": np.not_equal, "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
}  # fmt: skip


def _arithmetic(op: str, a: Any, b: Any) -> Any:
    if op in ("//", "%") and not np.all(b):
        raise _Deviation
    match op:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "//":
            return a // b
        case "%":
            return a % b
        case "min":
            return np.minimum(a, b)
        case _:
            return np.maximum(a, b)


class _Recorder:
    """One dry run of the first of ``ranks``; the others follow until they deviate."""

    def __init__(self, p: Program, scope: _Scope, loops: Mapping[int, tuple[Var, ...]]) -> None:
        self.scope = scope
        self.walker = Walker(p, scope)
        self.program = p
        self._loops = loops
        self._offsets: dict[int, Ints | None] = {}
        self._peers: dict[int, Ints | None] = {}
        self._wide: list[int] = []  # moves in which ranks differ

    def run(self) -> Cohort:
        scope, moves = self.scope, list[Move]()
        error: HostIrError | None = None
        try:
            for step in self.walker.steps():
                at = tuple([scope.vars[v] for v in self._loops[id(step.op)]])
                m = self._move(step, at)
                if not scope.alone and is_wide(m):
                    self._wide.append(len(moves))
                moves.append(m)
        except InputError:
            raise
        except HostIrError as e:
            error = e
        except ZeroDivisionError:
            error = VerifyError("division by zero in a host expression", program=self.program.name, rank=scope.rank)
        if error is not None:
            scope.alive[1:] = False
        results = () if error is not None else tuple(self._use(b, self.walker.region(b), False) for b in self.program.results)
        keep = np.flatnonzero(scope.alive)
        ranks = tuple(scope.ranks[int(i)] for i in keep)
        if len(keep) < len(scope.ranks):
            for i in self._wide:
                moves[i] = narrow(moves[i], keep)
            results = tuple(kept(results, keep))
        return Cohort(ranks, tuple(moves), results, error, dict(scope.vars))

    def _use(self, b: Buffer, region: Region, write: bool, only: Mask | None = None) -> Use:
        if self.scope.alone:
            return Use(region.root, region.layout, write, None, only, region.peer)
        return Use(region.root, region.layout, write, self._offsets.get(id(b)), only, region.peer, self._peers.get(id(b)))

    def _move(self, step: Step, at: tuple[int, ...]) -> Move:
        s = step.op
        match s:
            case Call():
                uses = [self._use(b, r, False) for b, r in zip(_buffers(s), step.reads, strict=True)]
                uses += [self._use(b, r, True) for b, r in zip(s.outs, step.writes, strict=True)]
                return Move(step, at, tuple(uses))
            case Comm():
                return self._comm(s, step, at)
            case View():
                if not self.scope.alone:
                    self._offsets[id(s.out)] = self._view(s)
                    self._peers[id(s.out)] = self._peer(s)
                return Move(step, at)
            case Alloc():
                region = self.walker.region(s.out)
                self._offsets.pop(id(s.out), None)
                return Move(step, at, (self._use(s.out, region, s.init is not None),))
            case Free():
                return Move(step, at, (self._use(s.buffer, step.writes[0], True),))
            case Group() | Sync():
                return Move(step, at)
            case For() | If():
                raise AssertionError("the walk opens loops and branches")
            case _:
                assert_never(s)

    # ---- where the other ranks' views begin

    def _view(self, s: View) -> Ints | None:
        base = self._offsets.get(id(s.source))
        if not isinstance(s.op, Index):
            return base
        scope, source, out = self.scope, self.walker.region(s.source).layout, self.walker.region(s.out).layout
        offsets: Any = source.offset if base is None else base
        differs = base is not None
        for item, size, stride in zip(s.op.items, source.sizes, source.strides, strict=False):
            if item is None:
                continue
            start = item.start if isinstance(item, Span) else item
            values = scope.vector(start)
            length = 1
            if isinstance(item, Span):
                length = scope.number(item.stop) - scope.number(item.start) if values is None else self._length(item, values)
            if values is None:
                offsets = offsets + int(scope.value(start)) * stride
                continue
            differs = True
            scope.keep((values >= 0) & (values + length <= size))
            offsets = offsets + values * stride
        if not differs:
            return None
        assert offsets[0] == out.offset
        return np.asarray(offsets, np.int64)

    def _peer(self, s: View) -> Ints | None:
        if not isinstance(s.op, Peer):
            return self._peers.get(id(s.source))
        layout = np.array(self.scope.teams.layout)
        if (values := self.scope.vector(s.op.rank)) is None:
            return None
        self.scope.keep((values >= 0) & (values < len(layout)))
        return np.asarray(layout[np.where(self.scope.alive, values, 0)], np.int64)

    def _length(self, item: Span, starts: Ints) -> int:
        stops = self.scope.vector(item.stop)
        lengths = (int(self.scope.value(item.stop)) if stops is None else stops) - starts
        self.scope.keep(lengths == lengths[0])
        return int(lengths[0])

    # ---- communications

    def _comm(self, c: Comm, step: Step, at: tuple[int, ...]) -> Move:
        scope, region = self.scope, self.walker.region
        sizes = tuple(region(b).layout.sizes for b in (*c.ins, *c.outs))
        if scope.alone and c.kind == "signal":
            r = step.writes[0]
            return Move(step, at, (Use(r.root, r.layout, True, None, None, r.peer),), step.to, step.source, step.value, None, sizes)
        if scope.alone:
            buffers = (*c.ins, *(b for b in (c.send, c.recv) if isinstance(b, Buffer)))
            uses = [self._use(b, r, False) for b, r in zip(buffers, step.reads, strict=False)]
            uses += [self._use(b, r, True) for b, r in zip(c.outs, step.writes, strict=False)]
            return Move(step, at, tuple(uses), step.to, step.source, step.value, step.counts, sizes)
        inside = scope.positions(c.team) if c.kind not in ("copy", "wait") else None
        if inside is not None:
            scope.keep((inside >= 0) == (inside[0] >= 0))
        to, source = self._position(c.to, step.to, step.team), self._position(c.source, step.source, step.team)
        read = write = None
        if inside is not None and inside[0] >= 0:
            if c.kind in ("reduce", "gather"):
                write = inside == to
            if c.kind in ("broadcast", "scatter"):
                read = inside == source
        uses = []
        if c.kind == "signal":
            flag = self._use(c.ins[0], step.writes[0], True)
            members = [self.scope.teams.of(c.team, r) for r in scope.ranks]
            at_peer = np.broadcast_to(np.asarray(to), (len(members),))
            uses.append(flag._replace(peers=np.array([m[k] if 0 <= k < len(m) else -1 for m, k in zip(members, at_peer, strict=True)])))
        elif inside is None or inside[0] >= 0:
            uses += [self._use(b, region(b), False, read) for b in c.ins]
            uses += [self._use(b, region(b), False) for b in (c.send, c.recv) if isinstance(b, Buffer)]
            uses += [self._use(b, region(b), True, write) for b in c.outs]
        value: PerRank | None = step.value
        if c.value is not None and (values := scope.vector(c.value)) is not None:
            value = values
        return Move(step, at, tuple(uses), to, source, value, self._counts(c, step), sizes)

    def _position(self, e: Operand | None, mine: int | None, team: tuple[int, ...]) -> PerRank | None:
        if e is None or (values := self.scope.vector(e)) is None:
            return mine
        self.scope.keep((values >= 0) & (values < len(team)))
        return values

    def _counts(self, c: Comm, step: Step) -> tuple[tuple[PerRank, ...], tuple[PerRank, ...]] | None:
        if step.counts is None or not isinstance(c.send, tuple) or not isinstance(c.recv, tuple):
            return None

        def each(exprs: Sequence[Operand], mine: Sequence[int]) -> tuple[PerRank, ...]:
            values = [self.scope.vector(e) for e in exprs]
            return tuple(m if v is None else v for v, m in zip(values, mine, strict=True))

        return each(c.send, step.counts[0]), each(c.recv, step.counts[1])


def _buffers(s: Call) -> tuple[Buffer, ...]:
    read = tuple(a for a in s.args if isinstance(a, Buffer))
    return read if s.awaits is None else (*read, s.awaits)


def cohorts(
    p: Program,
    mesh: Mesh,
    ranks: Sequence[int] | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    scalars: Mapping[str, Any] | None = None,
    teams: Teams | None = None,
) -> list[Cohort]:
    """The dry runs of world ``ranks`` (default: all) of a sized mesh, with as few walks as their differences allow."""
    named = {v.name: v for v in p.params if isinstance(v, Var)}
    given = {named[k]: v for k, v in (scalars or {}).items() if k in named}
    teams = teams or Teams(mesh)
    loops = loops_of(p)
    free = _may_differ(p)
    rest = list(mesh.layout if ranks is None else ranks)
    found = []
    while rest:
        cohort = _Recorder(p, _Scope(teams, rest, dims or {}, given, free), loops).run()
        found += apart(cohort) if one_sided(p) else [cohort]
        done = set(cohort.ranks)
        rest = [r for r in rest if r not in done]
    return found


def _may_differ(p: Program) -> frozenset[int]:
    """Ids of the expressions that ranks of one cohort may evaluate differently: peers, roots, values and counts, used nowhere else."""
    free: set[int] = set()
    bound: set[int] = set()
    for s in every(p.body):
        if isinstance(s, Comm):
            exprs = [s.to, s.source, s.value, *(e for c in (s.send, s.recv) if isinstance(c, tuple) for e in c)]
            free.update(id(e) for e in exprs if isinstance(e, Expr))
            bound.update(id(e) for e in stream_trees(s.stream))
        elif isinstance(s, View) and isinstance(s.op, Peer):
            free.update(id(e) for e in trees(s) if isinstance(e, Expr))
        else:
            bound.update(id(e) for e in trees(s))
    return frozenset(free - bound)
