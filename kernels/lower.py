"""From a Fusion to the values that kernels compute: promotions written out, views as steps on layouts, composites taken apart.

``why_not`` answers, without any sizes, whether a fusion can be generated; it and ``lower`` read the same tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.graph.row import Row, form_names
from hostir.graph.rules import common_dtype
from hostir.graph.table import TABLE, bound_of
from hostir.kernels.layout import Reshape, Step
from hostir.kernels.nodes import BOOL, I32, Cast, Node, Number, Part, Point, Reduce, Root, Tensor, View, register
from hostir.types import DType, Expr, Leaf, Predicate, TensorType, Var, evaluate, leaves

Env: TypeAlias = Callable[[Leaf], Any]
Sizes: TypeAlias = tuple[int, ...]
UNPROMOTED: Final = ("cond",)  # operands that choose between others keep their own dtype


def broadcast(*shapes: Sizes) -> Sizes:
    """The common shape of operands that are known to fit."""
    rank = max((len(s) for s in shapes), default=0)
    out = [1] * rank
    for s in shapes:
        for d, n in enumerate(s, start=rank - len(s)):
            if n != 1:
                out[d] = n
    return tuple(out)


class Lowering:
    """Builds the values of one fusion. ``env`` gives the numbers of symbols and of the scalars that sizes depend on; ``holds(n, last)`` says
    whether rows of ``n`` elements, along the last dims or others, stay in registers."""

    def __init__(self, fusion: Fusion, env: Env, holds: Callable[[int, bool], bool] = lambda n, last: True) -> None:
        self.fusion = fusion
        self.env = env
        self.holds = holds
        self.of: dict[TensorView, Node] = {}
        self.folds: dict[tuple[str, tuple[Node, ...], tuple[int, ...], tuple[DType, ...]], Reduce] = {}
        for i, p in enumerate(fusion.params):
            if isinstance(p, TensorView):
                self.of[p] = Tensor(i, p.known.dtype, self.sizes(p.known.dims))

    def roots(self) -> list[Root]:
        """One for each result."""
        from hostir.kernels.composites import COMPOSITES, VIEWS

        for op in self.fusion.ops:
            values = {k: self._node(v) for k, v in bound_of(op.name, op.args, op.attrs).items()}
            result = op.outs[0].known
            if op.name in VIEWS:
                x: Node = values["x"]
                for step in VIEWS[op.name](self, self.sizes(result.dims), **values):
                    x = self.view(x, step)
                self.of[op.outs[0]] = x
            elif op.name in COMPOSITES:
                self.of[op.outs[0]] = self._labelled(COMPOSITES[op.name](self, result, **values), result.dtype)
            else:
                self.of[op.outs[0]] = self._pointwise(TABLE[op.name], op, values, result)
        return [Root(j, self.of[r.value], r.value.known.dtype) for j, r in enumerate(self.fusion.results)]

    @staticmethod
    def _labelled(x: Node, dtype: DType) -> Node:
        """``x``, which is held as ``dtype`` is, known as ``dtype``: nothing is rounded."""
        return x if x.dtype is dtype else Point("x", (("x", x),), register(dtype), dtype, x.shape)

    def _node(self, v: Any) -> Any:
        if isinstance(v, TensorView):
            return self.of[v]
        return tuple(self._node(x) for x in v) if isinstance(v, tuple) else v

    def _pointwise(self, row: Row, op: Op, values: Mapping[str, Any], result: TensorType) -> Node:
        """A row with an expression: operands promoted and broadcast, other values written into the expression."""
        names = [p.name for p in row.params if p.kind in ("tensor", "value") and values[p.name] is not None]
        bound = bound_of(op.name, op.args, op.attrs)
        types = [v.known if isinstance(v := bound[n], TensorView) else v for n in names if n not in UNPROMOTED]
        compute = register(common_dtype(row.promotion, types))
        counts = compute is BOOL and "integer" not in row.promotion.split()
        if counts:
            compute = I32  # arithmetic of bools is that of 0 and 1; what is not 0 is true
        given = [(n, v if isinstance(v := values[n], Node) else self.number(v, compute)) for n in names]
        texts = {p.name: literal(values[p.name]) for p in row.params if p.name not in names}
        expr = form_names(_POWERS.get(values["y"], row.triton) if _is_power(row, values) else row.triton)(texts.get)
        if result.dtype.is_float and result.dtype.itemsize == 2:
            expr = fast(expr)
        if counts and result.dtype is BOOL:
            expr = f"({expr}) != 0"
        return Point(expr, tuple(given), compute, result.dtype, broadcast(*(x.shape for _, x in given)))

    # ---- numbers

    def size(self, d: Any) -> int:
        return int(evaluate(d, self.env)) if isinstance(d, Expr) else int(d)

    def sizes(self, dims: Sequence[Any]) -> Sizes:
        return tuple(self.size(d) for d in dims)

    def number(self, v: Any, dtype: DType) -> Number:
        """A number of the fusion; one that follows from sizes alone is passed at launch."""
        if isinstance(v, (Expr, Predicate)) and not any(isinstance(leaf, Var) for leaf in leaves(v)):
            return Number(evaluate(v, self.env), dtype, given=True)
        return Number(v, dtype)

    def count(self, n: int, dtype: DType) -> Number:
        """A number that follows from sizes."""
        return Number(n, dtype, given=True)

    # ---- building blocks

    def view(self, x: Node, step: Step) -> Node:
        return x if isinstance(step, Reshape) and step.sizes == x.shape else View(x, step, x.dtype, step.result(x.shape))

    def point(self, expr: str, dtype: DType, **values: Node) -> Node:
        """``expr`` over broadcast operands, all held as ``dtype`` (one that registers hold)."""
        return Point(expr, tuple(values.items()), dtype, dtype, broadcast(*(v.shape for v in values.values())))

    def test(self, expr: str, compute: DType, **values: Node) -> Node:
        """A condition on broadcast operands."""
        return Point(expr, tuple(values.items()), compute, BOOL, broadcast(*(v.shape for v in values.values())))

    def cast(self, x: Node, dtype: DType) -> Node:
        return x if x.dtype is dtype else Cast(x, dtype, x.shape)

    def reduce(self, kind: str, operands: Sequence[Node], dims: Sequence[int], keepdim: bool, dtypes: Sequence[DType]) -> list[Node]:
        """The values of a fold over ``dims``, which stay as 1 when ``keepdim``."""
        x = operands[0]
        key = (kind, tuple(operands), tuple(dims), tuple(dtypes))
        if (fold := self.folds.get(key)) is None:
            fold = self.folds[key] = Reduce(*key[:3], tuple(n for d, n in enumerate(x.shape) if d not in dims), key[3])
        kept = tuple(1 if d in dims else n for d, n in enumerate(x.shape))
        parts = [Part(fold, i) for i in range(len(dtypes))]
        return [self.view(p, Reshape(kept)) if keepdim else p for p in parts]


# What torch computes for these exponents.
_POWERS: Final[Mapping[float, str]] = {
    2: "x * x",
    3: "x * x * x",
    1: "x",
    0.5: "hd.sqrt(x)",
    -0.5: "hd.rsqrt(x)",
    -1: "hd.div(1.0, x)",
    -2: "hd.div(1.0, x * x)",
}


def _is_power(row: Row, values: Mapping[str, Any]) -> bool:
    """Whether this is ``x`` to a constant power, of floats or up to the third."""
    y = values.get("y")
    return row.name == "pow" and isinstance(y, (int, float)) and isinstance(values["x"], Node) and (values["x"].dtype.is_float or y in (1, 2, 3))


def fast(expr: str) -> str:
    """``expr`` for a result of 16 bits: functions of a few instructions, exact far beyond it."""
    return re.sub(r"\bhd\.(exp|div|sigmoid|gelu)\(", r"hd.\1_fast(", expr)


def literal(v: Any) -> str:
    """An attribute as it stands in generated code."""
    if isinstance(v, DType):
        return f"tl.{v.torch_name}"
    return repr(v)


# ----------------------------------------------------------------------------------------------------------- what is refused


def why_not(fusion: Fusion) -> str | None:
    """Why no kernel can be generated for ``fusion``; None when one can."""
    return next(_reasons(fusion), None)


def _reasons(fusion: Fusion) -> Iterator[str]:
    from hostir.kernels.composites import COMPOSITES, REFUSALS, VIEWS

    for op in fusion.ops:
        row = TABLE.get(op.name)
        if row is None:
            yield f"{op.name} is opaque: only torch knows what it computes"
            return
        if row.random:
            yield f"{op.name} draws random numbers from torch's generator"
        elif row.library:
            yield f"{op.name} is a library call"
        elif op.name not in VIEWS and op.name not in COMPOSITES and not (row.pointwise and row.triton):
            yield f"no Triton code is written for {op.name} yet"
        elif op.name in REFUSALS and (why := REFUSALS[op.name](**bound_of(op.name, op.args, op.attrs))):
            yield why
        for tv in op.outs:
            yield from _no_type(tv)
    for p in fusion.params:
        if isinstance(p, TensorView):
            yield from _no_type(p)
            if p.known.memory == "host" and p.known.dims:
                yield f"%{p.name} lies in host memory, which kernels do not read"
    for r in fusion.results:
        if r.value.type is not None and r.value.type.memory == "host":
            yield f"%{r.value.name} lies in host memory, which kernels do not write"


def _no_type(tv: TensorView) -> Iterator[str]:
    if tv.type is None:
        yield f"the type of %{tv.name} is only known to torch"
    elif tv.type.dtype.kind == "complex":
        yield f"{tv.type.dtype} has no Triton type (%{tv.name})"
    elif tv.type.dtype.name.startswith("f8"):
        yield f"{tv.type.dtype} is converted by library calls only (%{tv.name})"


def structural(fusion: Fusion) -> frozenset[int]:
    """The scalar parameters (by position) that sizes and views depend on: their values are part of what a kernel is made for."""
    found: set[int] = set()
    where = {id(p): i for i, p in enumerate(fusion.params)}

    def look(v: Any) -> None:
        if isinstance(v, tuple):
            for x in v:
                look(x)
        elif isinstance(v, (Expr, Predicate)):
            found.update(where[id(leaf)] for leaf in leaves(v) if isinstance(leaf, Var))

    for p in fusion.params:
        if isinstance(p, TensorView) and p.type is not None:
            look(p.type.dims)
    for op in fusion.ops:
        row = TABLE[op.name]
        kinds = {p.name: p.kind for p in row.params}
        for k, v in bound_of(op.name, op.args, op.attrs).items():
            if kinds[k] not in ("value", "number", "tensor"):
                look(v)
        for tv in op.outs:
            if tv.type is not None:
                look(tv.type.dims)
    return frozenset(found)
