"""View operations as views of buffers: aliases that cost nothing. One that would have to move elements is left to a unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from hostir.graph.fusion import Op
from hostir.graph.table import bound_of
from hostir.ir.nodes import Buffer, Expand, Index, Permute, Reshape, Span, ViewOp
from hostir.passes.tree import Segment
from hostir.passes.writer import is_dense
from hostir.types import Dim, dims_equal

if TYPE_CHECKING:
    from hostir.passes.emit import Emitter

Values = Mapping[str, Any]


def view(em: Emitter, s: Segment) -> bool:
    """Make the result of a view segment an alias of its operand. False where it is no view of a buffer, or has to be kept elsewhere than
    its operand."""
    from hostir.passes.emit import Stored

    (op,) = s.ops
    out = op.outs[0]
    if out in em.stored or em.homes.home.get(out, em.path) != em.path:
        return False
    (tv,) = dict.fromkeys(op.reads())
    ins, outs = em.inside(s, op)
    x = em.read(tv, ins[0])
    dims = em._here(out, outs[0])
    found = as_view(em, op, x, dims)
    if found is None:
        return False
    em.stored[out] = Stored(em.w.view(x, found) if found is not _SAME else x, em.chunks(out, em.path))
    return True


_SAME: Final = Permute(())


def as_view(em: Emitter, op: Op, x: Buffer, dims: tuple[Dim, ...]) -> ViewOp | None:
    """The view of ``x`` that ``op`` is, with a result of sizes ``dims``."""
    make = VIEWS.get(op.name)
    return None if make is None else make(em, x, dims, bound_of(op.name, op.args, op.attrs))


def _reshape(em: Emitter, x: Buffer, dims: tuple[Dim, ...], b: Values) -> ViewOp | None:
    plain = [d for d in x.type.dims if not _one(d)], [d for d in dims if not _one(d)]
    alike = len(plain[0]) == len(plain[1]) and all(dims_equal(a, c) is True for a, c in zip(*plain, strict=True))
    return Reshape(dims) if alike or is_dense(x, em.w.allocated) else None


def _one(d: Dim) -> bool:
    return isinstance(d, int) and d == 1


def _new_dims(em: Emitter, x: Buffer, dims: tuple[Dim, ...], b: Values) -> ViewOp | None:
    return Reshape(dims)


def _permute(em: Emitter, x: Buffer, dims: tuple[Dim, ...], b: Values) -> ViewOp | None:
    order = list(range(len(x.type.dims)))
    if "dims" in b:
        order = [d % len(order) for d in b["dims"]]
    elif order:
        i, j = b["dim0"] % len(order), b["dim1"] % len(order)
        order[i], order[j] = order[j], order[i]
    return Permute(tuple(order))


def _expand(em: Emitter, x: Buffer, dims: tuple[Dim, ...], b: Values) -> ViewOp | None:
    return Expand(dims)


def _squeeze(em: Emitter, x: Buffer, dims: tuple[Dim, ...], b: Values) -> ViewOp | None:
    rank = len(x.type.dims)
    gone = {d % max(rank, 1) for d in b["dims"] if isinstance(x.type.dims[d], int) and x.type.dims[d] == 1}
    return Index(tuple(0 if d in gone else None for d in range(rank))) if gone else _SAME


def _slice(em: Emitter, x: Buffer, dims: tuple[Dim, ...], b: Values) -> ViewOp | None:
    if b["step"] != 1:
        return None
    d = b["dim"] % len(x.type.dims)
    stop = x.type.dims[d] if b["stop"] is None else b["stop"]
    return Index((*[None] * d, Span(b["start"], stop)))


def _select(em: Emitter, x: Buffer, dims: tuple[Dim, ...], b: Values) -> ViewOp | None:
    return Index((*[None] * (b["dim"] % len(x.type.dims)), b["index"]))


VIEWS: Final[Mapping[str, Callable[..., ViewOp | None]]] = {
    "transpose": _permute,
    "permute": _permute,
    "reshape": _reshape,
    "broadcast": _new_dims,
    "unsqueeze": _new_dims,
    "expand": _expand,
    "squeeze": _squeeze,
    "slice": _slice,
    "select": _select,
}
