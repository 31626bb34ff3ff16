"""Tests on the ranks of a job: every rank runs the whole session, and each phase of each test ends with one result for all.

``torchrun -m pytest`` and ``mpirun python -m pytest`` come here. After a set-up, a body, a tear-down, the ranks tell one another how it
went, so they skip, fail and stop together; rank 0 shows what all of them said. A rank that is stuck or gone ends the session of the
others, with its name. Where no test has the marker ``world``, nothing is done.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import faulthandler
import io
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import pytest

from hostir.errors import CommTimeout, HostIrError, PeerError, RankError
from hostir.launch import report
from hostir.launch.env import Place
from hostir.launch.testing import Ask, asked
from hostir.launch.testing_pool import arguments_of, run_in_threads
from hostir.launch.testing_report import FAILURE, Said, call_body, raise_failure, show_ranks, verdict

if TYPE_CHECKING:
    from hostir.runtime.comms.board import Board
    from hostir.runtime.world import World

_GRACE: Final = 5.0  # seconds that a rank may be later than the others
_LAST_WORDS: Final = 1.0  # seconds to wait for the others once this rank was told to end
_KEEP: Final = 20_000  # characters of output that travel to rank 0


@dataclass(frozen=True)
class Voice:
    """What one rank says about a phase: how it ended, as text and as an exception, what was captured, and its World's state."""

    kind: str  # passed, failed, skipped, xfailed, absent, exit
    why: str = ""
    text: str = ""
    is_echo: bool = False
    when: float = field(default_factory=time.time)
    error: bytes | None = None
    sections: tuple[tuple[str, str], ...] = ()
    state: Any = None


