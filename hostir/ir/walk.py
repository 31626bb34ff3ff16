"""The dry run: what one rank would do, statement by statement, with every number resolved and every buffer a region. No torch.

Tools that need a rank's view (races, agreement of ranks, lifetimes, cost) are loops over these steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, assert_never

from hostir.errors import HostIrError, InputError, VerifyError
from hostir.ir.nodes import (
    Alloc,
    Buffer,
    Call,
    Comm,
    Event,
    For,
    Free,
    Group,
    If,
    Peer,
    Program,
    Stmt,
    Stream,
    Sync,
    View,
    every,
)
from hostir.ir.regions import Layout, OutOfRange, apply, dense
from hostir.mesh import Mesh
from hostir.types import Epoch, Leaf, Operand, Rank, Size, Sym, Tree, Var, evaluate, leaves, show_expr

Lane: TypeAlias = tuple[str, int | None]


@dataclass(frozen=True, slots=True)
class Instance:
    """One life of a root buffer: a body buffer has a new one each trip."""

    buffer: Buffer
    serial: int


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of one root buffer, here or (``peer``) on another rank."""

    root: Instance
    layout: Layout
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One statement as one rank executes it. ``team`` holds world ranks; ``to``, ``source`` are positions in it, ``peer`` the world
    rank of whichever there is. ``group`` is the Group that the step is part of."""

    op: Stmt
    stream: Lane
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    indices: Mapping[str, int] = field(default_factory=dict)
    team: tuple[int, ...] = ()
    to: int | None = None
    source: int | None = None
    value: int | None = None
    counts: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    group: Group | None = None
    waits: Lane | None = None

    @property
    def peer(self) -> int | None:
        at = self.to if self.to is not None else self.source
        return None if at is None else self.team[at]


def resolve_mesh(p: Program, mesh: Mesh | int | Mapping[str, int] | None) -> Mesh:
    """A sized mesh for ``p``: its own sizes, completed by ``mesh`` (an int for one axis, a dict, or a Mesh)."""
    names = tuple(a.name for a in p.axes)
    if not names:
        return mesh if isinstance(mesh, Mesh) else Mesh((mesh if isinstance(mesh, int) else 1,), ("world",))
    given: dict[str, int] = {}
    ranks = None
    if isinstance(mesh, Mesh):
        if mesh.names != names:
            raise InputError("the mesh has other axes than the program", program=p.name, expected=names, got=mesh.names)
        given = dict(zip(names, mesh.sizes, strict=True)) if mesh.shape is not None else {}
        ranks = mesh.ranks
    elif isinstance(mesh, int):
        if len(names) != 1:
            raise InputError(f"the program has {len(names)} mesh axes", program=p.name, cure='give a dict: mesh={"dp": 2, "tp": 4}')
        given = {names[0]: mesh}
    elif mesh is not None:
        given = dict(mesh)
    if unknown := set(given) - set(names):
        raise InputError(f"the program's mesh has no axis {min(unknown)!r}", program=p.name, expected=names)
    sizes = []
    for a in p.axes:
        size = given.get(a.name, a.size)
        if size is None:
            raise InputError(f"the size of mesh axis {a.name!r} is not known", program=p.name, cure="give it: mesh={…}, or a World's mesh")
        if a.size is not None and a.size != size:
            raise InputError(f"mesh axis {a.name!r} has another size", program=p.name, expected=a.size, got=size)
        sizes.append(size)
    return Mesh(tuple(sizes), names, ranks=ranks, world=mesh.world if isinstance(mesh, Mesh) else None)


class Scope:
    """Values of host expressions on one rank during one run."""

    def __init__(
        self, mesh: Mesh, rank: int, dims: Mapping[str, int] | None = None, scalars: Mapping[Var, Any] | None = None, epoch: int = 1
    ) -> None:
        self.mesh = mesh
        self.rank = rank
        self._coordinates = mesh.coordinates(rank)
        self._sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
        self._dims = dict(dims or {})
        self.vars: dict[Var, Any] = dict(scalars or {})
        self._epoch = epoch

    def leaf(self, e: Leaf) -> Any:
        match e:
            case Var():
                if e not in self.vars:
                    raise InputError(f"the host scalar %{e.name} has no value here", cure=f'give it: scalars={{"{e.name}": …}}')
                return self.vars[e]
            case Sym(name):
                if name not in self._dims:
                    raise InputError(f"the size {name} has no value here", cure=f'give it: dims={{"{name}": …}}')
                return self._dims[name]
            case Rank(axis):
                if axis not in self._coordinates:
                    raise InputError(f"rank {self.rank} is no member of the mesh, so rank({axis}) has no value")
                return self._coordinates[axis]
            case Size(axis):
                return self._sizes[axis]
            case Epoch():
                return self._epoch
            case _:
                assert_never(e)

    def value(self, e: Tree) -> Any:
        try:
            return evaluate(e, self.leaf)
        except ZeroDivisionError:
            raise VerifyError(f"division by zero in the host expression {show_expr(e)}") from None

    def number(self, e: Operand) -> int:
        return int(self.value(e))

    def lane(self, s: Stream) -> Lane:
        return (s.name, None if s.index is None else self.number(s.index))

    def team(self, c: Comm) -> tuple[int, ...]:
        """World ranks of a communication's team, in team order."""
        if c.kind in ("copy", "wait"):
            return (self.rank,)
        if c.team is None:
            return self.mesh.layout
        if isinstance(c.team[0], int):
            return tuple(self.mesh.layout[int(r)] for r in c.team) if max(map(int, c.team)) < len(self.mesh.layout) else self._outside(c)
        return self.mesh.team(self.rank, [str(a) for a in c.team])

    def _outside(self, c: Comm) -> tuple[int, ...]:
        raise InputError(f"the rank list {list(c.team or ())} is larger than the world of {len(self.mesh.layout)} ranks")


