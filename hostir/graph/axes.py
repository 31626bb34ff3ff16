"""Which dimensions of an operation's operands and results go together: the one thing that sharding and host loops need to know of it.

Each dimension gets a *label* (a number) or None. Cutting all dimensions of one label alike, into as many parts, leaves an operation
that computes the parts by itself. A label that no result has is reduced: each part then gives a term, and the terms combine. A
dimension without a label stays whole. The rules are named by the rows of the op table (``Row.shard``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from hostir.graph.fusion import Op, TensorView
from hostir.graph.row import Row
from hostir.graph.table import TABLE, bound_of
from hostir.types import Dim, dims_equal, product

Labels: TypeAlias = tuple[int | None, ...]

# How terms of a reduction combine (its Triton text): the reduction of a communication, and the operation on two terms.
COMBINES: Final[Mapping[str, tuple[str, str]]] = {
    "a + b": ("sum", "add"),
    "a * b": ("prod", "mul"),
    "hd.maximum(a, b)": ("max", "maximum"),
    "hd.minimum(a, b)": ("min", "minimum"),
    "a | b": ("max", "logical_or"),
    "a & b": ("min", "logical_and"),
}


@dataclass(frozen=True)
class Axes:
    """``ins``: each tensor operand with its labels, the one that decides first, first. ``outs``: the labels of each result. ``reduced``:
    label -> the reduction (``sum``, ``max``, …) by which its terms combine. ``composite``: reduced labels whose terms do not simply
    combine (mean, var). ``once``: operands that are added to the reduction, so only one part may add them (a bias). ``where``: for each
    entry of ``ins`` the parameter, and the place in its list (0 where it is none). ``weighted``: the first operand is a weight, and its
    layout decides whatever is wanted of the result."""

    ins: tuple[tuple[TensorView, Labels], ...]
    outs: tuple[Labels, ...]
    reduced: Mapping[int, str] = field(default_factory=dict)
    composite: frozenset[int] = frozenset()
    once: tuple[TensorView, ...] = ()
    where: tuple[tuple[str, int], ...] = ()
    weighted: bool = False


class _Builder:
    """Labels under construction: numbers for pairs of dimensions that go together."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.row = TABLE[op.name]
        self.bound = bound_of(op.name, op.args, op.attrs)
        self.ins: list[tuple[TensorView, list[int | None]]] = []
        self.where: list[tuple[str, int]] = []
        self.outs: list[list[int | None]] = [[None] * _rank(o) for o in op.outs]
        self.reduced: dict[int, str] = {}
        self.composite: set[int] = set()
        self.once: list[TensorView] = []
        self.weighted = False
        self.count = 0

    def new(self) -> int:
        self.count += 1
        return self.count - 1

    def operand(self, name: str) -> list[int | None] | None:
        """The labels, all None at first, of the operand ``name``; None where it is no tensor."""
        tv = self.bound.get(name)
        if not isinstance(tv, TensorView):
            return None
        return self.add(name, 0, tv, [None] * _rank(tv))

    def add(self, name: str, place: int, tv: TensorView, labels: list[int | None]) -> list[int | None]:
        self.ins.append((tv, labels))
        self.where.append((name, place))
        return labels

    def dims(self, name: str) -> tuple[Dim, ...]:
        tv = self.bound[name]
        assert isinstance(tv, TensorView)
        return tv.known.dims

    def done(self) -> Axes:
        ins = tuple((tv, tuple(labels)) for tv, labels in self.ins)
        return Axes(
            ins, tuple(map(tuple, self.outs)), dict(self.reduced), frozenset(self.composite), tuple(self.once), tuple(self.where), self.weighted,
        )  # fmt: skip


def _rank(tv: TensorView) -> int:
    return 0 if tv.type is None else len(tv.type.dims)


def _is_one(d: Dim) -> bool:
    return isinstance(d, int) and d == 1


def axes_of(op: Op) -> Axes:
    """The labels of ``op``; all None for an operation outside the table or with a type that only torch knows."""
    everything = list(dict.fromkeys(op.reads()))
    row = TABLE.get(op.name)
    if row is None or any(tv.type is None for tv in (*everything, *op.outs)):
        return Axes(tuple((tv, (None,) * _rank(tv)) for tv in everything), tuple((None,) * _rank(o) for o in op.outs))
    b = _Builder(op)
    RULES.get(row.shard, _none)(b)
    for name, v in b.bound.items():  # the operands that no rule speaks of stay whole
        for i, tv in enumerate(v if isinstance(v, tuple) else (v,)):
            if isinstance(tv, TensorView) and (name, i) not in b.where:
                b.add(name, i, tv, [None] * _rank(tv))
    return b.done()


