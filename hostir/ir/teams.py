"""Who is in a team with whom: the ranks along some mesh axes, in order, for every rank of a sized mesh at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hostir.errors import InputError
from hostir.ir.nodes import Team
from hostir.mesh import Mesh

Ints: TypeAlias = npt.NDArray[np.int64]


class Teams:
    """The teams of a sized mesh, computed once for all ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.layout = mesh.layout
        self._at = {r: i for i, r in enumerate(self.layout)}
        self._teams: dict[Team, dict[int, tuple[int, ...]]] = {}
        self._columns: dict[str, Ints] = {}
        place = np.arange(len(self.layout), dtype=np.int64)
        for name, size in zip(reversed(mesh.names), reversed(mesh.sizes), strict=True):
            self._columns[name] = place % size
            place = place // size

    def coordinates(self, axis: str, ranks: Sequence[int]) -> Ints:
        """The coordinate along ``axis`` of each of ``ranks``."""
        return self._columns[axis][[self._at[r] for r in ranks]]

    def of(self, team: Team, rank: int) -> tuple[int, ...]:
        """World ranks, in team order, of the team of ``rank``; of a rank list also for a rank that is not in it."""
        if team is None:
            return self.layout
        if team and isinstance(team[0], int):
            return self._listed(team)
        if team not in self._teams:
            self._teams[team] = self._along([str(a) for a in team])
        return self._teams[team][rank]

    def _listed(self, team: Team) -> tuple[int, ...]:
        assert team is not None
        if max(map(int, team)) >= len(self.layout):
            raise InputError(f"the rank list {list(team)} is larger than the world of {len(self.layout)} ranks", cure="give more ranks: mesh=…")
        return tuple(self.layout[int(r)] for r in team)

    def _along(self, axes: Sequence[str]) -> dict[int, tuple[int, ...]]:
        """Ranks that agree on every other axis form a team, ordered row-major along ``axes``."""
        rest = [n for n in self.mesh.names if n not in axes]
        columns = [self._columns[n].tolist() for n in (*rest, *axes)]
        groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for i, rank in enumerate(self.layout):
            at = tuple(c[i] for c in columns)
            groups.setdefault(at[: len(rest)], []).append((at[len(rest) :], rank))
        found: dict[int, tuple[int, ...]] = {}
        for members in groups.values():
            team = tuple(r for _, r in sorted(members))
            found.update(dict.fromkeys(team, team))
        return found

    def positions(self, team: Team, ranks: Sequence[int]) -> Ints:
        """Where each of ``ranks`` stands in its team; -1 for one that is not in it."""
        found = []
        for r in ranks:
            members = self.of(team, r)
            found.append(members.index(r) if r in members else -1)
        return np.array(found, np.int64)
