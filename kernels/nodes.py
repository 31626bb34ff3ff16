"""What a device segment computes, in the few kinds of values that code is generated from, with every size a number.

A Fusion becomes such a graph once for each set of sizes. Composites are gone, promotions are written out, f16 and bf16 are computed in
f32 (a cast in the fusion still rounds). Host numbers stay symbolic: they are arguments of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from hostir.kernels.layout import Step
from hostir.types import DTYPES, DType, Operand, Predicate

F32: Final = DTYPES["f32"]
F64: Final = DTYPES["f64"]
I32: Final = DTYPES["i32"]
I64: Final = DTYPES["i64"]
BOOL: Final = DTYPES["bool"]


def register(d: DType) -> DType:
    """The dtype in which values of ``d`` are held while a kernel computes."""
    return F32 if d.is_float and d.itemsize < 4 else d


@dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """An input of the segment, or a temporary of its own: number ``buffer``."""

    buffer: int
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Number:
    """A host number, 0-d. Expressions are evaluated at each launch; constants stand in the code unless they are ``given``, which is for
    numbers that follow from sizes: kernels do not depend on those."""

    value: Operand | Predicate | bool
    dtype: DType
    given: bool = False
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Point:
    """``expr`` element by element; ``operands`` by name, converted to ``compute`` first (each None: as it is) and broadcast to ``shape``."""

    expr: str
    operands: tuple[tuple[str, Node], ...]
    compute: DType | None
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Cast:
    """``x`` rounded to ``dtype``."""

    x: Node
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class View:
    x: Node
    step: Step
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Position:
    """The index along ``dim``, as i64."""

    dim: int
    shape: tuple[int, ...]
    dtype: DType = I64


@dataclass(frozen=True, eq=False, slots=True)
class Pick:
    """``fill``, and over it ``piece`` along ``dim`` from ``start`` on: what cat, pad and the scatters of slices are made of."""

    piece: Node
    fill: Node
    dim: int
    start: int
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Reduce:
    """``operands`` (of one shape) folded over ``dims`` by the fold ``kind``; ``shape`` is without them, its values are ``Part``s of
    ``dtypes``. With ``merge`` the operands are the states of a reduction that was split."""

    kind: str
    operands: tuple[Node, ...]
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    dtypes: tuple[DType, ...]
    merge: bool = False

    @property
    def over(self) -> tuple[int, ...]:
        """The sizes that are reduced."""
        return tuple(self.operands[0].shape[d] for d in self.dims)

    @property
    def count(self) -> int:
        return math.prod(self.over)


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Value number ``index`` of a reduction."""

    of: Reduce
    index: int

    @property
    def dtype(self) -> DType:
        return self.of.dtypes[self.index]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape


Node: TypeAlias = Tensor | Number | Point | Cast | View | Position | Pick | Part


def operands(n: Node) -> tuple[Node, ...]:
    """What ``n`` is computed from."""
    match n:
        case Point():
            return tuple(x for _, x in n.operands)
        case Cast() | View():
            return (n.x,)
        case Pick():
            return (n.piece, n.fill)
        case Part():
            return n.of.operands
        case _:
            return ()


def below(roots: tuple[Node, ...]) -> Iterator[Node]:
    """Every value under ``roots``, each once, operands first."""
    seen: set[int] = set()
    stack: list[tuple[Node, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        n, ready = stack.pop()
        if ready:
            yield n
        elif id(n) not in seen:
            seen.add(id(n))
            stack.append((n, True))
            stack += [(x, False) for x in reversed(operands(n))]


@dataclass(frozen=True, slots=True)
class Root:
    """Result ``result`` of the segment: ``node``, stored as ``dtype``."""

    result: int
    node: Node
    dtype: DType
