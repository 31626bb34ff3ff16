"""The builder: Python calls become statements, each with the caller's line, each checked where it is written.

``with hir.Program("name") as p:`` opens a program; leaving the block seals it. A program whose block raised is dead. Views are
made lazily: a handle that nobody uses leaves no trace, one that is used becomes a statement just before its first use in a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from hostir.buffers import Buffer
from hostir.build_comm import Communication, On
from hostir.build_ops import Operations, signature_of
from hostir.errors import BuildError, Location, caller_location
from hostir.graph.fusion import Fusion
from hostir.graph.unify import result_types, unify
from hostir.ir import nodes
from hostir.ir.check import Checker, axis_size, team_size
from hostir.ir.nodes import (
    MAIN,
    Alloc,
    Argument,
    Axis,
    Call,
    Comm,
    Event,
    For,
    Free,
    Group,
    If,
    ProgramData,
    Stmt,
    Stream,
    Sync,
    Unit,
    View,
    ViewOp,
    rewrite,
    view_trees,
)
from hostir.ir.parse import parse_program
from hostir.mesh import Mesh
from hostir.trace import Unit as TracedUnit
from hostir.trace import unit as traced
from hostir.types import Dim, Expr, Operand, Predicate, Rank, Sym, TensorType, Var, as_predicate, binary, dims_of, dtype_of, key


def sym(name: str) -> Sym:
    """A symbolic size, bound by the input that has it as a size of its own."""
    if not name.isidentifier():
        raise BuildError(f"{name!r} cannot name a size", expected="an identifier")
    return Sym(name)


class _Block:
    """Statements under construction, and the views made in them."""

    def __init__(self) -> None:
        self.body: list[Stmt] = []
        self.views: dict[object, nodes.Buffer] = {}


class _Scope:
    """A ``with`` block inside a program: ``opened`` runs at entry and gives what ``as`` binds, ``closed`` runs at a clean exit."""

    def __init__(self, program: Program, opened: Callable[[], Any], closed: Callable[[], None]) -> None:
        self._program = program
        self._opened = opened
        self._closed = closed

    def __enter__(self) -> Any:
        return self._opened()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._closed()


class Branch:
    """What ``with p.if_(…) as br`` binds: ``with br.else_():`` directly after it is the other branch."""

    def __init__(self, program: Program, slot: int, block: _Block) -> None:
        self._program = program
        self._slot = slot
        self._block = block

    def else_(self) -> _Scope:
        return self._program._else(self._block, self._slot)


class Program(Operations, Communication, nodes.Program):
    """A host program under construction, then sealed. See docs/ir.md for what the statements mean.

    ``mesh`` gives axis names and sizes (``hir.Mesh``); ``scheduled`` programs are taken exactly as written, streams and all.
    """

    def __init__(self, name: str = "program", mesh: Mesh | None = None, *, scheduled: bool = False) -> None:
        if not name.isidentifier():
            raise BuildError(f"{name!r} cannot name a program", expected="an identifier", loc=caller_location())
        if mesh is not None and not isinstance(mesh, Mesh):
            raise BuildError("a program's mesh is a hir.Mesh", got=type(mesh).__name__, cure="hir.Mesh.from_torch(device_mesh)")
        axes = () if mesh is None else tuple(Axis(n, None if mesh.shape is None else mesh.shape[i]) for i, n in enumerate(mesh.names))
        Operations.__init__(self)
        nodes.Program.__init__(self, ProgramData(name, axes=axes, scheduled=scheduled))
        self._state = "open"
        self._checker = Checker(axes)
        self._blocks = [_Block()]
        self._params: list[nodes.Buffer | Var] = []
        self._inout: set[nodes.Buffer] = set()
        self._results: list[nodes.Buffer] = []
        self._streams: list[Stream] = [MAIN]
        self._in_group = False
        self._synced: set[Event] = set()
        self._kept: set[Event] = set()

    @staticmethod
    def of(p: nodes.Program) -> Program:
        """A sealed program with the contents of ``p``."""
        out = Program(p.name)
        out._data = p.data
        out._state = "sealed"
        return out

    # ---- life

    @property
    def data(self) -> ProgramData:
        if self._state != "sealed":
            name = self._data.name
            raise BuildError(
                f"the program {name} is {'dead: its with block raised' if self._state == 'dead' else 'still open'}",
                cure="leave the with block first" if self._state == "open" else "build it again",
            )
        return self._data

    @property
    def name(self) -> str:
        return self._data.name

    def __enter__(self) -> Self:
        self._need_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self._state = "dead"
            return
        try:
            self._checker.finish(self._results)
        except BuildError as e:
            self._state = "dead"
            raise e.with_context(program=self.name, loc=caller_location()) from None
        self._seal()

    def _seal(self) -> None:
        keep = self._synced | self._kept

        def drop_event(s: Stmt) -> list[Stmt]:
            return [replace(s, event=None)] if isinstance(s, (Call, Comm)) and s.event is not None and s.event not in keep else [s]

        body = rewrite(tuple(self._blocks[0].body), drop_event)
        self._data = replace(
            self._data, params=tuple(self._params), inout=frozenset(self._inout), body=body, results=tuple(self._results)
        )
        self._state = "sealed"

    def _need_open(self) -> None:
        if self._state != "open":
            cure = "build it again" if self._state == "dead" else "statements are written inside its with block"
            raise BuildError(f"the program {self.name} is {self._state}", program=self.name, cure=cure, loc=caller_location())

    def _usable(self, b: Buffer) -> None:
        if b.program is not self:
            raise BuildError(f"%{b.name} belongs to the program {b.program.name}, not to {self.name}", loc=caller_location())
        self._need_open()

    # ---- statements

    def _add(self, s: Stmt) -> None:
        self._check(s)
        self._blocks[-1].body.append(s)

    def _check(self, s: Stmt) -> None:
        try:
            self._checker.statement(s)
        except BuildError as e:
            from hostir.ir.show import Printer, UnitNames

            text = next(Printer(UnitNames()).lines(s))
            raise e.with_context(program=self.name, statement=text, loc=s.loc) from None

    def _node(self, b: object) -> nodes.Buffer:
        """The buffer behind a handle; a view becomes a statement here unless this block or an outer one has it already."""
        if not isinstance(b, Buffer):
            raise BuildError(f"expected a buffer of this program, not {type(b).__name__}", program=self.name, loc=caller_location())
        self._usable(b)
        if b.node is not None:
            return b.node
        assert b.base is not None and b.op is not None
        base = self._node(b.base)
        at = (id(base), *_op_key(b.op))
        for block in reversed(self._blocks):
            if at in block.views:
                return block.views[at]
        out = nodes.Buffer("v", b.type, base, b.op)
        self._add(View(out, base, b.op, b.loc))
        self._blocks[-1].views[at] = out
        return out

    def _on(self, on: On) -> Stream:
        if on is None:
            return self._streams[-1]
        if self._in_group:
            raise BuildError("inside a group, communications run on the group's stream", program=self.name, loc=caller_location())
        return self.stream(on) if isinstance(on, str) else on

    # ---- values and memory

    def input(self, name: str, shape: object, dtype: object, *, memory: str = "global", inout: bool = False) -> Buffer:
        """A tensor that the caller passes, in the order of declaration. Any strides; ``inout`` allows writing it."""
        self._need_open()
        loc = caller_location()
        node = nodes.Buffer(_identifier(name), _type(shape, dtype, memory))
        self._declare(node, inout, loc)
        return Buffer(self, node.type, node=node)

    def scalar(self, name: str, dtype: type = int) -> Var:
        """A host number (``int``, ``float`` or ``bool``) that the caller passes."""
        self._need_open()
        if dtype not in (int, float, bool):
            raise BuildError("a host scalar is int, float or bool", got=dtype, program=self.name, loc=caller_location())
        v = Var(_identifier(name), "scalar", dtype.__name__)  # type: ignore[arg-type]
        self._declare(v, False, caller_location())
        return v

    def _declare(self, p: nodes.Buffer | Var, inout: bool, loc: Location | None) -> None:
        if len(self._blocks) > 1:
            raise BuildError("inputs are declared at the top of a program, not in a loop or branch", program=self.name, loc=loc)
        if any(q.name == p.name for q in self._params):
            raise BuildError(f"there is an input {p.name!r} already", program=self.name, loc=loc)
        try:
            self._checker.param(p, inout=inout)
        except BuildError as e:
            raise e.with_context(program=self.name, statement=f"input {p.name}", loc=loc) from None
        self._params.append(p)
        if inout and isinstance(p, nodes.Buffer):
            self._inout.add(p)

    def output(self, *buffers: Buffer) -> None:
        """What a run returns, in order: buffers, views, inputs; the same one twice is fine."""
        if len(self._blocks) > 1:
            raise BuildError("outputs are named at the top level of a program", program=self.name, loc=caller_location())
        self._results += [self._node(b) for b in buffers]

    def _alloc(self, t: TensorType, init: float | int | bool | None, name: str | None) -> Buffer:
        self._need_open()
        node = nodes.Buffer(_identifier(name or "t"), t)
        self._add(Alloc(node, init, caller_location()))
        return Buffer(self, t, node=node)

    def empty(self, shape: object, dtype: object, *, memory: str = "global", name: str | None = None) -> Buffer:
        """A buffer that nothing has written yet."""
        return self._alloc(_type(shape, dtype, memory), None, name)

    def zeros(self, shape: object, dtype: object, *, memory: str = "global", name: str | None = None) -> Buffer:
        return self._alloc(_type(shape, dtype, memory), 0, name)

    def full(self, shape: object, value: float | int | bool, dtype: object, *, memory: str = "global", name: str | None = None) -> Buffer:
        if not isinstance(value, (int, float)):
            raise BuildError("a buffer is filled with a Python number", got=value, program=self.name, loc=caller_location())
        return self._alloc(_type(shape, dtype, memory), value, name)

    def free(self, b: Buffer) -> None:
        """Give the memory of a whole allocated buffer back; passes do this at the last use."""
        self._add(Free(self._node(b), caller_location()))

    # ---- compute

    def call(self, unit: Any, *args: Any, out: Any = None, on: On = None, awaits: Buffer | None = None) -> Any:
        """Run a unit (``@hir.unit``, a torch function, a Fusion). Returns its output buffer, or a tuple of them.

        ``out`` is a buffer or a tuple; one that is also an argument is updated in place. Python numbers are constants of the
        unit; loop indices, host expressions and ``p.scalar`` are passed at each run.
        """
        self._need_open()
        loc = caller_location()
        for a in args:
            if isinstance(a, Buffer):
                self._usable(a)
            elif isinstance(a, Predicate):
                raise BuildError("a condition cannot be an argument of a unit", program=self.name, loc=loc, cure="use p.if_")
        try:
            ir_unit = self._unit(unit, args)
        except BuildError as e:
            raise e.with_context(program=self.name, statement=f"call of {_name_of(unit)}", loc=loc) from None
        passed = [a for a in args if isinstance(a, (Buffer, Expr))] if not isinstance(unit, (Fusion, Unit)) else list(args)
        return self._call(ir_unit, passed, out, on, awaits, loc)

    def _call(self, unit: Unit, args: Sequence[Any], out: Any, on: On, awaits: Buffer | None, loc: Location | None) -> Any:
        nodes_in: list[Argument] = [self._node(a) if isinstance(a, Buffer) else a for a in args]
        types = [a.type if isinstance(a, nodes.Buffer) else a for a in nodes_in]
        try:
            bound = unify(unit.fusion, types, unit.name)
        except BuildError as e:
            raise e.with_context(program=self.name, statement=f"call of @{unit.name}", loc=loc) from None
        scalars = {p: a for p, a in zip(unit.fusion.params, nodes_in, strict=True) if isinstance(p, Var) and isinstance(a, (Expr, int, float))}
        wants = result_types(unit.fusion, bound, scalars)
        results = unit.fusion.results
        visible = [r for r in results if not r.hidden]
        given = [] if out is None else list(out) if isinstance(out, (tuple, list)) else [out]
        if out is not None and len(given) != len(visible):
            raise BuildError(
                f"@{unit.name} has {len(visible)} results", expected=len(visible), got=f"{len(given)} outputs",
                program=self.name, statement=f"call of @{unit.name}", loc=loc,
            )  # fmt: skip
        handles: list[Buffer] = []
        outs: list[nodes.Buffer] = []
        for r, want in zip(results, wants, strict=True):
            if r.hidden and r.alias is not None:
                target = nodes_in[unit.fusion.params.index(r.alias)]
                assert isinstance(target, nodes.Buffer)
                outs.append(target)
                continue
            if out is not None:
                handle = given[len(handles)]
            else:
                if want is None:
                    raise BuildError(f"the type of a result of @{unit.name} is known to torch only", cure="give out=", loc=loc)
                node = nodes.Buffer("t", want)
                self._add(Alloc(node, None, loc))
                handle = Buffer(self, want, node=node)
            handles.append(handle)
            outs.append(self._node(handle))
        flag = None if awaits is None else self._node(awaits)
        self._add(Call(tuple(outs), unit, tuple(nodes_in), self._on(on), Event("e"), flag, loc))
        return out if out is not None else handles[0] if len(handles) == 1 else tuple(handles)

    def _unit(self, unit: Any, args: Sequence[Any]) -> Unit:
        if isinstance(unit, Unit):
            return unit
        if isinstance(unit, Fusion):
            return self._units.setdefault(id(unit), Unit(_identifier(unit.name), unit))
        if not callable(unit):
            raise BuildError("a unit is a torch function, @hir.unit or a Fusion", got=type(unit).__name__)
        held = unit if isinstance(unit, TracedUnit) else traced(unit)
        fusion = held.fusion(signature_of(args))
        return self._units.setdefault((id(fusion),), Unit(_identifier(held.name), fusion))

    # ---- structure

    def _inner(self, bindings: Sequence[object], given: Any, close: Callable[[_Block], None]) -> _Scope:
        def opened() -> Any:
            self._checker.enter(*bindings)
            self._blocks.append(_Block())
            return given

        def closed() -> None:
            self._checker.leave()
            close(self._blocks.pop())

        return _Scope(self, opened, closed)

    def loop(self, *bounds: Operand, name: str | None = None) -> _Scope:
        """``loop(stop)``, ``loop(start, stop)`` or ``loop(start, stop, step)``; ``with p.loop(n) as i:``. Zero trips are fine."""
        self._need_open()
        if not 1 <= len(bounds) <= 3:
            raise BuildError("a loop takes stop, or start and stop, or start, stop and step", got=len(bounds), loc=caller_location())
        start, stop = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
        step = bounds[2] if len(bounds) == 3 else 1
        head = For(Var(_identifier(name or "i")), binary("+", start, 0) if isinstance(start, int) else start, stop, step, (), caller_location())
        self._check(head)
        return self._inner([head.var], head.var, lambda block: self._blocks[-1].body.append(replace(head, body=tuple(block.body))))

    def if_(self, condition: Any) -> _Scope:
        """``with p.if_(cond) as br:``, then ``with br.else_():`` or ``with p.else_():`` directly after it."""
        self._need_open()
        head = If(as_predicate(condition), (), (), caller_location())
        self._check(head)
        outer = self._blocks[-1]
        return self._inner((), Branch(self, len(outer.body), outer), lambda block: outer.body.append(replace(head, then=tuple(block.body))))

    def else_(self) -> _Scope:
        """The other branch of the ``if_`` written just before."""
        return self._else(self._blocks[-1], len(self._blocks[-1].body) - 1)

    def _else(self, outer: _Block, slot: int) -> _Scope:
        self._need_open()
        found = outer.body[slot] if 0 <= slot < len(outer.body) else None
        if outer is not self._blocks[-1] or slot != len(outer.body) - 1 or not isinstance(found, If) or found.orelse:
            raise BuildError("else_ stands directly after its if_", program=self.name, loc=caller_location())
        branch = found

        def close(block: _Block) -> None:
            outer.body[slot] = replace(branch, orelse=tuple(block.body))

        return self._inner((), None, close)

    def group(self, on: On = None) -> _Scope:
        """Communications of one team that progress together: all are posted before any is waited for."""
        self._need_open()
        stream, loc = self._on(on), caller_location()

        def close(block: _Block) -> None:
            self._in_group = False
            self._streams.pop()
            body = tuple(replace(c, event=None) if isinstance(c, Comm) else c for c in block.body)
            self._add(Group(body, stream, loc))  # type: ignore[arg-type]

        scope = self._inner((), None, close)
        opened = scope._opened

        def enter() -> Any:
            self._in_group = True
            self._streams.append(stream)
            return opened()

        scope._opened = enter
        return scope

    def on(self, stream: str | Stream) -> _Scope:
        """The default stream of a block."""
        target = self.stream(stream) if isinstance(stream, str) else stream
        return _Scope(self, lambda: self._streams.append(target), lambda: self._streams.pop() and None)

    def stream(self, name: str, index: Operand | None = None) -> Stream:
        """A stream by name, optionally indexed: ``p.stream("s", i % 4)``. Same name and index = same stream."""
        if name == MAIN.name and index is None:
            return MAIN
        return Stream(_identifier(name), index)

    def sync(self, what: str | Stream | Event, stream: str | Stream = MAIN) -> None:
        """``stream`` waits for all that is queued on ``what``, or for the latest execution of the statement that gave the event."""
        if isinstance(what, Event):
            self._synced.add(what)
        source = self.stream(what) if isinstance(what, str) else what
        self._need_open()
        self._add(Sync(source, self.stream(stream) if isinstance(stream, str) else stream, caller_location()))

    def event(self) -> Event:
        """Name the call or communication written just before."""
        self._need_open()
        last = self._blocks[-1].body[-1] if self._blocks[-1].body else None
        if not isinstance(last, (Call, Comm)) or last.event is None:
            raise BuildError("event() names the call or communication written just before it", program=self.name, loc=caller_location())
        self._kept.add(last.event)
        return last.event

    # ---- ranks

    def rank(self, axis: str | None = None) -> Operand:
        """This rank's position along ``axis``, or in the whole mesh (row-major)."""
        if axis is not None or len(self._data.axes) == 1:
            name = axis or self._data.axes[0].name
            axis_size(self._data.axes, name)
            return Rank(name)
        if not self._data.axes:
            raise BuildError("a program without a mesh has no ranks", program=self.name, cure="give mesh=", loc=caller_location())
        position: Operand = Rank(self._data.axes[0].name)
        for a in self._data.axes[1:]:
            position = binary("+", binary("*", position, axis_size(self._data.axes, a.name)), Rank(a.name))
        return position

    def size(self, axis: str | None = None) -> Dim:
        """The number of ranks along ``axis``, or in the whole mesh: an int where the mesh is sized."""
        return team_size(self._data.axes, None if axis is None else (axis,))


