"""Machines with round numbers, and the moves of small programs, for tests that count by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from hostir.ir.cohort import Move, cohorts
from hostir.ir.nodes import Call, Comm
from hostir.ir.parse import parse_program
from hostir.ir.walk import resolve_mesh
from hostir.sim.machine import Link, Machine

PLAIN: Final = Machine(
    "plain", 4, {"f32": 1000.0, "bf16": 2000.0}, memory=100.0, num_sms=10, tiled=False, kernel=0.0, launch=0.0, issue=0.0,
    nvlink=Link(1.0, 10.0), pcie=Link(2.0, 5.0), infiniband=Link(3.0, 2.0), comm_share=0.0,
)  # fmt: skip
FREE_MEMORY: Final = replace(PLAIN, memory=1e12)


def moves(text: str, mesh: int | None = None, dims: Mapping[str, int] | None = None) -> list[Move]:
    """The calls and communications of the first rank and all that run alike."""
    p = parse_program(text)
    (c, *_) = cohorts(p, resolve_mesh(p, mesh), dims=dims)
    assert c.error is None
    return [m for m in c.moves if isinstance(m.step.op, (Call, Comm))]


def unit(body: str, params: str, result: str, args: str, out: str, results: str = "") -> str:
    """A program that calls one unit."""
    named = ", ".join(f"%{name}: {kind}" for name, kind in (p.split(": ") for p in params.split("; ")))
    return f"""unit @u({named}) {{
{body}
  return {result}
}}
program @p({named}{results}) {{
  %out = alloc {out}
  %out <- @u({args})
  return %out
}}
"""


def comm(statement: str, params: str, mesh: str = "tp") -> str:
    return f"program @p({params}) mesh({mesh}) {{\n{statement}\n}}"
