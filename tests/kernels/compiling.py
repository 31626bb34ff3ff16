"""Kernels compiled for a GPU that is not there: the compiler and the assembler come with Triton."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hostir as hir
from hostir.graph.fusion import Fusion
from hostir.kernels import jit
from hostir.kernels.plan import Plan, Shape, make
from hostir.kernels.segment import layout_of
from hostir.kernels.tiling import Target


@dataclass(frozen=True)
class Report:
    """What the assembler says of one kernel."""

    name: str
    num_regs: int
    spill_bytes: int
    shared: int
    ptx: str


def plan(
    fn: Callable[..., Any] | Fusion, *args: torch.Tensor | None, target: Target | None = None, outs: Sequence[torch.Tensor | None] | None = None
) -> Plan:
    """The plan on a GPU for arguments like these (meta tensors will do; None stands for a number)."""
    f = fn if isinstance(fn, Fusion) else hir.trace(fn, *(hir.spec(tuple(a.shape), a.dtype) for a in args if a is not None))
    given = tuple(None if o is None else layout_of(o) for o in outs or [None] * len(f.results))
    return make(f, Shape(tuple(None if a is None else layout_of(a) for a in args), given), target or Target(interpret=False))


def compiled(p: Plan, arch: int, folder: Path) -> list[Report]:
    """Every kernel of a plan compiled for ``sm_arch``, all pointers aligned."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas

    found = []
    for s in p.sources:
        k = jit.compile_for(jit.function(s), s, jit.alignment(s, {}), GPUTarget("cuda", arch, 32))
        ptx = folder / "kernel.ptx"
        ptx.write_text(k.asm["ptx"])
        name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        run = subprocess.run(
            [get_ptxas(arch).path, "-v", f"--gpu-name={name}", str(ptx), "-o", "/dev/null"], check=True, capture_output=True, text=True
        )
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", run.stderr)))
        (regs,) = re.findall(r"Used (\d+) registers", run.stderr)
        found.append(Report(s.name, int(regs), spills, k.metadata.shared, k.asm["ptx"]))
    return found
