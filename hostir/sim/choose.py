"""Which of several programs for one job is the fastest on a machine: the prediction behind ``plan="auto"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hostir.errors import InputError
from hostir.ir.nodes import Program
from hostir.mesh import Mesh
from hostir.sim.machine import Machine
from hostir.sim.simulate import simulate


def best(
    candidates: Mapping[str, Program],
    machine: Machine | None = None,
    mesh: Mesh | int | Mapping[str, int] | None = None,
    dims: Mapping[str, int] | None = None,
    *,
    scalars: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, float]]:
    """The name of the fastest of ``candidates`` and the predicted seconds of each. Of equals (within 1 %) the first one wins: list the
    plainest first. InputError when there is none."""
    if not candidates:
        raise InputError("there is no program to choose from", expected="at least one", got=0)
    seconds = {name: simulate(p, machine, mesh, dims=dims, scalars=scalars).makespan for name, p in candidates.items()}
    least = min(seconds.values())
    return next(name for name, s in seconds.items() if s <= 1.01 * least), seconds
