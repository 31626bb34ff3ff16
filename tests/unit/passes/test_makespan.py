"""Correct syncs can still undo the overlap: what scheduling gives takes no longer than the best that anyone could write by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from hostir.ir.cohort import cohorts
from hostir.ir.nodes import MAIN, Alloc, Call, Comm, For, Free, Group, If, Program, Stmt, Stream, Sync, every, rewrite
from hostir.ir.race import Uses, uses_by_root
from hostir.ir.verify import verify
from hostir.mesh import Mesh
from hostir.overlap.programs import collective_ag_gemm, host_sum, ring_ag_gemm
from hostir.passes.schedule import schedule
from hostir.passes.streams import streams
from hostir.sim.clock import BytesCost, makespan
from tests.support.programs import generated
from tests.unit.ir.right_programs import RING_IN_ORDER, program


def line(n: int) -> Mesh:
    return Mesh((n,), ("tp",))


def unit_makespan(p: Program, mesh: Mesh) -> float:
    return makespan(p, mesh).makespan


# --------------------------------------------------------------------------------------------------- the best by exhaustive search


def with_syncs(p: Program, slots: tuple[int, ...], made: tuple[tuple[Stream, Stream], ...]) -> Program:
    """``p`` with a sync between the streams ``made[k]`` before the statement number ``slots[k]``, in text order; views and branches count."""
    count = itertools.count()

    def go(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for s in body:
            number = next(count)
            out += [Sync(*ends) for slot, ends in zip(slots, made, strict=True) if slot == number]
            if isinstance(s, For):
                s = For(s.var, s.start, s.stop, s.step, go(s.body))
            elif isinstance(s, If):
                s = If(s.cond, go(s.then), go(s.orelse))
            out.append(s)
        return tuple(out)

    return p.with_(body=go(p.body))


def by_hand(p: Program, num: int) -> Iterator[Program]:
    """``p`` (unscheduled, streams main and comm) with ``num`` syncs in all places."""
    comm = next(s.stream for s in every(p.body) if isinstance(s, Comm) and s.stream.name == "comm")
    p = p.with_(scheduled=True)
    places = range(sum(1 for _ in every(p.body)))
    for made in itertools.product([(MAIN, comm), (comm, MAIN)], repeat=num):
        for slots in itertools.combinations_with_replacement(places, num):
            yield with_syncs(p, slots, made)


def best_by_hand(p: Program, mesh: Mesh, num: int) -> float:
    """The shortest makespan of those that are right."""
    return min(unit_makespan(q, mesh) for q in by_hand(p, num) if verify(q, mesh, check=False).ok)


@pytest.mark.parametrize("d", [2, 3])
def test_the_ring_takes_as_long_as_with_the_best_two_syncs(d: int) -> None:
    p = ring_ag_gemm(line(d), 2 * d, 4, 3)
    assert unit_makespan(schedule(p, line(d)), line(d)) == best_by_hand(p, line(d), 2)


def test_the_ring_with_two_buffers_takes_as_long_as_with_the_best_two_syncs() -> None:
    p = program(RING_IN_ORDER.replace("over tp", "over tp on comm"))
    assert unit_makespan(schedule(p, line(4)), line(4)) == best_by_hand(p, line(4), 2) == 5


# ----------------------------------------------------------------------------------------------------- the best that order allows


def shortest(p: Program, mesh: Mesh) -> float:
    """The unit-cost makespan of ``p`` on one rank if every statement waited for its stream and for what it conflicts with, and for nothing
    else. No placing of syncs is faster."""
    (c,) = cohorts(p.with_(scheduled=True), mesh)
    before: dict[int, set[int]] = {}
    for found in uses_by_root(c).values():
        for a, b, _ in (uses := Uses(found, 1)).conflicts():
            for i, j in zip(uses.move[a].tolist(), uses.move[b].tolist(), strict=True):
                before.setdefault(j, set()).add(i)
    end, last, opened = [0.0] * len(c.moves), dict[object, float](), 0.0
    for i, m in enumerate(c.moves):
        lane = ("main", None) if isinstance(m.step.op, (Alloc, Free)) else m.step.stream
        if isinstance(m.step.op, Group):
            opened = last.get(lane, 0.0)
        if isinstance(m.step.op, (Alloc, Free, Call, Comm)):
            start = opened if m.step.group is not None else last.get(lane, 0.0)
            end[i] = max([start, *(end[k] for k in before.get(i, ()))]) + isinstance(m.step.op, (Call, Comm))
            last[lane] = max(last.get(lane, 0.0), end[i])
    return max(end, default=0.0)


def test_syncs_cost_less_than_four_percent_over_many_programs() -> None:
    """Streams whose index is not known outside a loop are joined as a whole; elsewhere syncs hold back what must wait, and little else."""
    best = real = serial = 0.0
    for seed in range(400):
        made = generated(seed)
        p = made.parse()
        if made.mesh.size == 1 and not any(isinstance(s, Sync) for s in every(p.body)):
            aside = streams(p, made.mesh)
            one = unit_makespan(aside, made.mesh)
            least = shortest(aside.with_(body=rewrite(aside.body, lambda s: [] if isinstance(s, Sync) else [s])), made.mesh)
            assert least <= one <= unit_makespan(p, made.mesh)
            best, real, serial = best + least, real + one, serial + unit_makespan(p, made.mesh)
    assert real <= 1.04 * best
    assert real < 0.85 * serial


# ------------------------------------------------------------------------------------------------------------ against known numbers


@pytest.mark.parametrize("d", range(1, 9))
def test_the_ring_takes_a_step_for_each_product_and_one_for_the_copy(d: int) -> None:
    """By hand: one sync before the loop, one at the top of its body; all messages but none of the products can be hidden."""
    timeline = makespan(schedule(ring_ag_gemm(line(d), 2 * d, 4, 3), line(d)))
    assert timeline.makespan == d + 1
    assert timeline.exposed_comm == 0


@pytest.mark.parametrize("d", range(2, 9))
@pytest.mark.parametrize("cost", [BytesCost(memory=8, link=4), BytesCost(memory=4, link=8, latency=0.5)], ids=["slow link", "latency"])
def test_the_ring_on_a_stream_of_its_own_hides_communication_that_main_exposes(d: int, cost: BytesCost) -> None:
    p = ring_ag_gemm(line(d), 4 * d, 8, 16)
    overlapped = makespan(schedule(p, line(d)), cost=cost)
    in_order = makespan(schedule(p, line(d), overlap="off"), cost=cost)
    assert in_order.exposed_comm > 0
    assert overlapped.exposed_comm < 0.7 * in_order.exposed_comm
    assert overlapped.makespan < in_order.makespan


@pytest.mark.parametrize("d", [1, 2, 4])
@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_the_collective_pipeline_keeps_its_overlap_with_two_rotated_buffers(d: int, chunks: int) -> None:
    """By hand: the gather of the next chunk runs beside the product of this one; only the first is exposed."""
    p = schedule(collective_ag_gemm(line(d), d * chunks, 4, 3, chunks), line(d))
    (rows,) = [s.out for s in every(p.body) if hasattr(s, "init") and s.out.name.startswith("rows")]
    assert rows.type.dims[0] == 2
    timeline = makespan(p)
    assert timeline.makespan == chunks + 1
    assert timeline.exposed_comm == 1
    assert makespan(streams(collective_ag_gemm(line(d), d * chunks, 4, 3, chunks), line(d))).makespan == chunks + 1  # fresh ones are no faster


@pytest.mark.parametrize("num_terms", [1, 4])
def test_the_host_sum_is_a_chain_and_gets_no_sync(num_terms: int) -> None:
    one = Mesh((1,), ("world",))
    p = schedule(host_sum(num_terms, 8, torch.float32), one)
    assert unit_makespan(p, one) == num_terms
    assert not [s for s in every(p.body) if isinstance(s, Sync)]


def test_a_dropped_sync_that_costs_nothing_would_not_be_noticed_by_time_alone() -> None:
    """The ring without its syncs is as fast, and wrong: a makespan says nothing about the meaning."""
    p = schedule(ring_ag_gemm(line(3), 6, 4, 3), line(3))
    bare = p.with_(body=rewrite(p.body, lambda s: [] if isinstance(s, Sync) else [s]))
    assert unit_makespan(bare, line(3)) <= unit_makespan(p, line(3))
    assert not verify(bare, line(3), check=False).ok


def test_a_hand_over_between_two_chains_waits_for_what_it_needs_and_no_more() -> None:
    text = """
      program @chains(%x: f32[4], inout %a: f32[4], inout %b: f32[4], inout %c: f32[4]) {
        %a <- @double(%x) on s
        %b <- @double(%x) on t
        %b <- @double(%b) on t
        %c <- @double(%a) on t
        %c <- @double(%c) on s
        %b <- @double(%b) on t
      }"""
    one = Mesh((1,), ("world",))
    assert unit_makespan(schedule(program(text), one), one) == 4
    assert unit_makespan(schedule(program(text), one, overlap="off"), one) == 6
