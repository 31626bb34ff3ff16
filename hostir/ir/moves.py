"""What a set of ranks does, as one dry run has found it: moves, the regions that they use, and where ranks differ in them.

What differs is kept as one number a rank. A cohort can be narrowed to some of its ranks, and taken apart into single ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hostir.errors import HostIrError
from hostir.ir.nodes import Alloc, Comm, Peer, Program, View, every
from hostir.ir.regions import Layout
from hostir.ir.teams import Ints
from hostir.ir.walk import Instance, Step
from hostir.types import Var

Mask: TypeAlias = npt.NDArray[np.bool_]
PerRank: TypeAlias = int | Ints  # one number for all ranks of a cohort, or one each


class Use(NamedTuple):
    """One region that a statement reads or writes. ``layout`` is the first rank's; where the others begin elsewhere ``offsets`` says
    where; where not all ranks do it (the root of a reduce) ``only`` says which do; where it is on another rank, ``peer`` is the first
    rank's, and ``peers`` says whose memory it is for each, where that differs."""

    root: Instance
    layout: Layout
    write: bool
    offsets: Ints | None = None
    only: Mask | None = None
    peer: int | None = None
    peers: Ints | None = None


class Move(NamedTuple):
    """One statement as a cohort executes it. ``at`` holds the values of the loops around it; an ``alloc`` has the whole buffer as its use.

    Of a communication ``to`` and ``source`` are positions in the team, ``sizes`` those of all its buffers, also where a rank uses none.
    """

    step: Step
    at: tuple[int, ...] = ()
    uses: tuple[Use, ...] = ()
    to: PerRank | None = None
    source: PerRank | None = None
    value: PerRank | None = None
    counts: tuple[tuple[PerRank, ...], tuple[PerRank, ...]] | None = None
    sizes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Cohort:
    """World ``ranks`` and what they do; ``results`` are the regions of the outputs. ``error`` is what stopped the walk of the first
    rank, with loop indices and scalars ``values``: then it is alone and the moves end there."""

    ranks: tuple[int, ...]
    moves: tuple[Move, ...]
    results: tuple[Use, ...]
    error: HostIrError | None = None
    values: Mapping[Var, Any] = field(default_factory=dict)

    @cached_property
    def copies(self) -> dict[Instance, int]:
        """The how-manieth life of its buffer an instance is: the same number on every rank, whatever path it takes."""
        lives: dict[int, int] = {}
        found: dict[Instance, int] = {}
        for m in self.moves:
            if isinstance(m.step.op, Alloc):
                root = m.uses[0].root if m.uses else None
                if root is not None:
                    lives[id(root.buffer)] = lives.get(id(root.buffer), 0) + 1
                    found[root] = lives[id(root.buffer)]
        return found


def one_sided(p: Program) -> bool:
    """Whether ranks touch each other's memory: views of peers, signals."""
    return any((isinstance(s, View) and isinstance(s.op, Peer)) or (isinstance(s, Comm) and s.kind == "signal") for s in every(p.body))


def is_wide(m: Move) -> bool:
    if any(u.offsets is not None or u.only is not None or u.peers is not None for u in m.uses) or m.counts is not None:
        return True
    return any(isinstance(x, np.ndarray) for x in (m.to, m.source, m.value))


def _pick(x: Any, keep: Ints) -> Any:
    if isinstance(x, np.ndarray):
        return x[keep] if len(keep) > 1 else x[keep[0]].item()
    return x


def kept(uses: Sequence[Use], keep: Ints) -> list[Use]:
    """The uses of the ranks that stay. The first of them is the first of the whole cohort, so layouts stand."""
    out = []
    for u in uses:
        if u.only is not None and not u.only[keep].any():
            continue
        only = None if u.only is None or u.only[keep].all() else u.only[keep]
        offsets = None if u.offsets is None or len(keep) == 1 else u.offsets[keep]
        peers = None if u.peers is None or len(keep) == 1 else u.peers[keep]
        out.append(u._replace(only=only, offsets=offsets, peers=peers))
    return out


def narrow(m: Move, keep: Ints) -> Move:
    counts = None if m.counts is None else (tuple(_pick(c, keep) for c in m.counts[0]), tuple(_pick(c, keep) for c in m.counts[1]))
    return m._replace(uses=tuple(kept(m.uses, keep)), to=_pick(m.to, keep), source=_pick(m.source, keep), value=_pick(m.value, keep), counts=counts)


def apart(c: Cohort) -> list[Cohort]:
    """Each rank by itself, for who must know which rank touches whose memory."""
    if len(c.ranks) == 1:
        return [c]
    wide = [i for i, m in enumerate(c.moves) if is_wide(m)]
    found = []
    for k, rank in enumerate(c.ranks):
        moves = list(c.moves)
        for i in wide:
            moves[i] = _of_one(moves[i], k)
        one = Cohort((rank,), tuple(moves), tuple(_uses_of_one(c.results, k)), None, c.values)
        one.__dict__["copies"] = c.copies  # the same lives on every rank
        found.append(one)
    return found


def _of_one(m: Move, k: int) -> Move:
    keep = np.array([k])
    counts = None if m.counts is None else (tuple(_pick(c, keep) for c in m.counts[0]), tuple(_pick(c, keep) for c in m.counts[1]))
    return Move(m.step, m.at, tuple(_uses_of_one(m.uses, k)), _pick(m.to, keep), _pick(m.source, keep), _pick(m.value, keep), counts, m.sizes)


def _uses_of_one(uses: Sequence[Use], k: int) -> list[Use]:
    return [
        Use(
            u.root, u.layout if u.offsets is None else Layout(int(u.offsets[k]), u.layout.sizes, u.layout.strides), u.write,
            peer=u.peer if u.peers is None else int(u.peers[k]),
        )
        for u in uses if u.only is None or u.only[k]
    ]  # fmt: skip
