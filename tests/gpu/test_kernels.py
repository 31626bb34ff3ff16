"""Generated kernels on a GPU: the fast launch path, random units, in-place accumulation, graphs, other devices' tensors, far offsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import hostir as hir
from hostir.dispatch import ExecutorDispatch, KernelExecutor
from hostir.errors import InputError
from tests.kernels.random_units import check_results, unit
from tests.kernels.support import fusion, reference

GB = 2**30


def over(t: Any, device: torch.device) -> Any:
    """``t`` on the device, lying in memory as it did."""
    if not isinstance(t, torch.Tensor):
        return t
    count = t.untyped_storage().nbytes() // t.element_size()
    whole = t.as_strided((count,), (1,), 0).to(device)
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_kernels_are_launched_through_the_bound_entry_point(device: torch.device) -> None:
    x = torch.randn(1000, device=device)
    ex = KernelExecutor().compile(fusion(lambda x: x + 1, x), [x])
    (loaded,) = ex.segment.loaded
    assert loaded.why_slow is None
    assert loaded.num_spills == 0
    torch.testing.assert_close(ex.run([x])[0], x + 1, rtol=0, atol=0)


def test_the_public_launch_of_triton_gives_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from hostir.kernels import launch

    monkeypatch.setattr(launch.Loaded, "_why_slow", lambda self: "asked for")
    x = torch.randn(1000, device=device)
    ex = KernelExecutor().compile(fusion(lambda x: F.softmax(x * 2, 0), x), [x])
    torch.testing.assert_close(ex.run([x])[0], F.softmax(x * 2, 0))
    out = torch.empty_like(x)
    ex.bind([x], [out])()
    torch.testing.assert_close(out, F.softmax(x * 2, 0))


@pytest.mark.timeout(600)
def test_random_units_match_the_reference(device: torch.device) -> None:
    tried = 0
    for seed in range(90):
        f, args = unit(seed)
        if not f.ops or not KernelExecutor.supports(f):
            continue
        want = [w.clone() for w in reference(f, args)]
        there = [over(a, device) for a in args]
        got = KernelExecutor().compile(f, there)._run(there, None)
        check_results(f, [g.cpu() for g in got], want)
        tried += 1
    assert tried > 60


def test_rows_in_every_schedule_match_torch(device: torch.device) -> None:
    for shape, dim in (((64, 1000), 1), ((64, 1000), 0), ((3, 70001), 1), ((70001, 3), 0), ((1 << 22,), 0), ((8, 1 << 18), 0), ((5, 7, 513), 2)):
        x = torch.randn(shape, device=device)
        fn = lambda x, dim=dim: (x.sum(dim), x.amax(dim), x.var(dim), x.softmax(dim), x.log_softmax(dim), x.argmax(dim))  # noqa: E731
        got = KernelExecutor().compile(fusion(fn, x)).run([x])
        for g, w in zip(got, fn(x.double()), strict=True):
            torch.testing.assert_close(g.double(), w.double(), rtol=1e-4, atol=1e-4)


def test_an_accumulator_is_right_at_the_first_run_and_at_the_second(device: torch.device) -> None:
    a, b = torch.randn(2, 8, 100_003, device=device).bfloat16()
    c = torch.full((100_003,), 7.0, device=device)
    want = c.double()
    ex = KernelExecutor().compile(fusion(lambda c, a, b: c + a.float() * b.float(), c, a[0], b[0]))
    for _ in range(2):
        for h in range(8):
            ex.run([c, a[h], b[h]], [c])
            want += a[h].double() * b[h].double()
    torch.testing.assert_close(c.double(), want, rtol=1e-5, atol=1e-5)


def test_a_bound_segment_is_captured_in_a_graph(device: torch.device) -> None:
    x = torch.randn(4, 5000, device=device)
    out, total = torch.empty_like(x), torch.empty((), device=device)
    f = fusion(lambda x: (F.layer_norm(x, (5000,)), x.sum()), x)
    go = KernelExecutor().compile(f, [x]).bind([x], [out, total])
    go()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        go()
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(out, F.layer_norm(x, (5000,)), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(total, x.sum(), rtol=1e-3, atol=1e-2)


def test_launches_go_to_the_current_stream(device: torch.device) -> None:
    x = torch.ones(1 << 24, device=device)
    side = torch.cuda.Stream()
    ex = KernelExecutor().compile(fusion(lambda x: x * 2, x), [x])
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(3)
        (y,) = ex.run([x])
    side.synchronize()
    assert y.unique().tolist() == [6.0]


@pytest.mark.gpus(2)
def test_a_segment_runs_where_its_tensors_are() -> None:
    x = torch.randn(1000, device="cuda:1")
    with torch.cuda.device(0):
        ex = KernelExecutor().compile(fusion(lambda x: x + x.sum(), x))
        (y,) = ex.run([x])
        assert y.device == x.device
        assert torch.cuda.current_device() == 0
    torch.testing.assert_close(y, x + x.sum(), rtol=1e-4, atol=1e-4)


def test_a_tensor_on_the_cpu_is_named_and_a_number_in_one_is_taken(device: torch.device) -> None:
    x, scale = torch.ones(8, device=device), torch.tensor(3.0)
    ex = KernelExecutor().compile(fusion(lambda x, y, s: x + y * s, x, x, scale))
    assert ex.run([x, x, scale])[0].tolist() == [4.0] * 8
    with pytest.raises(InputError, match=r"argument 1 \(%y\)"):
        ex.run([x, torch.ones(8), scale])
    with pytest.raises(InputError, match="output 0"):
        ex.run([x, x, scale], [torch.empty(8)])


def test_more_than_two_to_the_31_elements(device: torch.device) -> None:
    if torch.cuda.mem_get_info(device)[0] < 12 * GB:
        pytest.skip("needs 12 GB of free GPU memory")
    n = 2**31 + 1024
    x = torch.ones(n, dtype=torch.int8, device=device)
    x[-1] = 5
    (y,) = KernelExecutor().compile(fusion(lambda x: x + 1, x)).run([x])
    assert y[:1024].unique().tolist() == [2]
    assert y[-1024:].unique().tolist() == [2, 6]
    assert y[2**31].item() == 2
    del y
    rows = x.as_strided((2, 8), (2**31 + 16, 1))
    (z,) = KernelExecutor().compile(fusion(lambda x: x + 1, rows)).run([rows])
    assert z.tolist() == [[2] * 8] * 2
    (total,) = KernelExecutor().compile(fusion(lambda x: x.sum(), x)).run([x])
    assert total.item() == n + 4


def test_a_leading_dim_past_the_limit_of_other_grid_axes(device: torch.device) -> None:
    x, y = torch.randn(70_000, 3, 5, device=device), torch.randn(3, 1, device=device)
    (z,) = KernelExecutor().compile(fusion(lambda x, y: x + y, x, y)).run([x, y])
    assert torch.equal(z, x + y)


def test_nan_is_where_torch_has_it(device: torch.device) -> None:
    x = torch.randn(64, 4096, device=device)
    for row, where in enumerate((0, 1, 2047, 4095)):
        x[row, where] = float("nan")
    x[5] = float("nan")
    fn = lambda x: (x.amax(1), x.amin(1), x.argmax(1), torch.maximum(x, -x), x.softmax(1))  # noqa: E731
    for g, w in zip(KernelExecutor().compile(fusion(fn, x)).run([x]), fn(x), strict=True):
        assert torch.equal(g.isnan(), w.isnan())
        torch.testing.assert_close(g, w, equal_nan=True)


def test_two_hundred_sizes_compile_few_kernels(device: torch.device) -> None:
    f = hir.trace(lambda x: F.softmax(x * 2, -1), hir.spec((hir.sym("m"), 512), torch.float32))
    ex = KernelExecutor().compile(f, [torch.randn(3, 512, device=device)])
    for m in (*range(190), 1000, 5000, 70_000):
        x = torch.randn(m, 512, device=device)
        torch.testing.assert_close(ex.run([x])[0], F.softmax(x * 2, -1), rtol=1e-5, atol=1e-5)
    assert ex.segment.num_kernels <= 6


def test_dispatch_takes_kernels_on_a_gpu(device: torch.device) -> None:
    f = hir.trace(lambda x: x + 1, hir.spec((8,), torch.float32))
    assert isinstance(ExecutorDispatch.make(f, device=device), KernelExecutor)
    x = torch.zeros(8, device=device)
    assert ExecutorDispatch.make(f, device=device).compile(f, [x]).run([x])[0].device == x.device


def test_exact_functions_agree_with_torch_to_the_last_bits(device: torch.device) -> None:
    x = torch.linspace(-80, 80, 100_001, device=device)
    fn = lambda x: (x.exp(), x.sigmoid(), x.tanh(), x.abs().sqrt(), x / 3, x.erf(), F.gelu(x), F.silu(x), x.abs().log(), x.sin())  # noqa: E731
    for g, w in zip(KernelExecutor().compile(fusion(fn, x)).run([x]), fn(x.double()), strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-6, atol=1e-6)
