"""Reshardings as communications, one for each kind of change. Shards that are not equal travel padded: by the ceil rule the padding comes
last, so what has been put together is right as far as the tensor goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostir.graph.fusion import TensorView
from hostir.graph.sharding import Partial, Replicate, Shard, ceil_div, even, part, times
from hostir.graph.show import identifier
from hostir.ir.nodes import Buffer
from hostir.mesh import Mesh
from hostir.passes import emit_cross, emit_parts
from hostir.passes.loops import Where, changed_axis
from hostir.passes.tree import Segment
from hostir.types import Dim, Operand, TensorType

if TYPE_CHECKING:
    from hostir.passes.emit import Emitter


def move(em: Emitter, s: Segment) -> None:
    """The communication segment ``s``."""
    (op,) = s.ops
    (source,) = dict.fromkeys(op.reads())
    out = op.outs[0]
    if s.how and emit_parts.in_loop(em, s):
        return
    change = changed_axis(op)
    if change is None:
        emit_cross.cross(em, s)
        return
    ins, outs = em.inside(s, op)
    x = em.read(source, ins[0])
    name, before, after = change
    assert source.sharding is not None
    size = source.sharding.mesh.axis_size(name)
    dims = em._here(out, outs[0])
    mesh = source.sharding.mesh
    place = _Place(em, out, outs[0], dims, mesh, name)
    if isinstance(size, int) and size == 1:
        place.alias(x)
        return
    same_source = _free_to_write(em, source, s, x)
    match before, after:
        case Shard(d), Replicate():
            gather(em, place, x, d, size)
        case Partial(op=reduction), Replicate():
            if same_source and place.here:
                place.comm("allreduce", x, x, op=reduction)
                place.alias(x)
            else:
                place.comm("allreduce", place.buffer(), x, op=reduction)
        case Partial(op=reduction), Shard(d):
            reduce_scatter(em, place, x, d, size, reduction)
        case Shard(cat), Shard(split):
            exchange(em, place, x, split, cat, size)
        case Replicate(), Shard(d):
            start, length = part(x.type.dims[d], size, source.sharding.mesh.axis_rank(name))
            place.alias(em.w.narrow(x, d, start, length))
        case _:
            raise AssertionError(f"{before} → {after} is taken apart before")


def _free_to_write(em: Emitter, source: TensorView, s: Segment, x: Buffer) -> bool:
    """Whether nobody else needs ``source``: its buffer may be overwritten."""
    if source.definition is None or source in em.homes.results or em.homes.users[source] != [s]:
        return False
    return em.stored[source].buffer is x and x.base is None and id(x) in em.w.allocated and em.homes.home[source] == em.path


class _Place:
    """Where the result of a move goes: a value of this block may be any buffer, one kept outside is written there."""

    def __init__(self, em: Emitter, out: TensorView, where: Where, dims: tuple[Dim, ...], mesh: Mesh, axis: str) -> None:
        self.em = em
        self.mesh = mesh
        self.axis = axis
        self.out = out
        self.where = where
        self.dims = dims
        self.here = out not in em.stored

    def buffer(self) -> Buffer:
        """The buffer that the communication writes."""
        return self.em.target(self.out, self.where)

    def comm(self, kind: str, out: Buffer, x: Buffer, **fields: object) -> None:
        """A collective over the team of the mesh axis that changes."""
        self.em.over(kind, out, x, self.mesh, self.axis, **fields)

    def alias(self, x: Buffer) -> None:
        """The result is in ``x`` already."""
        from hostir.passes.emit import Stored

        if self.here and not (self.out in self.em.homes.results and x.root in _inputs(self.em)):
            self.em.stored[self.out] = Stored(x, self.em.chunks(self.out, self.em.path))
        else:
            self.em.w.copy(x, self.buffer())

    def temporary(self, dims: dict[int, Dim], init: float | None = None) -> Buffer:
        """A buffer like the result with some sizes changed."""
        sizes = tuple(dims.get(i, d) for i, d in enumerate(self.dims))
        return self.em.w.alloc(identifier(self.out.name), TensorType(self.out.dtype, sizes), init)


def _inputs(em: Emitter) -> set[Buffer]:
    return {em.stored[p].buffer for p in em.tree.fusion.inputs}


def padded(em: Emitter, x: Buffer, sizes: dict[int, Dim], name: str = "pad") -> Buffer:
    """``x`` at the front of a buffer of zeros that has ``sizes`` along some dimensions."""
    dims = tuple(sizes.get(i, d) for i, d in enumerate(x.type.dims))
    out = em.w.alloc(name, TensorType(x.type.dtype, dims), 0)
    em.w.copy(x, em.w.spans(out, {d: (0, x.type.dims[d]) for d in sizes}))
    return out


def gather(em: Emitter, place: _Place, x: Buffer, d: int, size: Dim) -> None:
    n = place.dims[d]
    if even(n, size):
        place.comm("allgather", place.buffer(), x, dim=d)
        return
    most = ceil_div(n, size)
    whole = place.temporary({d: times(most, size)})
    place.comm("allgather", whole, padded(em, x, {d: most}), dim=d)
    place.alias(em.w.narrow(whole, d, 0, n))


def reduce_scatter(em: Emitter, place: _Place, x: Buffer, d: int, size: Dim, op: str) -> None:
    n = x.type.dims[d]
    if even(n, size):
        place.comm("reduce_scatter", place.buffer(), x, op=op, dim=d)
        return
    most = ceil_div(n, size)
    mine = place.temporary({d: most})
    place.comm("reduce_scatter", mine, padded(em, x, {d: times(most, size)}), op=op, dim=d)
    place.alias(em.w.narrow(mine, d, 0, place.dims[d]))


def exchange(em: Emitter, place: _Place, x: Buffer, split: int, cat: int, size: Dim) -> None:
    n, m = x.type.dims[split], place.dims[cat]
    if even(n, size) and even(m, size):
        place.comm("alltoall", place.buffer(), x, split=split, cat=cat)
        return
    cut, part_of_cat = ceil_div(n, size), ceil_div(m, size)
    sent = padded(em, x, {split: times(cut, size), cat: part_of_cat})
    got = place.temporary({split: cut, cat: times(part_of_cat, size)})
    place.comm("alltoall", got, sent, split=split, cat=cat)
    spans: dict[int, tuple[Operand, Dim]] = {split: (0, place.dims[split]), cat: (0, m)}
    place.alias(em.w.spans(got, spans))
