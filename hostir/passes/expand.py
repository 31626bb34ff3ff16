"""Operations that do not compute part by part as they are, written with operations that do.

A mean over a cut dimension is a sum over it divided by the number of elements of the whole; a variance likewise. What is added to a
product (a bias) is added after the product's terms have been put together: once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from hostir.graph.axes import Axes, axes_of
from hostir.graph.copy import Values, append, copied, swapped
from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.graph.sharding import Partial, Shard
from hostir.graph.table import apply, bound_of
from hostir.passes.labels import needs, op_streams
from hostir.passes.propagate import propagate
from hostir.types import DTYPES, Dim, DType, binary, product, simplify

Write: Any = Callable[[Fusion, Op, Mapping[str, Any]], TensorView]


def expand(f: Fusion, place: str = "before") -> Fusion:
    """A copy of ``f`` in which reductions over cut dimensions are plain ones, and products that give partial results add nothing."""
    changed = False

    def one(g: Fusion, op: Op, values: Values) -> None:
        nonlocal changed
        axes = axes_of(op)
        if op.name not in WRITTEN or not _cut(op, axes, place):
            append(g, op, values)
            return
        changed = True
        bound = {k: swapped(v, values) for k, v in bound_of(op.name, op.args, op.attrs).items()}
        start = len(g.ops)
        made = WRITTEN[op.name](g, op, bound)
        for tv in [o for new in g.ops[start:] for o in new.outs]:
            tv.sharding, tv.streams = None, ()
        old = op.outs[0]
        made.sharding, made.streams, made.name = old.sharding, old.streams, old.name
        values[old] = made
        _sums(g.ops[start:], old)

    g = copied(f, one)
    return propagate(g, place) if changed else g


def _sums(ops: list[Op], old: TensorView) -> None:
    """The reduction lies as the result does: its terms are put together there."""
    for op in ops:
        tv = op.outs[0]
        if tv.sharding is None and axes_of(op).reduced and tv.type is not None and old.type is not None:
            if len(tv.type.dims) == len(old.type.dims):
                tv.sharding = old.sharding


def _cut(op: Op, axes: Axes, place: str) -> bool:
    """Whether a reduced dimension of ``op`` is walked through by a host loop, or cut by a mesh axis in the way it will be computed."""
    streamed = op_streams(op, axes)
    if any(label in axes.reduced for label in streamed) and (axes.composite or axes.once):
        return True
    if op.outs[0].sharding is None:
        return False
    if axes.composite:
        for tv, labels in axes.ins:
            placements = tv.sharding.placements if tv.sharding is not None else ()
            if any(isinstance(p, Shard) and labels[p.dim] in axes.composite for p in placements):
                return True
        return False
    if not axes.once:
        return False
    return any(isinstance(p, Partial) for s in needs(op, axes, place).outs for p in s.placements)


def accumulator(dtype: DType) -> DType:
    """The dtype in which sums of ``dtype`` are kept: f32 where the dtype is shorter."""
    return DTYPES["f32"] if dtype.is_float and dtype.itemsize < 4 else dtype


def _new(g: Fusion, op: Op, name: str, *args: Any, **attrs: Any) -> TensorView:
    return apply(g, name, args, {k: v for k, v in attrs.items() if v is not None}, hints=[name], loc=op.loc)[0]


def _count(x: TensorView, dims: Any) -> Dim:
    sizes = x.known.dims
    return product(tuple(sizes[d] for d in (dims or range(len(sizes)))))


def _mean(g: Fusion, op: Op, b: Mapping[str, Any]) -> TensorView:
    x, want = b["x"], op.outs[0].dtype
    wide = accumulator(want)
    total = _new(g, op, "sum", x, dims=b["dims"], keepdim=b["keepdim"], dtype=None if wide is x.dtype else wide)
    mean = _new(g, op, "div", total, _count(x, b["dims"]))
    return mean if mean.dtype == want else _new(g, op, "cast", mean, dtype=want)


def _var(g: Fusion, op: Op, b: Mapping[str, Any]) -> TensorView:
    x, want = b["x"], op.outs[0].dtype
    wide = accumulator(want)
    if x.dtype != wide:
        x = _new(g, op, "cast", x, dtype=wide)
    count = _count(x, b["dims"])
    mean = _new(g, op, "div", _new(g, op, "sum", x, dims=b["dims"], keepdim=True), count)
    off = _new(g, op, "sub", x, mean)
    total = _new(g, op, "sum", _new(g, op, "mul", off, off), dims=b["dims"], keepdim=b["keepdim"])
    var = _new(g, op, "div", total, simplify(binary("-", count, b["correction"])))
    return var if var.dtype == want else _new(g, op, "cast", var, dtype=want)


def _linear(g: Fusion, op: Op, b: Mapping[str, Any]) -> TensorView:
    return _new(g, op, "add", _new(g, op, "linear", b["x"], b["w"]), b["b"])


def _addmm(product_name: str) -> Any:
    def write(g: Fusion, op: Op, b: Mapping[str, Any]) -> TensorView:
        t = _new(g, op, product_name, b["x"], b["y"])
        if b["alpha"] != 1:
            t = _new(g, op, "mul", t, b["alpha"])
        c = b["c"] if b["beta"] == 1 else _new(g, op, "mul", b["c"], b["beta"])
        return _new(g, op, "add", t, c)

    return write


WRITTEN: Final[Mapping[str, Any]] = {
    "mean": _mean,
    "var": _var,
    "linear": _linear,
    "addmm": _addmm("mm"),
    "baddbmm": _addmm("bmm"),
}
