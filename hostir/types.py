"""Dtypes and tensor types, and with them all that types are made of: one module to import from. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from hostir.dims import dims_equal, product, simplify
from hostir.errors import BuildError, caller_location
from hostir.expr import (
    BINARY,
    COMPARE,
    Bin,
    Both,
    Cmp,
    Dim,
    Either,
    Env,
    Epoch,
    Expr,
    Leaf,
    Negated,
    Number,
    Operand,
    Predicate,
    Rank,
    Size,
    Sym,
    Tree,
    Truth,
    Var,
    as_predicate,
    binary,
    children,
    compare,
    evaluate,
    is_whole,
    key,
    leaf_key,
    leaves,
    maximum,
    minimum,
    number_text,
    operand,
    same,
    show_expr,
    source,
    substitute,
)

# ---------------------------------------------------------------------------------------------------------------------- dtypes


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. ``kind`` is one of float, int, uint, bool, complex; ``torch_name`` is its name in torch."""

    name: str
    itemsize: int
    kind: Literal["float", "int", "uint", "bool", "complex"]
    torch_name: str

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integral(self) -> bool:
        return self.kind in ("int", "uint", "bool")

    def __str__(self) -> str:
        return self.name


_ROWS: Final = (
    DType("f64", 8, "float", "float64"),
    DType("f32", 4, "float", "float32"),
    DType("f16", 2, "float", "float16"),
    DType("bf16", 2, "float", "bfloat16"),
    DType("f8e4m3", 1, "float", "float8_e4m3fn"),
    DType("f8e5m2", 1, "float", "float8_e5m2"),
    DType("i64", 8, "int", "int64"),
    DType("i32", 4, "int", "int32"),
    DType("i16", 2, "int", "int16"),
    DType("i8", 1, "int", "int8"),
    DType("u8", 1, "uint", "uint8"),
    DType("bool", 1, "bool", "bool"),
    DType("c64", 8, "complex", "complex64"),
)
DTYPES: Final[Mapping[str, DType]] = {d.name: d for d in _ROWS}
_BY_TORCH: Final[Mapping[str, DType]] = {d.torch_name: d for d in _ROWS}


def dtype_of(x: object) -> DType:
    """A dtype given as DType, as a name of ours (``"bf16"``) or of torch's (``torch.bfloat16``, without importing torch)."""
    if isinstance(x, DType):
        return x
    text = str(x).removeprefix("torch.")
    if (found := DTYPES.get(text) or _BY_TORCH.get(text)) is None:
        raise BuildError(f"{x} is not a dtype that programs know", expected=", ".join(DTYPES), got=text, loc=caller_location())
    return found


# ------------------------------------------------------------------------------------------------------------- tensor types

Memory: TypeAlias = Literal["global", "symmetric", "host"]
MEMORIES: Final = ("global", "symmetric", "host")


@dataclass(frozen=True, slots=True, eq=False)
class TensorType:
    """Element type, sizes and where the elements live: ``global``, ``symmetric`` (peers can address it) or ``host`` (pinned)."""

    dtype: DType
    dims: tuple[Dim, ...]
    memory: Memory = field(default="global")

    def show(self, name: Callable[[Var], str] | None = None) -> str:
        dims = ", ".join(show_expr(d, name) for d in self.dims)
        return f"{self.dtype}[{dims}]" + ("" if self.memory == "global" else f" {self.memory}")

    def __str__(self) -> str:
        return self.show()

    def _key(self) -> tuple[object, ...]:
        return (self.dtype.name, self.memory, *(key(d) for d in self.dims))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorType) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def agrees(self, other: TensorType) -> bool | None:
        """Same dtype and sizes (memory apart): True, False, or None where only a run can tell."""
        if self.dtype != other.dtype or len(self.dims) != len(other.dims):
            return False
        answers = [dims_equal(a, b) for a, b in zip(self.dims, other.dims, strict=True)]
        return False if False in answers else None if None in answers else True


def dim(x: object) -> Dim:
    """A size given by a user: a non-negative int or a host expression."""
    value = operand(x)
    if not is_whole(value) or (isinstance(value, int) and value < 0):
        raise BuildError(f"{x} is not a size", expected="an int of at least 0, a symbol or a host expression", got=x, loc=caller_location())
    return value  # type: ignore[return-value]


def dims_of(shape: object) -> tuple[Dim, ...]:
    """A shape given by a user."""
    if isinstance(shape, (int, Expr)):
        return (dim(shape),)
    return tuple(dim(s) for s in shape)  # type: ignore[attr-defined]


__all__ = [
    "BINARY",
    "COMPARE",
    "DTYPES",
    "MEMORIES",
    "Bin",
    "Both",
    "Cmp",
    "DType",
    "Dim",
    "Either",
    "Env",
    "Epoch",
    "Expr",
    "Leaf",
    "Memory",
    "Negated",
    "Number",
    "Operand",
    "Predicate",
    "Rank",
    "Size",
    "Sym",
    "TensorType",
    "Tree",
    "Truth",
    "Var",
    "as_predicate",
    "binary",
    "children",
    "compare",
    "dim",
    "dims_equal",
    "dims_of",
    "dtype_of",
    "evaluate",
    "is_whole",
    "key",
    "leaf_key",
    "leaves",
    "maximum",
    "minimum",
    "number_text",
    "operand",
    "product",
    "same",
    "show_expr",
    "simplify",
    "source",
    "substitute",
]
