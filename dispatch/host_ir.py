"""The executor of host programs. It is given its dispatch (for the units) and its ranks (through the mesh), and drives both."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Final, Literal

import torch

from hostir.dispatch.agreement import Agreement
from hostir.dispatch.binding import Binding, bind, check_type, shares_memory
from hostir.dispatch.compiled import MAX_SETS, CompiledProgram
from hostir.dispatch.dispatch import ExecutorDispatch
from hostir.dispatch.fast import FastCall
from hostir.dispatch.graphs import GraphedProgram, refuse, why_not
from hostir.dispatch.interpreter import Interpreter
from hostir.dispatch.profiled import run_checked, run_compiled
from hostir.dispatch.protocol import Executor, Ids, No, all_or_none
from hostir.dispatch.segments import Segments
from hostir.dispatch.symmetric import SymmetricBuffers, has_symmetric
from hostir.errors import InputError, NotCompiledError
from hostir.graph.fusion import Fusion
from hostir.ir.check import check_program
from hostir.ir.nodes import Alloc, Buffer, Call, Comm, Program, every, trees
from hostir.ir.verify import verify
from hostir.ir.walk import Scope, resolve_mesh, symbols
from hostir.mesh import Mesh
from hostir.passes.reshard import communications, lower_communications
from hostir.passes.schedule import schedule
from hostir.runtime.comms.protocol import Comms
from hostir.runtime.profile import active_profile, running_profile
from hostir.runtime.world import World, current_world
from hostir.types import Var, leaves

MODES: Final = ("checked", "compiled", "graph", "auto")
MAX_PLANS: Final = 32


class HostIrExecutor(Executor):
    """Runs a Program: ``run(*tensors)`` in the order of its inputs, host scalars among them. Also takes a fusion in which every
    operation is a resharding."""

    name: ClassVar[str] = "HostIrExecutor"
    profiles_itself: ClassVar[bool] = True

    def __init__(
        self,
        ids: Ids | None = None,
        *,
        mesh: Mesh | None = None,
        mode: str = "checked",
        device: torch.device | str | None = None,
        dispatch: ExecutorDispatch | None = None,
        outputs: str = "fresh",
        overlap: str = "auto",
        dims: Mapping[str, int] | None = None,
        reduce: str = "default",
    ) -> None:
        super().__init__(ids)
        self._dims = dict(dims or {})
        self._reduce = reduce
        self.mode = mode
        self._given_mesh = mesh
        self._wanted_device = None if device is None else torch.device(device)
        self._dispatch = dispatch or ExecutorDispatch.default()
        self._segments: dict[torch.device, Segments] = {}
        self._overlap = overlap
        self._schedules: OrderedDict[Hashable, Program] = OrderedDict()
        self._plans: OrderedDict[Hashable, CompiledProgram] = OrderedDict()
        self._symmetric: OrderedDict[Hashable, SymmetricBuffers] = OrderedDict()
        self._control: tuple[Var, ...] = ()
        self._outputs = outputs
        self._fast: list[FastCall] = []
        self._epoch = 0

    @classmethod
    def supports(cls, fusion: Any) -> Literal[True] | No:
        if isinstance(fusion, Program):
            return True
        if not isinstance(fusion, Fusion):
            return No(f"a {type(fusion).__name__} is neither a program nor a fusion")
        return True if communications(fusion) else No("no operation moves data between ranks")

    def _compile(self, fusion: Program | Fusion, args: Sequence[Any] | None) -> None:
        p = fusion if isinstance(fusion, Program) else lower_communications(fusion)
        check_program(p)
        self._program = p
        self._agreement = Agreement(p)
        self._control = control_scalars(p)
        mesh = self._known_mesh()
        if mesh is not None and not self._control and set(symbols(p)) <= set(self._dims):
            self._scheduled(mesh, self._dims, {})
        if self._wanted_device is not None:
            self._segments_on(self._wanted_device, self.program)

    def _known_mesh(self) -> Mesh | None:
        """The sized mesh that the program will run on, where that is known already."""
        try:
            return self._mesh(self._world(), needed=False)
        except InputError:
            return None

    @property
    def program(self) -> Program:
        """What is run: with streams and memory scheduled where all sizes are known (or were, at the last run), else as written."""
        if not hasattr(self, "_program"):
            raise NotCompiledError("no program yet: compile first")
        return next(reversed(self._schedules.values()), self._program)

    # ---- running

    def __call__(self, *args: Any, out: torch.Tensor | Sequence[torch.Tensor] | None = None) -> Any:
        """Run. Returns None, a tensor, or a tuple of them; ``out=`` is written instead of fresh tensors."""
        world = self._world()
        quiet = active_profile() is None
        if quiet:
            for entry in self._fast:
                if entry.fits(args, out, world):
                    self._epoch += 1
                    return entry.run(out, self._epoch)
        given = None if out is None else [out] if isinstance(out, torch.Tensor) else list(out)
        results = self.run(args, given)
        if quiet:
            self._remember(args, out, world, results)
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def _run(self, args: Sequence[Any], outputs: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        p = self._program
        world = self._world()
        mesh = self._mesh(world)
        rank = world.rank if world is not None else mesh.layout[0]
        if rank not in mesh.layout:
            raise InputError(f"rank {rank} is no member of the program's mesh", program=p.name, expected=f"one of {list(mesh.layout)}", rank=rank)
        outputs = all_or_none(outputs, len(p.results), f"the program @{p.name}")
        comms = world.comms if world is not None else None
        if self._reduce == "ordered" and comms is not None and comms.name == "nccl":
            raise InputError("NCCL reduces in an order of its own", program=p.name, cure='reduce="default", or another transport')
        several = comms is not None and len(mesh.layout) > 1
        try:
            binding = bind(p, args, mesh, rank, self._device(world))
            scope = Scope(mesh, rank, binding.dims, binding.scalars, self._epoch + 1)
            if outputs is not None:
                for b, o in zip(p.results, outputs, strict=True):
                    check_type(o, b.type, [scope.number(d) for d in b.type.dims], b.name, p.name)
        except InputError as e:
            if several and comms is not None:
                self._agreement.refuse(comms, mesh, e)
            raise e.with_context(rank=rank if len(mesh.layout) > 1 else None) from None
        is_new = several and comms is not None and self._agreement.reach(comms, mesh, binding)
        self._epoch += 1
        with torch.no_grad():
            with self._agreement.prepared_together(comms, mesh) if is_new and comms is not None else nullcontext():
                scheduled = self._scheduled(mesh, binding.dims, binding.scalars)
                plan = None if self.mode == "checked" else self._plan(scheduled, scope, mesh, binding, comms)
                if plan is None:
                    self._segments_on(binding.device, scheduled)
                elif is_new:
                    plan.prepare(binding, outputs)
            if plan is None:
                return self._interpret(scheduled, scope, mesh, binding, comms, outputs)
            if (profile := running_profile()) is not None:
                return run_compiled(profile, plan, binding, outputs, self._epoch, rank)
            return plan.run(binding, outputs, self._epoch)

    def _scheduled(self, mesh: Mesh, dims: Mapping[str, int], scalars: Mapping[Var, Any]) -> Program:
        """The program with its streams ordered and its memory laid out for these sizes, verified for every rank."""
        key = (mesh.layout, mesh.shape, tuple(sorted(dims.items())), tuple(scalars[v] for v in self._control))
        if (found := self._schedules.get(key)) is not None:
            return found
        named = {v.name: x for v, x in scalars.items()}
        verify(self._program, mesh, dims=dims, scalars=named)
        made = schedule(self._program, mesh, dims=dims, scalars=named, overlap=self._overlap)
        if made is not self._program:
            verify(made, mesh, dims=dims, scalars=named)
        self._schedules[key] = made
        while len(self._schedules) > MAX_PLANS:
            self._schedules.popitem(last=False)
        return made

    def _plan(self, p: Program, scope: Scope, mesh: Mesh, binding: Binding, comms: Comms | None) -> CompiledProgram:
        """The compiled form for these sizes, made at their first run. Every thread has its own, with its own temporaries."""
        control = tuple(binding.scalars[v] for v in self._control)
        key = (threading.get_ident(), binding.device, tuple(sorted(binding.dims.items())), control, mesh.layout, mesh.shape)
        if (found := self._plans.get(key)) is not None:
            self._plans.move_to_end(key)
            return found
        reason = why_not(p, binding.device, None if comms is None or comms.size == 1 else comms.name) if self.mode in ("graph", "auto") else ""
        if reason is not None and self.mode == "graph":
            raise refuse(p, reason)
        kind = GraphedProgram if reason is None else CompiledProgram
        symmetric = self._symmetric_buffers(p, scope, mesh, binding, comms)
        segments = self._segments_on(binding.device, p)
        made = kind(p, scope, binding, segments, comms, static_outputs=self._outputs == "static", symmetric=symmetric)
        self._plans[key] = made
        while len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return made

    def _remember(self, args: Sequence[Any], out: Any, world: World | None, results: Sequence[torch.Tensor]) -> None:
        """Let the next call with these tensors take the short way."""
        plan = next(reversed(self._plans.values()), None)
        bound = None if plan is None else plan.bound()
        if plan is None or bound is None or plan.single_output is None or (out is not None and results[0] is not out):
            return
        if out is not None and not plan.bound_to(out):
            return
        entries = self._fast
        entries.append(FastCall(plan, bound, args, out, world, lambda e: entries.remove(e) if e in entries else None))
        del entries[:-MAX_SETS]

    def _symmetric_buffers(self, p: Program, scope: Scope, mesh: Mesh, binding: Binding, comms: Comms | None) -> SymmetricBuffers | None:
        """The buffers that peers address, made at the first run for these sizes, on all ranks at once."""
        if not has_symmetric(p):
            return None
        control = tuple(binding.scalars[v] for v in self._control)
        key = (threading.get_ident(), binding.device, tuple(sorted(binding.dims.items())), control, mesh.layout, mesh.shape)
        if key not in self._symmetric:
            self._symmetric[key] = SymmetricBuffers(p, scope, binding.dims, comms, binding.device)
            while len(self._symmetric) > MAX_PLANS:
                self._symmetric.popitem(last=False)
        return self._symmetric[key]

    def _interpret(
        self, p: Program, scope: Scope, mesh: Mesh, binding: Binding, comms: Comms | None, outputs: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        segments = self._segments_on(binding.device, p)
        interpreter = Interpreter(p, scope, binding, comms, segments.run)
        interpreter.symmetric = self._symmetric_buffers(p, scope, mesh, binding, comms)
        if outputs is not None:
            interpreter.preset = self._direct(p, binding, outputs)
        if (profile := running_profile()) is not None:
            run_checked(profile, interpreter, segments)
        else:
            interpreter.run()
        results = [interpreter.tensor(b) if b.type.memory != "symmetric" else interpreter.tensor(b).clone() for b in p.results]
        if outputs is None:
            return results
        late = [(o, r.clone()) for o, r in zip(outputs, results, strict=True) if o is not r]
        for o, r in late:
            o.copy_(r)
        return list(outputs)

    @staticmethod
    def _direct(p: Program, binding: Binding, outputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Outputs that can be the buffer itself: whole buffers allocated at the top, returned once, apart from every input."""
        tops = {id(s.out) for s in p.body if isinstance(s, Alloc)}
        direct: dict[int, torch.Tensor] = {}
        for b, o in zip(p.results, outputs, strict=True):
            apart = not any(shares_memory(o, t) for t in (*binding.tensors.values(), *(x for x in outputs if x is not o)))
            if id(b) in tops and p.results.count(b) == 1 and apart and b.type.memory == "global":
                direct[id(b)] = o
        return direct

    def _segments_on(self, device: torch.device, p: Program) -> Segments:
        if device not in self._segments:
            self._segments[device] = Segments(self._dispatch, device)
        self._segments[device].add(p)
        return self._segments[device]

    # ---- ranks

    def _world(self) -> World | None:
        return self._given_mesh.world if self._given_mesh is not None and self._given_mesh.world is not None else current_world()

    def _mesh(self, world: World | None, *, needed: bool = True) -> Mesh:
        p = self._program
        mesh = self._given_mesh
        if mesh is None and world is not None:
            if not p.axes:
                mesh = Mesh((world.size,), ("world",))
            elif len(p.axes) == 1 and (world.size > 1 or p.axes[0].size is None):
                mesh = world.mesh((p.axes[0].name,))
        sized = resolve_mesh(p, mesh)
        if needed and len(sized.layout) > 1 and (world is None or len(sized.layout) > world.size):
            raise InputError(
                f"the program runs on {len(sized.layout)} ranks and there {'is 1' if world is None else f'are {world.size}'}", program=p.name,
                expected=str(sized), got="no world" if world is None else f"a world of {world.size}",
                cure="start ranks: hir.launch.spawn(fn, n), torchrun or hostir run -n N, and hir.launch.init() in the script",
            )  # fmt: skip
        return sized

    def _device(self, world: World | None) -> torch.device | None:
        return self._wanted_device if self._wanted_device is not None else torch.device(world.device) if world is not None else None

    # ---- looking

    def explain(self) -> str:
        """Which executor took each unit, who refused it and why; how communications travel."""
        p = self.program
        lines = [f"@{p.name}: mode {self.mode}, {'scheduled' if p.scheduled else 'unscheduled'}, {sum(1 for _ in every(p.body))} statements"]
        world = self._world()
        num_comms = sum(isinstance(s, Comm) and s.kind != "copy" for s in every(p.body))
        lines.append(f"  {num_comms} communications over {world.way if world is not None else 'no transport'}")
        if not self._segments:
            lines.append("  units: chosen at the first run, or give device=")
        for device, segments in self._segments.items():
            for row in segments.rows():
                refused = "; ".join(f"{k}: {v}" for k, v in row.executor.refusals.items())
                lines.append(f"  @{row.unit.name} on {device}: {row.executor.name}" + (f" (refused by {refused})" if refused else ""))
        allocs = [s.out for s in every(p.body) if isinstance(s, Alloc)]
        lines.append("  memory: " + (", ".join(f"%{b.name} {b.type}" for b in allocs) or "no buffers of its own"))
        return "\n".join(lines)

    def segments(self) -> Mapping[str, str]:
        """Unit name → executor name, on the device of the last compile or run."""
        return {r.unit.name: r.executor.name for s in self._segments.values() for r in s.rows()}


