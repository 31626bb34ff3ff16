"""The host IR: ordered statements over buffers. Nine node kinds, frozen, a closed union; every ``match`` over it ends in ``assert_never``.

A buffer is bound once (by a parameter, an ``Alloc`` or a ``View``) and then written by ``Call`` and ``Comm``; a buffer on both
sides of the arrow is updated in place. Program order is the meaning; streams and syncs are only permission to overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, TypeAlias, assert_never

from hostir.errors import Location
from hostir.graph.fusion import Fusion
from hostir.types import Dim, Operand, Predicate, TensorType, Tree, Var

# ------------------------------------------------------------------------------------------------------------------- values


class Buffer:
    """Memory that a program names. Identity is identity; a view knows its ``base`` and the one ``op`` that leads from it."""

    __slots__ = ("base", "name", "op", "type")

    def __init__(self, name: str, type: TensorType, base: Buffer | None = None, op: ViewOp | None = None) -> None:
        self.name = name
        self.type = type
        self.base = base
        self.op = op

    @property
    def root(self) -> Buffer:
        b = self
        while b.base is not None:
            b = b.base
        return b

    def path(self) -> tuple[ViewOp, ...]:
        """The view operations from the root to here."""
        ops: list[ViewOp] = []
        b = self
        while b.base is not None and b.op is not None:
            ops.append(b.op)
            b = b.base
        return tuple(reversed(ops))

    def __repr__(self) -> str:
        return f"<Buffer %{self.name}: {self.type}>"


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """A lane of execution; ``main`` is the caller's current stream. Same name and index = same stream."""

    name: str
    index: Operand | None = None


MAIN: Final = Stream("main")


class Event:
    """The latest execution in this run of the statement that carries it. Identity is identity."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A HostUnit: a named Fusion that a program calls."""

    name: str
    fusion: Fusion