def parse(text: str, file: str = "<text>") -> Program:
    """The program in ``text``; ``parse(str(p)) == p``. ParseError with line, column and a caret."""
    return Program.of(parse_program(text, file))


# ------------------------------------------------------------------------------------------------------------------- helpers


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise BuildError(f"{name!r} is no name", expected="letters, digits and _", loc=caller_location())
    return name


def _type(shape: object, dtype: object, memory: str) -> TensorType:
    if memory not in ("global", "symmetric", "host"):
        raise BuildError(f"memory is global, symmetric or host, not {memory!r}", loc=caller_location())
    try:
        return TensorType(dtype_of(dtype), dims_of(shape), memory)  # type: ignore[arg-type]
    except BuildError as e:
        raise e.with_context(loc=caller_location()) from None


def _name_of(unit: Any) -> str:
    return str(getattr(unit, "name", None) or getattr(unit, "__name__", type(unit).__name__))


def _op_key(op: ViewOp) -> tuple[object, ...]:
    if isinstance(op, nodes.Index):
        parts: list[object] = []
        for item in op.items:
            parts.append(("span", key(item.start), key(item.stop)) if isinstance(item, nodes.Span) else None if item is None else key(item))
        return ("index", *parts)
    if isinstance(op, nodes.Permute):
        return ("permute", *op.order)
    return (type(op).__name__, *(key(e) for e in view_trees(op)))


__all__ = ["Branch", "Buffer", "Program", "parse", "sym"]
