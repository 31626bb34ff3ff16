"""Types of the operations that compute across elements: reductions, scans, normalisations, matrix products, losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostir.graph.rules import BOOL, F32, I64, Rule, broadcast, equal_or_fail, need, promote, reduced, wrap_dim
from hostir.types import Dim, DType, TensorType


def summed(x: TensorType, dims: Sequence[int] | None, keepdim: bool, dtype: DType | None) -> TensorType:
    """sum and prod: integers and bool add up in i64."""
    return TensorType(dtype or (I64 if x.dtype.is_integral else x.dtype), reduced(x, dims, keepdim))


def mean(x: TensorType, dims: Sequence[int] | None, keepdim: bool, dtype: DType | None) -> TensorType:
    result = dtype or x.dtype
    need(not result.is_integral, f"the mean of {x.dtype} numbers has no dtype", expected="floats", got=x.dtype, cure="give dtype=, or cast first")
    return TensorType(result, reduced(x, dims, keepdim))


def extremum(x: TensorType, dims: Sequence[int] | None, keepdim: bool) -> TensorType:
    """amax and amin: there is no extremum of nothing."""
    need(x.dtype.kind != "complex", "complex numbers have no order", got=x.dtype)
    gone = range(len(x.dims)) if not dims else [wrap_dim(d, len(x.dims)) for d in dims]
    empty = [d for d in gone if x.dims and isinstance(x.dims[d], int) and x.dims[d] == 0]
    need(not empty, "an extremum over no elements does not exist", expected="at least one element in each reduced dim", got=x)
    return TensorType(x.dtype, reduced(x, dims, keepdim))


def var(x: TensorType, dims: Sequence[int] | None, keepdim: bool, correction: object) -> TensorType:
    need(not x.dtype.is_integral, f"the variance of {x.dtype} numbers has no dtype", expected="floats", got=x.dtype, cure="cast first")
    need(isinstance(correction, (int, float)), "the correction is a number", got=correction)
    return TensorType(F32 if x.dtype.kind == "complex" else x.dtype, reduced(x, dims, keepdim))


def truth(x: TensorType, dims: Sequence[int] | None, keepdim: bool) -> TensorType:
    """any and all: bool, except that u8 stays u8, as in torch."""
    return TensorType(x.dtype if x.dtype.name == "u8" else BOOL, reduced(x, dims, keepdim))


def position(x: TensorType, dim: int | None, keepdim: bool) -> TensorType:
    """argmax and argmin."""
    need(x.dtype.kind not in ("complex", "bool"), "only real numbers have a largest", got=x.dtype)
    shape = reduced(x, None if dim is None else [dim], keepdim)
    gone = x.dims if dim is None else x.dims[wrap_dim(dim, len(x.dims)) :][:1]
    need(not any(isinstance(d, int) and d == 0 for d in gone), "an extremum over no elements does not exist", got=x)
    return TensorType(I64, shape)


def topk(x: TensorType, k: Any, dim: int, largest: bool, sorted: bool) -> tuple[TensorType, TensorType]:
    at = wrap_dim(dim, len(x.dims))
    need(x.dtype.kind not in ("complex", "bool"), "only real numbers have a largest", got=x.dtype)
    size = x.dims[at] if x.dims else 1
    need(not (isinstance(k, int) and isinstance(size, int)) or 0 <= k <= size, f"dim {at} has no {k} elements", expected=f"at most {size}", got=k)
    dims = (*x.dims[:at], k, *x.dims[at + 1 :]) if x.dims else ()
    return TensorType(x.dtype, dims), TensorType(I64, dims)


def scan(x: TensorType, dim: int, dtype: DType | None) -> TensorType:
    wrap_dim(dim, len(x.dims))
    return TensorType(dtype or (I64 if x.dtype.is_integral else x.dtype), x.dims)


def softmax(x: TensorType, dim: int, dtype: DType | None) -> TensorType:
    wrap_dim(dim, len(x.dims))
    result = dtype or x.dtype
    need(result.is_float, "softmax works on floats", expected="a float dtype", got=result, cure="give dtype=, or cast first")
    return TensorType(result, x.dims)


def normalised(x: TensorType, shape: Sequence[Dim], *parts: TensorType | None) -> None:
    """The last dims of ``x`` are ``shape``, and so are weight and bias."""
    rank = len(shape)
    need(0 < rank <= len(x.dims), "the normalised dims are the last ones", expected=x, got=list(shape))
    for want, have in zip(shape, x.dims[len(x.dims) - rank :], strict=True):
        equal_or_fail(want, have, "normalised shape")
    for part in parts:
        if part is not None:
            need(len(part.dims) == rank, "weight and bias have the normalised shape", expected=list(shape), got=part)
            for want, have in zip(shape, part.dims, strict=True):
                equal_or_fail(want, have, "weight or bias")
    need(x.dtype.is_float, "normalisation works on floats", got=x.dtype)


def layer_norm(x: TensorType, w: TensorType | None, b: TensorType | None, shape: Sequence[Dim], eps: object) -> TensorType:
    normalised(x, shape, w, b)
    for part in (w, b):
        mixed = part is None or part.dtype == x.dtype or (part.dtype is F32 and x.dtype.itemsize == 2)
        need(mixed, "weight and bias have the operand's dtype (f32 goes with f16 and bf16)", expected=x.dtype, got=part)
    return TensorType(x.dtype, x.dims)


def rms_norm(x: TensorType, w: TensorType | None, shape: Sequence[Dim], eps: object) -> TensorType:
    normalised(x, shape, w)
    return TensorType(x.dtype, x.dims)


# ------------------------------------------------------------------------------------------------------------ matrix products


def _one_dtype(first: TensorType, *others: TensorType | None) -> DType:
    for other in others:
        if other is not None:
            need(first.dtype == other.dtype, "the operands have one dtype", expected=first.dtype, got=other.dtype, cure="cast one of them")
    return first.dtype


def mm(x: TensorType, y: TensorType) -> TensorType:
    dtype = _one_dtype(x, y)
    need(len(x.dims) == 2 and len(y.dims) == 2, "mm multiplies two matrices", expected="two dims each", got=f"{x} and {y}", cure="use matmul")
    equal_or_fail(x.dims[1], y.dims[0], f"inner sizes of {x} and {y}")
    return TensorType(dtype, (x.dims[0], y.dims[1]))


def bmm(x: TensorType, y: TensorType) -> TensorType:
    dtype = _one_dtype(x, y)
    need(len(x.dims) == 3 and len(y.dims) == 3, "bmm multiplies two batches of matrices", expected="three dims each", got=f"{x} and {y}")
    batch = equal_or_fail(x.dims[0], y.dims[0], f"batch sizes of {x} and {y}")
    equal_or_fail(x.dims[2], y.dims[1], f"inner sizes of {x} and {y}")
    return TensorType(dtype, (batch, x.dims[1], y.dims[2]))


def matmul(x: TensorType, y: TensorType) -> TensorType:
    dtype = _one_dtype(x, y)
    need(bool(x.dims) and bool(y.dims), "matmul takes no 0-d tensors", got=f"{x} and {y}", cure="use mul")
    left = x.dims if len(x.dims) > 1 else (1, *x.dims)
    right = y.dims if len(y.dims) > 1 else (*y.dims, 1)
    equal_or_fail(left[-1], right[-2], f"inner sizes of {x} and {y}")
    dims: tuple[Dim, ...] = broadcast(left[:-2], right[:-2])
    dims += (left[-2],) if len(x.dims) > 1 else ()
    dims += (right[-1],) if len(y.dims) > 1 else ()
    return TensorType(dtype, dims)


def linear(x: TensorType, w: TensorType, b: TensorType | None) -> TensorType:
    """``x @ w.T + b``."""
    dtype = _one_dtype(x, w, b)
    need(bool(x.dims), "linear takes no 0-d tensors", got=x)
    need(len(w.dims) in (1, 2), "a weight has two dims, out and in", got=w)
    equal_or_fail(x.dims[-1], w.dims[-1], f"inner sizes of {x} and {w}")
    if b is not None:
        need(len(b.dims) <= len(w.dims) - 1, "a bias has the output's size", expected=w.dims[0], got=b)
        if b.dims:
            equal_or_fail(w.dims[0], b.dims[0], "the bias")
    return TensorType(dtype, (*x.dims[:-1], *w.dims[:-1]))


def addmm(c: TensorType, x: TensorType, y: TensorType, beta: object, alpha: object) -> TensorType:
    """``beta * c + alpha * (x @ y)``; ``c`` broadcasts."""
    product = mm(x, y)
    _one_dtype(x, c)
    shape = broadcast(c.dims, product.dims)
    need(len(shape) == 2 and TensorType(c.dtype, shape).agrees(product) is True, "what is added has another shape", expected=product, got=c)
    return product


def baddbmm(c: TensorType, x: TensorType, y: TensorType, beta: object, alpha: object) -> TensorType:
    product = bmm(x, y)
    _one_dtype(x, c)
    shape = broadcast(c.dims, product.dims)
    need(len(shape) == 3 and TensorType(c.dtype, shape).agrees(product) is True, "what is added has another shape", expected=product, got=c)
    return product


def sdpa(q: TensorType, k: TensorType, v: TensorType, mask: TensorType | None, gqa: bool, **_: Any) -> TensorType:
    """softmax(q kT * scale + mask) v, over the last two dims."""
    dtype = _one_dtype(q, k, v)
    need(dtype.is_float, "attention works on floats", got=dtype)
    need(all(len(t.dims) >= 2 for t in (q, k, v)), "attention takes at least two dims, rows and features", got=f"{q}, {k}, {v}")
    equal_or_fail(q.dims[-1], k.dims[-1], "features of query and key")
    equal_or_fail(k.dims[-2], v.dims[-2], "rows of key and value")
    batch = q.dims[:-2] if gqa else broadcast(q.dims[:-2], k.dims[:-2], v.dims[:-2])
    return TensorType(dtype, (*batch, q.dims[-2], v.dims[-1]))


def cross_entropy(x: TensorType, target: TensorType, w: TensorType | None, reduction: str, **_: Any) -> TensorType:
    need(x.dtype.is_float, "cross_entropy takes floats", got=x.dtype)
    need(bool(x.dims), "cross_entropy takes at least the classes", got=x)
    batch = () if len(x.dims) == 1 else (x.dims[0], *x.dims[2:])
    classes = x.dims[0] if len(x.dims) == 1 else x.dims[1]
    shape = x.dims if target.dtype.is_float else batch
    need(target.dtype.is_float or target.dtype.name in ("i64", "u8"), "class numbers are i64", expected="i64", got=target.dtype, cure="cast them")
    need(len(target.dims) == len(shape), "targets are class numbers, or one probability a class", expected=list(shape), got=target)
    for a, c in zip(shape, target.dims, strict=True):
        equal_or_fail(a, c, "targets")
    if w is not None:
        need(len(w.dims) == 1, "one weight a class", got=w)
        equal_or_fail(classes, w.dims[0], "class weights")
        _one_dtype(x, w)
    dtype = promote(x.dtype, target.dtype) if target.dtype.is_float else x.dtype
    return TensorType(dtype, batch if reduction == "none" else ())


def like_first(*names: str, floats: bool = False) -> Rule:
    """The result is as the operand ``x``; ``names`` are dims to check."""

    def rule(x: TensorType, **rest: Any) -> TensorType:
        for name in names:
            wrap_dim(rest[name], len(x.dims))
        need(not floats or not x.dtype.is_integral, "this works on floats", got=x.dtype)
        return TensorType(x.dtype, x.dims)

    return rule
