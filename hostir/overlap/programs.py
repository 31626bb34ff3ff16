"""Host programs that overlap communication with computation, or accumulate over a loop. Each is a plain use of the builder."""

from __future__ import annotations

from typing import Any

import torch

from hostir.build import Program
from hostir.mesh import Mesh
from hostir.trace import unit


@unit
def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``c + a * b`` in c's dtype."""
    return c + a.to(c.dtype) * b.to(c.dtype)


def host_sum(num_terms: int, n: int, dtype: Any = torch.bfloat16) -> Program:
    """c = Σ_h a[h] · b[h] over a host loop: a, b [num_terms, n] of ``dtype``, c [n] f32, updated in place."""
    with Program("host_sum") as p:
        a = p.input("a", (num_terms, n), dtype)
        b = p.input("b", (num_terms, n), dtype)
        c = p.zeros((n,), torch.float32, name="c")
        with p.loop(num_terms, name="h") as h:
            p.call(fma, a[h], b[h], c, out=c)
        p.output(c)
    return p


def ring_ag_gemm(mesh: Mesh, m: int, k: int, n: int, dtype: Any = torch.float32) -> Program:
    """y = allgather(x) @ w on a ring: x [m / d, k] and w [k, n] per rank, y [d, m / d, n] in rank order of the rows."""
    d = mesh.size
    with Program("ring_ag_gemm", mesh=mesh) as p:
        x = p.input("x", (m // d, k), dtype)
        w = p.input("w", (k, n), dtype)
        y = p.empty((d, m // d, n), dtype, name="y")
        buf = p.empty((d, m // d, k), dtype, name="buf")
        r = p.rank()
        p.copy(x, out=buf[0])
        with p.loop(d, name="j") as j:
            with p.if_(j < d - 1):
                p.permute(buf[j], out=buf[j + 1], to=(r + 1) % d, source=(r - 1) % d, on="comm")
            p.matmul(buf[j], w, out=y[(r - j) % d])
        p.output(y)
    return p


def collective_ag_gemm(mesh: Mesh, m: int, k: int, n: int, chunks: int, dtype: Any = torch.float32) -> Program:
    """y = allgather(x) @ w in ``chunks`` allgathers: x [chunks, m / (d · chunks), k] and w [k, n] per rank,
    y [chunks, m / chunks, n]: chunk, then rank, then row."""
    d = mesh.size
    with Program("collective_ag_gemm", mesh=mesh) as p:
        x = p.input("x", (chunks, m // d // chunks, k), dtype)
        w = p.input("w", (k, n), dtype)
        y = p.empty((chunks, d * (m // d // chunks), n), dtype, name="y")
        with p.loop(chunks, name="i") as i:
            rows = p.empty((d * (m // d // chunks), k), dtype, name="rows")
            p.allgather(x[i], out=rows, on="comm")
            p.matmul(rows, w, out=y[i])
        p.output(y)
    return p