class Job:
    """This rank's part in a session of several."""

    def __init__(self, config: pytest.Config, place: Place) -> None:
        self.place = place
        self._timeout = float(os.environ.get("HOSTIR_TIMEOUT", "60"))
        self._stderr = os.dup(2)  # pytest captures the other one
        self._silence: _Silence | None = None
        self._board: Board | None = None
        self._store: Any = None
        self._world: World | None = None
        self._name = ""  # of the world
        self._is_alone = False  # a rank is stuck or gone: nothing can be agreed any more
        self._session: pytest.Session | None = None  # that SIGTERM ends
        self._is_in_test = False
        self._number = 0  # of the test
        self._old_keys: list[str] = []

        config.pluginmanager.register(_BeforeFixtures(self._prepare), "hostir-ranks-setup")

    # ---- the session

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """One rank shows the results and writes the files."""
        if self.place.rank:
            self._silence = _Silence(session.config)
            for plugin in session.config.pluginmanager.get_plugins():
                if type(plugin).__name__ == "LogXML":
                    plugin.logfile = os.devnull

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Meet the others where there is something to do together; all must have found the same tests."""
        if not any(item.get_closest_marker("world") for item in session.items) or session.config.option.collectonly:
            if self._silence is not None:
                self._silence.end()
            return
        if hasattr(session.config, "workerinput") or getattr(session.config.option, "numprocesses", None):
            raise pytest.UsageError("the ranks of a launcher run the tests: pytest-xdist (-n) has no place there")
        from hostir.launch.ending import ending
        from hostir.launch.meeting import meet, world_store
        from hostir.runtime.comms.board import Board

        ending().prefix = f"[rank{self.place.rank}]: "
        try:
            self.place, self._store = meet(self.place, self._timeout)
            self._board = Board(world_store(self._store, "tests"), self.place.rank, self.place.size)
            texts = self._meet("collected", "\n".join(item.nodeid for item in session.items), self._timeout)
        except HostIrError as error:
            self._speak()
            raise pytest.UsageError(str(error)) from None
        for rank, text in texts.items():
            if text != texts[0]:
                raise pytest.UsageError(f"ranks 0 and {rank} have collected different tests: {_difference(texts[0], text)}")
        if threading.current_thread() is threading.main_thread():
            self._session = session
            signal.signal(signal.SIGTERM, self._end)

    def pytest_unconfigure(self) -> None:
        if self._session is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._board is not None and not self._is_alone:
            with contextlib.suppress(HostIrError):  # rank 0 has shown the results: launchers end all ranks when one has failed
                self._meet("the end", "", 6 * _GRACE, range(1) if self.place.rank else None)
        if self._world is not None:
            self._world.close()
        if self._is_alone:
            from hostir.launch.ending import ending

            ending().error = RankError("a rank was stuck or gone")  # MPI would wait for it
        if self._silence is not None:
            self._silence.end(print_it=self._board is None)

    def pytest_internalerror(self, excrepr: object) -> None:
        if self._silence is not None:
            os.write(self._stderr, f"rank {self.place.rank}: {excrepr}\n".encode())

    # ---- a test

    def world(self, item: pytest.Item) -> Any:
        ask = asked(item)
        assert ask is not None
        if ask.transport == "threads":
            from hostir.launch.testing_report import WORLD

            return WORLD
        return self._world

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        self._number += 1
        return (yield from self._phase(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        return (yield from self._phase(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        return (yield from self._phase(item, "teardown"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        ask = asked(pyfuncitem)
        if ask is None or self._board is None:
            return None
        arguments = arguments_of(pyfuncitem)
        if ask.transport == "threads":
            said, reports = run_in_threads(pyfuncitem, ask, arguments)
            if (error := verdict(said, reports)) is not None:
                raise_failure(pyfuncitem, error, reports, ask.num_ranks)
        else:
            with self._watched(pyfuncitem, ask):
                contextvars.copy_context().run(self._body, pyfuncitem, ask, arguments)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        return show_ranks(item, call, (yield))

    def _body(self, item: pytest.Function, ask: Ask, arguments: dict[str, Any]) -> None:
        from hostir.runtime.comms.process import ProcessComms

        world = self._world
        assert world is not None
        world.__enter__()
        comms = world.comms
        if isinstance(comms, ProcessComms):
            comms.begin_part(self._number, ask.timeout)
        try:
            call_body(world, item.obj, arguments)
        except BaseException as error:
            comms.fail(error)  # the others would wait for this rank
            raise
        if isinstance(comms, ProcessComms):
            comms.end_part()

    def _phase(self, item: pytest.Item, phase: str) -> Generator[None, None, None]:
        if self._board is None or self._is_alone:
            return (yield)
        error: BaseException | None = None
        start = time.monotonic()
        self._is_in_test = True
        try:
            result = yield
        except BaseException as e:  # noqa: BLE001  it is raised again, on all ranks
            result, error = None, e
        finally:
            self._is_in_test = False
        self._agree(item, phase, error, time.monotonic() - start)
        return result

    def _end(self, number: int, _frame: FrameType | None) -> None:
        """SIGTERM, from a launcher that has lost a rank: show what is known, then end. What runs now fails."""
        assert self._session is not None
        self._session.shouldstop = f"rank {self.place.rank} was told to end ({signal.Signals(number).name})"
        if self._is_in_test:
            self._is_in_test = False
            raise RankError(f"rank {self.place.rank} was told to end", rank=self.place.rank)

    def _prepare(self, item: pytest.Item) -> None:
        ask = asked(item)
        if self._board is None or ask is None or ask.transport == "threads":
            return
        if ask.num_ranks > self.place.size:
            pytest.skip(f"needs {ask.num_ranks} ranks, this job has {self.place.size}")
        name = f"tests-{ask.num_ranks}-{ask.transport}-{ask.device}"
        if self._world is not None and self._name != name:
            self._leave()
        if self.place.rank >= ask.num_ranks:
            raise _AbsentError(f"runs on the first {ask.num_ranks} ranks")
        if self._world is None:
            from hostir.launch.init import open_world

            self._world = open_world(
                self.place, self._store, f"{name}-{self._number}", ask.timeout + _GRACE, device=ask.device, num_ranks=ask.num_ranks,
                transport=ask.transport,
            )  # fmt: skip
            self._name = name

    def _leave(self) -> None:
        assert self._world is not None
        world, self._world = self._world, None
        world.close()

    @contextlib.contextmanager
    def _watched(self, item: pytest.Item, ask: Ask) -> Generator[None, None, None]:
        """A body that does not end would keep this process, and an MPI job, for ever: the others have given up by then."""

        def end() -> None:
            os.write(self._stderr, f"rank {self.place.rank} is stuck in {item.nodeid} and ends:\n".encode())
            faulthandler.dump_traceback(self._stderr, all_threads=True)
            os._exit(1)

        timer = threading.Timer(ask.timeout + 3 * min(_GRACE, ask.timeout), end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    # ---- agreeing

    def _agree(self, item: pytest.Item, phase: str, error: BaseException | None, seconds: float) -> None:
        """Raise what the phase is for all ranks."""
        ask = None
        if item.session.shouldstop and self._silence is None and self._who_speaks() not in (None, self.place.rank):
            self._silence = _Silence(item.config)
        with contextlib.suppress(pytest.fail.Exception):  # a wrong marker: the set-up has said so
            ask = asked(item)
        on_all = ask is None or ask.transport == "threads" or ask.num_ranks > self.place.size
        members = range(self.place.size if on_all or phase != "call" or ask is None else ask.num_ranks)
        timeout = self._timeout if ask is None else ask.timeout
        grace = min(_GRACE, timeout)
        patience = max(timeout - seconds, 0.0) + grace if phase == "call" and ask is not None else 2 * timeout + 3 * seconds + grace
        mine = self._voice(item, phase, error)
        key = f"{self._number}/{phase}"
        try:
            texts = self._meet(key, base64.b64encode(pickle.dumps(mine)).decode(), patience, members)
        except HostIrError as lost:
            self._give_up(item, phase, error, lost)
        voices: dict[int, Voice] = {r: pickle.loads(base64.b64decode(t)) for r, t in texts.items()}
        if len(members) == self.place.size:
            self._forget(key)
        else:
            self._old_keys.append(key)
        if phase == "call" and self._world is not None and not _can_go_on({r: v.state for r, v in voices.items()}):
            self._leave()
        if self.place.rank == 0:
            for rank, voice in sorted(voices.items()):
                for title, text in voice.sections if rank else ():
                    item.add_report_section(phase, f"{title} of rank {rank}", text)
        if leaves := [v for v in voices.values() if v.kind == "exit"]:
            raise error if isinstance(error, (KeyboardInterrupt, pytest.exit.Exception)) else pytest.exit.Exception(leaves[0].why, returncode=1)
        self._conclude(item, error, voices, len(members))

    def _conclude(self, item: pytest.Item, error: BaseException | None, voices: dict[int, Voice], num_members: int) -> None:
        said = {r: Said(v.kind, v.why) for r, v in voices.items() if v.kind in ("passed", "skipped", "xfailed")}
        reports = {r: report.Report(r, v.why, v.text, _unpacked(v.error), v.is_echo, v.when) for r, v in voices.items() if v.kind == "failed"}
        common = verdict(said, reports)
        if common is None:
            if isinstance(error, _AbsentError):
                raise pytest.skip.Exception(str(error), _use_item_location=True)
            return
        mine = voices[self.place.rank].kind
        if isinstance(common, pytest.skip.Exception) and mine == "skipped" and error is not None:
            raise error  # with its own place
        first = min(reports, key=lambda r: (reports[r].is_echo, reports[r].when), default=None)
        if first == self.place.rank and error is not None and not isinstance(common, (pytest.skip.Exception, pytest.xfail.Exception)):
            common = error
        raise_failure(item, common, reports, num_members)

    def _voice(self, item: pytest.Item, phase: str, error: BaseException | None) -> Voice:
        sections = tuple((f"Captured {key}", content[-_KEEP:]) for when, key, content in item._report_sections if when == phase)
        sections = tuple((title.removeprefix("Captured "), content) for title, content in sections)
        state = None
        if phase == "call" and self._world is not None:
            with contextlib.suppress(HostIrError):
                state = self._world.comms.state()  # type: ignore[attr-defined]
        match error:
            case None:
                return Voice("passed", sections=sections, state=state)
            case _AbsentError():
                return Voice("absent")
            case KeyboardInterrupt() | pytest.exit.Exception():
                return Voice("exit", f"rank {self.place.rank}: {report.first_line(error)}", sections=sections)
            case pytest.skip.Exception() | pytest.xfail.Exception():
                kind = "skipped" if isinstance(error, pytest.skip.Exception) else "xfailed"
                return Voice(kind, str(error.msg), sections=sections, state=state)
            case _:
                failure = item.stash.get(FAILURE, None)  # of rank threads
                shown = failure.shown if failure is not None and failure.error is error else None
                text = str(shown or item.repr_failure(pytest.ExceptionInfo.from_exception(error)))
                headline = f"rank {self.place.rank}: {report.first_line(error)}"
                return Voice("failed", headline, text, isinstance(error, PeerError), error=_packed(error), sections=sections, state=state)

    def _give_up(self, item: pytest.Item, phase: str, error: BaseException | None, lost: HostIrError) -> None:
        """A rank gave no result: this test fails, and the session ends."""
        self._is_alone = True
        ranks = tuple(getattr(lost, "ranks", ()))
        if self._who_speaks() is None and self.place.rank == min(r for r in range(self.place.size) if r not in ranks):
            self._speak()
        item.session.shouldfail = f"rank {', '.join(map(str, ranks))} gave no result for {item.nodeid} ({phase}): the session cannot go on"
        reports = {r: report.Report(r, f"rank {r}: {lost.message}", is_echo=isinstance(lost, CommTimeout)) for r in ranks}
        if error is not None:
            voice = self._voice(item, phase, error)
            reports[self.place.rank] = report.Report(self.place.rank, voice.why, voice.text, error, voice.is_echo)
        raise_failure(item, error or lost, reports, self.place.size)

    def _meet(self, key: str, text: str, patience: float, ranks: Sequence[int] | None = None) -> dict[int, str]:
        """The texts of all ``ranks``; PeerError or CommTimeout, with ``ranks``, when some do not come."""
        assert self._board is not None
        board, everyone = self._board, range(self.place.size) if ranks is None else ranks

        def look(missing: Sequence[int], waited: float) -> None:
            if dead := board.dead(missing):
                raise PeerError("its process is gone", ranks=dead)
            if self._session is not None and self._session.shouldstop and waited > _LAST_WORDS:
                raise CommTimeout("no result before the end", ranks=missing)

        try:
            texts = board.meet(key, text, everyone, patience, look)
        except RuntimeError as error:
            raise PeerError(f"the store of the job is gone: {error}", ranks=(0,)) from error
        if missing := [r for r in everyone if r not in texts]:
            raise CommTimeout(f"no result within {patience:.3g} s", ranks=missing)
        return texts

    def _forget(self, key: str) -> None:
        """All ranks have read everything before this key."""
        assert self._board is not None
        for old in self._old_keys:
            self._board.forget(old)
        self._old_keys = [key]

    def _who_speaks(self) -> int | None:
        """The rank that shows how a session ended in which a rank was lost."""
        assert self._board is not None
        with contextlib.suppress(RuntimeError):  # the store is gone
            for rank in range(self.place.size):
                if self._board.read("speaks", rank) is not None:
                    return rank
        return None

    def _speak(self) -> None:
        """Show what this rank knows, where rank 0 cannot."""
        if self._board is not None:
            with contextlib.suppress(RuntimeError):
                self._board.post("speaks", "")
        if self._silence is not None:
            self._silence.end()
            self._silence = None


class _BeforeFixtures:
    """Runs ``prepare`` at the beginning of a set-up, inside whatever pytest wraps around it."""

    def __init__(self, prepare: Callable[[pytest.Item], None]) -> None:
        self._prepare = prepare

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._prepare(item)


class _AbsentError(Exception):
    """This rank is not among those that run a test."""


class _Silence:
    """Pytest's terminal on a rank that does not speak: what it writes is kept, or dropped."""

    def __init__(self, config: pytest.Config) -> None:
        reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._writer = getattr(reporter, "_tw", None)
        self._text = io.StringIO()
        self._file: Any = None
        if self._writer is not None:
            self._file, self._writer._file = self._writer._file, self._text

    def end(self, *, print_it: bool = True) -> None:
        if self._writer is not None:
            self._writer._file, self._writer = self._file, None
            if print_it:
                self._file.write(self._text.getvalue())
                self._file.flush()


def _can_go_on(states: dict[int, Any]) -> bool:
    from hostir.launch.crew import can_go_on

    return can_go_on(states)


def _packed(error: BaseException) -> bytes | None:
    from hostir.launch.by_value import dumps

    try:
        packed = dumps(error)
        pickle.loads(packed)
    except Exception:  # noqa: BLE001  any class may refuse in its own way
        return None
    return packed if len(packed) < 10 * _KEEP else None


def _unpacked(packed: bytes | None) -> BaseException | None:
    try:
        return None if packed is None else pickle.loads(packed)
    except Exception:  # noqa: BLE001  a class that this process does not have
        return None


def _difference(a: str, b: str) -> str:
    ours, theirs = a.splitlines(), b.splitlines()
    for x, y in zip(ours, theirs, strict=False):
        if x != y:
            return f"{x} and {y}"
    return f"{len(ours)} and {len(theirs)} tests"