def compile(
    program: Program | Fusion,
    mesh: Mesh | None = None,
    *,
    mode: str = "compiled",
    device: torch.device | str | None = None,
    dims: Mapping[str, int] | None = None,
    plan: str = "auto",
    overlap: str = "auto",
    outputs: str = "fresh",
    reduce: str = "default",
    dispatch: ExecutorDispatch | None = None,
) -> HostIrExecutor:
    """Verify and prepare a program or a sharded fusion; the result is called with the input tensors.

    ``mesh`` binds the program's axes (default: the world entered in this thread); ``device`` is needed only to explain before the
    first run. ``reduce="ordered"`` asks for reductions in rank order with fp32 accumulation, which every transport but nccl gives
    anyway. Compiling is local; ranks compare what they compiled at the first run.
    """
    for name, value, allowed in (
        ("mode", mode, MODES),
        ("overlap", overlap, ("auto", "off")),
        ("outputs", outputs, ("fresh", "static")),
        ("reduce", reduce, ("default", "ordered")),
    ):
        if value not in allowed:
            raise InputError(f"{name} is not one of the choices", expected=", ".join(allowed), got=value)
    if plan != "auto" and isinstance(program, Program):
        raise InputError("plan chooses how a sharded fusion is lowered, and this is a program already", program=program.name, got=plan)
    if not isinstance(program, (Program, Fusion)):
        raise InputError("compile takes a Program or a Fusion", got=type(program).__name__)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise InputError("mesh is a hir.Mesh", got=type(mesh).__name__, cure="hir.Mesh.from_torch(device_mesh)")
    options = {"mode": mode, "dispatch": dispatch, "outputs": outputs, "overlap": overlap, "dims": dims, "reduce": reduce}
    if isinstance(program, Fusion):
        from hostir.dispatch.sharded import lowered

        return lowered(program, mesh, plan, device, options)
    ex = HostIrExecutor(mesh=mesh, device=device, **options)  # type: ignore[arg-type]
    if mesh is not None:
        resolve_names(program, mesh)
    ex.compile(program)
    return ex


