"""The temporaries of a compiled program: allocated once, at addresses that stay, sharing memory where their lives do not meet.

Two buffers share a block only when all uses of both are on one stream, so that its order keeps them apart; a block that moves between
streams would need a sync for its sake alone. Where there are no real streams a communication goes on after its place in the order:
then the block is free from where it was waited for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from hostir.dispatch.flatten import Action, Flat, Ref
from hostir.ir.walk import Instance, Lane
from hostir.torch_types import to_torch

ALIGNMENT = 512


@dataclass(slots=True)
class _Life:
    """When (by position of the action) and on which streams a root is used."""

    root: Instance
    first: int
    last: int
    lanes: set[Lane]
    bytes: int
    under_way: set[int]


def _uses(action: Action) -> Iterator[Ref]:
    for r in (*action.args, *action.outs, *action.counts):
        if isinstance(r, Ref):
            yield r
    for part in action.parts:
        yield from _uses(part)


def root_bytes(root: Instance, sizes: tuple[int, ...]) -> int:
    return math.prod(sizes) * root.buffer.type.dtype.itemsize


def _lives(flat: Flat, roots: Collection[Instance]) -> list[_Life]:
    """``under_way``: the communications that use a root and are waited for somewhere, by position."""
    found: dict[Instance, _Life] = {}
    waited = {at for action in flat.actions for at in action.waits} | set(flat.last_waits)
    for position, action in enumerate(flat.actions):
        for r in _uses(action):
            if r.root not in roots:
                continue
            life = found.get(r.root)
            if life is None:
                life = found[r.root] = _Life(r.root, position, position, set(), root_bytes(r.root, flat.roots[r.root]), set())
            life.last = position
            life.lanes.add(action.step.stream)
            if position in waited:
                life.under_way.add(position)
    return sorted(found.values(), key=lambda life: life.first)


class Arena:
    """Tensors for ``roots`` of a flat program, and ``bytes``, what their blocks take."""

    def __init__(self, flat: Flat, roots: Collection[Instance], device: torch.device) -> None:
        self.tensors: dict[Instance, torch.Tensor] = {}
        self.bytes = 0
        ended = None if device.type == "cuda" else {at: i for i, action in enumerate(flat.actions) for at in action.waits}
        shared = {r for r in roots if r.buffer.type.memory == "global"}
        blocks: list[tuple[int, list[_Life]]] = []
        for life in _lives(flat, shared):
            fitting = [b for b in blocks if b[0] >= life.bytes and _may_follow(b[1][-1], life, ended)]
            best = min(fitting, key=lambda b: b[0], default=None)
            if best is None:
                blocks.append((life.bytes, [life]))
            else:
                best[1].append(life)
        with torch.inference_mode(False):
            for size, lives in blocks:
                block = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
                self.bytes += -(-size // ALIGNMENT) * ALIGNMENT
                for life in lives:
                    part = block[: life.bytes].view(to_torch(life.root.buffer.type.dtype))
                    self.tensors[life.root] = part.view(flat.roots[life.root])


def _may_follow(before: _Life, after: _Life, ended: Mapping[int, int] | None) -> bool:
    """``ended``: the position before which each communication is waited for; None where streams keep the order."""
    if ended is not None and any(ended.get(at, after.first + 1) > after.first for at in before.under_way):
        return False
    return before.last < after.first and before.lanes == after.lanes and len(after.lanes) == 1
