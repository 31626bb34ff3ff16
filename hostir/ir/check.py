"""Well-formedness: types fit, names are bound once and in scope, inputs are written only with leave.

One checker serves the builder and the parser (statement by statement, so that the mistake is reported at the line that made it)
and finished programs that a pass has made. What needs values (ranges, races, ranks) is left to the dry run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from hostir.errors import BuildError
from hostir.graph.fusion import Fusion
from hostir.graph.unify import result_types, unify
from hostir.ir.kinds import COMMS, DEFAULTS, MODIFIERS, REDUCTIONS
from hostir.ir.nodes import (
    MAIN,
    Alloc,
    Axis,
    Buffer,
    Call,
    Comm,
    Event,
    Expand,
    For,
    Free,
    Group,
    If,
    Program,
    Stmt,
    Stream,
    Sync,
    Team,
    View,
    blocks,
    reads,
    trees,
    whole_numbers,
    writes,
)
from hostir.ir.views import view_type
from hostir.types import (
    Dim,
    DType,
    Operand,
    Rank,
    Size,
    Sym,
    TensorType,
    Tree,
    Var,
    binary,
    dims_equal,
    is_whole,
    leaves,
    number_text,
    product,
    show_expr,
    simplify,
)


def axis_size(axes: Iterable[Axis], name: str) -> Dim:
    for a in axes:
        if a.name == name:
            return Size(name) if a.size is None else a.size
    names = ", ".join(a.name for a in axes)
    raise BuildError(f"the mesh has no axis {name!r}", expected=names or "a program with a mesh", got=name)


def team_size(axes: tuple[Axis, ...], team: Team) -> Dim:
    """The number of ranks in a team."""
    if team is not None and team and isinstance(team[0], int):
        return len(team)
    names = [a.name for a in axes] if team is None else [str(n) for n in team]
    return product(tuple(axis_size(axes, n) for n in names))


def _divided(d: Dim, by: Dim) -> Dim:
    out = simplify(binary("//", d, by))
    assert not isinstance(out, float)
    return out


def _times(d: Dim, by: Dim) -> Dim:
    return product((d, by))


def _fits(value: float | int | bool, dtype: DType) -> bool:
    """Whether a fill keeps its value: nothing is rounded to an integer, nothing wraps."""
    if not dtype.is_integral:
        return True
    low, high = (0, 1) if dtype.kind == "bool" else (0, 2 ** (8 * dtype.itemsize) - 1)
    if dtype.kind == "int":
        low, high = -(2 ** (8 * dtype.itemsize - 1)), 2 ** (8 * dtype.itemsize - 1) - 1
    return low <= value <= high and value == int(value)


class Checker:
    """Takes statements in text order. ``enter``/``leave`` bracket the block of a loop or branch."""

    def __init__(self, axes: tuple[Axis, ...]) -> None:
        self.axes = axes
        self._scopes: list[set[int]] = [set()]
        self._keep: list[object] = []  # keeps ids alive
        self._freed: set[int] = set()
        self._params: set[int] = set()
        self._inout: set[int] = set()
        self._symbols: set[str] = set()
        self._events: set[int] = set()
        self._awaited: list[tuple[Event, Sync]] = []

    # ---- scopes

    def _bind(self, x: object) -> None:
        if self.bound(x):
            raise BuildError("a buffer is bound once", got=x)
        self._keep.append(x)
        self._scopes[-1].add(id(x))

    def bound(self, x: object) -> bool:
        return any(id(x) in scope for scope in self._scopes)

    def enter(self, *bindings: object) -> None:
        self._scopes.append(set())
        for b in bindings:
            self._bind(b)

    def leave(self) -> None:
        self._scopes.pop()

    def param(self, p: Buffer | Var, *, inout: bool = False) -> None:
        """An input. A bare symbol among its sizes is bound here; any other expression must already be known."""
        if isinstance(p, Buffer):
            if p.base is not None:
                raise BuildError(f"%{p.name} is a view, so it cannot be an input")
            for d in p.type.dims:
                if isinstance(d, Sym):
                    self._symbols.add(d.name)
                else:
                    self._expr(d, f"the sizes of input %{p.name}")
            self._params.add(id(p))
            if inout:
                self._inout.add(id(p))
        self._bind(p)

    def _expr(self, e: Tree, what: str) -> None:
        for leaf in leaves(e):
            if isinstance(leaf, Sym) and leaf.name not in self._symbols:
                raise BuildError(
                    f"nothing binds the symbol {leaf.name} in {what}",
                    cure=f"give an input a size that is {leaf.name} alone, before this statement",
                )
            if isinstance(leaf, Var) and not self.bound(leaf):
                raise BuildError(f"%{leaf.name} is not in scope in {what}", cure="a loop index is known inside its loop only")
            if isinstance(leaf, (Rank, Size)):
                axis_size(self.axes, leaf.axis)

    def use(self, b: Buffer) -> None:
        """``b`` can stand in a statement here."""
        if not self.bound(b):
            raise BuildError(f"%{b.name} is not known here", cure="a buffer made in a loop or branch is known inside it only")
        if id(b.root) in self._freed:
            raise BuildError(f"%{b.name} is used after its memory was freed")

    # ---- statements

    def statement(self, s: Stmt) -> None:
        """Check one statement; for loops, branches and groups only the head."""
        for e in trees(s):
            self._expr(e, "this statement")
        for e in whole_numbers(s):
            if not is_whole(e):
                raise BuildError(f"{show_expr(e)} is not an integer", cure="sizes, indices, ranks and loop bounds are integers: use // instead of /")
        for b in reads(s):
            self.use(b)
        match s:
            case Alloc(out, init):
                if out.base is not None:
                    raise BuildError(f"%{out.name} is a view and cannot be allocated")
                if init is not None and not _fits(init, out.type.dtype):
                    raise BuildError(
                        f"{number_text(init)} does not fit into {out.type}", expected=f"a number that is one of {out.type.dtype}", got=init
                    )
                self._bind(out)
            case Free(buffer):
                self.use(buffer)
                if buffer.base is not None or id(buffer) in self._params:
                    raise BuildError(f"%{buffer.name} cannot be freed here", cure="only what the program allocated is freed, as a whole")
                self._freed.add(id(buffer))
            case View(out, source, op):
                self.use(source)
                want = view_type(source.type, op)
                if out.base is not source or out.type.agrees(want) is False:
                    raise BuildError(f"%{out.name} is not this view of %{source.name}", expected=want, got=out.type)
                self._bind(out)
            case Call():
                self._call(s)
            case Comm():
                self._comm(s)
            case Group():
                self._group(s)
            case Sync(what, to):
                self._stream(to)
                if isinstance(what, Event):
                    self._awaited.append((what, s))
                else:
                    self._stream(what)
            case For():
                if isinstance(s.step, int) and s.step < 1:
                    raise BuildError("a loop's step is at least 1", got=s.step)
            case If():
                pass
            case _:
                assert_never(s)
        for b in writes(s):
            self._write(b)
        if isinstance(s, (Call, Comm)):
            self._stream(s.stream)
            if s.event is not None:
                self._events.add(id(s.event))
                self._keep.append(s.event)

    def _write(self, b: Buffer) -> None:
        self.use(b)
        if id(b.root) in self._params and id(b.root) not in self._inout:
            raise BuildError(
                f"%{b.root.name} is an input and this statement writes it",
                cure=f'declare it so: p.input("{b.root.name}", …, inout=True)',
            )
        if any(isinstance(op, Expand) for op in b.path()):
            raise BuildError(f"%{b.name} is expanded: several of its elements are one, so it cannot be written")

    def _stream(self, s: Stream) -> None:
        if s.name == MAIN.name and s.index is not None:
            raise BuildError("the stream main has no index")

    def _call(self, s: Call) -> None:
        fusion: Fusion = s.unit.fusion
        types: list[TensorType | Operand | bool] = [a.type if isinstance(a, Buffer) else a for a in s.args]
        for b in (*(a for a in s.args if isinstance(a, Buffer)), *s.outs):
            if b.type.memory == "host" and b.type.dims:
                raise BuildError(f"%{b.name} is host memory, which device segments cannot touch", cure="copy it to a device buffer first")
        if not fusion.results:
            raise BuildError(f"@{s.unit.name} computes nothing: it returns no tensor and changes no argument")
        bound = unify(fusion, types, s.unit.name)
        if len(s.outs) != len(fusion.results):
            raise BuildError(f"@{s.unit.name} has {len(fusion.results)} results", expected=len(fusion.results), got=len(s.outs))
        scalars: dict[Var, Operand] = {
            p: a for p, a in zip(fusion.params, s.args, strict=True) if isinstance(p, Var) and not isinstance(a, (Buffer, bool))
        }
        for b, want in zip(s.outs, result_types(fusion, bound, scalars), strict=True):
            if want is not None and b.type.agrees(want) is False:
                raise BuildError(f"@{s.unit.name} does not fit into %{b.name}: an output is neither cast nor broadcast", expected=want, got=b.type)
        if len(set(map(id, s.outs))) != len(s.outs):
            raise BuildError("two results are written into one buffer")

    def _comm(self, s: Comm) -> None:
        if (kind := COMMS.get(s.kind)) is None:
            raise BuildError(f"{s.kind} is no communication", expected=", ".join(COMMS), got=s.kind)
        if len(s.ins) != kind.num_ins or len(s.outs) != kind.num_outs:
            raise BuildError(f"{s.kind} takes {kind.num_ins} inputs and writes {kind.num_outs} buffers")
        for name in MODIFIERS:
            value = getattr(s, name)
            if name in kind.needs and value is None:
                raise BuildError(f"{s.kind} needs `{'from' if name == 'source' else name}`")
            if name not in kind.uses and value is not None and (name not in DEFAULTS or value != DEFAULTS[name]):
                raise BuildError(f"{s.kind} takes no `{'from' if name == 'source' else name}`")
        if s.op not in REDUCTIONS:
            raise BuildError(f"{s.op} is no reduction", expected=", ".join(REDUCTIONS), got=s.op)
        self._team(s)
        for b in (*s.ins, *s.outs):
            if b.type.memory == "host" and s.kind != "copy":
                raise BuildError(f"%{b.name} is host memory, which {s.kind} cannot touch", cure="copy it to a device buffer first")
        if s.kind in ("signal", "wait") and (s.ins[0].type.dtype.name not in ("i32", "i64") or s.ins[0].type.dims):
            raise BuildError(f"{s.kind} needs a flag: a 0-d i32 or i64 buffer", got=s.ins[0].type)
        size = team_size(self.axes, s.team) if s.kind == "alltoallv" else None
        for counts in (s.send, s.recv):
            if isinstance(counts, tuple) and isinstance(size, int) and len(counts) != size:
                raise BuildError("alltoallv counts rows for each member of the team", expected=f"{size} numbers", got=f"{len(counts)} numbers")
            if isinstance(counts, Buffer) and (counts.type.dtype.name != "i64" or len(counts.type.dims) != 1):
                raise BuildError("alltoallv takes its counts from an i64 buffer of one dimension", got=counts.type)
        if s.ins and s.outs:
            self._transfer(s)

    def _team(self, s: Comm) -> None:
        if s.kind in ("copy", "wait"):
            if s.team is not None:
                raise BuildError(f"{s.kind} is local, so it takes no `over`")
            return
        if not self.axes and (s.team is None or not isinstance(s.team[0] if s.team else None, int)):
            raise BuildError(
                f"{s.kind} needs a mesh", cure='hir.Program(name, mesh=hir.Mesh(("tp",))), or a rank list: over=[0, 1]'
            )  # fmt: skip
        if s.team is not None:
            if not s.team or len(set(s.team)) != len(s.team) or any(isinstance(r, int) and r < 0 for r in s.team):
                raise BuildError("a team lists mesh axes or distinct ranks", got=list(s.team))
            if not isinstance(s.team[0], int):
                for name in s.team:
                    axis_size(self.axes, str(name))
            elif self.axes and isinstance(everyone := team_size(self.axes, None), int) and max(s.team) >= everyone:
                raise BuildError(f"rank {max(s.team)} is not in the mesh", expected=f"ranks in 0 .. {everyone - 1}", got=list(s.team))
        size = team_size(self.axes, s.team)
        for name, peer in (("to", s.to), ("from", s.source)):
            if isinstance(peer, int) and (peer < 0 or (isinstance(size, int) and peer >= size)):
                raise BuildError(f"`{name} {peer}` is not a position in the team", expected=f"0 .. {show_expr(binary('-', size, 1))}", got=peer)

    def _transfer(self, s: Comm) -> None:
        source, out = s.ins[0].type, s.outs[0].type
        grows = COMMS[s.kind].grows
        want = list(source.dims)
        for d in (s.dim, s.split, s.cat):
            if not 0 <= d < max(len(want), 1):
                raise BuildError(f"dim {d} is outside a buffer of {len(want)} dimensions", got=source)
        size = team_size(self.axes, s.team) if s.kind != "copy" else 1
        if grows in ("times", "over", "split") and not want:
            # 0-d data counts as one element: [] gathers to [team], and [team] scatters to []
            want = [1]
        if grows == "times":
            want[s.dim] = _times(want[s.dim], size)
        elif grows == "over":
            if isinstance(want[s.dim], int) and isinstance(size, int) and want[s.dim] % size:
                raise BuildError(
                    f"{s.kind} divides dimension {s.dim} evenly", expected=f"a multiple of {size}", got=want[s.dim],
                    cure="pad the dimension, or send the parts with alltoallv",
                )  # fmt: skip
            want[s.dim] = _divided(want[s.dim], size)
            if not out.dims and len(want) == 1:
                if dims_equal(want[0], 1) is False:
                    raise BuildError(f"%{s.outs[0].name} has one element, {s.kind} gives more", expected=source, got=out)
                want = []
        elif grows == "split":
            if isinstance(want[s.split], int) and isinstance(size, int) and want[s.split] % size:
                raise BuildError(f"alltoall divides dimension {s.split} evenly", expected=f"a multiple of {size}", got=want[s.split])
            want[s.split] = _divided(want[s.split], size)
            want[s.cat] = _times(want[s.cat], size)
        elif grows == "rows":
            if not want or not out.dims:
                raise BuildError("alltoallv moves rows, so its buffers have at least one dimension", got=f"{source} and {out}")
            want[0] = out.dims[0]
        expected = TensorType(source.dtype, tuple(want))
        if out.agrees(expected) is False:
            raise BuildError(f"{s.kind} of %{s.ins[0].name} does not fit into %{s.outs[0].name}", expected=expected, got=out)

    def _group(self, s: Group) -> None:
        comms = [c for c in s.body if isinstance(c, Comm)]
        if any(not isinstance(c, (Comm, View)) for c in s.body):
            raise BuildError("a group holds communications and views only")
        if len({c.team for c in comms}) > 1:
            raise BuildError("the communications of a group are of one team", got=", ".join(str(t) for t in {c.team for c in comms}))
        for c in comms:
            if c.kind in ("copy", "signal", "wait", "barrier"):
                raise BuildError(f"{c.kind} does not belong in a group")
            if c.event is not None:
                raise BuildError(
                    "a part of a group has no name of its own: the parts begin and end together", got=f"!{c.event.name}",
                    cure="sync the group's stream, or name a statement after it",
                )  # fmt: skip
            if c.stream is not MAIN and c.stream is not s.stream:
                raise BuildError("the communications of a group run on the group's stream")
            for other in comms:
                if other is not c and any(b in c.outs for b in (*other.ins, *other.outs)):
                    raise BuildError("no data flows inside a group: one part writes what another touches", got=[c.kind, other.kind])

    # ---- the end

    def finish(self, results: Iterable[Buffer]) -> None:
        for b in results:
            if id(b) not in self._scopes[0]:
                raise BuildError(f"%{b.name} cannot be an output: it is bound in a loop or branch", cure="write into a buffer made before it")
            self.use(b)
        for event, sync in self._awaited:
            if id(event) not in self._events:
                raise BuildError(f"no statement is named !{event.name}", loc=sync.loc)


def check_block(checker: Checker, body: tuple[Stmt, ...]) -> None:
    for s in body:
        try:
            checker.statement(s)
            for block in blocks(s):
                checker.enter(*((s.var,) if isinstance(s, For) else ()))
                check_block(checker, block)
                checker.leave()
        except BuildError as e:
            raise e.with_context(loc=s.loc) from None


def check_program(p: Program) -> None:
    """Raise BuildError at the first statement that is not well-formed."""
    checker = Checker(p.axes)
    for param in p.params:
        checker.param(param, inout=param in p.inout)
    check_block(checker, p.body)
    checker.finish(p.results)
