"""How a tensor lies on a mesh, one placement for each mesh axis in the words of DTensor, and which of its dimensions a host loop
walks through in chunks.

A sharded dimension is cut by the ceil rule: chunk i of c = ceil(n / size) elements is on member i, the last ones short or empty. Two
``Shard(k)`` compose from left to right: the earlier mesh axis is the outer one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, overload

from hostir.mesh import Mesh
from hostir.types import Dim, Operand, binary, minimum, simplify


@dataclass(frozen=True, slots=True)
class Shard:
    """Split along tensor dimension ``dim``; chunk i of ceil(n / size) elements is on member i, the last ones short or empty."""

    dim: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """The same on every member."""


@dataclass(frozen=True, slots=True)
class Partial:
    """The true value is the reduction of the members' values."""

    op: str = "sum"


Placement: TypeAlias = Shard | Replicate | Partial


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """For ``TensorView.parallelize``: the parts of an axis lie on the members of this mesh axis."""

    name: str


@dataclass(frozen=True, slots=True)
class HostLoop:
    """For ``TensorView.parallelize``: the parts of an axis are the trips of a host loop."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """Dimension ``dim`` is read or written in ``chunks`` trips of a host loop, chunk c being [c·s, (c + 1)·s), s = ceil(n / chunks).

    With ``swizzle``, a mesh axis, each rank begins with another chunk: trip i of rank r is chunk r ± i, modulo the number of chunks.
    """

    dim: int
    chunks: Dim
    swizzle: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """A mesh and one placement for each of its axes."""

    mesh: Mesh
    placements: tuple[Placement, ...]

    def same_as(self, other: Sharding) -> bool:
        return self.mesh.same_as(other.mesh) and self.placements == other.placements

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The mesh axes that cut ``dim``, outer ones first."""
        return tuple(n for n, p in zip(self.mesh.names, self.placements, strict=True) if p == Shard(dim))

    def on(self, axis: str) -> Placement:
        return self.placements[self.mesh.names.index(axis)]

    def with_(self, axis: str, placement: Placement) -> Sharding:
        """The same with one mesh axis changed."""
        i = self.mesh.names.index(axis)
        return Sharding(self.mesh, (*self.placements[:i], placement, *self.placements[i + 1 :]))

    def __str__(self) -> str:
        return ", ".join(f"{n}: {p}" for n, p in zip(self.mesh.names, self.placements, strict=True))


def replicated(mesh: Mesh) -> Sharding:
    return Sharding(mesh, (Replicate(),) * len(mesh.names))


def ceil_div(n: Dim, parts: Dim) -> Dim:
    """ceil(n / parts)."""
    if isinstance(n, int) and isinstance(parts, int):
        return -(-n // parts)
    return simplify(binary("//", binary("-", binary("+", n, parts), 1), parts))  # type: ignore[return-value]


def even(n: Dim, parts: Dim) -> bool:
    """Whether n is known to divide into equal parts."""
    if isinstance(parts, int) and parts == 1:
        return True
    if not isinstance(parts, int):
        return False
    if isinstance(n, int):
        return n % parts == 0
    rest = simplify(binary("%", n, parts))
    return isinstance(rest, int) and rest == 0


def part(n: Dim, parts: Dim, index: Operand) -> tuple[Operand, Dim]:
    """Where part ``index`` of ``n`` begins and how long it is, by the ceil rule."""
    size = ceil_div(n, parts)
    start = times(index, size)
    if even(n, parts):
        return start, size
    stop = minimum(times(binary("+", index, 1), size), n)
    if not isinstance(start, int) or start > 0:
        start = minimum(start, n)
    return start, simplify(binary("-", stop, start))  # type: ignore[return-value]


def simplified(d: Dim) -> Dim:
    """A size in its normal form."""
    return simplify(d)  # type: ignore[return-value]


@overload
def times(a: Dim, b: Dim) -> Dim: ...
@overload
def times(a: Operand, b: Operand) -> Operand: ...
def times(a: Operand, b: Operand) -> Operand:
    """a · b without products by 1 and 0."""
    for x, y in ((a, b), (b, a)):
        if isinstance(x, int) and x in (0, 1):
            return x * y if isinstance(y, int) else (y if x == 1 else 0)
    return binary("*", a, b)


@overload
def plus(a: Dim, b: Dim) -> Dim: ...
@overload
def plus(a: Operand, b: Operand) -> Operand: ...
def plus(a: Operand, b: Operand) -> Operand:
    """a + b without sums with 0."""
    if isinstance(a, int) and a == 0:
        return b
    return a if isinstance(b, int) and b == 0 else binary("+", a, b)
