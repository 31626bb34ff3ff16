"""A program of i64 buffers on rank threads whose timing is stirred: ranks sleep a little before they communicate.

Whatever a rank does before the others have come, and whatever the order in which messages arrive, results must be the same bits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import hostir as hir
from hostir.ir.nodes import Buffer, Program
from hostir.mesh import Mesh
from hostir.runtime.comms.protocol import CommCall, Comms, Work


class Stirred:
    """Comms that sleep for up to ``longest`` seconds before some calls."""

    def __init__(self, inner: Comms, seed: int, longest: float) -> None:
        self._inner = inner
        self._rng = random.Random(f"{seed} {inner.rank}")
        self._longest = longest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _sleep(self) -> None:
        if self._rng.random() < 0.4:
            time.sleep(self._rng.random() * self._longest)

    def issue(self, call: CommCall) -> Work:
        self._sleep()
        return self._inner.issue(call)

    def issue_group(self, calls: Sequence[CommCall]) -> Work:
        self._sleep()
        return self._inner.issue_group(calls)


def inputs(p: Program, rank: int) -> list[torch.Tensor]:
    """Element i of the k-th input of rank r is 1000 (r + 1) + 100 k + i."""
    found = []
    for k, b in enumerate(b for b in p.params if isinstance(b, Buffer)):
        sizes = [int(d) for d in b.type.dims]
        found.append(torch.arange(torch.Size(sizes).numel(), dtype=torch.int64).reshape(sizes) + 1000 * (rank + 1) + 100 * k)
    return found


def run_on_threads(
    p: Program, mesh: Mesh, ways: Sequence[Mapping[str, Any]], *, seed: int = 0, longest: float = 0.0
) -> list[list[list[torch.Tensor]]]:
    """For each way to compile ``p`` (keywords of ``hir.compile``) and each rank: results, then inout inputs as they are left.
    ``hir.Program.of`` is not needed: any program compiles."""

    def rank_main(world: Any) -> list[list[torch.Tensor]]:
        if longest:
            world.comms = Stirred(world.comms, seed, longest)
        bound = world.mesh(mesh.names, mesh.sizes)
        found = []
        for way in ways:
            args = inputs(p, world.rank)
            got = hir.compile(p, bound, **way)(*args)
            results = [] if got is None else [got] if isinstance(got, torch.Tensor) else list(got)
            changed = [a for a, b in zip(args, p.params, strict=True) if b in p.inout]
            found.append([t.clone() for t in (*results, *changed)])
        return found

    by_rank = hir.launch.spawn(rank_main, len(mesh.layout), "threads", device="cpu", timeout=20.0)
    return [[by_rank[r][w] for r in range(len(mesh.layout))] for w in range(len(ways))]
