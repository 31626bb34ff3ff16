"""A segment as a unit: its operations again, on tensors that have the sizes of one rank and one trip.

Sizes that are no constants become symbols of the unit, one for each different expression; other host numbers become its scalars. So one
unit serves every rank and trip, a short last chunk too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hostir.graph.axes import COMBINES
from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.graph.sharding import simplified
from hostir.graph.table import TABLE, apply, bound_of
from hostir.ir.nodes import Argument, Buffer, Unit
from hostir.types import Dim, Expr, Operand, Predicate, Sym, Var, is_whole, key

COMBINE: Final = {comm: op for comm, op in COMBINES.values() if not op.startswith("logical")}


class UnitBuilder:
    """Parameters first (``tensor``), then operations, then results; ``args`` are what the call passes."""

    def __init__(self, name: str) -> None:
        self.fusion = Fusion(name)
        self.args: list[Argument] = []
        self._sizes: dict[object, Dim] = {}
        self._numbers: dict[object, Operand] = {}

    def tensor(self, b: Buffer, name: str) -> TensorView:
        dims = tuple(self._symbol(d) for d in b.type.dims)
        self.args.append(b)
        return self.fusion.input(dims, b.type.dtype, name=name)

    def _symbol(self, d: Dim) -> Dim:
        d = simplified(d)
        if not isinstance(d, Expr):
            return d
        if isinstance(d, Sym):
            self._sizes.setdefault(key(d), d)
        if key(d) not in self._sizes:
            taken = {s.name for s in self._sizes.values() if isinstance(s, Sym)}
            self._sizes[key(d)] = Sym(next(n for i in range(len(taken) + 1) if (n := f"d{i}") not in taken))
        return self._sizes[key(d)]

    def size(self, d: Dim) -> Dim:
        """A size inside the unit: a constant, one of its symbols, or a number that is passed."""
        d = simplified(d)
        if isinstance(d, Expr) and key(d) in self._sizes:
            return self._sizes[key(d)]
        passed: Dim = self.number(d)
        return passed

    def number(self, e: Any) -> Any:
        """A host number inside the unit."""
        if not isinstance(e, (Expr, Predicate)):
            return e
        if key(e) not in self._numbers:
            kind = e.kind if isinstance(e, Var) else "int" if is_whole(e) else "float"
            self.args.append(e)  # type: ignore[arg-type]
            self._numbers[key(e)] = self.fusion.scalar(e.name if isinstance(e, Var) else "n", kind)
        return self._numbers[key(e)]

    def op(self, op: Op, operands: Mapping[object, TensorView], dims: Sequence[Dim], **changed: Any) -> tuple[TensorView, ...]:
        """``op`` again, on ``operands`` (by parameter and place, or by tensor for an opaque one); ``dims``: the sizes of its first result
        here; ``changed``: other attributes."""
        row = TABLE.get(op.name)
        if row is None:
            args = [self._opaque(a, operands) for a in op.args]
            attrs = [(k, self._opaque(v, operands)) for k, v in op.attrs]
            return self.fusion.add(op.name, args, attrs, [o.type for o in op.outs], hints=["t"] * len(op.outs), loc=op.loc)
        bound = bound_of(op.name, op.args, op.attrs) | changed
        kinds = {p.name: p.kind for p in row.params}
        for name, v in bound.items():
            if kinds[name] == "new_sizes" or (kinds[name] == "sizes" and row.shard == "source"):
                bound[name] = tuple(self.size(d) for d in dims)
            elif isinstance(v, TensorView):
                bound[name] = operands[(name, 0)]
            elif isinstance(v, tuple):
                bound[name] = tuple(operands[(name, i)] if isinstance(x, TensorView) else self.number(x) for i, x in enumerate(v))
            else:
                bound[name] = self.number(v)
        given = {k: v for k, v in bound.items() if v is not None}
        return self._trivial(op, bound) or apply(self.fusion, op.name, (), given, hints=["t"] * len(op.outs), loc=op.loc)

    def _opaque(self, v: Any, operands: Mapping[object, TensorView]) -> Any:
        if isinstance(v, TensorView):
            return operands[v]
        return tuple(self._opaque(x, operands) for x in v) if isinstance(v, tuple) else self.number(v)

    def _trivial(self, op: Op, bound: dict[str, Any]) -> tuple[TensorView, ...] | None:
        """A reduction over dimensions of size 1 moves nothing and adds nothing."""
        row = TABLE[op.name]
        if row.shard != "reduce" or row.triton not in COMBINES or COMBINES[row.triton][1].startswith("logical"):
            return None
        x: TensorView = bound["x"]
        rank = len(x.known.dims)
        dims = [d % rank for d in bound["dims"]] if bound["dims"] else list(range(rank))
        if not dims or not all(isinstance(x.known.dims[d], int) and x.known.dims[d] == 1 for d in dims):
            return None
        want = bound.get("dtype") or op.outs[0].dtype
        if x.dtype != want:
            x = self.add("cast", x, dtype=want)
        return (x,) if bound["keepdim"] else (self.add("squeeze", x, dims=tuple(dims)),)

    def add(self, name: str, *args: Any, hint: str = "t", **attrs: Any) -> TensorView:
        return apply(self.fusion, name, args, attrs, hints=[hint])[0]

    def accumulate(self, term: TensorView, acc: TensorView, how: str) -> TensorView:
        """The accumulator after this trip: ``term`` combined with it, by the reduction ``how``."""
        if how == "sum" and term.dtype == acc.dtype and len(self.fusion.ops) == 1 and (product := self._product(acc)) is not None:
            return product
        if term.dtype != acc.dtype:
            term = self.add("cast", term, dtype=acc.dtype)
        combine = {"max": "logical_or", "min": "logical_and"}[how] if term.dtype.name == "bool" else COMBINE[how]
        return self.add(combine, acc, term, hint="o")

    def _product(self, acc: TensorView) -> TensorView | None:
        """A single matrix product adds to its accumulator itself."""
        (op,) = self.fusion.ops
        b = bound_of(op.name, op.args, op.attrs)
        names = {"mm": "addmm", "bmm": "baddbmm", "linear": "addmm"}
        x, y = b.get("x"), b.get("w") if op.name == "linear" else b.get("y")
        if op.name not in names or b.get("b") is not None or not isinstance(x, TensorView) or not isinstance(y, TensorView):
            return None
        if len(x.known.dims) != (3 if op.name == "bmm" else 2) or len(y.known.dims) != len(x.known.dims):
            return None
        self.fusion.ops.clear()
        if op.name == "linear":
            y = self.add("transpose", y, dim0=0, dim1=1)
        return self.add(names[op.name], acc, x, y, hint="o")

    def done(self, results: Sequence[TensorView]) -> Unit:
        for r in results:
            self.fusion.output(r)
        return Unit(self.fusion.name, self.fusion)


def unit_name(ops: Sequence[Op], suffix: str = "") -> str:
    """``mul_sum``: the first operations that compute something."""
    names = [op.name.split(".")[1] if "." in op.name else op.name for op in ops]
    busy = [n for n in names if n not in TABLE or not TABLE[n].view] or names
    return "_".join(busy[:3]) + suffix
