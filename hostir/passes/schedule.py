"""From a program as it was written to one that runs as it stands: streams and syncs, then memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hostir.ir.nodes import Program, Sync, every
from hostir.mesh import Mesh
from hostir.passes.memory import memory
from hostir.passes.streams import streams, without_spare


def schedule(
    p: Program,
    mesh: Mesh,
    *,
    dims: Mapping[str, int] | None = None,
    scalars: Mapping[str, Any] | None = None,
    overlap: str = "auto",
) -> Program:
    """``p`` with its streams ordered and its memory laid out, for these sizes, on every rank of ``mesh``."""
    ordered = streams(p, mesh, dims=dims, scalars=scalars, overlap=overlap)
    laid_out = memory(ordered, mesh, dims=dims, scalars=scalars, may_sync=not p.scheduled)
    if p.scheduled or len(_syncs(laid_out)) == len(_syncs(ordered)):
        return laid_out
    return without_spare(laid_out, mesh, _syncs(p), dims=dims, scalars=scalars)


def _syncs(p: Program) -> set[int]:
    return {id(s) for s in every(p.body) if isinstance(s, Sync)}
