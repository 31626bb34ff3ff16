"""What an executor is: it says whether it takes a fusion, compiles it once, and runs it into tensors.

``supports`` is callable on the class and answers True or a ``No`` that says why, so that a refusal can always be shown.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

import torch

from hostir.errors import InputError, NotCompiledError
from hostir.graph.fusion import Fusion, Output
from hostir.runtime.profile import running_profile


@dataclass(frozen=True, slots=True)
class No:
    """A falsy answer that says why."""

    why: str

    def __bool__(self) -> Literal[False]:
        return False


@dataclass(frozen=True, slots=True)
class Ids:
    """Numbers that name kernels and profiler rows: which fusion, concretization, runtime and group (segment) this is."""

    fusion: int = 0
    concrete: int = 0
    runtime: int = 0
    group: int = 0


class Executor(ABC):
    """Base of all. Subclasses set ``name`` and implement ``supports``, ``_compile`` and ``_run``.

    ``refusals`` says why the executors asked before this one declined, ``fusion`` is what it was made for.

    For profiles: ``compile_ms`` is what compiling took so far (one that compiles at a run adds to it), ``scheduler`` names what planned
    the code, ``num_kernels`` is what one run launches on the device for the operations of the fusion.
    """

    name: ClassVar[str] = "Executor"
    profiles_itself: ClassVar[bool] = False

    def __init__(self, ids: Ids | None = None) -> None:
        self.ids = ids or Ids()
        self.refusals: dict[str, str] = {}
        self.fusion: Any = None
        self.compile_ms = 0.0
        self.scheduler = ""
        self.num_kernels = 1
        self._compiled = False
        self._results: list[Output] = []
        self._aliases: list[int | None] = []

    @classmethod
    @abstractmethod
    def supports(cls, fusion: Any) -> Literal[True] | No:
        """Whether this executor can run ``fusion``; a refusal is a falsy ``No`` with ``.why``."""

    @abstractmethod
    def _compile(self, fusion: Any, args: Sequence[Any] | None) -> None: ...

    @abstractmethod
    def _run(self, args: Sequence[Any], outputs: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        """Values of all results, hidden ones too; ``outputs`` has one tensor for each of them."""

    @property
    def is_compiled(self) -> bool:
        return self._compiled

    def compile(self, fusion: Any, args: Sequence[Any] | None = None) -> Self:
        """Prepare to run ``fusion``. ``args`` are example arguments, for executors that specialise on them."""
        start = time.perf_counter_ns()
        if isinstance(fusion, Fusion) and not fusion.ops:
            self.scheduler, self.num_kernels = "no_op", 0
        self._compile(fusion, args)
        self.compile_ms += (time.perf_counter_ns() - start) / 1e6
        self._title = str(getattr(fusion, "name", None) or self.name)
        self._results = fusion.results if isinstance(fusion, Fusion) else []
        self._aliases = [None if r.alias is None else fusion.params.index(r.alias) for r in self._results]
        self._compiled = True
        return self

    def run(self, args: Sequence[Any], outputs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Run; the list of results without the hidden ones. ``outputs``: all or none (hidden ones may be left out); they are written
        in place and must have the results' dtypes and shapes. A result with an alias is written into that input."""
        if not self._compiled:
            raise NotCompiledError(f"{self.name}.run before compile", cure="ex.compile(fusion) first")
        if not self.profiles_itself and (profile := running_profile()) is not None:
            return profile.call(self, self._title, args, lambda: self.execute(args, outputs), {"ids": asdict(self.ids)})
        return self.execute(args, outputs)

    def execute(self, args: Sequence[Any], outputs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """``run`` of a compiled executor, by a caller who asks about profiles himself."""
        if not any(r.hidden or r.alias is not None for r in self._results):
            return self._run(args, outputs)
        results = self._run(args, self._complete(args, outputs))
        if outputs is None or len(outputs) == 0:
            for i, at in enumerate(self._aliases):
                if at is not None:
                    results[i] = args[at].copy_(results[i])
        return [t for t, r in zip(results, self._results, strict=True) if not r.hidden]

    def _complete(self, args: Sequence[Any], outputs: Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor] | None:
        """Outputs for every result where only the visible ones were given."""
        visible = sum(not r.hidden for r in self._results)
        if outputs is None or len(outputs) == 0 or len(outputs) == len(self._results) or len(outputs) != visible:
            return outputs
        given = iter(outputs)
        return [args[at] if r.hidden and at is not None else next(given) for r, at in zip(self._results, self._aliases, strict=True)]


def all_or_none(outputs: Sequence[torch.Tensor] | None, num: int, what: str) -> Sequence[torch.Tensor] | None:
    """Preallocated outputs are given for every result or for none."""
    if outputs is None or len(outputs) == 0:
        return None
    if len(outputs) != num or any(o is None for o in outputs):
        raise InputError(f"{what} takes all of its outputs preallocated, or none", expected=num, got=len([o for o in outputs if o is not None]))
    return outputs
