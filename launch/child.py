"""What a rank process does: take pieces of work by value, run each in its World, send back the result or a report.

A rank does not outlive the process that asked for it: a thread waits for that one's end. Ctrl-C is that one's matter as well.
"""

from __future__ import annotations

import contextvars
import faulthandler
import io
import os
import pickle
import shutil
import signal
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import parent_process
from typing import Any, TypeAlias

import torch.distributed as dist

from hostir.errors import HostIrError
from hostir.launch.by_value import dumps
from hostir.launch.init import join_torch
from hostir.launch.machine import pick_device, share_cores
from hostir.launch.mps import is_one_gpu
from hostir.launch.report import Report, of_exception
from hostir.launch.transport import choose_here, connect, make_comms
from hostir.runtime.comms.hub import Hub
from hostir.runtime.comms.process import ProcessComms
from hostir.runtime.comms.threads import ThreadComms
from hostir.runtime.world import World

# How often a rank has communicated, by kind, team and channel; None: nothing can follow in this World.
State: TypeAlias = dict[tuple[str, tuple[int, ...], str], int] | None


@dataclass(frozen=True)
class Piece:
    """One piece of work. ``timeout``: of each communication, in seconds; ``is_last``: the World is left before the report."""

    number: int
    payload: bytes
    environment: dict[str, str]
    directory: str
    timeout: float
    is_last: bool


def main(folder: str, rank: int, num_ranks: int, device: str | None, transport: str | None, captures: bool, pipe: Connection) -> None:
    """One rank of a crew, until the other end of ``pipe`` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(folder,), name="hostir: parent", daemon=True).start()
    if captures:
        _capture(folder, rank)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    _Rank(folder, rank, num_ranks, device, transport, pipe).work()


class _Rank:
    """The life of one rank."""

    def __init__(self, folder: str, rank: int, num_ranks: int, device: str | None, transport: str | None, pipe: Connection) -> None:
        self.folder = folder
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self.transport = transport
        self.pipe = pipe
        self.world: World | None = None

    def work(self) -> None:
        while True:
            try:
                message = self.pipe.recv_bytes()
            except (EOFError, OSError):
                break
            piece: Piece = pickle.loads(message)
            os.environ.clear()
            os.environ.update(piece.environment)
            os.chdir(piece.directory)
            contextvars.copy_context().run(self._do, piece)
        if self.world is not None:
            self.world.close()

    def _do(self, piece: Piece) -> None:
        try:
            world = self._enter(piece)
            fn, args, kwargs = pickle.loads(piece.payload)
            if piece.is_last:
                with world:
                    value = fn(world, *args, **kwargs)
            else:
                value = self._part(world, fn, args, kwargs)
        except SystemExit as error:
            if error.code:
                self._report(of_exception(self.rank, error))
            else:
                self._send(None)
        except BaseException as error:  # noqa: BLE001  the parent raises it
            self._report(of_exception(self.rank, error))
        else:
            try:
                self._send(value)
            except Exception as error:  # noqa: BLE001  the parent raises it
                what = f"the result of rank {self.rank} ({type(value).__name__}) cannot be sent to the caller: return tensors or plain data"
                error.add_note(what)
                self._report(of_exception(self.rank, error))
        sys.stdout.flush()
        sys.stderr.flush()

    def _part(self, world: World, fn: Any, args: Any, kwargs: Any) -> Any:
        """Run in a World that stays open. An exception breaks it for all, as leaving it with one would."""
        world.__enter__()
        comms = world.comms
        try:
            value = fn(world, *args, **kwargs)
        except BaseException as error:
            if not (isinstance(error, SystemExit) and not error.code):
                comms.fail(error)
            raise
        if isinstance(comms, ProcessComms):
            comms.end_part()
        return value

    def _enter(self, piece: Piece) -> World:
        if self.world is None:
            share_cores(self.num_ranks)
            self.world = self._open(piece.timeout)
        if isinstance(self.world.comms, ProcessComms):
            self.world.comms.begin_part(piece.number, piece.timeout)
        return self.world

    def _open(self, timeout: float) -> World:
        rank, num_ranks = self.rank, self.num_ranks
        chosen = pick_device(self.device, 0 if is_one_gpu() else rank)
        transport = choose_here(self.transport, chosen, num_ranks, num_ranks)
        if num_ranks == 1:
            return World(0, 1, 0, 1, chosen, transport, ThreadComms(Hub(1, timeout), 0, transport))
        store = dist.FileStore(os.path.join(self.folder, "store"), self.num_ranks)
        store.set_timeout(timedelta(hours=24))
        comms = make_comms(transport, rank, num_ranks, chosen, timeout, dist.PrefixStore("hostir/0", store), one_machine=True)
        world = World(rank, num_ranks, rank, num_ranks, chosen, transport, comms)
        torch_store: dist.Store = store
        if transport != "gloo" and chosen.type == "cuda":  # a file is slow where groups and arenas are made
            first = dist.TCPStore("127.0.0.1", 0, num_ranks, True, wait_for_workers=False) if rank == 0 else None
            (port, *_) = comms.exchange("port", str(first.port) if first is not None else "", range(num_ranks))
            torch_store = first or dist.TCPStore("127.0.0.1", int(port), num_ranks, False, wait_for_workers=False)
        join_torch(world, dist.PrefixStore("torch", torch_store), timeout)
        connect(world)
        return world

    # ---- answers

    def _state(self) -> State:
        comms = self.world.comms if self.world is not None else None
        try:
            return comms.state() if isinstance(comms, (ProcessComms, ThreadComms)) else None
        except HostIrError:
            return None

    def _send(self, value: Any) -> None:
        packed = dumps(value)
        self.pipe.send_bytes(b"+" + pickle.dumps((self._state(), packed)))

    def _report(self, report: Report) -> None:
        """The report with its exception, or without where that cannot be pickled."""
        fields = (report.rank, report.headline, report.text, report.is_echo, report.when)
        packed: bytes | None = None
        try:
            packed = dumps(report.error)
            pickle.loads(packed)
        except Exception:  # noqa: BLE001  any class may refuse in its own way
            packed = None
        self.pipe.send_bytes(b"-" + pickle.dumps((fields, packed)))


def _capture(folder: str, rank: int) -> None:
    """What this process and its children print goes to files from now on, line by line: it is there even if the process dies."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(os.path.join(folder, f"{name}{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(n, "w", closefd=False), "utf-8", errors="replace", write_through=True) for n in (1, 2))


def _end_with_parent(folder: str) -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def report_of(message: bytes) -> Report:
    """The other end of ``_report``."""
    (rank, headline, text, is_echo, when), packed = pickle.loads(message)
    error: BaseException | None = None
    if packed is not None:
        try:
            error = pickle.loads(packed)
        except Exception:  # noqa: BLE001  a class that the caller's process does not have
            error = None
    return Report(rank, headline, text, error, is_echo, when)
