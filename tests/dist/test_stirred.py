"""Rank threads that sleep at random before they communicate: whatever has not arrived yet, no mode and no schedule changes a bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hostir.ir.nodes import Program
from hostir.ir.parse import parse_program
from hostir.mesh import Mesh
from tests.support.interleave import World
from tests.support.machine import Real
from tests.support.programs import generated
from tests.support.thread_runs import run_on_threads

OFF = {"mode": "checked", "overlap": "off"}
WAYS: list[dict[str, Any]] = [OFF, {"mode": "checked"}, {"mode": "compiled"}, {"mode": "compiled", "overlap": "off"}]


def equal(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def bits(by_rank: list[list[torch.Tensor]]) -> bytes:
    return b"".join(t.contiguous().numpy().tobytes() for found in by_rank for t in found)


@pytest.mark.parametrize("seed", range(12))
def test_a_made_program_gives_the_bits_of_program_order_in_every_mode(seed: int) -> None:
    made = generated(seed)
    p = made.parse()
    in_order, *others = run_on_threads(p, made.mesh, WAYS, seed=seed, longest=0.002)
    for way, got in zip(WAYS[1:], others, strict=True):
        assert equal(got, in_order), way
    # and the bits of the same program run by hand, all ranks in one process
    assert bits(in_order) == World(p, made.mesh, serial=True, loose=False, machine=Real()).run().outputs


def late(text: str, num_ranks: int, mode: str, times: int = 8) -> None:
    """The scheduled program in ``text`` gives what it gives in order, however late the ranks are."""
    mesh = Mesh((num_ranks,), ("tp",))
    in_order: Program = parse_program(text.replace(" scheduled", ""))
    (expected,) = run_on_threads(in_order, mesh, [OFF])
    for seed in range(times):
        (got,) = run_on_threads(parse_program(text), mesh, [{"mode": mode}], seed=seed, longest=0.02)
        assert equal(got, expected), f"seed {seed}"


@pytest.mark.parametrize("mode", ["checked", "compiled"])
def test_who_waits_for_an_event_waits_for_what_its_stream_began_before(mode: str) -> None:
    late(
        """
      program @p(%x: i64[4], inout %a: i64[4], inout %b: i64[4], inout %c: i64[4]) mesh(tp = 2) scheduled {
        %a <- permute(%x to 1 - rank(tp) from 1 - rank(tp)) on comm
        !e = %b <- copy(%x) on comm
        sync !e -> main
        %c <- copy(%a)
      }""",
        2,
        mode,
    )


@pytest.mark.parametrize("mode", ["checked", "compiled"])
def test_an_event_of_a_communication_covers_the_one_before_it(mode: str) -> None:
    late(
        """
      program @p(%x: i64[4], inout %a: i64[4], inout %b: i64[4], inout %c: i64[4]) mesh(tp = 3) scheduled {
        if rank(tp) < 2 {
          %a <- permute(%x to 1 - rank(tp) from 1 - rank(tp)) over [0, 1] on comm
        }
        if rank(tp) != 1 {
          !e = %b <- permute(%x to 1 - rank(tp) // 2 from 1 - rank(tp) // 2) over [0, 2] on comm
        }
        sync !e -> main
        if rank(tp) == 1 {
          sync comm -> main
        }
        %c <- copy(%a)
      }""",
        3,
        mode,
    )


@pytest.mark.parametrize("mode", ["checked", "compiled"])
def test_temporaries_do_not_share_memory_while_a_communication_is_under_way(mode: str) -> None:
    late(
        """
      program @p(%x: i64[4], %z: i64[4], inout %c: i64[4], inout %d: i64[4]) mesh(tp = 3) scheduled {
        %a = alloc i64[4]
        %b = alloc i64[4]
        if rank(tp) < 2 {
          %a <- permute(%x to rank(tp) from rank(tp)) over [0, 1] on comm
          %c <- permute(%a to 1 - rank(tp) from 1 - rank(tp)) over [0, 1] on comm
        }
        if rank(tp) != 1 {
          %b <- permute(%z to 1 - rank(tp) // 2 from 1 - rank(tp) // 2) over [0, 2] on comm
          %d <- permute(%b to rank(tp) // 2 from rank(tp) // 2) over [0, 2] on comm
        }
      }""",
        3,
        mode,
        times=16,
    )
