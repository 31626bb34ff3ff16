"""Calibration on the CPU with tiny sizes: every number is measured, fits what the model then predicts, and survives its file."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import torch

import hostir as hir
from hostir.runtime import calibrate as module
from hostir.runtime.calibrate import Point, Sizes, calibrate

TINY = Sizes(((32, 48, 64), (64, 32, 16), (48, 48, 48)), ("f32", "bf16"), copy_bytes=1 << 16, transfer_bytes=1 << 14, chain=4, rounds=2)


def test_every_number_of_the_machine_is_there_and_the_median_product_fits() -> None:
    found = calibrate("cpu", TINY)
    machine = found.machine
    assert machine.name == "this cpu"
    assert min(machine.memory, machine.kernel, machine.issue, machine.pcie.bandwidth, *machine.matmul_flops.values()) > 0
    assert set(machine.matmul_flops) == set(hir.Machine.cpu().matmul_flops)
    assert machine.nvlink == hir.Machine.cpu().nvlink  # one device says nothing of links between several
    assert [p.what for p in found.points[:2]] == ["copy", "pointwise a + b"]
    for dtype in TINY.dtypes:
        points = [p for p in found.points if p.what.startswith(f"matmul {dtype} ")]
        rates = [2 * m * n * k / p.measured for p, (m, n, k) in zip(points, TINY.products, strict=True)]
        assert machine.matmul_flops[dtype] == pytest.approx(median(rates))


def test_dtypes_that_were_not_measured_keep_their_proportion() -> None:
    preset = hir.Machine.cpu().matmul_flops
    m = calibrate("cpu", Sizes(((32, 32, 32),), ("f32",), 1 << 12, 1 << 12, chain=2, rounds=1)).machine
    assert m.matmul_flops["f64"] / m.matmul_flops["f32"] == pytest.approx(preset["f64"] / preset["f32"])


def test_machine_calibrate_measures_here_and_writes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Sizes, "of", staticmethod(lambda device: TINY))
    found = hir.Machine.calibrate("cpu", save=tmp_path / "m.json")
    assert hir.Machine.load(tmp_path / "m.json") == found
    assert hir.simulate(hir.parse("program @p(%x: f32[64]) {\n %y = alloc f32[64]\n %y <- copy(%x)\n return %y\n}"), found).makespan > 0


def test_without_a_gpu_the_cpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert calibrate(sizes=TINY).machine.name == "this cpu"


def test_a_point_compares_prediction_and_measurement() -> None:
    assert Point("copy", measured=2.0, predicted=1.0).ratio == 0.5
