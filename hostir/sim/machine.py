"""A machine as numbers: how fast its devices multiply, move and launch, and how fast they reach each other.

The figures are rates that can be reached, not peaks, so that a prediction errs on the slow side. They come from data sheets where
nothing was measured and from ``Machine.calibrate()`` where it was; a file keeps them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from hostir.errors import InputError
from hostir.sim.work import Work

if TYPE_CHECKING:
    from hostir.ir.cohort import Move
    from hostir.sim.clock import Costs

PIPELINE_K: Final = 64  # filling and draining a tile costs about as much as so many elements of k
ATTENTION: Final = 0.6  # the part of a matmul's rate that fused attention reaches
WAVE_ELEMENTS: Final = 4096  # elements that keep one multiprocessor busy with other kernels than products
# Output tiles of a matrix product, and the part of the full rate that a multiprocessor reaches with them: small ones read more often.
TILES: Final = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.75), (64, 64, 0.55))
SPLITS: Final = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Link:
    """A way for data: ``alpha`` seconds before the first byte, then ``bandwidth`` bytes a second, in each direction."""

    alpha: float
    bandwidth: float

    def seconds(self, num_bytes: float) -> float:
        return self.alpha + num_bytes / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """``gpus_per_node`` devices that reach each other over ``nvlink`` and others over ``infiniband``; the number of nodes follows from
    the mesh: world rank r stands on node r // gpus_per_node.

    ``matmul_flops``: FLOP/s by dtype name (f32 stands in for those that are missing). ``memory``: bytes/s read and written by a copy.
    ``num_sms``: multiprocessors; ``tiled``: whether products come in whole tiles, in waves over them. ``kernel``: seconds that the smallest
    kernel takes; ``launch``: from the issue to the start on an idle device; ``issue``: of the host for each statement. ``pcie``: to and
    from pinned host memory. ``comm_share``: the part of the multiprocessors that a communication kernel takes from what runs beside it
    (0: copy engines do it).
    """

    name: str
    gpus_per_node: int
    matmul_flops: Mapping[str, float] = field(hash=False)
    memory: float
    num_sms: int
    tiled: bool
    kernel: float
    launch: float
    issue: float
    nvlink: Link
    pcie: Link
    infiniband: Link
    comm_share: float

    # ---- presets

    @classmethod
    def h200(cls) -> Self:
        """Nodes of 8 H200 (SXM, 141 GB) with NVSwitch and one 400 Gbit/s port each."""
        return cls(
            "h200",
            8,
            # bf16 measured on one H200 (torch 2.11, cuBLAS): 788e12 at best; 8192³ on random data, for long, runs at 679e12 to 690e12 because
            # of the power limit. The others by the same share (0.8) of the data sheet: dense f8 1979, fp16 and bf16 989, f64 67, f32 67.
            {"bf16": 788e12, "f16": 788e12, "f8e4m3": 1580e12, "f8e5m2": 1580e12, "i8": 1580e12, "f64": 53e12, "f32": 53e12},
            memory=4.1e12,  # measured: copies 3.95e12 to 4.08e12, a fused Triton kernel 4.29e12; data sheet 4.8e12 (HBM3e)
            num_sms=132,
            tiled=True,
            kernel=2.1e-6,  # measured: 24 small kernels in a CUDA graph take 50 µs
            launch=5e-6,
            issue=10e-6,  # measured on a slow CPU: torch.mm(out=) 17, add_ 9, a bound Triton launch 7.4, an event with its wait 12 µs
            nvlink=Link(3e-6, 370e9),  # data sheet: 450e9 each way; NCCL's large messages reach a little over 0.8 of it
            pcie=Link(8e-6, 55e9),  # measured: 55e9 each way, 50e9 in both at once
            infiniband=Link(8e-6, 46e9),  # data sheet: 400 Gbit/s = 50e9 each way
            comm_share=0.15,  # 20 of 132 multiprocessors; a GEMM chunk of 1.351 ms takes 1.556 under NCCL (published: 15 %)
        )

    @classmethod
    def h100(cls) -> Self:
        """Nodes of 8 H100 (SXM, 80 GB): the H200's processors and links with HBM3 (data sheet: 3.35e12, a copy reaches 0.86 of it)."""
        h200 = cls.h200()
        return cls(**{**{f.name: getattr(h200, f.name) for f in fields(h200)}, "name": "h100", "memory": 2.88e12})

    @classmethod
    def cpu(cls) -> Self:
        """Ranks that are processes of one machine, a core each, and talk through gloo."""
        gloo = Link(65e-6, 1.3e9)  # measured with 2 ranks: a message there and back 130 µs, 32 MB at 1.26e9 to 1.3e9
        # Measured on one core with AVX512 and AMX, the best of many: f32 101e9, f64 51e9, bf16 205e9, f16 (emulated) 1.7e9; copies 14e9
        # read and written; torch.add of [64, 64] in 1.4 µs.
        return cls(
            "cpu", 1 << 20, {"f32": 1.0e11, "f64": 5.0e10, "bf16": 2.0e11, "f16": 1.7e9}, memory=1.4e10, num_sms=1, tiled=False, kernel=1.4e-6,
            launch=0.0, issue=2e-6, nvlink=gloo, pcie=Link(1e-6, 7e9), infiniband=gloo, comm_share=0.3,
        )  # fmt: skip

    @classmethod
    def named(cls, name: str) -> Self:
        """A preset by name (``h200``, ``h100``, ``cpu``), or a file that ``save`` wrote."""
        presets = {"h200": cls.h200, "h100": cls.h100, "cpu": cls.cpu}
        if name in presets:
            return presets[name]()
        if not Path(name).exists():
            raise InputError(f"there is no machine {name!r}", expected=f"{', '.join(presets)}, or a file of Machine.save", got=name)
        return cls.load(name)

    @classmethod
    def calibrate(cls, device: Any = None, *, save: str | os.PathLike[str] | None = None) -> Machine:
        """Measure ``device`` (default: this process's GPU, else the CPU); links between devices stay those of the nearest preset.

        Takes about 10 seconds on a GPU, which should be idle. ``save`` also writes the file. Needs torch.
        """
        from hostir.runtime.calibrate import calibrate

        found = calibrate(device).machine
        if save is not None:
            found.save(save)
        return found

    # ---- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what ``save`` wrote. InputError where it is not that."""
        try:
            raw = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"{os.fspath(path)} cannot be read as a machine", got=error, cure="write it with Machine.save") from None
        names = [f.name for f in fields(cls)]
        if not isinstance(raw, dict) or sorted(raw) != sorted(names):
            got = ", ".join(raw) if isinstance(raw, dict) else type(raw).__name__
            raise InputError(f"{os.fspath(path)} is not a machine", expected=", ".join(names), got=got)
        values: dict[str, Any] = {k: Link(**v) if isinstance(v, dict) and set(v) == {"alpha", "bandwidth"} else v for k, v in raw.items()}
        if bad := [f.name for f in fields(cls) if not _fits(values[f.name], f.name)]:
            raise InputError(f"{os.fspath(path)} is not a machine: {bad[0]} has no such value", got=values[bad[0]])
        return cls(**values)

    # ---- kernels

    def matmul(self, w: Work) -> tuple[float, float]:
        """Seconds of a product's arithmetic in whole tiles and waves, with the best tile; and the part of the multiprocessors it fills."""
        rate = self.matmul_flops.get(w.dtype, self.matmul_flops["f32"])
        if not self.tiled:
            return w.flops / rate, 1.0
        best = (math.inf, 1.0)
        for rows, columns, efficiency in TILES:
            tiles = math.ceil(w.m / rows) * math.ceil(w.n / columns) * w.batch
            for split in SPLITS:
                if split > 1 and tiles * split > 2 * self.num_sms:
                    break
                one = 2.0 * rows * columns * (w.k / split + PIPELINE_K) / (rate * efficiency / self.num_sms)
                waves = math.ceil(tiles * split / self.num_sms)
                sums = 8.0 * w.m * w.n * w.batch * split / self.memory  # partial sums in f32, there and back, by one kernel more
                extra = 0.0 if split == 1 else self.kernel + sums
                best = min(best, (waves * one + extra, min(1.0, tiles * split / self.num_sms)))
        return best

    def kernel_cost(self, w: Work) -> tuple[float, float]:
        """Seconds of one kernel, and the part of the multiprocessors that it fills."""
        moving = w.bytes / self.memory
        if w.rule == "matmul" and w.flops:
            computing, share = self.matmul(w)
            return max(self.kernel, computing, moving), share
        if w.rule == "attention":
            rate = ATTENTION * self.matmul_flops.get(w.dtype, self.matmul_flops["f32"])
            return max(self.kernel, w.flops / rate, moving), 1.0
        return max(self.kernel, moving), min(1.0, max(w.elements, 1.0) / (WAVE_ELEMENTS * self.num_sms))

    # ---- moves

    def cost(self, move: Move, among: tuple[int, ...] | None = None) -> float:
        """Seconds of one step (``hostir.ir.cohort.Move``): a call's kernels one after another, or a communication.

        ``among``: the world ranks that it is among (sender and receiver, the team, the rank that copies); by default its own team.
        """
        from hostir.sim.cost import Prices

        return Prices(self).seconds(move, among)

    def costs(self) -> Costs:
        """What a simulation asks; answers are remembered."""
        from hostir.sim.cost import Prices

        return Prices(self).costs()

    def node(self, rank: int) -> int:
        return rank // self.gpus_per_node


def _fits(value: Any, name: str) -> bool:
    """Whether ``value`` can be the field ``name`` of a machine."""
    match name:
        case "name":
            return isinstance(value, str)
        case "tiled":
            return isinstance(value, bool)
        case "matmul_flops":
            return isinstance(value, dict) and "f32" in value and all(isinstance(x, (int, float)) and x > 0 for x in value.values())
        case "nvlink" | "pcie" | "infiniband":
            return isinstance(value, Link)
        case "gpus_per_node" | "num_sms":
            return isinstance(value, int) and value > 0
        case _:
            return isinstance(value, (int, float)) and value >= 0
