"""A script on N ranks in one process: each thread runs its own copy of the script's code as a main module of its own."""

from __future__ import annotations

import io
import os
import sys
from typing import IO, Any

from hostir.launch.machine import pick_device
from hostir.launch.thread_ranks import run_threads
from hostir.runtime.world import World, current_world


class ByRank(io.TextIOBase):
    """A stream that writes whole lines only, each after the rank of the thread that wrote it."""

    def __init__(self, target: IO[str]) -> None:
        self.target = target
        self._rest: dict[int | None, str] = {}

    def write(self, text: str) -> int:
        world = current_world()
        rank = None if world is None else world.rank
        *lines, self._rest[rank] = (self._rest.get(rank, "") + text).split("\n")
        prefix = "" if rank is None else f"[{rank}] "
        if lines:
            self.target.write("".join(f"{prefix}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        self.target.flush()

    def finish(self) -> None:
        for rank, rest in self._rest.items():
            if rest:
                self.target.write(f"{'' if rank is None else f'[{rank}] '}{rest}\n")
        self.target.flush()


def run_script_in_threads(num_ranks: int, argv: list[str], timeout: float) -> None:
    """Run ``argv`` on ``num_ranks`` threads; RankError when one fails. ``sys.argv`` and the streams are the script's meanwhile."""
    path = os.path.abspath(argv[0])
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")

    def rank_main(_world: World) -> None:
        names: dict[str, Any] = {"__name__": "__main__", "__file__": path, "__builtins__": __builtins__}
        exec(code, names)

    saved = sys.argv, sys.stdout, sys.stderr, sys.path[:]
    out, err = ByRank(sys.stdout), ByRank(sys.stderr)
    sys.argv, sys.stdout, sys.stderr = argv, out, err
    sys.path.insert(0, os.path.dirname(path))
    try:
        run_threads(rank_main, num_ranks, timeout=timeout, device=pick_device(None, 0))
    finally:
        sys.argv, sys.stdout, sys.stderr, sys.path[:] = saved
        out.finish()
        err.finish()
