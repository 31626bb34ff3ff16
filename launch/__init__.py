"""How ranks come to be: from torchrun, mpirun, Slurm or nothing (``init``), or started here (``spawn``, ``run_script``).

Nothing is imported until a name is used: the pytest plugin lives here too, and must not make every test run load torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if __name__ != "hostir.launch":
    raise ImportError(f"this package is imported as hostir.launch, not as {__name__}: a second copy would have its own classes")

_PUBLIC: Final[Mapping[str, str]] = {
    "World": "hostir.runtime.world",
    "init": "hostir.launch.init",
    "run_script": "hostir.launch.run",
    "spawn": "hostir.launch.spawn",
}

if TYPE_CHECKING:
    from hostir.launch.init import init as init
    from hostir.launch.run import run_script as run_script
    from hostir.launch.spawn import spawn as spawn
    from hostir.runtime.world import World as World
else:

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'hostir.launch' has no attribute {name!r}")
        value = getattr(import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value

    class _Package(ModuleType):
        """Importing the module ``init`` would bind its name here, where it is a function's."""

        def __setattr__(self, name: str, value: object) -> None:
            if not (isinstance(value, ModuleType) and name in _PUBLIC):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


__all__ = ["World", "init", "run_script", "spawn"]
