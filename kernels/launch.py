"""The one place that touches Triton's launch interface below ``kernel[grid](…)``, which differs from version to version.

A compiled kernel is launched through its C entry point with everything bound, at about a third of the host time of the public call.
Where this Triton has another interface, the public way of a compiled kernel is taken; ``why_slow`` says so. Launch hooks
(``triton.knobs.runtime.launch_enter_hook``) see the public way only. Under the interpreter a lock guards each launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hostir.kernels.jit import INTERPRETED, compile_for
from hostir.kernels.source import Pointer, Source

INTERPRETER_LOCK: Final = threading.RLock()


@dataclass(frozen=True, slots=True)
class Call:
    """How a launch is written: ``before``, the arguments with commas between them, ``after``; ``stream`` is a local of the caller's, and
    ``names`` what else the text uses."""

    before: str
    after: str
    names: Mapping[str, Any]


class Loaded:
    """A kernel on one CUDA device, its binary loaded. ``num_regs`` and ``num_spills`` as the driver counts them."""

    def __init__(self, fn: Any, source: Source, aligned: tuple[bool, ...], device: int) -> None:
        from triton.runtime import driver

        with torch.cuda.device(device):
            self.compiled = compile_for(fn, source, aligned, driver.active.get_current_target())
            self.launcher = self.compiled.run
        self.num_regs = getattr(self.compiled, "n_regs", None)
        self.num_spills = getattr(self.compiled, "n_spills", None)
        self.why_slow = self._why_slow()

    def _why_slow(self) -> str | None:
        k, launcher = self.compiled, self.launcher
        needed = ("launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
        missing = [n for n in needed if not hasattr(launcher, n)] + [n for n in ("function", "packed_metadata") if not hasattr(k, n)]
        if missing:
            return f"this Triton has another launcher: no {', '.join(missing)}"
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return "the kernel needs scratch memory, which Triton allocates at each launch"
        if hasattr(launcher, "arg_annotations") != hasattr(launcher, "kernel_signature") or getattr(launcher, "gsan_enabled", False):
            return "this Triton has another launcher"
        return None

    def call(self, programs: int, tag: str = "") -> Call:
        """The launch over ``programs`` programs; ``tag`` keeps names of several launches in one text apart."""
        k, launcher = self.compiled, self.launcher
        if self.why_slow is not None:
            return Call(f"e{tag}(", ", stream=stream)", {f"e{tag}": k[(programs, 1, 1)]})
        flags = f"{launcher.launch_cooperative_grid!r}, {launcher.launch_pdl!r}"
        names = {f"e{tag}": launcher.launch, f"f{tag}": k.function, f"m{tag}": k.packed_metadata}
        head = f"e{tag}({programs}, 1, 1, stream, f{tag}, {flags}, "
        if not hasattr(launcher, "arg_annotations"):  # 3.6: scratch, metadata, hooks, arguments
            return Call(f"{head}None, None, m{tag}, None, None, None, ", ")", names)
        names |= {f"a{tag}": launcher.arg_annotations, f"s{tag}": launcher.kernel_signature}
        return Call(f"{head}m{tag}, None, None, None, None, None, a{tag}, s{tag}, (", ",))", names)


def current_stream() -> Callable[[int], int]:
    """The function that gives the raw handle of a device's current stream."""
    found: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return found


def current_device() -> Callable[[], int]:
    """The function that gives the number of the current device."""
    found: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
    return found


def interpret(fn: Any, source: Source, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> None:
    """Run ``fn``, the function of ``source``, in Triton's interpreter. ``tensors``: for each pointer the tensor whose memory it points into;
    ``numbers``: the other arguments, in order."""
    import numpy as np

    assert INTERPRETED
    left, rest = iter(tensors), iter(numbers)
    arguments = []
    for a in source.arguments:
        if isinstance(a, Pointer):
            t = next(left)
            arguments.append(t.as_strided((1,), (1,), t.storage_offset() + a.offset) if t.numel() else t)
        else:
            arguments.append(next(rest))
    with INTERPRETER_LOCK, np.errstate(all="ignore"):
        fn[(source.programs,)](*arguments)
