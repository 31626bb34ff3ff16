"""Layouts: what views do to strides, which dims collapse, and when an offset needs 64 bits."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from hostir.kernels.layout import LIMIT_32, SLACK, Arrange, Cut, Layout, Reshape, chain, needs_64_bit, runs_of


def offsets(x: Layout) -> torch.Tensor:
    """Every element's place, in row-major order of the sizes."""
    number = torch.full(x.sizes, x.offset, dtype=torch.int64)
    for d, (n, s) in enumerate(zip(x.sizes, x.strides, strict=True)):
        number += (torch.arange(n) * s).reshape([-1 if i == d else 1 for i in range(len(x.sizes))])
    return number if x.inner is None else offsets(x.inner).reshape(-1)[number]


def test_chains_of_views_reach_the_elements_that_torch_reaches() -> None:
    pick = random.Random(0)
    for _ in range(300):
        shape = tuple(pick.choice([1, 2, 3, 4, 6]) for _ in range(pick.randint(1, 4)))
        t, x = torch.arange(torch.Size(shape).numel()).reshape(shape), Layout.row_major(shape)
        for _ in range(pick.randint(1, 5)):
            rank = t.dim()
            d = pick.randrange(rank)
            match pick.choice(["permute", "cut", "reverse", "reshape", "flatten", "expand"]):
                case "permute":
                    order = pick.sample(range(rank), rank)
                    t, x = t.permute(order), Arrange(tuple(order), tuple(t.shape[i] for i in order)).apply(x)
                case "cut" if t.shape[d] > 1:
                    t, x = t.narrow(d, 1, t.shape[d] - 1), Cut(d, 1, 1, t.shape[d] - 1).apply(x)
                case "reverse":
                    t, x = t.flip(d), Cut(d, t.shape[d] - 1, -1, t.shape[d]).apply(x)
                case "reshape" if t.shape[d] % 2 == 0:
                    sizes = (*t.shape[:d], 2, t.shape[d] // 2, *t.shape[d + 1 :])
                    t, x = t.reshape(sizes), Reshape(sizes).apply(x)
                case "flatten" if rank > 1:
                    sizes = (t.shape[0] * t.shape[1], *t.shape[2:])
                    t, x = t.reshape(sizes), Reshape(sizes).apply(x)
                case "expand":
                    t, x = t.unsqueeze(d).expand(*t.shape[:d], 2, *t.shape[d:]), _expanded(x, d)
        assert x.sizes == tuple(t.shape)
        assert torch.equal(offsets(x), t)


def _expanded(x: Layout, d: int) -> Layout:
    sources = (*range(d), None, *range(d, len(x.sizes)))
    return Arrange(sources, (*x.sizes[:d], 2, *x.sizes[d:])).apply(x)


def test_two_rearrangements_are_one_step() -> None:
    steps = chain(Arrange((1, 0), (3, 2)), (Arrange((1, 0, None), (2, 3, 5)),))
    assert steps == (Arrange((0, 1, None), (2, 3, 5)),)


@pytest.mark.parametrize(
    ("sizes", "layouts", "runs"),
    [
        ((4, 5, 6), [(30, 6, 1)], [(0, 1, 2)]),
        ((4, 5, 6), [(30, 6, 1), (40, 8, 1)], [(0, 1), (2,)]),
        ((4, 5, 6), [(30, 6, 1), (0, 0, 1)], [(0, 1), (2,)]),
        ((4, 5, 6), [(30, 6, 1), (0, 0, 0)], [(0, 1, 2)]),
        ((4, 5, 6), [(0, 6, 1)], [(0,), (1, 2)]),
        ((4, 1, 6), [(6, 0, 1)], [(0, 2)]),
        ((1, 1), [(0, 0)], []),
    ],
)
def test_dims_collapse_where_every_tensor_walks_them_in_one_stride(
    sizes: tuple[int, ...], layouts: Sequence[tuple[int, ...]], runs: list[tuple[int, ...]]
) -> None:
    assert runs_of(range(len(sizes)), sizes, [Layout(sizes, s) for s in layouts]) == runs


@pytest.mark.parametrize(
    ("layout", "wide"),
    [
        (Layout((2**31 + 8,), (1,)), True),  # many elements
        (Layout((2, 8), (2**31 + 16, 1)), True),  # two rows far apart: few elements, a large offset
        (Layout((2,), (LIMIT_32 - SLACK,)), False),  # just below
        (Layout((2,), (LIMIT_32 - SLACK + 1,)), True),
        (Layout((2,), (-(2**31) - 16,)), True),  # backwards
        (Layout((1, 8), (2**40, 1)), False),  # a stride that nothing walks
        (Layout((0, 8), (2**40, 1)), False),  # no element
        (Layout((2**40,), (0,)), False),  # one element, seen often: the count decides, see below
        (Layout((8,), (1,), offset=2**40), False),  # a far base is the pointer's
        (Layout((4,), (1,), 0, Layout((2, 2), (2**31, 1))), True),  # behind a reshape
    ],
)
def test_the_largest_offset_decides_the_width(layout: Layout, wide: bool) -> None:
    assert needs_64_bit([layout]) is wide


def test_a_count_that_becomes_an_index_decides_too() -> None:
    assert needs_64_bit([Layout((2**40,), (0,))], [2**40])
    assert not needs_64_bit([], [2**31 - 2**22])
