"""Unroll and jam: fewer trips, the same bits, and the trips that are left over."""

from __future__ import annotations

import pytest
import torch

import hostir as hir
from hostir.ir.nodes import Call, For, every
from hostir.overlap.programs import host_sum
from hostir.passes.jam import jam


@pytest.mark.parametrize("terms", [0, 1, 4, 5, 7])
@pytest.mark.parametrize("u", [1, 2, 4])
def test_jammed_sums_keep_every_bit(terms: int, u: int) -> None:
    p = host_sum(terms, 33)
    q = jam(p, u)
    assert hir.parse(str(q)) == q
    a, b = torch.randn(2, terms, 33).bfloat16()
    assert torch.equal(hir.compile(q)(a, b), hir.compile(p)(a, b))


def test_one_call_folds_u_terms() -> None:
    q = jam(host_sum(8, 16), 4)
    (loop,) = [s for s in q.body if isinstance(s, For)]
    (call,) = [s for s in every((loop,)) if isinstance(s, Call)]
    assert loop.step == 4
    assert len(call.args) == 9
    assert [op.name for op in call.unit.fusion.ops].count("mul") == 4


def test_a_loop_that_does_not_accumulate_stays() -> None:
    with hir.Program("double") as p:
        x = p.input("x", (4, 8), torch.float32)
        y = p.empty((4, 8), torch.float32)
        with p.loop(4) as i:
            p.mul(x[i], 2.0, out=y[i])
        p.output(y)
    assert jam(p, 2) == p
