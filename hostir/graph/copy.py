"""A second Fusion with the same operations and annotations, so that passes can change one without touching the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.types import TensorType

Values = dict[TensorView, TensorView]


def swapped(x: Any, values: Mapping[TensorView, TensorView]) -> Any:
    """An argument with its tensors replaced."""
    if isinstance(x, TensorView):
        return values.get(x, x)
    return tuple(swapped(y, values) for y in x) if isinstance(x, tuple) else x


def like(fusion: Fusion, tv: TensorView, *, type: TensorType | None = None) -> TensorView:
    """A new tensor of ``fusion`` with the annotations of ``tv``."""
    out = TensorView(fusion, tv.type if type is None else type, tv.name)
    out.sharding, out.streams, out.domain = tv.sharding, tv.streams, tv.domain
    return out


def append(fusion: Fusion, op: Op, values: Values, outs: tuple[TensorView, ...] | None = None) -> Op:
    """``op`` on the values that stand for its operands, appended to ``fusion``; its results enter ``values``."""
    made = outs or tuple(like(fusion, o) for o in op.outs)
    new = replace(
        op,
        args=tuple(swapped(a, values) for a in op.args),
        attrs=tuple((k, swapped(v, values)) for k, v in op.attrs),
        outs=made,
    )
    for o in made:
        o.definition = new
    fusion.ops.append(new)
    values.update(zip(op.outs, made, strict=True))
    return new


def start(f: Fusion) -> tuple[Fusion, Values]:
    """A fusion with the parameters of ``f`` and no operations yet, and what stands for them."""
    g = Fusion(f.name)
    g.loc = f.loc
    values: Values = {}
    for p in f.params:
        if isinstance(p, TensorView):
            values[p] = like(g, p)
            g.params.append(values[p])
        else:
            g.params.append(p)
    return g, values


def finish(f: Fusion, g: Fusion, values: Values) -> Fusion:
    """``g`` with the results of ``f``."""
    g.results = [replace(r, value=values[r.value], alias=None if r.alias is None else values[r.alias]) for r in f.results]
    return g


def copied(f: Fusion, each: Callable[[Fusion, Op, Values], Any] = append) -> Fusion:
    """A copy of ``f``; ``each`` puts one operation into it."""
    g, values = start(f)
    for op in f.ops:
        each(g, op, values)
    return finish(f, g, values)
