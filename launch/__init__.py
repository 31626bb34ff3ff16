"""How ranks come to be: from torchrun, mpirun, Slurm or nothing (``init``), or started here (``spawn``, ``run_script``)."""

from __future__ import annotations

if __name__ != "hostir.launch":
    raise ImportError(f"this package is imported as hostir.launch, not as {__name__}: a second copy would have its own classes")

from hostir.launch.init import init
from hostir.launch.run import run_script
from hostir.launch.spawn import spawn
from hostir.runtime.world import World

__all__ = ["World", "init", "run_script", "spawn"]
