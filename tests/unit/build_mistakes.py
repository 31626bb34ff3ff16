"""The mistakes of test_build_errors.py: what is done to an open program, and the message that says so.

Each case is a function of a small program; where it has several lines, ``# here`` marks the one that makes the mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

import hostir as hir
from hostir.graph.fusion import Fusion


class Bench:
    """An open program with something of each kind in it."""

    def __init__(self, p: hir.Program) -> None:
        self.p = p
        self.x = p.input("x", (4, 6), torch.float32)
        self.y = p.input("y", (4, 6), torch.float32, inout=True)
        self.e = p.input("e", (1, 6), torch.float32, inout=True)
        self.n = p.input("n", (4,), torch.int64)
        self.k = p.scalar("k")
        self.f = p.scalar("f", float)
        self.t = p.scalar("t", bool)
        self.z = p.empty((4, 6), torch.float32, name="z")
        self.host = p.empty((4, 6), torch.float32, memory="host", name="host")
        self.flag = p.empty((), torch.int32, memory="symmetric", name="flag")


@hir.unit
def twice(x):
    return x * 2


@hir.unit
def halves(x):
    return x[:2], x[2:]


@hir.unit
def bump(x):
    x.add_(1)
    return x


def by_hand(kind: str) -> Fusion:
    f = Fusion(kind)
    x = f.input((4, 6), torch.float32, name="x")
    k = f.scalar("k")
    f.output(hir.ops.mul(x, k))
    return f


def opaque() -> Fusion:
    from hostir.graph.table import apply

    f = Fusion("cdist")
    x = f.input((4, 6), torch.float32, name="x")
    f.output(apply(f, "aten._cdist_forward.default", (x, x, 2.0, None))[0])
    return f


def foreign(b: Bench) -> None:
    with hir.Program("other"):
        b.p.copy(b.x, out=hir.Program("third").input("q", (4, 6), torch.float32))


def in_a_loop(do: Callable[[Bench], object]) -> Callable[[Bench], None]:
    def case(b: Bench) -> None:
        with b.p.loop(2):
            do(b)

    case.__wrapped__ = do  # type: ignore[attr-defined]
    return case


def in_a_group(do: Callable[[Bench], object]) -> Callable[[Bench], None]:
    def case(b: Bench) -> None:
        with b.p.group(on="s"):
            do(b)

    case.__wrapped__ = do  # type: ignore[attr-defined]
    return case


def leaked_index(b: Bench) -> None:
    with b.p.loop(4) as i:
        pass
    b.p.copy(b.x[i], out=b.z[0])  # here


def leaked_buffer(b: Bench) -> None:
    with b.p.loop(4):
        inner = b.p.zeros((4, 6), torch.float32, name="inner")
    b.p.copy(inner, out=b.z)  # here


def leaked_output(b: Bench) -> None:
    with b.p.loop(4):
        inner = b.p.zeros((4, 6), torch.float32, name="inner")
    b.p.output(inner)


def used_after_free(b: Bench) -> None:
    b.p.free(b.z)
    b.p.copy(b.x, out=b.z)  # here


def late_else(b: Bench) -> None:
    with b.p.if_(b.t) as branch:
        pass
    b.p.barrier()
    with branch.else_():  # here
        pass


def second_else(b: Bench) -> None:
    with b.p.if_(b.t):
        pass
    with b.p.else_():
        b.p.barrier()
    with b.p.else_():  # here
        pass


def scope_twice(b: Bench) -> None:
    scope = b.p.loop(2)
    with scope:
        pass
    with scope:  # here
        pass


def group_of_two_teams(b: Bench) -> None:
    with b.p.group():  # here
        b.p.send(b.x, to=0)
        b.p.send(b.x, to=0, over="tp")


def group_with_data_flow(b: Bench) -> None:
    with b.p.group():  # here
        b.p.allreduce(b.x, out=b.y)
        b.p.allreduce(b.y, out=b.z)


def group_with_a_call(b: Bench) -> None:
    with b.p.group():  # here
        b.p.add(b.x, b.x, out=b.y)


def group_with_a_barrier(b: Bench) -> None:
    with b.p.group():  # here
        b.p.barrier()


def forgotten_with(b: Bench) -> None:
    b.p.loop(2)  # here


def event_of_another_program(b: Bench) -> None:
    with hir.Program("other", mesh=hir.Mesh(2)) as q:
        event = q.barrier()
    b.p.sync(event)  # here


Case = tuple[Callable[[Bench], object], str]

VALUES: Final[dict[str, Case]] = {
    "input: no name": (lambda b: b.p.input("2x", (4,), "f32"), "'2x' is no name"),
    "input: a name beyond ASCII": (lambda b: b.p.input("größe", (4,), "f32"), "'größe' is no name"),
    "input: a name twice": (lambda b: b.p.input("x", (4,), "f32"), "there is an input 'x' already"),
    "input: no dtype": (lambda b: b.p.input("q", (4,), "f33"), "f33 is not a dtype that programs know"),
    "input: a negative size": (lambda b: b.p.input("q", (-4,), "f32"), "-4 is not a size"),
    "input: half a size": (lambda b: b.p.input("q", (b.f * 2,), "f32"), "%f * 2 is not a size"),
    "input: a size that nothing binds": (lambda b: b.p.input("q", (hir.sym("m") + 1,), "f32"), "nothing binds the symbol m in the sizes of input %q"),
    "input: unknown memory": (lambda b: b.p.input("q", (4,), "f32", memory="shared"), "memory is global, symmetric or host, not 'shared'"),
    "input: in a loop": (in_a_loop(lambda b: b.p.input("q", (4,), "f32")), "inputs are declared at the top of a program, not in a loop or branch"),
    "scalar: of another kind": (lambda b: b.p.scalar("q", str), "a host scalar is int, float or bool"),
    "alloc: a size that nothing binds": (lambda b: b.p.empty((hir.sym("m"),), "f32"), "nothing binds the symbol m in this statement"),
    "alloc: filled with a string": (lambda b: b.p.full((4,), "0", "f32"), "a buffer is filled with a Python number"),
    "alloc: a fraction in integers": (lambda b: b.p.full((4,), 2.5, "i32"), "2.5 does not fit into i32[4]"),
    "alloc: infinity in integers": (lambda b: b.p.full((4,), float("inf"), "i64"), "inf does not fit into i64[4]"),
    "alloc: a number out of range": (lambda b: b.p.full((4,), 256, "u8"), "256 does not fit into u8[4]"),
    "alloc: a negative number in unsigned ones": (lambda b: b.p.full((4,), -1, "u8"), "-1 does not fit into u8[4]"),
    "free: an input": (lambda b: b.p.free(b.x), "%x cannot be freed here"),
    "free: a view": (lambda b: b.p.free(b.z[0]), "%v cannot be freed here"),
    "free: and then used": (used_after_free, "%z is used after its memory was freed"),
    "output: in a loop": (in_a_loop(lambda b: b.p.output(b.z)), "outputs are named at the top level of a program"),
    "output: of another thing": (lambda b: b.p.output(3), "expected a buffer of this program, not int"),
    "a buffer of another program": (foreign, "%q belongs to the program third, not to t"),
    "a buffer after its loop": (leaked_buffer, "%inner is not known here"),
    "a loop index after its loop": (leaked_index, "%i is not in scope in this statement"),
    "an input that is written": (lambda b: b.p.copy(b.y, out=b.x), "%x is an input and this statement writes it"),
    "a view of an input that is written": (lambda b: b.p.copy(b.y[0], out=b.x[0]), "%x is an input and this statement writes it"),
    "an expanded buffer that is written": (
        lambda b: b.p.copy(b.y, out=b.e.expand(4, 6)), "%v is expanded: several of its elements are one, so it cannot be written",
    ),
}  # fmt: skip

VIEWS: Final[dict[str, Case]] = {
    "index: past the end": (lambda b: b.x[4], "index 4 is outside dimension 0"),
    "index: before the start": (lambda b: b.x[-5], "index -5 is outside dimension 0"),
    "index: too many": (lambda b: b.x[0, 0, 0], "3 indices on a buffer of 2 dimensions"),
    "index: half an index": (lambda b: b.x[b.f * 1.5], "%f * 1.5 is not an integer"),
    "index: a number with a point": (lambda b: b.x[1.0], "a buffer is indexed by ints and host expressions, not by float"),
    "index: a buffer": (lambda b: b.x[b.n], "a buffer is indexed by ints and host expressions, not by Buffer"),
    "index: a list": (lambda b: b.x[[0, 1]], "a buffer is indexed by ints and host expressions, not by list"),
    "index: none": (lambda b: b.x[None], "a buffer is indexed by ints and host expressions, not by NoneType"),
    "index: a condition": (lambda b: b.x[b.k < 2], "a buffer is indexed by ints and host expressions, not by Cmp"),
    "index: a bool": (lambda b: b.x[True], "a buffer is indexed by ints and host expressions, not by bool"),
    "index: a bool scalar": (lambda b: b.x[b.t], "%t is a condition, not a number"),
    "range: past the end": (lambda b: b.x[1:5], "index 5 is outside dimension 0"),
    "range: backwards": (lambda b: b.x[3:1], "the range of dimension 0 ends before it starts"),
    "range: backwards in symbols": (lambda b: b.x[b.k : b.k - 1], "the range of dimension 0 ends before it starts"),
    "range: with a step": (lambda b: b.x[::2], "a view takes every element of a range"),
    "narrow: a negative length": (lambda b: b.x.narrow(0, 2, -1), "the range of dimension 0 ends before it starts"),
    "select: of no dimension": (lambda b: b.x.select(2, 0), "dim 2 is outside a buffer of 2 dimensions"),
    "chunk: past the last": (lambda b: b.x.chunk(3, 3), "there is no chunk 3 of 3"),
    "chunk: past the last, uneven": (lambda b: b.x.chunk(7, 3, dim=1), "there is no chunk 7 of 3"),
    "chunk: of none": (lambda b: b.x.chunk(b.k, 0), "there is no chunk %k of 0"),
    "reshape: another number of elements": (lambda b: b.x.reshape(5, 5), "a reshape keeps the number of elements"),
    "reshape: a negative size": (lambda b: b.x.reshape(-2, 12), "-2 is not a size"),
    "reshape: by nothing": (lambda b: b.x.reshape(0, -1), "24 // 0: division by zero in a host expression"),
    "permute: a dimension twice": (lambda b: b.x.permute(0, 0), "a permutation names each dimension once"),
    "permute: no such dimension": (lambda b: b.x.permute(0, 2), "dim 2 is outside a buffer of 2 dimensions"),
    "expand: a dimension that is not 1": (lambda b: b.x.expand(8, 6), "expand repeats dimensions of size 1 and adds leading ones"),
    "peer: of global memory": (lambda b: b.x.peer(0), "only a symmetric buffer can be addressed on a peer"),
    "set: from a number": (lambda b: b.y.__setitem__(0, 1.0), "a buffer is set from a buffer, not from float"),
}  # fmt: skip

NOT_TENSORS: Final[dict[str, Case]] = {
    "+": (lambda b: b.x + b.x, "arithmetic on the buffer %x: a program states where results go"),
    "number +": (lambda b: 1 + b.x, "arithmetic on the buffer %x: a program states where results go"),
    "@": (lambda b: b.x @ b.x, "arithmetic on the buffer %x: a program states where results go"),
    "/": (lambda b: b.x / 2, "arithmetic on the buffer %x: a program states where results go"),
    "**": (lambda b: b.x**2, "arithmetic on the buffer %x: a program states where results go"),
    "minus": (lambda b: -b.x, "arithmetic on the buffer %x: a program states where results go"),
    "+= of a view": (lambda b: b.x[0].__iadd__(b.x[1]), "arithmetic on the buffer %x: a program states where results go"),
    "truth": (lambda b: bool(b.x), "a truth value on the buffer %x: a program states where results go"),
    "len": (lambda b: len(b.x), "len() on the buffer %x: a program states where results go"),
    "iteration": (lambda b: list(b.x), "iteration on the buffer %x: a program states where results go"),
}  # fmt: skip

CALLS: Final[dict[str, Case]] = {
    "no unit": (lambda b: b.p.call(3, b.x), "a unit is a torch function, @hir.unit or a Fusion"),
    "a unit without a result": (lambda b: b.p.call(Fusion("idle")), "@idle computes nothing: it returns no tensor and changes no argument"),
    "a tensor": (lambda b: b.p.call(twice, torch.ones(4)), "a tensor cannot be an argument while a program is built"),
    "a condition": (lambda b: b.p.call(lambda x, c: x, b.x, b.k < 2), "a condition cannot be an argument of a unit"),
    "a list of buffers": (lambda b: b.p.call(lambda xs: torch.cat(xs), [b.x, b.y]), "a unit takes buffers one by one, not in a list"),
    "a value of a fusion": (lambda b: b.p.call(twice, by_hand("f").params[0]), "a TensorView belongs to a Fusion; a program's units take buffers"),
    "an output that does not fit": (
        lambda b: b.p.call(twice, b.x, out=b.z[0]), "@twice does not fit into %v: an output is neither cast nor broadcast",
    ),
    "an output of another dtype": (
        lambda b: b.p.call(twice, b.n, out=b.p.empty(4, "i32")), "@twice does not fit into %t: an output is neither cast nor broadcast",
    ),
    "too few outputs": (lambda b: b.p.call(halves, b.x, out=b.z[0:2]), "@halves has 2 results"),
    "an output that is none": (lambda b: b.p.call(twice, b.x, out=torch.ones(4, 6)), "expected a buffer of this program, not Tensor"),
    "one output twice": (lambda b: b.p.call(halves, b.x, out=(b.z[0:2], b.z[0:2])), "two results are written into one buffer"),
    "a result in place, elsewhere": (lambda b: b.p.call(bump, b.y, out=b.z), "@bump writes this result in place, into %y"),
    "in place, an input": (lambda b: b.p.call(bump, b.x), "%x is an input and this statement writes it"),
    "a fusion with too few arguments": (lambda b: b.p.call(by_hand("f"), b.x), "@f takes 2 arguments"),
    "a fusion with a tensor for a number": (lambda b: b.p.call(by_hand("f"), b.x, b.x), "%k of @f is a host int"),
    "a fusion with a number for a tensor": (lambda b: b.p.call(by_hand("f"), 1, 2), "%x of @f is a tensor"),
    "a fusion with another dtype": (lambda b: b.p.call(by_hand("f"), b.n, 2), "%x of @f has another type"),
    "a fusion with another size": (lambda b: b.p.call(by_hand("f"), b.x.T, 2), "size 0 of %x of @f does not fit the other arguments"),
    "a fusion with a fraction for an int": (lambda b: b.p.call(by_hand("f"), b.x, 2.5), "%k of @f is a host int"),
    "a result that only torch knows": (lambda b: b.p.call(opaque(), b.x), "the type of a result of @cdist is known to torch only"),
    "host memory": (lambda b: b.p.call(twice, b.host), "%host is host memory, which device segments cannot touch"),
    "sugar: sizes that do not fit": (lambda b: b.p.matmul(b.x, b.x), "inner sizes of f32[4, 6] and f32[4, 6]: sizes 6 and 4 do not agree"),
    "a stream that is none": (lambda b: b.p.add(b.x, b.x, on=3), "a stream is given by its name, or made by p.stream"),
    "main with an index": (lambda b: b.p.add(b.x, b.x, on=b.p.stream("main", b.k)), "the stream main has no index"),
    "half a stream index": (lambda b: b.p.add(b.x, b.x, on=b.p.stream("s", b.f)), "%f is not an integer"),
}  # fmt: skip

COMMUNICATIONS: Final[dict[str, Case]] = {
    "a buffer that is none": (lambda b: b.p.allreduce(torch.ones(4)), "expected a buffer of this program, not Tensor"),
    "an input in place": (lambda b: b.p.allreduce(b.x), "%x is an input and this statement writes it"),
    "allgather: an output that does not fit": (lambda b: b.p.allgather(b.x, out=b.z), "allgather of %x does not fit into %z"),
    "allgather: no such dimension": (lambda b: b.p.allgather(b.x, out=b.z, dim=2), "dim 2 is outside a buffer of 2 dimensions"),
    "reduce_scatter: uneven": (lambda b: b.p.reduce_scatter(b.x, out=b.z, over=[0, 1, 2, 3], dim=1), "reduce_scatter divides dimension 1 evenly"),
    "scatter: uneven": (lambda b: b.p.scatter(b.x, out=b.z, source=0, over=[0, 1, 2, 3], dim=1), "scatter divides dimension 1 evenly"),
    "scatter: more than one element": (
        lambda b: b.p.scatter(b.n, out=b.p.empty((), "i64"), source=0, over="tp"), "%t has one element, scatter gives more",
    ),
    "alltoall: uneven": (lambda b: b.p.alltoall(b.x, out=b.z, split_dim=1), "alltoall divides dimension 1 evenly"),
    "an unknown reduction": (lambda b: b.p.allreduce(b.y, op="median"), "median is no reduction"),
    "a root outside the team": (lambda b: b.p.broadcast(b.x, out=b.z, source=2, over="tp"), "`from 2` is not a position in the team"),
    "a negative peer": (lambda b: b.p.send(b.x, to=-1), "`to -1` is not a position in the team"),
    "half a peer": (lambda b: b.p.send(b.x, to=b.f), "%f is not an integer"),
    "a peer that is no number": (lambda b: b.p.send(b.x, to="0"), "'0' cannot be part of a host expression"),
    "alltoallv: too few counts": (
        lambda b: b.p.alltoallv(b.x, out=b.z, send_counts=(1,), recv_counts=(1,), over="tp"), "alltoallv counts rows for each member of the team",
    ),
    "alltoallv: counts of another kind": (
        lambda b: b.p.alltoallv(b.x, out=b.z, send_counts=b.x[0], recv_counts=b.n), "alltoallv takes its counts from an i64 buffer of one dimension",
    ),
    "alltoallv: no rows": (
        lambda b: b.p.alltoallv(b.n[0], out=b.z, send_counts=(1, 1), recv_counts=(1, 1), over="tp"),
        "alltoallv moves rows, so its buffers have at least one dimension",
    ),
    "over another axis": (lambda b: b.p.barrier(over="pp"), "the mesh has no axis 'pp'"),
    "over a number": (lambda b: b.p.barrier(over=2), "over takes a mesh axis, a tuple of axes or a list of ranks"),
    "over nothing": (lambda b: b.p.barrier(over=[]), "a team lists mesh axes or distinct ranks"),
    "over a rank twice": (lambda b: b.p.barrier(over=[0, 0]), "a team lists mesh axes or distinct ranks"),
    "over a rank outside": (lambda b: b.p.barrier(over=[0, 4]), "rank 4 is not in the mesh"),
    "host memory": (lambda b: b.p.allreduce(b.host), "%host is host memory, which allreduce cannot touch"),
    "signal: a flag that is none": (lambda b: b.p.signal(b.y, to=0, value=1), "signal needs a flag: a 0-d i32 or i64 buffer"),
    "wait: a flag of another dtype": (lambda b: b.p.wait(b.x[0, 0], value=1), "wait needs a flag: a 0-d i32 or i64 buffer"),
    "copy: another shape": (lambda b: b.p.copy(b.x, out=b.z.T), "copy of %x does not fit into %v"),
    "group: a stream of its own inside": (
        in_a_group(lambda b: b.p.send(b.x, to=0, on="t")), "inside a group, communications run on the group's stream",
    ),
    "group: two teams": (group_of_two_teams, "the communications of a group are of one team"),
    "group: data flow": (group_with_data_flow, "no data flows inside a group: one part writes what another touches"),
    "group: a call": (group_with_a_call, "a group holds communications and views only"),
    "group: a barrier": (group_with_a_barrier, "barrier does not belong in a group"),
}  # fmt: skip

STRUCTURE: Final[dict[str, Case]] = {
    "loop: over nothing": (lambda b: b.p.loop(), "a loop takes stop, or start and stop, or start, stop and step"),
    "loop: over a string": (lambda b: b.p.loop("4"), "'4' cannot be part of a host expression"),
    "loop: half a trip": (lambda b: b.p.loop(2.5), "2.5 is not an integer"),
    "loop: to a float scalar": (lambda b: b.p.loop(b.f), "%f is not an integer"),
    "loop: a step of 0": (lambda b: b.p.loop(0, 4, 0), "a loop's step is at least 1"),
    "loop: a step back": (lambda b: b.p.loop(4, 0, -1), "a loop's step is at least 1"),
    "loop: no name": (lambda b: b.p.loop(4, name="the loop"), "'the loop' is no name"),
    "loop: twice": (scope_twice, "this loop is a block already"),
    "loop: without with": (forgotten_with, "loop() is no block yet"),
    "if: a number": (lambda b: b.p.if_(b.k), "%k is not a condition"),
    "if: a string": (lambda b: b.p.if_("k"), "'k' is not a condition"),
    "if: Python's and": (lambda b: b.p.if_(b.k < 1 and b.t), "the condition %k < 1 has no truth value while a program is being built"),
    "else: alone": (lambda b: b.p.else_(), "else_ stands directly after its if_"),
    "else: late": (late_else, "else_ stands directly after its if_"),
    "else: twice": (second_else, "else_ stands directly after its if_"),
    "stream: no name": (lambda b: b.p.stream("my stream"), "'my stream' is no name"),
    "stream: an index that is none": (lambda b: b.p.stream("s", "0"), "'0' cannot be part of a host expression"),
    "on: no stream": (lambda b: b.p.on(None), "a stream is given by its name, or made by p.stream"),
    "sync: no stream": (lambda b: b.p.sync(0), "a stream is given by its name, or made by p.stream"),
    "sync: an event from elsewhere": (event_of_another_program, "no statement is named !e"),
    "event: of nothing": (lambda b: b.p.event(), "event() names the call or communication written just before it"),
    "rank: of another axis": (lambda b: b.p.rank("pp"), "the mesh has no axis 'pp'"),
    "size: of another axis": (lambda b: b.p.size("pp"), "the mesh has no axis 'pp'"),
    "the text of an open program": (lambda b: str(b.p), "the program t is still open"),
    "an output bound in a loop": (leaked_output, "%inner cannot be an output: it is bound in a loop or branch"),
}  # fmt: skip

CASES: Final = {
    f"{group}: {name}": case
    for group, cases in (
        ("values", VALUES), ("views", VIEWS), ("not a tensor", NOT_TENSORS), ("call", CALLS), ("communication", COMMUNICATIONS),
        ("structure", STRUCTURE),
    )
    for name, case in cases.items()
}  # fmt: skip
