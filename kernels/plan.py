"""Everything a segment does for arguments of one shape: which kernels, with which arguments, over which temporaries.

A plan is made from sizes, strides and which outputs lie on which inputs; it holds no tensor and no address. Outputs that a kernel cannot
write where they lie (something is still to be read there) get a temporary and one copy, and the plan says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hostir.errors import InputError
from hostir.graph.fusion import Fusion, TensorView
from hostir.kernels import normalization, pointwise, reduction
from hostir.kernels.body import Body, Folded, Load, Place, State
from hostir.kernels.emit import Writer
from hostir.kernels.folds import FOLDS
from hostir.kernels.layout import Layout, needs_64_bit
from hostir.kernels.lower import Lowering
from hostir.kernels.nodes import Part, Root, Tensor, View, below
from hostir.kernels.partition import Partition, Temporary
from hostir.kernels.source import Source
from hostir.kernels.tiling import Target
from hostir.types import Leaf, Sym, Var


@dataclass(frozen=True, slots=True)
class Shape:
    """What a plan depends on. ``inputs``: the layout of each tensor parameter (None: a scalar); ``outs``: of each result that is written into a
    given tensor (None: a fresh one); ``same`` and ``some``: pairs (result, parameter) that are the same elements, or may share some;
    ``scalars``: values of the scalar parameters that sizes depend on."""

    inputs: tuple[Layout | None, ...]
    outs: tuple[Layout | None, ...]
    same: frozenset[tuple[int, int]] = frozenset()
    some: frozenset[tuple[int, int]] = frozenset()
    scalars: tuple[tuple[int, Any], ...] = ()


@dataclass(slots=True)
class Plan:
    """``sources`` are launched in order; ``schedulers`` names who planned each. Buffers are numbered: parameters, then results, then
    temporaries. ``fresh``: the sizes of each result's own tensor; ``views``: results that are views of a parameter, as (result,
    parameter, layout); ``copies``: results that go through a temporary, with the reason."""

    sources: list[Source] = field(default_factory=list)
    schedulers: list[str] = field(default_factory=list)
    temporaries: list[Temporary] = field(default_factory=list)
    fresh: dict[int, tuple[int, ...]] = field(default_factory=dict)
    views: list[tuple[int, int, Layout]] = field(default_factory=list)
    copies: dict[int, str] = field(default_factory=dict)


def make(fusion: Fusion, shape: Shape, target: Target, name: str | None = None) -> Plan:
    """The plan for ``fusion``; UnsupportedError where no kernel can be written, InputError for an extremum over nothing."""
    low = Lowering(fusion, _environment(fusion, shape), lambda n, last: normalization.holds(n, last, target))
    roots = low.roots()
    num_params = len(fusion.params)
    plan = Plan()
    buffers = {i: x for i, x in enumerate(shape.inputs) if x is not None}
    outs: dict[int, int] = {}
    overwritten = {i for _, i in shape.same | shape.some}
    for root in roots:
        outs[root.result] = num_params + root.result
        given = shape.outs[root.result]
        if given is None and (seen := _view_of(root, buffers)) is not None and seen[0] not in overwritten:
            plan.views.append((root.result, *seen))
            del outs[root.result]
            continue
        if given is None:
            plan.fresh[root.result] = root.node.shape
        buffers[outs[root.result]] = given or Layout.row_major(root.node.shape)
    todo = [r for r in roots if r.result in outs and 0 not in r.node.shape]
    _refuse_empty(todo)
    while True:
        parts = Partition(dict(buffers), lambda body: reduction.split(body, target))
        parts.run(todo, outs)
        hazards = {j: why for j, why in _hazards(parts.bodies, shape, outs).items() if j not in plan.copies}
        if not hazards:
            break
        for j, why in hazards.items():
            plan.copies[j] = why
            buffers[outs[j]] = Layout.row_major(shape.outs[j].sizes)  # type: ignore[union-attr]
    plan.temporaries = parts.temporaries
    label = "".join(c if c.isalnum() else "_" for c in (name or fusion.name))
    written = frozenset(i for j, i in shape.same if j not in plan.copies)
    for k, body in enumerate(parts.bodies):
        scheduler = scheduler_of(body)
        plan.schedulers.append(scheduler)
        tiling = _SCHEDULERS[scheduler](body, target, is_wide(body))
        title = f"{label}_{k}" if len(parts.bodies) > 1 else label
        plan.sources.append(Writer(title, body, tiling, written).source())
    return plan


def scheduler_of(body: Body) -> str:
    """Which scheduler plans a body."""
    if not any(isinstance(v, (Folded, State)) for v in body.values()):
        return "pointwise"
    return "normalization" if any(s.whole for s in body.stores) else "reduction"


_SCHEDULERS: Final = {"pointwise": pointwise.choose, "reduction": reduction.choose, "normalization": normalization.choose}


def is_wide(body: Body) -> bool:
    """Whether offsets and indices need 64 bits."""
    domain = body.domain
    counts = [domain.count(domain.kept), domain.count(domain.folded)]
    inner = [v.layout.inner for v in body.values() if isinstance(v, (Load, Place)) and v.layout.inner is not None]
    states = [domain.count(domain.kept) * body.split] if body.split > 1 else []
    return needs_64_bit([*body.layouts(), *inner], counts + states)


def _environment(fusion: Fusion, shape: Shape) -> Any:
    """The number of each symbol and of the scalars that sizes depend on."""
    symbols: dict[str, int] = {}
    for p, x in zip(fusion.params, shape.inputs, strict=True):
        if isinstance(p, TensorView) and x is not None:
            for d, n in zip(p.known.dims, x.sizes, strict=True):
                if isinstance(d, Sym):
                    symbols.setdefault(d.name, n)
    scalars = {id(fusion.params[i]): v for i, v in shape.scalars}

    def env(leaf: Leaf) -> Any:
        if isinstance(leaf, Sym):
            return symbols[leaf.name]
        assert isinstance(leaf, Var)
        return scalars[id(leaf)]

    return env


def _view_of(root: Root, buffers: Mapping[int, Layout]) -> tuple[int, Layout] | None:
    """The parameter of which a result is a view, and how; None when it is computed or strides cannot say it."""
    steps = []
    n = root.node
    while isinstance(n, View):
        steps.append(n.step)
        n = n.x
    if not isinstance(n, Tensor):
        return None
    layout = buffers[n.buffer]
    for step in reversed(steps):
        layout = step.apply(layout)
    return None if layout.inner is not None or min(layout.strides, default=0) < 0 else (n.buffer, layout)


def _refuse_empty(roots: Sequence[Root]) -> None:
    for n in below(tuple(r.node for r in roots)):
        if isinstance(n, Part) and n.of.count == 0 and 0 not in n.shape and not FOLDS[n.of.kind].empty:
            raise InputError(
                f"{n.of.kind} over no elements does not exist", expected="at least one element in each reduced dim", got=list(n.of.operands[0].shape)
            )


def _hazards(bodies: Sequence[Body], shape: Shape, outs: Mapping[int, int]) -> dict[int, str]:
    """Results that cannot be written where they are wanted: some kernel still reads there, at that time or in another order."""
    found: dict[int, str] = {}
    shared = [(j, i, True) for j, i in shape.same] + [(j, i, False) for j, i in shape.some]
    for j, i, same in shared:
        if j not in outs:
            continue
        for at, body in enumerate(bodies):
            store = next((s for s in body.stores if s.buffer == outs[j]), None)
            if store is None:
                continue
            later = [v for b in bodies[at + 1 :] for v in b.values() if isinstance(v, Load) and v.buffer == i]
            here = [v for v in body.values() if isinstance(v, Load) and v.buffer == i]
            if later:
                found[j] = "a later kernel reads the input that it lies on"
            elif here and not same:
                found[j] = "it overlaps an input in part"
            elif any(v.layout != store.layout for v in here):
                found[j] = "the input that it lies on is read in another order"
    return found
