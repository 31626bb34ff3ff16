"""What kernel tests share: a reference in f64, tensors in awkward layouts, and a run through the executor that compares the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import hostir as hir
from hostir.dispatch import KernelExecutor
from hostir.graph.fusion import Fusion, TensorView
from hostir.graph.table import TABLE, bound_of
from hostir.torch_forms import callable_form
from hostir.torch_types import to_torch
from hostir.types import DType, Expr, Leaf, Sym, Var, evaluate


def wide(t: Any) -> Any:
    """Floats as f64, everything else as it is."""
    return t.double() if isinstance(t, torch.Tensor) and t.dtype.is_floating_point else t


def reference(f: Fusion, args: Sequence[Any]) -> list[torch.Tensor]:
    """The results with every float computed in f64; only casts round."""
    of: dict[Any, Any] = {}
    numbers: dict[object, Any] = {}
    for p, a in zip(f.params, args, strict=True):
        of[id(p)] = wide(a)
        if isinstance(p, Var):
            numbers[id(p)] = a
        else:
            numbers |= {d.name: n for d, n in zip(p.known.dims, a.shape, strict=True) if isinstance(d, Sym)}

    def env(leaf: Leaf) -> Any:
        return numbers[leaf.name] if isinstance(leaf, Sym) else numbers[id(leaf)]

    def value(v: Any) -> Any:
        if isinstance(v, TensorView):
            return of[id(v)]
        if isinstance(v, (tuple, list)):
            return [value(x) for x in v]
        if isinstance(v, Expr):
            return evaluate(v, env)
        return to_torch(v) if isinstance(v, DType) else v

    for op in f.ops:
        row = TABLE[op.name]
        values = {k: value(v) for k, v in bound_of(op.name, op.args, op.attrs).items()}
        if op.name == "rms_norm" and values["eps"] is None:
            values["eps"] = torch.finfo(to_torch(op.args[0].known.dtype) if op.args[0].known.dtype.itemsize > 2 else torch.float32).eps  # type: ignore[union-attr]
        for k, v in values.items():  # where torch takes only tensors
            if isinstance(v, (int, float)) and op.name in ("maximum", "minimum", "atan2", "logical_and", "logical_or", "logical_xor"):
                values[k] = torch.tensor(v, dtype=next(x.dtype for x in values.values() if isinstance(x, torch.Tensor)))
        made = callable_form(row)(**values)
        if op.name not in ("cast", "sum", "prod", "mean", "softmax", "log_softmax"):
            pass
        of[id(op.outs[0])] = wide(made)
    return [of[id(r.value)] for r in f.results]


TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2e-5, 2e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.2e-2, 1.2e-2),
}


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """``got`` has the dtype and agrees with the f64 ``want``: to the tolerance of the dtype, integers and NaNs exactly."""
    assert got.dtype == dtype
    assert got.shape == want.shape
    if not dtype.is_floating_point:
        torch.testing.assert_close(got, want.to(dtype), rtol=0, atol=0)
        return
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want.to(dtype).double(), rtol=rtol * scale, atol=atol * scale, equal_nan=True)


def fusion(fn: Callable[..., Any], *args: Any) -> Fusion:
    """``fn`` traced for these arguments."""
    kinds = {bool: "bool", int: "int", float: "float"}
    return hir.trace(fn, *(hir.spec(tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else kinds[type(a)] for a in args))


def check(f: Fusion, args: Sequence[Any], outs: Sequence[torch.Tensor] | None = None, scale: float = 1.0) -> KernelExecutor:
    """Run ``f`` through the kernel executor and compare every result with the reference."""
    answer = KernelExecutor.supports(f)
    assert answer, answer.why  # type: ignore[union-attr]
    want = [w.clone() for w in reference(f, args)]
    ex = KernelExecutor().compile(f, args)
    results = ex._run(args, outs)
    for r, got, w in zip(f.results, results, want, strict=True):
        close(got, w, to_torch(r.value.known.dtype), scale)
    return ex


def layouts(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """``t`` with its values unchanged, lying in memory in other ways."""
    found = {"dense": t}
    if t.dim() >= 2:
        found["transposed"] = t.transpose(-1, -2).contiguous().transpose(-1, -2)
        order = list(range(t.dim()))[::-1]
        found["reversed"] = t.permute(order).contiguous().permute(order)
    if t.dim() >= 1:
        padded = torch.empty([2 * n + 1 for n in t.shape], dtype=t.dtype)
        part = padded[tuple(slice(1, 2 * n + 1, 2) for n in t.shape)]
        found["strided"] = part.copy_(t)
    flat = torch.empty(t.numel() + 3, dtype=t.dtype)
    found["misaligned"] = flat[3:].view(t.shape).copy_(t) if t.numel() else t
    return found
