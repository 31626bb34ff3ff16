"""Annotations of a tensor, checked where they are written: its layout on a mesh and the host loops over its dimensions.

A tensor's *loop domain* is its list of axes after outer splits. ``split`` and ``parallelize`` work on it and are another way to write
``shard`` and ``stream``: what counts in the end is one placement for each mesh axis and a chunk count for each streamed dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hostir.errors import BuildError, caller_location
from hostir.graph.sharding import HostLoop, MeshAxis, Partial, Placement, Replicate, Shard, Sharding, Streamed, replicated
from hostir.mesh import Mesh
from hostir.types import Dim, dim, product, same

if TYPE_CHECKING:
    from hostir.graph.fusion import Fusion, TensorView


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a loop domain: ``count`` parts of tensor dimension ``dim`` (None: all that is left of it)."""

    dim: int
    count: Dim | None = None
    parallel: MeshAxis | HostLoop | None = None


def refuse(tv: TensorView, message: str, **facts: object) -> BuildError:
    return BuildError(f"%{tv.name} {message}", loc=caller_location(), **facts)  # type: ignore[arg-type]


def wrapped(tv: TensorView, axis: int) -> int:
    """A dimension of ``tv``, counted from the front."""
    rank = len(tv.known.dims)
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise refuse(tv, f"has no dimension {axis}", expected=tv.type, got=axis)
    return axis % rank


def shard(tv: TensorView, mesh: Mesh, placements: Sequence[Placement]) -> None:
    if len(placements) != len(mesh.names) or not all(isinstance(p, (Shard, Replicate, Partial)) for p in placements):
        raise refuse(
            tv, "needs one placement for each mesh axis", expected=", ".join(mesh.names), got=", ".join(map(str, placements)) or "none",
        )  # fmt: skip
    fixed = []
    for p in placements:
        rank = len(tv.known.dims)
        if isinstance(p, Shard) and not -rank <= p.dim < rank:
            raise refuse(tv, f"has no dimension {p.dim} to shard", expected=tv.type, got=p)
        fixed.append(Shard(p.dim % rank) if isinstance(p, Shard) else p)
    _together(tv, Sharding(mesh, tuple(fixed)), tv.streams)


def stream(tv: TensorView, axis: int, chunks: object) -> None:
    at = wrapped(tv, axis)
    count = dim(chunks)
    if isinstance(count, int) and count < 1:
        raise refuse(tv, "is streamed in at least one chunk", expected="1 or more", got=count)
    for s in tv.streams:
        if s.dim == at:
            if same(s.chunks, count):
                return
            raise refuse(tv, f"streams dimension {at} in two ways", expected=f"{s.chunks} chunks", got=f"{count} chunks")
    _together(tv, tv.sharding, (*tv.streams, Streamed(at, count)))


def swizzle(tv: TensorView, axis: int, mesh_axis: str) -> None:
    at = wrapped(tv, axis)
    if all(s.dim != at for s in tv.streams):
        raise refuse(tv, f"does not stream dimension {at}, so there is no order of chunks to rotate", cure=f"tv.stream({at}, chunks) first")
    tv.streams = tuple(replace(s, swizzle=mesh_axis) if s.dim == at else s for s in tv.streams)


def _together(tv: TensorView, sharding: Sharding | None, streams: Sequence[Streamed]) -> None:
    """Set both, after looking at them side by side."""
    for s in streams:
        if sharding is None:
            continue
        parts = product(tuple(sharding.mesh.axis_size(n) for n in sharding.axes_of(s.dim)))
        if isinstance(parts, int) and isinstance(s.chunks, int) and s.chunks % parts and parts % s.chunks:
            raise refuse(
                tv, f"has dimension {s.dim} sharded and streamed: chunks and mesh size must divide one another",
                expected=f"a multiple or a divisor of {parts}", got=f"{s.chunks} chunks",
            )  # fmt: skip
    tv.sharding, tv.streams = sharding, tuple(streams)


