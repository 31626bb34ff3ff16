"""Statements under construction: blocks, views made once in each block, names. What ``emit`` writes a program with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from hostir.errors import Location
from hostir.ir.nodes import (
    MAIN,
    Alloc,
    Buffer,
    Call,
    Comm,
    Expand,
    For,
    Group,
    If,
    Index,
    Permute,
    Reshape,
    Span,
    Stmt,
    Stream,
    Transpose,
    Unit,
    View,
    ViewOp,
    view_trees,
)
from hostir.ir.views import view_type
from hostir.types import Dim, Operand, Predicate, TensorType, Var, binary, dims_equal, key, simplify

COMM: Stream = Stream("comm")


class _Block:
    def __init__(self) -> None:
        self.body: list[Stmt] = []
        self.views: dict[object, Buffer] = {}


class Writer:
    """``stream`` is where calls go, ``comm_stream`` where communications go."""

    def __init__(self) -> None:
        self._blocks = [_Block()]
        self.stream = MAIN
        self.comm_stream = COMM
        self.loc: Location | None = None
        self.allocated: set[int] = set()

    @property
    def body(self) -> tuple[Stmt, ...]:
        (top,) = self._blocks
        return tuple(top.body)

    def add(self, s: Stmt) -> None:
        self._blocks[-1].body.append(s)
        if isinstance(s, Alloc):
            self.allocated.add(id(s.out))

    # ---- buffers and views

    def alloc(self, name: str, t: TensorType, init: float | int | bool | None = None) -> Buffer:
        b = Buffer(name, t)
        self.add(Alloc(b, init, self.loc))
        return b

    def view(self, b: Buffer, op: ViewOp, name: str = "v") -> Buffer:
        """``b`` seen through ``op``; the same view of the same buffer in this block or an outer one is the same."""
        at = (id(b), *_key(op))
        for block in reversed(self._blocks):
            if at in block.views:
                return block.views[at]
        out = Buffer(name, view_type(b.type, op), b, op)
        self.add(View(out, b, op, self.loc))
        self._blocks[-1].views[at] = out
        return out

    def narrow(self, b: Buffer, dim: int, start: Operand, size: Dim) -> Buffer:
        """``size`` elements of dimension ``dim`` from ``start`` on; ``b`` itself where that is all of it."""
        if isinstance(start, int) and start == 0 and dims_equal(size, b.type.dims[dim]) is True:
            return b
        return self.spans(b, {dim: (start, size)})

    def spans(self, b: Buffer, where: Mapping[int, tuple[Operand, Dim]]) -> Buffer:
        """Several dimensions narrowed in one view."""
        if not where:
            return b
        items: list[Span | None] = [None] * (max(where) + 1)
        for d, (start, size) in where.items():
            items[d] = Span(start, _stop(start, size))
        return self.view(b, Index(tuple(items)))

    def select(self, b: Buffer, index: Operand) -> Buffer:
        return self.view(b, Index((index,)))

    def reshape(self, b: Buffer, dims: Sequence[Dim]) -> Buffer:
        return self.view(b, Reshape(tuple(dims)))

    # ---- statements

    def call(self, unit: Unit, args: Sequence[Buffer | Operand | bool], outs: Sequence[Buffer]) -> None:
        self.add(Call(tuple(outs), unit, tuple(args), self.stream, None, None, self.loc))

    def comm(self, kind: str, out: Buffer | None, x: Buffer | None, **fields: object) -> None:
        stream = self.stream if kind == "copy" else self.comm_stream
        outs, ins = () if out is None else (out,), () if x is None else (x,)
        self.add(Comm(kind, outs, ins, stream=stream, loc=self.loc, **fields))  # type: ignore[arg-type]

    def copy(self, x: Buffer, out: Buffer) -> None:
        self.comm("copy", out, x)

    @contextmanager
    def loop(self, name: str, trips: Dim) -> Iterator[Var]:
        var = Var(name)
        with self._inner() as body:
            yield var
        self.add(For(var, 0, trips, 1, tuple(body), self.loc))

    @contextmanager
    def group(self) -> Iterator[None]:
        with self._inner() as body:
            yield
        self.add(Group(tuple(body), self.comm_stream, self.loc))  # type: ignore[arg-type]

    @contextmanager
    def when(self, cond: Predicate) -> Iterator[None]:
        with self._inner() as body:
            yield
        if body:
            self.add(If(cond, tuple(body), (), self.loc))

    @contextmanager
    def otherwise(self) -> Iterator[None]:
        """The other branch of the ``when`` written just before."""
        with self._inner() as body:
            yield
        last = self._blocks[-1].body.pop()
        assert isinstance(last, If)
        self.add(If(last.cond, last.then, tuple(body), last.loc))

    @contextmanager
    def _inner(self) -> Iterator[list[Stmt]]:
        block = _Block()
        self._blocks.append(block)
        yield block.body
        self._blocks.pop()


def _stop(start: Operand, size: Dim) -> Operand:
    """start + size, as short as it goes: ``min(a, n) + (min(b, n) - min(a, n))`` is ``min(b, n)``."""
    return simplify(binary("+", start, size))


def _key(op: ViewOp) -> tuple[object, ...]:
    if isinstance(op, Index):
        return ("index", *(("span", key(i.start), key(i.stop)) if isinstance(i, Span) else None if i is None else key(i) for i in op.items))
    if isinstance(op, Permute):
        return ("permute", *op.order)
    return (type(op).__name__, *(key(e) for e in view_trees(op)))


def is_dense(b: Buffer, roots: set[int]) -> bool:
    """Whether the elements of ``b`` are known to lie one after the other: it is one of ``roots`` (by id), or leading parts of one."""
    while b.base is not None:
        op = b.op
        if isinstance(op, Index):
            items = list(op.items)
            while items and items[0] is not None and not isinstance(items[0], Span):
                items.pop(0)
            if any(i is not None for i in items[1:]):
                return False
        elif isinstance(op, (Transpose, Permute, Expand)):
            return False
        b = b.base
    return id(b) in roots
