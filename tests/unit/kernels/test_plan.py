"""Plans, without Triton: which kernels a unit becomes, how few texts serve many sizes, and what is refused before any launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import hostir as hir
from hostir.errors import InputError, UnsupportedError
from hostir.graph.fusion import Fusion
from hostir.kernels.layout import Layout, dense
from hostir.kernels.lower import why_not
from hostir.kernels.plan import Plan, Shape, make
from hostir.kernels.tiling import Target, check_grid

GPU = Target(interpret=False)
SYMBOLIC = Target(interpret=False, tight=False)


def traced(fn: Callable[..., Any], *specs: Any, dtype: torch.dtype = torch.float32) -> Fusion:
    return hir.trace(fn, *(hir.spec(s, dtype) for s in specs))


def layout(sizes: Sequence[int]) -> Layout:
    return Layout(tuple(sizes), tuple(0 if n == 1 else s for n, s in zip(sizes, dense(sizes), strict=True)))


def plan(f: Fusion, *sizes: Sequence[int], target: Target = GPU, **more: Any) -> Plan:
    return make(f, Shape(tuple(layout(s) for s in sizes), more.pop("outs", (None,) * len(f.results)), **more), target)


def schedulers(fn: Callable[..., Any], *sizes: tuple[int, ...]) -> list[str]:
    return plan(traced(fn, *sizes), *sizes).schedulers


def test_the_mixed_work_of_a_unit_shares_kernels() -> None:
    big = (512, 4096)
    assert schedulers(lambda c, a, b: c + a * b, big, big, big) == ["pointwise"]
    assert schedulers(lambda x: F.softmax(x, -1), big) == ["normalization"]
    assert schedulers(lambda x, w: F.layer_norm(x + 1, (4096,), w) * 2, big, (4096,)) == ["normalization"]
    assert schedulers(lambda x: (x.sum(1), x.amax(1), (x * x).mean(1)), big) == ["reduction"]
    assert schedulers(lambda x: (x * 2, (x * 2).sum(1)), big) == ["normalization"]
    assert schedulers(lambda x: (x.relu(), x.sigmoid(), x > 0), big) == ["pointwise"]
    assert schedulers(lambda x: (x - x.mean(-1, keepdim=True)).pow(2).sum(-1), big) == ["reduction"]


def test_reductions_over_other_dims_get_kernels_of_their_own() -> None:
    assert schedulers(lambda x: x.sum(0).amax(0), (512, 4096))[-1] == "reduction"
    assert schedulers(lambda x: x / x.sum(), (512, 4096)) == ["reduction", "reduction", "pointwise"]
    assert schedulers(lambda x: x.sum(0) + x.sum(1), (512, 512)).count("reduction") >= 2


def test_few_long_rows_are_split_and_merged() -> None:
    f = traced(lambda x: x.sum(), (1 << 24,))
    first, second = plan(f, (1 << 24,)).sources
    assert first.programs > 100
    assert second.programs == 1
    assert len(plan(traced(lambda x: x.sum(1), (4096, 4096)), (4096, 4096)).sources) == 1
    several = traced(lambda x: (x.sum(), x.amax(), x.mean()), (1 << 24,))
    assert len(plan(several, (1 << 24,)).sources) == 2  # all read the input together


@pytest.mark.parametrize(
    ("fn", "sizes"),
    [
        (lambda x, b: F.gelu(x + b), lambda m: ((m, 512), (512,))),
        (lambda x: F.softmax(x, -1), lambda m: ((m, 512),)),
        (lambda x: x.sum(0), lambda m: ((m, 512),)),
        (lambda x: x.sum(1), lambda m: ((m, 512),)),
        (lambda x: x.sum(1), lambda m: ((512, m),)),
        (lambda x: F.softmax(x, -1), lambda m: ((64, m),)),
        (lambda x: x * 2, lambda m: ((m,),)),
    ],
    ids=["bias_gelu", "softmax", "sum_rows", "sum_cols", "sum_cols_of_n", "softmax_of_n", "scale"],
)
@pytest.mark.parametrize("step", [1, 100])
def test_two_hundred_sizes_share_few_kernels(fn: Callable[..., Any], sizes: Callable[[Any], Any], step: int) -> None:
    m = hir.sym("m")
    f = traced(fn, *sizes(m))
    made: set[object] = set()
    for i in range(200):
        p = plan(f, *sizes(2 + i * step), target=SYMBOLIC)
        made |= {(s.text, s.num_warps, tuple(getattr(a, "by_16", True) for a in s.arguments)) for s in p.sources}
    assert len(made) <= 6


def test_a_plan_does_not_depend_on_what_was_planned_before() -> None:
    f = traced(lambda x: F.softmax(x, -1), (hir.sym("m"), hir.sym("n")))
    alone = plan(f, (64, 1000), target=SYMBOLIC).sources
    for before in ((2, 3), (4096, 70000)):
        plan(f, before, target=SYMBOLIC)
        assert plan(f, (64, 1000), target=SYMBOLIC).sources == alone


def test_strides_are_part_of_a_plan() -> None:
    f = traced(torch.sin, (3, 3))
    texts = [make(f, Shape((x,), (None,)), GPU).sources[0].text for x in (layout((3, 3)), Layout((3, 3), (0, 0)), Layout((3, 3), (9, 3)))]
    assert len(set(texts)) == 3


def test_in_place_is_direct_where_order_allows_and_copied_with_a_reason_where_not() -> None:
    square = layout((8, 8))
    f = traced(lambda c, a: c + a, (8, 8), (8, 8))
    assert not plan(f, (8, 8), (8, 8), outs=(square,), same=frozenset({(0, 0)})).copies
    for fn, why in (
        (lambda c: c.t() + 1, "another order"),
        (lambda c: c.flip(0) + 1, "another order"),
        (lambda c: (F.softmax(c, 1), c.sum(0)), "later kernel"),
    ):
        f = traced(fn, (8, 8))
        p = plan(f, (8, 8), outs=(square, None)[: len(f.results)], same=frozenset({(0, 0)}))
        assert why in p.copies[0]
    f = traced(lambda c, a: c + a, (8, 8), (8, 8))
    partly = plan(f, (8, 8), (8, 8), outs=(square,), some=frozenset({(0, 1)}))
    assert "in part" in partly.copies[0]
    assert not plan(traced(lambda c: c - c.mean(-1, keepdim=True), (8, 8)), (8, 8), outs=(square,), same=frozenset({(0, 0)})).copies


def test_two_swapped_outputs_are_not_written_before_they_are_read() -> None:
    f = traced(lambda x, y: (y * 1, x * 1), (8,), (8,))
    p = plan(f, (8,), (8,), outs=(layout((8,)), layout((8,))), same=frozenset({(0, 0), (1, 1)}))
    assert len(p.sources) == 1
    assert not p.copies  # one kernel reads both elements, then writes both


def test_nothing_is_launched_for_nothing() -> None:
    f = traced(lambda x: F.softmax(x, -1) * 2, (hir.sym("m"), 4))
    p = plan(f, (0, 4))
    assert p.sources == []
    assert p.fresh == {0: (0, 4)}
    assert plan(traced(lambda x: x.sum(1), (4, hir.sym("n"))), (4, 0)).sources
    with pytest.raises(InputError, match="over no elements"):
        plan(traced(lambda x: x.amax(1), (4, hir.sym("n"))), (4, 0))


def test_views_of_inputs_are_not_computed() -> None:
    f = traced(lambda x: (x.t(), x[1:] * 2), (4, 6))
    p = plan(f, (4, 6))
    assert [(j, i) for j, i, _ in p.views] == [(0, 0)]
    assert len(p.sources) == 1


def test_more_than_eight_dims_after_collapsing_are_refused_with_the_reason() -> None:
    f = traced(lambda x: x + 1, (2,) * 10)
    strange = Layout((2,) * 10, tuple(3**i for i in range(10)))
    with pytest.raises(UnsupportedError, match="10 dims are left"):
        make(f, Shape((strange,), (None,)), GPU)
    assert plan(f, (2,) * 10).sources


def test_a_grid_lies_along_x_and_has_the_hardware_limit() -> None:
    f = traced(lambda a, b: a + b, (70000, 3, 5), (1, 3, 5), dtype=torch.int8)
    assert plan(f, (70000, 3, 5), (1, 3, 5)).sources[0].programs > 65535 // 64
    assert check_grid(2**31 - 1) == 2**31 - 1
    with pytest.raises(UnsupportedError, match="a grid holds"):
        check_grid(2**31)


def test_offsets_are_wide_only_where_they_must_be() -> None:
    f = traced(lambda x: x + 1, (2, 8), dtype=torch.int8)
    far = Layout((2, 8), (2**31 + 16, 1))
    assert make(f, Shape((far,), (None,)), GPU).sources[0].wide
    assert not make(f, Shape((layout((2, 8)),), (None,)), GPU).sources[0].wide
    big = traced(lambda x: x + 1, (2**31 + 1024,), dtype=torch.int8)
    source = plan(big, (2**31 + 1024,)).sources[0]
    assert source.wide
    assert ".to(tl.int64)" in source.text


@pytest.mark.parametrize(
    ("fn", "specs", "why"),
    [
        (lambda x, y: x @ y, [((4, 4), torch.float32)] * 2, "library"),
        (lambda x: x * 2, [((4,), torch.complex64)], "complex|c64"),
        (lambda x: F.dropout(x, 0.5), [((4,), torch.float32)], "random"),
        (lambda x: x.cumsum(0), [((4,), torch.float32)], "cumsum"),
        (lambda x: torch.linalg.inv(x), [((4, 4), torch.float32)], "opaque"),
    ],
    ids=["library", "complex", "random", "scan", "opaque"],
)
def test_what_is_not_generated_is_refused_with_the_reason(fn: Callable[..., Any], specs: Any, why: str) -> None:
    f = hir.trace(fn, *(hir.spec(s, d) for s, d in specs))
    with pytest.raises(AssertionError, match=why):
        assert why_not(f) is None, why_not(f)
