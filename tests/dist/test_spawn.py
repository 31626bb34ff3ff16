"""``spawn``: any function, any result, one error; and what a rank finds when it starts."""

from __future__ import annotations

import contextvars
import functools
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import hostir as hir
from hostir.errors import InputError, RankError, UnsupportedError
from hostir.launch import World, spawn
from hostir.runtime.comms.protocol import CommCall
from hostir.runtime.world import current_world

transports = pytest.mark.parametrize("transport", ["threads", "gloo"])
NUMBER = 17


def named(world: World, x: int, *, y: int) -> int:
    return world.rank + x * y + NUMBER


class OddError(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, *, name: str) -> None:
        super().__init__()
        self.name = name

    def __str__(self) -> str:
        return f"odd {self.name}"


@transports
def test_functions_lambdas_and_closures_return_their_results_in_rank_order(transport: str) -> None:
    here = 5
    assert spawn(named, 2, transport, (2,), {"y": 3}, device="cpu") == [23, 24]
    assert spawn(lambda world: world.rank * here, 3, transport, device="cpu") == [0, 5, 10]
    assert spawn(functools.partial(named, x=1, y=1), 2, transport, device="cpu") == [18, 19]
    tensors = spawn(lambda world: {"t": torch.full((2,), float(world.rank)).bfloat16()[:1]}, 2, transport, device="cpu")
    assert [t["t"].tolist() for t in tensors] == [[0.0], [1.0]]
    assert spawn(lambda world: None, 1, transport, device="cpu") == [None]


@transports
def test_a_rank_finds_its_world_and_its_meshes(transport: str) -> None:
    def body(world: World) -> tuple[Any, ...]:
        assert current_world() is world
        assert hir.launch.init() is world
        mesh = world.mesh(("dp", "tp"), (2, 2))
        assert mesh.world is world
        some = world.mesh("tp", ranks=(3, 1))
        with pytest.raises(InputError, match="does not cover the world of 4 ranks"):
            world.mesh(("tp",), (3,))
        with pytest.raises(InputError, match="no rank 4"):
            world.mesh("tp", ranks=(0, 4))
        facts = (world.rank, world.size, world.local_rank, world.local_size, world.device, world.backend)
        return (*facts, mesh["tp"].layout, mesh["dp"].layout, some.layout, str(world.mesh(("tp",))))

    for rank, got in enumerate(spawn(body, 4, transport, device="cpu")):
        assert got[:6] == (rank, 4, rank, 4, torch.device("cpu"), transport)
        assert got[6] == (rank // 2 * 2, rank // 2 * 2 + 1)
        assert got[7] == (rank % 2, rank % 2 + 2)
        assert got[8:] == ((3, 1), "mesh(tp = 4)")
    assert current_world() is None


def test_rank_threads_inherit_the_caller_s_context() -> None:
    where = contextvars.ContextVar("where", default="nowhere")
    where.set("the caller")
    assert spawn(lambda world: where.get(), 2, "threads", device="cpu") == ["the caller"] * 2


def test_rank_threads_run_autograd_in_themselves() -> None:
    def body(world: World) -> int:
        seen: list[int] = []
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: seen.append(threading.get_ident()))
        y.sum().backward()
        return int(seen == [threading.get_ident()])

    assert spawn(body, 2, "threads", device="cpu") == [1, 1]


def test_torch_distributed_works_in_rank_processes() -> None:
    def body(world: World) -> tuple[float, list[int]]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        x = torch.ones(1) * (world.rank + 1)
        dist.all_reduce(x)
        mesh = hir.Mesh.from_torch(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
        assert mesh.world is world
        return float(x), list(mesh.layout)

    assert spawn(body, 2, "gloo", device="cpu") == [(3.0, [0, 1])] * 2


@transports
def test_an_exception_that_does_not_pickle_is_reported_all_the_same(transport: str) -> None:
    def body(world: World) -> None:
        raise OddError(name="thing")

    with pytest.raises(RankError, match="OddError: odd thing") as caught:
        spawn(body, 1, transport, device="cpu")
    assert "raise OddError" in caught.value.ranks[0]


@transports
def test_sys_exit_counts_by_its_code(transport: str) -> None:
    assert spawn(lambda world: sys.exit(0), 1, transport, device="cpu") == [None]
    with pytest.raises(RankError, match=r"^rank 0 exited with code 3"):
        spawn(lambda world: sys.exit(3), 1, transport, device="cpu")


def test_a_result_that_cannot_travel_is_that_rank_s_error() -> None:
    with pytest.raises(RankError, match="rank 0: TypeError") as caught:
        spawn(lambda world: threading.Lock(), 1, "gloo", device="cpu")
    assert "result of rank 0 (lock) cannot be sent" in caught.value.ranks[0]


def test_what_cannot_travel_or_does_not_exist_is_refused_before_the_start() -> None:
    lock = threading.Lock()
    with pytest.raises(InputError, match="cannot be sent to other processes"):
        spawn(lambda world: lock, 1, "gloo", device="cpu")
    with pytest.raises(InputError, match="at least one rank"):
        spawn(named, 0, "threads")
    with pytest.raises(InputError, match="runs a function"):
        spawn(3, 1, "threads")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="no transport 'pigeons'"):
        spawn(named, 1, "pigeons")


def test_ranks_see_the_caller_s_environment_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("one", "two"):
        monkeypatch.setenv("HOSTIR_TEST_VARIABLE", value)
        assert spawn(lambda world: os.environ["HOSTIR_TEST_VARIABLE"], 1, "gloo", device="cpu") == [value]


def test_a_script_without_a_main_guard_may_spawn(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import hostir as hir
            factor = 2
            def body(world):
                return factor * world.rank
            print(hir.launch.spawn(body, 2, "gloo", device="cpu"))
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)], check=False, capture_output=True, text=True, timeout=60, env=dict(os.environ, PYTHONPATH=_root())
    )
    assert (done.stdout, done.returncode) == ("[0, 2]\n", 0), done.stderr
    assert done.stderr == ""


def test_ranks_end_with_the_process_that_asked_for_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            import os, time
            import hostir as hir
            def body(world):
                open({str(tmp_path)!r} + f"/pid{{world.rank}}", "w").write(str(os.getpid()))
                time.sleep(100)
            hir.launch.spawn(body, 2, "gloo", device="cpu")
        """)
    )
    process = subprocess.Popen([sys.executable, str(script)], env=dict(os.environ, PYTHONPATH=_root()))
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    try:
        assert wait_until(lambda: all(f.exists() and f.read_text() for f in files), 60)
        pids = [int(f.read_text()) for f in files]
    finally:
        process.kill()
        process.wait()
    assert wait_until(lambda: not any(map(is_alive, pids)), 20)


def wait_until(ready: Any, seconds: float) -> bool:
    from hostir.runtime.comms.board import Board

    return Board.poll(ready, seconds)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _root() -> str:
    return os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])


def test_a_world_of_one_needs_no_process_group() -> None:
    def body(world: World) -> bool:
        x, out = torch.ones(2), torch.empty(2)
        world.comms.issue(CommCall("allreduce", (0,), (x,), (out,), op="avg")).wait()
        assert out.tolist() == [1.0, 1.0]
        assert world.comms.exchange("tag", "me", (0,)) == ["me"]
        return torch.distributed.is_initialized()

    assert spawn(body, 1, "gloo", device="cpu") == [False]
