"""Which operations move data between ranks, and fusions that do nothing else.

An operation is a resharding when it cannot be computed part by part as its operands and results lie: something must be brought elsewhere
before or after it. Only a ``set``, a reduction and a squeeze *are* communications; a matrix product whose operands disagree is a
computation that needs some.
"""

from __future__ import annotations

from typing import Final

from hostir.errors import MixedFusionError
from hostir.graph.axes import axes_of
from hostir.graph.fusion import Fusion, Op
from hostir.graph.sharding import Streamed
from hostir.graph.table import TABLE
from hostir.ir.nodes import Program
from hostir.passes.labels import needs

_MOVES: Final = ("set", "squeeze")


def is_resharding(op: Op) -> bool:
    """Whether data must move between ranks for ``op``, as its operands and results are annotated. Without annotations it need not."""
    tensors = [*op.reads(), *op.outs]
    if any(tv.sharding is None for tv in tensors):
        return False
    axes = axes_of(op)
    if op.name == "set":
        (source,) = dict.fromkeys(op.reads())
        assert source.sharding is not None and op.outs[0].sharding is not None
        return not source.sharding.same_as(op.outs[0].sharding) or _order(source.streams) != _order(op.outs[0].streams)
    want = needs(op, axes)
    for (tv, _), sharding in zip(axes.ins, want.ins, strict=True):
        assert tv.sharding is not None
        if not tv.sharding.same_as(sharding):
            return True
    return any(o.sharding is not None and not o.sharding.same_as(s) for o, s in zip(op.outs, want.outs, strict=True))


def _order(streams: tuple[Streamed, ...]) -> set[tuple[int, str]]:
    """The dimensions whose chunks each rank takes in an order of its own."""
    return {(s.dim, s.swizzle) for s in streams if s.swizzle is not None}


def is_communication(op: Op) -> bool:
    """Whether ``op`` is a resharding that stands for a communication by itself."""
    row = TABLE.get(op.name)
    return row is not None and (op.name in _MOVES or (row.reduction and not row.composite)) and is_resharding(op)


def communications(fusion: Fusion) -> bool:
    """True when every operation is a communication, False when no data moves; MixedFusionError for everything in between."""
    answers = [is_communication(op) for op in fusion.ops]
    if any(answers) and not all(answers):
        compute = next(op.name for op, a in zip(fusion.ops, answers, strict=True) if not a)
        move = next(op.name for op, a in zip(fusion.ops, answers, strict=True) if a)
        raise MixedFusionError(
            f"the fusion {fusion.name} mixes communication ({move}) and computation ({compute})",
            cure="hir.compile(fusion) segments it and lowers it to a host program",
        )
    if not answers or all(answers):
        return bool(answers)
    if (needy := next((op for op in fusion.ops if is_resharding(op)), None)) is not None:
        raise MixedFusionError(
            f"{needy.name} of the fusion {fusion.name} needs communication: its operands and results do not lie alike", loc=needy.loc,
            cure="hir.compile(fusion) segments it and lowers it to a host program",
        )  # fmt: skip
    return False


def lower_communications(fusion: Fusion) -> Program:
    """A program of the communications of ``fusion``, over local shards."""
    from hostir.passes.pipeline import lower

    return lower(fusion)
