"""Every row of the op table that has an expression or a fold, in every dtype, against torch's own result on the same dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hostir.dispatch import KernelExecutor
from hostir.dispatch.evaluate import evaluator
from hostir.errors import BuildError, InputError
from hostir.graph.fusion import Fusion
from hostir.graph.table import TABLE, apply
from hostir.kernels.composites import COMPOSITES, VIEWS
from hostir.torch_types import to_torch
from hostir.types import DTYPES
from tests.kernels.support import TOLERANCE

KINDS = ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool")
POINTWISE = [r.name for r in TABLE.values() if r.pointwise and r.triton and r.name not in COMPOSITES]
REDUCTIONS = ["sum", "mean", "amax", "amin", "prod", "any", "all", "var", "argmax", "argmin", "softmax", "log_softmax"]


def data(dtype: torch.dtype, shape: tuple[int, ...], special: bool = True) -> torch.Tensor:
    """Random elements, for floats with NaN, infinities and both zeros among them."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(max(torch.iinfo(dtype).min, -20), 20, shape, dtype=dtype)
    x = (torch.randn(shape, dtype=torch.float64) * 3).to(dtype)
    if special:
        x.view(-1)[:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0]).to(dtype)
    return x


def built(name: str, d: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any]) -> Fusion | None:
    f = Fusion()
    dtypes = [torch.bool if p.name == "cond" else to_torch(DTYPES[d]) for p in TABLE[name].operands]
    xs = [f.input(s, dt) for s, dt in zip(shapes, dtypes, strict=False)]
    try:
        f.output(apply(f, name, xs, attrs)[0])
    except BuildError:
        return None  # torch refuses this dtype too
    return f


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_rows_follow_torch(name: str) -> None:
    row = TABLE[name]
    seen = 0
    for d in KINDS:
        attrs: dict[str, Any] = {"clamp": {"low": -1, "high": 2}}.get(name, {})
        f = built(name, d, [(4, 9)] * len(row.operands), attrs)
        if f is None or not KernelExecutor.supports(f):
            continue
        args = [data(to_torch(x.dtype), (4, 9)) for x in f.inputs]
        if name in ("floor_divide", "remainder", "fmod") and not args[1].dtype.is_floating_point:
            args[1][args[1] == 0] = 3
        if name == "pow" and not args[1].dtype.is_floating_point:
            args[1] = args[1].abs()
        if name == "gelu":
            args[0] = torch.where(args[0].isinf(), 1.0, args[0]).to(args[0].dtype)  # torch on the CPU: NaN
        try:
            (want,) = evaluator(f).run(args)
        except InputError:
            continue  # not implemented in torch for this dtype
        (got,) = KernelExecutor().compile(f).run(args)
        torch.testing.assert_close(got, want, equal_nan=True, msg=lambda m, d=d: f"{name} of {d}: {m}")
        seen += 1
    assert seen


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_reductions_follow_torch(name: str, dim: int) -> None:
    seen = 0
    for d in KINDS:
        attrs: dict[str, Any] = {"dim": dim} if name in ("argmax", "argmin", "softmax", "log_softmax") else {"dims": (dim,)}
        f = built(name, d, [(3, 70, 9)], attrs)
        if f is None or not KernelExecutor.supports(f):
            continue
        x = data(to_torch(DTYPES[d]), (3, 70, 9))
        if name == "prod":
            x = torch.where(x == 0, 1, x.sign() if x.dtype.is_floating_point else x).to(x.dtype)
        want = torch.empty(0)
        try:
            (want,) = evaluator(f).run([x])
        except InputError:
            continue
        (got,) = KernelExecutor().compile(f).run([x])
        assert got.dtype == want.dtype
        rtol, atol = TOLERANCE.get(got.dtype, (0.0, 0.0))
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, d=d: f"{name} of {d}: {m}")
        seen += 1
    assert seen


def test_every_row_is_generated_or_refused_with_a_reason() -> None:
    from hostir.kernels.lower import why_not

    for name, row in TABLE.items():
        f = Fusion()
        x = f.input((4, 4), torch.float32)
        out = f.add(name, [x] * max(len(row.operands), 1), [], [x.known])[0]
        f.output(out)
        generated = name in VIEWS or name in COMPOSITES or (row.pointwise and bool(row.triton))
        if not generated:
            assert why_not(f), name
