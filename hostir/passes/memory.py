"""Where memory lives: buffers of loop bodies leave their loop, as few copies of each as the order of the streams allows, and what is
used up is freed.

A body buffer is fresh each trip. It becomes ``k`` copies before the loop, trip i using copy ``i % k``; k is the smallest number for
which a copy's reuse is already ordered. Where none is, a program whose streams are still open gets the syncs for two copies (one
being filled while the other is read), a program taken as written gets a PlanError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, assert_never

from hostir.errors import PlanError
from hostir.graph.fusion import Fusion
from hostir.graph.table import apply
from hostir.ir.nodes import (
    MAIN,
    Alloc,
    Buffer,
    Call,
    Comm,
    For,
    Free,
    Group,
    If,
    Index,
    Program,
    Stmt,
    Stream,
    Sync,
    Unit,
    View,
    blocks,
    every,
    reads,
    writes,
)
from hostir.ir.show import statement_text
from hostir.ir.views import view_type
from hostir.mesh import Mesh
from hostir.passes.streams import add_syncs, first_unordered
from hostir.types import Expr, Operand, TensorType, Var, binary, leaves

MAX_COPIES: Final = 4

Block = tuple[Stmt, ...]


def memory(
    p: Program,
    mesh: Mesh,
    *,
    dims: Mapping[str, int] | None = None,
    scalars: Mapping[str, Any] | None = None,
    may_sync: bool = True,
) -> Program:
    """``p`` (scheduled) with its body buffers before their loops and frees at last uses. ``may_sync``: syncs may be added."""
    skipped: set[int] = set()
    while (found := _innermost(p, skipped)) is not None:
        loop, alloc = found
        if _depends(alloc, loop) or alloc.out.type.memory == "symmetric":  # peers may be at an earlier trip's copy
            skipped.add(id(alloc.out))
            continue
        p = _hoisted(p, loop, alloc, mesh, dims, scalars, may_sync)
    return free_last_uses(p)


def _innermost(p: Program, skipped: set[int]) -> tuple[For | If, Alloc] | None:
    """A loop or branch without inner ones that allocate, and an allocation in it."""

    def find(owner: For | If | None, body: Block) -> tuple[For | If, Alloc] | None:
        for s in body:
            if isinstance(s, (For, If)):
                for inner in blocks(s):
                    if (hit := find(s, inner)) is not None:
                        return hit
        if owner is not None:
            for s in body:
                if isinstance(s, Alloc) and id(s.out) not in skipped:
                    return owner, s
        return None

    return find(None, p.body)


def _depends(alloc: Alloc, owner: For | If) -> bool:
    """Whether the sizes change from trip to trip."""
    return isinstance(owner, For) and any(leaf is owner.var for d in alloc.out.type.dims for leaf in leaves(d))


def _hoisted(
    p: Program, owner: For | If, alloc: Alloc, mesh: Mesh, dims: Mapping[str, int] | None, scalars: Mapping[str, Any] | None, may_sync: bool
) -> Program:
    if isinstance(owner, If):
        return _rotate(p, owner, alloc, 1)
    for k in range(1, (2 if may_sync else MAX_COPIES) + 1):
        candidate = _rotate(p, owner, alloc, k)
        if first_unordered(candidate, mesh, dims=dims, scalars=scalars) is None:
            return candidate
    if not may_sync:
        raise PlanError(
            f"%{alloc.out.name} is reused by later trips, and no sync orders that for up to {MAX_COPIES} copies", program=p.name,
            statement=statement_text(p, alloc), loc=alloc.loc, cure="sync the stream that reads it -> the stream that writes it, in the loop",
        )  # fmt: skip
    return add_syncs(_rotate(p, owner, alloc, 2), mesh, dims=dims, scalars=scalars)


def _rotate(p: Program, owner: For | If, alloc: Alloc, k: int) -> Program:
    """``alloc`` before ``owner``, with ``k`` copies; what it fills is filled at its old place."""
    t = alloc.out.type
    if k == 1:
        whole = alloc.out
        body_for: Block = ()
        swap: dict[int, Buffer] = {}
    else:
        assert isinstance(owner, For)
        whole = Buffer(alloc.out.name, TensorType(t.dtype, (k, *t.dims), t.memory))
        index = Index((_trip(owner, k),))
        part = Buffer(alloc.out.name, view_type(whole.type, index), whole, index)
        body_for = (View(part, whole, index, alloc.loc),)
        swap = {id(alloc.out): part}
    fill: Block = () if alloc.init is None else (_filled(swap.get(id(alloc.out), whole), alloc),)

    def in_owner(body: Block) -> Block:
        at = next((i for i, s in enumerate(body) if s is alloc), None)
        return body if at is None else with_buffers((*body[:at], *body_for, *fill, *body[at + 1 :]), dict(swap))

    def go(body: Block) -> Block:
        out: list[Stmt] = []
        for s in body:
            if s is owner:
                out.append(Alloc(whole, None, alloc.loc))
                out.append(_mapped(s, in_owner))
            else:
                out.append(_mapped(s, go) if isinstance(s, (For, If)) else s)
        return tuple(out)

    return p.with_(body=go(p.body))


def _mapped(s: Stmt, change: Any) -> Stmt:
    if isinstance(s, For):
        return replace(s, body=change(s.body))
    assert isinstance(s, If)
    return replace(s, then=change(s.then), orelse=change(s.orelse))


def _trip(loop: For, k: int) -> Operand:
    """The number of the trip, modulo ``k``."""
    trip: Operand = loop.var
    if isinstance(loop.start, Expr) or loop.start != 0:
        trip = binary("-", trip, loop.start)
    if isinstance(loop.step, Expr) or loop.step != 1:
        trip = binary("//", trip, loop.step)
    return binary("%", trip, k)


def _filled(b: Buffer, alloc: Alloc) -> Call:
    """A call that writes ``alloc``'s initial value, on main as the allocation did."""
    fusion = Fusion("fill")
    params: dict[int, Var] = {}
    sizes: list[Any] = []
    args: list[Any] = []
    for d in alloc.out.type.dims:
        if isinstance(d, Expr):
            n = fusion.scalar("n")
            params[id(n)] = n
            args.append(d)
            sizes.append(n)
        else:
            sizes.append(d)
    fusion.output(apply(fusion, "full", [tuple(sizes), alloc.init], {"dtype": alloc.out.type.dtype}, loc=alloc.loc)[0])
    return Call((b,), Unit("fill", fusion), tuple(args), MAIN, None, None, alloc.loc)