# ----------------------------------------------------------------------------------------------------------------- the rules


def _none(b: _Builder) -> None:
    """Nothing can be cut, but leading dimensions of a triangle could: not worth a rule."""


def _source(b: _Builder) -> None:
    """Made from nothing: a constant can be made in parts; what counts or draws cannot."""
    if b.row.pointwise:
        b.outs[0] = [b.new() for _ in b.outs[0]]


def _aligned(b: _Builder, labels: Sequence[int | None], shape: Sequence[Dim], names: Sequence[str]) -> None:
    """Operands that broadcast to ``shape``, from the right; a dimension of size 1 that is stretched stays whole."""
    for name in names:
        mine = b.operand(name)
        if mine is None:
            continue
        dims = b.dims(name)
        lead = len(shape) - len(dims)
        for i, d in enumerate(dims):
            if lead + i >= 0 and not (_is_one(d) and not _is_one(shape[lead + i])):
                mine[i] = labels[lead + i]


def _pointwise(b: _Builder) -> None:
    b.outs[0] = [b.new() for _ in b.outs[0]]
    names = [p.name for p in b.row.params if p.kind in ("tensor", "value")]
    shape = b.op.outs[0].known.dims
    sized = sorted(names, key=lambda n: -_rank(v) if isinstance(v := b.bound[n], TensorView) else 1)
    _aligned(b, b.outs[0], shape, sized)


def _combines(row: Row) -> str:
    return COMBINES[row.triton][0] if row.triton in COMBINES else ""


def _reduce(b: _Builder) -> None:
    labels = b.operand("x")
    assert labels is not None
    gone = b.bound["dims"]
    everything = not gone
    dims = set(range(len(labels))) if everything else {d % max(len(labels), 1) for d in gone}
    kept = iter(range(len(b.outs[0])))
    for i in range(len(labels)):
        label = labels[i] = b.new()
        if i not in dims:
            b.outs[0][next(kept)] = label
            continue
        if b.bound["keepdim"]:
            next(kept)
        if "composite" in b.row.flags:
            b.composite.add(label)
        b.reduced[label] = _combines(b.row) or "sum"


def _rowwise(b: _Builder) -> None:
    labels = b.operand("x")
    assert labels is not None
    rank = len(labels)
    dim = b.bound["dim"]
    if dim is None:
        return
    for i in range(rank):
        if i != dim % rank:
            labels[i] = b.new()
    for out in b.outs:
        mine = labels if len(out) == rank else [label for i, label in enumerate(labels) if i != dim % rank]
        out[:] = mine


def _normalise(b: _Builder) -> None:
    labels = b.operand("x")
    assert labels is not None
    for i in range(len(labels) - len(b.bound["shape"])):
        labels[i] = b.outs[0][i] = b.new()


def _cross_entropy(b: _Builder) -> None:
    x, target = b.operand("x"), b.operand("target")
    assert x is not None and target is not None
    reduction = b.bound["reduction"]
    if len(x) < 2 or (reduction == "mean") or len(target) == len(x):
        return
    for i in range(len(x)):
        if i == 1:
            continue
        label = x[i] = target[i - (i > 1)] = b.new()
        if reduction == "none":
            b.outs[0][i - (i > 1)] = label
        else:
            b.reduced[label] = "sum"


def _matmul(b: _Builder) -> None:
    y, x = b.operand("y"), b.operand("x")
    assert x is not None and y is not None
    out = b.outs[0]
    b.weighted = len(y) < 3
    contracted = b.new()
    b.reduced[contracted] = "sum"
    x[-1] = y[-2 if len(y) > 1 else 0] = contracted
    at = len(out)
    if len(y) > 1:
        at -= 1
        y[-1] = out[at] = b.new()
    if len(x) > 1:
        at -= 1
        x[-2] = out[at] = b.new()
    shape = b.op.outs[0].known.dims
    for i in range(at):
        out[i] = b.new()
    for labels, name in ((x, "x"), (y, "y")):
        dims = b.dims(name)
        for i in range(len(labels) - 2):
            j = at - (len(labels) - 2) + i
            if not (_is_one(dims[i]) and not _is_one(shape[j])):
                labels[i] = out[j]
    _added(b, "c")


