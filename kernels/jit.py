"""Generated text as a Triton function, and as a compiled kernel for a device that need not be there.

Triton reads a function's source again through ``inspect``, so generated text is registered with ``linecache`` under a name of its own.
What was compiled stays in Triton's own cache on disk.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping
from typing import Any, Final

import triton
import triton.language as tl

from hostir.kernels import hd
from hostir.kernels.source import Int, Pointer, Source

INTERPRETED: Final[bool] = hd.INTERPRETED


def file_of(source: Source, owner: object) -> str:
    """The name under which ``owner``'s text is found; ``linecache.cache`` holds it until someone takes it out."""
    return f"<hostir kernel {source.name} {hashlib.sha256(source.text.encode()).hexdigest()[:16]} {id(owner):x}>"


def function(source: Source, owner: object = None) -> Any:
    """The Triton function of ``source``."""
    file = file_of(source, owner)
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"triton": triton, "tl": tl, "hd": hd, "__name__": f"hostir.kernels.generated.{source.name}"}
    exec(compile(source.text, file, "exec"), names)
    return names[source.name]


def signature(source: Source) -> dict[str, str]:
    """Each argument's type as Triton writes it."""
    return dict(zip(argument_names(source), source.types(), strict=True))


def argument_names(source: Source) -> list[str]:
    """The names of the arguments, in the order of ``source.arguments``."""
    counts = {"p": 0, "n": 0, "k": 0}
    names = []
    for a in source.arguments:
        letter = "p" if isinstance(a, Pointer) else "n" if isinstance(a, Int) else "k"
        names.append(f"{letter}{counts[letter]}")
        counts[letter] += 1
    return names


def attributes(source: Source, aligned: tuple[bool, ...]) -> dict[tuple[int, ...], list[list[Any]]]:
    """What the compiler may rely on: pointers and numbers that are multiples of 16. ``aligned``: one flag for each argument."""
    return {(i,): [["tt.divisibility", 16]] for i, ok in enumerate(aligned) if ok}


def compile_for(fn: Any, source: Source, aligned: tuple[bool, ...], target: Any, options: Mapping[str, Any] | None = None) -> Any:
    """``fn``, the function of ``source``, compiled for a ``GPUTarget``; no device is needed."""
    from triton.compiler import ASTSource

    made = ASTSource(fn=fn, signature=signature(source), constexprs={}, attrs=attributes(source, aligned))
    return triton.compile(made, target=target, options={"num_warps": source.num_warps, "enable_fp_fusion": True, **(options or {})})


def alignment(source: Source, addresses: Mapping[int, int]) -> tuple[bool, ...]:
    """Which arguments are multiples of 16; ``addresses`` gives where a buffer begins, modulo 16 (one that is not there: at 0)."""
    return tuple(
        (addresses.get(a.buffer, 0) + a.offset * a.dtype.itemsize) % 16 == 0 if isinstance(a, Pointer) else isinstance(a, Int) and a.by_16
        for a in source.arguments
    )
