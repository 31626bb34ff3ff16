"""Fusions built from fusions: the operations of one, repeated inside another on other values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hostir.graph.fusion import Fusion, TensorView
from hostir.types import Expr, Leaf, Operand, Predicate, TensorType, Var, substitute


def repeat(f: Fusion, into: Fusion, args: Sequence[Any]) -> list[TensorView]:
    """Append the operations of ``f`` to ``into``, its parameters being ``args`` (values of ``into``); the results, in order."""
    tensors: dict[TensorView, TensorView] = {}
    scalars: dict[Var, Operand] = {}
    for p, a in zip(f.params, args, strict=True):
        if isinstance(p, TensorView):
            tensors[p] = a
        else:
            scalars[p] = a
    for op in f.ops:
        new = into.add(
            op.name,
            tuple(_moved(a, tensors, scalars) for a in op.args),
            tuple((k, _moved(v, tensors, scalars)) for k, v in op.attrs),
            [_type(o.type, scalars) for o in op.outs],
            hints=[o.name for o in op.outs],
            loc=op.loc,
        )
        tensors |= dict(zip(op.outs, new, strict=True))
    return [tensors[r.value] for r in f.results]


def _leaf(scalars: Mapping[Var, Operand]) -> Any:
    def swap(leaf: Leaf) -> Operand:
        return scalars.get(leaf, leaf) if isinstance(leaf, Var) else leaf

    return swap


def _moved(x: Any, tensors: Mapping[TensorView, TensorView], scalars: Mapping[Var, Operand]) -> Any:
    if isinstance(x, TensorView):
        return tensors[x]
    if isinstance(x, tuple):
        return tuple(_moved(y, tensors, scalars) for y in x)
    return substitute(x, _leaf(scalars)) if isinstance(x, (Expr, Predicate)) else x


def _type(t: TensorType | None, scalars: Mapping[Var, Operand]) -> TensorType | None:
    return None if t is None else TensorType(t.dtype, tuple(substitute(d, _leaf(scalars)) if isinstance(d, Expr) else d for d in t.dims), t.memory)
