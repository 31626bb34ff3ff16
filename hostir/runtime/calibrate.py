"""The numbers of a ``Machine``, measured on the device at hand, and how well the model meets its own measurements afterwards.

Each rate is fitted to what the cost model would predict with it (whole tiles, waves), so that prediction and measurement agree at the
sizes that were tried. What one device cannot measure, the links between devices, stays as in the nearest preset.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Final

import torch

from hostir.sim.machine import Link, Machine
from hostir.sim.work import Work
from hostir.types import DTYPES, dtype_of


@dataclass(frozen=True)
class Sizes:
    """What is measured: products [m, n, k], bytes of each tensor of a copy and of a transfer, kernels in a row, rounds of everything."""

    products: tuple[tuple[int, int, int], ...]
    dtypes: tuple[str, ...]
    copy_bytes: int
    transfer_bytes: int
    chain: int = 64
    rounds: int = 15

    @staticmethod
    def of(device: torch.device) -> Sizes:
        if device.type == "cuda":
            products = ((8192, 8192, 8192), (4096, 4096, 4096), (8192, 3584, 8192), (1024, 3584, 8192), (8192, 8192, 1024), (512, 4096, 4096))
            return Sizes(products, ("bf16", "f16", "f32"), 1 << 30, 256 << 20)
        return Sizes(((512, 512, 512), (256, 1024, 512)), ("f32", "bf16"), 32 << 20, 16 << 20, rounds=7)


@dataclass(frozen=True)
class Point:
    """One measurement in seconds, and what the calibrated machine predicts for it."""

    what: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over measured: 1 is right, less is too hopeful."""
        return self.predicted / self.measured


@dataclass(frozen=True)
class Calibration:
    machine: Machine
    points: tuple[Point, ...]


_NEAREST: Final[Mapping[str, Callable[[], Machine]]] = {"H100": Machine.h100, "H200": Machine.h200}


def calibrate(device: torch.device | str | None = None, sizes: Sizes | None = None) -> Calibration:
    """Measure ``device`` (default: the current GPU, else the CPU); see ``Machine.calibrate``. The device should be idle."""
    where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    with torch.cuda.device(where) if where.type == "cuda" else nullcontext():
        return _Meter(where, sizes or Sizes.of(where)).calibration()


