"""Programs with symbolic sizes on a GPU: kernels are made for the sizes that come."""

from __future__ import annotations

import pytest
import torch

import hostir as hir


@pytest.mark.parametrize("mode", ["checked", "compiled", "graph"])
def test_one_program_runs_at_several_sizes(mode: str) -> None:
    with hir.Program("rows") as p:
        x = p.input("x", (hir.sym("m"), 64), torch.float32)
        y = p.empty((hir.sym("m"), 64), torch.float32, name="y")
        with p.loop(3) as i:
            p.call(lambda t: torch.relu(t) * 2, x.chunk(i, 3), out=y.chunk(i, 3))
        p.output(y)
    run = hir.compile(p, mode=mode)
    for m in (1, 7, 96, 4097, 7):
        x = torch.randn(m, 64, device="cuda")
        for _ in range(3):
            assert torch.equal(run(x), torch.relu(x) * 2)
