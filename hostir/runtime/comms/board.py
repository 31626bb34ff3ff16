"""The notice board of a world of processes: small facts in the shared store that let a rank say why it cannot go on.

A backend only knows that a connection broke or that time passed. Here each rank leaves who it is (so that a death on the same machine
is seen), the first failure leaves its reason, and on a timeout every rank leaves how far it has come.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hostir.errors import InputError


@dataclass(frozen=True)
class Failure:
    """The first failure of a world: ``kind`` is the exception's class name, ``text`` its headline, ``ranks`` who caused it."""

    rank: int
    kind: str
    text: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Progress:
    """How far a rank has come: what it waits in, and how many communications it has issued on each team."""

    text: str
    issued: dict[str, int]


class Board:
    """One rank's view of the store; ``store`` is private to this world."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.claim(store, rank, size)
        self._who: dict[int, tuple[str, int, str]] = {}

    @staticmethod
    def claim(store: dist.Store, rank: int, size: int) -> None:
        """This process is ``rank``; InputError when another one has said so."""
        me = json.dumps([_machine(), os.getpid(), _start_of(os.getpid())])
        found = store.compare_set(f"who/{rank}", "", me).decode()
        if found != me:
            raise InputError(
                f"two processes claim to be rank {rank}",
                rank=rank,
                expected=f"{size} processes with different ranks",
                got=f"process {json.loads(found)[1]} and process {os.getpid()}",
                cure="start each rank once, with the launcher's rank variables, and give each job a MASTER_PORT of its own",
            )

    # ---- failures

    def post_failure(self, failure: Failure) -> Failure:
        """Leave ``failure`` unless one is there already; returns the one that stands."""
        return self.leave_failure(self.store, failure)

    @staticmethod
    def leave_failure(store: dist.Store, failure: Failure) -> Failure:
        """As ``post_failure``, also for one that is not a rank of the world."""
        return _failure(store.compare_set("failure", "", json.dumps(asdict(failure))).decode())

    def failure(self) -> Failure | None:
        """The first failure, if any."""
        return self.standing_failure(self.store)

    @staticmethod
    def standing_failure(store: dist.Store) -> Failure | None:
        """As ``failure``, also for one that is not a rank of the world."""
        return _failure(store.get("failure").decode()) if store.check(["failure"]) else None

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` whose process ran on this machine and is gone."""
        return [r for r in ranks if r != self.rank and self._is_dead(r)]

    def _is_dead(self, rank: int) -> bool:
        if rank not in self._who:
            if not self.store.check([f"who/{rank}"]):
                return False
            machine, pid, start = json.loads(self.store.get(f"who/{rank}"))
            self._who[rank] = (machine, pid, start)
        machine, pid, start = self._who[rank]
        return machine == _machine() and _start_of(pid) != start

    # ---- progress

    def post_progress(self, progress: Progress) -> None:
        self.store.set(f"progress/{self.rank}", json.dumps(asdict(progress)))

    def progress(self, ranks: Sequence[int], patience: float) -> dict[int, Progress]:
        """What ``ranks`` have left, waiting up to ``patience`` seconds for all of them."""
        self.poll(lambda: self.store.check([f"progress/{r}" for r in ranks]), patience)
        found = [r for r in ranks if self.store.check([f"progress/{r}"])]
        return {r: Progress(**json.loads(self.store.get(f"progress/{r}"))) for r in found}

    # ---- texts

    def post(self, key: str, text: str) -> None:
        self.store.set(f"{key}/{self.rank}", text)

    def read(self, key: str, rank: int) -> str | None:
        return self.store.get(f"{key}/{rank}").decode() if self.store.check([f"{key}/{rank}"]) else None

    def forget(self, key: str) -> None:
        """Remove this rank's text under ``key``."""
        self.store.delete_key(f"{key}/{self.rank}")

    def meet(self, key: str, text: str, ranks: Sequence[int], patience: float, look: Callable[[Sequence[int], float], None]) -> dict[int, str]:
        """Leave ``text`` under ``key`` and collect those of ``ranks``; fewer after ``patience`` seconds.

        While some are missing, ``look(missing, seconds waited)`` is called now and then; it may raise.
        """
        self.post(key, text)
        found: dict[int, str] = {}

        def complete() -> bool:
            found.update({r: t for r in ranks if r not in found and (t := self.read(key, r)) is not None})
            return len(found) == len(ranks)

        start = time.monotonic()
        while not self.poll(complete, 0.1):
            waited = time.monotonic() - start
            look([r for r in ranks if r not in found], waited)
            if waited > patience:
                break
        return found

    @staticmethod
    def poll(ready: Callable[[], bool], patience: float) -> bool:
        """Look again and again until ``ready`` or ``patience`` seconds have passed."""
        deadline = time.monotonic() + patience
        pause = 0.0005
        while not ready():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return True


def _failure(text: str) -> Failure:
    fields: dict[str, Any] = json.loads(text)
    return Failure(fields["rank"], fields["kind"], fields["text"], tuple(fields["ranks"]))


def _machine() -> str:
    """A name for this kernel and process namespace: process ids can be compared within it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def _start_of(pid: int) -> str:
    """When the process ``pid`` started, as text; empty when it is gone (or a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