class Walker:
    """Executes nothing, one rank at a time. Subclass-free: tools read the steps."""

    def __init__(self, p: Program, scope: Scope) -> None:
        self.program = p
        self.scope = scope
        self._regions: dict[int, Region] = {}
        self._serial = 0
        self._indices: dict[Var, int] = {}
        self._index_names: dict[Var, str] = _index_names(p)
        for param in p.params:
            if isinstance(param, Buffer):
                self._root(param)

    def _root(self, b: Buffer) -> Region:
        sizes = tuple(self.scope.number(d) for d in b.type.dims)
        self._serial += 1
        region = Region(Instance(b, self._serial), dense(sizes))
        self._regions[id(b)] = region
        return region

    def region(self, b: Buffer) -> Region:
        """The region of a buffer as it is bound now."""
        return self._regions[id(b)]

    def steps(self) -> Iterator[Step]:
        yield from self._block(self.program.body, None)

    def _block(self, body: tuple[Stmt, ...], group: Group | None) -> Iterator[Step]:
        for s in body:
            try:
                yield from self._statement(s, group)
            except HostIrError as e:
                from hostir.ir.show import statement_text

                text = e.statement or statement_text(self.program, s)
                raise e.with_context(program=self.program.name, statement=text, loc=s.loc, rank=self.scope.rank) from None

    def _statement(self, s: Stmt, group: Group | None) -> Iterator[Step]:
        scope = self.scope
        main: Lane = ("main", None)
        match s:
            case Alloc(out, init):
                region = self._root(out)
                yield self._step(s, main, writes=() if init is None else (region,))
            case Free(buffer):
                yield self._step(s, main, reads=(), writes=(self.region(buffer),))
            case View(out, source, op):
                base = self.region(source)
                peer = scope.mesh.layout[self._peer(scope.number(op.rank))] if isinstance(op, Peer) else base.peer
                self._regions[id(out)] = Region(base.root, apply(base.layout, op, scope.leaf), peer)
                yield self._step(s, main)
            case Call():
                reads = [self.region(a) for a in s.args if isinstance(a, Buffer)]
                if s.awaits is not None:
                    reads.append(self.region(s.awaits))
                yield self._step(s, scope.lane(s.stream), tuple(reads), tuple(self.region(b) for b in s.outs))
            case Comm():
                yield self._comm(s, group)
            case Group():
                yield self._step(s, scope.lane(s.stream))
                yield from self._block(s.body, s)
            case Sync(what, to):
                waits = None if isinstance(what, Event) else scope.lane(what)
                yield self._step(s, scope.lane(to), waits=waits)
            case For():
                step = scope.number(s.step)
                if step < 1:
                    raise VerifyError("a loop's step is at least 1", got=f"{show_expr(s.step)} = {step}")
                for i in range(scope.number(s.start), scope.number(s.stop), step):
                    scope.vars[s.var] = i
                    self._indices[s.var] = i
                    yield from self._block(s.body, None)
                self._indices.pop(s.var, None)
            case If():
                yield from self._block(s.then if scope.value(s.cond) else s.orelse, None)
            case _:
                assert_never(s)

    def _peer(self, position: int) -> int:
        size = len(self.scope.mesh.layout)
        if not 0 <= position < size:
            raise OutOfRange(f"rank {position} is outside the mesh", expected=f"0 .. {size - 1}", got=position)
        return position

    def _step(self, s: Stmt, stream: Lane, reads: tuple[Region, ...] = (), writes: tuple[Region, ...] = (), **more: Any) -> Step:
        return Step(s, stream, reads, writes, {self._index_names[v]: i for v, i in self._indices.items()}, **more)

    def _comm(self, c: Comm, group: Group | None) -> Step:
        scope = self.scope
        team = scope.team(c)
        to, source = position_in(c, team, scope, "to"), position_in(c, team, scope, "source")
        here = team.index(scope.rank) if scope.rank in team else None
        reads = tuple(self.region(b) for b in c.ins)
        writes = tuple(self.region(b) for b in c.outs)
        counts = None
        if isinstance(c.send, tuple) and isinstance(c.recv, tuple):
            counts = (tuple(scope.number(e) for e in c.send), tuple(scope.number(e) for e in c.recv))
        else:
            reads += tuple(self.region(b) for b in (c.send, c.recv) if isinstance(b, Buffer))
        if c.kind in ("reduce", "gather") and here != to:
            writes = ()
        if c.kind in ("broadcast", "scatter") and here != source:
            reads = ()
        if here is None:
            reads = writes = ()
        if c.kind == "signal":
            flag = self.region(c.ins[0])
            reads, writes = (), (Region(flag.root, flag.layout, team[to or 0]),)
        value = None if c.value is None else scope.number(c.value)
        lane = scope.lane(group.stream if group is not None else c.stream)
        return self._step(c, lane, reads, writes, team=team, to=to, source=source, value=value, counts=counts, group=group)


