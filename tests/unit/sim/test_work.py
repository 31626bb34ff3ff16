"""What a call gives the device to do, counted by hand: kernels, bytes, multiplications."""

from __future__ import annotations

import pytest

from hostir.sim.work import Work, works
from tests.unit.sim.machines import moves, unit


def kernels(body: str, params: str, result: str, out: str) -> list[Work]:
    args = ", ".join(f"%{p.split(': ')[0]}" for p in params.split("; "))
    (m,) = moves(unit(body, params, result, args, out))
    return works(m)


def test_a_chain_of_pointwise_operations_is_one_kernel_that_reads_and_writes_once() -> None:
    (w,) = kernels("  %t = mul(%a, %b)\n  %s = exp(%t)\n  %o = add(%s, %a)", "a: f32[10, 4]; b: f32[10, 4]", "%o", "f32[10, 4]")
    assert (w.rule, w.bytes, w.elements) == ("pointwise", 3 * 160, 40)


def test_a_product_counts_its_multiplications_and_its_three_matrices() -> None:
    (w,) = kernels("  %o = mm(%a, %b)", "a: f32[2, 8]; b: f32[8, 3]", "%o", "f32[2, 3]")
    assert (w.rule, w.dtype, w.m, w.n, w.k, w.batch) == ("matmul", "f32", 2, 3, 8, 1)
    assert w.flops == 2 * 2 * 3 * 8
    assert w.bytes == 4 * (2 * 8 + 8 * 3 + 2 * 3)


@pytest.mark.parametrize(
    ("op", "params", "out", "sizes"),
    [
        ("bmm(%a, %b)", "a: bf16[5, 2, 8]; b: bf16[5, 8, 3]", "bf16[5, 2, 3]", (2, 3, 8, 5)),
        ("matmul(%a, %b)", "a: bf16[5, 2, 8]; b: bf16[8, 3]", "bf16[5, 2, 3]", (10, 3, 8, 1)),
        ("matmul(%a, %b)", "a: bf16[2, 8]; b: bf16[5, 8, 3]", "bf16[5, 2, 3]", (2, 3, 8, 5)),
        ("matmul(%a, %b)", "a: bf16[2, 8]; b: bf16[8]", "bf16[2]", (2, 1, 8, 1)),
        ("linear(%a, %b)", "a: bf16[5, 2, 8]; b: bf16[3, 8]", "bf16[5, 2, 3]", (10, 3, 8, 1)),
    ],
)
def test_every_form_of_a_product_has_its_sizes(op: str, params: str, out: str, sizes: tuple[int, ...]) -> None:
    (w,) = kernels(f"  %o = {op}", params, "%o", out)
    assert (w.m, w.n, w.k, w.batch) == sizes
    assert w.dtype == "bf16"


def test_pointwise_operations_on_a_product_ride_in_its_kernel() -> None:
    body = "  %t = mm(%a, %b)\n  %r = relu(%t)\n  %o = add(%c, %r)"
    (w,) = kernels(body, "a: f32[2, 8]; b: f32[8, 3]; c: f32[2, 3]", "%o", "f32[2, 3]")
    assert w.rule == "matmul"
    assert w.bytes == 4 * (2 * 8 + 8 * 3 + 2 * 3 + 2 * 3)


def test_what_comes_before_a_product_or_reduces_it_is_a_kernel_of_its_own() -> None:
    body = "  %s = exp(%a)\n  %t = mm(%s, %b)\n  %o = sum(%t, dims = [1])"
    before, product, after = kernels(body, "a: f32[2, 8]; b: f32[8, 3]", "%o", "f32[2]")
    assert (before.rule, before.bytes) == ("pointwise", 4 * 2 * 16)
    assert (product.rule, product.bytes) == ("matmul", 4 * (16 + 24 + 6))
    assert (after.rule, after.bytes) == ("reduce", 4 * (6 + 2))


def test_a_product_that_is_also_returned_is_written() -> None:
    text = """unit @u(%a: f32[2, 8], %b: f32[8, 3]) {
  %t = mm(%a, %b)
  %o = relu(%t)
  return %t, %o
}
program @p(%a: f32[2, 8], %b: f32[8, 3]) {
  %x = alloc f32[2, 3]
  %y = alloc f32[2, 3]
  %x, %y <- @u(%a, %b)
  return %x, %y
}
"""
    (w,) = works(moves(text)[0])
    assert w.bytes == 4 * (16 + 24 + 6 + 6)


def test_views_move_nothing_and_read_only_what_they_show() -> None:
    body = "  %v = slice(%a, dim = 0, start = 2, stop = 4)\n  %t = transpose(%v, dim0 = 0, dim1 = 1)\n  %o = exp(%t)"
    (w,) = kernels(body, "a: f32[10, 4]", "%o", "f32[4, 2]")
    assert w.bytes == 4 * (8 + 8)


def test_a_result_that_is_a_view_of_an_argument_is_copied() -> None:
    (w,) = kernels("  %o = transpose(%a, dim0 = 0, dim1 = 1)", "a: f32[10, 4]", "%o", "f32[4, 10]")
    assert (w.rule, w.bytes) == ("copy", 2 * 160)


def test_attention_counts_both_products_and_half_of_them_when_causal() -> None:
    params = "q: bf16[2, 4, 16, 8]; k: bf16[2, 4, 32, 8]; v: bf16[2, 4, 32, 6]"
    (w,) = kernels("  %o = sdpa(%q, %k, %v)", params, "%o", "bf16[2, 4, 16, 6]")
    assert w.rule == "attention"
    assert w.flops == 2 * (2 * 4) * 16 * 32 * (8 + 6)
    (half,) = kernels("  %o = sdpa(%q, %k, %v, causal = true)", params, "%o", "bf16[2, 4, 16, 6]")
    assert half.flops == w.flops / 2


def test_sizes_are_those_of_the_call_also_of_a_short_last_chunk() -> None:
    text = """unit @u(%a: f32[n, 4]) {
  %o = exp(%a)
  return %o
}
program @p(%x: f32[10, 4]) {
  %y = alloc f32[10, 4]
  for %i in 0 .. 3 {
    %a = view %x[min(%i * 4, 10) : min(%i * 4 + 4, 10), :]
    %b = view %y[min(%i * 4, 10) : min(%i * 4 + 4, 10), :]
    %b <- @u(%a)
  }
  return %y
}
"""
    assert [works(m)[0].bytes for m in moves(text)] == [2 * 64, 2 * 64, 2 * 32]


def test_an_expanded_argument_is_read_once() -> None:
    text = """unit @u(%a: f32[10, 4]) {
  %o = exp(%a)
  return %o
}
program @p(%x: f32[4]) {
  %e = view %x.expand(10, 4)
  %y = alloc f32[10, 4]
  %y <- @u(%e)
  return %y
}
"""
    assert works(moves(text)[0])[0].bytes == 16 + 160


def test_an_operation_outside_the_table_fills_the_buffers_that_it_is_given() -> None:
    (w,) = kernels("  %o = aten.special_i0.default(%a)", "a: f32[10]", "%o", "f32[10]")
    assert (w.rule, w.bytes) == ("library", 80)