class _Meter:
    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device = device
        self.sizes = sizes
        self.cuda = device.type == "cuda"

    def calibration(self) -> Calibration:
        machine = self._base()
        copy, pointwise = self._moving()
        machine = replace(machine, memory=2 * self.sizes.copy_bytes / copy)
        issue, launch, kernel = self._small()
        machine = replace(machine, issue=issue, launch=launch, kernel=kernel, pcie=self._transfer())
        products = [(d, p, self._product(d, p)) for d in self.sizes.dtypes for p in self.sizes.products]
        machine = replace(machine, matmul_flops=self._rates(machine, products))
        points = [
            Point("copy", copy, 2 * self.sizes.copy_bytes / machine.memory),
            Point("pointwise a + b", pointwise, machine.kernel_cost(_moving(3 * self.sizes.copy_bytes))[0]),
            *(Point(f"matmul {d} {'x'.join(map(str, p))}", t, machine.kernel_cost(_product(d, p))[0]) for d, p, t in products),
        ]
        return Calibration(machine, tuple(points))

    def _base(self) -> Machine:
        if not self.cuda:
            return replace(Machine.cpu(), name="this cpu")
        found = torch.cuda.get_device_properties(self.device)
        near = next((make for part, make in _NEAREST.items() if part in found.name), Machine.h200)
        return replace(near(), name=found.name, num_sms=found.multi_processor_count)

    # ---- time

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _seconds(self, run: Callable[[int], object], repeats: int = 1) -> float:
        """The median time of ``run(i)`` on the device; ``i`` counts up, so that inputs can take turns."""
        for i in range(3):
            run(i)
        self._wait()
        found = []
        for r in range(self.sizes.rounds):
            if self.cuda:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                for i in range(repeats):
                    run(r * repeats + i)
                end.record()
                end.synchronize()
                found.append(float(start.elapsed_time(end)) / 1e3 / repeats)
            else:
                since = time.perf_counter()
                for i in range(repeats):
                    run(r * repeats + i)
                found.append((time.perf_counter() - since) / repeats)
        return statistics.median(found)

    # ---- what is measured

    def _random(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype)

    def _moving(self) -> tuple[float, float]:
        """Seconds of a copy and of a + b, of large tensors."""
        a, b, c = (torch.ones(self.sizes.copy_bytes // 4, device=self.device) for _ in range(3))
        return self._seconds(lambda _: b.copy_(a)), self._seconds(lambda _: torch.add(a, b, out=c))

    def _small(self) -> tuple[float, float, float]:
        """Of a small operation: the host's time to issue it, from there to its start on an idle device, its time on the device."""
        x, y = self._random((64, 64), torch.float32), self._random((64, 64), torch.float32)
        z = torch.empty_like(x)

        def chain() -> None:
            for _ in range(self.sizes.chain // 2):
                torch.mm(x, y, out=z)
                torch.add(x, y, out=z)

        chain()
        issue, alone, idle = [], [], []
        for _ in range(self.sizes.rounds):
            self._wait()
            since = time.perf_counter()
            chain()
            issue.append((time.perf_counter() - since) / (self.sizes.chain // 2 * 2))
            self._wait()
            since = time.perf_counter()
            torch.add(x, y, out=z)
            self._wait()
            alone.append(time.perf_counter() - since)
            since = time.perf_counter()
            self._wait()
            idle.append(time.perf_counter() - since)
        host = statistics.median(issue)
        if not self.cuda:  # there the host itself computes
            return min(host, 3e-6), 0.0, host
        kernel = self._graphed(chain) / (self.sizes.chain // 2 * 2)
        return host, max(0.0, statistics.median(alone) - statistics.median(idle) - host - kernel), kernel

    def _graphed(self, chain: Callable[[], None]) -> float:
        """Seconds of the chain when the host does not hold it back."""
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(self.device)
        with torch.cuda.stream(side):
            chain()
        self._wait()
        with torch.cuda.graph(graph, stream=side):
            chain()
        return self._seconds(lambda _: graph.replay())

    def _transfer(self) -> Link:
        """To and from pinned host memory: the slower direction."""
        host = torch.ones(self.sizes.transfer_bytes, dtype=torch.uint8, pin_memory=self.cuda)
        device = torch.empty_like(host, device=self.device)
        large = max(self._seconds(lambda _: device.copy_(host, non_blocking=True)), self._seconds(lambda _: host.copy_(device, non_blocking=True)))
        alpha = self._seconds(lambda _: device[:4096].copy_(host[:4096], non_blocking=True))
        return Link(alpha, self.sizes.transfer_bytes / max(large - alpha, 1e-9))

    def _product(self, dtype: str, sizes: tuple[int, int, int]) -> float:
        """Seconds of a matrix product on random data; inputs take turns, so that no cache serves them."""
        m, n, k = sizes
        kind = getattr(torch, dtype_of(dtype).torch_name)
        sets = [(self._random((m, k), kind), self._random((k, n), kind), torch.empty(m, n, device=self.device, dtype=kind)) for _ in range(2)]
        return self._seconds(lambda i: torch.mm(sets[i % 2][0], sets[i % 2][1], out=sets[i % 2][2]), repeats=2)

    def _rates(self, machine: Machine, products: Sequence[tuple[str, tuple[int, int, int], float]]) -> dict[str, float]:
        """FLOP/s by dtype such that the model's times are the measured ones, in the median; other dtypes in the preset's proportion."""
        preset = machine.matmul_flops
        rates = {}
        for dtype in self.sizes.dtypes:
            guess = preset.get(dtype, preset["f32"])
            rates[dtype] = statistics.median(guess * machine.matmul(_product(d, p))[0] / t for d, p, t in products if d == dtype)
        scale = statistics.median(rates[d] / preset[d] for d in rates if d in preset) if any(d in preset for d in rates) else 1.0
        return {**{d: r * scale for d, r in preset.items()}, **rates}


def _moving(num_bytes: float) -> Work:
    return Work("pointwise", num_bytes, num_bytes / 4)


def _product(dtype: str, sizes: tuple[int, int, int]) -> Work:
    m, n, k = sizes
    return Work("matmul", float((m * k + k * n + m * n) * DTYPES[dtype].itemsize), m * n, dtype, m, n, k)
