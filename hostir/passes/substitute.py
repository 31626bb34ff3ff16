"""A loop index replaced by another number, in expressions and in the views that use it."""

from __future__ import annotations

from typing import Any, assert_never

from hostir.ir.nodes import Expand, Index, Peer, Permute, Reshape, Span, Transpose, ViewOp
from hostir.types import Leaf, Operand, Var, substitute


def in_expr(e: Operand, var: Var, new: Operand) -> Operand:
    """``e`` with ``var`` replaced by ``new``."""

    def swap(leaf: Leaf) -> Operand:
        return new if leaf is var else leaf

    out: Operand = substitute(e, swap)
    return out


def index_of(op: ViewOp, var: Var, new: Operand) -> ViewOp:
    """The view operation ``op`` with ``var`` replaced by ``new``."""

    def go(e: Any) -> Any:
        return in_expr(e, var, new)

    match op:
        case Index(items):
            return Index(tuple(Span(go(i.start), go(i.stop)) if isinstance(i, Span) else None if i is None else go(i) for i in items))
        case Reshape(dims):
            return Reshape(tuple(go(d) for d in dims))
        case Expand(dims):
            return Expand(tuple(go(d) for d in dims))
        case Peer(rank):
            return Peer(go(rank))
        case Transpose() | Permute():
            return op
        case _:
            assert_never(op)
