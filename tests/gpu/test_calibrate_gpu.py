"""Calibration on a GPU: the device's own numbers come out, and the model orders its own measurements as they were."""

from __future__ import annotations

import pytest
import torch

import hostir as hir
from hostir.runtime.calibrate import Sizes, calibrate

SIZES = Sizes(((2048, 2048, 2048), (4096, 4096, 4096)), ("bf16",), copy_bytes=256 << 20, transfer_bytes=64 << 20, rounds=5)


@pytest.fixture(scope="module")
def found():
    return calibrate("cuda", SIZES)


def test_the_machine_is_this_gpu(found) -> None:
    properties = torch.cuda.get_device_properties(0)
    assert found.machine.name == properties.name
    assert found.machine.num_sms == properties.multi_processor_count
    assert found.machine.tiled
    assert min(found.machine.memory, found.machine.kernel, found.machine.issue, found.machine.pcie.bandwidth) > 0
    assert found.machine.launch >= 0


def test_memory_is_faster_than_the_host_link(found) -> None:
    assert found.machine.memory > found.machine.pcie.bandwidth


def test_a_product_of_eight_times_the_work_is_predicted_and_measured_longer(found) -> None:
    small, large = (p for p in found.points if p.what.startswith("matmul"))
    assert large.measured > small.measured
    assert large.predicted > small.predicted


def test_programs_simulate_on_it(found) -> None:
    p = hir.parse("program @p(%x: f32[n]) {\n %y = alloc f32[n]\n %y <- copy(%x)\n return %y\n}")
    assert hir.simulate(p, found.machine, dims={"n": 1 << 20}).makespan > 0
