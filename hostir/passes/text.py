"""Annotated fusions as text: units whose tensors carry, in braces, where they lie and which host loops walk through them.

    unit @f(%x: f32[8, 4] {tp: shard 0}, %w: f32[6, 4] {tp: shard 0}) mesh(tp = 2) {
      %y = linear(%x, %w) {tp: shard 1, stream 0 in 2}
      return %y
    }

``mesh`` after the parameters names the first mesh; others are named ``mesh m1(pp = 2) over [2, 3]``, and a tensor on one says
``{on m1, pp: shard 0}``. What stands here parses back to an equal fusion.
"""

from __future__ import annotations

from hostir.graph.annotate import tensors
from hostir.graph.fusion import Fusion, TensorView
from hostir.graph.sharding import Partial, Placement, Replicate, Shard, Sharding, Streamed
from hostir.graph.show import Names, identifier, show_arg, show_call
from hostir.ir.kinds import REDUCTIONS
from hostir.ir.lex import Text
from hostir.ir.nodes import Program
from hostir.ir.parse import Parser
from hostir.mesh import Mesh
from hostir.types import Var, show_expr

# ------------------------------------------------------------------------------------------------------------------ printing


class _Meshes:
    """Names for the meshes of a fusion, in order of appearance; the first has none."""

    def __init__(self, f: Fusion) -> None:
        self.known: list[Mesh] = []
        for tv in tensors(f):
            if tv.sharding is not None and self.index(tv.sharding.mesh) is None:
                self.known.append(tv.sharding.mesh)

    def index(self, mesh: Mesh) -> int | None:
        return next((i for i, m in enumerate(self.known) if m.same_as(mesh)), None)

    def heads(self) -> str:
        parts = []
        for i, m in enumerate(self.known):
            axes = str(m).removeprefix("mesh")
            listed = m.shape is not None and m.layout != tuple(range(len(m.layout)))
            parts.append(f" mesh{f' m{i}' if i else ''}{axes}" + (f" over [{', '.join(map(str, m.layout))}]" if listed else ""))
        return "".join(parts)

    def note(self, tv: TensorView) -> str:
        items = []
        if tv.sharding is not None:
            i = self.index(tv.sharding.mesh)
            items += [f"on m{i}"] if i else []
            items += [f"{n}: {_placement(p)}" for n, p in zip(tv.sharding.mesh.names, tv.sharding.placements, strict=True)]
        items += [f"stream {s.dim} in {show_expr(s.chunks)}" + (f" swizzle {s.swizzle}" if s.swizzle else "") for s in tv.streams]
        return f" {{{', '.join(items)}}}" if items else ""


def _placement(p: Placement) -> str:
    match p:
        case Shard(dim):
            return f"shard {dim}"
        case Replicate():
            return "replicate"
        case Partial(op):
            return "partial" if op == "sum" else f"partial {op}"


def show_annotated(f: Fusion) -> str:
    """The text of ``f`` with its annotations."""
    names, meshes = Names(), _Meshes(f)
    params = []
    for p in f.params:
        label = names(p)
        params.append(f"%{label}: {p.kind if isinstance(p, Var) else p.known.show(names) + meshes.note(p)}")
    lines = [f"unit @{identifier(f.name)}({', '.join(params)}){meshes.heads()} {{"]
    for op in f.ops:
        right = show_call(op.name, op.args, op.attrs, names)
        outs = ", ".join(show_arg(o, names) for o in op.outs)
        notes = [meshes.note(o) for o in op.outs]
        lines.append(f"  {outs} = {right}" + ("".join(n or " {}" for n in notes) if any(notes) else ""))
    results = ", ".join(show_arg(r.value, names) for r in f.results)
    return "\n".join([*lines, f"  return {results}" if results else "  return", "}"])


# ------------------------------------------------------------------------------------------------------------------- parsing


class _Annotated(Parser):
    """The grammar of units with what stands in braces."""

    def __init__(self, text: Text) -> None:
        self.pending: list[tuple[TensorView, list[tuple[str, object]]]] = []
        self.meshes: dict[str, Mesh] = {}
        super().__init__(text)

    def unit_head(self, fusion: Fusion) -> None:
        self.meshes.clear()
        while self.accept("mesh"):
            name = self.next().text if self.token.kind == "id" else ""
            self.expect("(")
            seen: set[str] = set()
            axes = self.listed(")", lambda seen=seen: self._axis(seen))  # type: ignore[misc]
            ranks = self.listed("]", lambda: self.whole("a rank")) if self.accept("over") and self.expect("[") else None
            sizes = None if any(a.size is None for a in axes) else tuple(a.size for a in axes if a.size is not None)
            self.meshes[name] = Mesh(sizes, tuple(a.name for a in axes), ranks=ranks)
        for p, items in self.pending:
            self._apply(p, items)
        self.pending.clear()

    def note(self, tv: TensorView, *, late: bool = False) -> None:
        """``{ item, … }`` after a tensor; parameters wait for the meshes, which stand after them."""
        if not self.accept("{"):
            return
        items: list[tuple[str, object]] = list(self.listed("}", self._item_of_note))
        if late:
            self.pending.append((tv, items))
        else:
            self._apply(tv, items)

    def _item_of_note(self) -> tuple[str, object]:
        token = self.kind("id", "a mesh axis, `on` or `stream`")
        if token.text == "on":
            return "on", self.kind("id", "a mesh").text
        if token.text == "stream":
            dim = self.whole("a dimension")
            self.expect("in")
            chunks = self.dim()
            return "stream", (dim, chunks, self.kind("id", "a mesh axis").text if self.accept("swizzle") else None)
        self.expect(":")
        return token.text, self._place()

    def _place(self) -> Placement:
        token = self.kind("id", "shard, replicate or partial")
        match token.text:
            case "shard":
                return Shard(self.whole("a dimension"))
            case "replicate":
                return Replicate()
            case "partial":
                return Partial(self.next().text) if self.token.kind == "id" and self.token.text in REDUCTIONS else Partial()
        self.fail(f"{token.text} is no placement", token, expected="shard, replicate or partial")

    def _apply(self, tv: TensorView, items: list[tuple[str, object]]) -> None:
        named = {k: v for k, v in items if k != "stream"}
        name = str(named.pop("on", ""))
        if named:
            if name not in self.meshes:
                self.fail(f"there is no mesh {name}", expected=", ".join(m or "mesh(…)" for m in self.meshes) or "mesh(…) after the parameters")
            mesh = self.meshes[name]
            if tuple(named) != mesh.names:
                self.fail(f"%{tv.name} needs one placement for each mesh axis", expected=", ".join(mesh.names), got=", ".join(named))
            tv.sharding = Sharding(mesh, tuple(named.values()))  # type: ignore[arg-type]
        tv.streams = tuple(Streamed(*v) for k, v in items if k == "stream")  # type: ignore[misc]


def parse_annotated(text: str, file: str = "<text>") -> Fusion | Program:
    """What ``text`` holds: its program, or its last unit with annotations. ParseError with line, column and caret."""
    source = Text(text, file)
    units, p = _Annotated(source).file()
    if p is not None:
        return p
    if not units:
        raise source.error(source.tokens[-1], "the text has neither a unit nor a program", cure="unit @name(…) { … }")
    return list(units.values())[-1].fusion
