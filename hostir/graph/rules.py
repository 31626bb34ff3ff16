"""What type an operation's result has: torch's rules, written down once, over symbolic sizes.

A rule is a function of an operation's operands and attributes, by name, where each tensor is replaced by its type. It returns
the result's type (or a tuple of them) or raises BuildError. Sizes that are merely equal at run time are not equal here: ``m`` and
``n`` do not broadcast, and no size is special because it is 0 or 1 unless it is the constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from hostir.errors import BuildError
from hostir.types import DTYPES, Dim, DType, Expr, TensorType, Var, binary, children, dims_equal, simplify

Rule: TypeAlias = Callable[..., "TensorType | tuple[TensorType, ...]"]
F32: Final = DTYPES["f32"]
I64: Final = DTYPES["i64"]
BOOL: Final = DTYPES["bool"]
_LEVEL: Final = {"bool": 0, "uint": 1, "int": 1, "float": 2, "complex": 3}

# ------------------------------------------------------------------------------------------------------------------ dtypes


def promote(a: DType, b: DType) -> DType:
    """The smallest dtype that torch promotes both to."""
    if a is b:
        return a
    low, high = sorted((a, b), key=lambda d: (_LEVEL[d.kind], d.itemsize))
    if any(d.name.startswith("f8") for d in (a, b)):
        raise BuildError(f"{a} and {b} have no common dtype", cure="cast one of them first")
    if high.kind == "complex":
        if low.name == "f64":
            raise BuildError("f64 with c64 would be c128, which is not a dtype that programs know", cure="cast to f32 first")
        return high
    if {a.name, b.name} == {"f16", "bf16"}:
        return F32
    if {a.name, b.name} == {"i8", "u8"}:
        return DTYPES["i16"]
    return high


def number_dtype(x: object) -> DType:
    """The dtype that a Python number or host expression stands for."""
    if isinstance(x, bool) or (isinstance(x, Var) and x.kind == "bool"):
        return BOOL
    if isinstance(x, Expr):
        return F32 if _is_float(x) else I64
    if isinstance(x, int):
        return I64
    if isinstance(x, float):
        return F32
    raise BuildError(f"{x!r} is not a tensor or a number")


def _is_float(e: Expr) -> bool:
    if isinstance(e, Var):
        return e.kind == "float"
    return any(isinstance(c, float) or (isinstance(c, Expr) and _is_float(c)) for c in children(e))


def _combine(higher: DType | None, lower: DType | None) -> DType | None:
    """``higher`` decides unless ``lower`` is of a higher kind (a tensor beats a 0-d tensor beats a number)."""
    if higher is None or lower is None:
        return higher or lower
    if higher.kind == "complex":
        return higher
    if higher.kind == "float":
        if lower.kind == "complex":
            need(higher.name in ("f32", "bf16"), f"the complex dtype that goes with {higher} is not one that programs know", cure="cast to f32 first")
            return lower
        return higher
    if higher.kind == "bool" or lower.kind in ("float", "complex"):
        return promote(higher, lower)
    return higher


def result_dtype(operands: Sequence[object]) -> DType:
    """torch's dtype for an operation on tensors (``TensorType``), 0-d tensors and Python numbers together."""
    best: list[DType | None] = [None, None, None]
    for x in operands:
        place = 2 if not isinstance(x, TensorType) else 0 if x.dims else 1
        d = x.dtype if isinstance(x, TensorType) else number_dtype(x)
        have = best[place]
        best[place] = d if have is None else promote(have, d)
    found = _combine(best[0], _combine(best[1], best[2]))
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------------------------- sizes


def equal_or_fail(a: Dim, b: Dim, what: str) -> Dim:
    """The size that both are; BuildError when they differ or nobody can know."""
    if dims_equal(a, b) is not True:
        cure = None if dims_equal(a, b) is False else "use one symbol (or one number) for both"
        raise BuildError(f"{what}: sizes {a} and {b} do not agree", expected=a, got=b, cure=cure)
    return a


