"""Meshes as sets of world ranks, for fusions whose tensors lie on several of them.

The program then has one mesh axis, ``world``, and every statement says by an ``if`` which ranks take it. A rank's position in one of the
meshes is an expression of its world rank; a rank outside holds nothing of a tensor: its first size is 0 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hostir.errors import BuildError
from hostir.graph.annotate import tensors
from hostir.graph.copy import copied
from hostir.graph.fusion import Fusion
from hostir.graph.sharding import Sharding, plus, times
from hostir.mesh import Mesh
from hostir.types import Both, Cmp, Dim, Either, Operand, Predicate, Rank, binary, maximum, minimum

WORLD: Final = "world"
ME: Final = Rank(WORLD)


class PlacedMesh(Mesh):
    """A mesh whose members are ranks of the program's only axis."""

    def axis_rank(self, name: str) -> Operand:  # type: ignore[override]
        """The coordinate along ``name`` as an expression of the world rank; it means something on members only."""
        self._check(name)
        at = self.names.index(name)
        inner = 1
        for n in self.sizes[at + 1 :]:
            inner *= n
        place = position(self.layout)
        place = place if inner == 1 else binary("//", place, inner)
        return place if at == 0 else binary("%", place, self.sizes[at])

    def teams(self, name: str) -> list[tuple[int, ...]]:
        """The teams along ``name``, as world ranks in order."""
        return list(dict.fromkeys(self.team(r, (name,)) for r in self.layout))


def runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The ranks as runs of neighbours, first and last."""
    found: list[tuple[int, int]] = []
    for r in sorted(set(ranks)):
        if found and found[-1][1] == r - 1:
            found[-1] = (found[-1][0], r)
        else:
            found.append((r, r))
    return found


def member(ranks: Sequence[int]) -> Predicate:
    """Whether this rank is one of ``ranks``."""
    found: Predicate | None = None
    for a, b in runs(ranks):
        one: Predicate = Cmp("==", ME, a) if a == b else Both(Cmp(">=", ME, a), Cmp("<=", ME, b))
        found = one if found is None else Either(found, one)
    assert found is not None, "a mesh has members"
    return found


def indicator(ranks: Sequence[int], num_ranks: int) -> Dim:
    """1 on ``ranks``, 0 elsewhere, as a size can say it."""
    if set(ranks) >= set(range(num_ranks)):
        return 1
    total: Dim = 0
    for a, b in runs(ranks):
        total = plus(total, _between(a, b))
    return total


def _between(a: int, b: int) -> Dim:
    """1 on ranks a to b, 0 elsewhere."""
    if a == b:
        return _size(binary("-", 1, minimum(1, maximum(binary("-", ME, a), binary("-", a, ME)))))
    low = minimum(1, maximum(0, ME if a == 1 else binary("-", ME, a - 1)))
    high = minimum(1, maximum(0, binary("-", b + 1, ME)))
    return _size(high if a == 0 else binary("*", low, high))


def _size(e: Operand) -> Dim:
    assert not isinstance(e, float)
    return e


def position(ranks: Sequence[int]) -> Operand:
    """Where this rank stands in the list ``ranks``."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step != 0 and all(r == ranks[0] + i * step for i, r in enumerate(ranks)):
        off: Operand = ME if ranks[0] == 0 else binary("-", ME, ranks[0])
        off = off if step == 1 else binary("//", off, step)
        return maximum(0, minimum(off, len(ranks) - 1))  # outside the mesh it is a position all the same
    total: Operand = 0
    for i, r in enumerate(ranks):
        total = plus(total, times(_between(r, r), i))
    return total


def meshes(f: Fusion) -> list[Mesh]:
    """The different meshes of a fusion."""
    found: list[Mesh] = []
    for tv in tensors(f):
        if tv.sharding is not None and not any(m.same_as(tv.sharding.mesh) for m in found):
            found.append(tv.sharding.mesh)
    return found


def placed(f: Fusion) -> Fusion:
    """``f`` with every mesh as ranks of the world, where it has several; else ``f`` itself."""
    several = meshes(f)
    if len(several) < 2:
        return f
    if any(m.shape is None for m in several):
        raise BuildError("tensors on different meshes need meshes with sizes and ranks", got=", ".join(map(str, several)))
    if any(tv.streams for tv in tensors(f)):
        raise BuildError("a fusion on several meshes has no host loops", cure="lower each stage by itself, or remove the streams")
    g = copied(f)
    made = [PlacedMesh(m.shape, m.names, ranks=m.layout) for m in several]
    for tv in tensors(g):
        if tv.sharding is not None:
            at = next(i for i, m in enumerate(several) if m.same_as(tv.sharding.mesh))
            tv.sharding = Sharding(made[at], tv.sharding.placements)
    return g


def num_ranks(f: Fusion) -> int:
    return max(max(m.layout) for m in meshes(f)) + 1
