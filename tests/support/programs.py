"""Random host programs that are right on every rank, as text: what the checks must accept and the passes must keep.

A program works on i64 vectors: rows, parts of rows and columns of a few buffers, on several streams. Communications stand only where
all members get, conditions on the rank hold local statements, whole teams, or both ends of a message. The generator takes a
``random.Random``; hypothesis has one whose choices it can shrink (``st.randoms``).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from tests.support.made import ROW, ROWS, UNITS, Made

MESHES: Final[tuple[tuple[tuple[str, int], ...], ...]] = (
    (("tp", 1),), (("tp", 2),), (("tp", 2),), (("tp", 3),), (("tp", 3),), (("tp", 4),), (("dp", 2), ("tp", 2)), (("dp", 2), ("tp", 2)),
    (("dp", 1), ("tp", 3)), (("dp", 3), ("tp", 1)),
)  # fmt: skip
COLLECTIVES: Final = (
    "allreduce", "allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall", "gather", "scatter", "alltoallv", "barrier",
)  # fmt: skip


@dataclass
class _Root:
    """A buffer: 2-D ones have ROWS rows of ROW elements, 1-D ones ``length`` elements."""

    name: str
    length: int = ROW
    flat: bool = False
    writable: bool = True


@dataclass
class _Here:
    """Where a statement stands: what is written for sure, indices in 0 .. ROWS - 1, and whether all ranks (or which axes) get here."""

    written: frozenset[str]
    indices: tuple[str, ...] = ()
    roots: tuple[_Root, ...] = ()
    fixed: frozenset[str] = frozenset()  # axes along which ranks differ here
    local: bool = False
    depth: int = 0


@dataclass
class Generator:
    """One program. ``streams`` False: none is named, so that the pass chooses."""

    rng: random.Random
    streams: bool = True
    lines: list[str] = field(default_factory=list)
    names: int = 0
    events: list[str] = field(default_factory=list)
    left: int = 0

    # ---- small choices

    def pick(self, *choices: str) -> str:
        return self.rng.choice(choices)

    def chance(self, one_in: int) -> bool:
        return self.rng.randrange(one_in) == 0

    def name(self, prefix: str = "v") -> str:
        self.names += 1
        return f"%{prefix}{self.names}"

    def emit(self, line: str) -> None:
        self.lines.append(line)

    # ---- the program

    def make(self, size: int = 10) -> Made:
        """About ``size`` statements."""
        self.axes = self.rng.choice(MESHES)
        self.world = [a for a, _ in self.axes]
        self.count = dict(self.axes)
        total = 1
        for _, n in self.axes:
            total *= n
        self.total = total
        k = self.rng.randrange(2, 4)
        pool = ["main", "comm", "t", "s[0]", "s[1]"] + [f"s[{{i}} % {k}]"] * 2 + ["u[{r} % 2]"]
        self.pool = self.rng.sample(pool, self.rng.randrange(2, 5)) if self.streams else []
        self.modulus = k
        roots = [_Root("x", writable=False), _Root("z"), _Root("y", flat=True, writable=False)]
        written = {"x", "z", "y"}
        head = f"program @made(%x: i64[{ROWS}, {ROW}], inout %z: i64[{ROWS}, {ROW}], %y: i64[{ROW}])"
        mesh = ", ".join(f"{a} = {n}" for a, n in self.axes)
        for name in ("a", "b", "g"):
            if name == "g":
                self.emit(f"%g = zeros i64[{total * ROW}]")
                roots.append(_Root("g", total * ROW, flat=True))
                written.add("g")
            elif self.chance(2):
                self.emit(f"%{name} = {self.pick('zeros', 'full(3)')} i64[{ROWS}, {ROW}]")
                roots.append(_Root(name))
                written.add(name)
            else:
                self.emit(f"%{name} = alloc i64[{ROW}]")
                roots.append(_Root(name, flat=True))
        self.left = size
        here = _Here(frozenset(written), roots=tuple(roots))
        here = self.block(here, size, top=True)
        if self.chance(3) and (spare := [r for r in roots if r.name in ("a", "b")]):
            gone = self.rng.choice(spare).name
            self.emit(f"free %{gone}")
            here.written = here.written - {gone}
        given = [f"%{r.name}" for r in roots if r.name in here.written and r.name not in ("x", "z", "y")]
        body = "\n".join(self.lines)
        returned = "\nreturn " + ", ".join(given) if given else ""
        return Made(f"{UNITS}{head} mesh({mesh}) {{\n{body}{returned}\n}}", self.axes)

    def block(self, here: _Here, num: int, *, top: bool = False) -> _Here:
        """``num`` statements; gives back where we stand after them."""
        for _ in range(num):
            if self.left <= 0:
                break
            self.left -= 1
            self.statement(here)
        return here

    def statement(self, here: _Here) -> None:
        options = [self.call] * 5 + [self.copy] * 2 + [self.fresh]
        if not here.local:
            options += [self.collective] * 4 + [self.permute] * 3 + [self.group] * 2 + [self.messages, self.pipeline]
        if here.depth < 2:
            options += [self.loop] * 3 + [self.branch] * 2
        if self.streams:
            options += [self.sync]
        self.rng.choice(options)(here)

    # ---- places

    def index(self, here: _Here, *, ranks: bool = True) -> str:
        """An expression in 0 .. ROWS - 1."""
        forms = [str(self.rng.randrange(ROWS))]
        if here.indices:
            i = self.rng.choice(here.indices)
            forms += [i, i, i, f"({i} + {self.rng.randrange(1, ROWS)}) % {ROWS}", f"{ROWS - 1} - {i}"]
        if ranks:
            axis = self.rng.choice(self.world)
            forms.append(f"rank({axis}) % {ROWS}")
            if here.indices:
                forms.append(f"(rank({axis}) + {self.rng.choice(here.indices)}) % {ROWS}")
        return self.rng.choice(forms)

    def view(self, source: str, item: str) -> str:
        out = self.name()
        self.emit(f"{out} = view %{source}{item}")
        return out

    def place(self, here: _Here, shape: str, *, write: bool = False, whole: bool = False) -> str:
        """A view of ``shape`` (row, half, column, table, or a number of elements). ``whole``: of a whole buffer where that can be."""
        roots = [r for r in here.roots if (r.writable if write else r.name in here.written)]
        if write:  # part of a buffer that nothing has written yet would leave holes
            roots = [r for r in roots if r.name in here.written or (r.flat and r.length == ROW and shape == "row")]
        tables = [r for r in roots if not r.flat]
        match shape:
            case "table":
                return f"%{self.rng.choice(tables).name}"
            case "column":
                return self.view(self.rng.choice(tables).name, f"[:, {self.rng.randrange(ROW)}]")
        root = self.rng.choice(roots)
        if shape == "row":
            if not root.flat:
                return self.view(root.name, f"[{self.index(here)}]")
            if root.length == ROW:
                return f"%{root.name}"
            at = f"({self.index(here)}) % {root.length // ROW}"
            return self.view(root.name, f"[{at} * {ROW} : {at} * {ROW} + {ROW}]")
        length = ROW // 2 if shape == "half" else int(shape)
        start = self.rng.randrange(0, (ROW - length) // 2 + 1) * 2 if self.chance(3) else self.rng.choice([0, ROW - length])
        span = f"{start} : {start + length}"
        return self.view(root.name, f"[{span}]" if root.flat else f"[{self.index(here)}, {span}]")

    def done(self, here: _Here, out: str) -> None:
        here.written = here.written | {out[1:]} if any(r.name == out[1:] for r in here.roots) else here.written

    def on(self, here: _Here, *, comm: bool = False) -> str:
        if not self.streams:
            return ""
        stream = self.rng.choice(self.pool)
        i = self.rng.choice(here.indices) if here.indices else str(self.rng.randrange(4))
        if "{r}" in stream:
            stream = "main" if comm else stream.format(r=f"rank({self.rng.choice(self.world)})")
        stream = stream.format(i=i) if "{i}" in stream else stream
        return "" if stream == "main" else f" on {stream}"

    def event(self) -> str:
        if not self.streams or not self.chance(6):
            return ""
        self.events.append(f"!e{len(self.events)}")
        return f"{self.events[-1]} = "

    # ---- local statements

    def call(self, here: _Here) -> None:
        shape = self.pick("row", "row", "row", "half", "column", "table")
        a = self.place(here, shape)
        kind = "table" if shape == "table" else self.pick("mix", "mix", "step", "both")
        if kind == "step":
            out = self.place(here, shape, write=True)
            k = self.rng.choice([*here.indices, str(self.rng.randrange(9)), f"rank({self.world[-1]}) + 1"])
            self.emit(f"{self.event()}{out} <- @step({a}, {k}){self.on(here)}")
        elif kind == "both":
            out, other = self.place(here, "row", write=True), self.name("t")
            a = self.place(here, "row")
            self.emit(f"{other} = alloc i64[{ROW}]")
            self.emit(f"{self.event()}{out}, {other} <- @both({a}, {self.place_now(here, out)}){self.on(here)}")
        else:
            b = self.place(here, shape)
            out = self.place(here, shape, write=True)
            if self.chance(3) and self.is_written(here, out):
                b = out
            self.emit(f"{self.event()}{out} <- @{kind}({a}, {b}){self.on(here)}")
        self.done(here, out)

    def is_written(self, here: _Here, out: str) -> bool:
        return out[1:] in here.written or out.startswith("%v")

    def place_now(self, here: _Here, out: str) -> str:
        return out if self.is_written(here, out) else "%y"

    def copy(self, here: _Here) -> None:
        shape = self.pick("row", "row", "half", "column", "table")
        a, out = self.place(here, shape), self.place(here, shape, write=True)
        self.emit(f"{self.event()}{out} <- copy({a}){self.on(here)}")
        self.done(here, out)

    def fresh(self, here: _Here) -> None:
        """A buffer of this block: filled, used, and what came of it kept."""
        t = self.name("t")
        a = self.place(here, "row")
        if self.chance(3):
            self.emit(f"{t} = {self.pick('zeros', 'full(2)')} i64[{ROW}]")
        else:
            self.emit(f"{t} = alloc i64[{ROW}]")
            how = f"copy({a})" if self.chance(2) or here.local else self.moving(here, a)
            stream = self.on(here, comm=True)
            self.emit(f"{self.event()}{t} <- {how}{stream}")
        if self.chance(2):
            self.emit(f"{t} <- @mix({t}, {self.place(here, 'row')}){self.on(here)}")
        b, out = self.place(here, "row"), self.place(here, "row", write=True)
        self.emit(f"{self.event()}{out} <- @mix({t}, {b}){self.on(here)}")
        self.done(here, out)

    def moving(self, here: _Here, a: str) -> str:
        team, n, rank = self.team(here)
        return f"permute({a} to ({rank} + 1) % {n} from ({rank} + {n - 1}) % {n}){team}"

    # ---- communication

    def team(self, here: _Here) -> tuple[str, int, str]:
        """``over …``, the number of members, the position of a rank in it."""
        free = [a for a in self.world if a not in here.fixed]
        teams: list[tuple[str, int, str]] = [(f" over {a}", self.count[a], f"rank({a})") for a in free]
        if len(free) == len(self.world):
            if len(free) == 1:
                teams.append(("", self.total, f"rank({free[0]})"))
            else:
                first, second = free
                teams.append(("", self.total, f"(rank({first}) * {self.count[second]} + rank({second}))"))
                teams.append((f" over ({second}, {first})", self.total, f"(rank({second}) * {self.count[first]} + rank({first}))"))
        return self.rng.choice(teams)

    def collective(self, here: _Here) -> None:
        team, n, rank = self.team(here)
        part = str(ROW // n)
        kind = self.rng.choice(COLLECTIVES)
        root = f"{self.index(here, ranks=False)} % {n}" if here.indices else str(self.rng.randrange(n))
        root = f"({root.rsplit(' % ', 1)[0]}) % {n}" if here.indices else root
        on = self.on(here, comm=True)
        match kind:
            case "allreduce":
                a = self.place(here, self.pick("row", "half"))
                op = self.pick("sum", "sum", "max")
                if self.chance(2) and (out := self.place(here, "row", write=True)) and self.is_written(here, out):
                    self.emit(f"{self.event()}{out} <- allreduce({out}{' max' if op == 'max' else ''}){team}{on}")
                    return
                a, out = self.place(here, "row"), self.place(here, "row", write=True)
                self.emit(f"{self.event()}{out} <- allreduce({a}{' max' if op == 'max' else ''}){team}{on}")
            case "broadcast":
                a, out = self.place(here, "row"), self.place(here, "row", write=True)
                self.emit(f"{self.event()}{out} <- broadcast({a} from {root}){team}{on}")
            case "reduce":
                a, out = self.place(here, "half"), self.place(here, "half", write=True)
                self.emit(f"{self.event()}{out} <- reduce({a} to {root}){team}{on}")
                return
            case "gather" | "allgather":
                a, out = self.place(here, part), self.place(here, "row", write=True)
                if kind == "gather" and not self.is_written(here, out):
                    return
                self.emit(f"{self.event()}{out} <- {kind}({a}{f' to {root}' if kind == 'gather' else ''}){team}{on}")
            case "reduce_scatter" | "scatter":
                a, out = self.place(here, "row"), self.place(here, part, write=True)
                self.emit(f"{self.event()}{out} <- {kind}({a}{f' from {root}' if kind == 'scatter' else ''}){team}{on}")
                if n > 1:
                    return
            case "alltoall":
                a, out = self.place(here, "row"), self.place(here, "row", write=True)
                self.emit(f"{self.event()}{out} <- alltoall({a}){team}{on}")
            case "alltoallv":
                a, out = self.place(here, "row"), self.place(here, "row", write=True)
                if not self.is_written(here, out):
                    return
                counts = ", ".join(f"1 + ({rank} + {j}) % 2" for j in range(n))
                self.emit(f"{self.event()}{out} <- alltoallv({a} send [{counts}] recv [{counts}]){team}{on}")
            case _:
                self.emit(f"barrier(){team}{on}")
                return
        self.done(here, out)

    def permute(self, here: _Here) -> None:
        team, n, rank = self.team(here)
        shape = self.pick("row", "row", "half")
        a, out = self.place(here, shape), self.place(here, shape, write=True)
        shift = self.rng.randrange(n)
        to, source = f"({rank} + {shift}) % {n}", f"({rank} + {n - shift}) % {n}"
        self.emit(f"{self.event()}{out} <- permute({a} to {to} from {source}){team}{self.on(here, comm=True)}")
        self.done(here, out)

    def group(self, here: _Here) -> None:
        """Sends and receives round the team; what is received goes into buffers of its own or rows that no other part touches."""
        team, n, rank = self.team(here)
        num = self.rng.randrange(1, 3)
        sends, recvs, keep = [], [], []
        for _ in range(num):
            shift = self.rng.randrange(n)
            a, t = self.place(here, "row"), self.name("t")
            self.emit(f"{t} = alloc i64[{ROW}]")
            sends.append(f"  send({a} to ({rank} + {shift}) % {n}){team}")
            recvs.append(f"  {t} <- recv(from ({rank} + {n - shift}) % {n}){team}")
            keep.append(t)
        parts = [*sends, *recvs]
        if num == 1:
            self.rng.shuffle(parts)
        self.emit(f"group{self.on(here, comm=True)} {{")
        for part in parts:
            self.emit(part)
        self.emit("}")
        for t in keep:
            out = self.place(here, "row", write=True)
            self.emit(f"{self.event()}{out} <- @mix({t}, {self.place(here, 'row')}){self.on(here)}")
            self.done(here, out)

    def messages(self, here: _Here) -> None:
        """One message: the sender's branch, the receiver's branch."""
        team, n, rank = self.team(here)
        if n < 2:
            return
        one, other = self.rng.sample(range(n), 2)
        a, out = self.place(here, "row"), self.place(here, "row", write=True)
        if not self.is_written(here, out):
            return
        self.emit(f"if {rank} == {one} {{ send({a} to {other}){team}{self.on(here, comm=True)} }}")
        self.emit(f"if {rank} == {other} {{ {out} <- recv(from {one}){team}{self.on(here, comm=True)} }}")

    def pipeline(self, here: _Here) -> None:
        """Every rank receives from the one before, works, and sends on."""
        team, n, rank = self.team(here)
        out = self.place(here, "row", write=True)
        if not self.is_written(here, out):
            return
        self.emit(f"if {rank} > 0 {{ {out} <- recv(from {rank} - 1){team}{self.on(here, comm=True)} }}")
        self.emit(f"{out} <- @step({out}, {rank}){self.on(here)}")
        self.emit(f"if {rank} < {n - 1} {{ send({out} to {rank} + 1){team}{self.on(here, comm=True)} }}")

    # ---- structure

    def loop(self, here: _Here) -> None:
        i = self.name("i")
        bounds = self.rng.choice(["0 .. 4", "0 .. 3", "1 .. 4", "0 .. 4 step 2", "0 .. 2", "2 .. 2"])
        local = here.local
        if self.chance(5):
            bounds, local = f"0 .. 1 + rank({self.rng.choice(self.world)})", True
        self.emit(f"for {i} in {bounds} {{")
        inner = _Here(here.written, (*here.indices, i), here.roots, here.fixed, local, here.depth + 1)
        self.block(inner, self.rng.randrange(1, 5))
        self.emit("}")

    def branch(self, here: _Here) -> None:
        fixed, local = here.fixed, here.local
        axis = self.rng.choice(self.world)
        if here.indices and self.chance(2):
            cond = f"{self.rng.choice(here.indices)} {self.pick('> 0', '% 2 == 0', '< 3', '!= 1')}"
        elif len(self.world) > 1 and self.chance(2):
            cond, fixed = f"rank({axis}) == {self.rng.randrange(self.count[axis])}", here.fixed | {axis}
        else:
            cond, local = f"rank({axis}) {self.pick('== 0', '> 0', '% 2 == 1', '< 2')}", True
        local |= len(fixed) == len(self.world)
        self.emit(f"if {cond} {{")
        self.block(_Here(here.written, here.indices, here.roots, fixed, local, here.depth + 1), self.rng.randrange(1, 4))
        if self.chance(2):
            self.emit("} else {")
            self.block(_Here(here.written, here.indices, here.roots, fixed, local, here.depth + 1), self.rng.randrange(1, 3))
        self.emit("}")

    def sync(self, here: _Here) -> None:
        one, other = (self.on(here) or " on main" for _ in range(2))
        what = self.rng.choice([one.removeprefix(" on "), *self.events[-3:]])
        if what != other.removeprefix(" on "):
            self.emit(f"sync {what} -> {other.removeprefix(' on ')}")


def generate(rng: random.Random, size: int | None = None) -> Made:
    """A right program, unscheduled."""
    streams = rng.randrange(6) > 0
    return Generator(rng, streams).make(rng.randrange(3, 14) if size is None else size)


def generated(seed: int, size: int | None = None) -> Made:
    return generate(random.Random(seed), size)
