"""The launch text for each of Triton's launchers, checked against entry points that only record: what a GPU would be handed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hostir.kernels import launch, runner
from hostir.kernels.launch import Loaded
from hostir.kernels.plan import Plan
from hostir.kernels.source import Int, Pointer, Source
from hostir.types import DTYPES
from tests.kernels.compiling import plan
from tests.kernels.support import fusion

DEVICE = torch.device("cuda", 0)


def stub(kind: str, calls: list[tuple[Any, ...]]) -> Loaded:
    """A kernel whose launcher has the interface of one Triton."""
    fields: dict[str, Any] = {
        "launch": lambda *a: calls.append(a), "launch_cooperative_grid": False, "launch_pdl": False,
        "global_scratch_size": 0, "profile_scratch_size": 0,
    }  # fmt: skip
    if kind == "shared":
        fields |= {"arg_annotations": "annotations", "kernel_signature": "signature"}
    if kind == "unknown":
        del fields["launch_pdl"]
    if kind == "scratch":
        fields["global_scratch_size"] = 128

    class Compiled:
        function, packed_metadata = 77, (4, 1, 0)

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *a, stream: calls.append(("public", grid, stream, *a))

    k: Loaded = object.__new__(Loaded)
    k.compiled, k.launcher = Compiled(), SimpleNamespace(**fields)
    k.why_slow = k._why_slow()
    return k


@pytest.fixture(autouse=True)
def on_device_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "current_stream", lambda: lambda index: 1000 + index)
    monkeypatch.setattr(launch, "current_device", lambda: lambda: 0)


def made(kind: str) -> tuple[Any, Plan, list[tuple[Any, ...]], Loaded]:
    x = torch.arange(2048.0)
    f = fusion(lambda x, k: x * k, x, 2.5)
    p = plan(f, x, None)
    calls: list[tuple[Any, ...]] = []
    return f, p, calls, stub(kind, calls)


def arguments(source: Source, x: torch.Tensor, out: torch.Tensor, k: float) -> list[Any]:
    buffers = {0: x, 2: out}
    return [buffers[a.buffer].data_ptr() if isinstance(a, Pointer) else a.value if isinstance(a, Int) else k for a in source.arguments]


@pytest.mark.parametrize("kind", ["own", "shared", "unknown", "scratch"])
def test_a_launch_hands_over_grid_stream_function_and_arguments(kind: str) -> None:
    f, p, calls, k = made(kind)
    x, out = torch.arange(2048.0), torch.empty(2048)
    (source,) = p.sources
    run = runner.runner(f, p, DEVICE, [k], [True], frozenset())
    assert run([x, 2.5], [out], (x.data_ptr(),), (out.data_ptr(),))[0] is out
    runner.bound(f, p, DEVICE, [k], [x, 2.5], [out])()
    runner.bound(f, p, DEVICE, [k], [x, 2.5], [out])(4.0)
    n = source.programs
    for call, number in zip(calls, (2.5, 2.5, 4.0), strict=True):
        given = arguments(source, x, out, number)
        if kind == "own":
            assert call == (n, 1, 1, 1000, 77, False, False, None, None, (4, 1, 0), None, None, None, *given)
        elif kind == "shared":
            assert call == (n, 1, 1, 1000, 77, False, False, (4, 1, 0), None, None, None, None, None, "annotations", "signature", tuple(given))
        else:
            assert call == ("public", (n, 1, 1), 1000, *given)
    assert (k.why_slow is None) == (kind in ("own", "shared"))


def test_an_offset_into_a_buffer_is_added_in_bytes() -> None:
    source = Source("s", "", (Pointer(0, 3, DTYPES["bf16"]), Pointer(1, 0, DTYPES["f32"])), 1, 1, False)
    calls: list[tuple[Any, ...]] = []
    x = torch.arange(8.0)
    f = fusion(lambda x: x + 1, x)
    p = Plan(sources=[source])
    runner.runner(f, p, DEVICE, [stub("own", calls)], [True], frozenset())([x], [x], (64,), (128,))
    assert calls[0][-2:] == (64 + 6, 128)
