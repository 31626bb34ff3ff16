"""Whole programs in which a rank raises, dies, stops or is late at some statement: every other rank knows why, and nothing is left.

The unit ``fragile`` stands twice in the loop of the program. Its executor does something bad on one rank, at one of them, in one trip.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hostir as hir
from hostir.dispatch import Executor, ExecutorDispatch, No
from hostir.errors import CommTimeout, InputError, PeerError, RankError
from hostir.launch import World, crew, spawn

NUM_RANKS, TRIPS = 3, 5


@hir.unit
def fragile(x, y):
    return x + y


@hir.unit
def halve(x):
    return x / 2


def program(trips: int = TRIPS, over: str | None = None) -> Any:
    with hir.Program("loop_of_faults", mesh=hir.Mesh(("tp",) if over is None else ("dp", "tp"))) as p:
        x = p.input("x", (4,), torch.float32)
        y = p.zeros((4,), torch.float32, name="y")
        z = p.empty((4,), torch.float32, name="z")
        with p.loop(trips, name="trip"):
            p.call(fragile, x, y, out=y)
            p.permute(y, z, to=(p.rank("tp") + 1) % p.size("tp"), source=(p.rank("tp") - 1) % p.size("tp"), on="comm", over="tp")
            p.call(fragile, z, y, out=z)
            p.allreduce(z, z, op="max", over=over)
            p.call(halve, z, out=y)
        p.output(y)
    return p


def dispatch_with(fault: Callable[[int], None], slow_compile: float = 0.0) -> ExecutorDispatch:
    """Units named ``fragile`` call ``fault(number of the call in this run)`` before they do their work."""

    class Fragile(Executor):
        name = "Fragile"
        calls = 0

        @classmethod
        def supports(cls, fusion: Any) -> Any:
            return True if getattr(fusion, "name", "") == "fragile" else No("it only takes the unit fragile")

        def _compile(self, fusion: Any, args: Any) -> None:
            time.sleep(slow_compile)

        def _run(self, args: Sequence[Any], outputs: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
            number, Fragile.calls = Fragile.calls, Fragile.calls + 1
            fault(number)
            assert outputs is not None
            outputs[0].copy_(args[0] + args[1])
            return list(outputs)

    return ExecutorDispatch.default().with_executor(Fragile, before="ExprEvalExecutor")


def nothing(_number: int) -> None:
    pass


def run(world: World, mode: str, fault: Callable[[int], None] = nothing, slow_compile: float = 0.0) -> list[float]:
    compiled = hir.compile(program(), world.mesh("tp"), mode=mode, dispatch=dispatch_with(fault, slow_compile))
    result: list[float] = compiled(torch.arange(4.0) + world.rank).tolist()
    return result


def bad(how: str, victim: int, when: int, rank: int) -> Callable[[int], None]:
    def fault(number: int) -> None:
        if rank != victim or number != when:
            return
        if how == "raise":
            raise ValueError(f"fault in call {number}")
        if how == "exit":
            os._exit(9)
        if how == "late":
            time.sleep(4.5)
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])

    return fault


def case(how: str, transport: str, seed: int) -> Any:
    draw = random.Random(f"{how} {seed}")
    victim, when, mode = draw.randrange(NUM_RANKS), draw.randrange(2 * TRIPS), ("checked", "compiled")[seed % 2]
    return pytest.param(how, transport, victim, when, mode, id=f"{how}-{transport}-rank{victim}-call{when}-{mode}")


CASES = [
    *(case("raise", transport, seed) for transport in ("threads", "gloo") for seed in range(4)),
    *(case("exit", "gloo", seed) for seed in range(3)),
    *(case("kill", "gloo", seed) for seed in range(3)),
    *(case("stop", "gloo", seed) for seed in range(2)),
    case("late", "threads", 0),
]


@pytest.mark.parametrize(("how", "transport", "victim", "when", "mode"), CASES)
def test_every_other_rank_knows_who_and_where(how: str, transport: str, victim: int, when: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "GRACE", 1.0)
    before = set(multiprocessing.active_children())
    timeout = 2.0 if how in ("stop", "late") else 20.0

    def body(world: World) -> list[float]:
        return run(world, mode, bad(how, victim, when, world.rank))

    with pytest.raises(RankError) as caught:
        spawn(body, NUM_RANKS, transport, timeout=timeout, device="cpu")
    error = caught.value
    assert set(error.ranks) == set(range(NUM_RANKS))
    first = {"raise": f"rank {victim}: ValueError: fault in call {when}", "exit": f"rank {victim} exited with code 9", "kill": f"rank {victim} was killed by SIGKILL"}
    if how in first:
        assert (error.rank, error.message) == (victim, first[how])
    if how == "raise":
        at = error.ranks[victim]
        assert all(word in at for word in ("in program @loop_of_faults", "@fragile(", f"trip = {when // 2}", os.path.basename(__file__))), at
    if how == "stop":
        assert "its process is stopped" in error.ranks[victim]
    for rank in set(range(NUM_RANKS)) - {victim}:
        text = error.ranks[rank]
        assert "CommTimeout: " in text if how in ("stop", "late") else text.startswith("PeerError: "), text
        assert f"rank {victim}" in text, text
        assert "@loop_of_faults: " in text, text
        assert any(f"trip = {when // 2 + i}" in text for i in (-1, 0)), text  # it may still wait for the trip before
        assert any(word in text for word in ("permute(", "allreduce(")), text
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("transport", ["threads", "gloo"])
def test_new_ranks_work_after_any_fault(transport: str) -> None:
    want = spawn(run, NUM_RANKS, "threads", ("checked",), device="cpu")
    for mode in ("checked", "compiled"):
        with pytest.raises(RankError):
            spawn(lambda world: run(world, mode, bad("raise", 1, 3, world.rank)), NUM_RANKS, transport, device="cpu")
        assert spawn(run, NUM_RANKS, transport, (mode,), device="cpu") == want


@pytest.mark.parametrize(("transport", "mode"), [("threads", "checked"), ("gloo", "compiled")])
def test_a_rank_may_compile_for_longer_than_the_timeout(transport: str, mode: str) -> None:
    def body(world: World) -> list[float]:
        return run(world, mode, slow_compile=2.2 if world.rank == 1 else 0.0)

    assert spawn(body, 2, transport, timeout=1.5, device="cpu") == spawn(run, 2, "threads", (mode,), device="cpu")


@pytest.mark.parametrize("transport", ["threads", "gloo"])
def test_a_rank_that_cannot_compile_is_named_and_the_world_remains(transport: str) -> None:
    def body(world: World) -> tuple[str, str, list[float]]:
        class Refusing(Executor):
            name = "Refusing"

            @classmethod
            def supports(cls, fusion: Any) -> Any:
                return True

            def _compile(self, fusion: Any, args: Any) -> None:
                if world.rank == 1:
                    raise ArithmeticError("no code for this")

            def _run(self, args: Any, outputs: Any) -> Any:
                raise AssertionError

        broken = hir.compile(program(), world.mesh("tp"), dispatch=ExecutorDispatch((Refusing,)))
        with pytest.raises((PeerError, ArithmeticError)) as caught:
            broken(torch.ones(4))
        return type(caught.value).__name__, str(caught.value), run(world, "compiled")

    results = spawn(body, 2, transport, timeout=20.0, device="cpu")
    assert [name for name, _, _ in results] == ["PeerError", "ArithmeticError"]
    assert results[0][1].startswith("rank 1 could not prepare: ArithmeticError: no code for this")
    assert results[0][2] == results[1][2]


@pytest.mark.world(2, transport=["threads", "gloo"], timeout=1.5)
def test_a_timeout_says_program_statement_trip_tensor_team_and_where_all_ranks_are(world: World) -> None:
    def late(number: int) -> None:
        if world.rank == 1 and number == 2 * 4:
            time.sleep(3.2)

    with pytest.raises(CommTimeout) as caught:
        run(world, "compiled", late)
    if world.rank == 0:
        text = str(caught.value)
        assert "never arrived: rank 1" in text, text
        assert "rank 1 is not in a communication" in text
        assert "rank 0 waits in permute(f32[4] to 1 from 1)" in text
        assert "@loop_of_faults: " in text
        assert "over tp" in text
        assert "%z" in text
        assert "trip = 4" in text
        assert os.path.basename(__file__) in text
        assert "step " in text
    world.close()


@pytest.mark.world(4)
def test_a_death_before_a_team_s_first_communication_is_noticed(world: World) -> None:
    mesh = world.mesh(("dp", "tp"), (2, 2))
    alone = program(1, over="dp")
    fine = hir.compile(program(1, over="tp"), mesh)
    assert fine(torch.ones(4)).shape == (4,)

    def stop(number: int) -> None:
        if world.rank == 3:
            raise PeerError("played dead", ranks=(3,))

    with pytest.raises(PeerError) as caught:
        hir.compile(alone, mesh, dispatch=dispatch_with(stop))(torch.ones(4))
    assert "played dead" in str(caught.value)
    assert "@loop_of_faults" in str(caught.value)
    start = time.monotonic()
    world.close()  # of a world with four teams, in trouble: it waits for nobody
    assert time.monotonic() - start < 20


@pytest.mark.world(2, transport="gloo")
@pytest.mark.parametrize("mode", ["checked", "compiled"])
def test_a_forked_child_cannot_run_a_program(world: World, mode: str) -> None:
    compiled = hir.compile(program(), world.mesh("tp"), mode=mode)
    want = compiled(torch.ones(4))
    child = os.fork()
    if child == 0:
        code = 2
        try:
            compiled(torch.ones(4))
        except InputError as error:
            code = 42 if "a forked child cannot use the world of its parent" in str(error) else 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 42
    assert torch.equal(compiled(torch.ones(4)), want)


@pytest.mark.world(2, transport=["threads", "gloo"], timeout=20.0)
@pytest.mark.parametrize("mode", ["checked", "compiled"])
def test_two_threads_that_run_programs_on_one_mesh_are_refused(world: World, mode: str) -> None:
    """Thread a stands in the middle of its program, on one rank inside a unit, when the other one begins."""
    inside, go = threading.Event(), threading.Event()

    def wait_in_the_middle(number: int) -> None:
        if number == 2 * world.rank:
            inside.set()
            assert go.wait(20.0)

    seen: dict[str, Any] = {}

    def thread_a() -> None:
        try:
            seen["a"] = run(world, mode, wait_in_the_middle)
        except (InputError, PeerError) as error:
            seen["a"] = error

    thread = threading.Thread(target=thread_a)
    thread.start()
    assert world.rank == 1 or inside.wait(20.0)
    with pytest.raises((InputError, PeerError), match="two threads run programs over team"):
        run(world, mode)
    go.set()
    thread.join()
    assert "two threads run programs over team" in str(seen["a"])


@pytest.mark.world(4, transport=["threads", "gloo"])
def test_two_threads_on_meshes_without_common_ranks_do_not_disturb_each_other(world: World) -> None:
    def results(mesh: Any) -> list[float]:
        compiled = hir.compile(program(), mesh)
        return [float(compiled(torch.full((4,), 1.0 + world.rank))[0]) for _ in range(10)]

    halves = [world.mesh("tp", ranks=(0, 1)), world.mesh("tp", ranks=(2, 3))]
    mine = results(halves[world.rank // 2])
    again: dict[int, list[float]] = {}
    alone = world.mesh("tp", ranks=(world.rank,))
    threads = [threading.Thread(target=lambda i=i, m=m: again.update({i: results(m)})) for i, m in enumerate((halves[world.rank // 2], alone))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert again[0] == mine
    assert len(set(again[1])) == 1


@pytest.mark.world(2, transport="gloo")
def test_programs_that_come_and_go_use_no_more_files_or_threads(world: World) -> None:
    meshes = [world.mesh("tp"), world.mesh("tp", ranks=(1, 0)), world.mesh(("dp", "tp"), (1, 2)), world.mesh(("dp", "tp"), (2, 1))]
    counts = []
    for _ in range(3):
        for number in range(24):
            mesh = meshes[number % len(meshes)]
            over = None if len(mesh.names) == 1 else "dp" if number % 2 else "tp"
            hir.compile(program(1 + number % 3, over=over), mesh, mode="checked")(torch.ones(4))
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    assert counts[0] == counts[1] == counts[2]
