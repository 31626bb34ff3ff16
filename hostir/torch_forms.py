"""What the ATen forms of the op table may call: ``torch``, ``F``, and ``h``, the few functions that torch lacks in that shape.

A form is an expression over a row's parameters. ``callable_form`` makes a function of it; the evaluator writes it into generated code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812

from hostir.graph.row import Row


def _broadcast(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    for d in sorted(dims):
        x = x.unsqueeze(d)
    return x


def _slice(x: torch.Tensor, dim: int, start: int, stop: int | None, step: int) -> torch.Tensor:
    """``x[start:stop:step]`` along ``dim``; past the end is an error, not a shorter result."""
    size = x.shape[dim]
    stop = size if stop is None else stop
    if not 0 <= start <= size or not 0 <= stop <= size:
        raise IndexError(f"slice {start} : {stop} goes past the end of dim {dim}, which has size {size}")
    part = x.narrow(dim, start, max(stop - start, 0))
    return part if step == 1 else torch.ops.aten.slice.Tensor(part, dim, 0, None, step)


def _each(reduce: Callable[..., torch.Tensor], x: torch.Tensor, dims: Sequence[int], keepdim: bool, **rest: Any) -> torch.Tensor:
    for d in sorted(dims, reverse=True):
        x = reduce(x, d, keepdim, **rest)
    return x


def _prod(x: torch.Tensor, dims: Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    if dims is None:
        out = torch.prod(x, dtype=dtype)
        return out.reshape((1,) * x.dim()) if keepdim else out
    return _each(torch.prod, x, dims, keepdim, dtype=dtype)


def _any(x: torch.Tensor, dims: Sequence[int] | None, keepdim: bool) -> torch.Tensor:
    return torch.any(x, tuple(range(x.dim())) if dims is None else tuple(dims), keepdim)


def _all(x: torch.Tensor, dims: Sequence[int] | None, keepdim: bool) -> torch.Tensor:
    return torch.all(x, tuple(range(x.dim())) if dims is None else tuple(dims), keepdim)


def _linear_out(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, o: torch.Tensor) -> torch.Tensor:
    if x.dim() == 2 and w.dim() == 2:
        return torch.mm(x, w.t(), out=o) if b is None else torch.addmm(b, x, w.t(), out=o)
    if b is None and w.dim() == 2:
        return torch.matmul(x, w.t(), out=o)
    return o.copy_(F.linear(x, w, b))


HELPERS: Final = SimpleNamespace(broadcast=_broadcast, slice=_slice, prod=_prod, any=_any, all=_all, linear_out=_linear_out)
GLOBALS: Final[Mapping[str, Any]] = MappingProxyType({"torch": torch, "F": F, "h": HELPERS})


def callable_form(row: Row) -> Callable[..., Any]:
    """The row's ATen form as a function of its parameters, by name, and ``device`` (default cpu)."""
    names = ", ".join(p.name for p in row.params)
    device = ", device='cpu'" if "device" in row.aten else ""
    made: Callable[..., Any] = eval(f"lambda {names}{device}: {row.aten}", dict(GLOBALS))
    return made
