"""A script as users write it, run by the tests under every launcher; its first argument says what goes wrong."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import hostir as hir
from hostir.runtime.comms.protocol import CommCall

MODE = sys.argv[1]
RANK = next((os.environ[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ), "0")


def main(world: hir.launch.World) -> None:
    team = tuple(range(world.size))
    x = torch.full((2,), float(world.rank + 1))
    world.comms.issue(CommCall("allreduce", team, (x,), (x,))).wait()
    print(f"rank {world.rank} of {world.size} local {world.local_rank} has {x[0]:g}", flush=True)
    if MODE == "raise" and world.rank == 1:
        raise ValueError("one is wrong")
    if MODE == "exit" and world.rank == 1:
        os._exit(7)
    if MODE == "leave" and world.rank == 1:
        sys.exit(0)
    if MODE == "sleep":
        Path(sys.argv[2], f"pid{world.rank}").write_text(str(os.getpid()))
        time.sleep(100)
    world.comms.issue(CommCall("barrier", team)).wait()


if MODE == "before" and RANK == "1":
    raise ValueError("one is wrong")
with hir.launch.init(timeout=20 if MODE != "before" else 3) as first:
    main(first)
if MODE == "later" and RANK == "1":
    raise ValueError("one is wrong")
if MODE in ("again", "later"):
    with hir.launch.init(timeout=20) as second:
        main(second)
    third = hir.launch.init(timeout=20)
    main(third)
    if third.rank == 0:  # the others leave it open
        third.close()
        third.close()
