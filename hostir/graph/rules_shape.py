"""Types of the operations that move elements about without computing: views, copies, indexing, and tensors made from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostir.graph.rules import I64, ceil_div, equal_or_fail, minus, need, number_dtype, plus, promote, wrap_dim
from hostir.types import Dim, DType, Expr, TensorType, binary, dims_equal, product, simplify


def same_type(x: TensorType, **_: Any) -> TensorType:
    """The result is as the first operand."""
    return TensorType(x.dtype, x.dims)


def triangle(x: TensorType, diagonal: int) -> TensorType:
    """tril and triu."""
    need(len(x.dims) >= 2, "a triangle needs two dims", expected="at least two", got=x)
    return TensorType(x.dtype, x.dims)


def cast(x: TensorType, dtype: DType) -> TensorType:
    return TensorType(dtype, x.dims)


def transpose(x: TensorType, dim0: int, dim1: int) -> TensorType:
    dims = list(x.dims)
    if dims:
        a, b = wrap_dim(dim0, len(dims)), wrap_dim(dim1, len(dims))
        dims[a], dims[b] = dims[b], dims[a]
    return TensorType(x.dtype, tuple(dims))


def permute(x: TensorType, dims: Sequence[int]) -> TensorType:
    order = [wrap_dim(d, len(x.dims)) for d in dims]
    need(sorted(order) == list(range(len(x.dims))), "permute names each dim once", expected=f"the {len(x.dims)} dims of {x}", got=list(dims))
    return TensorType(x.dtype, tuple(x.dims[d] for d in order))


def reshape(x: TensorType, shape: Sequence[Dim]) -> TensorType:
    wild = [i for i, d in enumerate(shape) if isinstance(d, int) and d == -1]
    need(len(wild) <= 1, "only one size of a reshape can be -1", got=list(shape))
    dims = list(shape)
    total = product(x.dims)
    if wild:
        known = product(tuple(d for i, d in enumerate(shape) if i not in wild))
        need(isinstance(known, Expr) or known != 0, "a size of -1 cannot be worked out beside a size of 0", got=list(shape))
        fits = not isinstance(total, int) or not isinstance(known, int) or total % known == 0
        need(fits, "the sizes hold another number of elements", expected=x, got=list(shape))
        dims[wild[0]] = _quotient(x.dims, [d for i, d in enumerate(shape) if i not in wild])
    equal = dims_equal(product(tuple(dims)), total)
    need(equal is not False, "the sizes hold another number of elements", expected=f"{total} elements ({x})", got=list(shape))
    return TensorType(x.dtype, tuple(dims))


def _quotient(total: Sequence[Dim], known: Sequence[Dim]) -> Dim:
    """The product of ``total`` over the product of ``known``; factors that stand in both go first."""
    left, right = list(total), []
    for k in known:
        twin = next((i for i, d in enumerate(left) if dims_equal(d, k) is True), None)
        if twin is None:
            right.append(k)
        else:
            del left[twin]
    over, under = product(tuple(left)), product(tuple(right))
    return over if isinstance(under, int) and under == 1 else simplify(binary("//", over, under))  # type: ignore[return-value]


def broadcast_dims(x: TensorType, dims: Sequence[int]) -> TensorType:
    """New dims of size 1 at these positions of the result."""
    rank = len(x.dims) + len(dims)
    new = {wrap_dim(d, rank) for d in dims}
    need(len(new) == len(dims), "each new dim is named once", got=list(dims))
    old = iter(x.dims)
    return TensorType(x.dtype, tuple(1 if i in new else next(old) for i in range(rank)))


def expand(x: TensorType, shape: Sequence[Dim]) -> TensorType:
    extra = len(shape) - len(x.dims)
    need(extra >= 0, "expand cannot drop dims", expected=f"at least {len(x.dims)} sizes", got=list(shape))
    dims: list[Dim] = []
    for i, want in enumerate(shape):
        have = x.dims[i - extra] if i >= extra else None
        if isinstance(want, int) and want == -1:
            need(have is not None, "-1 keeps a size, and a new dim has none", got=list(shape))
            dims.append(have)  # type: ignore[arg-type]
        elif have is None or (isinstance(have, int) and have == 1):
            dims.append(want)
        else:
            dims.append(equal_or_fail(have, want, f"dim {i - extra} of {x}"))
    return TensorType(x.dtype, tuple(dims))


def squeeze(x: TensorType, dims: Sequence[int]) -> TensorType:
    gone = {wrap_dim(d, len(x.dims)) for d in dims}
    return TensorType(x.dtype, tuple(d for i, d in enumerate(x.dims) if not (i in gone and isinstance(d, int) and d == 1)))


def unsqueeze(x: TensorType, dim: int) -> TensorType:
    at = wrap_dim(dim, len(x.dims) + 1)
    return TensorType(x.dtype, (*x.dims[:at], 1, *x.dims[at:]))


def slice_dim(x: TensorType, dim: int, start: Any, stop: Any, step: int) -> TensorType:
    at = _position(x, dim, "slice")
    stop = x.dims[at] if stop is None else stop
    need(isinstance(step, int) and step > 0, "a slice goes forward", expected="a step of at least 1", got=step)
    length = minus(stop, start)
    if isinstance(length, int) and length < 0:
        length = 0
    if step != 1:
        length = ceil_div(length, step)
    return TensorType(x.dtype, (*x.dims[:at], length, *x.dims[at + 1 :]))


def select(x: TensorType, dim: int, index: Any) -> TensorType:
    at = _position(x, dim, "select")
    size = x.dims[at]
    inside = not (isinstance(index, int) and isinstance(size, int)) or -size <= index < size
    need(inside, f"index {index} is past the end of dim {at} of {x}", expected=f"0 .. {size}", got=index)
    return TensorType(x.dtype, x.dims[:at] + x.dims[at + 1 :])


def _position(x: TensorType, dim: int, what: str) -> int:
    need(bool(x.dims), f"a 0-d tensor has no dim to {what}")
    return wrap_dim(dim, len(x.dims))


def slice_scatter(x: TensorType, y: TensorType, dim: int, start: Any, stop: Any, step: int) -> TensorType:
    part = slice_dim(x, dim, start, stop, step)
    broadcast_into(part, y)
    return TensorType(x.dtype, x.dims)


def select_scatter(x: TensorType, y: TensorType, dim: int, index: Any) -> TensorType:
    broadcast_into(select(x, dim, index), y)
    return TensorType(x.dtype, x.dims)


def broadcast_into(part: TensorType, y: TensorType) -> None:
    need(part.agrees(TensorType(part.dtype, y.dims)) is not False, "what is written has another shape", expected=part, got=y)


def cat(xs: Sequence[TensorType], dim: int) -> TensorType:
    need(bool(xs), "cat needs at least one tensor")
    rank = len(xs[0].dims)
    need(rank > 0, "0-d tensors cannot be concatenated", cure="use stack")
    at = wrap_dim(dim, rank)
    dtype, total, dims = xs[0].dtype, xs[0].dims[at], list(xs[0].dims)
    for x in xs[1:]:
        need(len(x.dims) == rank, "tensors to be concatenated have equally many dims", expected=xs[0], got=x)
        dtype = promote(dtype, x.dtype)
        total = plus(total, x.dims[at])
        for i, d in enumerate(x.dims):
            if i != at:
                equal_or_fail(dims[i], d, f"dim {i} of the tensors to be concatenated")
    dims[at] = total
    return TensorType(dtype, tuple(dims))


def stack(xs: Sequence[TensorType], dim: int) -> TensorType:
    need(bool(xs), "stack needs at least one tensor")
    dtype = xs[0].dtype
    for x in xs[1:]:
        need(x.agrees(TensorType(x.dtype, xs[0].dims)) is True, "tensors to be stacked have one shape", expected=xs[0], got=x)
        dtype = promote(dtype, x.dtype)
    at = wrap_dim(dim, len(xs[0].dims) + 1)
    return TensorType(dtype, (*xs[0].dims[:at], len(xs), *xs[0].dims[at:]))


def pad(x: TensorType, pads: Sequence[Any], value: object) -> TensorType:
    """``pads``: before and after, for the last dim first, as torch has it."""
    need(len(pads) % 2 == 0 and len(pads) <= 2 * len(x.dims), "pads come in pairs, one for each dim at most", got=list(pads))
    dims = list(x.dims)
    for i in range(len(pads) // 2):
        at = len(dims) - 1 - i
        dims[at] = plus(dims[at], plus(pads[2 * i], pads[2 * i + 1]))
        left = dims[at]
        need(not (isinstance(left, int) and left < 0), "negative pads cut away more than there is", expected=x, got=list(pads))
    number_dtype(value)
    return TensorType(x.dtype, tuple(dims))


def flip(x: TensorType, dims: Sequence[int]) -> TensorType:
    gone = [wrap_dim(d, len(x.dims)) for d in dims]
    need(len(set(gone)) == len(gone), "flip names each dim once", got=list(dims))
    return TensorType(x.dtype, x.dims)


def _index(index: TensorType, *also: str) -> None:
    need(index.dtype.name in ("i64", "i32", *also), "indices are integers", expected="i64 or i32", got=index.dtype, cure="cast the index to i64")


def gather(x: TensorType, index: TensorType, dim: int) -> TensorType:
    need(index.dtype is I64 or index.dtype.name == "i32", "indices are integers", expected="i64", got=index.dtype, cure="cast the index")
    need(len(x.dims) == len(index.dims) or not x.dims or not index.dims, "gather has an index with as many dims", expected=x, got=index)
    if x.dims:
        wrap_dim(dim, len(x.dims))
    return TensorType(x.dtype, index.dims)


def index_select(x: TensorType, index: TensorType, dim: int) -> TensorType:
    _index(index)
    need(len(index.dims) <= 1, "index_select takes a list of indices", expected="one dim", got=index, cure="use embedding or gather")
    if not x.dims:
        return TensorType(x.dtype, ())
    at = wrap_dim(dim, len(x.dims))
    return TensorType(x.dtype, (*x.dims[:at], index.dims[0] if index.dims else 1, *x.dims[at + 1 :]))


def embedding(w: TensorType, index: TensorType, **_: Any) -> TensorType:
    _index(index)
    need(len(w.dims) == 2, "an embedding's weight has two dims", got=w)
    return TensorType(w.dtype, (*index.dims, w.dims[1]))


def scatter_add(x: TensorType, index: TensorType, y: TensorType, dim: int) -> TensorType:
    need(x.dtype == y.dtype, "scatter_add has one dtype", expected=x.dtype, got=y.dtype, cure="cast one of them")
    _index(index)
    if x.dims:
        wrap_dim(dim, len(x.dims))
    return TensorType(x.dtype, x.dims)


def full(shape: Sequence[Dim], value: object, dtype: DType | None) -> TensorType:
    return TensorType(dtype or number_dtype(value), tuple(shape))


def rand(shape: Sequence[Dim], dtype: DType) -> TensorType:
    need(dtype.is_float, "random numbers in [0, 1) are floats", expected="a float dtype", got=dtype)
    return TensorType(dtype, tuple(shape))


def iota(start: Any, stop: Any, step: Any, dtype: DType) -> TensorType:
    whole = all(isinstance(v, (int, Expr)) and number_dtype(v).is_integral for v in (start, stop, step))
    need(whole, "iota counts in whole steps", got=f"{start}, {stop}, {step}", cure="scale an integer iota")
    need(isinstance(step, int) and step != 0, "the step is a number other than 0", got=step)
    length = ceil_div(minus(stop, start), step) if step > 0 else ceil_div(minus(start, stop), -step)
    return TensorType(dtype, (max(length, 0) if isinstance(length, int) else length,))
