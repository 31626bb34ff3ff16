"""The pytest plugin: one body on many ranks, one result, under plain pytest and under launchers; whatever a rank does, it ends."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from tests.dist.jobs import Session, launcher, run, run_pytest, write

COMMON = """
import os, time, threading
import pytest
from hostir.launch.testing import on_rank
from hostir.runtime.world import current_world

def total(world):
    import torch
    from hostir.runtime.comms.protocol import CommCall
    x = torch.full((2,), float(world.rank + 1))
    world.comms.issue(CommCall("allreduce", tuple(range(world.size)), (x,), (x,))).wait()
    return float(x[0])

@pytest.fixture
def factor():
    return 3

@pytest.fixture
def mesh():
    return on_rank(lambda world: world.mesh("tp"))

@pytest.mark.world(2)
def test_body_on_two_ranks(world, mesh, factor, tmp_path, monkeypatch):
    monkeypatch.setenv("A_VARIABLE", "set")
    print("hello from", world.rank)
    assert current_world() is world and mesh.world is world and factor == 3 and tmp_path.is_dir()
    assert total(world) == 3

@pytest.mark.world([1, 2], transport=["threads", "gloo"])
@pytest.mark.parametrize("k", [5])
def test_lists(world, k):
    assert k == 5 and "A_VARIABLE" not in os.environ
    assert total(world) == world.size * (world.size + 1) / 2

@pytest.mark.world(2, transport=["threads", "gloo"])
def test_one_fails(world):
    print("printed by", world.rank)
    if world.rank == 1:
        assert world.rank == 0, "one is wrong"
    total(world)

@pytest.mark.world(2, transport=["threads", "gloo"])
def test_one_skips(world):
    if world.rank == 1:
        pytest.skip("not on this one")
    total(world)

@pytest.mark.world(2)
def test_all_skip(world):
    pytest.skip("nowhere")

@pytest.mark.world(2, transport=["threads", "gloo"])
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_one_raises_what_it_should(world):
    if world.rank == 1:
        raise ValueError("as expected")
    total(world)

@pytest.mark.world(2)
def test_one_says_xfail(world):
    if world.rank == 1:
        pytest.xfail("known")
    total(world)

@pytest.mark.world(2)
def test_both_wrong_on_their_own(world):
    raise KeyError("each" if world.rank else "every")

class TestInAClass:
    @pytest.mark.world(2)
    def test_method(self, world):
        assert total(world) == 3

def test_without_ranks():
    assert current_world() is None

def test_without_marker(world):
    pass

@pytest.mark.world("many")
def test_wrong_marker(world):
    pass
"""

PLAIN = """
@pytest.fixture
def lock():
    return threading.Lock()

@pytest.fixture
def eager(world):
    return world.rank

@pytest.mark.world(2)
def test_fixture_that_cannot_travel(world, lock):
    pass

@pytest.mark.world(2)
def test_capsys_stays_here(world, capsys):
    pass

@pytest.mark.world(2)
def test_fixture_that_needs_the_world_at_once(eager):
    pass

@pytest.mark.world(2, transport="threads")
def test_threads_share_fixtures(world, lock):
    with lock:
        pass

@pytest.mark.world(2)
@pytest.mark.parametrize("turn", [1, 2])
def test_processes_stay(world, turn):
    open(f"{os.environ['NOTES']}/pid-{turn}-{world.rank}", "w").write(str(os.getpid()))

@pytest.mark.world(2)
def test_works_left_under_way(world):
    import torch
    from hostir.runtime.comms.protocol import CommCall
    if world.rank == 1:
        world.comms.issue(CommCall("recv", (0, 1), (), (torch.zeros(2),), source=0))

@pytest.mark.world(2)
def test_processes_are_replaced(world):
    open(f"{os.environ['NOTES']}/pid-3-{world.rank}", "w").write(str(os.getpid()))
    assert total(world) == 3

@pytest.mark.world(2)
def test_killed(world):
    print("last words of", world.rank)
    if world.rank == 1:
        os.kill(os.getpid(), 9)
    total(world)

