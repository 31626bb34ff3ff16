"""A Fusion is a pure tensor graph: what a device segment computes, without streams, memory or order.

It is SSA over ``TensorView``s. Operations come from one table (``hostir.graph.table``), which knows their types; an operation
outside the table is opaque (``aten.name.overload``) and its result types may be unknown (None) until torch evaluates it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from hostir.errors import BuildError, Location, caller_location
from hostir.graph import annotate
from hostir.graph.sharding import HostLoop, MeshAxis, Placement, Sharding, Streamed
from hostir.mesh import Mesh
from hostir.types import DType, Expr, TensorType, Var, dims_of, dtype_of

Arg: TypeAlias = "TensorView | Expr | int | float | bool | str | DType | tuple[Arg, ...] | None"


class TensorView:
    """One value of a Fusion. Identity is identity; ``name`` is a hint for printing."""

    __slots__ = ("definition", "domain", "fusion", "name", "sharding", "streams", "type")

    def __init__(self, fusion: Fusion, type: TensorType | None, name: str, definition: Op | None = None) -> None:
        self.fusion = fusion
        self.type = type
        self.name = name
        self.definition = definition
        self.sharding: Sharding | None = None
        self.streams: tuple[Streamed, ...] = ()
        self.domain: tuple[annotate.Axis, ...] = ()

    @property
    def known(self) -> TensorType:
        """The type, where the graph knows it."""
        if self.type is None:
            raise BuildError(
                f"the type of %{self.name} is only known to torch: it comes from the opaque operation "
                f"{self.definition.name if self.definition else '?'}"
            )
        return self.type

    @property
    def shape(self) -> tuple[int | Expr, ...]:
        return self.known.dims

    @property
    def dtype(self) -> DType:
        return self.known.dtype

    # ---- annotations: where it lies, and which host loops walk through it

    def shard(self, mesh: Mesh, *placements: Placement) -> None:
        """Lay this tensor out over ``mesh``: one ``Shard(dim)``, ``Replicate()`` or ``Partial(op)`` for each of its axes. Two ``Shard`` of
        one dimension compose from left to right: the earlier mesh axis is the outer one."""
        annotate.shard(self, mesh, placements)

    def stream(self, axis: int, chunks: object) -> None:
        """Make dimension ``axis`` (of the whole tensor, not of a shard) a host loop of ``chunks`` trips; chunk c is [c·s, (c + 1)·s) with
        s = ceil(n / chunks). An input is read in slices; where a reduction consumes the dimension, that is a host-dimension sum."""
        annotate.stream(self, axis, chunks)

    def split(self, axis: int, parts: object) -> None:
        """Split axis ``axis`` of the loop domain into ``parts`` outer parts; the rest becomes the axis after it."""
        annotate.split(self, axis, parts)

    def parallelize(self, axis: int, how: MeshAxis | HostLoop) -> None:
        """Put axis ``axis`` of the loop domain on a mesh axis (``hir.MeshAxis("tp")``) or into a host loop (``hir.HostLoop()``)."""
        annotate.parallelize(self, axis, how)

    def swizzle(self, axis: int, mesh_axis: str) -> None:
        """Let each rank walk through the chunks of the streamed dimension ``axis`` beginning with its own along ``mesh_axis``."""
        annotate.swizzle(self, axis, mesh_axis)

    def __repr__(self) -> str:
        return f"<TensorView %{self.name}: {self.type}>"


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """``outs = name(args, **attrs)``. Attributes stand in the table's order; those equal to their default are left out."""

    name: str
    args: tuple[Arg, ...]
    attrs: tuple[tuple[str, Arg], ...]
    outs: tuple[TensorView, ...]
    loc: Location | None = None

    def attr(self, name: str, default: Any = None) -> Any:
        for k, v in self.attrs:
            if k == name:
                return v
        return default

    def reads(self) -> Iterator[TensorView]:
        """The tensors that this operation reads, in order, with repeats."""

        def tensors(x: Any) -> Iterator[TensorView]:
            if isinstance(x, TensorView):
                yield x
            elif isinstance(x, tuple):
                for y in x:
                    yield from tensors(y)

        yield from tensors(self.args)
        for _, v in self.attrs:
            yield from tensors(v)


