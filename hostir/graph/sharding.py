"""How a tensor lies on a mesh: one placement for each mesh axis, in the words of DTensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hostir.mesh import Mesh


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


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """A mesh and one placement for each of its axes."""

    mesh: Mesh
    placements: tuple[Placement, ...]

    def same_as(self, other: Sharding) -> bool:
        return self.mesh.same_as(other.mesh) and self.placements == other.placements

    def __str__(self) -> str:
        return ", ".join(f"{n}: {p}" for n, p in zip(self.mesh.names, self.placements, strict=True))
