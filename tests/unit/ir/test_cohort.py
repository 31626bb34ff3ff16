"""Folding ranks: one walk for those that take one path gives each of them exactly what its own walk gives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hostir.ir.cohort import Cohort, Move, cohorts
from hostir.ir.walk import resolve_mesh
from tests.support.peer_programs import generated_peers
from tests.unit.ir.right_programs import EXCHANGE, MESSAGES, RIGHT, RING, ROOTED, Right, changed, program


def alone(x: Any, k: int) -> Any:
    """The value of rank number ``k`` of a cohort."""
    return x[k].item() if isinstance(x, np.ndarray) else x


def move_of(m: Move, k: int) -> tuple[object, ...]:
    uses = tuple(
        (
            u.root.buffer,
            u.root.serial,
            alone(u.offsets, k) if u.offsets is not None else u.layout.offset,
            u.layout.sizes,
            u.layout.strides,
            u.write,
            u.peer,
        )
        for u in m.uses
        if u.only is None or u.only[k]
    )
    counts = None if m.counts is None else tuple(tuple(alone(c, k) for c in side) for side in m.counts)
    return (m.step.op, m.step.stream, m.at, uses, alone(m.to, k), alone(m.source, k), alone(m.value, k), counts, m.sizes)


def walked(p: Any, mesh: Any, ranks: list[int] | None = None, dims: Any = None) -> list[Cohort]:
    return cohorts(p, resolve_mesh(p, mesh), ranks, dims=dims)


@pytest.mark.parametrize("name", RIGHT)
def test_a_folded_walk_is_the_walk_of_each_of_its_ranks(name: str) -> None:
    text, mesh, dims = RIGHT[name]
    p = program(text)
    seen = []
    for c in walked(p, mesh, dims=dims):
        for k, rank in enumerate(c.ranks):
            (own,) = walked(p, mesh, [rank], dims)
            assert [move_of(m, k) for m in c.moves] == [move_of(m, 0) for m in own.moves]
            seen.append(rank)
    assert sorted(seen) == list(range(math.prod(resolve_mesh(p, mesh).sizes)))


@pytest.mark.parametrize("seed", range(30))
def test_ranks_that_touch_each_others_memory_are_walked_together_and_taken_apart(seed: int) -> None:
    made = generated_peers(seed)
    p = made.parse()
    found = cohorts(p, made.mesh)
    assert [c.ranks for c in found] == [(r,) for r in made.mesh.layout]
    for c in found:
        (own,) = cohorts(p, made.mesh, c.ranks)
        assert [move_of(m, 0) for m in c.moves] == [move_of(m, 0) for m in own.moves]
        assert {r.serial: n for r, n in c.copies.items()} == {r.serial: n for r, n in own.copies.items()}


def test_peers_on_a_mesh_in_another_order_and_of_a_sub_team() -> None:
    from hostir.mesh import Mesh

    p = program("""
      program @p(%x: f32[4]) mesh(dp = 2, tp = 2) {
        %b = alloc f32[2, 4] symmetric
        %f = zeros i32[] symmetric
        %p = view %b.peer((2 * rank(dp) + rank(tp) + 3) % 4)
        %q = view %p[rank(tp)]
        %q <- copy(%x)
        signal(%f to 1 - rank(tp) value rank(dp) + 1) over tp
        if rank(dp) == 1 { signal(%f to rank(dp) value 7) over dp }
      }""")
    mesh = Mesh((2, 2), ("dp", "tp"), ranks=(3, 0, 2, 1))
    for c in cohorts(p, mesh):
        (own,) = cohorts(p, mesh, c.ranks)
        assert [move_of(m, 0) for m in c.moves] == [move_of(m, 0) for m in own.moves]
    assert {u.peer for c in cohorts(p, mesh) for m in c.moves for u in m.uses} >= {0, 1, 2, 3}


@pytest.mark.parametrize(("text", "mesh", "paths"), [(RING, None, 1), (EXCHANGE, 64, 1), (ROOTED, 5, 1), (MESSAGES, 5, 3)])
def test_ranks_are_walked_together_as_long_as_they_go_together(text: str, mesh: int | None, paths: int) -> None:
    assert len(walked(program(text), mesh)) == paths


@pytest.mark.parametrize(
    "body",
    [
        "if rank(tp) == 2 { %y <- copy(%x) }",
        "for %i in 0 .. rank(tp) { %y <- copy(%x) }",
        "%y <- @double(%x) on s[rank(tp) % 2]",
        "%t = alloc f32[rank(tp) + 1]",
        "if rank(tp) > 0 & 6 // rank(tp) > 2 { %y <- copy(%x) }",
        "%v = view %x[0 : min(rank(tp), 2)]",
    ],
)
def test_what_ranks_do_differently_is_never_folded(body: str) -> None:
    p = program(f"program @p(%x: f32[4]) mesh(tp = 4) {{ %y = zeros f32[4] {body} return %y }}")
    found = walked(p, None)
    assert len(found) > 1
    for c in found:
        for k, rank in enumerate(c.ranks):
            (own,) = walked(p, None, [rank])
            assert [move_of(m, k) for m in c.moves] == [move_of(m, 0) for m in own.moves]


def test_a_rank_that_fails_is_alone_with_its_error() -> None:
    p = program(changed(RING, "view %w[(rank(tp) - %i) % 4]", "view %w[rank(tp) + %i]"))
    found = walked(p, None)
    assert {c.ranks: c.error is None for c in found} == {(0,): True, (1,): False, (2,): False, (3,): False}


def test_a_member_of_a_mesh_in_another_order_is_found_by_its_place() -> None:
    from hostir.mesh import Mesh

    p = program(Right("program @p(inout %x: f32[4]) mesh(tp) { %x <- broadcast(%x from 1) }").text)
    (c,) = cohorts(p, Mesh((3,), ("tp",), ranks=(5, 2, 0)))
    assert c.ranks == (5, 2, 0)
    read, write = c.moves[0].uses
    assert read.only is not None
    assert read.only.tolist() == [False, True, False]
    assert write.only is None