@dataclass(frozen=True, eq=False, slots=True)
class Output:
    """A result. With ``alias`` it is written into that input's buffer; a hidden one is not in the returned list; ``evaluate`` marks
    it for evaluation by ATen (``hostir.dispatch.marking``)."""

    value: TensorView
    alias: TensorView | None = None
    hidden: bool = False
    evaluate: bool = False


class Fusion:
    """A tensor graph under construction or finished; ``params`` are its inputs, tensors and host scalars, in order.

    >>> f = hir.Fusion()
    >>> x = f.input((3, 4), torch.float32)
    >>> f.output(hir.ops.add(x, x), alias=x)
    """

    def __init__(self, name: str = "fusion") -> None:
        self.name = name
        self.params: list[TensorView | Var] = []
        self.ops: list[Op] = []
        self.results: list[Output] = []
        self.loc = caller_location()

    # ---- building

    def input(self, shape: object, dtype: object, *, name: str | None = None) -> TensorView:
        """A tensor input of ``shape`` (ints, ``hir.sym`` or host expressions) and ``dtype``."""
        tv = TensorView(self, TensorType(dtype_of(dtype), dims_of(shape)), name or "x")
        self.params.append(tv)
        return tv

    def scalar(self, name: str = "k", kind: Literal["int", "float", "bool"] = "int") -> Var:
        """A host number that is given at each run."""
        v = Var(name, "scalar", kind)
        self.params.append(v)
        return v

    def add(
        self,
        name: str,
        args: Sequence[Arg],
        attrs: Sequence[tuple[str, Arg]],
        types: Sequence[TensorType | None],
        *,
        hints: Sequence[str] = (),
        loc: Location | None = None,
    ) -> tuple[TensorView, ...]:
        """Append an operation whose result types the caller has worked out (``graph.table.apply`` does)."""
        outs = tuple(TensorView(self, t, hints[i] if i < len(hints) else "t") for i, t in enumerate(types))
        op = Op(name, tuple(args), tuple(attrs), outs, loc or caller_location())
        for tv in op.reads():
            if tv.fusion is not self:
                raise BuildError(f"%{tv.name} belongs to the fusion {tv.fusion.name}, not to {self.name}", loc=op.loc)
        for out in outs:
            out.definition = op
        self.ops.append(op)
        return outs

    def output(self, value: TensorView, *, alias: TensorView | None = None, hidden: bool | None = None) -> None:
        """Make ``value`` a result; with ``alias`` it is written in place into that input (hidden from the list by default)."""
        if value.fusion is not self or (alias is not None and alias.fusion is not self):
            raise BuildError(f"%{value.name} and its alias must belong to this fusion ({self.name})")
        if alias is not None:
            if alias not in self.params:
                raise BuildError(f"%{alias.name} is not an input, so nothing can be written into it")
            if value.type is not None and value.type.agrees(alias.known) is False:
                raise BuildError(
                    f"%{value.name} cannot be written into %{alias.name}: an output in place has its input's type",
                    expected=alias.known, got=value.type,
                )  # fmt: skip
            if any(r.alias is alias for r in self.results):
                raise BuildError(f"two outputs are written into %{alias.name}")
        self.results.append(Output(value, alias, alias is not None if hidden is None else hidden))

    # ---- looking

    @property
    def inputs(self) -> tuple[TensorView, ...]:
        """The tensor inputs."""
        return tuple(p for p in self.params if isinstance(p, TensorView))

    @property
    def outputs(self) -> tuple[TensorView, ...]:
        return tuple(r.value for r in self.results)

    def find(self, op: str) -> TensorView:
        """The first result of the only operation named ``op``."""
        hits = [o for o in self.ops if o.name == op]
        if len(hits) != 1:
            names = ", ".join(dict.fromkeys(o.name for o in self.ops))
            raise BuildError(f"{len(hits)} operations of {self.name} are named {op!r}", expected="exactly one", got=names or "no operations")
        return hits[0].outs[0]

    def __str__(self) -> str:
        from hostir.graph.show import show_fusion

        return show_fusion(self)

    def __repr__(self) -> str:
        return f"<Fusion {self.name}: {len(self.params)} inputs, {len(self.ops)} operations, {len(self.results)} outputs>"
