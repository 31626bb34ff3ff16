"""A kernel as text: the source of one Triton function, and what its arguments are.

The text holds no sizes and no strides, only which of them are 1 or 0 and how large the tile is; everything else is an argument. Two
problems with one text share one compiled kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from hostir.graph.row import form_names
from hostir.kernels.body import Body, Calc, Constant, Fold, Folded, Load, Place, Rounded, State, Store, Value, parts
from hostir.kernels.folds import FOLDS, bounds, fold_type, state_types
from hostir.kernels.layout import Layout
from hostir.kernels.nodes import BOOL, F32, I32, I64, register
from hostir.kernels.tiling import Runs, Tiling, check_grid, size_of
from hostir.types import DType, Operand, Predicate


@dataclass(frozen=True, slots=True)
class Pointer:
    """The address of element ``offset`` of a buffer."""

    buffer: int
    offset: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class Int:
    """A number that follows from sizes and strides; ``by_16``: kernels may rely on its being a multiple of 16."""

    value: int
    by_16: bool = False


@dataclass(frozen=True, slots=True)
class Scalar:
    """A host number, evaluated at each launch and passed as i64 or f64."""

    value: Operand | Predicate | bool
    kind: Literal["i64", "fp64"]


Argument: TypeAlias = Pointer | Int | Scalar


@dataclass(frozen=True, slots=True)
class Source:
    """One kernel: its text, its arguments in order, and how it is launched (``programs`` along x)."""

    name: str
    text: str
    arguments: tuple[Argument, ...]
    programs: int
    num_warps: int
    wide: bool


TL: Final = {"bool": "int1", "f8e4m3": "float8e4nv", "f8e5m2": "float8e5"}


def tl(d: DType) -> str:
    """The name of a dtype in Triton."""
    return f"tl.{TL.get(d.name, d.torch_name)}"


def convert(text: str, have: DType, want: DType) -> str:
    """A held value as another held dtype, without rounding to what registers do not hold."""
    if have is want:
        return text
    if want is BOOL:
        return f"({text} != 0)"
    if have.is_float and want.is_integral and want.itemsize < 4:
        return f"{text}.to(tl.int32).to({tl(want)})"
    return f"{text}.to({tl(want)})"


def rounded(text: str, have: DType, want: DType) -> str:
    """A held value as ``want`` exactly, also f16 and bf16."""
    if want.name in ("f16", "bf16"):
        return f"hd.to_{want.name}({convert(text, have, F32)})"
    return convert(text, have, want)


@dataclass(slots=True)
class Scope:
    """Names that are known from here on: by value and by text."""

    values: dict[Value, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


class Writer:
    """Writes one body with one tiling."""

    def __init__(self, name: str, body: Body, tiling: Tiling, written: frozenset[int] = frozenset()) -> None:
        self.name = name
        self.body = body
        self.t = tiling
        self.sizes = body.domain.sizes
        self.lines: list[str] = []
        self.indent = 1
        self.scopes = [Scope()]
        self.count = 0
        self.arguments: dict[object, tuple[str, Argument]] = {}
        self.flat = tiling.row_block == 1 or not tiling.cols and tiling.fold == "none"
        self.in_place = bool(written)
        self.folded: dict[Fold, tuple[str, ...]] = {}

    # ---- the whole

    def source(self) -> Source:
        programs = self._indices()
        whole = [s for s in self.body.stores if s.whole]
        once = [s for s in self.body.stores if not s.whole]
        if self.t.fold == "loop":
            self._loops()
            if whole:
                self._hoist(whole)
                with self._loop():
                    self._store(whole)
            self._store(once)
        else:
            for fold in self._folds():
                self._tile(fold)
            self._store(whole + once)
        names = ", ".join(self._declared())
        ints = [n for n, a in self.arguments.values() if not isinstance(a, Pointer)]
        head = [f"@triton.jit(do_not_specialize={ints!r})", f"def {self.name}({names}):"]
        text = "\n".join([*head, *self.lines]) + "\n"
        return Source(self.name, text, tuple(a for _, a in self.arguments.values()), check_grid(programs), self.t.num_warps, self.t.wide)

    def _declared(self) -> Iterator[str]:
        for name, a in self.arguments.values():
            match a:
                case Pointer():
                    yield name
                case Int():
                    yield f'{name}: "{self._int}"'
                case Scalar():
                    yield f'{name}: "{a.kind}"'

    @property
    def _int(self) -> str:
        return "i64" if self.t.wide else "i32"

    # ---- lines and names

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def name_of(self, text: str, prefix: str = "t") -> str:
        """A variable that holds ``text``; the same text is computed once."""
        if re.fullmatch(r"\w+", text):
            return text
        for scope in self.scopes:
            if text in scope.texts:
                return scope.texts[text]
        name = f"{prefix}{self.count}"
        self.count += 1
        self.line(f"{name} = {text}")
        self.scopes[-1].texts[text] = name
        return name

    def argument(self, key: object, prefix: str, made: Argument) -> str:
        if key not in self.arguments:
            number = sum(name[0] == prefix for name, _ in self.arguments.values())
            self.arguments[key] = (f"{prefix}{number}", made)
        return self.arguments[key][0]

    def int(self, value: int, *what: object, by_16: bool = False) -> str:
        return self.argument(("int", *what), "n", Int(value, by_16 and value % 16 == 0))

    # ---- indices

    def _indices(self) -> int:
        """Program ids, index variables and masks; returns the number of programs."""
        t = self.t
        num_rows, num_cols = size_of(self.sizes, t.rows), size_of(self.sizes, t.cols)
        self.pid = self.name_of("tl.program_id(0)" + (".to(tl.int64)" if t.wide else ""))
        programs = 1
        self.start, self.end = "0", ""
        self.split = ""
        if t.fold == "none" and t.cols:
            blocks = -(-num_cols // t.col_block)
            at = self._share(blocks, "column blocks")
            programs *= blocks
            self._axis("c", f"{at} * {t.col_block}", num_cols, t.cols)
        elif t.fold != "none":
            self.end = self.int(num_cols, "columns", by_16=self._contiguous(t.cols))
            if self.body.split > 1:
                chunk = -(-num_cols // self.body.split)
                programs *= self.body.split
                self.split = self._share(self.body.split, "split")
                size = self.int(chunk, "chunk", by_16=True)
                self.start = self.name_of(f"{self.split} * {size}")
                self.end = self.name_of(f"tl.minimum({self.start} + {size}, {self.end})")
            if t.fold == "tile":
                self._axis("c", self.start, None, t.cols)
        blocks = -(-num_rows // t.row_block)
        programs *= blocks
        if t.rows:
            at = self._share(blocks, "row blocks") if t.batch else self.pid
            self._axis("r", f"{at} * {t.row_block}" if t.row_block > 1 else at, num_rows, t.rows)
        if t.batch:
            programs *= size_of(self.sizes, t.batch)
            self.at_batch = self._run_indices(self.pid, t.batch)
        else:
            self.at_batch = []
        return programs

    def _share(self, n: int, what: str) -> str:
        """The index of this program among ``n``; the rest of the program id goes on."""
        count = self.int(n, what)
        at = self.name_of(f"{self.pid} % {count}")
        self.pid = self.name_of(f"{self.pid} // {count}")
        return at

    def _axis(self, letter: str, start: str, size: int | None, runs: Runs) -> None:
        """The index along rows or columns, its mask, and the indices of its runs. ``size`` None: up to ``self.end``."""
        block = self.t.row_block if letter == "r" else self.t.col_block
        if letter == "r" and block == 1:
            self.r, self.r_mask = start, ""
        else:
            spread = "" if self.flat else "[:, None]" if letter == "r" else "[None, :]"
            index = self.name_of(f"{start} + tl.arange(0, {block}){spread}" if start != "0" else f"tl.arange(0, {block}){spread}")
            end = self.end if size is None else self.int(size, "size", letter, by_16=self._contiguous(runs))
            setattr(self, letter, index)
            setattr(self, f"{letter}_mask", self.name_of(f"{index} < {end}"))
        setattr(self, f"at_{letter}", self._run_indices(getattr(self, letter), runs))

    def _run_indices(self, index: str, runs: Runs) -> list[str]:
        """The index of each run, from the row-major index over all of them."""
        found = []
        for run in reversed(runs[1:]):
            n = self.int(size_of(self.sizes, (run,)), "run", run, by_16=self._contiguous((run,)))
            found.append(self.name_of(f"{index} % {n}"))
            index = self.name_of(f"{index} // {n}")
        return [index, *reversed(found)] if runs else []

    def _contiguous(self, runs: Runs) -> bool:
        return bool(runs) and any(x.strides[runs[-1][-1]] == 1 for x in self.body.layouts())

    # ---- addresses

    def along(self, layout: Layout, letter: str) -> bool:
        """Whether ``layout`` moves along the rows (r), the columns (c) or the batch (b)."""
        runs = {"r": self.t.rows, "c": self.t.cols, "b": self.t.batch}[letter]
        return any(layout.strides[run[-1]] for run in runs)

    def number(self, layout: Layout, with_offset: bool) -> str:
        """The number that the top level of ``layout`` gives at the point, "0" when it is always that."""
        terms = []
        groups = ((self.t.batch, "b"), (self.t.rows, "r"), (self.t.cols, "c"))
        key = tuple(layout.strides[run[-1]] for runs, _ in groups for run in runs)
        for runs, letter in groups:
            names = {"b": self.at_batch, "r": getattr(self, "at_r", []), "c": getattr(self, "at_c", [])}[letter]
            for run, index in zip(runs, names, strict=False):
                stride = layout.strides[run[-1]]
                if stride == 1:
                    terms.append(index)
                elif stride:
                    terms.append(f"{index} * {self.int(stride, 'stride', key, run, by_16=True)}")
        if with_offset and layout.offset:
            terms.append(self.int(layout.offset, "offset", layout, by_16=True))
        # One variable for the sum along each group keeps what does not change out of loops.
        return self.name_of(" + ".join(terms)) if terms else "0"

    def address(self, buffer: int, dtype: DType, layout: Layout, guarded: bool = False) -> str:
        """A pointer expression. Under a guard the layout may begin outside the buffer: then its offset is added lane by lane."""
        if layout.inner is None:
            offset = self.number(layout, with_offset=guarded)
            base = 0 if guarded else layout.offset
        else:
            offset, base = self._unravelled(self.number(layout, with_offset=True), layout.inner)
        pointer = self.argument(("pointer", buffer, base), "p", Pointer(buffer, base, dtype))
        return pointer if offset == "0" else f"{pointer} + {offset}"

    def _unravelled(self, number: str, inner: Layout) -> tuple[str, int]:
        """Where row-major number ``number`` of ``inner`` lies: an offset and the base that it counts from."""
        terms = []
        dims = [d for d, n in enumerate(inner.sizes) if n != 1]
        number = "tl.full((), 0, tl.int32)" if number == "0" else number
        for d in reversed(dims):
            index = number
            if d != dims[0]:
                n = self.int(inner.sizes[d], "level", inner, d)
                index = self.name_of(f"{number} % {n}")
                number = self.name_of(f"{number} // {n}")
            if (stride := inner.strides[d]) != 0:
                terms.append(index if stride == 1 else f"{index} * {self.int(stride, 'level stride', inner, d)}")
        offset = self.name_of(" + ".join(terms)) if terms else "0"
        if inner.inner is None:
            return offset, inner.offset
        if inner.offset:
            offset = self.name_of(f"{offset} + {self.int(inner.offset, 'level offset', inner)}")
        return self._unravelled(offset, inner.inner)

    def mask(self, rows: bool, cols: bool, guard: str = "") -> str:
        """The condition under which a lane exists, along what it moves."""
        terms = []
        if rows and getattr(self, "r_mask", ""):
            terms.append(self.r_mask)
        if cols and getattr(self, "c_mask", ""):
            terms.append(self.c_mask)
        if guard:
            terms.append(guard)
        return self.name_of(" & ".join(terms)) if terms else ""

    # ---- values

    def value(self, v: Value) -> str:
        """The variable that holds ``v``, in its held dtype."""
        for scope in self.scopes:
            if v in scope.values:
                return scope.values[v]
        name = self._value(v)
        self.scopes[-1].values[v] = name
        return name

    def held(self, v: Value) -> DType:
        return register(v.dtype)

    def _value(self, v: Value) -> str:
        match v:
            case Load():
                return self._load(v)
            case Constant():
                return self._constant(v)
            case Place():
                number = self.number(v.layout, with_offset=v.layout.inner is None)
                if v.layout.inner is not None:
                    number, base = self._unravelled(self.number(v.layout, with_offset=True), v.layout.inner)
                    number = self.name_of(f"{number} + {self.int(base, 'base', v.layout)}") if base else number
                return self.name_of("tl.full((), 0, tl.int64)" if number == "0" else f"({number}).to(tl.int64)")
            case Calc():
                given = {}
                for name, x in v.operands:
                    want = BOOL if name == "cond" else v.compute or self.held(x)
                    given[name] = self.name_of(convert(self.value(x), self.held(x), want))
                return self.name_of(form_names(v.expr)(given.get))
            case Rounded():
                text = rounded(self.value(v.x), self.held(v.x), v.dtype)
                return self.name_of(convert(text, v.dtype, register(v.dtype)))
            case Folded():
                position = FOLDS[v.fold.kind].parts[v.index]
                have = state_types(v.fold.kind, self._fold_type(v.fold))[position]
                return self.name_of(convert(self.folded[v.fold][position], have, register(v.dtype)))
            case State():
                return self.folded[v.fold][v.index]

    def _constant(self, v: Constant) -> str:
        held = register(v.dtype)
        if isinstance(v.value, (bool, int, float)) and not v.given:
            return self.name_of(f"tl.full((), {_number(v.value, held)}, {tl(held)})")
        kind: Literal["i64", "fp64"] = "fp64" if held.is_float else "i64"
        number = self.argument(("scalar", v), "k", Scalar(v.value, kind))
        return self.name_of(f"({number} != 0)" if held is BOOL else f"hd.scalar({number}, {tl(held)})")

    def _load(self, v: Load) -> str:
        address = self.address(v.buffer, v.dtype, v.layout, v.guard is not None)
        guard = "" if v.guard is None else self.value(v.guard)
        if guard and not any(self.along(v.layout, letter) for letter in "rc"):
            address += f" + tl.where({guard}, 0, 0)"
        mask = self.mask(self.along(v.layout, "r"), self.along(v.layout, "c"), guard)
        text = f"tl.load({address}, mask={mask})" if mask else f"tl.load({address})"
        return self.name_of(convert(text, v.dtype, register(v.dtype)))

    # ---- stores

    def _store(self, stores: Sequence[Store]) -> None:
        """Everything is computed before anything is written."""
        ready = [(s, self.name_of(rounded(self.value(s.value), self.held(s.value), s.dtype))) for s in stores]
        if ready and self.in_place and self.t.row_block * self.t.col_block < 32 * self.t.num_warps:
            self.line("tl.debug_barrier()")  # lanes that hold the same element must all have read it
        for s, value in ready:
            address = self.address(s.buffer, s.dtype, s.layout)
            if isinstance(s.value, State):
                address = f"{address} + {self.split} * {self.int(self._num_states(), 'states')}"
            mask = self.mask(bool(self.t.rows), s.whole and bool(self.t.cols))
            self.line(f"tl.store({address}, {value}{f', mask={mask}' if mask else ''})")

    def _num_states(self) -> int:
        return self.body.domain.count(self.body.domain.kept)

    # ---- folds

    def _folds(self) -> list[Fold]:
        """Each fold, after those that it needs."""
        found: dict[Fold, None] = {}
        for v in self.body.values():
            if isinstance(v, (Folded, State)):
                found.setdefault(v.fold)
        return list(found)

    def _fold_type(self, fold: Fold) -> DType:
        return fold_type(register(fold.operands[0].dtype))

    @property
    def _shape(self) -> str:
        return f"({self.t.col_block},)" if self.flat else f"({self.t.row_block}, {self.t.col_block})"

    def _names(self, fold: Fold, mask: str, state: Sequence[str] = (), operands: bool = False) -> dict[str, str]:
        """What the names in a fold's texts stand for."""
        held = self._fold_type(fold)
        low, high = bounds(held)
        names = {"T": tl(held), "SHAPE": self._shape, "LOWEST": low, "HIGHEST": high, "m": mask, "axis": "0" if self.flat else "1"}
        names |= {f"s{i}": s for i, s in enumerate(state)}
        if operands:
            for name, x, want in zip(("x", "place"), fold.operands, (held, I64), strict=False):
                names[name] = self.name_of(convert(self.value(x), self.held(x), want))
        return names

    def _full_mask(self) -> str:
        rows = bool(getattr(self, "r_mask", ""))
        if rows or self.flat:
            return self.mask(rows, True)
        return self.name_of(f"{self.c_mask} & tl.full({self._shape}, True, tl.int1)")

    def _tile(self, fold: Fold) -> None:
        """A fold of the tile that the program holds."""
        mask = self._full_mask()
        kind = FOLDS[fold.kind]
        if fold.of.merge:
            starts = [self._fill(t, self._names(fold, mask)) for t in kind.start]
            given = [self.value(x) for x in fold.operands]
            state = [self.name_of(f"tl.where({mask}, {x}, {s})") for x, s in zip(given, starts, strict=True)]
        else:
            names = self._names(fold, mask, operands=True)
            state = [self.name_of(self._fill(t, names)) for t in kind.single]
        self._collapse(fold, mask, state)

    @staticmethod
    def _fill(text: str, names: dict[str, str]) -> str:
        return form_names(text)(names.get)

    def _collapse(self, fold: Fold, mask: str, state: Sequence[str]) -> None:
        text = self._fill(FOLDS[fold.kind].collapse, self._names(fold, mask, state))
        results = tuple(f"f{self.count}_{i}" for i in range(len(state)))
        self.count += 1
        self.line(f"{', '.join(results)} = {text}")
        self.folded[fold] = results

    def _loops(self) -> None:
        """Folds over more columns than a tile holds, one loop for all that do not need one another."""
        left = self._folds()
        done: set[Fold] = set()
        while left:
            now = [f for f in left if not self._needs(f, set(left) - {f})]
            left = [f for f in left if f not in now]
            states = {f: self._started(f) for f in now}
            self._hoist_values([x for f in now for x in f.operands])
            with self._loop():
                mask = self._full_mask()
                for f in now:
                    kind = FOLDS[f.kind]
                    text = self._fill(kind.join, self._names(f, mask, states[f], operands=True))
                    self.line(f"{', '.join(states[f])} = {text}")
            for f in now:
                self._collapse(f, "", states[f])
            done.update(now)

    def _started(self, fold: Fold) -> list[str]:
        names = self._names(fold, "")
        types = state_types(fold.kind, self._fold_type(fold))
        state = []
        for start, d in zip(FOLDS[fold.kind].start, types, strict=True):
            name = f"a{self.count}"
            self.count += 1
            self.line(f"{name} = tl.full({self._shape}, {self._fill(start, names)}, {tl(d)})")
            state.append(name)
        return state

    def _needs(self, fold: Fold, others: set[Fold]) -> bool:
        stack = list(fold.operands)
        while stack:
            v = stack.pop()
            if isinstance(v, Folded) and v.fold in others:
                return True
            stack += parts(v)
        return False

    @contextmanager
    def _loop(self) -> Iterator[None]:
        """The lines inside run for each tile of columns."""
        self.line(f"for c0 in range({self.start}, {self.end}, {self.t.col_block}):")
        self.indent += 1
        self.scopes.append(Scope())
        self._axis("c", "c0", None, self.t.cols)
        yield
        self.scopes.pop()
        self.indent -= 1

    # ---- what does not change in a loop

    def _moves(self, v: Value) -> bool:
        """Whether ``v`` differs from column to column."""
        if isinstance(v, (Load, Place)) and self.along(v.layout, "c"):
            return True
        return not isinstance(v, (Folded, State)) and any(self._moves(x) for x in parts(v))

    def _hoist(self, stores: Sequence[Store]) -> None:
        self._hoist_values([s.value for s in stores])

    def _hoist_values(self, values: Sequence[Value]) -> None:
        """Compute before the loop what is the same in all of it."""
        for v in values:
            if not self._moves(v):
                self.value(v)
            else:
                self._hoist_values(parts(v))


def _number(v: bool | float, held: DType) -> str:
    """A constant in generated code."""
    if held.is_float:
        v = float(v)
        return repr(v) if v == v and v not in (float("inf"), float("-inf")) else f'float("{v}")'
    if held is BOOL:
        return repr(bool(v))
    return repr(int(v) % 256 if held.kind == "uint" else int(v))


__all__ = ["I32", "Argument", "Int", "Pointer", "Scalar", "Source", "Writer"]
