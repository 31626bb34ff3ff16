"""The builder: Python calls become statements, each with the caller's line, each checked where it is written.

``with hir.Program("name") as p:`` opens a program; leaving the block seals it. A program whose block raised is dead. Views are
made lazily: a handle that nobody uses leaves no trace, one that is used becomes a statement just before its first use in a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

import torch

from hostir.buffers import Buffer
from hostir.build_blocks import Structure, identifier
from hostir.build_comm import Communication, On
from hostir.build_ops import Operations, signature_of
from hostir.errors import BuildError, HostIrError, Location, caller_location
from hostir.graph.fusion import Fusion
from hostir.graph.unify import result_types, unify
from hostir.ir import nodes
from hostir.ir.check import axis_size, team_size
from hostir.ir.nodes import (
    Alloc,
    Argument,
    Axis,
    Call,
    Comm,
    Event,
    Free,
    ProgramData,
    Stmt,
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
from hostir.types import (
    DTYPES,
    MEMORIES,
    Dim,
    Expr,
    Operand,
    Predicate,
    Rank,
    Sym,
    TensorType,
    Var,
    binary,
    dims_of,
    dtype_of,
    key,
)

# Words that mean something else where a size can stand.
_RESERVED: Final = frozenset({"true", "false", "none", "inf", "nan", "epoch", *DTYPES})


def sym(name: str) -> Sym:
    """A symbolic size, bound by the input that has it as a size of its own."""
    if identifier(name) in _RESERVED:
        raise BuildError(f"{name!r} cannot name a size: it is a word of program text", expected="another name", loc=caller_location())
    return Sym(name)


class Program(Structure, Operations, Communication, nodes.Program):
    """A host program under construction, then sealed. See docs/ir.md for what the statements mean.

    ``mesh`` gives axis names and sizes (``hir.Mesh``); ``scheduled`` programs are taken exactly as written, streams and all.
    """

    def __init__(self, name: str = "program", mesh: Mesh | None = None, *, scheduled: bool = False) -> None:
        identifier(name)
        if mesh is not None and not isinstance(mesh, Mesh):
            raise BuildError(
                "a program's mesh is a hir.Mesh",
                program=name,
                got=type(mesh).__name__,
                cure="hir.Mesh.from_torch(device_mesh)",
                loc=caller_location(),
            )
        axes = () if mesh is None else tuple(Axis(n, None if mesh.shape is None else mesh.shape[i]) for i, n in enumerate(mesh.names))
        Structure.__init__(self, axes)
        Operations.__init__(self)
        nodes.Program.__init__(self, ProgramData(name, axes=axes, scheduled=scheduled))
        self._params: list[nodes.Buffer | Var] = []
        self._inout: set[nodes.Buffer] = set()
        self._results: list[nodes.Buffer] = []

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
                program=name,
                loc=caller_location(),
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
        self._need_open()
        self._state = "dead"
        if self._unentered:
            forgotten = self._unentered[0]
            raise BuildError(f"{forgotten.what}() is no block yet", cure=f"with p.{forgotten.what}(…):", program=self.name, loc=forgotten.loc)
        try:
            self._checker.finish(self._results)
        except BuildError as e:
            raise e.with_context(program=self.name, loc=caller_location()) from None
        self._seal()

    def _seal(self) -> None:
        keep = self._synced | self._kept

        def drop_event(s: Stmt) -> list[Stmt]:
            return [replace(s, event=None)] if isinstance(s, (Call, Comm)) and s.event is not None and s.event not in keep else [s]

        body = rewrite(tuple(self._blocks[0].body), drop_event)
        self._data = replace(self._data, params=tuple(self._params), inout=frozenset(self._inout), body=body, results=tuple(self._results))
        self._state = "sealed"

    def _need_open(self) -> None:
        if self._state != "open":
            cure = "build it again" if self._state == "dead" else "statements are written inside its with block"
            raise BuildError(f"the program {self.name} is {self._state}", program=self.name, cure=cure, loc=caller_location())

    def _usable(self, b: Buffer) -> None:
        if b.program is not self:
            raise BuildError(f"%{b.name} belongs to the program {b.program.name}, not to {self.name}", program=self.name, loc=caller_location())
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

            unnamed = replace(s, event=None) if isinstance(s, (Call, Comm)) else s
            text = next(Printer(UnitNames()).lines(unnamed))
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

    # ---- values and memory

    def input(self, name: str, shape: object, dtype: object, *, memory: str = "global", inout: bool = False) -> Buffer:
        """A tensor that the caller passes, in the order of declaration. Any strides; ``inout`` allows writing it."""
        self._need_open()
        loc = caller_location()
        node = self._buffer(name, shape, dtype, memory)
        self._declare(node, inout, loc)
        return Buffer(self, node.type, node=node)

    def scalar(self, name: str, dtype: type = int) -> Var:
        """A host number (``int``, ``float`` or ``bool``) that the caller passes."""
        self._need_open()
        if dtype not in (int, float, bool):
            raise BuildError("a host scalar is int, float or bool", got=dtype, program=self.name, loc=caller_location())
        with self._located("scalar"):
            v = Var(identifier(name), "scalar", dtype.__name__)  # type: ignore[arg-type]
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

    def _buffer(self, name: str, shape: object, dtype: object, memory: str) -> nodes.Buffer:
        self._need_open()
        with self._located(f"the type of %{name}"):
            if memory not in MEMORIES:
                raise BuildError(f"memory is global, symmetric or host, not {memory!r}")
            return nodes.Buffer(identifier(name), TensorType(dtype_of(dtype), dims_of(shape), memory))  # type: ignore[arg-type]

    def _alloc(self, node: nodes.Buffer, init: float | int | bool | None) -> Buffer:
        self._add(Alloc(node, init, caller_location()))
        return Buffer(self, node.type, node=node)

    def empty(self, shape: object, dtype: object, *, memory: str = "global", name: str | None = None) -> Buffer:
        """A buffer that nothing has written yet."""
        return self._alloc(self._buffer(name or "t", shape, dtype, memory), None)

    def zeros(self, shape: object, dtype: object, *, memory: str = "global", name: str | None = None) -> Buffer:
        return self._alloc(self._buffer(name or "t", shape, dtype, memory), 0)

    def full(self, shape: object, value: float | int | bool, dtype: object, *, memory: str = "global", name: str | None = None) -> Buffer:
        if not isinstance(value, (int, float)):
            raise BuildError("a buffer is filled with a Python number", got=value, program=self.name, loc=caller_location())
        return self._alloc(self._buffer(name or "t", shape, dtype, memory), value)

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
            elif isinstance(a, torch.Tensor):
                cure = "declare an input, p.input(name, shape, dtype), and pass the tensor to each run"
                raise BuildError("a tensor cannot be an argument while a program is built", program=self.name, loc=loc, cure=cure)
            elif isinstance(a, (list, tuple)) and any(isinstance(x, Buffer) for x in a):
                raise BuildError("a unit takes buffers one by one, not in a list", program=self.name, loc=loc, cure="write *buffers")
        try:
            ir_unit = self._unit(unit, args)
        except HostIrError as e:
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
            if r.alias is not None:
                written = args[unit.fusion.params.index(r.alias)]
                outs.append(self._node(written))
                if r.hidden:
                    continue
                if out is not None and self._node(given[len(handles)]) is not outs[-1]:
                    raise BuildError(
                        f"@{unit.name} writes this result in place, into %{written.name}", expected="that buffer, or no out=",
                        got=f"%{given[len(handles)].name}", cure="call without out=, then p.copy", program=self.name,
                        statement=f"call of @{unit.name}", loc=loc,
                    )  # fmt: skip
                handles.append(written)
                continue
            if out is not None:
                handle = given[len(handles)]
            else:
                if want is None:
                    raise BuildError(f"the type of a result of @{unit.name} is known to torch only", cure="give out=", program=self.name, loc=loc)
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
            return self._units.setdefault(id(unit), Unit(identifier(unit.name), unit))
        if not callable(unit):
            raise BuildError("a unit is a torch function, @hir.unit or a Fusion", got=type(unit).__name__)
        held = unit if isinstance(unit, TracedUnit) else traced(unit)
        fusion = held.fusion(signature_of(args))
        return self._units.setdefault((id(fusion),), Unit(identifier(held.name), fusion))

    # ---- ranks

    def rank(self, axis: str | None = None) -> Operand:
        """This rank's position along ``axis``, or in the whole mesh (row-major)."""
        if axis is not None or len(self._data.axes) == 1:
            name = axis or self._data.axes[0].name
            with self._located("rank"):
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
        with self._located("size"):
            return team_size(self._data.axes, None if axis is None else (axis,))


def parse(text: str, file: str = "<text>") -> Program:
    """The program in ``text``; ``parse(str(p)) == p``. ParseError with line, column and a caret."""
    return Program.of(parse_program(text, file))


# ------------------------------------------------------------------------------------------------------------------- helpers


def _name_of(unit: Any) -> str:
    return str(getattr(unit, "name", None) or getattr(unit, "__name__", type(unit).__name__))


def _op_key(op: ViewOp) -> tuple[object, ...]:
    if isinstance(op, nodes.Index):
        return ("index", *(("span", key(i.start), key(i.stop)) if isinstance(i, nodes.Span) else None if i is None else key(i) for i in op.items))
    if isinstance(op, nodes.Permute):
        return ("permute", *op.order)
    return (type(op).__name__, *(key(e) for e in view_trees(op)))


__all__ = ["Buffer", "Program", "parse", "sym"]
