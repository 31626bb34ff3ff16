"""The text of a kernel: its values and stores, written over a walk of its domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hostir.graph.row import form_names
from hostir.kernels.body import Body, Calc, Constant, Folded, Load, Place, Rounded, State, Store, Value, parts
from hostir.kernels.folds import FOLDS, state_types
from hostir.kernels.nodes import BOOL, register
from hostir.kernels.source import Pointer, Scalar, Source, converted, number, rounded, tl
from hostir.kernels.tiling import Tiling, check_grid
from hostir.kernels.unfold import Unfold


class Writer(Unfold):
    """Writes one body with one tiling. ``written``: the inputs whose memory is written too."""

    def __init__(self, name: str, body: Body, tiling: Tiling, written: frozenset[int] = frozenset()) -> None:
        super().__init__(body, tiling)
        self.name = name
        self.waits = any(isinstance(v, Load) and v.buffer in written and self._repeated(v) for v in body.values())

    def _repeated(self, v: Load) -> bool:
        """Whether several threads load one element: the tile has fewer elements than threads, or the load does not move along all of it."""
        tall, broad = self.t.row_block > 1, bool(self.t.cols) or self.t.fold != "none"
        whole = (not tall or self.along(v.layout, "rows")) and (not broad or self.along(v.layout, "cols"))
        return not whole or self.t.row_block * self.t.col_block < 32 * self.t.num_warps

    def source(self) -> Source:
        """The finished kernel."""
        programs = self.place_program()
        whole = [s for s in self.body.stores if s.whole]
        once = [s for s in self.body.stores if not s.whole]
        if self.t.fold == "loop":
            self.fold_in_loops()
            if whole:
                self.hoist([s.value for s in whole])
                with self.columns():
                    self._store(whole)
            self._store(once)
        else:
            for fold in self.folds():
                self.fold_tile(fold)
            self._store(whole + once)
        made = Source(self.name, "", tuple(a for _, a in self.arguments.values()), check_grid(programs), self.t.num_warps, self.t.wide)
        names = [name for name, _ in self.arguments.values()]
        declared = [n if isinstance(a, Pointer) else f'{n}: "{kind}"' for n, a, kind in zip(names, made.arguments, made.types(), strict=True)]
        fixed = [n for n, a in zip(names, made.arguments, strict=True) if not isinstance(a, Pointer)]
        head = [f"@triton.jit(do_not_specialize={fixed!r})", f"def {self.name}({', '.join(declared)}):"]
        text = "\n".join([*head, *self.lines]) + "\n"
        return Source(self.name, text, made.arguments, made.programs, made.num_warps, made.wide)

    # ---- values

    def value(self, v: Value) -> str:
        """The variable that holds ``v``, in its held dtype."""
        for scope in self.scopes:
            if v in scope.values:
                return scope.values[v]
        name = self.scopes[-1].values[v] = self._value(v)
        return name

    def _value(self, v: Value) -> str:
        match v:
            case Load():
                return self._load(v)
            case Constant():
                return self._constant(v)
            case Place():
                return self._place(v)
            case Calc():
                given = {}
                for name, x in v.operands:
                    have = register(x.dtype)
                    given[name] = self.name_of(converted(self.value(x), have, BOOL if name == "cond" else v.compute or have))
                return self.name_of(form_names(v.expr)(given.get))
            case Rounded():
                text = rounded(self.value(v.x), register(v.x.dtype), v.dtype)
                return self.name_of(converted(text, v.dtype, register(v.dtype)))
            case Folded():
                position = FOLDS[v.fold.kind].parts[v.index]
                have = state_types(v.fold.of)[position]
                return self.name_of(converted(self.folded[v.fold][position], have, register(v.dtype)))
            case State():
                return self.folded[v.fold][v.index]

    def _constant(self, v: Constant) -> str:
        held = register(v.dtype)
        if isinstance(v.value, (bool, int, float)) and not v.given:
            return self.name_of(f"tl.full((), {number(v.value, held)}, {tl(held)})")
        kind: Literal["i64", "fp64"] = "fp64" if held.is_float else "i64"
        name = self.scalar(v, Scalar(v.value, kind))
        return self.name_of(f"({name} != 0)" if held is BOOL else f"hd.scalar({name}, {tl(held)})")

    def _place(self, v: Place) -> str:
        if v.layout.inner is None:
            place = self.number(v.layout, with_offset=True)
        else:
            place, base = self.unravelled(self.number(v.layout, with_offset=True), v.layout.inner)
            place = self.name_of(f"{place} + {self.size(base, 'base', v.layout)}") if base else place
        return self.name_of("tl.full((), 0, tl.int64)" if place == "0" else f"({place}).to(tl.int64)")

    def _load(self, v: Load) -> str:
        address = self.address(v.buffer, v.dtype, v.layout, v.guard is not None)
        guard = "" if v.guard is None else self.value(v.guard)
        rows, cols = self.along(v.layout, "rows"), self.along(v.layout, "cols")
        if guard and not ((rows or self.t.row_block == 1) and (cols or (not self.t.cols and self.t.fold == "none"))):
            address += f" + tl.where({guard}, 0, 0)"  # the guard may have lanes along which the address does not move
        mask = self.mask(rows, cols, guard)
        text = f"tl.load({address}, mask={mask})" if mask else f"tl.load({address})"
        return self.name_of(converted(text, v.dtype, register(v.dtype)))

    # ---- stores

    def _store(self, stores: Sequence[Store]) -> None:
        """Everything is computed before anything is written."""
        ready = [(s, self.name_of(rounded(self.value(s.value), register(s.value.dtype), s.dtype))) for s in stores]
        if ready and self.waits:
            self.line("tl.debug_barrier()")  # threads that hold the same element must all have read it
        for s, value in ready:
            address = self.address(s.buffer, s.dtype, s.layout)
            if isinstance(s.value, State):
                results = self.body.domain.count(self.body.domain.kept)
                address = f"{address} + {self.part} * {self.size(results, 'results')}"
            mask = self.mask(bool(self.t.rows), s.whole and bool(self.t.cols))
            self.line(f"tl.store({address}, {value}{f', mask={mask}' if mask else ''})")

    # ---- what does not change in a loop

    def hoist(self, values: Sequence[Value]) -> None:
        """Compute now what is the same for all columns."""
        for v in values:
            if self._moves(v):
                self.hoist(parts(v))
            else:
                self.value(v)

    def _moves(self, v: Value) -> bool:
        """Whether ``v`` differs from column to column."""
        if isinstance(v, (Load, Place)) and self.along(v.layout, "cols"):
            return True
        return not isinstance(v, (Folded, State)) and any(self._moves(x) for x in parts(v))
