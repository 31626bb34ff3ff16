"""Small mistakes, one at a time: every way in which a scheduled program is often got wrong, as a list of changed programs.

Each mutant says what kind of mistake it is and where. Making one may fail (BuildError): then the mistake cannot even be written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from hostir.ir.nodes import (
    MAIN,
    Alloc,
    Buffer,
    Call,
    Comm,
    Event,
    For,
    Free,
    Group,
    If,
    Index,
    Program,
    Span,
    Stmt,
    Stream,
    Sync,
    View,
    blocks,
    every,
    reads,
    writes,
)
from hostir.ir.show import statement_text
from hostir.ir.teams import Teams
from hostir.ir.views import view_type
from hostir.mesh import Mesh
from hostir.types import Both, Cmp, Operand, Predicate, Rank, TensorType, binary, dtype_of

Block: TypeAlias = tuple[Stmt, ...]
MESSAGES: Final = ("send", "recv", "permute")


@dataclass(frozen=True)
class Mutant:
    """``make`` gives the changed program."""

    kind: str
    where: str
    make: Callable[[], Program]


# ---------------------------------------------------------------------------------------------------------------------- editing


def edited(p: Program, change: Callable[[Block], Block]) -> Program:
    """``p`` with ``change`` applied to every block, inner ones first."""

    def go(body: Block) -> Block:
        return change(tuple(_inside(s, go) for s in body))

    return p.with_(body=go(p.body))


def _inside(s: Stmt, go: Callable[[Block], Block]) -> Stmt:
    match s:
        case For():
            inner = go(s.body)
            return s if _same(inner, s.body) else replace(s, body=inner)
        case If():
            then, orelse = go(s.then), go(s.orelse)
            return s if _same(then, s.then) and _same(orelse, s.orelse) else replace(s, then=then, orelse=orelse)
        case Group():
            inner = go(s.body)
            return s if _same(inner, s.body) else replace(s, body=inner)  # type: ignore[arg-type]
        case _:
            return s


def _same(a: Block, b: Block) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def put(p: Program, target: Stmt, new: Sequence[Stmt]) -> Program:
    """``new`` in the place of ``target``."""
    return edited(p, lambda body: tuple(x for s in body for x in (new if s is target else (s,))))


def swapped(p: Program, one: Stmt, other: Stmt) -> Program:
    return edited(p, lambda body: tuple(other if s is one else one if s is other else s for s in body))


def retyped(p: Program, root: Buffer, t: TensorType) -> Program:
    """``root`` with another type, and all its views with what follows."""
    swap: dict[int, Buffer] = {id(root): Buffer(root.name, t)}

    def of(x: Any) -> Any:
        return swap.get(id(x), x) if isinstance(x, Buffer) else x

    def change(s: Stmt) -> Stmt:
        match s:
            case View(out, source, op) if of(source) is not source:
                swap[id(out)] = Buffer(out.name, view_type(of(source).type, op), of(source), op)
                return replace(s, out=swap[id(out)], source=of(source))
            case Alloc():
                return replace(s, out=of(s.out))
            case Free():
                return replace(s, buffer=of(s.buffer))
            case Call():
                return replace(s, outs=tuple(map(of, s.outs)), args=tuple(map(of, s.args)), awaits=of(s.awaits))
            case Comm():
                return replace(s, outs=tuple(map(of, s.outs)), ins=tuple(map(of, s.ins)), send=of(s.send), recv=of(s.recv))
            case For():
                return replace(s, body=tuple(map(change, s.body)))
            case If():
                return replace(s, then=tuple(map(change, s.then)), orelse=tuple(map(change, s.orelse)))
            case Group():
                return replace(s, body=tuple(map(change, s.body)))  # type: ignore[arg-type]
            case _:
                return s

    body = tuple(map(change, p.body))
    return p.with_(
        body=body, params=tuple(map(of, p.params)), results=tuple(map(of, p.results)), inout=frozenset(map(of, p.inout)),
    )  # fmt: skip


def on_rank(p: Program, mesh: Mesh, rank: int) -> Predicate:
    """Whether this is ``rank``."""
    conds: list[Predicate] = [Cmp("==", Rank(a), k) for a, k in mesh.coordinates(rank).items()]
    cond = conds[0]
    for c in conds[1:]:
        cond = Both(cond, c)
    return cond


def again(body: Sequence[Stmt]) -> Block:
    """Copies, without names: an event names one statement."""
    return tuple(replace(s, event=None) if isinstance(s, (Call, Comm)) else replace(s) for s in body)


# --------------------------------------------------------------------------------------------------------------------- mistakes


def mutants(p: Program, mesh: Mesh) -> Iterator[Mutant]:
    """Every mistake of every kind in ``p``, on the sizes of ``mesh``."""
    lanes = list({(s.name, str(s.index)): s for s in _streams(p)}.values())
    for body in _blocks(p.body):
        for i, s in enumerate(body):
            yield from _syncs(p, body, i, s)
            yield from _statements(p, s, lanes)
            yield from _neighbours(p, body, i)
            if isinstance(s, Comm):
                yield from _comms(p, mesh, s)
            if i + 1 < len(body):
                yield from _two_on_one_rank(p, mesh, body, i)
    yield from _buffers(p)


def _blocks(body: Block) -> Iterator[Block]:
    yield body
    for s in body:
        for inner in blocks(s):
            yield from _blocks(inner)


def _streams(p: Program) -> Iterator[Stream]:
    yield MAIN
    for s in every(p.body):
        if isinstance(s, (Call, Comm, Group)):
            yield s.stream


def _syncs(p: Program, body: Block, i: int, s: Stmt) -> Iterator[Mutant]:
    if not isinstance(s, Sync):
        return
    text = statement_text(p, s)
    yield Mutant("drop sync", text, lambda: put(p, s, []))
    if i > 0:
        yield Mutant("sync earlier", text, lambda: swapped(p, s, body[i - 1]))
    else:
        yield Mutant("sync earlier", text, lambda: _out_of_block(p, body, s, before=True))
    if i + 1 < len(body):
        yield Mutant("sync later", text, lambda: swapped(p, s, body[i + 1]))
    else:
        yield Mutant("sync later", text, lambda: _out_of_block(p, body, s, before=False))
    if isinstance(s.what, Event):
        names = [x for x in every(p.body) if isinstance(x, (Call, Comm)) and x.event is s.what]
        for x in names[:1]:
            yield Mutant("drop event", text, lambda x=x: put(p, x, [replace(x, event=None)]))  # type: ignore[misc]
        for x in [x for x in every(p.body) if isinstance(x, (Call, Comm)) and x.event is None and not _in_group(p, x)][:3]:
            yield Mutant("event elsewhere", text, lambda x=x: _move_event(p, names[0], x))  # type: ignore[misc]
    else:
        what = s.what
        yield Mutant("turn sync", text, lambda: put(p, s, [replace(s, what=s.to, to=what)]))


def _in_group(p: Program, x: Stmt) -> bool:
    return any(isinstance(g, Group) and any(part is x for part in g.body) for g in every(p.body))


def _move_event(p: Program, source: Any, target: Any) -> Program:
    p = put(p, source, [replace(source, event=None)])
    return put(p, target, [replace(target, event=source.event)])


def _out_of_block(p: Program, body: Block, s: Stmt, *, before: bool) -> Program:
    """``s`` out of its block, to before or behind the statement that holds it; at the top level it stays."""
    owner = next((o for o in every(p.body) if any(inner is body for inner in blocks(o))), None)
    if owner is None:
        return p
    rest = tuple(x for x in body if x is not s)
    slim = _inside(owner, lambda inner: rest if inner is body else inner)
    return put(p, owner, [replace(s), slim] if before else [slim, replace(s)])


def _statements(p: Program, s: Stmt, lanes: Sequence[Stream]) -> Iterator[Mutant]:
    text = statement_text(p, s) if not isinstance(s, (For, If)) else ""
    match s:
        case Call() | Comm():
            yield Mutant("drop statement", text, lambda: put(p, s, []))
            if not _in_group(p, s):
                for lane in lanes:
                    if (lane.name, str(lane.index)) != (s.stream.name, str(s.stream.index)):
                        yield Mutant("stream", f"{text} on {lane.name}", lambda lane=lane: put(p, s, [replace(s, stream=lane)]))  # type: ignore[misc]
        case Group():
            yield Mutant("drop group", "group", lambda: put(p, s, []))
            yield Mutant("open group", "group", lambda: put(p, s, [replace(c, stream=s.stream) if isinstance(c, Comm) else c for c in s.body]))
        case For():
            yield Mutant("loop", f"%{s.var.name}", lambda: put(p, s, [replace(s, stop=binary("-", s.stop, 1))]))
            yield Mutant("loop", f"%{s.var.name}", lambda: put(p, s, [replace(s, stop=binary("+", s.stop, 1))]))
        case If():
            yield Mutant("drop condition", "", lambda: put(p, s, s.then))
            yield Mutant("drop branch", "", lambda: put(p, s, [replace(s, then=(), orelse=s.orelse)]))
        case View(op=Index(items)):
            for k, item in enumerate(items):
                if item is not None:
                    yield Mutant("index", text, lambda k=k, item=item: _reindexed(p, s, k, item))  # type: ignore[misc]
        case _:
            pass


def _reindexed(p: Program, s: View, k: int, item: Operand | Span) -> Program:
    assert isinstance(s.op, Index)
    more = Span(binary("+", item.start, 1), binary("+", item.stop, 1)) if isinstance(item, Span) else binary("+", item, 1)
    op = Index((*s.op.items[:k], more, *s.op.items[k + 1 :]))
    new = Buffer(s.out.name, view_type(s.source.type, op), s.source, op)
    p = put(p, s, [replace(s, out=new, op=op)])
    return _renamed(p, s.out, new)


def _renamed(p: Program, old: Buffer, new: Buffer) -> Program:
    from hostir.passes.memory import with_buffers

    swap = {id(old): new}
    return p.with_(body=with_buffers(p.body, swap), results=tuple(swap.get(id(b), b) for b in p.results))


def _neighbours(p: Program, body: Block, i: int) -> Iterator[Mutant]:
    """Two statements that stand next to each other (views and syncs between them do not count) change places."""
    s = body[i]
    if not isinstance(s, (Call, Comm, Group)):
        return
    for t in body[i + 1 :]:
        if isinstance(t, (View, Sync)):
            continue
        if isinstance(t, (Call, Comm, Group)):
            both = all(isinstance(x, Comm) and x.kind in MESSAGES for x in (s, t))
            kind, text = "swap messages" if both else "swap statements", f"{statement_text(p, s)} / {statement_text(p, t)}"
            yield Mutant(kind, text, lambda t=t: swapped(p, s, t))  # type: ignore[misc]
        return


def _comms(p: Program, mesh: Mesh, s: Comm) -> Iterator[Mutant]:
    text = statement_text(p, s)
    size = len(Teams(mesh).of(s.team, mesh.layout[0])) if s.kind not in ("copy", "wait") else 1
    for name in ("to", "source"):
        e = getattr(s, name)
        if e is not None:
            yield Mutant("peer", text, lambda e=e, name=name: put(p, s, [replace(s, **{name: _mod(binary("+", e, 1), size)})]))  # type: ignore[misc]
    if s.value is not None:
        yield Mutant("flag value", text, lambda: put(p, s, [replace(s, value=binary("+", s.value or 0, 1))]))
        yield Mutant("flag value", text, lambda: put(p, s, [replace(s, value=binary("-", s.value or 0, 1))]))
    if s.kind in ("allreduce", "reduce", "reduce_scatter"):
        yield Mutant("operation", text, lambda: put(p, s, [replace(s, op="min")]))
    if len(mesh.names) > 1 and s.team is not None and s.kind not in ("copy", "wait"):
        other = next(n for n in mesh.names if (n,) != s.team)
        yield Mutant("team", text, lambda: put(p, s, [replace(s, team=(other,))]))
    if len(mesh.layout) > 1 and not _in_group(p, s):
        for rank in (mesh.layout[0], mesh.layout[-1]):
            cond = on_rank(p, mesh, rank)
            yield Mutant("drop on one rank", text, lambda cond=cond: put(p, s, [If(cond, (), (s,))]))  # type: ignore[misc]
            for name in ("to", "source"):
                e = getattr(s, name)
                if e is not None:
                    wrong = replace(s, event=None, **{name: _mod(binary("+", e, 1), size)})
                    yield Mutant("peer on one rank", text, lambda cond=cond, wrong=wrong: put(p, s, [If(cond, (wrong,), (s,))]))  # type: ignore[misc]
            if s.kind in ("allreduce", "reduce", "reduce_scatter"):
                yield Mutant("operation on one rank", text, lambda cond=cond: put(p, s, [If(cond, again([replace(s, op="min")]), (s,))]))  # type: ignore[misc]


def _mod(e: Operand, n: int) -> Operand:
    return binary("%", e, n)


def _two_on_one_rank(p: Program, mesh: Mesh, body: Block, i: int) -> Iterator[Mutant]:
    """Two communications in the other order on one rank."""
    s = body[i]
    if not isinstance(s, Comm) or s.kind == "copy" or len(mesh.layout) < 2:
        return
    between: list[Stmt] = []
    for t in body[i + 1 :]:
        if isinstance(t, (View, Sync)):
            between.append(t)
            continue
        if isinstance(t, Comm) and t.kind != "copy":
            for rank in (mesh.layout[0], mesh.layout[-1]):
                whole = [x for x in between if isinstance(x, View)]
                syncs = [x for x in between if isinstance(x, Sync)]
                both = If(on_rank(p, mesh, rank), again([t, *syncs, s]), (s, *syncs, t))

                def make(whole: list[Stmt] = whole, both: If = both, t: Stmt = t, between: list[Stmt] = between) -> Program:
                    gone = {id(x) for x in (*between, t)}
                    return edited(p, lambda b: tuple(x for y in b for x in ([*whole, both] if y is s else [] if id(y) in gone else [y])))

                yield Mutant("order on one rank", f"{statement_text(p, s)} / {statement_text(p, t)}", make)
        return


def _buffers(p: Program) -> Iterator[Mutant]:
    roots = [*(b for b in p.params if isinstance(b, Buffer)), *(s.out for s in every(p.body) if isinstance(s, Alloc))]
    for b in roots:
        t = b.type
        other = "i32" if t.dtype.name != "i32" else "i64"
        yield Mutant("dtype", f"%{b.name}", lambda b=b, t=t, other=other: retyped(p, b, TensorType(dtype_of(other), t.dims, t.memory)))  # type: ignore[misc]
        for d in range(len(t.dims)):
            for by in (-1, 1):
                dims = (*t.dims[:d], binary("+", t.dims[d], by), *t.dims[d + 1 :])
                yield Mutant("shape", f"%{b.name}", lambda b=b, t=t, dims=dims: retyped(p, b, TensorType(t.dtype, dims, t.memory)))  # type: ignore[misc]
    top = {id(s.out): s for s in p.body if isinstance(s, Alloc)}
    for b in (s.out for s in top.values()):
        yield from _early_frees(p, b)


def _early_frees(p: Program, b: Buffer) -> Iterator[Mutant]:
    """``free`` before the last statement that uses ``b`` (or at the end of the program: then it is no mistake), on the top level."""
    old = [s for s in p.body if isinstance(s, Free) and s.buffer is b]
    users = [s for s in p.body if any(x.root is b for y in every((s,)) for x in (*reads(y), *writes(y)))]
    for s in users[-2:]:

        def make(s: Stmt = s, *, before: bool = True) -> Program:
            q = put(p, old[0], []) if old else p
            return put(q, s, [Free(b), s] if before else [s, Free(b)])

        yield Mutant("free early", f"%{b.name}", make)
        yield Mutant("free early", f"%{b.name}", lambda make=make: make(before=False))  # type: ignore[misc]
