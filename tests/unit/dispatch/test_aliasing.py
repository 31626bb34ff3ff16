"""Which tensors share memory is told exactly for views of one buffer."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostir.dispatch import aliasing
from hostir.dispatch.aliasing import overlap, overlaps_itself

BASE = torch.arange(6 * 7 * 4)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    t = BASE.view(6, 7, 4)
    for d in range(3):
        start = draw(st.integers(0, t.shape[d]))
        stop = draw(st.integers(start, t.shape[d]))
        t = t.narrow(d, start, stop - start)
    if draw(st.booleans()) and t.shape[1]:
        t = t[:, :: draw(st.integers(1, 3))]
    if draw(st.booleans()) and t.shape[2]:
        t = t.select(2, draw(st.integers(0, t.shape[2] - 1)))
    return t.permute(*draw(st.permutations(range(t.dim()))))


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(views(), views())
def test_overlap_of_views_is_exact(a: torch.Tensor, b: torch.Tensor) -> None:
    shared = set(a.reshape(-1).tolist()) & set(b.reshape(-1).tolist())
    found = overlap(a, b)
    assert (found == "no") == (not shared)
    if found == "same":
        assert torch.equal(a, b)


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(views(), views())
def test_large_views_are_never_called_apart_when_they_are_not(a: torch.Tensor, b: torch.Tensor) -> None:
    """The rule for views too large to compare by element, on small ones where the answer is known."""
    distance = (b.data_ptr() - a.data_ptr()) // a.element_size()
    steps = sorted({*aliasing._strides(a), *aliasing._strides(b), 1}, reverse=True)
    if a.numel() and b.numel() and aliasing._boxes_apart(a, b, distance, steps):
        assert not set(a.reshape(-1).tolist()) & set(b.reshape(-1).tolist())


def test_large_blocks_and_columns_are_told_apart() -> None:
    big = torch.empty(512, 512, dtype=torch.int8)
    assert overlap(big[:, :256], big[:, 256:]) == "no"
    assert overlap(big[:256], big[256:]) == "no"
    assert overlap(big[:300], big[256:]) == "some"
    assert overlap(big[:, ::2], big[:, 1::2]) == "no"
    assert overlap(big, big.T) == "some"
    assert overlap(big, big.view(512, 512)) == "same"
    assert overlap(big, torch.empty_like(big)) == "no"


def test_expanded_tensors_overlap_themselves() -> None:
    assert overlaps_itself(torch.zeros(1).expand(3))
    assert overlaps_itself(torch.zeros(5).as_strided((3, 3), (1, 1)))
    assert not overlaps_itself(torch.zeros(9).as_strided((3, 3), (1, 3)))
    assert not overlaps_itself(torch.zeros(3, 3).T)
    assert not overlaps_itself(torch.zeros(1).expand(1, 1))
    assert not overlaps_itself(torch.zeros(()))