def control_scalars(p: Program) -> tuple[Var, ...]:
    """Host scalars on which loops, branches, sizes, views or peers depend: a compiled form holds for their values. Those that only
    units compute with may change from run to run."""
    found: dict[Var, None] = {}
    for s in every(p.body):
        for e in () if isinstance(s, Call) else trees(s):
            found |= {x: None for x in leaves(e) if isinstance(x, Var) and x.role == "scalar"}
        if isinstance(s, Call) and s.stream.index is not None:
            found |= {x: None for x in leaves(s.stream.index) if isinstance(x, Var) and x.role == "scalar"}
    for b in p.params:
        if isinstance(b, Buffer):
            found |= {x: None for d in b.type.dims for x in leaves(d) if isinstance(x, Var)}
    return tuple(found)


def resolve_names(p: Program, mesh: Mesh) -> None:
    """A mesh given to ``compile`` must have the program's axes, and its sizes where it has any."""
    if mesh.shape is not None and p.axes:
        resolve_mesh(p, mesh)
    elif p.axes and mesh.names != tuple(a.name for a in p.axes):
        raise InputError("the mesh has other axes than the program", program=p.name, expected=[a.name for a in p.axes], got=mesh.names)


__all__ = ["Buffer", "HostIrExecutor", "compile"]
