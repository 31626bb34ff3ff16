"""A graph of ATen operations, as make_fx and AOTAutograd produce it, becomes a Fusion.

Each node is tried as the rows of the op table that list its overload. A row is taken only when its type rule gives exactly what torch
computed for the node; else the node stays what it is, an opaque ``aten.*`` operation. So nothing that torch can trace is refused
for want of a row, and no row can quietly mean something else than torch does.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from hostir.errors import BuildError, Location, UnitTraceError
from hostir.graph.fusion import Fusion, TensorView
from hostir.graph.row import Overload, Row
from hostir.graph.table import OVERLOADS, TABLE, apply, bind, canonical, infer
from hostir.torch_types import from_torch
from hostir.trace_symbols import SCALAR_CURE, Naming, NoExprError, to_host
from hostir.types import Dim, DType, Expr, Sym, TensorType, Var, dims_equal, evaluate

DROPPED: Final = frozenset({"device", "layout", "memory_format", "pin_memory", "non_blocking"})
_SYMBOLIC: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MISSING: Final = object()
_IN_RESULT: Final[Mapping[str, set[str]]] = {"dtype": {"dtype"}, "shape": {"size", "shape", "stride"}}  # arguments that torch's result tells


def add_graph(
    f: Fusion,
    graph: fx.Graph,
    params: Sequence[Any],
    symbols: Naming,
    locations: Mapping[fx.Node, Location] | None = None,
) -> tuple[list[Any], dict[TensorView, TensorView]]:
    """Append ``graph`` to ``f``. ``params`` are what its placeholders stand for, in order.

    Returns the graph's outputs (flat: TensorViews, numbers, None) and, for each parameter that the graph writes into, its new value.
    UnitTraceError for what a Fusion cannot hold: tensors that are not arguments, values read back by ``item()``.
    """
    return _Adder(f, graph, params, symbols, locations or {}).run()


class _Adder:
    def __init__(self, f: Fusion, graph: fx.Graph, params: Sequence[Any], symbols: Naming, locations: Mapping[fx.Node, Location]) -> None:
        self.f = f
        self.graph = graph
        self.params = list(params)
        self.symbols = symbols
        self.locations = locations
        self.values: dict[fx.Node, Any] = {}
        self.written: dict[TensorView, TensorView] = {}
        self.at: fx.Node = next(iter(graph.nodes))

    def run(self) -> tuple[list[Any], dict[TensorView, TensorView]]:
        live = _live(self.graph)
        params = iter(self.params)
        outputs: list[Any] = []
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(params)
            elif node.op == "output":
                flat = torch.utils._pytree.tree_flatten(node.args[0])[0]
                outputs = [self.value(x) for x in flat]
            elif node in live:
                self.at = node
                self.values[node] = self.add(node)
        return outputs, self.written

    def value(self, x: Any) -> Any:
        """An fx argument as an operand: nodes looked up, lists as tuples, dtypes and numbers as ours."""
        if isinstance(x, fx.Node):
            return self.values[x]
        if isinstance(x, (list, tuple)):
            return tuple(self.value(y) for y in x)
        if isinstance(x, torch.dtype):
            return _dtype(x)
        if isinstance(x, _SYMBOLIC):
            return self.host(x)
        return x

    def host(self, x: Any) -> Any:
        try:
            return to_host(x, self.symbols.ours)
        except NoExprError as e:
            if isinstance(x, torch.SymBool):
                raise self.error(self.at, f"the unit needs the value of {self.symbols.named(str(e))}", SCALAR_CURE) from None
            error = self.error(
                self.at, f"the unit computes {self.symbols.named(str(e))} on the host, which host expressions cannot say",
                "do that arithmetic on tensors, or outside the unit",
            )  # fmt: skip
            error.expected = "+ - * // % min max on sizes and scalars"
            raise error from None

    # ---- one node

    def add(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.constant(node)
        assert node.op == "call_function", node.op
        val = node.meta.get("val")
        if node.target is operator.getitem:
            return self.value(node.args[0])[node.args[1]]
        if isinstance(val, (*_SYMBOLIC, int, float, bool)):
            if node.target is torch.ops.aten._local_scalar_dense.default:
                raise self.error(
                    node,
                    "the unit reads a tensor back to the host (item(), int(), float(), bool())",
                    "keep it a 0-d tensor: arithmetic and torch.where work on it",
                )
            return self.host(val) if isinstance(val, _SYMBOLIC) else val
        if node.target is torch.ops.aten.copy_.default and isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder":
            target, new = self.values[node.args[0]], self.value(node.args[1])
            self.written[target] = new
            return new
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise self.error(node, f"the unit uses {target}, which is not an ATen operation", "write it with plain torch functions")
        if is_mutation(node):
            raise self.error(
                node,
                f"the unit uses {target}, which changes a tensor in a way that cannot be made functional",
                "use the form that returns a new tensor",
            )
        return self.aten(node, target)

    def error(self, node: fx.Node, message: str, cure: str) -> UnitTraceError:
        return UnitTraceError(message, cure=cure, loc=self.locations.get(node))

    def constant(self, node: fx.Node) -> Any:
        """A tensor that is not an argument: fine when it is one number, made in the function."""
        module: Any = self.graph.owning_module
        tensor = getattr(module, str(node.target))
        plain = tensor.constant if isinstance(tensor, torch._subclasses.FakeTensor) else tensor
        dtype = None if plain is None else from_torch(plain.dtype)
        lifted = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        if lifted and plain is not None and plain.dim() == 0 and dtype is not None and dtype.kind != "complex":
            return apply(self.f, "full", (), {"shape": (), "value": plain.item(), "dtype": dtype}, hints=("t",))[0]
        made = "it makes a tensor from a list" if lifted else "it uses a tensor from outside"
        raise UnitTraceError(
            f"the unit @{self.f.name} holds a tensor that is not one of its arguments: {made} ({tuple(tensor.shape)}, {tensor.dtype})",
            cure="pass tensors as arguments of the unit (a module's parameters too: torch.func.functional_call)",
            loc=next((self.locations[u] for u in node.users if u in self.locations), None),
        )

    def aten(self, node: fx.Node, target: Any) -> Any:
        schema = target._schema
        given: dict[str, Any] = {}
        for i, a in enumerate(schema.arguments):
            x = node.args[i] if i < len(node.args) else node.kwargs.get(a.name, _MISSING)
            given[a.name] = self.value((a.default_value if a.has_default_value() else None) if x is _MISSING else x)
        defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        namespace, _, name = schema.name.partition("::")
        if namespace == "hostir":
            return self.emit(node, TABLE[name], given)
        full = f"{name}.{schema.overload_name or 'default'}"
        if namespace == "aten":
            first = next(iter(given.values()), None)
            if full in IDENTITIES and isinstance(first, TensorView):
                return first
            for row, overload in OVERLOADS.get(full, ()):
                if (bound := self.match(node, row, overload, given, defaults)) is not None:
                    return self.emit(node, row, bound)
        return self.opaque(node, target, f"{namespace}.{full}", given, defaults)

    def match(self, node: fx.Node, row: Row, overload: Overload, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any] | None:
        """The row's values when the node is what ``overload`` describes and has the type that the row says; else None."""
        named = {what for _, (source, what) in overload.take if source == "arg"} | {k for k, _ in overload.equal}
        for _, (source, what) in overload.take:
            named |= _IN_RESULT[what] if source == "result" else set()
        for k, v in given.items():
            if k not in named and k not in DROPPED and not _equal(v, defaults.get(k)):
                return None
        if any(not _equal(given[k], v) for k, v in overload.equal):
            return None
        result = self.fake_type(_first(node.meta["val"]))
        values: dict[str, Any] = {}
        for name, (source, what) in overload.take:
            if name.strip("_") == "":
                continue
            if source == "arg":
                values[name] = given[what]
            elif source == "const":
                values[name] = what
            elif result is None:
                return None
            else:
                values[name] = result.dims if what == "shape" else result.dtype
        return values if self.agrees(node, row, values) else None

    def agrees(self, node: fx.Node, row: Row, values: Mapping[str, Any]) -> bool:
        try:
            found = infer(row, canonical(row, bind(row, (), values)))
        except BuildError:
            return False
        fakes = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
        if len(found) != len(fakes):
            return False
        return all(f is None or self.same_type(f, self.fake_type(v)) for f, v in zip(found, fakes, strict=True))

    def same_type(self, a: TensorType, b: TensorType | None) -> bool:
        if b is None or a.dtype != b.dtype or len(a.dims) != len(b.dims):
            return False
        return all(_same_size(x, y) for x, y in zip(a.dims, b.dims, strict=True))

    def emit(self, node: fx.Node, row: Row, values: Mapping[str, Any]) -> Any:
        val = node.meta["val"]
        many = isinstance(val, (tuple, list))
        types = [self.fake_type(v) for v in val] if many else [self.fake_type(val)]
        x = values.get("x")
        if "shape" in row.flags and isinstance(x, TensorView) and x.type is not None and types[0] is not None and self.same_type(x.type, types[0]):
            return x
        outs = apply(self.f, row.name, (), values, loc=self.locations.get(node), types=types, hints=["t"] * len(types))
        return outs if many else outs[0]

    def opaque(self, node: fx.Node, target: Any, name: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
        positional: list[Any] = []
        attrs: list[tuple[str, Any]] = []
        last = 0
        for a in target._schema.arguments:
            v = given[a.name]
            if a.kwarg_only:
                if a.name not in DROPPED and not _equal(v, defaults.get(a.name)):
                    attrs.append((a.name, self.plain(node, v)))
                continue
            positional.append(self.plain(node, v))
            if a.name in DROPPED:
                positional[-1] = None
            elif not (a.has_default_value() and _equal(v, a.default_value)):
                last = len(positional)
        val = node.meta["val"]
        many = isinstance(val, (tuple, list))
        items = list(val) if many else [val]
        types = [self.fake_type(v) if isinstance(v, torch.Tensor) else None for v in items]
        outs = apply(self.f, name, positional[:last], attrs, loc=self.locations.get(node), types=types, hints=["t"] * len(types))
        return outs if many else outs[0]

    def plain(self, node: fx.Node, v: Any) -> Any:
        if isinstance(v, tuple):
            return tuple(self.plain(node, x) for x in v)
        if v is None or isinstance(v, (TensorView, Expr, int, float, str, DType)):
            return v
        if isinstance(v, (torch.device, torch.layout, torch.memory_format)):
            return None
        raise self.error(node, f"{node.target} is given {v!r}, which the text of a unit cannot say", "use numbers, strings, dtypes and tensors")

    def fake_type(self, v: Any) -> TensorType | None:
        """The type of torch's fake result; None where a size depends on data or the dtype is not ours."""
        try:
            return self.symbols.type_of(v) if isinstance(v, torch.Tensor) else None
        except NoExprError:
            return None


IDENTITIES: Final = frozenset({"detach.default", "alias.default", "lift.default", "lift_fresh_copy.default"})
"""Overloads whose result is their argument, once nothing is written in place any more."""


def _first(val: Any) -> Any:
    return val[0] if isinstance(val, (tuple, list)) and val else val


def _dtype(t: torch.dtype) -> DType:
    if (found := from_torch(t)) is None:
        raise UnitTraceError(f"the unit uses {t}, which is not a dtype that programs know", cure="cast to one that they know")
    return found


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, (TensorView, Expr)) or isinstance(b, (TensorView, Expr)):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b) if not (isinstance(a, (int, float)) and isinstance(b, (int, float))) else bool(a == b)


