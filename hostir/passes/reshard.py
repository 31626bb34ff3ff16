"""Fusions that only move data between ranks, and the communications that do it.

Exactly one thing changes per operation: a shard becomes replicated (allgather), a partial sum is finished (allreduce, reduce-scatter),
a shard changes its dimension (alltoall), or a replicated tensor keeps its own part (a local slice).
"""

from __future__ import annotations

from hostir.errors import BuildError, MixedFusionError
from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.graph.sharding import Partial, Replicate, Shard, Sharding
from hostir.ir.nodes import MAIN, Alloc, Axis, Buffer, Comm, Index, Program, ProgramData, Span, Stmt, View
from hostir.ir.views import view_type
from hostir.mesh import Mesh
from hostir.types import Dim, Rank, TensorType, Var, binary, simplify


def is_resharding(op: Op) -> bool:
    """Whether ``op`` moves data between ranks: its input and its output lie differently on the mesh."""
    source, out = _source(op), op.outs[0]
    if source is None or source.sharding is None or out.sharding is None or op.name not in ("set", "sum"):
        return False
    if op.name == "set":
        return not source.sharding.same_as(out.sharding)
    reduced = _reduced_dims(op, source)
    return any(isinstance(p, Shard) and p.dim in reduced for p in source.sharding.placements)


def _source(op: Op) -> TensorView | None:
    return next(iter(op.reads()), None)


def _reduced_dims(op: Op, source: TensorView) -> set[int]:
    dims = op.attr("dims", ())
    rank = len(source.known.dims)
    listed = dims if isinstance(dims, tuple) else (dims,)
    return {int(d) % rank for d in listed if isinstance(d, int)} or set(range(rank))


def communications(fusion: Fusion) -> bool:
    """True when every operation is a resharding, False when none is; MixedFusionError for a mix."""
    answers = [is_resharding(op) for op in fusion.ops]
    if any(answers) and not all(answers):
        compute = next(op.name for op, a in zip(fusion.ops, answers, strict=True) if not a)
        move = next(op.name for op, a in zip(fusion.ops, answers, strict=True) if a)
        raise MixedFusionError(
            f"the fusion {fusion.name} mixes communication ({move}) and computation ({compute})",
            cure="hir.compile(fusion) segments it and lowers it to a host program",
        )
    return bool(answers) and all(answers)


def local_type(tv: TensorView) -> TensorType:
    """The type of this rank's part of ``tv``; sizes must divide."""
    t = tv.known
    dims: list[Dim] = list(t.dims)
    if tv.sharding is not None:
        for name, p in zip(tv.sharding.mesh.names, tv.sharding.placements, strict=True):
            if isinstance(p, Shard):
                size = tv.sharding.mesh.axis_size(name)
                if isinstance(size, int) and isinstance(dims[p.dim], int) and dims[p.dim] % size:
                    raise BuildError(f"%{tv.name} does not divide over mesh axis {name}", expected=f"a multiple of {size}", got=dims[p.dim])
                part = simplify(binary("//", dims[p.dim], size))
                assert not isinstance(part, float)
                dims[p.dim] = part
    return TensorType(t.dtype, tuple(dims))


def lower_communications(fusion: Fusion) -> Program:
    """A program of the communications of ``fusion``, over local shards."""
    body: list[Stmt] = []
    values: dict[TensorView, Buffer] = {}
    params: list[Buffer | Var] = []
    mesh: Mesh | None = None
    for p in fusion.params:
        if isinstance(p, TensorView):
            values[p] = Buffer(p.name, local_type(p))
            mesh = p.sharding.mesh if p.sharding is not None else mesh
            params.append(values[p])
    assert mesh is not None
    for op in fusion.ops:
        source, out = _source(op), op.outs[0]
        assert source is not None and source.sharding is not None and out.sharding is not None
        values[out] = _move(source, values[source], source.sharding, out, out.sharding, body)
    axes = tuple(Axis(n, None if mesh.shape is None else mesh.shape[i]) for i, n in enumerate(mesh.names))
    results = tuple(values[r.value] for r in fusion.results)
    return Program(ProgramData(fusion.name, tuple(params), axes=axes, body=tuple(body), results=results))


def _move(source: TensorView, x: Buffer, old: Sharding, out: TensorView, new: Sharding, body: list[Stmt]) -> Buffer:
    changed = [i for i, (a, b) in enumerate(zip(old.placements, new.placements, strict=True)) if a != b]
    if not old.mesh.same_as(new.mesh) or len(changed) != 1 or out.definition is None or out.definition.name != "set":
        raise BuildError(
            f"%{source.name} → %{out.name} changes more than one thing", expected="one mesh axis at a time",
            got=f"{old} → {new}", cure="hir.lower(fusion) decomposes it",
        )  # fmt: skip
    i = changed[0]
    team = (old.mesh.names[i],)
    a, b = old.placements[i], new.placements[i]
    y = Buffer(out.name, local_type(out))
    match a, b:
        case Shard(dim), Replicate():
            move = Comm("allgather", (y,), (x,), dim=dim, team=team, stream=MAIN)
        case Partial(op), Replicate():
            move = Comm("allreduce", (y,), (x,), op=op, team=team, stream=MAIN)
        case Partial(op), Shard(dim):
            move = Comm("reduce_scatter", (y,), (x,), op=op, dim=dim, team=team, stream=MAIN)
        case Shard(split), Shard(cat):
            # the new shard dimension is split, the old one is put together
            move = Comm("alltoall", (y,), (x,), split=cat, cat=split, team=team, stream=MAIN)
        case Replicate(), Shard(dim):
            part = y.type.dims[dim]
            start = binary("*", Rank(team[0]), part)
            index = Index((*[None] * dim, Span(start, binary("+", start, part))))
            view = Buffer("v", view_type(x.type, index), x, index)
            body += [View(view, x, index), Alloc(y), Comm("copy", (y,), (view,))]
            return y
        case _:
            raise BuildError(f"%{source.name} → %{out.name}: {a} → {b} is no resharding", cure="finish partial values with Replicate or Shard")
    body += [Alloc(y), move]
    return y
