"""The programs that ship: those of the examples, the library and the right programs of the check tests, scheduled on small meshes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple

import torch

from hostir.ir.nodes import Program
from hostir.ir.walk import resolve_mesh
from hostir.mesh import Mesh
from hostir.overlap.programs import collective_ag_gemm, host_sum, ring_ag_gemm
from hostir.passes.schedule import schedule
from tests.unit.ir.right_programs import RIGHT, program

EXAMPLES: Final = Path(__file__).parents[2] / "examples"


class Shipped(NamedTuple):
    """A scheduled program and the sized mesh that it is for."""

    name: str
    program: Program
    mesh: Mesh


def example(name: str) -> ModuleType:
    """The main module of an example, by the name of its folder."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / name / "main.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _line(n: int) -> Mesh:
    return Mesh((n,), ("tp",))


def shipped() -> Iterator[Shipped]:
    """Programs with symbolic sizes are left out: a mutant needs numbers."""
    one = Mesh((1,), ("world",))
    yield Shipped("example host_sum", schedule(example("01_host_sum").host_sum(3, 4), one), one)
    for n in (2, 3):
        yield Shipped(f"example ring_ag_gemm on {n}", schedule(example("02_ring_matmul").ring_ag_gemm(_line(n), 2 * n, 4, 3), _line(n)), _line(n))
    yield Shipped("host_sum", schedule(host_sum(3, 4, torch.float32), one), one)
    yield Shipped("ring_ag_gemm on 4", schedule(ring_ag_gemm(_line(4), 8, 4, 3), _line(4)), _line(4))
    for n, chunks in ((2, 4), (3, 3)):
        p = collective_ag_gemm(_line(n), n * chunks, 4, 3, chunks)
        yield Shipped(f"collective_ag_gemm on {n} in {chunks}", schedule(p, _line(n)), _line(n))
    for name, (text, size, dims) in RIGHT.items():
        if dims is None:
            p = program(text)
            mesh = resolve_mesh(p, size)
            yield Shipped(name, schedule(p, mesh), mesh)
