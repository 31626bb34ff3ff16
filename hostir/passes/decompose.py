"""Every resharding stands alone and changes one thing.

An operation is computed where its result is wanted, part by part. Operands that lie otherwise are brought there first, a result that
comes out otherwise (partial, or cut along another dimension) is brought to its place afterwards; each move is a chain of ``set``, one
mesh axis a step. A reduction over a cut dimension is thus a reduction of the part, and then one between ranks.
"""

from __future__ import annotations

from dataclasses import replace

from hostir.errors import BuildError
from hostir.graph.annotate import tensors
from hostir.graph.axes import Axes, Labels, axes_of
from hostir.graph.copy import Values, append, copied
from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.graph.sharding import Replicate, Sharding, Streamed
from hostir.graph.table import TABLE, apply, bound_of, split
from hostir.passes.expand import expand
from hostir.passes.labels import PLACES, Found, needs, op_streams
from hostir.passes.moves import steps


def decompose_resharding(f: Fusion, place: str = "before") -> Fusion:
    """A copy of ``f`` (propagated) in which only ``set`` moves data between ranks. ``place``: whether operands that disagree with their
    operation move ``before`` it, or its result ``after`` it."""
    if place not in PLACES:
        raise BuildError("a resharding is placed before or after an operation", expected=", ".join(PLACES), got=place)
    g = expand(_without_single(f), place)
    if all(tv.sharding is None for tv in tensors(g)):
        return copied(g, _streamed)
    return copied(g, _Decompose(place).one)


def _without_single(f: Fusion) -> Fusion:
    """A mesh axis of one member cuts nothing and leaves nothing partial."""
    g = copied(f)
    for tv in tensors(g):
        if (s := tv.sharding) is not None:
            sizes = [s.mesh.axis_size(n) for n in s.mesh.names]
            one = [isinstance(n, int) and n == 1 for n in sizes]
            tv.sharding = Sharding(s.mesh, tuple(Replicate() if alone else p for alone, p in zip(one, s.placements, strict=True)))
    return g


def _streamed(g: Fusion, op: Op, values: Values) -> None:
    """Without a mesh there is nothing to move: results only get the streams of their operation."""
    axes = axes_of(op)
    streams = op_streams(op, axes)
    new = append(g, op, values)
    for out, made, labels in zip(op.outs, new.outs, axes.outs, strict=True):
        made.streams = streams_of(labels, streams, out.streams)


def streams_of(labels: Labels, streams: Found, own: tuple[Streamed, ...] = ()) -> tuple[Streamed, ...]:
    """The streamed dimensions of a value with these labels, in the order in which its own annotation has them."""
    found = {d: Streamed(d, streams[label][0].chunks, streams[label][0].swizzle) for d, label in enumerate(labels) if label in streams}
    order = [s.dim for s in own if s.dim in found]
    return tuple(found[d] for d in (*order, *(d for d in found if d not in order)))


class _Decompose:
    """``moved`` remembers what has been moved where: two consumers share one resharding."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.moved: dict[object, TensorView] = {}

    def one(self, g: Fusion, op: Op, values: Values) -> None:
        if op.name == "set":
            self._set(g, op, values)
            return
        axes = axes_of(op)
        streams = op_streams(op, axes)
        want = needs(op, axes, self.place)
        operands: list[TensorView] = []
        for (tv, labels), sharding in zip(axes.ins, want.ins, strict=True):
            operands.append(self._to(g, values[tv], sharding, streams_of(labels, streams), op))
        made = []
        for out, labels, sharding in zip(op.outs, axes.outs, want.outs, strict=True):
            new = TensorView(g, out.type, out.name)
            new.sharding, new.streams = sharding, streams_of(labels, streams, out.streams)
            made.append(new)
        _append(g, op, axes, operands, values, tuple(made))
        for out, new in zip(op.outs, made, strict=True):
            assert out.sharding is not None
            values[out] = self._to(g, new, out.sharding, out.streams, op, name=out.name)

    def _set(self, g: Fusion, op: Op, values: Values) -> None:
        (source,) = dict.fromkeys(op.reads())
        out, x = op.outs[0], values[source]
        assert x.sharding is not None and out.sharding is not None
        if x.sharding.same_as(out.sharding):
            _streamed(g, op, values)
        else:
            values[out] = self._to(g, x, out.sharding, out.streams, op, name=out.name)

    def _to(self, g: Fusion, x: TensorView, to: Sharding, streams: tuple[Streamed, ...], op: Op, *, name: str | None = None) -> TensorView:
        """``x`` brought to ``to`` by a chain of sets. The last one has ``streams``; those on the way those dimensions that lie as in it, or
        as before."""
        assert x.sharding is not None
        if x.sharding.same_as(to):
            return x
        key = (id(x), str(to), to.mesh.names, to.mesh.ranks, str(streams), name)
        if (known := self.moved.get(key)) is not None:
            return known
        first, chain = x, steps(x.sharding, to)
        for i, sharding in enumerate(chain):
            last = i == len(chain) - 1
            y = apply(g, "set", [x], hints=[name if last and name else x.name], loc=op.loc)[0]
            y.sharding = sharding
            y.streams = streams if last else _on_the_way(sharding, to, streams) or _on_the_way(sharding, first.sharding, first.streams)
            x = y
        self.moved[key] = x
        return x


def _on_the_way(here: Sharding, there: Sharding | None, streams: tuple[Streamed, ...]) -> tuple[Streamed, ...]:
    assert there is not None
    return tuple(s for s in streams if here.axes_of(s.dim) == there.axes_of(s.dim) and here.mesh.same_as(there.mesh))


def _append(g: Fusion, op: Op, axes: Axes, operands: list[TensorView], values: Values, made: tuple[TensorView, ...]) -> None:
    """``op`` on these operands (one for each entry of ``axes.ins``), with results that are there already."""
    row = TABLE.get(op.name)
    if row is None or not axes.where:  # opaque: all operands are whole
        append(g, op, values | {tv: x for (tv, _), x in zip(axes.ins, operands, strict=True)}, made)
    else:
        bound = bound_of(op.name, op.args, op.attrs)
        for (name, place), x in zip(axes.where, operands, strict=True):
            v = bound[name]
            bound[name] = (*v[:place], x, *v[place + 1 :]) if isinstance(v, tuple) else x
        args, attrs = split(row, bound)
        append(g, replace(op, args=args, attrs=attrs), {}, made)
    values.update(zip(op.outs, made, strict=True))
