"""Buffer handles: what a program's author holds. Indexing makes views; arithmetic is refused with the cure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from hostir.errors import BuildError, Location, caller_location
from hostir.ir import nodes
from hostir.ir.nodes import Expand, Index, Peer, Permute, Reshape, Span, Transpose, ViewOp
from hostir.ir.views import view_type, wrap_index
from hostir.types import Dim, DType, Expr, Operand, TensorType, binary, dims_of, is_whole, minimum, operand, product, show_expr

if TYPE_CHECKING:
    from hostir.build import Program


class Buffer:
    """A buffer of an open program, or a view of one. ``shape`` holds ints and host expressions; ``dtype`` is hostir's."""

    __slots__ = ("base", "loc", "node", "op", "program", "type")
    __hash__ = object.__hash__

    def __init__(
        self,
        program: Program,
        type: TensorType,
        *,
        node: nodes.Buffer | None = None,
        base: Buffer | None = None,
        op: ViewOp | None = None,
        loc: Location | None = None,
    ) -> None:
        self.program = program
        self.type = type
        self.node = node
        self.base = base
        self.op = op
        self.loc = loc

    @property
    def name(self) -> str:
        """The name of the buffer that this is, or is a view of."""
        b: Buffer = self
        while b.base is not None:
            b = b.base
        assert b.node is not None
        return b.node.name

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.dims

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return len(self.type.dims)

    # ---- views

    def _view(self, op: ViewOp) -> Buffer:
        self.program._usable(self)
        with self.program._located(self._place):
            t = view_type(self.type, op)
        return Buffer(self.program, t, base=self, op=op, loc=caller_location())

    def __getitem__(self, index: Any) -> Buffer:
        """``buf[i]`` selects, ``buf[a:b]`` narrows, ``:`` keeps; several separated by commas."""
        raw = index if isinstance(index, tuple) else (index,)
        if any(r is Ellipsis for r in raw):
            at = next(i for i, r in enumerate(raw) if r is Ellipsis)  # not raw.index: == of host numbers has no truth value
            raw = (*raw[:at], *[slice(None)] * (self.ndim - len(raw) + 1), *raw[at + 1 :])
        items = tuple(self._item(r, self.shape[position] if position < self.ndim else 0) for position, r in enumerate(raw))
        return self._view(Index(items))

    def _item(self, r: Any, size: Dim) -> Operand | Span | None:
        if isinstance(r, slice):
            if r.step not in (None, 1):
                raise self._error("a view takes every element of a range", got=f"step {r.step}", cure="reshape, then select")
            if r.start is None and r.stop is None:
                return None
            start = 0 if r.start is None else self._number(r.start)
            stop = size if r.stop is None else self._number(r.stop)
            return Span(wrap_index(start, size), wrap_index(stop, size))
        return wrap_index(self._number(r), size)

    def _number(self, r: Any) -> Operand:
        if isinstance(r, Expr) or (hasattr(r, "__index__") and not isinstance(r, bool)):
            with self.program._located(self._place):
                index = operand(r)
            if not is_whole(index):
                raise self._error(f"{show_expr(index)} is not an integer", cure="indices are integers: use // instead of /")
            return index
        cure = "gather rows with a unit: p.call(lambda x, i: x[i], buf, index_buffer)"
        raise self._error(f"a buffer is indexed by ints and host expressions, not by {type(r).__name__}", got=repr(r), cure=cure)

    def __setitem__(self, index: Any, value: Any) -> None:
        """``buf[i] = x`` copies the buffer ``x`` into the view."""
        if not isinstance(value, Buffer):
            cure = "fill one first: p.full(shape, value, dtype)"
            raise self._error(f"a buffer is set from a buffer, not from {type(value).__name__}", cure=cure)
        self.program.copy(value, out=self[index])

    def select(self, dim: int, index: Operand) -> Buffer:
        """Element ``index`` of dimension ``dim``, which goes away."""
        dim = self._dim(dim)
        return self._view(Index((*[None] * dim, wrap_index(self._number(index), self.shape[dim]))))

    def narrow(self, dim: int, start: Operand, length: Operand) -> Buffer:
        """``length`` elements of dimension ``dim`` from ``start`` on."""
        dim = self._dim(dim)
        first = wrap_index(self._number(start), self.shape[dim])
        return self._view(Index((*[None] * dim, Span(first, binary("+", first, length)))))

    def chunk(self, index: Operand, chunks: Operand, dim: int = 0) -> Buffer:
        """Part ``index`` of ``chunks``: [min(i·c, t), min((i+1)·c, t)) with c = ceil(t / chunks); the last ones may be short or empty."""
        dim = self._dim(dim)
        total = self.shape[dim]
        index, chunks = self._number(index), self._number(chunks)
        index = wrap_index(index, chunks)
        if isinstance(chunks, int) and (chunks < 1 or (isinstance(index, int) and not 0 <= index < chunks)):
            raise self._error(f"there is no chunk {index} of {chunks}", expected="0 .. chunks - 1, of at least 1 chunk", got=index)
        size = binary("//", binary("-", binary("+", total, chunks), 1), chunks)
        start, stop = binary("*", index, size), binary("*", binary("+", index, 1), size)
        if not (isinstance(total, int) and isinstance(chunks, int) and total % chunks == 0):
            start, stop = minimum(start, total), minimum(stop, total)
        return self._view(Index((*[None] * dim, Span(start, stop))))

    def _dim(self, dim: int) -> int:
        if not -self.ndim <= dim < self.ndim:
            raise self._error(f"dim {dim} is outside a buffer of {self.ndim} dimensions", expected=self.type)
        return dim % self.ndim

    def _error(self, message: str, **facts: Any) -> BuildError:
        return BuildError(message, program=self.program.name, statement=self._place, loc=caller_location(), **facts)

    @property
    def _place(self) -> str:
        """For messages: what a view is made of."""
        return f"a view of %{self.name}: {self.type}"

    def reshape(self, *shape: Any) -> Buffer:
        """The same elements in another shape, as a view; one size may be -1."""
        raw = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        with self.program._located(self._place):
            if any(isinstance(s, int) and s == -1 for s in raw):
                rest = product(tuple(s for s in raw if not (isinstance(s, int) and s == -1)))
                fill = binary("//", product(self.shape), rest)
                raw = tuple(fill if isinstance(s, int) and s == -1 else s for s in raw)
            dims = dims_of(raw)
        return self._view(Reshape(dims))

    def permute(self, *order: Any) -> Buffer:
        raw = order[0] if len(order) == 1 and isinstance(order[0], (tuple, list)) else order
        return self._view(Permute(tuple(self._dim(i) for i in raw)))

    def expand(self, *shape: Any) -> Buffer:
        """Dimensions of size 1 repeated; -1 keeps a size."""
        raw = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        lead = len(raw) - self.ndim
        raw = tuple(self.shape[i - lead] if isinstance(s, int) and s == -1 and i >= lead else s for i, s in enumerate(raw))
        with self.program._located(self._place):
            dims = dims_of(raw)
        return self._view(Expand(dims))

    @property
    def T(self) -> Buffer:
        """The dimensions in reverse."""
        return self._view(Transpose())

    def peer(self, rank: Operand) -> Buffer:
        """The same symmetric buffer on rank ``rank`` of the mesh."""
        return self._view(Peer(self._number(rank)))

    # ---- what a buffer is not

    def _refuse(self, what: str) -> NoReturn:
        raise BuildError(
            f"{what} on the buffer %{self.name}: a program states where results go",
            cure="p.call(unit, …, out=buf) or p.add(a, b, out=c); an in-place update names the buffer on both sides",
            program=self.program.name,
            loc=caller_location(),
        )

    def __add__(self, other: object) -> NoReturn:
        self._refuse("arithmetic")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __add__
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __imatmul__ = __pow__ = __mod__ = __floordiv__ = __add__

    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __add__

    def __neg__(self) -> NoReturn:
        self._refuse("arithmetic")

    def __bool__(self) -> bool:
        self._refuse("a truth value")

    def __len__(self) -> int:
        self._refuse("len()")

    def __iter__(self) -> NoReturn:
        self._refuse("iteration")

    def __repr__(self) -> str:
        return f"<Buffer %{self.name}: {self.type}>"