def broadcast(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """The common shape, from the right; only the constant 1 stretches."""
    rank = max((len(s) for s in shapes), default=0)
    out: list[Dim] = [1] * rank
    for shape in shapes:
        for i, d in enumerate(shape, start=rank - len(shape)):
            if isinstance(d, int) and d == 1:
                continue
            have = out[i]
            out[i] = d if isinstance(have, int) and have == 1 else equal_or_fail(have, d, f"dim {i} of the operands")
    return tuple(out)


def minus(a: Any, b: Any) -> Dim:
    return simplify(binary("-", a, b))  # type: ignore[return-value]


def plus(a: Any, b: Any) -> Dim:
    return simplify(binary("+", a, b))  # type: ignore[return-value]


def times(a: Any, b: Any) -> Dim:
    return simplify(binary("*", a, b))  # type: ignore[return-value]


def ceil_div(a: Any, b: Any) -> Dim:
    return simplify(binary("//", binary("+", a, binary("-", b, 1)), b))  # type: ignore[return-value]


def wrap_dim(d: Any, rank: int) -> int:
    """A dim counted from the front; a 0-d tensor counts as having one dim, as in torch."""
    span = max(rank, 1)
    if not isinstance(d, int) or not -span <= d < span:
        raise BuildError(f"dim {d} does not exist in a tensor with {rank} dims", expected=f"{-span} .. {span - 1}", got=d)
    return d % span


def reduced(x: TensorType, dims: Sequence[int] | None, keepdim: bool) -> tuple[Dim, ...]:
    """The shape after reducing ``dims`` (None or empty: all)."""
    gone = set(range(len(x.dims))) if not dims else {wrap_dim(d, len(x.dims)) for d in dims}
    if keepdim:
        return tuple(1 if i in gone else d for i, d in enumerate(x.dims))
    return tuple(d for i, d in enumerate(x.dims) if i not in gone)


def need(ok: bool, what: str, expected: object = None, got: object = None, cure: str | None = None) -> None:
    if not ok:
        raise BuildError(what, expected=expected, got=got, cure=cure)


# --------------------------------------------------------------------------------------------------------------- pointwise


def type_dtype(v: object) -> DType:
    """The dtype of an operand, tensor or number."""
    return v.dtype if isinstance(v, TensorType) else number_dtype(v)


def common_dtype(promotion: str, operands: Sequence[object]) -> DType:
    """The dtype that pointwise operands are converted to before the arithmetic.

    ``promotion``, one or more words: any, float (integers become f32), integer (integers and bool only), order (no complex), no-bool,
    number (not bool in the end).
    """
    dtype = result_dtype(operands)
    words = promotion.split()
    if "float" in words and dtype.is_integral:
        return F32
    if "integer" in words:
        need(dtype.is_integral, f"{dtype} numbers have no bits to work on", expected="integers or bool", got=dtype)
    if "number" in words:
        need(dtype is not BOOL, "torch refuses this where all operands are bool", expected="numbers", got=BOOL, cure="cast one of them")
    if "order" in words:
        need(dtype.kind != "complex", "complex numbers have no order", expected="real numbers", got=dtype, cure="take abs first")
    if "no-bool" in words:
        need(
            not any(type_dtype(v) is BOOL for v in operands),
            "torch refuses this on bool",
            expected="numbers",
            got=BOOL,
            cure="use logical_not or logical_xor, or cast first",
        )
    return dtype


def pointwise(promotion: str, result: str = "same", skip: Sequence[str] = ()) -> Rule:
    """Operands broadcast and are promoted; ``result`` is same (as promoted), bool, or real (abs of a complex number).

    Operands named in ``skip`` (the condition of where) take part in the shape only.
    """

    def rule(**operands: Any) -> TensorType:
        tensors = [v for v in operands.values() if isinstance(v, TensorType)]
        need(bool(tensors), "at least one operand must be a tensor", cure="numbers alone are host arithmetic")
        counted = [v for k, v in operands.items() if k not in skip and isinstance(v, (TensorType, int, float, Expr))]
        shape = broadcast(*(t.dims for t in tensors))
        if result == "bool" and promotion == "any":
            return TensorType(BOOL, shape)  # also where the operands' common dtype has no name here
        dtype = common_dtype(promotion, counted)
        if result == "bool":
            dtype = BOOL
        elif result == "real" and dtype.kind == "complex":
            dtype = F32
        return TensorType(dtype, shape)

    return rule