@pytest.mark.world(2, timeout=0.5, transport=["threads", "gloo"])
def test_one_hangs(world):
    if world.rank == 1:
        time.sleep(20)
    total(world)

@pytest.mark.world(2, timeout=0.5)
def test_all_hang(world):
    time.sleep(20)

@pytest.mark.world(2, timeout=0.5)
def test_stopped(world):
    if world.rank == 0:
        os.kill(os.getpid(), 19)
    total(world)

@pytest.mark.world(2)
def test_afterwards(world):
    assert total(world) == 3
"""


def holds(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, text


def check_common(session: Session) -> None:
    """What holds however the ranks came to be."""
    names = {f"test_lists[{n}-{t}-5]" for n in (1, 2) for t in ("threads", "gloo")}
    for name in ("test_body_on_two_ranks", "test_method", "test_without_ranks", *names):
        assert session[name] == "passed", session.text
    for transport in ("threads", "gloo"):
        kind, message, text = session.outcomes[f"test_one_fails[2-{transport}]"]
        assert kind == "failure"
        assert message.startswith("rank 1: AssertionError: one is wrong") or transport == "threads", message
        holds(text, "assert 1 == 0", "rank 0: PeerError: rank 1 failed: AssertionError: one is wrong", "statement: allreduce", "printed by 1")
        assert session.outcomes[f"test_one_skips[2-{transport}]"][:2] == ("skipped", "rank 1: not on this one")
        assert session[f"test_one_raises_what_it_should[2-{transport}]"] == "xfailed"
    assert session.outcomes["test_all_skip"][:2] == ("skipped", "nowhere")
    assert session["test_one_says_xfail"] == "xfailed"
    holds(session.outcomes["test_both_wrong_on_their_own"][2], "KeyError: 'each'", "KeyError: 'every'", "2 of 2 ranks failed")
    assert session["test_without_marker"] == "error"
    holds(session.outcomes["test_without_marker"][2], "@pytest.mark.world(4)")
    holds(session.outcomes["test_wrong_marker"][2], "needs a number of ranks", "'many'")
    assert session.code == 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Session, Path]:
    folder = tmp_path_factory.mktemp("plain")
    temporary = folder / "temporary"
    temporary.mkdir()
    session = run_pytest(folder, COMMON + PLAIN, NOTES=str(folder), TMPDIR=str(temporary))
    assert not list(temporary.glob("hostir-*")), "the ranks' folders were left behind"
    return session, folder


def test_plain_pytest_runs_bodies_on_ranks_that_it_starts(plain: tuple[Session, Path]) -> None:
    check_common(plain[0])


def test_fixtures_that_cannot_travel_are_refused_with_the_cure(plain: tuple[Session, Path]) -> None:
    session = plain[0]
    holds(session.outcomes["test_fixture_that_cannot_travel"][2], "the fixture lock cannot be sent to the ranks", "on_rank(lambda world")
    holds(session.outcomes["test_capsys_stays_here"][2], "the fixture capsys belongs to the process that runs pytest", 'transport="threads"')
    holds(session.outcomes["test_fixture_that_needs_the_world_at_once"][2], "the fixture world has no 'rank' in this process", "on_rank(lambda world")
    assert session["test_threads_share_fixtures"] == "passed"


def test_processes_stay_until_a_test_breaks_their_world(plain: tuple[Session, Path]) -> None:
    session, folder = plain
    for name in ("test_processes_stay[1]", "test_processes_stay[2]", "test_works_left_under_way", "test_processes_are_replaced"):
        assert session[name] == "passed", session.text
    pids = [{rank: (folder / f"pid-{turn}-{rank}").read_text() for rank in (0, 1)} for turn in (1, 2, 3)]
    assert pids[0] == pids[1]
    assert not set(pids[1].values()) & set(pids[2].values())


def test_ranks_that_die_or_hang_fail_their_test_only(plain: tuple[Session, Path]) -> None:
    session = plain[0]
    kind, message, text = session.outcomes["test_killed"]
    assert (kind, message.split("\n")[0]) == ("failure", "rank 1 was killed by SIGKILL")
    holds(text, "rank 0: PeerError: rank 1 was killed by SIGKILL", "[0] last words of 0", "[1] last words of 1")
    for transport in ("threads", "gloo"):
        kind, message, text = session.outcomes[f"test_one_hangs[2-{transport}]"]
        assert kind == "failure"
        holds(text, "rank 0 waited 0.5 s in allreduce(f32[2] sum)", "never arrived: rank 1", "rank 1 did not end", "time.sleep(20)" if transport == "threads" else "in test_one_hangs")
    holds(session.outcomes["test_all_hang"][2], "did not end within", "in test_all_hang", "rank 1: the same")
    holds(session.outcomes["test_stopped"][2], "never arrived: rank 0", "its process is stopped")
    assert session["test_afterwards"] == "passed"


@pytest.mark.parametrize("name", ["torchrun", "mpirun"])
def test_under_a_launcher_its_ranks_run_the_tests_and_agree(name: str, tmp_path: Path) -> None:
    more = """
    @pytest.mark.world(3)
    def test_needs_more(world):
        pass

    @pytest.mark.world(1)
    def test_on_the_first_rank_only(world):
        assert (world.rank, world.size) == (0, 1)

    def test_a_plain_test_that_fails_on_one_rank():
        assert os.environ.get("RANK", os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))) == "0"
    """
    session = run_pytest(tmp_path, COMMON + textwrap.dedent(more), launcher(name, 2))
    check_common(session)
    assert session.outcomes["test_needs_more"][:2] == ("skipped", "needs 3 ranks, this job has 2")
    assert session["test_on_the_first_rank_only"] == "passed"
    kind, message, text = session.outcomes["test_a_plain_test_that_fails_on_one_rank"]
    assert kind == "failure"
    holds(text, "rank 1: AssertionError", "1 of 2 ranks failed")
    holds(session.outcomes["test_one_fails[2-gloo]"][2], "printed by 0", "printed by 1")
    assert session.text.count("short test summary info") == 1


LOST = """
@pytest.mark.world(2)
def test_before(world):
    total(world)