# --------------------------------------------------------------------------------------------------------------- view operations


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """``a : b`` of an index."""

    start: Operand
    stop: Operand


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """``[item, …]``: None keeps a dimension, a number selects, a ``Span`` narrows. Missing items at the end keep theirs."""

    items: tuple[Operand | Span | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Transpose:
    """``.T``: the dimensions in reverse."""


@dataclass(frozen=True, slots=True, eq=False)
class Reshape:
    dims: tuple[Dim, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Permute:
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Expand:
    dims: tuple[Dim, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """The same symmetric buffer on another rank of the mesh."""

    rank: Operand


ViewOp: TypeAlias = Index | Transpose | Reshape | Permute | Expand | Peer

# ---------------------------------------------------------------------------------------------------------------- statements


@dataclass(frozen=True, slots=True, eq=False)
class Alloc:
    """A buffer; in a loop body a new one each trip. ``init`` fills it; None leaves it unwritten."""

    out: Buffer
    init: float | int | bool | None = None
    loc: Location | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    buffer: Buffer
    loc: Location | None = None


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """``out`` is an alias of ``source``; moves nothing."""

    out: Buffer
    source: Buffer
    op: ViewOp
    loc: Location | None = None


Argument: TypeAlias = Buffer | Operand | bool


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Run a unit into ``outs``. It reads all its inputs before it writes any output."""

    outs: tuple[Buffer, ...]
    unit: Unit
    args: tuple[Argument, ...]
    stream: Stream = MAIN
    event: Event | None = None
    awaits: Buffer | None = None
    loc: Location | None = None


Team: TypeAlias = tuple[str, ...] | tuple[int, ...] | None
Counts: TypeAlias = tuple[Operand, ...] | Buffer


@dataclass(frozen=True, slots=True, eq=False)
class Comm:
    """One communication, over mesh axes (names), a static list of ranks, or the whole mesh (None). Peers are team positions."""

    kind: str
    outs: tuple[Buffer, ...] = ()
    ins: tuple[Buffer, ...] = ()
    op: str = "sum"
    dim: int = 0
    split: int = 0
    cat: int = 0
    to: Operand | None = None
    source: Operand | None = None
    send: Counts | None = None
    recv: Counts | None = None
    value: Operand | None = None
    team: Team = None
    stream: Stream = MAIN
    event: Event | None = None
    loc: Location | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Comms of one team, with no data flow among them, that progress together; views may stand between them."""

    body: tuple[Comm | View, ...]
    stream: Stream = MAIN
    loc: Location | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sync:
    """``to`` waits for all that is queued so far on ``what`` (a stream), or for the latest execution of ``what`` (an event)."""

    what: Stream | Event
    to: Stream
    loc: Location | None = None


@dataclass(frozen=True, slots=True, eq=False)
class For:
    var: Var
    start: Operand
    stop: Operand
    step: Operand
    body: tuple[Stmt, ...]
    loc: Location | None = None


@dataclass(frozen=True, slots=True, eq=False)
class If:
    cond: Predicate
    then: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...] = ()
    loc: Location | None = None


Stmt: TypeAlias = Alloc | Free | View | Call | Comm | Group | Sync | For | If

# ------------------------------------------------------------------------------------------------------------------- program


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis of a program; no size: any."""

    name: str
    size: int | None = None


@dataclass(frozen=True, eq=False)
class ProgramData:
    """The fields of a finished program."""

    name: str
    params: tuple[Buffer | Var, ...] = ()
    inout: frozenset[Buffer] = frozenset()
    axes: tuple[Axis, ...] = ()
    scheduled: bool = False
    body: tuple[Stmt, ...] = ()
    results: tuple[Buffer, ...] = ()
    note: str = field(default="", repr=False)


class Program:
    """A host program. Equality and hash are those of its canonical text; ``parse(str(p)) == p``."""

    def __init__(self, data: ProgramData) -> None:
        self._data = data
        self._text: str | None = None

    @property
    def data(self) -> ProgramData:
        return self._data

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def params(self) -> tuple[Buffer | Var, ...]:
        return self.data.params

    @property
    def inout(self) -> frozenset[Buffer]:
        return self.data.inout

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.data.axes

    @property
    def scheduled(self) -> bool:
        return self.data.scheduled

    @property
    def body(self) -> tuple[Stmt, ...]:
        return self.data.body

    @property
    def results(self) -> tuple[Buffer, ...]:
        return self.data.results

    def with_(self, **changes: Any) -> Program:
        """A new program with some fields replaced (see ``ProgramData``)."""
        return Program(replace(self.data, **changes))

    def __str__(self) -> str:
        if self._text is None:
            from hostir.ir.show import show

            self._text = show(self)
        return self._text

    def __repr__(self) -> str:
        return f"<Program @{self.name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


# ------------------------------------------------------------------------------------------------------------ walking the tree


def blocks(s: Stmt) -> tuple[tuple[Stmt, ...], ...]:
    """The blocks inside a statement."""
    match s:
        case For():
            return (s.body,)
        case If():
            return (s.then, s.orelse)
        case Group():
            return (s.body,)
        case Alloc() | Free() | View() | Call() | Comm() | Sync():
            return ()
        case _:
            assert_never(s)


def every(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Every statement, outer before inner, in text order."""
    for s in body:
        yield s
        for inner in blocks(s):
            yield from every(inner)


def reads(s: Stmt) -> tuple[Buffer, ...]:
    """The buffers whose contents a statement (not its inner blocks) reads."""
    match s:
        case Call():
            flags = () if s.awaits is None else (s.awaits,)
            return (*(a for a in s.args if isinstance(a, Buffer)), *flags)
        case Comm():
            counts = tuple(c for c in (s.send, s.recv) if isinstance(c, Buffer))
            return () if s.kind == "signal" else (*s.ins, *counts)
        case Alloc() | Free() | View() | Sync() | For() | If() | Group():
            return ()
        case _:
            assert_never(s)


def writes(s: Stmt) -> tuple[Buffer, ...]:
    """The buffers that a statement (not its inner blocks) writes."""
    match s:
        case Call() | Comm():
            return s.outs
        case Alloc():
            return () if s.init is None else (s.out,)
        case Free() | View() | Sync() | For() | If() | Group():
            return ()
        case _:
            assert_never(s)


def trees(s: Stmt) -> Iterator[Tree]:
    """The host expressions in a statement itself."""
    match s:
        case Alloc():
            yield from s.out.type.dims
        case View():
            yield from view_trees(s.op)
        case Call():
            yield from (a for a in s.args if not isinstance(a, Buffer))
            yield from stream_trees(s.stream)
        case Comm():
            yield from (e for e in (s.to, s.source, s.value) if e is not None)
            for counts in (s.send, s.recv):
                if isinstance(counts, tuple):
                    yield from counts
            yield from stream_trees(s.stream)
        case Group():
            yield from stream_trees(s.stream)
        case Sync():
            for end in (s.what, s.to):
                if isinstance(end, Stream):
                    yield from stream_trees(end)
        case For():
            yield from (s.start, s.stop, s.step)
        case If():
            yield s.cond
        case Free():
            return
        case _:
            assert_never(s)


def whole_numbers(s: Stmt) -> Iterator[Tree]:
    """Those of ``trees(s)`` that must be integers: all but a call's arguments and a branch's condition."""
    match s:
        case Call():
            yield from stream_trees(s.stream)
        case If():
            return
        case _:
            yield from trees(s)


def stream_trees(stream: Stream) -> Iterator[Tree]:
    if stream.index is not None:
        yield stream.index


def view_trees(op: ViewOp) -> Iterator[Tree]:
    match op:
        case Index(items):
            for item in items:
                if isinstance(item, Span):
                    yield from (item.start, item.stop)
                elif item is not None:
                    yield item
        case Reshape(dims) | Expand(dims):
            yield from dims
        case Peer(rank):
            yield rank
        case Transpose() | Permute():
            return
        case _:
            assert_never(op)


def rewrite(body: tuple[Stmt, ...], change: Callable[[Stmt], list[Stmt]]) -> tuple[Stmt, ...]:
    """Bottom-up: inner blocks first, then ``change(statement)`` gives what stands in its place."""
    out: list[Stmt] = []
    for s in body:
        match s:
            case For():
                s = replace(s, body=rewrite(s.body, change))
            case If():
                s = replace(s, then=rewrite(s.then, change), orelse=rewrite(s.orelse, change))
            case Group():
                s = replace(s, body=rewrite(s.body, change))  # type: ignore[arg-type]
            case Alloc() | Free() | View() | Call() | Comm() | Sync():
                pass
            case _:
                assert_never(s)
        out += change(s)
    return tuple(out)
