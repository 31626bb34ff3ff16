"""Costs against values worked out by hand, and the order in which they must stand; machines as files."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hostir as hir
from hostir.errors import InputError
from hostir.sim.machine import PIPELINE_K, TILES, Link, Machine
from hostir.sim.work import Work
from tests.unit.sim.machines import FREE_MEMORY, PLAIN, comm, moves, unit

PRESETS = [Machine.h200(), Machine.h100(), Machine.cpu()]
MM = unit("  %o = mm(%a, %b)", "a: f32[2, 8]; b: f32[8, 3]", "%o", "%a, %b", "f32[2, 3]")
COPIES = """program @p(%h: f32[4] host, inout %x: f32[4], inout %y: f32[4], inout %g: f32[4] host) {
  %x <- copy(%h)
  %y <- copy(%x)
  %g <- copy(%y)
}
"""


def cost(text: str, machine: Machine = PLAIN, mesh: int | None = None) -> float:
    return machine.cost(moves(text, mesh)[0])


# ---------------------------------------------------------------------------------------------------------------------- calls


def test_a_product_takes_the_longer_of_its_arithmetic_and_its_bytes() -> None:
    assert cost(MM, FREE_MEMORY) == 2 * 2 * 3 * 8 / 1000
    assert cost(MM, PLAIN) == 4 * (16 + 24 + 6) / 100


def test_nothing_is_shorter_than_the_smallest_kernel_and_a_call_may_be_several() -> None:
    machine = replace(FREE_MEMORY, matmul_flops={"f32": 1e12}, kernel=0.5)
    assert cost(MM, machine) == 0.5
    two = unit("  %s = exp(%a)\n  %o = mm(%s, %b)", "a: f32[2, 8]; b: f32[8, 3]", "%o", "%a, %b", "f32[2, 3]")
    assert cost(two, machine) == 1.0


def test_a_dtype_without_a_rate_of_its_own_multiplies_like_f32() -> None:
    assert cost(MM.replace("f32", "f64"), FREE_MEMORY) == cost(MM, FREE_MEMORY)
    assert cost(MM.replace("f32", "bf16"), FREE_MEMORY) == cost(MM, FREE_MEMORY) / 2


@pytest.mark.parametrize(("num_tiles", "waves"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_products_come_in_waves_of_whole_tiles(num_tiles: int, waves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostir.sim.machine.TILES", TILES[:1])
    monkeypatch.setattr("hostir.sim.machine.SPLITS", (1,))
    machine = replace(FREE_MEMORY, tiled=True)
    seconds, share = machine.matmul(Work("matmul", 0, 0, "f32", m=128 * num_tiles, n=200, k=1000))
    assert seconds == pytest.approx(waves * 2 * 128 * 256 * (1000 + PIPELINE_K) / (1000 / 10))
    assert share == min(1.0, num_tiles / 10)


def test_a_product_with_few_tiles_takes_smaller_ones_or_splits_k() -> None:
    h200 = Machine.h200()
    w = Work("matmul", 0, 0, "bf16", m=128, n=256, k=8192)
    alone = 2 * 128 * 256 * (8192 + PIPELINE_K) / (h200.matmul_flops["bf16"] / h200.num_sms)
    seconds, share = h200.matmul(w)
    assert seconds < alone / 4
    assert share > 4 / h200.num_sms


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 5000), st.sampled_from("mnk"), st.integers(1, 400))
def test_a_larger_product_never_takes_less(m: int, n: int, k: int, grown: str, by: int) -> None:
    h200 = Machine.h200()
    w = Work("matmul", 0, 0, "bf16", m=m, n=n, k=k)
    larger = replace(w, **{grown: getattr(w, grown) + by})
    assert h200.matmul(larger)[0] >= h200.matmul(w)[0] * (1 - 1e-12)
    assert h200.matmul(w)[0] >= w.flops / h200.matmul_flops["bf16"]


def test_large_products_reach_the_rate_and_large_copies_the_memory() -> None:
    h200 = Machine.h200()
    w = Work("matmul", 0, 0, "bf16", m=8192, n=8192, k=8192)
    assert 0.94 < w.flops / h200.matmul(w)[0] / h200.matmul_flops["bf16"] <= 1
    assert h200.kernel_cost(Work("pointwise", 8.2e9, 1e9))[0] == pytest.approx(2e-3)


# --------------------------------------------------------------------------------------------------------------- communications


@pytest.mark.parametrize(
    ("statement", "params", "seconds"),
    [
        # four ranks of one node: a ring has three hops of 1 s, the rate is 10 bytes a second
        ("%y <- allgather(%x)", "%x: f32[5], inout %y: f32[20]", 3 * 1 + 60 / 10),
        ("%y <- reduce_scatter(%x)", "%x: f32[20], inout %y: f32[5]", 3 * 1 + 60 / 10),
        ("%y <- allreduce(%x)", "%x: f32[20], inout %y: f32[20]", 2 * (3 * 1 + 60 / 10)),
        ("%y <- broadcast(%x from 0)", "%x: f32[20], inout %y: f32[20]", 3 * 1 + 80 / 10),
        ("%y <- reduce(%x to 0)", "%x: f32[20], inout %y: f32[20]", 3 * 1 + 80 / 10),
        ("%y <- gather(%x to 0)", "%x: f32[5], inout %y: f32[20]", 1 + 60 / 10),
        ("%y <- scatter(%x from 0)", "%x: f32[20], inout %y: f32[5]", 1 + 60 / 10),
        ("%y <- alltoall(%x)", "%x: f32[20], inout %y: f32[20]", 1 + 60 / 10),
        ("%y <- alltoallv(%x send [1, 1, 1, 1] recv [1, 1, 1, 1])", "%x: f32[9, 5], inout %y: f32[9, 5]", 1 + 60 / 10),
        ("%y <- permute(%x to (rank(tp) + 1) % 4 from (rank(tp) + 3) % 4)", "%x: f32[20], inout %y: f32[20]", 1 + 80 / 10),
        ("barrier()", "", 2 * 2 * 1),
    ],
)
def test_communications_within_a_node(statement: str, params: str, seconds: float) -> None:
    assert cost(comm(statement, params), mesh=4) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "team", "seconds"),
    [
        ("allgather", (0, 1), 1 + 80 / 2 / 10),  # one node
        ("allgather", (0, 4), 3 + 80 / 2 / 2),  # one hop over InfiniBand, whose rate counts
        ("allgather", (0, 1, 2, 3, 4, 5, 6, 7), 6 * 1 + 3 + 80 * 7 / 8 / 8),  # four ports a node: 4 x 2 bytes a second
        ("allgather", (0, 1, 2, 3, 4), 3 * 1 + 3 + 80 * 4 / 5 / 2),  # the node with one member has one port
        ("alltoall", (0, 1, 4, 5), 3 + max(80 / 4 / 10, 80 * 2 / 4 / 2)),
    ],
)
def test_a_team_is_bound_by_how_it_lies_on_the_nodes(kind: str, team: tuple[int, ...], seconds: float) -> None:
    sizes = "%x: f32[5], inout %y: f32[20]" if kind == "allgather" else "%x: f32[20], inout %y: f32[20]"
    (m,) = moves(comm(f"%y <- {kind}(%x)", sizes), 4)
    assert PLAIN.cost(m, team) == pytest.approx(seconds)


def test_messages_go_over_the_wire_between_their_two_ends() -> None:
    (m,) = moves(comm("%y <- permute(%x to (rank(tp) + 1) % 4 from (rank(tp) + 3) % 4)", "%x: f32[20], inout %y: f32[20]"), 4)
    assert PLAIN.cost(m, (0, 3)) == 1 + 80 / 10
    assert PLAIN.cost(m, (3, 4)) == 3 + 80 / 2
    assert PLAIN.cost(m, (2, 2)) == 160 / 100  # to oneself: a copy


def test_copies_go_through_memory_or_the_host_link() -> None:
    to_device, local, to_host = moves(COPIES)
    assert PLAIN.cost(to_device) == PLAIN.cost(to_host) == 2 + 16 / 5
    assert PLAIN.cost(local) == 32 / 100


@pytest.mark.parametrize("machine", PRESETS, ids=lambda m: m.name)
@pytest.mark.parametrize("kind", ["allgather", "alltoall", "allreduce"])
def test_more_bytes_and_farther_ranks_never_take_less(machine: Machine, kind: str) -> None:
    def seconds(n: int, team: tuple[int, ...]) -> float:
        out = 4 * n if kind == "allgather" else n
        (m,) = moves(comm(f"%y <- {kind}(%x)", f"%x: f32[{n}], inout %y: f32[{out}]"), 4)
        return machine.cost(m, team)

    near, far = (0, 1, 2, 3), (0, 1, 8, 9)
    times = [seconds(n, near) for n in (4, 4000, 4_000_000)]
    assert times == sorted(times)
    assert seconds(4_000_000, far) >= times[-1]


def test_presets_stand_in_the_order_of_their_hardware() -> None:
    h200, h100, cpu = PRESETS
    w = Work("pointwise", 1e9, 2.5e8)
    assert h200.kernel_cost(w) < h100.kernel_cost(w) < cpu.kernel_cost(w)
    assert h200.matmul(Work("matmul", 0, 0, "bf16", 4096, 4096, 4096)) == h100.matmul(Work("matmul", 0, 0, "bf16", 4096, 4096, 4096))
    assert all(m.nvlink.bandwidth >= m.infiniband.bandwidth for m in PRESETS)


# ---------------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("machine", PRESETS, ids=lambda m: m.name)
def test_a_machine_comes_back_from_its_file(machine: Machine, tmp_path: Path) -> None:
    machine.save(tmp_path / "m.json")
    assert Machine.load(tmp_path / "m.json") == machine
    assert Machine.named(str(tmp_path / "m.json")) == machine
    assert Machine.named(machine.name) == machine
    assert hash(machine) == hash(Machine.load(tmp_path / "m.json"))


def broken(**changes: Any) -> str:
    """The file of the H200 with some values changed; None leaves one out."""
    raw = asdict(Machine.h200()) | changes
    return json.dumps({k: v for k, v in raw.items() if v is not None})


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", broken(memory=None), broken(memory="fast"), broken(memory=-1.0), broken(nvlink={"alpha": 1}), broken(matmul_flops={"bf16": 1}),
     broken(num_sms=0), broken(tiled=1), broken(extra=1)],
)  # fmt: skip
def test_a_file_that_is_no_machine_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(InputError, match=r"m\.json"):
        Machine.load(tmp_path / "m.json")


def test_the_helper_for_broken_files_makes_whole_ones_too(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(broken())
    assert Machine.load(tmp_path / "m.json") == Machine.h200()


def test_an_unknown_machine_names_those_that_are_known() -> None:
    with pytest.raises(InputError, match="no machine 'tpu'") as caught:
        hir.Machine.named("tpu")
    assert caught.value.expected == "h200, h100, cpu, or a file of Machine.save"


def test_a_link_is_its_alpha_and_its_bandwidth() -> None:
    assert Link(2.0, 5.0).seconds(10) == 4.0
    assert math.isclose(Machine.h200().pcie.seconds(55e9), 1 + 8e-6)