def _same_size(a: Dim, b: Dim) -> bool:
    """Equal for every binding of the symbols, as far as a few bindings tell where algebra does not."""
    if (known := dims_equal(a, b)) is not None:
        return known
    for seed in (2, 3, 5, 7, 12, 60, 97, 840):
        values: dict[int, int] = {}

        def env(leaf: Any, values: dict[int, int] = values, seed: int = seed) -> int:
            return values.setdefault(id(leaf), seed * (3 * len(values) + 2))

        if evaluate(a, env) != evaluate(b, env):
            return False
    return True


def fusion_of_graph(graph: fx.Graph, name: str = "graph") -> Fusion:
    """A graph of AOTAutograd or export (each node with ``meta["val"]``) as a Fusion; results are the graph's outputs, flat.

    Sizes are symbols with torch's names (``s77``). Symbolic integers among the placeholders become unused scalars. Arguments that the
    graph copies into come after the outputs as hidden results. UnitTraceError for placeholders that are no strided tensors or ints.
    """
    f = Fusion(name)
    naming = Naming()
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        val = node.meta.get("val")
        sizes = val.shape if isinstance(val, torch.Tensor) else [val]
        for s in sizes:
            if isinstance(s, torch.SymInt):
                naming.ours.update({symbol: Sym(str(symbol)) for symbol in s.node.expr.free_symbols if symbol not in naming.ours})
        if isinstance(val, torch.SymInt):
            f.params.append(Var(node.name, "scalar", "int"))
        elif isinstance(val, torch.Tensor):
            try:
                f.params.append(TensorView(f, naming.type_of(val), node.name))
            except NoExprError as e:
                raise UnitTraceError(f"the input {node.name} of the graph @{name} has no type here: {e}") from None
        else:
            raise UnitTraceError(f"the input {node.name} of the graph @{name} is no tensor", got=type(val).__name__)
    outputs, written = add_graph(f, graph, f.params, naming)
    set_results(f, outputs, written)
    return f


def set_results(f: Fusion, outputs: Sequence[Any], written: Mapping[TensorView, TensorView]) -> None:
    """Returned values in order, then the arguments that were only mutated. A mutated argument that is returned is one result."""
    by_value = {id(new): param for param, new in written.items()}
    done: set[int] = set()
    for value in outputs:
        if value is None:
            continue
        param = by_value.get(id(value))
        if param is not None and id(param) not in done:
            done.add(id(param))
            f.output(value, alias=param, hidden=False)
        else:
            f.output(value)
    for param, new in written.items():
        if id(param) not in done:
            f.output(new, alias=param)


def is_mutation(node: fx.Node) -> bool:
    """A node that writes into a tensor, other than the final copies into arguments."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return False
    return not (target is torch.ops.aten.copy_.default and isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder")


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that an output or a written argument needs."""
    live: set[fx.Node] = set()
    todo = [n for n in graph.nodes if n.op == "output" or n.target is torch.ops.aten.copy_.default]
    while todo:
        n = todo.pop()
        if n not in live:
            live.add(n)
            todo += n.all_input_nodes
    return live
