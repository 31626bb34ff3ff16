"""Tests on ranks under plain pytest: crews of processes that stay from test to test, or threads of this process.

A test's function and its arguments travel by value; fixtures are set up here, once. A crew whose World a test has broken, or left with
something under way, is replaced. What ranks print comes out here with their number before each line.
"""

from __future__ import annotations

import os
import random
import sys
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from hostir.errors import InputError
from hostir.launch.server import start_server
from hostir.launch.testing import Ask, asked, refusal
from hostir.launch.testing_report import WORLD, Said, raise_failure, run_body, show_ranks, verdict

if TYPE_CHECKING:
    from hostir.launch.crew import Crew
    from hostir.launch.report import Report

_MAX_PROCESSES: Final = 24  # that stay; a larger crew is alone
_MARGIN: Final = 1.0  # seconds beyond its timeout that a body may take: a communication that times out says more
_START: Final = 120.0  # seconds for processes to come up
_STAY_HERE: Final = ("request", "capsys", "capsysbinary", "capfd", "capfdbinary", "caplog", "recwarn", "pytester")


class Pool:
    """The ranks of a plain pytest session."""

    def __init__(self) -> None:
        self._crews: OrderedDict[Ask, Crew] = OrderedDict()
        self._pid = os.getpid()

    def world(self, item: pytest.Item) -> Any:
        return WORLD

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The server of the rank processes loads torch while other tests run."""
        if not session.config.option.collectonly and any(item.get_closest_marker("world") for item in session.items):
            start_server(("pytest", "hostir.launch.testing_pool"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        ask = asked(pyfuncitem)
        if ask is None:
            return None
        arguments = arguments_of(pyfuncitem)
        said, reports = run_in_threads(pyfuncitem, ask, arguments) if ask.transport == "threads" else self._in_processes(pyfuncitem, ask, arguments)
        error = verdict(said, reports)
        if error is not None:
            raise_failure(pyfuncitem, error, reports, ask.num_ranks)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        return show_ranks(item, call, (yield))

    def pytest_unconfigure(self) -> None:
        if os.getpid() == self._pid:
            for crew in self._crews.values():
                crew.end()
            self._crews.clear()

    # ---- processes

    def _in_processes(self, item: pytest.Function, ask: Ask, arguments: dict[str, Any]) -> tuple[dict[int, Said], dict[int, Report]]:
        try:
            payload = _packed(item, arguments)
        except InputError as error:
            raise refusal(error) from None
        crew = self._crew(ask)
        try:
            done = crew.run(payload, timeout=ask.timeout, limit=ask.timeout + _MARGIN, grace=_grace(ask))
        finally:
            if not crew.is_usable:
                self._crews.pop(_kind(ask)).end(0.2)
        for rank, texts in sorted(done.printed.items()):
            for text, stream in zip(texts, (sys.stdout, sys.stderr), strict=True):
                stream.write("".join(f"[{rank}] {line}\n" for line in text.splitlines()))
        return done.values, done.reports

    def _crew(self, ask: Ask) -> Crew:
        key = _kind(ask)
        if key in self._crews:
            self._crews.move_to_end(key)
            return self._crews[key]
        from hostir.launch.by_value import dumps_call
        from hostir.launch.crew import Crew
        from hostir.launch.report import rank_error

        while self._crews and sum(k.num_ranks for k in self._crews) + ask.num_ranks > _MAX_PROCESSES:
            self._crews.popitem(last=False)[1].end()
        crew = Crew(ask.num_ranks, device=ask.device, transport=ask.transport, captures=True)
        up = crew.run(dumps_call(_come_up, (_come_up, (), {})), timeout=_START, limit=_START)
        if not crew.is_usable:
            crew.end(0.2)
            raise rank_error(list(up.reports.values()))
        self._crews[key] = crew
        return crew


def _kind(ask: Ask) -> Ask:
    """Tests of one kind share a crew."""
    return replace(ask, timeout=0.0)


def _grace(ask: Ask) -> float:
    """Seconds for the other ranks to end after a failure."""
    return min(max(ask.timeout, 1.0), 5.0)


def _come_up(_world: Any) -> None:
    """The first piece of work of a crew: its clock does not run while the processes start."""


def arguments_of(item: pytest.Function) -> dict[str, Any]:
    """The values of the fixtures that the test's function takes."""
    return {name: item.funcargs[name] for name in item._fixtureinfo.argnames}


def run_in_threads(item: pytest.Function, ask: Ask, arguments: dict[str, Any]) -> tuple[dict[int, Said], dict[int, Report]]:
    """The body on threads of this process; fixtures are shared."""
    from hostir.launch.machine import pick_device
    from hostir.launch.run_threads import ByRank
    from hostir.launch.thread_ranks import try_threads

    out, err = ByRank(sys.stdout), ByRank(sys.stderr)
    saved = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        return try_threads(
            lambda world: run_body(world, item.obj, arguments), ask.num_ranks, timeout=ask.timeout, device=pick_device(ask.device, 0),
            limit=ask.timeout + _MARGIN, grace=_grace(ask),
        )  # fmt: skip
    finally:
        sys.stdout, sys.stderr = saved
        out.finish()
        err.finish()


def _packed(item: pytest.Function, arguments: dict[str, Any]) -> bytes:
    """The body for other processes. InputError names the fixture that cannot travel."""
    from hostir.launch.by_value import dumps_call

    cure = 'let the fixture return on_rank(lambda world: …), make it in the test\'s body, or use transport="threads"'
    if here := [name for name in arguments if name in _STAY_HERE]:
        raise InputError(f"the fixture {here[0]} belongs to the process that runs pytest, not to a rank", expected="values that pickle", cure=cure)
    sent = {name: _FRESH if isinstance(value, pytest.MonkeyPatch) else value for name, value in arguments.items()}
    try:
        return dumps_call(item.obj, (_run_on_rank, (item.obj, sent), {}))
    except InputError as error:
        for name, value in sent.items():
            try:
                dumps_call(item.obj, value)
            except InputError as why:
                raise InputError(
                    f"the fixture {name} cannot be sent to the ranks: {why.message}", expected="a value that pickles", cure=cure
                ) from error
        raise


class _Fresh:
    """Stands for the fixture ``monkeypatch``: each rank has its own, undone after the test."""

    def __reduce__(self) -> str:
        return "_FRESH"


_FRESH: Final = _Fresh()


def _run_on_rank(world: Any, fn: Any, arguments: dict[str, Any]) -> Said:
    import torch

    random.seed(0)
    torch.manual_seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    with pytest.MonkeyPatch.context() as patch:
        return run_body(world, fn, {name: patch if value is _FRESH else value for name, value in arguments.items()})