def _linear(b: _Builder) -> None:
    w, x = b.operand("w"), b.operand("x")
    assert x is not None and w is not None
    out = b.outs[0]
    b.weighted = True
    contracted = b.new()
    b.reduced[contracted] = "sum"
    x[-1] = w[-1] = contracted
    for i in range(len(x) - 1):
        x[i] = out[i] = b.new()
    if len(w) > 1:
        w[0] = out[-1] = b.new()
    _added(b, "b")


def _added(b: _Builder, name: str) -> None:
    """An operand that is added to a product."""
    tv = b.bound.get(name)
    if isinstance(tv, TensorView):
        _aligned(b, b.outs[0], b.op.outs[0].known.dims, [name])
        b.once.append(tv)


def _attention(b: _Builder) -> None:
    q, k, v = b.operand("q"), b.operand("k"), b.operand("v")
    assert q is not None and k is not None and v is not None
    out, batch = b.outs[0], len(b.outs[0]) - 2
    shape = b.op.outs[0].known.dims
    for i in range(batch):
        out[i] = b.new()
    for labels, name in ((q, "q"), (k, "k"), (v, "v")):
        dims = b.dims(name)
        for i in range(len(labels) - 2):
            j = batch - (len(labels) - 2) + i
            if not (_is_one(dims[i]) and not _is_one(shape[j])):
                labels[i] = out[j]
    v[-1] = out[-1] = b.new()
    if not b.bound["causal"] and b.bound["mask"] is None:
        q[-2] = out[-2] = b.new()
    mask = b.operand("mask")
    if mask is not None:
        dims = b.dims("mask")
        for i in range(len(mask) - 2):
            j = batch - (len(mask) - 2) + i
            if not (_is_one(dims[i]) and not _is_one(shape[j])):
                mask[i] = out[j]


def _permute(b: _Builder) -> None:
    labels = b.operand("x")
    assert labels is not None
    labels[:] = [b.new() for _ in labels]
    order = list(range(len(labels)))
    if "dims" in b.bound:
        order = [d % len(order) for d in b.bound["dims"]]
    elif order:
        i, j = b.bound["dim0"] % len(order), b.bound["dim1"] % len(order)
        order[i], order[j] = order[j], order[i]
    b.outs[0] = [labels[i] for i in order]


def _reshape(b: _Builder) -> None:
    """Dimensions are matched in groups with equally many elements; the outermost of a group on either side go together."""
    labels = b.operand("x")
    assert labels is not None
    old, new = b.dims("x"), b.op.outs[0].known.dims
    for left, right in groups(old, new):
        i = next((i for i in left if not _is_one(old[i])), None)
        j = next((j for j in right if not _is_one(new[j])), None)
        if i is not None and j is not None:
            labels[i] = b.outs[0][j] = b.new()