def _index_names(p: Program) -> dict[Var, str]:
    """The loop indices of ``p`` as its text names them."""
    loops = [s.var for s in every(p.body) if isinstance(s, For)]
    if len({v.name for v in loops}) == len(loops):
        return {v: v.name for v in loops}
    from hostir.ir.show import index_names

    return index_names(p)


def position_in(c: Comm, team: tuple[int, ...], scope: Scope, name: str) -> int | None:
    """The value of ``to`` or ``source``, checked against the team."""
    e: Operand | None = getattr(c, name)
    if e is None:
        return None
    position = scope.number(e)
    if not 0 <= position < len(team):
        raise OutOfRange(
            f"`{'from' if name == 'source' else name}` = {position} is not a position in the team",
            expected=f"0 .. {len(team) - 1}",
            got=position,
            cure="peers never wrap: write (rank + 1) % size, or guard the statement with an if",
        )
    return position


def walk(
    p: Program,
    rank: int = 0,
    mesh: Mesh | int | Mapping[str, int] | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    scalars: Mapping[str, Any] | None = None,
) -> Iterator[Step]:
    """The steps of world rank ``rank``. ``mesh`` and ``dims`` give the sizes that the text leaves open, ``scalars`` the host inputs."""
    sized = resolve_mesh(p, mesh)
    if rank not in sized.layout:
        raise InputError(f"rank {rank} is not in the mesh", program=p.name, expected=sized.layout, got=rank)
    named = {v.name: v for v in p.params if isinstance(v, Var)}
    given = {named[k]: v for k, v in (scalars or {}).items() if k in named}
    return Walker(p, Scope(sized, rank, dims, given)).steps()


def symbols(p: Program) -> tuple[str, ...]:
    """The symbols that the inputs of ``p`` bind, in order."""
    found = (leaf.name for b in p.params if isinstance(b, Buffer) for d in b.type.dims for leaf in leaves(d) if isinstance(leaf, Sym))
    return tuple(dict.fromkeys(found))
