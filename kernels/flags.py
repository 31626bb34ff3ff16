"""Flags in memory that several processes address, written and awaited by kernels: for drivers without stream memory operations.

A kernel that waits occupies a place on a multiprocessor, so whatever it waits for must not need that place.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["value"])
def _write(address: tl.int64, value: tl.int32) -> None:
    """Store ``value`` at ``address`` (i32), after everything that this stream wrote before."""
    pointer = address.to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(pointer, value, sem="release", scope="sys")


@triton.jit(do_not_specialize=["value"])
def _wait(address: tl.int64, value: tl.int32) -> None:
    """Stay until the i32 at ``address`` is at least ``value``."""
    pointer = address.to(tl.pointer_type(tl.int32))
    there = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
    while there < value:
        there = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")


def write_flag(address: int, value: int) -> None:
    """On the current stream."""
    _write[(1,)](address, value, num_warps=1)


def await_flag(address: int, value: int) -> None:
    """On the current stream."""
    _wait[(1,)](address, value, num_warps=1)
