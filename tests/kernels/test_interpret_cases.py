"""What has gone wrong in other kernel generators: layouts, empty and single elements, NaN, bf16, offsets past 31 bits, odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import hostir as hir
from hostir.dispatch import KernelExecutor
from hostir.dispatch.evaluate import evaluator
from hostir.errors import InputError
from hostir.kernels.tiling import Target
from tests.kernels.support import check, fusion, layouts

TARGETS = {"large": None, "device": Target(False, True, 4), "classes": Target(False, False, 4)}


def test_one_executor_serves_dense_expanded_and_strided_inputs() -> None:
    ex = KernelExecutor().compile(fusion(torch.sin, torch.ones(3, 3)))
    for x in (torch.randn(3, 3), torch.tensor(2.0).expand(3, 3), torch.randn(3, 9)[:, ::3], torch.randn(3, 3).t()):
        torch.testing.assert_close(ex.run([x])[0], x.sin())


@pytest.mark.parametrize("shape", [(7,), (5, 9), (4, 3, 8), (2, 3, 4, 5)])
def test_every_layout_gives_the_same_result(shape: tuple[int, ...]) -> None:
    x, y = torch.randn(shape), torch.randn(shape).bfloat16()
    f = fusion(lambda x, y: (x * y, (x + y).sum(-1), F.softmax(x, 0)), x, y)
    ex = KernelExecutor().compile(f)
    want = evaluator(f).run([x, y])
    for a in layouts(x).values():
        for b in layouts(y).values():
            torch.testing.assert_close(ex.run([a, b]), want, rtol=1e-5, atol=1e-5)


def test_outputs_may_lie_anywhere() -> None:
    x = torch.randn(4, 6)
    ex = KernelExecutor().compile(fusion(lambda x: x * 2, x))
    for out in layouts(torch.zeros(4, 6)).values():
        assert torch.equal(ex.run([x], [out])[0], x * 2)


def test_a_sum_over_an_expanded_dim_keeps_the_others() -> None:
    x = torch.tensor(1.0).expand(2, 3)
    (got,) = KernelExecutor().compile(fusion(lambda x: x.sum(0), x)).run([x])
    assert got.tolist() == [2.0, 2.0, 2.0]


def test_reductions_over_nothing() -> None:
    x = torch.randn(3, 4, 0, 5)
    assert KernelExecutor().compile(fusion(lambda x: x.sum(1), x)).run([x])[0].shape == (3, 0, 5)
    got = KernelExecutor().compile(fusion(lambda x: (x.sum(2), x.mean(2), x.prod(2), (x > 0).any(2), (x > 0).all(2)), x)).run([x])
    torch.testing.assert_close(got, [x.sum(2), x.mean(2), x.prod(2), (x > 0).any(2), (x > 0).all(2)], equal_nan=True)
    f = hir.trace(lambda x: x.amax(1), hir.spec((3, hir.sym("n")), torch.float32))
    ex = KernelExecutor().compile(f, [torch.randn(3, 2)])
    with pytest.raises(InputError, match="over no elements"):
        ex.run([torch.randn(3, 0)])


def test_an_empty_tensor_that_is_broadcast() -> None:
    x = torch.randn(1, 0)
    got = KernelExecutor().compile(fusion(lambda x: (x.expand(0, 0) + 1, (x.expand(0, 0) + 1).sum(0)), x)).run([x])
    assert [t.shape for t in got] == [(0, 0), (0,)]


@pytest.mark.parametrize("target", TARGETS)
def test_an_empty_run_between_two_full_ones(target: str) -> None:
    f = hir.trace(lambda x: x * 2 + x.sum(-1, keepdim=True), hir.spec((hir.sym("m"), 12), torch.float32))
    ex = KernelExecutor(target=TARGETS[target]).compile(f, [torch.ones(2, 12)])
    for m in (128, 0, 128):
        x = torch.randn(m, 12)
        torch.testing.assert_close(ex.run([x])[0], x * 2 + x.sum(-1, keepdim=True))


@pytest.mark.parametrize("shape", [(8, 7, 5, 1), (8, 1, 5, 1)])
def test_several_dims_are_reduced_when_some_have_one_element(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    f = fusion(lambda x: (x.sum((1, 3)), x.mean((1, 3)), x.var((1, 3))), x)
    got = KernelExecutor().compile(f).run([x])
    torch.testing.assert_close(got, [x.sum((1, 3)), x.mean((1, 3)), x.var((1, 3))], equal_nan=True)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("where", [0, 1, 777, 2047, slice(None), slice(0, 0)])
def test_extrema_find_nan_wherever_it_is(where: Any, target: str) -> None:
    x = torch.randn(3, 2048)
    x[1, where] = float("nan")
    f = fusion(lambda x: (x.amax(1), x.amin(1), x.argmax(1), x.argmin(1), torch.maximum(x[:, 0], x[:, 1])), x)
    got = KernelExecutor(target=TARGETS[target]).compile(f).run([x])
    torch.testing.assert_close(got, evaluator(f).run([x]), rtol=0, atol=0, equal_nan=True)


def test_the_first_of_equal_extrema_wins() -> None:
    x = torch.zeros(3, 5000)
    x[:, 1234] = 1
    x[:, 4321] = 1
    for target in TARGETS.values():
        f = fusion(lambda x: (x.argmax(1), x.argmin(1), x.argmax()), x)
        got = KernelExecutor(target=target).compile(f).run([x])
        assert [t.tolist() for t in got] == [[1234] * 3, [0] * 3, 1234]


def test_bf16_is_computed_in_f32_and_rounded_to_the_nearest() -> None:
    x = torch.tensor([2.5, 1.0, 256.0, 3.14]).bfloat16()
    (got,) = KernelExecutor().compile(fusion(lambda x: x + 2, x)).run([x])
    assert torch.equal(got, x + 2)
    many = torch.full((4096,), 1.0).bfloat16()
    (total,) = KernelExecutor().compile(fusion(lambda x: x.sum(), many)).run([many])
    assert total == 4096
    exact = torch.arange(0, 2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    normal = exact[exact.isfinite() & (exact.abs() >= 2.0**-126)]
    values = normal.float() * (1 + 2.0**-9)
    (rounded,) = KernelExecutor().compile(fusion(lambda x: x.bfloat16(), values)).run([values])
    assert torch.equal(rounded.view(torch.int16), values.bfloat16().view(torch.int16))


def test_an_explicit_cast_rounds_and_an_implicit_one_does_not() -> None:
    x = torch.tensor([1.0, 1.001, 3.0])
    (cast,) = KernelExecutor().compile(fusion(lambda x: x.bfloat16().float() - x, x)).run([x])
    assert torch.equal(cast, x.bfloat16().float() - x)
    b = torch.full((3,), 0.0039).bfloat16()
    (kept,) = KernelExecutor().compile(fusion(lambda b: (b + 1) - 1, b)).run([b])
    torch.testing.assert_close(kept.float(), b.float(), rtol=1e-2, atol=0)  # eager rounds b + 1 to 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_variance_keeps_its_digits_far_from_zero(offset: float, target: str) -> None:
    x = (torch.randn(4, 5000, dtype=torch.float64) + offset).float()
    f = fusion(lambda x: (x.var(1), x.var(0), x.var((0, 1)), F.layer_norm(x, (5000,))), x)
    got = KernelExecutor(target=TARGETS[target]).compile(f).run([x])
    wide = x.double()
    want = [wide.var(1), wide.var(0), wide.var(), F.layer_norm(wide, (5000,))]
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=3e-9 * offset, atol=1e-4 + (offset * 2**-24 if w.dim() == 2 else 0))  # means are f32


@pytest.mark.parametrize("target", TARGETS)
def test_long_and_few_rows_in_every_schedule(target: str) -> None:
    for shape, dim in (((2, 9001), 1), ((9001, 2), 0), ((1, 20000), 1), ((300, 70), 0), ((3, 4, 1025), 2), ((5000,), 0)):
        x = torch.randn(shape)
        f = fusion(lambda x, dim=dim: (x.sum(dim), x.amax(dim), x.var(dim), x.softmax(dim), x.log_softmax(dim), x.sum()), x)
        check(f, [x], scale=5)
        ex = KernelExecutor(target=TARGETS[target]).compile(f)
        for g, w in zip(ex.run([x]), evaluator(f).run([x.double().float()]), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 127, 128, 129, 1021, 1024, 1031, 2049])
def test_odd_sizes_and_primes(n: int, target: str) -> None:
    x, y = torch.randn(n, 7), torch.randn(7)
    f = fusion(lambda x, y: (x + y, (x * y).sum(1), (x * y).sum(0), x.t() + 1), x, y)
    got = KernelExecutor(target=TARGETS[target]).compile(f).run([x, y])
    torch.testing.assert_close(got, evaluator(f).run([x, y]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_transposes_and_permutes(target: str) -> None:
    x = torch.randn(40, 3, 50)
    for fn in (
        lambda x: x.permute(2, 1, 0) * 2,
        lambda x: x.permute(2, 0, 1) + x.permute(2, 0, 1),
        lambda x: (x.permute(1, 2, 0) + 1).reshape(-1),
        lambda x: x.transpose(0, 2).reshape(50, 120) * 3,
    ):
        f = fusion(fn, x)
        got = KernelExecutor(target=TARGETS[target]).compile(f).run([x])
        torch.testing.assert_close(got, evaluator(f).run([x]))


def test_integers_divide_round_and_wrap_as_in_torch() -> None:
    a = torch.tensor([7, -7, 7, -7, 0, 127, -128], dtype=torch.int8)
    b = torch.tensor([2, 2, -2, -2, 3, 5, 7], dtype=torch.int8)
    fn: Callable[..., Any] = lambda a, b: (a // b, a % b, torch.fmod(a, b), a + b, a * b, -a, a.abs(), a / b)  # noqa: E731
    f = fusion(fn, a, b)
    torch.testing.assert_close(KernelExecutor().compile(f).run([a, b]), list(fn(a, b)), rtol=1e-6, atol=0)
    c = torch.tensor([3, -2, 0, 1, -1, 5])
    e = torch.tensor([4, 3, 0, -5, -5, 30])
    (got,) = KernelExecutor().compile(fusion(lambda c, e: c**e, c, e)).run([c, e])
    assert torch.equal(got, c**e)


def test_bools_add_up_and_count() -> None:
    x = torch.tensor([[True, False, True], [True, True, False]])
    fn: Callable[..., Any] = lambda x: (x + x, x * x, x.sum(1), x.any(1), x.all(0), x | ~x, x.float() + x, torch.maximum(x, ~x))  # noqa: E731
    torch.testing.assert_close(KernelExecutor().compile(fusion(fn, x)).run([x]), list(fn(x)))


def test_an_in_place_kernel_reads_a_row_before_it_writes_it() -> None:
    for target in TARGETS.values():
        c = torch.randn(5, 700)
        want = c - c.logsumexp(1, keepdim=True)
        f = fusion(lambda c: c.log_softmax(1), c)
        KernelExecutor(target=target).compile(f).run([c], [c])
        torch.testing.assert_close(c, want, rtol=1e-5, atol=1e-5)


def test_rows_two_gigabytes_apart_are_both_reached() -> None:
    far = 2**31 + 16
    buffer = torch.empty(far + 64, dtype=torch.int8)  # pages that nobody touches cost nothing
    x = buffer.as_strided((2, 8), (far, 1), 3)
    x[0], x[1] = 1, 2
    (got,) = KernelExecutor().compile(fusion(lambda x: x + 1, x)).run([x])
    assert got.tolist() == [[2] * 8, [3] * 8]


def test_changing_sizes_in_two_passes_give_exact_results() -> None:
    f = hir.trace(lambda x: x.sum(0), hir.spec((hir.sym("m"), hir.sym("n")), torch.float32))
    ex = KernelExecutor().compile(f, [torch.ones(2, 2)])
    kernels = []
    for _ in range(2):
        for i in range(10):
            x = torch.randint(-4, 5, (256, 256 + 8 * i)).float()
            assert torch.equal(ex.run([x])[0], x.sum(0))
        kernels.append(ex.segment.num_kernels)
    assert kernels[0] == kernels[1]
