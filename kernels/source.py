"""A kernel as text, and what its arguments are.

The text holds no sizes and no strides, only which of them are 1 or 0 and how large the tile is; everything else is an argument. Two
problems with one text share one compiled kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from hostir.kernels.nodes import BOOL, F32
from hostir.types import DType, Operand, Predicate


@dataclass(frozen=True, slots=True)
class Pointer:
    """The address of element ``offset`` of a buffer."""

    buffer: int
    offset: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class Int:
    """A number that follows from sizes and strides; ``by_16``: kernels may rely on its being a multiple of 16."""

    value: int
    by_16: bool = False


@dataclass(frozen=True, slots=True)
class Scalar:
    """A host number, evaluated at each launch and passed as i64 or f64."""

    value: Operand | Predicate | bool
    kind: Literal["i64", "fp64"]


Argument: TypeAlias = Pointer | Int | Scalar


@dataclass(frozen=True, slots=True)
class Source:
    """One kernel: its text, its arguments in order, and how it is launched (``programs`` along x). ``wide``: numbers are i64."""

    name: str
    text: str
    arguments: tuple[Argument, ...]
    programs: int
    num_warps: int
    wide: bool

    def types(self) -> Iterator[str]:
        """Each argument's type as Triton writes it."""
        for a in self.arguments:
            match a:
                case Pointer():
                    yield "*" + _POINTER.get(a.dtype.name, a.dtype.name)
                case Int():
                    yield "i64" if self.wide else "i32"
                case Scalar():
                    yield a.kind


_POINTER: Final = {"bool": "i1", "f64": "fp64", "f32": "fp32", "f16": "fp16"}
_TRITON: Final = {"bool": "int1"}


def tl(d: DType) -> str:
    """The name of a dtype in Triton."""
    return f"tl.{_TRITON.get(d.name, d.torch_name)}"


def converted(text: str, have: DType, want: DType) -> str:
    """A held value as another held dtype: no rounding to what registers do not hold."""
    if have is want:
        return text
    if want is BOOL:
        return f"({text} != 0)"
    if have.is_float and want.is_integral and want.itemsize < 4:
        return f"{text}.to(tl.int32).to({tl(want)})"
    return f"{text}.to({tl(want)})"


def rounded(text: str, have: DType, want: DType) -> str:
    """A held value as ``want`` exactly, f16 and bf16 too."""
    if want.name in ("f16", "bf16"):
        return f"hd.to_{want.name}({converted(text, have, F32)})"
    return converted(text, have, want)


def number(v: bool | float, held: DType) -> str:
    """A constant of a held dtype."""
    if held.is_float:
        v = float(v)
        return repr(v) if v == v and v not in (float("inf"), float("-inf")) else f'float("{v}")'
    if held is BOOL:
        return repr(bool(v))
    return repr(int(v) % 256 if held.kind == "uint" else int(v))
