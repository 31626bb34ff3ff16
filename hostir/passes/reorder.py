"""Copies that make the sharded dimension outermost, for transports that only gather and scatter along the first dimension.

The transports of this project take any dimension, so by default nothing is done. With ``layout="outermost"`` an allgather or
reduce-scatter along another dimension gets a copy in which that dimension comes first, and its result is the view that turns it back; one
whose earlier dimensions all have size 1 needs none.
"""

from __future__ import annotations

from typing import Any, Final

from hostir.errors import BuildError
from hostir.graph.copy import Values, append, copied
from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.graph.sharding import Partial, Placement, Replicate, Shard, Sharding, Streamed
from hostir.graph.table import apply
from hostir.passes.loops import changed_axis, is_move

LAYOUTS: Final = ("any", "outermost")


def reorder_sharded(f: Fusion, layout: str = "any") -> Fusion:
    """A copy of ``f`` (decomposed) whose collectives have the layout that the transport takes."""
    if layout not in LAYOUTS:
        raise BuildError("a collective takes any dimension, or the outermost", expected=", ".join(LAYOUTS), got=layout)
    return copied(f, _outermost if layout == "outermost" else append)


def _outermost(g: Fusion, op: Op, values: Values) -> None:
    dim = _dim(op)
    if dim is None:
        append(g, op, values)
        return
    (source,) = dict.fromkeys(op.reads())
    x, out = values[source], op.outs[0]
    rank = len(x.known.dims)
    there = (dim, *(d for d in range(rank) if d != dim))
    back = tuple(there.index(d) for d in range(rank))
    turned = _like(g, op, "permute", x, x, there, dims=there)
    first = _like(g, op, "set", turned, x, there)
    moved = _like(g, op, "set", first, out, there)
    values[out] = _like(g, op, "permute", moved, out, tuple(range(rank)), dims=back)
    values[out].name = out.name


def _dim(op: Op) -> int | None:
    """The dimension that is to come first; None where it does, or where it does not matter."""
    change = changed_axis(op) if is_move(op) else None
    match change:
        case (_, Shard(d), Replicate()) | (_, Partial(), Shard(d)):
            sizes = op.outs[0].known.dims[:d]
            return None if all(isinstance(n, int) and n == 1 for n in sizes) else d
        case _:
            return None


def _like(g: Fusion, op: Op, name: str, x: TensorView, model: TensorView, order: tuple[int, ...], **attrs: Any) -> TensorView:
    """``name(x)``, laid out as ``model`` with its dimensions in ``order``."""
    out = apply(g, name, [x], attrs, hints=[model.name], loc=op.loc)[0]
    assert model.sharding is not None

    def place(p: Placement) -> Placement:
        return Shard(order.index(p.dim)) if isinstance(p, Shard) else p

    out.sharding = Sharding(model.sharding.mesh, tuple(place(p) for p in model.sharding.placements))
    out.streams = tuple(Streamed(order.index(s.dim), s.chunks, s.swizzle) for s in model.streams)
    return out
