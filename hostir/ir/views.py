"""What each view operation does to a type. Views move nothing: they say which part of a buffer is meant, and in which shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from hostir.errors import BuildError
from hostir.ir.nodes import Expand, Index, Peer, Permute, Reshape, Span, Transpose, ViewOp
from hostir.types import Dim, Operand, TensorType, binary, dims_equal, product, show_expr, simplify


def _shape(dims: Sequence[Dim]) -> str:
    return "[" + ", ".join(show_expr(d) for d in dims) + "]"


def view_type(t: TensorType, op: ViewOp) -> TensorType:
    """The type of ``op`` applied to a buffer of type ``t``; BuildError where it is known not to fit."""
    match op:
        case Index(items):
            return TensorType(t.dtype, _index_dims(t, items), t.memory)
        case Transpose():
            return TensorType(t.dtype, tuple(reversed(t.dims)), t.memory)
        case Permute(order):
            if sorted(order) != list(range(len(t.dims))):
                raise BuildError("a permutation names each dimension once", expected=f"an order of 0 .. {len(t.dims) - 1}", got=order)
            return TensorType(t.dtype, tuple(t.dims[i] for i in order), t.memory)
        case Reshape(dims):
            if dims_equal(product(dims), product(t.dims)) is False:
                raise BuildError("a reshape keeps the number of elements", expected=_shape(t.dims), got=_shape(dims))
            return TensorType(t.dtype, dims, t.memory)
        case Expand(dims):
            lead = len(dims) - len(t.dims)
            pairs = list(zip(dims[max(lead, 0) :], t.dims, strict=True)) if lead >= 0 else []
            if lead < 0 or any(isinstance(old, int) and old != 1 and dims_equal(new, old) is False for new, old in pairs):
                raise BuildError("expand repeats dimensions of size 1 and adds leading ones", expected=_shape(t.dims), got=_shape(dims))
            return TensorType(t.dtype, dims, t.memory)
        case Peer():
            if t.memory != "symmetric":
                raise BuildError("only a symmetric buffer can be addressed on a peer", got=t, cure='allocate it with memory="symmetric"')
            return t
        case _:
            assert_never(op)


def _index_dims(t: TensorType, items: tuple[Operand | Span | None, ...]) -> tuple[Dim, ...]:
    if len(items) > len(t.dims):
        raise BuildError(f"{len(items)} indices on a buffer of {len(t.dims)} dimensions", expected=t, got=f"{len(items)} indices")
    dims: list[Dim] = []
    for position, old in enumerate(t.dims):
        item = items[position] if position < len(items) else None
        if item is None:
            dims.append(old)
        elif isinstance(item, Span):
            length = simplify(binary("-", item.stop, item.start))
            _in_range(item.start, old, position, past=1)
            _in_range(item.stop, old, position, past=1)
            if isinstance(length, int) and length < 0:
                raise BuildError(f"the range of dimension {position} ends before it starts", got=f"{item.start} : {item.stop}")
            assert not isinstance(length, float)
            dims.append(length)
        else:
            _in_range(item, old, position, past=0)
    return tuple(dims)


def _in_range(index: Operand, size: Dim, position: int, past: int) -> None:
    if isinstance(index, float):
        raise BuildError(f"index {index} of dimension {position} is not an integer")
    if isinstance(index, int) and (index < 0 or (isinstance(size, int) and index >= size + past)):
        raise BuildError(
            f"index {index} is outside dimension {position}",
            expected=f"0 .. {show_expr(binary('-', size, 1 - past))}", got=index,
        )  # fmt: skip


def wrap_index(index: Operand, size: Operand) -> Operand:
    """A literal negative index counts from the end; an expression is taken as it is, and so is a literal that is outside."""
    if not isinstance(index, int) or index >= 0 or (isinstance(size, int) and size + index < 0):
        return index
    return binary("+", size, index)
