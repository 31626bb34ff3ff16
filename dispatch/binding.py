"""A call's arguments against a program's parameters: everything that can be refused is refused here, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hostir.errors import HostIrError, InputError
from hostir.ir.nodes import Buffer, Program
from hostir.ir.walk import Scope
from hostir.mesh import Mesh
from hostir.torch_types import to_torch
from hostir.types import Sym, TensorType, Var, dtype_of


@dataclass(frozen=True, slots=True)
class Binding:
    """Values of a program's parameters for one run. ``dims`` gives each symbol its size."""

    tensors: Mapping[Buffer, torch.Tensor]
    scalars: Mapping[Var, int | float | bool]
    dims: Mapping[str, int]
    device: torch.device

    def shapes(self) -> str:
        """The facts that ranks must agree on, as text."""
        return ", ".join([f"{k} = {v}" for k, v in sorted(self.dims.items())] + [f"%{v.name} = {x!r}" for v, x in self.scalars.items()])


def _describe(t: Any) -> str:
    if not isinstance(t, torch.Tensor):
        return f"{type(t).__name__} {t!r}" if not isinstance(t, (list, tuple, dict)) else type(t).__name__
    return f"{dtype_of(t.dtype) if str(t.dtype) in _KNOWN else t.dtype}{list(t.shape)} on {t.device}"


_KNOWN = frozenset(
    f"torch.{n}" for n in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "uint8",
        "bool", "complex64",
    )
)  # fmt: skip


def bind(p: Program, args: Sequence[Any], mesh: Mesh, rank: int, device: torch.device | None) -> Binding:
    """Match ``args`` with the parameters of ``p``. InputError names the parameter, what was expected and what came."""
    names = ", ".join(f"%{x.name}" for x in p.params)
    if len(args) != len(p.params):
        raise InputError(f"the program takes {len(p.params)} arguments", program=p.name, expected=names or "none", got=f"{len(args)} arguments")
    tensors: dict[Buffer, torch.Tensor] = {}
    scalars: dict[Var, int | float | bool] = {}
    dims: dict[str, int] = {}
    for position, (x, a) in enumerate(zip(p.params, args, strict=True)):
        if isinstance(x, Var):
            scalars[x] = _scalar(p, x, a)
        else:
            tensors[x] = _tensor(p, x, a, position, dims, tensors)
    on = _device(p, tensors, device)
    scope = Scope(mesh, rank, dims, scalars)
    for x, t in tensors.items():
        try:
            want = tuple(scope.number(d) for d in x.type.dims)
        except HostIrError as e:
            raise e.with_context(program=p.name, statement=f"input %{x.name}: {x.type}", rank=rank) from None
        if want != tuple(t.shape):
            raise InputError(f"%{x.name} has another shape", program=p.name, expected=f"{x.type}, here {list(want)}", got=_describe(t), rank=rank)
    return Binding(tensors, scalars, dims, on)


def _scalar(p: Program, x: Var, a: Any) -> int | float | bool:
    if isinstance(a, torch.Tensor) and a.dim() == 0 and a.device.type == "cpu":
        a = a.item()
    fits = isinstance(a, bool) if x.kind == "bool" else (isinstance(a, (int, float) if x.kind == "float" else int) and not isinstance(a, bool))
    if not fits:
        raise InputError(f"%{x.name} is a host {x.kind}", program=p.name, expected=x.kind, got=_describe(a))
    return float(a) if x.kind == "float" else a


def _tensor(p: Program, x: Buffer, a: Any, position: int, dims: dict[str, int], seen: Mapping[Buffer, torch.Tensor]) -> torch.Tensor:
    where = f"argument {position + 1} (%{x.name})"
    if not isinstance(a, torch.Tensor):
        raise InputError(f"{where} is no tensor", program=p.name, expected=x.type, got=_describe(a))
    if a.dtype != to_torch(x.type.dtype):
        raise InputError(f"{where} has another dtype", program=p.name, expected=x.type, got=_describe(a), cure=f".to({to_torch(x.type.dtype)})")
    if a.dim() != len(x.type.dims):
        raise InputError(f"{where} has another number of dimensions", program=p.name, expected=x.type, got=_describe(a))
    if a.layout != torch.strided:
        raise InputError(f"{where} is not strided", program=p.name, expected="torch.strided", got=a.layout, cure=".to_dense()")
    if a.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"{where} requires grad, and host programs are not differentiable", program=p.name,
            cure=".detach() it, or run under torch.no_grad(); a torch.autograd.Function can wrap two programs, forward and backward",
        )  # fmt: skip
    for position_, (d, n) in enumerate(zip(x.type.dims, a.shape, strict=True)):
        if isinstance(d, Sym):
            if dims.setdefault(d.name, int(n)) != n:
                raise InputError(
                    f"{where}: size {position_} is {d.name}, which another input has bound", program=p.name,
                    expected=f"{d.name} = {dims[d.name]}", got=_describe(a),
                )  # fmt: skip
    if x in p.inout:
        if any(s == 0 and n > 1 for s, n in zip(a.stride(), a.shape, strict=True)):
            raise InputError(f"{where} is expanded, so it cannot be written", program=p.name, got=f"strides {a.stride()}", cure=".clone()")
    for other, t in seen.items():
        if (x in p.inout or other in p.inout) and shares_memory(a, t):
            raise InputError(f"%{other.name} and %{x.name} share memory, and one of them is written", program=p.name, cure=".clone() one of them")
    return a


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the byte ranges of two tensors overlap (which strided neighbours may do without sharing an element)."""
    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    (a0, a1), (b0, b1) = _span(a), _span(b)
    return a0 < b1 and b0 < a1


def _span(t: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _device(p: Program, tensors: Mapping[Buffer, torch.Tensor], wanted: torch.device | None) -> torch.device:
    devices = {x: t.device for x, t in tensors.items() if x.type.memory != "host"}
    on = wanted or next(iter(devices.values()), torch.device("cpu"))
    if on.type == "cuda" and on.index is None:
        on = torch.device("cuda", torch.cuda.current_device())
    for x, d in devices.items():
        if d != on:
            position = p.params.index(x) + 1
            raise InputError(
                f"argument {position} (%{x.name}) is on {d}, the program runs on {on}", program=p.name, expected=on, got=d,
                cure=f'.to("{on}"), or pass a host number with p.scalar',
            )  # fmt: skip
    return on


def check_type(t: torch.Tensor, want: TensorType, shape: Sequence[int], name: str, program: str) -> None:
    """A preallocated output must have exactly the result's dtype and shape."""
    if t.dtype != to_torch(want.dtype) or tuple(t.shape) != tuple(shape):
        raise InputError(f"the output for %{name} has another type", program=program, expected=f"{want.dtype}{list(shape)}", got=_describe(t))