@pytest.mark.world(2, timeout=2)
def test_lost(world):
    if world.rank == int(os.environ["LOST"]):
        if os.environ["HOW"] == "dies":
            os._exit(7)
        time.sleep(60)
    total(world)

@pytest.mark.world(2)
def test_after(world):
    total(world)
"""


@pytest.mark.parametrize(("name", "how", "lost"), [("torchrun", "dies", 1), ("mpirun", "hangs", 0)])
def test_a_session_ends_with_a_report_when_a_rank_is_lost(name: str, how: str, lost: int, tmp_path: Path) -> None:
    header = COMMON.split("@pytest.fixture")[0]
    session = run_pytest(tmp_path, header + LOST, launcher(name, 2), HOW=how, LOST=str(lost))
    assert session.code != 0
    holds(session.text, "1 failed, 1 passed", f"rank {lost}", "test_lost (call): the session cannot go on")
    if how == "hangs":
        holds(session.text, "rank 1 waited 2 s in allreduce(f32[2] sum)", "never arrived: rank 0", "rank 0: no result within")


def test_ranks_that_collect_different_tests_say_so(tmp_path: Path) -> None:
    text = """
    import os, pytest
    if os.environ["RANK"] == "0":
        @pytest.mark.world(2)
        def test_a(world): pass
    @pytest.mark.world(2)
    def test_b(world): pass
    """
    session = run_pytest(tmp_path, text, launcher("torchrun", 2))
    assert session.code != 0
    holds(session.text, "ranks 0 and 1 have collected different tests", "test_it.py::test_a and", "test_it.py::test_b")


def test_sessions_without_such_tests_do_not_load_torch(tmp_path: Path) -> None:
    write(tmp_path / "test_light.py", "import sys\ndef test_light():\n    assert 'torch' not in sys.modules\n")
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "hostir.launch.testing", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)])
    if "already registered" in done.stderr:  # the package is installed, with its entry point
        done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
