"""A mesh names the ranks: axes with names, and sizes where they are known.

An unbound mesh is only names and sizes: enough to build, print, check and simulate programs anywhere. ``World.mesh`` binds one to
the processes (or threads) that exist. Roots and peers in programs are positions along mesh axes, never global ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hostir.errors import BuildError, caller_location
from hostir.types import Dim, Rank, Size, product


@dataclass(frozen=True, eq=False)
class Mesh:
    """``Mesh((2, 4), ("dp", "tp"))``, ``Mesh(("tp",))`` (any size), ``Mesh(4)`` is ``Mesh((4,), ("tp",))``.

    ``ranks`` lists the world ranks in row-major mesh order (default 0, 1, …). ``world`` is the World that the mesh is bound to,
    ``parent`` the mesh that this one is a sub-mesh of.
    """

    shape: tuple[int, ...] | None
    names: tuple[str, ...]
    ranks: tuple[int, ...] | None = None
    world: Any = field(default=None, repr=False)
    parent: Mesh | None = field(default=None, repr=False)

    def __init__(
        self,
        shape: int | Sequence[int] | Sequence[str] | None = None,
        names: str | Sequence[str] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        world: Any = None,
    ) -> None:
        if names is None and isinstance(shape, str):
            names, shape = (shape,), None
        elif names is None and isinstance(shape, Sequence) and shape and all(isinstance(s, str) for s in shape):
            shape, names = None, tuple(shape)  # type: ignore[arg-type]
        if isinstance(shape, int):
            shape = (shape,)
        if isinstance(names, str):
            names = (names,)
        if names is None:
            if shape is None or len(shape) != 1:
                raise BuildError("a mesh of several axes needs their names", cure='hir.Mesh((2, 4), ("dp", "tp"))', loc=caller_location())
            names = ("tp",)
        names = tuple(names)
        sizes = None if shape is None else tuple(int(s) for s in shape)
        bad = [n for n in names if not (isinstance(n, str) and n.isidentifier() and n.isascii())]
        if bad or len(set(names)) != len(names) or not names:
            raise BuildError(f"mesh axes need distinct names that are identifiers, not {list(names)}", loc=caller_location())
        if sizes is not None and (len(sizes) != len(names) or any(s < 1 for s in sizes)):
            raise BuildError(f"a mesh with axes {list(names)} needs one size of at least 1 for each", got=list(sizes), loc=caller_location())
        if ranks is not None and (sizes is None or len(ranks) != math.prod(sizes) or len(set(ranks)) != len(ranks)):
            raise BuildError("a mesh lists each of its ranks once", expected=math.prod(sizes or ()), got=list(ranks), loc=caller_location())
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "ranks", None if ranks is None else tuple(ranks))
        object.__setattr__(self, "world", world)
        object.__setattr__(self, "parent", None)

    @staticmethod
    def from_torch(device_mesh: Any, world: Any = None) -> Mesh:
        """The mesh of a ``torch.distributed.DeviceMesh``: same axes, same ranks in the same order."""
        names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(device_mesh.mesh.dim()))
        if world is None:
            from hostir.runtime.world import current_world

            world = current_world()
        return Mesh(tuple(device_mesh.mesh.shape), tuple(names), ranks=device_mesh.mesh.flatten().tolist(), world=world)

    @property
    def size(self) -> Dim:
        """The number of ranks: an int on a sized mesh, else an expression."""
        return product(tuple(self.axis_size(n) for n in self.names))

    def axis_size(self, name: str) -> Dim:
        self._check(name)
        return Size(name) if self.shape is None else self.shape[self.names.index(name)]

    def axis_rank(self, name: str) -> Rank:
        self._check(name)
        return Rank(name)

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise BuildError(f"the mesh has no axis {name!r}", expected=", ".join(self.names), got=name, loc=caller_location())

    # ---- a sized mesh

    @property
    def layout(self) -> tuple[int, ...]:
        """The world ranks in row-major order."""
        return self.ranks if self.ranks is not None else tuple(range(math.prod(self.sizes)))

    @property
    def sizes(self) -> tuple[int, ...]:
        if self.shape is None:
            cure = "bind it: world.mesh(names), or give mesh="
            raise BuildError(f"the mesh ({', '.join(self.names)}) has no sizes yet", cure=cure, loc=caller_location())
        return self.shape

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where world rank ``rank`` stands, by axis; empty when it is not a member."""
        if rank not in self.layout:
            return {}
        position = self.layout.index(rank)
        out = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            out[name] = position % size
            position //= size
        return {n: out[n] for n in self.names}

    def team(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """World ranks of the team of ``rank`` along ``axes``, in row-major order of those axes."""
        here = self.coordinates(rank)
        members = []
        for r in self.layout:
            at = self.coordinates(r)
            if all(at[n] == here[n] for n in self.names if n not in axes):
                members.append((tuple(at[a] for a in axes), r))
        return tuple(r for _, r in sorted(members))

    def __getitem__(self, axes: str | tuple[str, ...]) -> Mesh:
        """The sub-mesh along ``axes``: this rank's own one where the mesh is bound."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        for n in names:
            self._check(n)
        if self.shape is None:
            sub = Mesh(None, names)
        else:
            sizes = tuple(self.sizes[self.names.index(n)] for n in names)
            ranks = self.team(self.world.rank if self.world is not None else self.layout[0], names)
            sub = Mesh(sizes, names, ranks=ranks, world=self.world)
        object.__setattr__(sub, "parent", self)
        return sub

    def same_as(self, other: Mesh) -> bool:
        return self.names == other.names and self.shape == other.shape and (self.shape is None or self.layout == other.layout)

    def __str__(self) -> str:
        parts = [n if self.shape is None else f"{n} = {s}" for n, s in zip(self.names, self.shape or self.names, strict=True)]
        return f"mesh({', '.join(parts)})"
