"""``hostir run -n N script.py``: one script on N ranks of this machine, as processes or as threads of this process.

Every line of output carries its rank. The first rank that fails ends the others, and so do Ctrl-C and SIGTERM; nothing is left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

from hostir.errors import InputError
from hostir.launch import report
from hostir.launch.mps import sharing
from hostir.launch.transport import check_ranks

GRACE: Final = 5.0  # seconds for the other ranks to end by themselves after one has failed


def run_script(num_ranks: int, argv: Sequence[str], transport: str | None = None, *, timeout: float = 60.0, one_gpu: bool = False) -> None:
    """Run ``argv`` (a script and its arguments) on ``num_ranks`` ranks; inside, ``hir.launch.init()`` gives each its World.

    ``transport``: ``"threads"``, or what processes use (``"gloo"``, ``"nccl"``, ``"symm"``; default what suits the devices). ``one_gpu``:
    all ranks share one GPU and run at the same time, under an MPS daemon of this call's own. ``timeout`` (seconds) is that of each
    communication, unless the script gives its own. Returns when all ranks have ended well; RankError when one fails, naming the one that
    failed first. Output goes to this process's stdout and stderr, each line after ``[rank] ``.
    """
    check_ranks(num_ranks, transport, one_gpu=one_gpu)
    if not argv:
        raise InputError("nothing to run", expected="a script", got="no arguments", cure="hostir run -n 4 script.py")
    if not Path(argv[0]).is_file():
        raise InputError(f"there is no script {argv[0]}", expected="a file", got=argv[0])
    match transport:
        case "threads":
            from hostir.launch.run_threads import run_script_in_threads

            run_script_in_threads(num_ranks, list(argv), timeout)
        case _:
            with sharing(num_ranks, one_gpu=one_gpu) as variables:
                _Job(num_ranks, argv, timeout, {"HOSTIR_TRANSPORT": transport or ""} | variables).run()


class _Job:
    """The processes of one run. Torch's own launcher variables are set, so scripts that use torch.distributed directly work too."""

    def __init__(self, num_ranks: int, argv: Sequence[str], timeout: float, variables: Mapping[str, str]) -> None:
        self.num_ranks = num_ranks
        self.argv = list(argv)
        self.timeout = timeout
        self.variables = variables
        self.processes: list[subprocess.Popen[str]] = []
        self.readers: list[threading.Thread] = []
        self.last_lines: dict[int, str] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        import torch.distributed as dist

        # This process hosts the store: its port is free for sure, and it outlives every rank.
        store = dist.TCPStore("127.0.0.1", 0, self.num_ranks, True, wait_for_workers=False)
        before = {s: signal.getsignal(s) for s in (signal.SIGTERM,)} if threading.current_thread() is threading.main_thread() else {}
        for s in before:
            signal.signal(s, _raise_exit)
        try:
            self._start(store.port)
            self._watch(store)
        finally:
            self._end()
            for s, handler in before.items():
                signal.signal(s, handler)

    def _start(self, port: int) -> None:
        import hostir

        package_root = str(Path(hostir.__file__ or "").resolve().parent.parent)
        shared = os.environ | self.variables
        shared["PYTHONPATH"] = os.pathsep.join(p for p in (shared.get("PYTHONPATH", ""), package_root) if p)
        shared |= {
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "hostir",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "PYTHONUNBUFFERED": "1",
            "HOSTIR_LAUNCHER": str(os.getpid()),
            "HOSTIR_TIMEOUT": f"{self.timeout:g}",
        }
        shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.num_ranks)))
        for rank in range(self.num_ranks):
            process = subprocess.Popen(
                [sys.executable, "-m", "hostir.launch.script", *self.argv],
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C comes to this process, which ends the ranks itself
            )
            self.processes.append(process)
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                reader = threading.Thread(target=self._copy, args=(rank, source, target), daemon=True)
                reader.start()
                self.readers.append(reader)

    def _copy(self, rank: int, source: IO[str], target: IO[str]) -> None:
        for line in source:
            text = line.rstrip("\n").removeprefix(f"[rank{rank}]: ")  # torch's own hook says the rank as well
            with self._lock:
                if text.strip() and target is sys.stderr and not text.startswith((" ", "\t")):
                    self.last_lines[rank] = text
                print(f"[{rank}] {text}", file=target, flush=True)

    def _watch(self, store: Any) -> None:
        running = set(range(self.num_ranks))
        failed: dict[int, report.Report] = {}
        deadline = None
        while running and (deadline is None or time.monotonic() < deadline):
            for rank in sorted(running):
                if (code := self.processes[rank].poll()) is not None:
                    running.discard(rank)
                    if code:
                        failed[rank] = report.of_exit(rank, code)
            if failed and deadline is None:
                deadline = time.monotonic() + GRACE
                self._tell(store, min(failed.values(), key=lambda r: r.when))
            time.sleep(0.02)
        if failed:
            stuck = sorted(running)
            self._end()
            raise report.rank_error([*self._explained(store, failed), *(report.of_stuck(r, None) for r in stuck)])

    def _tell(self, store: Any, gone: report.Report) -> None:
        """A process that died cannot say so itself; one that raised has done so already."""
        import torch.distributed as dist

        from hostir.runtime.comms.board import Board, Failure

        Board.leave_failure(dist.PrefixStore("hostir/0/1", store), Failure(gone.rank, "PeerError", gone.headline, (gone.rank,)))

    def _explained(self, store: Any, failed: dict[int, report.Report]) -> list[report.Report]:
        """Headlines with what the rank said last, and the one that the ranks themselves name as the first put first."""
        import torch.distributed as dist

        from hostir.runtime.comms.board import Board

        for reader in self.readers:
            reader.join(1.0)
        first = Board.standing_failure(dist.PrefixStore("hostir/0/1", store))
        out = []
        for rank, known in failed.items():
            said = self.last_lines.get(rank, "")
            headline = f"rank {rank}: {said}" if "exited with code 1" in known.headline and said else known.headline
            out.append(report.Report(rank, headline, is_echo=first is not None and first.rank != rank and rank not in first.ranks, when=known.when))
        return out

    def _end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + 2.0
        for process in self.processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGKILL)
                process.wait()
        for reader in self.readers:
            reader.join(1.0)


def _signal(process: subprocess.Popen[str], number: int) -> None:
    try:
        os.killpg(process.pid, number)  # the rank leads a session of its own: what it has started ends with it
    except ProcessLookupError:
        return


def _raise_exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
