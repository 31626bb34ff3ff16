"""Sums over the trips of a host loop.

A reduction over a dimension that a loop walks through becomes an accumulator, allocated before the loop with the reduction's identity,
and each trip adds its term inside the unit that makes it: the accumulator is on both sides of the call. Short floats are kept in f32 and
rounded once, after the loop.
"""

from __future__ import annotations

from dataclasses import replace

from hostir.errors import PlanError
from hostir.passes.expand import accumulator
from hostir.passes.loops import LoopAxis, Loops
from hostir.passes.tree import Finish, Item, Loop, Segment, Sum, Tree

FORMS = ("fused", "eager")


def host_sum(tree: Tree, form: str = "fused") -> Tree:
    """``tree`` with accumulators. ``form``: ``fused`` adds in the unit that makes the term; ``eager`` writes the term and adds it by a
    call of its own (for comparison)."""
    if form not in FORMS:
        raise PlanError("a host sum is fused into the unit that makes its terms, or eager", expected=", ".join(FORMS), got=form)
    return tree.with_(_block(tree.items, tree.loops, form, ()))


def sums(s: Segment, loops: Loops, form: str) -> tuple[Sum, ...]:
    found = []
    for op in s.ops:
        terms = loops.summed(op)
        if terms:
            (how,) = set(terms.values())
            axes = tuple(a for a in s.nest if a in terms)
            found += [Sum(o, axes, how, accumulator(o.dtype) if how in ("sum", "prod") else o.dtype, form == "eager") for o in op.outs]
    return tuple(found)


def _block(items: tuple[Item, ...], loops: Loops, form: str, around: tuple[LoopAxis, ...]) -> tuple[Item, ...]:
    out: list[Item] = []
    for item in items:
        if isinstance(item, Segment):
            out.append(replace(item, sums=sums(item, loops, form)))
        elif isinstance(item, Loop):
            loop = replace(item, body=_block(item.body, loops, form, (*around, item.axis)))
            out.append(loop)
            out += [Finish(x) for x in _ended(loop) if x.dtype is not x.value.dtype]
        else:
            out.append(item)
    return tuple(out)


def _ended(loop: Loop) -> list[Sum]:
    """The sums whose outermost loop this is."""
    found: list[Sum] = []

    def look(items: tuple[Item, ...]) -> None:
        for item in items:
            if isinstance(item, Segment):
                found.extend(x for x in item.sums if x.loops[0] is loop.axis)
            elif isinstance(item, Loop):
                look(item.body)

    look(loop.body)
    return found
