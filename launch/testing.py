"""The pytest plugin: ``@pytest.mark.world(4)`` and the body of a test runs on four ranks; it passes when it passes on all of them.

Under plain ``pytest`` the ranks are processes that stay from test to test, or threads. Under ``torchrun -m pytest`` and
``mpirun python -m pytest`` they are the ranks that exist. Torch is loaded when the first such test runs, not before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import pytest

from hostir.errors import InputError
from hostir.launch.env import find_place

if TYPE_CHECKING:
    from hostir.runtime.world import World

TRANSPORTS: Final = ("gloo", "nccl", "symm", "threads")
_USE: Final = "@pytest.mark.world(n, transport='gloo', timeout=60.0, device=None)"


@dataclass(frozen=True)
class Ask:
    """The ranks that a test wants. ``timeout``, in seconds: of each communication, and of the whole body."""

    num_ranks: int
    transport: str
    timeout: float
    device: str | None


class Ranks(Protocol):
    """Where the ranks of this session come from."""

    def world(self, item: pytest.Item) -> Any:
        """What the fixture ``world`` is in this process."""


RANKS: Final = pytest.StashKey[Ranks]()


class OnRank:
    """A fixture's value that each rank makes for itself; see ``on_rank``."""

    def __init__(self, make: Callable[[World], Any]) -> None:
        self.make = make


def on_rank(make: Callable[[World], Any]) -> Any:
    """What a fixture returns when its value belongs to a rank: ``return on_rank(lambda world: world.mesh("tp"))``.

    Every rank calls ``make`` with its World right before the test, and the test gets the result.
    """
    return OnRank(make)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Any:
    """The World of the rank that runs the test; the test has the marker ``world``."""
    if asked(request.node) is None:
        text = f"the fixture world is for tests that run on ranks, and {request.node.name} has no marker\n  cure: @pytest.mark.world(4)"
        pytest.fail(text, pytrace=False)
    return request.config.stash[RANKS].world(request.node)


def asked(item: pytest.Item) -> Ask | None:
    """What the test's marker says, or None where it has none. A marker that makes no sense fails the test."""
    marker = item.get_closest_marker("world")
    if marker is None:
        return None
    try:
        return _asked(item, marker)
    except InputError as error:
        raise refusal(error) from None


def refusal(error: InputError) -> BaseException:
    """``error`` as what pytest shows without a traceback."""
    return pytest.fail.Exception(str(error), pytrace=False)


def _asked(item: pytest.Item, marker: pytest.Mark) -> Ask:
    given = _given(marker)
    num_ranks, transport = given["n"], given["transport"]
    if hasattr(item, "callspec") and "world" in item.callspec.params:
        num_ranks, transport = item.callspec.params["world"]
    timeout = given["timeout"] if given["timeout"] is not None else float(os.environ.get("HOSTIR_TIMEOUT", "60"))
    if not isinstance(num_ranks, int) or num_ranks < 1:
        raise InputError("the marker world needs a number of ranks", expected=_USE, got=repr(num_ranks))
    if transport not in TRANSPORTS:
        raise InputError(f"there is no transport {transport!r} for tests", expected=", ".join(TRANSPORTS), got=repr(transport))
    if not timeout > 0:
        raise InputError("the marker world needs a timeout above zero", expected="seconds", got=repr(timeout))
    return Ask(num_ranks, transport, float(timeout), given["device"])


def _given(marker: pytest.Mark) -> dict[str, Any]:
    given: dict[str, Any] = {"n": None, "transport": "gloo", "timeout": None, "device": None}
    unknown = set(marker.kwargs) - set(given)
    if len(marker.args) > 1 or unknown or (marker.args and "n" in marker.kwargs):
        raise InputError("the marker world takes the number of ranks and keywords", expected=_USE, got=f"world{marker.args} {marker.kwargs}")
    return {**given, **({"n": marker.args[0]} if marker.args else {}), **marker.kwargs}


# ------------------------------------------------------------------------------------------------------------------------ hooks


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and whoever runs the tests that have it."""
    config.addinivalue_line(
        "markers",
        "world(n, transport='gloo', timeout=60.0, device=None): the test's body runs on n ranks, processes (gloo, nccl, symm) or threads; "
        "lists of numbers or transports make one test of each",
    )
    try:
        place = find_place(os.environ)
    except InputError as error:
        raise pytest.UsageError(str(error)) from None
    ranks: Any
    if place.size == 1:
        from hostir.launch.testing_pool import Pool

        ranks = Pool()
    else:
        from hostir.launch.testing_job import Job

        ranks = Job(config, place)
    config.stash[RANKS] = ranks
    config.pluginmanager.register(ranks, "hostir-ranks")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Lists in the marker: one test for each number of ranks and each transport."""
    marker = metafunc.definition.get_closest_marker("world")
    if marker is None:
        return
    try:
        given = _given(marker)
    except InputError as error:
        raise refusal(error) from None
    if not isinstance(given["n"], (list, tuple)) and not isinstance(given["transport"], (list, tuple)):
        return
    cases = [(n, t) for n in _as_list(given["n"]) for t in _as_list(given["transport"])]
    if "world" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world")
    metafunc.parametrize("world", cases, indirect=True, ids=[f"{n}-{t}" for n, t in cases])


def _as_list(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)
