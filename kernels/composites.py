"""How operations that are no single expression are written with folds and expressions: one small function for each row of the op table.

Every function takes the lowering, the result's type and the row's values by name, and returns the value. Sums of f16 and bf16 run in
f32, sums of integers in i64, and variances are taken about the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from hostir.kernels.layout import Arrange, Cut, Reshape, Step
from hostir.kernels.lower import Lowering, Sizes, fast
from hostir.kernels.nodes import BOOL, I64, Node, Number, Pick, Position, register
from hostir.types import DType, TensorType

Composite: TypeAlias = Callable[..., Node]
SizesOf: TypeAlias = Sequence[Any]


# ------------------------------------------------------------------------------------------------------------------- views


def _permute(low: Lowering, result: Sizes, x: Node, dims: Sequence[int]) -> list[Step]:
    return [Arrange(tuple(dims), result)]


def _transpose(low: Lowering, result: Sizes, x: Node, dim0: int, dim1: int) -> list[Step]:
    order = list(range(len(x.shape)))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return [Arrange(tuple(order), result)]


def _reshape(low: Lowering, result: Sizes, x: Node, **_: Any) -> list[Step]:
    return [Reshape(result)]


def _expand(low: Lowering, result: Sizes, x: Node, shape: object) -> list[Step]:
    return [stretch(x.shape, result)]


def _slice(low: Lowering, result: Sizes, x: Node, dim: int, start: Any, stop: Any, step: int) -> list[Step]:
    return [Cut(dim, low.size(start), step, result[dim])]


def _select(low: Lowering, result: Sizes, x: Node, dim: int, index: Any) -> list[Step]:
    left = tuple(d for d in range(len(x.shape)) if d != dim)
    return [Cut(dim, low.size(index), 1, 1), Arrange(left, result)]


def stretch(shape: Sizes, to: Sizes) -> Arrange:
    """``shape`` broadcast to the sizes ``to``, aligned at the last dim."""
    extra = len(to) - len(shape)
    return Arrange(tuple(d - extra if d >= extra and shape[d - extra] == n else None for d, n in enumerate(to)), to)


VIEWS: Final[Mapping[str, Callable[..., list[Step]]]] = MappingProxyType(
    {
        "permute": _permute,
        "transpose": _transpose,
        "reshape": _reshape,
        "broadcast": _reshape,
        "squeeze": _reshape,
        "unsqueeze": _reshape,
        "expand": _expand,
        "slice": _slice,
        "select": _select,
    }
)


# -------------------------------------------------------------------------------------------------------------- reductions


def _dims(x: Node, dims: SizesOf | None) -> tuple[int, ...]:
    """The dims that are reduced (none named: all)."""
    return tuple(range(len(x.shape))) if not dims else tuple(sorted(d for d in dims if d < len(x.shape)))


def _sum(low: Lowering, result: TensorType, x: Node, dims: SizesOf | None, keepdim: bool, dtype: DType | None, kind: str = "sum") -> Node:
    held = register(result.dtype)
    (total,) = low.reduce(kind, [low.cast(x, result.dtype)], _dims(x, dims), keepdim, [held])
    return total


def _prod(low: Lowering, result: TensorType, **rest: Any) -> Node:
    return _sum(low, result, kind="prod", **rest)


def _mean(low: Lowering, result: TensorType, x: Node, dims: SizesOf | None, keepdim: bool, dtype: DType | None) -> Node:
    held = register(result.dtype)
    total = _sum(low, result, x, dims, keepdim, dtype)
    return low.point("hd.div(x, n)", held, x=total, n=low.count(_count(x, _dims(x, dims)), held))


def _count(x: Node, dims: Sequence[int]) -> int:
    count = 1
    for d in dims:
        count *= x.shape[d]
    return count


def _extremum(kind: str) -> Composite:
    def make(low: Lowering, result: TensorType, x: Node, dims: SizesOf | None, keepdim: bool) -> Node:
        (found,) = low.reduce(kind, [x], _dims(x, dims), keepdim, [x.dtype])
        return found

    return make


def _truth(kind: str) -> Composite:
    def make(low: Lowering, result: TensorType, x: Node, dims: SizesOf | None, keepdim: bool) -> Node:
        (found,) = low.reduce(kind, [low.test("x != 0", register(x.dtype), x=x)], _dims(x, dims), keepdim, [BOOL])
        return low.cast(found, result.dtype)

    return make


def _where(kind: str) -> Composite:
    def make(low: Lowering, result: TensorType, x: Node, dim: int | None, keepdim: bool) -> Node:
        dims = _dims(x, None if dim is None else [dim])
        place: Node = Position(dims[0], x.shape) if dims else Number(0, I64)
        for d in dims[1:]:  # the row-major number of the element over the reduced dims
            place = low.point("x * n + i", I64, x=place, n=low.count(x.shape[d], I64), i=Position(d, x.shape))
        _, found = low.reduce(kind, [x, place], dims, keepdim, [x.dtype, I64])
        return found

    return make


def _moments(low: Lowering, x: Node, dims: Sequence[int], held: DType) -> tuple[Node, Node]:
    """Mean and sum of squared distances from it, dims kept."""
    mean, m2 = low.reduce("moments", [low.cast(x, held)], dims, True, [held, held])
    return mean, m2


def _var(low: Lowering, result: TensorType, x: Node, dims: SizesOf | None, keepdim: bool, correction: float) -> Node:
    over = _dims(x, dims)
    held = register(x.dtype)
    _, m2 = low.reduce("moments", [x], over, keepdim, [held, held])
    return low.point("hd.div(x, n)", held, x=m2, n=low.count(max(_count(x, over) - correction, 0), held))  # type: ignore[arg-type]


def _softmax(low: Lowering, result: TensorType, x: Node, dim: int, dtype: DType | None, log: bool = False) -> Node:
    held = register(result.dtype)
    x = low.cast(x, result.dtype)
    dims = [dim] if x.shape else []
    exp = fast("hd.exp(x - top)") if result.dtype.itemsize == 2 else "hd.exp(x - top)"
    if not low.holds(_count(x, dims), dim == len(x.shape) - 1):
        top, total = low.reduce("softmax", [x], dims, True, [held, held])  # one pass over rows that are read again
        power = low.point(exp, held, x=x, top=top)
    else:
        (top,) = low.reduce("amax", [low.point("x", held, x=x)], dims, True, [held])
        power = low.point(exp, held, x=x, top=top)
        (total,) = low.reduce("sum", [power], dims, True, [held])
    if log:
        return low.point("x - top - hd.log(total)", held, x=x, top=top, total=total)
    return low.point("x * y", held, x=power, y=low.point("hd.div(1.0, total)", held, total=total))


def _log_softmax(low: Lowering, result: TensorType, **rest: Any) -> Node:
    return _softmax(low, result, log=True, **rest)


def _affine(low: Lowering, y: Node, held: DType, w: Node | None, b: Node | None) -> Node:
    if w is not None:
        y = low.point("y * w", held, y=y, w=w)
    return y if b is None else low.point("y + b", held, y=y, b=b)


def _layer_norm(low: Lowering, result: TensorType, x: Node, w: Node | None, b: Node | None, shape: Sequence[Any], eps: Any) -> Node:
    held = register(result.dtype)
    over = range(len(x.shape) - len(shape), len(x.shape))
    mean, m2 = _moments(low, x, tuple(over), held)
    scale = low.point("hd.rsqrt(hd.div(m2, n) + eps)", held, m2=m2, n=low.count(_count(x, over), held), eps=low.number(eps, held))
    return _affine(low, low.point("(x - mean) * scale", held, x=x, mean=mean, scale=scale), held, w, b)


_EPS: Final = MappingProxyType({"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7})


def _rms_norm(low: Lowering, result: TensorType, x: Node, w: Node | None, shape: Sequence[Any], eps: Any) -> Node:
    held = register(result.dtype)
    over = tuple(range(len(x.shape) - len(shape), len(x.shape)))
    square = low.point("x * x", held, x=x)
    (total,) = low.reduce("sum", [square], over, True, [held])
    least = low.number(_EPS[x.dtype.name if x.dtype.itemsize > 2 else "f32"] if eps is None else eps, held)
    scale = low.point("hd.rsqrt(hd.div(total, n) + eps)", held, total=total, n=low.count(_count(x, over), held), eps=least)
    return _affine(low, low.point("x * scale", held, x=x, scale=scale), held, w, None)


# ------------------------------------------------------------------------------------------------------- moving and making


def _cast(low: Lowering, result: TensorType, x: Node, dtype: DType) -> Node:
    return low.cast(x, dtype) if x.dtype is not dtype else low.point("x", register(dtype), x=x)


def _full(low: Lowering, result: TensorType, shape: object, value: Any, dtype: object) -> Node:
    made = low.number(value, register(result.dtype))
    return low.view(low.point("x", register(result.dtype), x=made), stretch((), low.sizes(result.dims)))


def _iota(low: Lowering, result: TensorType, start: Any, stop: Any, step: int, dtype: DType) -> Node:
    place = Position(0, low.sizes(result.dims))
    made = low.point("i * step + start", I64, i=place, step=Number(step, I64), start=low.number(start, I64))
    return low.cast(made, result.dtype)


def _pick(low: Lowering, base: Node, piece: Node, dim: int, start: int) -> Node:
    return Pick(piece, base, dim, start, base.dtype, base.shape)


def _blank(low: Lowering, result: TensorType, value: Any = 0) -> Node:
    return _full(low, result, None, value, None)


def _cat(low: Lowering, result: TensorType, xs: Sequence[Node], dim: int) -> Node:
    made, at = _blank(low, result), 0
    for x in xs:
        made = _pick(low, made, low.cast(x, result.dtype), dim, at)
        at += x.shape[dim]
    return made


def _stack(low: Lowering, result: TensorType, xs: Sequence[Node], dim: int) -> Node:
    return _cat(low, result, [low.view(x, Reshape((*x.shape[:dim], 1, *x.shape[dim:]))) for x in xs], dim)


def _pad(low: Lowering, result: TensorType, x: Node, pads: Sequence[Any], value: Any) -> Node:
    for i in range(len(pads) // 2):
        dim = len(x.shape) - 1 - i
        before, after = low.size(pads[2 * i]), low.size(pads[2 * i + 1])
        size = x.shape[dim] + before + after
        if before < 0 or after < 0:
            cut = Cut(dim, max(-before, 0), 1, x.shape[dim] + min(before, 0) + min(after, 0))
            x, before, after = low.view(x, cut), max(before, 0), max(after, 0)
        if before or after:
            shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
            x = _pick(low, _full(low, TensorType(x.dtype, shape), shape, value, None), x, dim, before)
    return x if x.shape else low.point("x", register(x.dtype), x=x)


def _flip(low: Lowering, result: TensorType, x: Node, dims: Sequence[int]) -> Node:
    made = low.point("x", register(x.dtype), x=x)
    for d in dims:
        made = low.view(made, Cut(d, x.shape[d] - 1, -1, x.shape[d]))
    return made


def _slice_scatter(low: Lowering, result: TensorType, x: Node, y: Node, dim: int, start: Any, stop: Any, step: int) -> Node:
    first = low.size(start)
    size = (x.shape[dim] if stop is None else low.size(stop)) - first
    part = (*x.shape[:dim], max(size, 0), *x.shape[dim + 1 :])
    return _pick(low, x, low.view(low.cast(y, x.dtype), stretch(y.shape, part)), dim, first)


def _select_scatter(low: Lowering, result: TensorType, x: Node, y: Node, dim: int, index: Any) -> Node:
    part = (*x.shape[:dim], *x.shape[dim + 1 :])
    row = low.view(low.view(low.cast(y, x.dtype), stretch(y.shape, part)), Reshape((*x.shape[:dim], 1, *x.shape[dim + 1 :])))
    return _pick(low, x, row, dim, low.size(index))


def _triangle(sign: str) -> Composite:
    def make(low: Lowering, result: TensorType, x: Node, diagonal: int) -> Node:
        rank = len(x.shape)
        row, column = Position(rank - 2, x.shape), Position(rank - 1, x.shape)
        keep = low.test(f"j - i {sign} d", I64, j=column, i=row, d=Number(diagonal, I64))
        return low.point("tl.where(cond, x, zero)", register(x.dtype), cond=keep, x=x, zero=Number(0, register(x.dtype)))

    return make


COMPOSITES: Final[Mapping[str, Composite]] = MappingProxyType(
    {
        "sum": _sum,
        "prod": _prod,
        "mean": _mean,
        "amax": _extremum("amax"),
        "amin": _extremum("amin"),
        "any": _truth("any"),
        "all": _truth("all"),
        "argmax": _where("argmax"),
        "argmin": _where("argmin"),
        "var": _var,
        "softmax": _softmax,
        "log_softmax": _log_softmax,
        "layer_norm": _layer_norm,
        "rms_norm": _rms_norm,
        "cast": _cast,
        "full": _full,
        "iota": _iota,
        "cat": _cat,
        "stack": _stack,
        "pad": _pad,
        "flip": _flip,
        "slice_scatter": _slice_scatter,
        "select_scatter": _select_scatter,
        "tril": _triangle("<="),
        "triu": _triangle(">="),
    }
)

REFUSALS: Final[Mapping[str, Callable[..., str | None]]] = MappingProxyType(
    {
        "slice_scatter": lambda step, **_: None if step == 1 else f"slice_scatter with a step of {step} is not written yet",
        "silu": lambda x: None if x.type.dtype.is_float else f"torch has no silu of {x.type.dtype}",
        "gelu": lambda x, **_: None if x.type.dtype.is_float else f"torch has no gelu of {x.type.dtype}",
        "rms_norm": lambda x, w, **_: (
            None if w is None or w.type is None or w.type.dtype is x.type.dtype else "rms_norm with a weight of another dtype"
        ),
    }
)
"""What of a row is not generated: a function of its bound values that gives the reason, or None."""
