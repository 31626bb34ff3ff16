"""A sharded fusion as a thing to call: lowered to a host program, it takes local shards and gives local shards, or DTensors for DTensors.

DTensors carry their layout, so it can be checked: another mesh or another placement is refused with the cure. Nothing is redistributed
behind the caller's back.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from hostir.dispatch.host_ir import HostIrExecutor
from hostir.errors import InputError
from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.graph.sharding import Partial, Placement, Replicate, Shard, Sharding
from hostir.mesh import Mesh
from hostir.passes.pipeline import lower, propagate
from hostir.passes.places import meshes
from hostir.passes.segment import Fusible, fusible
from hostir.types import Sym, Var, evaluate, is_whole

_CURE: Final = ".redistribute(mesh, placements) gives it the layout that the program was made for"


def lowered(fusion: Fusion, mesh: Mesh | None, plan: str, device: torch.device | str | None, options: Mapping[str, Any]) -> ShardedExecutor:
    """The executor of ``fusion``, lowered with ``plan``. ``options`` are those of HostIrExecutor."""
    full = propagate(fusion)
    p = lower(fusion, plan=plan, accepts=_accepts(device))
    own = meshes(full)
    if mesh is None and len(own) == 1 and own[0].shape is not None:
        mesh = own[0]
    ex = ShardedExecutor(full, mesh=mesh, device=device, **options)
    ex.compile(p)
    return ex


def _accepts(device: torch.device | str | None) -> Fusible:
    """Which operations a segment may hold: on a GPU what kernels are generated for, elsewhere what the table says."""
    on_gpu = torch.device(device).type == "cuda" if device is not None else torch.cuda.is_available()
    return _has_kernel if on_gpu else fusible


def _has_kernel(op: Op) -> bool:
    from hostir.kernels.lower import why_not

    alone = Fusion("alone")
    alone.ops.append(op)
    return fusible(op) and why_not(alone) is None


class ShardedExecutor(HostIrExecutor):
    """``fusion`` has an annotation for every tensor (``hir.propagate``)."""

    def __init__(self, fusion: Fusion, **options: Any) -> None:
        super().__init__(**options)
        self.sharded = fusion

    def __call__(self, *args: Any, out: torch.Tensor | Sequence[torch.Tensor] | None = None) -> Any:
        """Run on local shards, or on DTensors (all of them): the results are of the same kind."""
        if not _dtensor_loaded() or not any(map(_is_dtensor, args)):
            return super().__call__(*args, out=out)
        if out is not None:
            raise InputError("out= takes local tensors, and the arguments are DTensors", cure="pass .to_local() of each, or leave out= away")
        local = self._locals(args)
        results = super().__call__(*local)
        visible = [r.value for r in self.sharded.results if not r.hidden]
        given = (results,) if isinstance(results, torch.Tensor) else results or ()
        device_mesh = next(a.device_mesh for a in args if _is_dtensor(a))
        sizes = self._sizes(args)
        wrapped = tuple(_wrap(t, tv, device_mesh, sizes) for t, tv in zip(given, visible, strict=True))
        return None if results is None else wrapped[0] if len(wrapped) == 1 else wrapped

    def _locals(self, args: Sequence[Any]) -> list[Any]:
        """The local shards of DTensor arguments. InputError for a mix, another mesh or other placements."""
        params = self.sharded.params
        if len(args) != len(params):
            raise InputError(f"the program takes {len(params)} arguments", program=self.sharded.name, got=f"{len(args)} arguments")
        found: list[Any] = []
        for i, (p, a) in enumerate(zip(params, args, strict=True)):
            if isinstance(p, Var):
                found.append(a)
                continue
            where = f"argument {i + 1} (%{p.name})"
            if not _is_dtensor(a):
                raise InputError(
                    f"{where} is no DTensor, and others are", program=self.sharded.name, expected="DTensors only, or local shards only",
                    got=type(a).__name__, cure="DTensor.from_local(tensor, mesh, placements)",
                )  # fmt: skip
            s = p.sharding
            if s is None:
                raise InputError(f"{where} is a DTensor, and the fusion has no mesh", program=self.sharded.name, cure=".to_local()")
            if not _same_mesh(s.mesh, a.device_mesh):
                raise InputError(
                    f"{where} lies on another mesh", program=self.sharded.name,
                    expected=f"{s.mesh} ranks {list(s.mesh.layout) if s.mesh.shape else 'any'}", got=str(a.device_mesh), cure=_CURE,
                )  # fmt: skip
            if not _same_placements(s, a.placements):
                raise InputError(
                    f"{where} has other placements", program=self.sharded.name, expected=str(s), got=", ".join(map(str, a.placements)), cure=_CURE
                )
            if a.dim() != len(p.known.dims) or any(
                is_whole(d) and isinstance(d, int) and d != n for d, n in zip(p.known.dims, a.shape, strict=False)
            ):
                raise InputError(f"{where} has another shape", program=self.sharded.name, expected=p.type, got=list(a.shape))
            found.append(a.to_local())
        return found

    def _sizes(self, args: Sequence[Any]) -> dict[str, int]:
        """The symbols of the fusion, as the whole tensors have them."""
        found: dict[str, int] = {}
        for p, a in zip(self.sharded.params, args, strict=True):
            if isinstance(p, TensorView):
                found |= {d.name: int(n) for d, n in zip(p.known.dims, a.shape, strict=True) if isinstance(d, Sym)}
        return found


def _dtensor_loaded() -> bool:
    return "torch.distributed.tensor" in sys.modules


def _is_dtensor(a: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(a, DTensor)


def _same_mesh(mesh: Mesh, other: Any) -> bool:
    if mesh.shape is None:
        return bool(len(mesh.names) == other.mesh.dim())
    return bool(tuple(other.mesh.shape) == mesh.shape and tuple(other.mesh.flatten().tolist()) == mesh.layout)


def _same_placements(s: Sharding, others: Sequence[Any]) -> bool:
    for name, mine, other in zip(s.mesh.names, s.placements, others, strict=True):
        size = s.mesh.axis_size(name)
        if isinstance(size, int) and size == 1:
            continue
        if repr(_to_torch(mine)) != repr(other):
            return False
    return True


def _to_torch(p: Placement) -> Any:
    from torch.distributed import tensor

    match p:
        case Shard(dim):
            return tensor.Shard(dim)
        case Replicate():
            return tensor.Replicate()
        case Partial(op):
            return tensor.Partial(op)


def _wrap(t: torch.Tensor, tv: TensorView, device_mesh: Any, sizes: Mapping[str, int]) -> Any:
    from torch.distributed.tensor import DTensor

    assert tv.sharding is not None
    shape = [int(evaluate(d, lambda leaf: sizes[leaf.name] if isinstance(leaf, Sym) else None)) for d in tv.known.dims]
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return DTensor.from_local(
        t, device_mesh, [_to_torch(p) for p in tv.sharding.placements], run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )  # fmt: skip
