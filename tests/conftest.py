"""A test's tier is its folder, its GPUs are asked for by marker, and its random numbers come from one seed.

``tests/tiny`` runs in seconds, ``tests/unit`` in one process, ``tests/kernels`` with Triton but no GPU, ``tests/dist`` on several ranks,
``tests/gpu`` on a GPU.
"""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

TESTS = Path(__file__).parent
TIERS = ("tiny", "unit", "kernels", "dist", "gpu")
SEED = 0

# The same examples at every run, no limit on one example's time, and no search for an explanation of a failure.
settings.register_profile("hostir", derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate, Phase.shrink])
settings.load_profile("hostir")


def pytest_configure(config: pytest.Config) -> None:
    """The project's own plugin, where the package is not installed."""
    if not config.pluginmanager.hasplugin("hostir"):
        config.pluginmanager.import_plugin("hostir.launch.testing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the folder that it is in."""
    for item in items:
        tier = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if tier in TIERS:
            item.add_marker(tier)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, and say why, what needs more GPUs than there are."""
    marker = item.get_closest_marker("gpus")
    needed = int(marker.args[0]) if marker else int(item.get_closest_marker("gpu") is not None)
    if needed and (there := gpu_count()) < needed:
        pytest.skip(f"needs {needed} GPU{'s' if needed > 1 else ''}, this machine has {there}")


@functools.cache
def gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers whatever ran before; modules that nobody imported yet are left alone."""
    random.seed(SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(SEED)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(SEED)