# ----------------------------------------------------------------------------------------------------------------- loop domains


def _domain(tv: TensorView) -> tuple[Axis, ...]:
    return tv.domain or tuple(Axis(d) for d in range(len(tv.known.dims)))


def _axis(tv: TensorView, axis: int) -> tuple[tuple[Axis, ...], int]:
    domain = _domain(tv)
    if not isinstance(axis, int) or not -len(domain) <= axis < len(domain):
        raise refuse(tv, f"has no loop axis {axis}", expected=f"0 .. {len(domain) - 1}", got=axis)
    return domain, axis % len(domain)


def split(tv: TensorView, axis: int, parts: object) -> None:
    domain, at = _axis(tv, axis)
    count = dim(parts)
    old = domain[at]
    if old.parallel is not None:
        raise refuse(tv, f"has loop axis {at} on {old.parallel} already", cure="split first, then parallelize")
    inner = old.count
    if isinstance(inner, int) and isinstance(count, int):
        if count < 1 or inner % count:
            raise refuse(tv, f"does not split loop axis {at} evenly", expected=f"a divisor of {inner}", got=count)
        inner = inner // count
    tv.domain = (*domain[:at], Axis(old.dim, count), Axis(old.dim, inner), *domain[at + 1 :])


def parallelize(tv: TensorView, axis: int, how: MeshAxis | HostLoop) -> None:
    domain, at = _axis(tv, axis)
    old = domain[at]
    if not isinstance(how, (MeshAxis, HostLoop)):
        raise refuse(tv, "is parallelized over a mesh axis or a host loop", expected='hir.MeshAxis("tp") or hir.HostLoop()', got=repr(how))
    count = old.count
    if count is None:
        if sum(a.dim == old.dim for a in domain) > 1:
            raise refuse(tv, f"has loop axis {at} inside of others: its parts are not counted", cure="split it: the outer part is counted")
        count = tv.known.dims[old.dim]
    new = (*domain[:at], Axis(old.dim, count, how), *domain[at + 1 :])
    sharding = tv.sharding
    if isinstance(how, MeshAxis):
        mesh = _mesh(tv, how, count)
        size = mesh.axis_size(how.name)
        if not same(size, count):
            raise refuse(tv, f"has {count} parts on mesh axis {how.name}", expected=f"{size} parts", got=count)
        if any(a.parallel == how for a in domain):
            raise refuse(tv, f"has mesh axis {how.name} twice")
        sharding = (sharding or replicated(mesh)).with_(how.name, Shard(old.dim))
    streams = tuple(s for s in tv.streams if s.dim != old.dim)
    mine = [a for a in new if a.dim == old.dim and a.parallel is not None]
    for i, a in enumerate(mine):
        if isinstance(a.parallel, HostLoop):
            if i != len(mine) - 1:
                raise refuse(tv, "has a mesh axis or a second loop inside a host loop over the same dimension", cure="split the mesh axis off first")
            counts: tuple[Dim, ...] = tuple(b.count for b in mine[: i + 1] if b.count is not None)
            streams = (*streams, Streamed(old.dim, product(counts)))
    _together(tv, sharding, streams)
    tv.domain = new


def _mesh(tv: TensorView, how: MeshAxis, count: Dim) -> Mesh:
    """The tensor's mesh, or that of the fusion's other tensors, or a new one of that axis alone."""
    if tv.sharding is not None:
        return tv.sharding.mesh
    for other in tensors(tv.fusion):
        if other.sharding is not None and how.name in other.sharding.mesh.names:
            return other.sharding.mesh
    return Mesh((count,) if isinstance(count, int) else None, (how.name,))


def tensors(f: Fusion) -> list[TensorView]:
    """Every tensor of a fusion: inputs, then results of operations in order."""
    return [*f.inputs, *(o for op in f.ops for o in op.outs)]
