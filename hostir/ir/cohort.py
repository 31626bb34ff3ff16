"""Ranks that take the same path are walked once.

Most programs run the same statements on every rank and differ only in where a view starts and whom a message goes to. A cohort is a
set of ranks that take every branch, count every loop and choose every stream and size alike: one dry run stands for all of them, and
what differs is kept as one number a rank. A rank that deviates leaves and is walked in a later cohort, so nothing is ever guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from hostir.errors import HostIrError, InputError, VerifyError
from hostir.ir.diagnostics import loops_of
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
from hostir.ir.regions import Layout
from hostir.ir.teams import Ints, Teams
from hostir.ir.walk import Instance, Region, Scope, Step, Walker
from hostir.mesh import Mesh
from hostir.types import Bin, Both, Cmp, Either, Epoch, Expr, Negated, Operand, Predicate, Rank, Size, Sym, Tree, Truth, Var, leaves

Mask: TypeAlias = npt.NDArray[np.bool_]
PerRank: TypeAlias = int | Ints  # one number for all ranks of a cohort, or one each


class Use(NamedTuple):
    """One region that a statement reads or writes. ``layout`` is the first rank's; where the others begin elsewhere ``offsets`` says
    where; where not all ranks do it (the root of a reduce) ``only`` says which do."""

    root: Instance
    layout: Layout
    write: bool
    offsets: Ints | None = None
    only: Mask | None = None
    peer: int | None = None


class Move(NamedTuple):
    """One statement as a cohort executes it. ``at`` holds the values of the loops around it; an ``alloc`` has the whole buffer as its use.

    Of a communication ``to`` and ``source`` are positions in the team, ``sizes`` those of all its buffers, also where a rank uses none.
    """

    step: Step
    at: tuple[int, ...] = ()
    uses: tuple[Use, ...] = ()
    to: PerRank | None = None
    source: PerRank | None = None
    value: PerRank | None = None
    counts: tuple[tuple[PerRank, ...], tuple[PerRank, ...]] | None = None
    sizes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Cohort:
    """World ``ranks`` and what they do; ``results`` are the regions of the outputs. ``error`` is what stopped the walk of the first
    rank, with loop indices and scalars ``values``: then it is alone and the moves end there."""

    ranks: tuple[int, ...]
    moves: tuple[Move, ...]
    results: tuple[Use, ...]
    error: HostIrError | None = None
    values: Mapping[Var, Any] = field(default_factory=dict)

    @cached_property
    def copies(self) -> dict[Instance, int]:
        """The how-manieth life of its buffer an instance is: the same number on every rank, whatever path it takes."""
        lives: dict[int, int] = {}
        found: dict[Instance, int] = {}
        for m in self.moves:
            if isinstance(m.step.op, Alloc):
                root = m.uses[0].root if m.uses else None
                if root is not None:
                    lives[id(root.buffer)] = lives.get(id(root.buffer), 0) + 1
                    found[root] = lives[id(root.buffer)]
        return found


def one_sided(p: Program) -> bool:
    """Whether ranks touch each other's memory: views of peers, signals."""
    return any((isinstance(s, View) and isinstance(s.op, Peer)) or (isinstance(s, Comm) and s.kind == "signal") for s in every(p.body))


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
        self._wide: list[int] = []  # moves in which ranks differ

    def run(self) -> Cohort:
        scope, moves = self.scope, list[Move]()
        error: HostIrError | None = None
        try:
            for step in self.walker.steps():
                at = tuple([scope.vars[v] for v in self._loops[id(step.op)]])
                m = self._move(step, at)
                if not scope.alone and _is_wide(m):
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
        ranks = tuple(scope.ranks[i] for i in keep)
        if len(keep) < len(scope.ranks):
            for i in self._wide:
                moves[i] = _narrow(moves[i], keep)
            results = tuple(_kept(results, keep))
        return Cohort(ranks, tuple(moves), results, error, dict(scope.vars))

    def _use(self, b: Buffer, region: Region, write: bool, only: Mask | None = None) -> Use:
        offsets = None if self.scope.alone else self._offsets.get(id(b))
        return Use(region.root, region.layout, write, offsets, only, region.peer)

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

    def _length(self, item: Span, starts: Ints) -> int:
        stops = self.scope.vector(item.stop)
        lengths = (int(self.scope.value(item.stop)) if stops is None else stops) - starts
        self.scope.keep(lengths == lengths[0])
        return int(lengths[0])

    # ---- communications

    def _comm(self, c: Comm, step: Step, at: tuple[int, ...]) -> Move:
        scope, region = self.scope, self.walker.region
        sizes = tuple(region(b).layout.sizes for b in (*c.ins, *c.outs))
        if c.kind == "signal":
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
        if inside is None or inside[0] >= 0:
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


def _is_wide(m: Move) -> bool:
    if any(u.offsets is not None or u.only is not None for u in m.uses) or m.counts is not None:
        return True
    return any(isinstance(x, np.ndarray) for x in (m.to, m.source, m.value))


def _pick(x: Any, keep: Ints) -> Any:
    if isinstance(x, np.ndarray):
        return x[keep] if len(keep) > 1 else x[keep[0]].item()
    return x


def _kept(uses: Sequence[Use], keep: Ints) -> list[Use]:
    """The uses of the ranks that stay. The first of them is the first of the whole cohort, so layouts stand."""
    out = []
    for u in uses:
        if u.only is not None and not u.only[keep].any():
            continue
        only = None if u.only is None or u.only[keep].all() else u.only[keep]
        offsets = None if u.offsets is None or len(keep) == 1 else u.offsets[keep]
        out.append(u._replace(only=only, offsets=offsets))
    return out


def _narrow(m: Move, keep: Ints) -> Move:
    counts = None if m.counts is None else (tuple(_pick(c, keep) for c in m.counts[0]), tuple(_pick(c, keep) for c in m.counts[1]))
    return m._replace(uses=tuple(_kept(m.uses, keep)), to=_pick(m.to, keep), source=_pick(m.source, keep), value=_pick(m.value, keep), counts=counts)


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
    alone = one_sided(p)
    found = []
    while rest:
        scope = _Scope(teams, rest[:1] if alone else rest, dims or {}, given, free)
        cohort = _Recorder(p, scope, loops).run()
        found.append(cohort)
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
        else:
            bound.update(id(e) for e in trees(s))
    return frozenset(free - bound)
