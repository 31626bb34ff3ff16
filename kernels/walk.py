"""The lines of a kernel that say where it is: program ids, indices along rows and columns, masks, and addresses.

Names are numbered, and the same text is computed once: equal layouts share their offsets.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from hostir.kernels.body import Body, Value
from hostir.kernels.layout import Layout
from hostir.kernels.source import Argument, Int, Pointer, Scalar
from hostir.kernels.tiling import Runs, Tiling, size_of
from hostir.types import DType

Side: TypeAlias = Literal["batch", "rows", "cols"]


@dataclass(frozen=True, slots=True)
class Axis:
    """The index along one side of a tile, its mask ("" where every lane exists), and the index of each run."""

    index: str = "0"
    mask: str = ""
    runs: tuple[str, ...] = ()


@dataclass(slots=True)
class Scope:
    """What has a name from here on: values, and texts."""

    values: dict[Value, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


class Walk:
    """Writes lines; holds the names and the arguments of one kernel."""

    def __init__(self, body: Body, tiling: Tiling) -> None:
        self.body = body
        self.t = tiling
        self.sizes = body.domain.sizes
        self.lines: list[str] = []
        self.indent = 1
        self.scopes = [Scope()]
        self.count = 0
        self.arguments: dict[object, tuple[str, Argument]] = {}
        # A tile has two axes, unless one side is a single index.
        self.one_axis = tiling.row_block == 1 or (not tiling.cols and tiling.fold == "none")
        self.axes: dict[Side, Axis] = {"batch": Axis(), "rows": Axis(), "cols": Axis()}
        self.start, self.end, self.part = "0", "", ""
        self.stride_one = {a for x in body.layouts() for a, s in enumerate(x.strides) if s == 1}

    # ---- lines, names, arguments

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def fresh(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count - 1}"

    def name_of(self, text: str) -> str:
        """A variable that holds ``text``."""
        if re.fullmatch(r"\w+", text):
            return text
        for scope in self.scopes:
            if text in scope.texts:
                return scope.texts[text]
        name = self.scopes[-1].texts[text] = self.fresh("t")
        self.line(f"{name} = {text}")
        return name

    def argument(self, key: object, made: Callable[[], Argument]) -> str:
        """The argument known as ``key``, made when it is new."""
        if key not in self.arguments:
            a = made()
            prefix = "p" if isinstance(a, Pointer) else "n" if isinstance(a, Int) else "k"
            number = sum(name[0] == prefix for name, _ in self.arguments.values())
            self.arguments[key] = (f"{prefix}{number}", a)
        return self.arguments[key][0]

    def size(self, value: int, *what: object, by_16: bool = False) -> str:
        """A number that follows from sizes; ``what`` it is decides whether it is there already, not its value."""
        return self.argument(("int", *what), lambda: Int(value, by_16 and value % 16 == 0))

    def scalar(self, key: object, made: Scalar) -> str:
        return self.argument(("scalar", key), lambda: made)

    # ---- indices

    def place_program(self) -> int:
        """Program ids and everything that does not change in loops; returns the number of programs."""
        t = self.t
        self.pid = self.name_of("tl.program_id(0)" + (".to(tl.int64)" if t.wide else ""))
        programs = 1
        num_rows, num_cols = size_of(self.sizes, t.rows), size_of(self.sizes, t.cols)
        if t.fold == "none":
            if t.cols:
                blocks = -(-num_cols // t.col_block)
                programs *= blocks
                self.end = self.size(num_cols, "columns", by_16=self.dense_in(t.cols))
                self.set_columns(f"{self.share(blocks, 'column blocks')} * {t.col_block}")
        else:
            programs *= self._folded_columns(num_cols)
        blocks = -(-num_rows // t.row_block)
        programs *= blocks
        if t.rows:
            at = self.share(blocks, "row blocks") if t.batch else self.pid
            self._set_rows(at, num_rows)
        if t.batch:
            programs *= size_of(self.sizes, t.batch)
            self.axes["batch"] = Axis(self.pid, "", self._run_indices(self.pid, t.batch))
        return programs

    def _folded_columns(self, num_cols: int) -> int:
        """The columns that this program folds; returns how many programs share them."""
        self.end = self.size(num_cols, "columns", by_16=self.dense_in(self.t.cols))
        if self.body.split > 1:
            self.part = self.share(self.body.split, "parts")
            chunk = self.size(self.chunk(num_cols), "part", by_16=True)
            self.start = self.name_of(f"{self.part} * {chunk}")
            self.end = self.name_of(f"tl.minimum({self.start} + {chunk}, {self.end})")
        if self.t.fold == "tile":
            self.set_columns(self.start)
        return self.body.split

    def chunk(self, num_cols: int) -> int:
        """Columns of one part of a split fold: a multiple of 16, so that parts begin where vectors do."""
        return -(-num_cols // (16 * self.body.split)) * 16

    def share(self, n: int, what: str) -> str:
        """The index of this program among ``n``; what is left of the program id goes on."""
        count = self.size(n, what)
        at = self.name_of(f"{self.pid} % {count}")
        self.pid = self.name_of(f"{self.pid} // {count}")
        return at

    def _set_rows(self, block: str, size: int) -> None:
        n = self.t.row_block
        if n == 1:
            self.axes["rows"] = Axis(block, "", self._run_indices(block, self.t.rows))
            return
        spread = "" if self.one_axis else "[:, None]"
        index = self.name_of(f"{block} * {n} + tl.arange(0, {n}){spread}")
        mask = self.name_of(f"{index} < {self.size(size, 'rows', by_16=self.dense_in(self.t.rows))}")
        self.axes["rows"] = Axis(index, mask, self._run_indices(index, self.t.rows))

    def set_columns(self, start: str) -> None:
        """The columns of the tile that begins at ``start``."""
        lanes = f"tl.arange(0, {self.t.col_block})" + ("" if self.one_axis else "[None, :]")
        index = self.name_of(lanes if start == "0" else f"{start} + {lanes}")
        self.axes["cols"] = Axis(index, self.name_of(f"{index} < {self.end}"), self._run_indices(index, self.t.cols))

    def _run_indices(self, index: str, runs: Runs) -> tuple[str, ...]:
        """The index of each run, from the row-major index over all of them."""
        found: list[str] = []
        for run in reversed(runs[1:]):
            n = self.size(size_of(self.sizes, (run,)), "run", run, by_16=self.dense_in((run,)))
            found.append(self.name_of(f"{index} % {n}"))
            index = self.name_of(f"{index} // {n}")
        return (index, *reversed(found)) if runs else ()

    def dense_in(self, runs: Runs) -> bool:
        """Whether something lies side by side along the last of ``runs``: then it matters what its size is a multiple of."""
        return bool(runs) and runs[-1][-1] in self.stride_one

    def along(self, layout: Layout, side: Side) -> bool:
        """Whether ``layout`` moves along a side."""
        runs = {"batch": self.t.batch, "rows": self.t.rows, "cols": self.t.cols}[side]
        return any(layout.strides[run[-1]] for run in runs)

    def mask(self, rows: bool, cols: bool, guard: str = "") -> str:
        """The condition under which a lane exists, of the sides along which it moves; "" where it always does."""
        terms = [self.axes["rows"].mask if rows else "", self.axes["cols"].mask if cols else "", guard]
        terms = [t for t in terms if t]
        return self.name_of(" & ".join(terms)) if terms else ""

    # ---- addresses

    def number(self, layout: Layout, with_offset: bool) -> str:
        """The number that the top level of ``layout`` gives at the point; "0" when it is always that."""
        sides: tuple[tuple[Side, Runs], ...] = (("batch", self.t.batch), ("rows", self.t.rows), ("cols", self.t.cols))
        strides = tuple(layout.strides[run[-1]] for _, runs in sides for run in runs)
        terms = []
        for side, runs in sides:
            for run, index in zip(runs, self.axes[side].runs, strict=False):
                stride = layout.strides[run[-1]]
                if stride:
                    terms.append(index if stride == 1 else f"{index} * {self.size(stride, 'stride', strides, run, by_16=True)}")
        if with_offset and layout.offset:
            terms.append(self.size(layout.offset, "offset", layout, by_16=True))
        return self.name_of(" + ".join(terms)) if terms else "0"

    def address(self, buffer: int, dtype: DType, layout: Layout, guarded: bool = False) -> str:
        """A pointer expression. Under a guard the layout may begin outside the buffer: then its offset is added lane by lane."""
        if layout.inner is None:
            offset, base = self.number(layout, with_offset=guarded), 0 if guarded else layout.offset
        else:
            offset, base = self.unravelled(self.number(layout, with_offset=True), layout.inner)
            if guarded and base:
                offset, base = self.name_of(f"{offset} + {self.size(base, 'base', layout)}"), 0
        pointer = self.argument(("pointer", buffer, base), lambda: Pointer(buffer, base, dtype))
        return pointer if offset == "0" else f"{pointer} + {offset}"

    def unravelled(self, number: str, inner: Layout) -> tuple[str, int]:
        """Where the row-major number ``number`` of ``inner`` lies: an offset, and the element that it counts from."""
        terms = []
        dims = [d for d, n in enumerate(inner.sizes) if n != 1]
        number = "tl.full((), 0, tl.int32)" if number == "0" else number
        for d in reversed(dims):
            index = number
            if d != dims[0]:
                n = self.size(inner.sizes[d], "level", inner, d)
                index = self.name_of(f"{number} % {n}")
                number = self.name_of(f"{number} // {n}")
            if stride := inner.strides[d]:
                terms.append(index if stride == 1 else f"{index} * {self.size(stride, 'level stride', inner, d)}")
        offset = self.name_of(" + ".join(terms)) if terms else "0"
        if inner.inner is None:
            return offset, inner.offset
        if inner.offset:
            offset = self.name_of(f"{offset} + {self.size(inner.offset, 'level offset', inner)}")
        return self.unravelled(offset, inner.inner)
