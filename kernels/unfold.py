"""The folds of a kernel as lines: of the tile that a program holds, or in loops over more columns than a tile has."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hostir.graph.row import form_names
from hostir.kernels.body import Body, Fold, Folded, State, Value, parts
from hostir.kernels.folds import FOLDS, bounds, fold_type, place_type, state_types
from hostir.kernels.nodes import register
from hostir.kernels.source import converted, tl
from hostir.kernels.tiling import Tiling
from hostir.kernels.walk import Scope, Walk
from hostir.types import DType


class Unfold(Walk):
    """A walk that folds; ``folded`` holds the variables of each collapsed state."""

    def __init__(self, body: Body, tiling: Tiling) -> None:
        super().__init__(body, tiling)
        self.folded: dict[Fold, tuple[str, ...]] = {}

    @abstractmethod
    def value(self, v: Value) -> str: ...

    @abstractmethod
    def hoist(self, values: Sequence[Value]) -> None: ...

    def folds(self) -> list[Fold]:
        """Each fold, after those that it needs."""
        return list(dict.fromkeys(v.fold for v in self.body.values() if isinstance(v, (Folded, State))))

    def fold_type(self, fold: Fold) -> DType:
        """The dtype in which the elements are folded."""
        return fold_type(register(fold.operands[0].dtype))

    @property
    def _shape(self) -> str:
        return f"({self.t.col_block},)" if self.one_axis else f"({self.t.row_block}, {self.t.col_block})"

    def _names(self, fold: Fold, mask: str, state: Sequence[str] = ()) -> dict[str, str]:
        """What the names in a fold's texts stand for, operands apart."""
        held = self.fold_type(fold)
        low, high = bounds(held)
        names = {"T": tl(held), "SHAPE": self._shape, "LOWEST": low, "HIGHEST": high, "m": mask, "axis": "0" if self.one_axis else "1"}
        return names | {f"s{i}": s for i, s in enumerate(state)}

    def _operands(self, fold: Fold) -> dict[str, str]:
        wanted = zip(("x", "place"), fold.operands, (self.fold_type(fold), place_type(fold.of)), strict=False)
        return {name: self.name_of(converted(self.value(x), register(x.dtype), want)) for name, x, want in wanted}

    def _lanes(self) -> str:
        """The mask of the whole tile, in its shape."""
        if self.one_axis or self.axes["rows"].mask:
            return self.mask(True, True)
        return self.name_of(f"{self.axes['cols'].mask} & tl.full({self._shape}, True, tl.int1)")

    # ---- a tile

    def fold_tile(self, fold: Fold) -> None:
        """Fold what the tile holds."""
        mask = self._lanes()
        kind = FOLDS[fold.kind]
        names = self._names(fold, mask)
        if fold.of.merge:
            given = [self.value(x) for x in fold.operands]
            state = [self.name_of(f"tl.where({mask}, {x}, {_filled(s, names)})") for x, s in zip(given, kind.start, strict=True)]
        elif kind.tile:
            n = self.end if self.body.split == 1 else f"tl.maximum({self.end} - {self.start}, 0)"
            names |= self._operands(fold) | {"N": self.name_of(f"({n}).to({names['T']})")}
            self._collapse(fold, kind.start, kind.tile, names)
            return
        else:
            names |= self._operands(fold)
            state = [self.name_of(_filled(t, names)) for t in kind.single]
        self._collapse(fold, state, kind.collapse, self._names(fold, "", state))

    def _collapse(self, fold: Fold, state: Sequence[str], text: str, names: dict[str, str]) -> None:
        results = tuple(self.fresh("f") for _ in state)
        self.line(f"{', '.join(results)} = {_filled(text, names)}")
        self.folded[fold] = results

    # ---- loops

    @contextmanager
    def columns(self) -> Iterator[None]:
        """The lines inside run for each tile of columns."""
        self.line(f"for c in range({self.start}, {self.end}, {self.t.col_block}):")
        self.indent += 1
        self.scopes.append(Scope())
        self.set_columns("c")
        yield
        self.scopes.pop()
        self.indent -= 1

    def fold_in_loops(self) -> None:
        """All folds, one loop for those that do not need one another."""
        left = self.folds()
        while left:
            now = [f for f in left if not _needs(f, set(left) - {f})]
            left = [f for f in left if f not in now]
            states = {f: self._started(f) for f in now}
            self.hoist([x for f in now for x in f.operands])
            with self.columns():
                mask = self._lanes()
                for f in now:
                    text = _filled(FOLDS[f.kind].join, self._names(f, mask, states[f]) | self._operands(f))
                    self.line(f"{', '.join(states[f])} = {text}")
            for f in now:
                self._collapse(f, states[f], FOLDS[f.kind].collapse, self._names(f, "", states[f]))

    def _started(self, fold: Fold) -> list[str]:
        names = self._names(fold, "")
        state = []
        for start, d in zip(FOLDS[fold.kind].start, state_types(fold.of), strict=True):
            state.append(self.fresh("a"))
            self.line(f"{state[-1]} = tl.full({self._shape}, {_filled(start, names)}, {tl(d)})")
        return state


def _filled(text: str, names: dict[str, str]) -> str:
    return form_names(text)(names.get)


def _needs(fold: Fold, others: set[Fold]) -> bool:
    """Whether ``fold`` is over values of one of ``others``."""
    stack = list(fold.operands)
    while stack:
        v = stack.pop()
        if isinstance(v, Folded) and v.fold in others:
            return True
        stack += parts(v)
    return False
