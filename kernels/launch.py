"""The one place that touches Triton's launch interface below ``kernel[grid](…)``, which differs from version to version.

A compiled kernel is launched through its bound C entry point, about a third of the host time of the public call. Where this Triton has
another interface, the public way of a compiled kernel is taken instead: ``why_slow`` says so. Under the interpreter a lock guards each launch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch

from hostir.kernels.jit import FUNCTIONS, INTERPRETED, compile_for
from hostir.kernels.source import Int, Pointer, Source

Launch: TypeAlias = Callable[..., None]
"""Called with the kernel's arguments: an address for each pointer, numbers for the rest."""

INTERPRETER_LOCK: Final = threading.RLock()


class Loaded:
    """A kernel on one CUDA device. ``launch(stream, *arguments)`` queues it; the device must be the current one."""

    def __init__(self, source: Source, aligned: tuple[bool, ...], device: int) -> None:
        from triton.runtime import driver

        with torch.cuda.device(device):
            self.compiled = compile_for(source, aligned, driver.active.get_current_target())
            self.launcher = self.compiled.run  # loads the binary
        self.num_regs = getattr(self.compiled, "n_regs", None)
        self.num_spills = getattr(self.compiled, "n_spills", None)
        self.why_slow: str | None = None
        self.launch = self._fast(source.programs) or self._public(source.programs)

    def for_programs(self, programs: int) -> Launch:
        """The same kernel over another number of programs."""
        return self._fast(programs) or self._public(programs)

    def _fast(self, programs: int) -> Launch | None:
        """The C entry point with everything bound but the stream and the arguments."""
        k, launcher = self.compiled, self.launcher
        try:
            entry, cooperative, dependent = launcher.launch, launcher.launch_cooperative_grid, launcher.launch_pdl
            if launcher.global_scratch_size or launcher.profile_scratch_size:
                self.why_slow = "the kernel needs scratch memory, which Triton allocates at each launch"
                return None
            function, packed = k.function, k.packed_metadata
        except AttributeError as e:
            self.why_slow = f"this Triton has another launcher: {e}"
            return None
        annotations, signature = getattr(launcher, "arg_annotations", None), getattr(launcher, "kernel_signature", None)
        if annotations is not None and signature is not None:  # since 3.7: one entry point for all signatures

            def launch_shared(stream: int, *arguments: Any) -> None:
                entry(
                    programs, 1, 1, stream, function, cooperative, dependent, packed, None, None, None, None, None, annotations, signature, arguments
                )

            return launch_shared
        if annotations is not None or signature is not None:
            self.why_slow = "this Triton has another launcher"
            return None

        def launch(stream: int, *arguments: Any) -> None:
            entry(programs, 1, 1, stream, function, cooperative, dependent, None, None, packed, None, None, None, *arguments)

        return launch

    def _public(self, programs: int) -> Launch:
        runner = self.compiled[(programs, 1, 1)]

        def launch(stream: int, *arguments: Any) -> None:
            runner(*arguments, stream=stream)

        return launch


def current_stream(device: int) -> int:
    """The raw handle of the device's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device))


@contextlib.contextmanager
def on_device(device: int) -> Any:
    """Make ``device`` current, and the former one again afterwards."""
    with torch.cuda.device(device):
        yield


def interpret(source: Source, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> None:
    """Run ``source`` in Triton's interpreter. ``tensors``: one for each pointer, starting at its address; ``numbers``: the other arguments."""
    import numpy as np

    assert INTERPRETED
    left_tensors, left_numbers = iter(tensors), iter(numbers)
    arguments = [next(left_tensors) if isinstance(a, Pointer) else next(left_numbers) for a in source.arguments]
    with INTERPRETER_LOCK, np.errstate(all="ignore"):
        FUNCTIONS(source)[(source.programs,)](*arguments)


def numbers_of(source: Source, evaluate: Callable[[Any], Any]) -> list[Any]:
    """The arguments that are no pointers; ``evaluate`` gives a host number's value."""
    found: list[Any] = []
    for a in source.arguments:
        if isinstance(a, Int):
            found.append(a.value)
        elif not isinstance(a, Pointer):
            value = evaluate(a.value)
            found.append(float(value) if a.kind == "fp64" else int(value))
    return found
