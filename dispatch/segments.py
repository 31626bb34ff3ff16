"""Units of a program, each compiled once by the executor that takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hostir.dispatch.dispatch import ExecutorDispatch
from hostir.dispatch.protocol import Executor, Ids
from hostir.errors import HostIrError, UnsupportedError
from hostir.graph.fusion import Fusion, TensorView
from hostir.ir.nodes import Call, Program, Unit, every
from hostir.ir.show import statement_text


@dataclass(frozen=True, slots=True)
class Segment:
    """A unit and its executor."""

    unit: Unit
    executor: Executor

    @property
    def compile_ms(self) -> float:
        """What compiling took so far, in milliseconds of the host."""
        return self.executor.compile_ms


def _symbolic(fusion: Fusion) -> bool:
    return any(isinstance(p, TensorView) and not all(isinstance(d, int) for d in p.known.dims) for p in fusion.params)


class Segments:
    """The executors of a program's units on one device."""

    def __init__(self, dispatch: ExecutorDispatch, device: torch.device | str) -> None:
        self._dispatch = dispatch
        self._device = device
        self._by_unit: dict[int, Segment] = {}

    def add(self, p: Program) -> None:
        """Choose an executor for every unit of ``p`` that has none yet, and compile it where its sizes are known."""
        for s in every(p.body):
            if isinstance(s, Call) and s.awaits is not None:
                raise UnsupportedError(
                    "no executor waits for the flags of a call yet", program=p.name, statement=statement_text(p, s), loc=s.loc,
                    cure="wait for each flag with p.wait before the call",
                )  # fmt: skip
            if isinstance(s, Call) and id(s.unit) not in self._by_unit:
                try:
                    ex = self._dispatch.make(s.unit.fusion, ids=Ids(group=len(self._by_unit)), device=self._device)
                    if not _symbolic(s.unit.fusion):
                        ex.compile(ex.fusion)
                except HostIrError as e:
                    raise e.with_context(program=p.name, statement=statement_text(p, s), loc=s.loc) from None
                self._by_unit[id(s.unit)] = Segment(s.unit, ex)

    def run(self, unit: Unit, args: Sequence[Any], outs: Sequence[torch.Tensor]) -> None:
        self.ready(unit, args).execute(args, outs)

    def ready(self, unit: Unit, args: Sequence[Any]) -> Executor:
        """The executor of ``unit``, compiled: one whose sizes are symbols is compiled for the first arguments that it meets."""
        ex = self._by_unit[id(unit)].executor
        return ex if ex.is_compiled else ex.compile(ex.fusion, args)

    def executor(self, unit: Unit) -> Executor:
        return self._by_unit[id(unit)].executor

    def rows(self) -> list[Segment]:
        return list(self._by_unit.values())

    def refusals(self) -> Mapping[str, Mapping[str, str]]:
        return {s.unit.name: s.executor.refusals for s in self._by_unit.values()}
