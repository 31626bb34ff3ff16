"""Random programs on thread ranks give bit for bit what their statements give one after another, however they are scheduled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import hostir as hir
from tests.unit.ir.random_ranks import ROOTS, build, recipes, start, twin

SETTINGS = settings(
    deadline=None, max_examples=16, derandomize=True, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)


def run_all(p: Any, d: int, **options: Any) -> list[list[torch.Tensor]]:
    """Every rank's x, y and z, from two runs of one compiled program."""

    def main(world: Any) -> list[torch.Tensor]:
        run = hir.compile(p, world.mesh(("tp",)), **options)
        for _ in range(2):
            mine = start(world.rank)
            got = run(mine["x"], mine["y"])
            assert got[0] is mine["x"]
        return list(got)

    return hir.launch.spawn(main, d, transport="threads", device="cpu")


def check(p: Any, recipe: Any, d: int, **options: Any) -> None:
    expected = twin(recipe, d)
    for rank, got in enumerate(run_all(p, d, **options)):
        for name, tensor in zip(ROOTS, got, strict=True):
            torch.testing.assert_close(tensor, expected[rank][name], rtol=0, atol=0, equal_nan=True, msg=f"rank {rank}, %{name}")


@pytest.mark.parametrize("mode", ["checked", "compiled"])
@SETTINGS
@given(recipe=recipes(), d=st.sampled_from([2, 3]))
def test_scheduling_keeps_every_bit(mode: str, recipe: Any, d: int) -> None:
    p = build(recipe, d)
    assert hir.parse(str(p)) == p
    check(p, recipe, d, mode=mode)


@settings(SETTINGS, max_examples=8)
@given(recipe=recipes())
def test_a_program_on_one_stream_gives_the_same(recipe: Any) -> None:
    check(build(recipe, 2), recipe, 2, overlap="off")


@settings(SETTINGS, max_examples=8)
@given(recipe=recipes())
def test_a_schedule_is_right_as_text_on_every_rank(recipe: Any) -> None:
    """What compiling makes prints, parses back, and passes the checks as a scheduled program."""
    from hostir.passes.schedule import schedule

    p = schedule(build(recipe, 3), hir.Mesh((3,), ("tp",)))
    assert p.scheduled
    assert hir.parse(str(p)) == p
    assert hir.verify(p, mesh=3).ok
    check(hir.parse(str(p)), recipe, 3)
