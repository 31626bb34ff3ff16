"""How large a tensor is on one rank and in one trip: sizes of whole dimensions become those of shards, by the ceil rule, and of chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hostir.graph.copy import copied
from hostir.graph.fusion import Fusion, TensorView
from hostir.graph.sharding import Sharding, ceil_div, even, part, times
from hostir.passes.loops import LoopAxis
from hostir.types import Dim, Expr, Leaf, Operand, Sym, TensorType, binary, leaves, minimum, product, simplify, substitute


def local_dim(n: Dim, s: Sharding | None, dim: int, *, but: str | None = None) -> Dim:
    """The size of this rank's part of dimension ``dim`` of ``n`` elements; ``but``: as if that mesh axis and those inside it did not cut."""
    if s is None:
        return n
    for axis in s.axes_of(dim):
        if axis == but:
            break
        n = part(n, s.mesh.axis_size(axis), s.mesh.axis_rank(axis))[1]
    return n


def local_dims(tv: TensorView) -> tuple[Dim, ...]:
    """The sizes of this rank's part of ``tv``."""
    return tuple(local_dim(n, tv.sharding, d) for d, n in enumerate(tv.known.dims))


def local_type(tv: TensorView) -> TensorType:
    t = tv.known
    return TensorType(t.dtype, local_dims(tv), t.memory)


@dataclass(frozen=True)
class Chunk:
    """One trip's part of a dimension: elements ``start`` to ``start + size`` of this rank's part. ``most`` bounds the size."""

    start: Operand
    size: Dim
    most: Dim

    @property
    def full(self) -> bool:
        """Whether the size is the same in every trip."""
        return self.size is self.most


def chunk(tv: TensorView, dim: int, axis: LoopAxis, index: Operand) -> Chunk:
    """Chunk ``index`` (counted in this rank's part) of dimension ``dim``."""
    whole = tv.known.dims[dim]
    mine = local_dim(whole, tv.sharding, dim)
    most = ceil_div(whole, axis.chunks)
    start = simplify(times(index, most))
    if even(whole, axis.chunks) and (not axis.cut or not isinstance(mine, Expr)):
        return Chunk(start, most, most)
    start = minimum(start, mine)
    stop = minimum(times(binary("+", index, 1), most), mine)
    size: Dim = simplify(binary("-", stop, start))  # type: ignore[assignment]
    return Chunk(start, size, most)


def bound_symbols(f: Fusion) -> Fusion:
    """A copy of ``f`` in which every symbolic size can be read off a local shard: one that only stands in sharded dimensions becomes the
    number of ranks times the size of a shard (which then are equal)."""
    bound = {d.name for p in f.inputs for d in local_dims(p) if isinstance(d, Sym)}
    swap: dict[str, Dim] = {}
    for p in f.inputs:
        for d, n in enumerate(p.known.dims):
            if isinstance(n, Sym) and n.name not in bound and n.name not in swap and p.sharding is not None:
                parts = product(tuple(p.sharding.mesh.axis_size(a) for a in p.sharding.axes_of(d)))
                swap[n.name] = times(Sym(f"{n.name}_part"), parts)
    if not swap:
        return f
    g = copied(f)

    def one(leaf: Leaf) -> Operand:
        return swap.get(leaf.name, leaf) if isinstance(leaf, Sym) else leaf

    for tv in (*g.inputs, *(o for op in g.ops for o in op.outs)):
        if tv.type is not None:
            dims = tuple(substitute(d, one) if isinstance(d, Expr) else d for d in tv.type.dims)
            tv.type = TensorType(tv.type.dtype, dims, tv.type.memory)
    for i, op in enumerate(g.ops):
        if any(isinstance(leaf, Sym) and leaf.name in swap for leaf in _numbers(op.args, op.attrs)):
            new = replace(op, args=_replaced(op.args, one), attrs=_replaced(op.attrs, one))
            for o in new.outs:
                o.definition = new
            g.ops[i] = new
    return g


def _numbers(*values: object) -> list[Leaf]:
    found: list[Leaf] = []
    for v in values:
        if isinstance(v, tuple):
            found += _numbers(*v)
        elif isinstance(v, Expr):
            found += leaves(v)
    return found


def _replaced(v: Any, one: Callable[[Leaf], Operand]) -> Any:
    if isinstance(v, tuple):
        return tuple(_replaced(x, one) for x in v)
    return substitute(v, one) if isinstance(v, Expr) else v
