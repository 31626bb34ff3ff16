"""Mode graph on a GPU: the same bits as compiled, run after run, with new data, other tensors, scalars and shapes."""

from __future__ import annotations

import pytest
import torch

import hostir as hir
from hostir.overlap.programs import host_sum


def test_replays_follow_the_data() -> None:
    p = host_sum(5, 4097)
    graph, compiled = hir.compile(p, mode="graph"), hir.compile(p)
    a, b = torch.randn(2, 5, 4097, device="cuda").bfloat16()
    outs = []
    for _ in range(5):
        a.normal_()
        b.normal_()
        outs.append(graph(a, b))
        assert torch.equal(outs[-1], compiled(a, b))
    assert len({o.data_ptr() for o in outs}) == 5  # fresh outputs, also from a graph


def test_other_tensors_are_another_set() -> None:
    graph = hir.compile(host_sum(3, 1000), mode="graph")
    sets = [torch.randn(2, 3, 1000, device="cuda").bfloat16() for _ in range(6)]
    for _ in range(3):
        for s in sets:
            assert torch.allclose(graph(s[0], s[1]), (s[0].float() * s[1].float()).sum(0), atol=1e-4)


def test_outputs_given_are_written_in_place() -> None:
    graph = hir.compile(host_sum(3, 1000), mode="graph")
    a, b = torch.randn(2, 3, 1000, device="cuda").bfloat16()
    out = torch.empty(1000, device="cuda")
    for _ in range(4):
        out.fill_(float("nan"))
        assert graph(a, b, out=out) is out
        assert torch.allclose(out, (a.float() * b.float()).sum(0), atol=1e-4)


def test_streams_and_scalars_in_a_graph() -> None:
    with hir.Program("lanes") as p:
        x = p.input("x", (6, 512), torch.float32)
        k = p.scalar("k", float)
        y = p.empty((6, 512), torch.float32, name="y")
        with p.loop(6) as i:
            p.call(lambda v, s: v * s, x[i], k, out=y[i], on=p.stream("s", i % 3))
        p.output(y)
    graph = hir.compile(p, mode="graph")
    x = torch.randn(6, 512, device="cuda")
    for k in (2.0, 3.0, 2.0, 3.0, 2.0):
        for _ in range(3):
            assert torch.equal(graph(x, k), x * k)


def test_in_place_inputs_are_updated_once_a_run() -> None:
    with hir.Program("count") as p:
        c = p.input("c", (64,), torch.float32, inout=True)
        p.add(c, 1.0, out=c)
        p.output(c)
    graph = hir.compile(p, mode="graph")
    c = torch.zeros(64, device="cuda")
    for run in range(1, 8):
        assert graph(c) is c
        assert torch.equal(c, torch.full_like(c, float(run)))


def test_threads_are_refused_with_the_reason() -> None:
    def rank(world):
        with hir.Program("p", mesh=world.mesh(("tp",))) as p:
            x = p.input("x", (4,), torch.float32)
            y = p.empty((8,), torch.float32)
            p.allgather(x, out=y)
            p.output(y)
        with pytest.raises(hir.InputError, match="threads"):
            hir.compile(p, mode="graph")(torch.ones(4, device="cuda"))
        return True

    assert hir.launch.spawn(rank, 2, transport="threads") == [True, True]
