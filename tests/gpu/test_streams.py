"""Host programs on CUDA streams: the same bits as in order, work that really overlaps, and a host that never waits."""

from __future__ import annotations

import time

import pytest
import torch

import hostir as hir
from hostir.dispatch import ExecutorDispatch, ExprEvalExecutor

SPIN = 20_000_000  # cycles that a kernel sleeps: about 10 ms


def slices(num: int, n: int, streams: int, chain: int = 1) -> hir.Program:
    """y[i] = (x[i] + 1) · 2 on stream s[i % streams], then c = Σ y[i] on main."""
    with hir.Program("slices") as p:
        x = p.input("x", (num, n), torch.float32)
        y = p.empty((num, n), torch.float32, name="y")
        c = p.zeros((n,), torch.float32, name="c")
        with p.loop(num) as i:
            t = p.empty((n,), torch.float32, name="t")
            lane = p.stream("s", i % streams)
            p.add(x[i], 1.0, out=t, on=lane)
            for _ in range(chain):
                p.mul(t, 2.0, out=t, on=lane)
            p.copy(t, out=y[i], on=lane)
        with p.loop(num) as i:
            p.add(c, y[i], out=c)
        p.output(y, c)
    return p


@pytest.mark.parametrize(("num", "streams"), [(4, 2), (4, 4), (9, 3), (5, 1), (3, 8)])
def test_compiled_and_checked_give_the_same_bits(num: int, streams: int) -> None:
    p = slices(num, 4097, streams)
    x = torch.randn(num, 4097, device="cuda")
    checked, compiled = hir.compile(p, mode="checked"), hir.compile(p, mode="compiled")
    expected = (x + 1) * 2
    for _ in range(5):
        for y, c in (checked(x), compiled(x)):
            assert torch.equal(y, expected)
            assert torch.equal(c, _in_order(expected))


def _in_order(y: torch.Tensor) -> torch.Tensor:
    c = torch.zeros_like(y[0])
    for row in y:
        c = c + row
    return c


def test_slow_producer_on_the_callers_stream_is_waited_for() -> None:
    run = hir.compile(slices(4, 1 << 16, 4))
    run(torch.zeros(4, 1 << 16, device="cuda"))
    side = torch.cuda.Stream()
    for repeat in range(100):
        stream = side if repeat % 2 else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            x = torch.zeros(4, 1 << 16, device="cuda")
            torch.cuda._sleep(SPIN // 20)
            x.fill_(float(repeat))
            y, c = run(x)
            total = c.sum()
        assert total.item() == (repeat + 1) * 2 * 4 * (1 << 16), repeat
        assert torch.equal(y, torch.full_like(y, (repeat + 1) * 2.0))


def test_the_callers_stream_is_current_again_also_after_an_error() -> None:
    run = hir.compile(slices(4, 256, 2))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(torch.ones(4, 256, device="cuda"))
        assert torch.cuda.current_stream() == side

    class Broken(ExprEvalExecutor):
        """Takes what ATen takes and fails when it runs."""

        name = "Broken"

        def _run(self, args, outputs):
            raise RuntimeError("broken on purpose")

    with hir.Program("fails") as p:
        x = p.input("x", (2, 2), torch.float32)
        p.output(p.matmul(x, x, on="s"))
    broken = hir.compile(p, dispatch=ExecutorDispatch((Broken,)), mode="checked")
    with torch.cuda.stream(side):
        with pytest.raises(RuntimeError, match="broken on purpose"):
            broken(torch.eye(2, device="cuda"))
        assert torch.cuda.current_stream() == side


def test_a_run_returns_before_the_gpu_is_done() -> None:
    run = hir.compile(slices(4, 1 << 10, 4))
    x = torch.ones(4, 1 << 10, device="cuda")
    run(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(5 * SPIN)
    start = time.perf_counter()
    y, c = run(x)
    host = time.perf_counter() - start
    event = torch.cuda.Event()
    event.record()
    assert not event.query(), f"the host waited for the GPU: the call took {host * 1e3:.1f} ms"
    assert torch.equal(y, torch.full_like(y, 4.0))
    assert torch.equal(c, torch.full_like(c, 16.0))


def test_memory_does_not_grow_over_runs() -> None:
    run = hir.compile(slices(8, 1 << 18, 4))
    x = torch.ones(8, 1 << 18, device="cuda")
    for _ in range(10):
        run(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(200):
        run(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == before


def test_weights_stream_from_pinned_memory_under_compute() -> None:
    with hir.Program("weights") as p:
        x = p.input("x", (64, 64), torch.float32)
        w = p.input("w", (6, 64, 64), torch.float32, memory="host")
        y = p.empty((6, 64, 64), torch.float32, name="y")
        with p.loop(6) as i:
            here = p.empty((64, 64), torch.float32, name="here")
            p.copy(w[i], out=here, on="copy")
            p.matmul(x, here, out=y[i])
        p.output(y)
    x = torch.randint(-4, 5, (64, 64), device="cuda").float()
    w = torch.randint(-4, 5, (6, 64, 64)).float().pin_memory()
    expected = torch.stack([x @ m.cuda() for m in w])
    for mode in ("checked", "compiled"):
        run = hir.compile(p, mode=mode)
        for _ in range(20):
            assert torch.equal(run(x, w), expected)


def test_threads_as_ranks_on_one_gpu() -> None:
    from hostir.overlap.programs import ring_ag_gemm

    rows = torch.randint(-4, 5, (48, 32)).float()
    weights = [torch.randint(-4, 5, (32, 16)).float() for _ in range(4)]

    def rank(world):
        run = hir.compile(ring_ag_gemm(world.mesh(("tp",)), 48, 32, 16))
        x, w = rows.chunk(world.size)[world.rank].cuda(), weights[world.rank].cuda()
        return all(torch.equal(run(x, w).reshape(48, 16).cpu(), rows @ weights[world.rank]) for _ in range(20))

    assert hir.launch.spawn(rank, 4, transport="threads") == [True] * 4
