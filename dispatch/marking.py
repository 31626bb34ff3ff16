"""Which outputs ATen evaluates: a pure function of the fusion and the device, applied before executors are asked."""

from __future__ import annotations

import os
from copy import copy
from dataclasses import replace

from hostir.graph.fusion import Fusion, TensorView
from hostir.graph.table import TABLE


def is_view_of_input(tv: TensorView) -> bool:
    """Whether only view operations lie between ``tv`` and an input."""
    while tv.definition is not None:
        row = TABLE.get(tv.definition.name)
        if row is None or not row.view:
            return False
        tv = next(iter(tv.definition.reads()))
    return True


def has_triton_target(device: str | None) -> bool:
    """Whether kernels can be generated for a device type: for CUDA, and for the CPU under Triton's interpreter (TRITON_INTERPRET=1)."""
    kind = "" if device is None else device.partition(":")[0]
    return kind == "cuda" or (kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def marked(fusion: Fusion, device: str | None) -> Fusion:
    """``fusion`` with ``evaluate`` set on the outputs that ATen computes on ``device``: library calls (GEMM, attention, opaque
    operations) where they end a fusion, and every output where there is no Triton target."""
    out = copy(fusion)
    everything = not has_triton_target(device)
    out.results = [replace(r, evaluate=everything or (r.alias is None and _is_library(r.value))) for r in fusion.results]
    return out


def _is_library(tv: TensorView) -> bool:
    op = tv.definition
    if op is None:
        return False
    row = TABLE.get(op.name)
    return row is None or row.library
