"""``hir.simulate``: how long a program would take on a machine that need not be here, and why.

A program without a schedule is scheduled first, as ``compile`` would. Then the clock runs every statement of every rank with the costs of
the machine; ranks that run alike are simulated once, so a thousand of them are no more work than a few.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hostir.errors import InputError
from hostir.ir.diagnostics import show_ranks
from hostir.ir.nodes import Program
from hostir.ir.walk import resolve_mesh
from hostir.mesh import Mesh
from hostir.sim.clock import makespan
from hostir.sim.machine import Machine
from hostir.sim.timeline import Timeline


def simulate(
    p: Program,
    machine: Machine | None = None,
    mesh: Mesh | int | Mapping[str, int] | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    scalars: Mapping[str, Any] | None = None,
    overlap: str = "auto",
) -> Timeline:
    """The timeline of ``p`` on ``machine`` (default: H200 nodes). ``mesh`` and ``dims`` give the sizes that the text leaves open.

    ``overlap="off"`` puts everything on one stream, as in ``compile``. Times are predictions: kernels by roofline, communications by the
    alpha-beta model. Errors: InputError for sizes that are missing, VerifyError for a program that cannot end.
    """
    machine = machine or Machine.h200()
    if not isinstance(p, Program):
        raise InputError("simulate takes a Program", got=type(p).__name__, cure="lower a fusion first: hir.lower(f)")
    if not isinstance(machine, Machine):
        raise InputError("machine is a hir.Machine", got=type(machine).__name__, cure="hir.Machine.h200(), or Machine.load(file)")
    sized = resolve_mesh(p, mesh)
    if not p.scheduled:
        from hostir.passes.schedule import schedule

        p = schedule(p, sized, dims=dims, scalars=scalars, overlap=overlap)
    where = f"@{p.name} on {machine.name}, {show_ranks(sized.layout)}"
    return makespan(p, sized, dims=dims, scalars=scalars, cost=machine.costs(), title=where)
