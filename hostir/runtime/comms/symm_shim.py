"""CUDA memory that several ranks address: torch's private symmetric memory, and the driver's operations on the order of a stream.

This is the one file that knows ``torch.distributed._symmetric_memory`` (its memory, not its barriers, which need a multiprocessor).
A flag is written and awaited by the GPU's front end (``cuStreamWriteValue32``, ``cuStreamWaitValue32``): no kernel, no host. The driver
library is called directly, so nothing has to be installed; where it refuses these operations, one-thread kernels do the same.

Between ranks that share one GPU a plain copy runs on the multiprocessors. A copy of rows with gaps between them goes to a copy engine
instead, so with HOSTIR_SYMM_COPIES=engine a large tensor is copied as its even and its odd rows. That is no gain as a rule: the engine
moves 0.4 of the bytes a second, and under the products of all ranks both kinds are held up alike (benchmarks/one_gpu.py measures it).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from hostir.errors import HostIrError, UnsupportedError

_AT_LEAST: Final = 0  # CU_STREAM_WAIT_VALUE_GEQ
_ON_DEVICE: Final = 2  # CU_MEMORYTYPE_DEVICE
ENGINE_LEAST_BYTES: Final = 1 << 20
ENGINE_ROWS: Final = tuple(1 << n for n in (16, 15, 14, 13, 12))  # bytes of a row, the best first


class _Copy2d(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("src_x", ctypes.c_size_t), ("src_y", ctypes.c_size_t), ("src_type", ctypes.c_int), ("src_host", ctypes.c_void_p),
        ("src", ctypes.c_uint64), ("src_array", ctypes.c_void_p), ("src_pitch", ctypes.c_size_t),
        ("out_x", ctypes.c_size_t), ("out_y", ctypes.c_size_t), ("out_type", ctypes.c_int), ("out_host", ctypes.c_void_p),
        ("out", ctypes.c_uint64), ("out_array", ctypes.c_void_p), ("out_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class Driver:
    """The few functions of libcuda that torch does not offer, on streams given as numbers."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self._write, self._wait = library.cuStreamWriteValue32_v2, library.cuStreamWaitValue32_v2
            self._copy = library.cuMemcpy2DAsync_v2
        except (OSError, AttributeError) as error:
            raise UnsupportedError(
                "the transport symm needs the CUDA driver's stream memory operations", refusals={"symm": str(error)}, expected="CUDA 12 or later"
            ) from error
        for function in (self._write, self._wait):
            function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
        self._copy.argtypes = (ctypes.POINTER(_Copy2d), ctypes.c_void_p)

    def write(self, stream: int, address: int, value: int) -> None:
        if code := self._write(stream, address, value, 0):
            raise HostIrError(f"cuStreamWriteValue32 failed with code {code}")

    def wait(self, stream: int, address: int, value: int) -> None:
        if code := self._wait(stream, address, value, _AT_LEAST):
            raise HostIrError(f"cuStreamWaitValue32 failed with code {code}")

    def copy_rows(self, rows: _Copy2d, stream: int) -> None:
        if code := self._copy(rows, stream):
            raise HostIrError(f"cuMemcpy2DAsync failed with code {code}")


class CudaTurn:
    """The stream, as a number, that used something last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = -1

    def take(self) -> None:
        now = _raw_stream(self._device.index)
        if now != self._stream:
            if self._stream >= 0:
                stream_of(now, self._device).wait_stream(stream_of(self._stream, self._device))
            self._stream = now


def stream_of(raw: int, device: torch.device) -> torch.cuda.Stream:
    """The stream with the handle ``raw``."""
    return torch.cuda.ExternalStream(raw, device=device) if raw else torch.cuda.default_stream(device)


def _raw_stream(index: int) -> int:
    """The current stream's handle, without making an object of it."""
    return torch._C._cuda_getCurrentRawStream(index)


class CudaFabric:
    """Arenas in symmetric memory of torch's default group, which must span the world."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device = device
        self._size = size
        self._by_engine = os.environ.get("HOSTIR_SYMM_COPIES") == "engine"
        self._driver = Driver()
        self._kernels = os.environ.get("HOSTIR_SYMM_FLAGS") == "kernels" or not self._has_memory_operations()
        self._kept: list[Any] = []
        self._awaited: dict[int, int] = {}
        self._private = torch.cuda.Stream(device)
        self.waiting: set[int] = set()  # streams, as numbers, that have ever waited for a flag

    def open(self, num_bytes: int) -> list[torch.Tensor]:
        from torch.distributed import _symmetric_memory as symmetric

        memory = symmetric._SymmetricMemory
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        try:
            own = memory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self.device, group)
            own.zero_()
            self.quiesce()
            handle = memory.rendezvous(own, group)
        except RuntimeError as error:
            first = (str(error).splitlines() or [""])[0]
            cure = "check peer access with nvidia-smi topo -m"
            if "overlapping" in first:
                cure = "several ranks on one GPU: hostir run --one-gpu, or spawn(…, one_gpu=True)"
            raise UnsupportedError(f"symmetric memory of {num_bytes} bytes: {first}", refusals={"symm": first}, cure=cure) from error
        self._kept += [own, handle]
        return [handle.get_buffer(r, (num_bytes,), torch.uint8) for r in range(self._size)]

    def _has_memory_operations(self) -> bool:
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        stream = _raw_stream(self.device.index)
        try:
            self._driver.write(stream, flag.data_ptr(), 1)
            self._driver.wait(stream, flag.data_ptr(), 1)
        except HostIrError:
            return False
        return True

    def write(self, address: int, value: int) -> None:
        if self._kernels:
            from hostir.kernels.flags import write_flag

            write_flag(address, value)
        else:
            self._driver.write(_raw_stream(self.device.index), address, value)

    def wait(self, address: int, value: int, where: Callable[[], str]) -> None:
        self._awaited[address] = value
        stream = _raw_stream(self.device.index)
        self.waiting.add(stream)
        if self._kernels:
            from hostir.kernels.flags import await_flag

            await_flag(address, value)
        else:
            self._driver.wait(stream, address, value)

    def copier(self, out: torch.Tensor, x: torch.Tensor) -> Callable[[], object]:
        halves = self._rows(out, x)
        if not halves:
            return partial(out.copy_, x)
        even, odd, copy, index = *halves, self._driver.copy_rows, self.device.index

        def run(_held: object = (out, x)) -> None:
            stream = _raw_stream(index)
            copy(even, stream)
            copy(odd, stream)

        return run

    def _rows(self, out: torch.Tensor, x: torch.Tensor) -> tuple[_Copy2d, _Copy2d] | None:
        """The copy as even and odd rows, where that is worth it."""
        size = x.numel() * x.element_size()
        if not self._by_engine or size < ENGINE_LEAST_BYTES or not (out.is_contiguous() and x.is_contiguous()) or not out.is_cuda or not x.is_cuda:
            return None
        row = next((r for r in ENGINE_ROWS if size % (2 * r) == 0), None)
        if row is None:
            return None
        made = []
        for start in (0, row):
            rows = _Copy2d(src_type=_ON_DEVICE, out_type=_ON_DEVICE, width=row, height=size // (2 * row), src_pitch=2 * row, out_pitch=2 * row)
            rows.src, rows.out = x.data_ptr() + start, out.data_ptr() + start
            made.append(rows)
        return made[0], made[1]

    def turn(self) -> CudaTurn:
        return CudaTurn(self.device)

    def quiesce(self) -> None:
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Let every wait that is under way end, from any thread: the world has failed, and what follows on the streams is not looked at."""
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._private):
            for address, value in list(self._awaited.items()):
                self.write(address, value)