def groups(old: Sequence[Dim], new: Sequence[Dim]) -> list[tuple[list[int], list[int]]]:
    """Runs of old and new dimensions with equally many elements, as short as can be told."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        p, q = _shortest(old[i:], new[j:])
        found.append((list(range(i, i + p)), list(range(j, j + q))))
        i, j = i + p, j + q
    return found


def _shortest(old: Sequence[Dim], new: Sequence[Dim]) -> tuple[int, int]:
    """How many dimensions of each make the shortest pair of runs with equally many elements."""
    for length in range(1, len(old) + len(new)):
        for p in range(max(length - len(new), 0), min(length, len(old)) + 1):
            if dims_equal(product(tuple(old[:p])), product(tuple(new[: length - p]))) is True:
                return p, length - p
    return len(old), len(new)


def _expand(b: _Builder) -> None:
    """broadcast, expand, squeeze, unsqueeze: old dimensions keep their order, new ones can be cut at will."""
    labels = b.operand("x")
    assert labels is not None
    old, new = b.dims("x"), b.op.outs[0].known.dims
    if b.op.outs[0].known.dims == old:
        labels[:] = [b.new() for _ in labels]
        b.outs[0] = list(labels)
        return
    pairs = _kept(b, len(old), len(new))
    for i, j in pairs:
        if not (_is_one(old[i]) and not _is_one(new[j])):
            labels[i] = b.outs[0][j] = b.new()
    if "shape" in b.bound:
        for j, label in enumerate(b.outs[0]):
            if label is None:
                b.outs[0][j] = b.new()


def _kept(b: _Builder, old: int, new: int) -> list[tuple[int, int]]:
    if "shape" in b.bound:  # expand: from the right
        return [(i, i + new - old) for i in range(old)]
    if new < old:  # squeeze
        gone = {d % max(old, 1) for d in b.bound["dims"]}
        dims = b.dims("x")
        left = [i for i in range(old) if not (i in gone and _is_one(dims[i]))]
        return [(i, j) for j, i in enumerate(left)]
    added = {d % new for d in (b.bound["dims"] if "dims" in b.bound else (b.bound["dim"],))}
    return [(i, j) for i, j in enumerate(j for j in range(new) if j not in added)]


def _slice(b: _Builder) -> None:
    """Operations on some dimensions that leave the others as they are: slice, select, pad, flip and the scatters."""
    names = [p.name for p in b.row.operands]
    x = b.operand(names[0])
    assert x is not None
    rank, out = len(x), b.outs[0]
    if "pads" in b.bound:
        touched = {rank - 1 - i for i in range(len(b.bound["pads"]) // 2)}
    elif "dims" in b.bound:
        touched = {d % rank for d in b.bound["dims"]}
    else:
        touched = {b.bound["dim"] % rank}
    for i in range(rank):
        if i not in touched:
            x[i] = b.new()
    drops = len(out) < rank
    out[:] = [label for i, label in enumerate(x) if not (drops and i in touched)]
    if len(names) > 1:  # what is written has the untouched dimensions too
        y = b.operand(names[1])
        assert y is not None
        mine = list(x) if len(y) == rank else [label for i, label in enumerate(x) if i not in touched]
        if len(y) == len(mine):
            y[:] = mine


def _cat(b: _Builder) -> None:
    out = b.outs[0]
    dim = b.bound["dim"] % max(len(out), 1)
    for j in range(len(out)):
        if j != dim:
            out[j] = b.new()
    for i, tv in enumerate(b.bound["xs"]):
        b.add("xs", i, tv, list(out) if _rank(tv) == len(out) else [label for j, label in enumerate(out) if j != dim])


def _gather(b: _Builder) -> None:
    """gather, scatter_add: the dimension that is indexed stays whole where it is indexed."""
    x, index = b.operand("x"), b.operand("index")
    assert x is not None and index is not None
    if not x or len(x) != len(index):
        return
    at = b.bound["dim"] % len(x)
    y = b.operand("y")
    for i in range(len(x)):
        if i == at:
            if y is None:
                index[i] = b.outs[0][i] = b.new()
        elif dims_equal(b.dims("x")[i], b.dims("index")[i]) is True and (y is None or dims_equal(b.dims("y")[i], b.dims("x")[i]) is True):
            label = x[i] = index[i] = b.outs[0][i] = b.new()
            if y is not None:
                y[i] = label


def _index_select(b: _Builder) -> None:
    x, index = b.operand("x"), b.operand("index")
    assert x is not None and index is not None
    if not x:
        return
    at = b.bound["dim"] % len(x)
    for i in range(len(x)):
        if i != at:
            x[i] = b.outs[0][i] = b.new()
        elif index:
            index[0] = b.outs[0][i] = b.new()


def _embedding(b: _Builder) -> None:
    w, index = b.operand("w"), b.operand("index")
    assert w is not None and index is not None
    w[1] = b.outs[0][-1] = b.new()
    for i in range(len(index)):
        index[i] = b.outs[0][i] = b.new()


RULES: Final[Mapping[str, Callable[[Any], None]]] = {
    "none": _none,
    "source": _source,
    "pointwise": _pointwise,
    "reduce": _reduce,
    "rowwise": _rowwise,
    "normalise": _normalise,
    "cross_entropy": _cross_entropy,
    "matmul": _matmul,
    "linear": _linear,
    "attention": _attention,
    "permute": _permute,
    "reshape": _reshape,
    "expand": _expand,
    "slice": _slice,
    "cat": _cat,
    "gather": _gather,
    "index_select": _index_select,
    "embedding": _embedding,
}
