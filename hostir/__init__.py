"""hostir: host programs on many GPUs, as values that can be built, printed, verified, simulated, compiled and run.

``import hostir as hir`` loads nothing heavy: every public name is looked up in one table at its first use, and only the modules that
it needs are imported then. The names in ``__all__`` are the public interface; everything else may change.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if __name__ != "hostir":
    raise ImportError(f"this package is imported as hostir, not as {__name__}: a second copy would have its own classes")

_HERE: Final = Path(__file__).resolve().parent
if not (_HERE / "kernels").is_dir():
    __path__.append(str(_HERE.parent))  # a checkout has kernels, dispatch and launch beside this folder, a wheel inside it

__version__: Final = "0.1.0"

# Public name -> where it lives: "module" for a submodule, "module:attribute" for anything else.
_PUBLIC: Final[Mapping[str, str]] = {
    # errors
    "BuildError": "hostir.errors:BuildError",
    "CommTimeout": "hostir.errors:CommTimeout",
    "DeviceMemoryError": "hostir.errors:DeviceMemoryError",
    "HostIrError": "hostir.errors:HostIrError",
    "InputError": "hostir.errors:InputError",
    "MixedFusionError": "hostir.errors:MixedFusionError",
    "NotCompiledError": "hostir.errors:NotCompiledError",
    "ParseError": "hostir.errors:ParseError",
    "PeerError": "hostir.errors:PeerError",
    "PlanError": "hostir.errors:PlanError",
    "RankError": "hostir.errors:RankError",
    "RankMismatchError": "hostir.errors:RankMismatchError",
    "UnitTraceError": "hostir.errors:UnitTraceError",
    "UnsupportedError": "hostir.errors:UnsupportedError",
    "VerifyError": "hostir.errors:VerifyError",
    # host numbers
    "max": "hostir.types:maximum",
    "min": "hostir.types:minimum",
    "same": "hostir.types:same",
    # meshes and tensor graphs
    "Fusion": "hostir.graph.fusion:Fusion",
    "HostLoop": "hostir.graph.sharding:HostLoop",
    "Mesh": "hostir.mesh:Mesh",
    "MeshAxis": "hostir.graph.sharding:MeshAxis",
    "Partial": "hostir.graph.sharding:Partial",
    "Replicate": "hostir.graph.sharding:Replicate",
    "Shard": "hostir.graph.sharding:Shard",
    "ops": "hostir.graph.ops",
    "spec": "hostir.trace:spec",
    "trace": "hostir.trace:trace",
    "unit": "hostir.trace:unit",
    "lower": "hostir.passes.pipeline:lower",
    "propagate": "hostir.passes.pipeline:propagate",
    "segments": "hostir.passes.pipeline:segments",
    # programs
    "Program": "hostir.build:Program",
    "parse": "hostir.build:parse",
    "sym": "hostir.build:sym",
    "verify": "hostir.ir.verify:verify",
    "walk": "hostir.ir.walk:walk",
    "Machine": "hostir.sim.machine:Machine",
    "simulate": "hostir.sim.simulate:simulate",
    # running
    "Ids": "hostir.dispatch:Ids",
    "compile": "hostir.dispatch:compile",
    "launch": "hostir.launch",
    "profile": "hostir.runtime.profile:profile",
}

if TYPE_CHECKING:  # the same table, for type checkers and editors
    from hostir import launch as launch
    from hostir.build import Program as Program
    from hostir.build import parse as parse
    from hostir.build import sym as sym
    from hostir.dispatch import Ids as Ids
    from hostir.dispatch import compile as compile
    from hostir.errors import BuildError as BuildError
    from hostir.errors import CommTimeout as CommTimeout
    from hostir.errors import DeviceMemoryError as DeviceMemoryError
    from hostir.errors import HostIrError as HostIrError
    from hostir.errors import InputError as InputError
    from hostir.errors import MixedFusionError as MixedFusionError
    from hostir.errors import NotCompiledError as NotCompiledError
    from hostir.errors import ParseError as ParseError
    from hostir.errors import PeerError as PeerError
    from hostir.errors import PlanError as PlanError
    from hostir.errors import RankError as RankError
    from hostir.errors import RankMismatchError as RankMismatchError
    from hostir.errors import UnitTraceError as UnitTraceError
    from hostir.errors import UnsupportedError as UnsupportedError
    from hostir.errors import VerifyError as VerifyError
    from hostir.graph import ops as ops
    from hostir.graph.fusion import Fusion as Fusion
    from hostir.graph.sharding import HostLoop as HostLoop
    from hostir.graph.sharding import MeshAxis as MeshAxis
    from hostir.graph.sharding import Partial as Partial
    from hostir.graph.sharding import Replicate as Replicate
    from hostir.graph.sharding import Shard as Shard
    from hostir.ir.verify import verify as verify
    from hostir.ir.walk import walk as walk
    from hostir.mesh import Mesh as Mesh
    from hostir.passes.pipeline import lower as lower
    from hostir.passes.pipeline import propagate as propagate
    from hostir.passes.pipeline import segments as segments
    from hostir.runtime.profile import profile as profile
    from hostir.sim.machine import Machine as Machine
    from hostir.sim.simulate import simulate as simulate
    from hostir.trace import spec as spec
    from hostir.trace import trace as trace
    from hostir.trace import unit as unit
    from hostir.types import maximum as max
    from hostir.types import minimum as min
    from hostir.types import same as same
else:

    def __getattr__(name: str) -> Any:
        where = _PUBLIC.get(name)
        if where is None:
            raise AttributeError(f"module 'hostir' has no attribute {name!r}")
        module, _, attribute = where.partition(":")
        value = import_module(module)
        if attribute:
            value = getattr(value, attribute)
        globals()[name] = value
        return value

    class _Package(ModuleType):
        """Importing a submodule binds its name in this package; a public name that is spelled the same (``trace``) stays what it is."""

        def __setattr__(self, name: str, value: object) -> None:
            if not (isinstance(value, ModuleType) and ":" in _PUBLIC.get(name, "")):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


__all__ = [
    "BuildError",
    "CommTimeout",
    "DeviceMemoryError",
    "Fusion",
    "HostIrError",
    "HostLoop",
    "Ids",
    "InputError",
    "Machine",
    "Mesh",
    "MeshAxis",
    "MixedFusionError",
    "NotCompiledError",
    "ParseError",
    "Partial",
    "PeerError",
    "PlanError",
    "Program",
    "RankError",
    "RankMismatchError",
    "Replicate",
    "Shard",
    "UnitTraceError",
    "UnsupportedError",
    "VerifyError",
    "compile",
    "launch",
    "lower",
    "max",
    "min",
    "ops",
    "parse",
    "profile",
    "propagate",
    "same",
    "segments",
    "simulate",
    "spec",
    "sym",
    "trace",
    "unit",
    "verify",
    "walk",
]