def with_buffers(body: Block, swap: dict[int, Buffer]) -> Block:
    """``body`` with buffers (by id) replaced, and views of them made anew."""

    def of(b: Buffer) -> Buffer:
        return swap.get(id(b), b)

    out: list[Stmt] = []
    for s in body:
        match s:
            case View(o, source, op) if of(source) is not source:
                swap[id(o)] = Buffer(o.name, o.type, of(source), op)
                out.append(replace(s, out=swap[id(o)], source=of(source)))
            case View() | Alloc() | Sync():
                out.append(s)
            case Free():
                out.append(replace(s, buffer=of(s.buffer)))
            case Call():
                args = tuple(of(a) if isinstance(a, Buffer) else a for a in s.args)
                awaits = None if s.awaits is None else of(s.awaits)
                out.append(replace(s, outs=tuple(map(of, s.outs)), args=args, awaits=awaits))
            case Comm():
                send, recv = (of(c) if isinstance(c, Buffer) else c for c in (s.send, s.recv))
                out.append(replace(s, outs=tuple(map(of, s.outs)), ins=tuple(map(of, s.ins)), send=send, recv=recv))
            case Group():
                out.append(replace(s, body=with_buffers(s.body, swap)))  # type: ignore[arg-type]
            case For():
                out.append(replace(s, body=with_buffers(s.body, swap)))
            case If():
                out.append(replace(s, then=with_buffers(s.then, swap), orelse=with_buffers(s.orelse, swap)))
            case _:
                assert_never(s)
    return tuple(out)


# ----------------------------------------------------------------------------------------------------------------------- frees


def free_last_uses(p: Program) -> Program:
    """A ``free`` after the last use of each top-level buffer that only main uses. What other streams use stays until the exit: a free
    on main would have to wait for them. So does symmetric memory, which peers use."""
    kept = {id(b.root) for b in p.results} | {id(s.buffer) for s in every(p.body) if isinstance(s, Free)}
    last: dict[int, int] = {}
    elsewhere: set[int] = set()
    for i, top in enumerate(p.body):
        for b, stream in _touched(top):
            last[id(b.root)] = i
            if stream.name != MAIN.name:
                elsewhere.add(id(b.root))
    frees: dict[int, list[Stmt]] = {}
    for s in p.body:
        if isinstance(s, Alloc) and s.out.type.memory != "symmetric" and id(s.out) not in kept | elsewhere:
            if last.get(id(s.out), len(p.body)) < len(p.body) - 1:
                frees.setdefault(last[id(s.out)], []).append(Free(s.out, s.loc))
    return p.with_(body=tuple(x for i, s in enumerate(p.body) for x in (s, *frees.get(i, ()))))


def _touched(s: Stmt, stream: Stream = MAIN) -> Iterator[tuple[Buffer, Stream]]:
    """The buffers that ``s`` and what is in it use, and on which stream; parts of a group run on the group's."""
    if isinstance(s, (Call, Comm, Group)) and stream is MAIN:
        stream = s.stream
    for b in (*reads(s), *writes(s)):
        yield b, stream
    for inner in blocks(s):
        for part in inner:
            yield from _touched(part, stream)
