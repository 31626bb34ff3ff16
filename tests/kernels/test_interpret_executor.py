"""The kernel executor as its callers use it: outputs given and fresh, in place, bound, with host numbers and symbolic sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import hostir as hir
from hostir.dispatch import ExecutorDispatch, ExprEvalExecutor, FusionExecutorCache, KernelExecutor
from hostir.errors import InputError, NotCompiledError
from hostir.graph.fusion import Fusion
from tests.kernels.support import check, fusion


def fma(c: Any, a: Any, b: Any) -> Any:
    return c + a.float() * b.float()


def test_an_accumulator_is_updated_in_place_by_one_kernel() -> None:
    a, b = torch.randn(2, 1000).bfloat16()
    c = torch.full((1000,), 7.0)
    f = fusion(fma, c, a, b)
    ex = KernelExecutor().compile(f, [c, a, b])
    for _ in range(2):
        before = c.clone()
        (result,) = ex.run([c, a, b], [c])
        assert result is c
        torch.testing.assert_close(c, before + a.float() * b.float(), rtol=0, atol=1e-6)
    assert ex.num_kernels == 1


def test_an_aliased_output_is_written_and_hidden() -> None:
    f = Fusion()
    x = f.input((3, 4), torch.float32)
    f.output(hir.ops.add(x, x), alias=x)
    ex = ExecutorDispatch.make(f, device="cpu")
    assert isinstance(ex, KernelExecutor)
    t = torch.arange(12.0).reshape(3, 4)
    assert ex.compile(f).run([t]) == []
    assert torch.equal(t, 2 * torch.arange(12.0).reshape(3, 4))


def test_all_inputs_are_read_before_an_output_is_written() -> None:
    x, y = torch.arange(6.0).reshape(2, 3), 10 + torch.arange(6.0).reshape(2, 3)
    swap = fusion(lambda x, y: (y * 1, x * 1), x, y)
    KernelExecutor().compile(swap).run([x, y], [x, y])
    assert x[0, 0] == 10
    assert y[0, 0] == 0
    s = torch.arange(9.0).reshape(3, 3)
    KernelExecutor().compile(fusion(lambda s: s.t() * 1, s)).run([s], [s])
    assert torch.equal(s, torch.arange(9.0).reshape(3, 3).t())
    total = s.sum(0)
    KernelExecutor().compile(fusion(lambda s: s.sum(0), s)).run([s], [s[0]])
    assert torch.equal(s[0], total)
    line = torch.arange(8.0)
    KernelExecutor().compile(fusion(lambda x: x + 1, line[1:])).run([line[:-1]], [line[1:]])
    assert torch.equal(line, torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7]))
    c = torch.arange(12.0).reshape(3, 4)
    want = F.softmax(c, 1), c.sum(0)
    got = KernelExecutor().compile(fusion(lambda c: (F.softmax(c, 1), c.sum(0)), c)).run([c], [c, torch.empty(4)])
    torch.testing.assert_close(got, list(want))


def test_outputs_of_another_type_or_that_share_memory_are_refused_before_anything_is_written() -> None:
    x = torch.ones(4)
    ex = KernelExecutor().compile(fusion(lambda x: (x + 1, x + 2), x))
    one = torch.zeros(4)
    for outs in ([one, torch.zeros(5)], [one, torch.zeros(4, dtype=torch.float64)], [one, one], [one, torch.zeros(1).expand(4)], [one]):
        with pytest.raises(InputError):
            ex.run([x], outs)
    assert one.sum() == 0
    buffer = torch.zeros(6)
    with pytest.raises(InputError, match="share memory"):
        ex.run([x], [buffer[:4], buffer[2:]])
    ex.run([x], [buffer[:4], one])  # the same sizes, strides and alignment, apart
    assert one.sum() == 12


def test_wrong_arguments_are_refused() -> None:
    ex = KernelExecutor().compile(fusion(lambda x: x + 1, torch.ones(4)))
    for bad in ([torch.ones(5)], [torch.ones(4).double()], [3.0], []):
        with pytest.raises(InputError):
            ex.run(bad)
    with pytest.raises(NotCompiledError):
        KernelExecutor().run([torch.ones(4)])


def test_host_numbers_are_arguments_of_one_kernel() -> None:
    x = torch.arange(8.0)
    f = fusion(lambda x, k, s, b: torch.where(x > k, x * s, x) + k * 2, x, 3, 0.1, True)
    ex = KernelExecutor().compile(f, [x, 3, 0.1, True])
    for k, s in ((3, 0.1), (-2, 1e30), (2**40, 0.5), (7, float("inf"))):
        (got,) = ex.run([x, k, s, False])
        torch.testing.assert_close(got, torch.where(x > k, x * s, x) + k * 2)
    assert ex.segment.num_kernels == 1
    d = x.double()
    (got,) = KernelExecutor().compile(fusion(lambda x, s: x * s, d, 0.1)).run([d, 0.1])
    assert torch.equal(got, d * 0.1)  # f64 numbers keep all their digits


def test_a_bound_segment_runs_on_its_tensors_with_the_numbers_it_is_given() -> None:
    x, out = torch.arange(8.0), torch.empty(8)
    f = fusion(lambda x, k: x * k, x, 2)
    go = KernelExecutor().compile(f).bind([x, 2], [out])
    go()
    assert torch.equal(out, x * 2)
    go(5)
    assert torch.equal(out, x * 5)
    x += 1
    go()
    assert torch.equal(out, x * 2)
    c = torch.zeros(8)
    add = KernelExecutor().compile(fusion(lambda c, x: c + x, c, x)).bind([c, x], [c])
    for _ in range(3):
        add()
    assert torch.equal(c, 3 * x)
    KernelExecutor().compile(fusion(lambda s: s.t() + 0, torch.ones(3, 3))).bind([s := torch.arange(9.0).reshape(3, 3)], [s])()
    assert s[0, 1] == 3


def test_symbolic_sizes_need_example_arguments_and_then_serve_all_sizes() -> None:
    f = hir.trace(lambda x: F.softmax(x * 2, -1), hir.spec((hir.sym("m"), 40), torch.float32))
    with pytest.raises(InputError, match="symbolic sizes"):
        KernelExecutor().compile(f)
    ex = KernelExecutor().compile(f, [torch.randn(3, 40)])
    for m in (128, 0, 128, 1, 7):
        x = torch.randn(m, 40)
        torch.testing.assert_close(ex.run([x])[0], F.softmax(x * 2, -1))


def test_a_cache_of_executors_serves_changing_shapes_by_kernels() -> None:
    f = hir.trace(lambda x: x.sum(0), hir.spec((hir.sym("m"), hir.sym("n")), torch.float32))
    cache = FusionExecutorCache(f)
    for _ in range(2):
        for i in range(10):
            x = torch.randn(64, 64 + 8 * i)
            torch.testing.assert_close(cache.run(x)[0], x.sum(0), rtol=1e-5, atol=1e-5)
    assert cache.stats.runtimes == 1
    assert cache.stats.hits == 10
    assert isinstance(cache.executor((torch.randn(4, 4),)), KernelExecutor)


def test_a_segment_that_computes_nothing_launches_nothing() -> None:
    f = Fusion()
    x = f.input((4,), torch.float32)
    f.output(x)
    ex = KernelExecutor().compile(f)
    t = torch.ones(4)
    assert ex.run([t])[0] is t
    out = torch.zeros(4)
    assert ex.run([t], [out])[0] is out
    ex.bind([t * 3], [out])()
    assert out.sum() == 12
    assert ex.num_kernels == 0


def test_results_that_are_views_of_inputs_are_views() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    f = Fusion()
    a = f.input((3, 4), torch.float32)
    t = hir.ops.transpose(a, dim0=0, dim1=1)
    f.output(t)
    f.output(hir.ops.add(a, 1))
    f.output(a)
    view, plus, same = KernelExecutor().compile(f).run([x])
    assert view.data_ptr() == x.data_ptr()
    assert view.stride() == (1, 4)
    assert same is x
    assert torch.equal(plus, x + 1)


def test_library_calls_are_evaluated_by_aten_and_pointwise_work_is_not() -> None:
    a = torch.ones(4, 4)
    assert isinstance(ExecutorDispatch.make(fusion(lambda a: a @ a, a), device="cpu"), ExprEvalExecutor)
    mixed = ExecutorDispatch.make(fusion(lambda a: (a @ a) + 1, a), device="cpu")
    assert "library" in mixed.refusals["KernelExecutor"]
    assert isinstance(ExecutorDispatch.make(fusion(lambda a: a + 1, a), device="cpu"), KernelExecutor)


def test_a_program_runs_its_units_as_kernels() -> None:
    unit = hir.unit(fma)
    with hir.Program("host_sum") as p:
        a = p.input("a", (4, 300), torch.bfloat16)
        b = p.input("b", (4, 300), torch.bfloat16)
        c = p.zeros((300,), torch.float32, name="c")
        with p.loop(4) as h:
            p.call(unit, c, a[h], b[h], out=c)
        p.output(c)
    x, y = torch.randn(2, 4, 300).bfloat16()
    for mode in ("checked", "compiled"):
        run = hir.compile(p, mode=mode)
        torch.testing.assert_close(run(x, y), (x.float() * y.float()).sum(0))


def test_cases_that_check_against_the_reference() -> None:
    x = torch.randn(6, 50)
    check(fusion(lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(), x), [x])
    check(fusion(lambda x, w: F.rms_norm(x, (50,), w) + x.amax(0), x, torch.randn(50)), [x, torch.randn(50)])
    check(fusion(lambda x: torch.cat([x[:, 25:], -x[:, :25]], 1) * x.cos() + x * x.sin(), x), [x])
