"""What the parser says of text that is no program: the message, the line, the column and the caret under it.

In each case ``¦`` marks the place that the error must point at; it is taken out before parsing. One group for each rule of the grammar
in docs/ir.md.
"""

from __future__ import annotations

import random
import re
from typing import Final

import pytest

from hostir.errors import ParseError
from hostir.ir.parse import parse_file, parse_program

MARK: Final = "¦"
UNIT: Final = "unit @f(%x: f32[2]) {\n  %y = neg(%x)\n  return %y\n}\n"


def body(statements: str, params: str = "%x: f32[4], %k: int, %t: bool", mesh: str = " mesh(tp = 2)") -> str:
    return f"program @p({params}){mesh} {{\n{statements}}}"


def in_unit(lines: str, params: str = "%x: f32[4], %k: int, %t: bool") -> str:
    return f"unit @f({params}) {{\n{lines}\n}}"


FILE: Final = {
    "neither unit nor program": ("¦module @m() {}", "expected a unit, a program or the end, found 'module'"),
    "text after the program": ("program @p() {}\n¦free", "expected a unit, a program or the end, found 'free'"),
    "a unit after the program": ("program @p() {}\n¦unit @f() {}", "expected a unit, a program or the end, found 'unit'"),
    "a character of no token": ("program @p() { ¦$ }", "unexpected character '$'"),
    "a percent sign alone at a name": ("program @p(¦% x: f32[2]) {}", "expected a parameter, as %name, found '%'"),
    "text of another version": ("¦# hostir 2\nprogram @p() {}", "this text is of version 2, and this hostir reads version 1"),
}

UNITS: Final = {
    "no name": ("unit ¦f() {}", "expected a unit's name, as @name, found 'f'"),
    "no parameters": ("unit @f ¦{}", "expected '(', found '{'"),
    "the name is there twice": (f"{UNIT}unit ¦@f(%x: f32[2]) {{ return %x }}", "the unit @f is there twice"),
    "a parameter without its sign": ("unit @f(¦x: f32[2]) { return %x }", "expected a parameter, as %name, found 'x'"),
    "a parameter without a type": ("unit @f(%x¦) { return %x }", "expected ':', found ')'"),
    "two parameters of one name": ("unit @f(%x: f32[2], ¦%x: f32[2]) { return %x }", "the name %x is taken: names are never reused or shadowed"),
    "no return": ("unit @f(%x: f32[2]) { ¦}", "expected a result, as %name, or `return`, found '}'"),
    "a return of nothing": ("unit @f(%x: f32[2]) { return ¦}", "expected a tensor, found '}'"),
    "a return of an unknown name": ("unit @f(%x: f32[2]) { return ¦%y }", "%y is not known here"),
    "a return of a host number": ("unit @f(%x: f32[2], %k: int) { return ¦%k }", "%k is not a tensor"),
    "more after the return": ("unit @f(%x: f32[2]) { return %x ¦%x }", "expected '}', found '%x'"),
    "the text ends inside": ("unit @f(%x: f32[2]) {\n¦", "expected a result, as %name, or `return`, found 'end of text'"),
    "memory in a unit": ("unit @f(%x: f32[2] ¦symmetric) { return %x }", "expected ')', found 'symmetric'"),
}

OPERATIONS: Final = {
    "no name": (in_unit("%y = ¦(%x)\nreturn %y"), "expected an operation, found '('"),
    "half a name": (in_unit("%y = aten.¦(%x)\nreturn %y"), "expected the rest of the operation's name, found '('"),
    "an unknown name": (in_unit("%y = ¦negate(%x)\nreturn %y"), "there is no operation named 'negate'"),
    "an arrow": (in_unit("%y ¦<- neg(%x)\nreturn %y"), "expected '=', found '<-'"),
    "a result that is not named": (in_unit("%v, ¦= topk(%x, k = 1)\nreturn %v"), "expected a result, as %name, found '='"),
    "too few names for its results": (in_unit("%v = ¦topk(%x, k = 1)\nreturn %v"), "topk has 2 results"),
    "an unknown value": (in_unit("%y = neg(¦%z)\nreturn %y"), "%z is not known here"),
    "a wrong operand": (in_unit("%y = ¦neg(2)\nreturn %y"), "x of neg is a tensor"),
    "an unknown attribute": (in_unit("%y = ¦sum(%x, axis = 0)\nreturn %y"), "sum has no argument named axis"),
    "an attribute twice": (in_unit("%y = sum(%x, dims = [0], ¦dims = [0])\nreturn %y"), "the attribute dims is there twice"),
    "a value after an attribute": (in_unit("%y = sum(keepdim = true, ¦%x)\nreturn %y"), "values stand before attributes"),
    "an argument missing": (in_unit("%y = add(%x, ¦)\nreturn %y"), "expected an expression, found ')'"),
    "arguments that do not end": (in_unit("%y = neg(%x ¦%x)\nreturn %y"), "expected ')', found '%x'"),
    "a condition as an argument": (in_unit("%y = add(%x, ¦%k < 2)\nreturn %y"), "a unit's arguments are numbers and tensors, not conditions"),
    "a tensor in an expression": (in_unit("%y = add(%x, 2 * ¦%x)\nreturn %y"), "%x is not a host number"),
    "a string with a wrong escape": (in_unit('%y = gelu(%x, approximate = ¦"\\q")\nreturn %y'), "this string has an escape that is none"),
    "a result name that is taken": (in_unit("¦%x = neg(%x)\nreturn %x"), "the name %x is taken: names are never reused or shadowed"),
}

PROGRAMS: Final = {
    "no name": ("program ¦p() {}", "expected the program's name, as @name, found 'p'"),
    "no parameters": ("program @p ¦{}", "expected '(', found '{'"),
    "a parameter that is no name": ("program @p(¦x: f32[2]) {}", "expected a parameter, as %name, found 'x'"),
    "a comma too many": ("program @p(%x: f32[2], ¦) {}", "expected a parameter, as %name, found ')'"),
    "a parameter's name twice": ("program @p(%x: f32[2], ¦%x: int) {}", "the name %x is taken: names are never reused or shadowed"),
    "a host number inout": ("program @p(inout ¦%k: int) {}", "a host number cannot be inout"),
    "a size that nothing binds": ("program @p(¦%x: f32[m + 1]) {}", "nothing binds the symbol m in the sizes of input %x"),
    "a rank without its axis": ("program @p(¦%x: f32[size(tp)]) {}", "the mesh has no axis 'tp'"),
    "an axis that is no name": ("program @p() mesh(¦2) {}", "expected a mesh axis, found '2'"),
    "an axis twice": ("program @p() mesh(tp, ¦tp) {}", "the mesh axis tp is there twice"),
    "an axis without a size": ("program @p() mesh(tp = ¦m) {}", "expected a size, found 'm'"),
    "an axis of size 0": ("program @p() mesh(tp = ¦0) {}", "0 is not a mesh size"),
    "an axis of size 1.5": ("program @p() mesh(tp = ¦1.5) {}", "1.5 is not a mesh size"),
    "a word before the block": ("program @p() ¦planned {}", "expected '{', found 'planned'"),
    "no end": ("program @p() {\n  sync a -> b\n¦", "expected a statement, found 'end of text'"),
    "no text": ("¦", "the text has no program"),
    "only units": (f"{UNIT}¦", "the text has no program"),
}

TYPES: Final = {
    "no dtype": (body("%y = zeros ¦[4]"), "expected a dtype, found '['"),
    "an unknown dtype": (body("%y = zeros ¦float32[4]"), "float32 is no dtype"),
    "no sizes": (body("%y = zeros f32 ¦"), "expected '[', found '}'"),
    "sizes that do not end": (body("%y = zeros f32[4¦"), "expected ']', found '}'"),
    "a negative size": (body("%y = zeros f32[¦-1]"), "-1 is not a size"),
    "half a size": (body("%y = zeros f32[¦2.5]"), "2.5 is not a size"),
    "a condition as a size": (body("%y = zeros f32[¦%k < 2]"), "expected a number, found a condition"),
    "an unknown symbol": (body("¦%y = zeros f32[m]"), "nothing binds the symbol m in this statement"),
    "unknown memory": (body("%y = zeros f32[4] ¦pinned"), "expected a statement, found 'pinned'"),
}

EXPRESSIONS: Final = {
    "a comparison that goes on": (body("if 0 < %k ¦< 2 {}"), "comparisons do not chain"),
    "a number that is no condition": (body("if ¦%k {}"), "%k is not a condition"),
    "a number beside &": (body("if %t ¦& %k {}"), "%k is not a condition"),
    "a number beside |": (body("if %k ¦| %t {}"), "%k is not a condition"),
    "a number under ~": (body("if ¦~%k {}"), "%k is not a condition"),
    "a condition in arithmetic": (body("if (%k < 2) ¦+ 1 < 3 {}"), "a condition cannot be used as a number"),
    "a condition compared": (body("if %t ¦< 2 {}"), "a condition cannot be used as a number"),
    "a condition negated as a number": (body("if ¦-(%k < 2) < 3 {}"), "a condition cannot be used as a number"),
    "modulo without its space": (body("%v = view %x[%k ¦%k]"), "%k follows a number directly: a % before a letter begins a name"),
    "a division by zero": (body("%v = view %x[1 ¦// 0]"), "1 // 0: division by zero in a host expression"),
    "an operand that is missing": (body("%v = view %x[%k + ¦]"), "expected an expression, found ']'"),
    "a parenthesis that stays open": (body("%v = view %x[(%k + 1¦]"), "expected ')', found ']'"),
    "a buffer as a number": (body("%v = view %x[¦%x]"), "%x is not a host number"),
    "an unknown name": (body("%v = view %x[¦%i]"), "%i is not known here"),
    "a rank of no axis": (body("%v = view %x[rank(¦)]"), "expected a mesh axis, found ')'"),
    "a rank of another axis": (body("¦%v = view %x[rank(dp)]"), "the mesh has no axis 'dp'"),
    "min of one": (body("%v = view %x[min(%k¦)]"), "expected ',', found ')'"),
    "max of a condition": (body("%v = view %x[max(¦%k < 2, 1)]"), "expected a number, found a condition"),
    "a function that is none": (body("%v = view %x[abs¦(%k)]"), "expected ']', found '('"),
    "a statement word as a number": (body("for %i in 0 .. ¦{ }"), "expected an expression, found '{'"),
}

STATEMENTS: Final = {
    "a word that begins none": (body("¦launch %x"), "expected a statement, found 'launch'"),
    "a target and nothing": (body("%x <- ¦"), "expected a statement, found '}'"),
    "a target without an arrow": (body("%x ¦allreduce(%x)"), "expected '<-', found 'allreduce'"),
    "a return inside a loop": (body("for %i in 0 .. 2 { ¦return %x }"), "only the program itself returns"),
    "a return of nothing": (body("return ¦"), "expected a buffer, found '}'"),
    "a return of a number": (body("return ¦%k"), "%k is not a buffer"),
    "a statement after the return": (body("return %x\n¦free %x"), "expected '}', found 'free'"),
    "a return of what a loop bound": (
        body("for %i in 0 .. 2 { %y = zeros f32[2] }\n¦return %y"),
        "%y cannot be an output: it is bound in a loop or branch",
    ),
    "two buffers bound at once": (body("%a, ¦%b = alloc f32[2]"), "one buffer is bound at a time"),
    "a binding with no word": (body("%a = ¦f32[2]"), "expected alloc, zeros, full or view, found 'f32'"),
    "a name that is taken": (body("¦%x = alloc f32[2]"), "the name %x is taken: names are never reused or shadowed"),
    "a loop index that is taken": (body("for ¦%x in 0 .. 2 {}"), "the name %x is taken: names are never reused or shadowed"),
    "a name of an earlier loop": (body("for %i in 0 .. 2 {}\nfor ¦%i in 0 .. 2 {}"), "the name %i is taken: names are never reused or shadowed"),
    "full of nothing": (body("%a = full(¦) f32[2]"), "expected an expression, found ')'"),
    "full of an expression": (body("%a = full(¦%k) f32[2]"), "full takes a number"),
    "free of a number": (body("free ¦%k"), "%k is not a buffer"),
    "free of an input": (body("¦free %x"), "%x cannot be freed here"),
    "use after free": (body("%a = zeros f32[2]\nfree %a\n¦%b = view %a[0]"), "%a is used after its memory was freed"),
    "an input that is written": (body("%a = zeros f32[4]\n¦%x <- copy(%a)"), "%x is an input and this statement writes it"),
}

VIEWS: Final = {
    "of a number": (body("%v = view ¦%k[0]"), "%k is not a buffer"),
    "of nothing": (body("%v = view %x ¦"), "expected '.', found '}'"),
    "an unknown one": (body("%v = view %x.¦flip(0)"), "flip is no view"),
    "an index that is missing": (body("%v = view %x[0, ¦]"), "expected an expression, found ']'"),
    "an index past the end": (body("%v = view %x¦[4]"), "index 4 is outside dimension 0"),
    "too many indices": (body("%v = view %x¦[0, 0]"), "2 indices on a buffer of 1 dimensions"),
    "a range backwards": (body("%v = view %x¦[3 : 1]"), "the range of dimension 0 ends before it starts"),
    "another number of elements": (body("%v = view %x¦.reshape(3)"), "a reshape keeps the number of elements"),
    "a permutation of other dimensions": (body("%v = view %x¦.permute(1)"), "a permutation names each dimension once"),
    "a permutation by fractions": (body("%v = view %x.permute(¦0.5)"), "expected a dimension, found '0.5'"),
    "expand of what is not 1": (body("%v = view %x¦.expand(8)"), "expand repeats dimensions of size 1 and adds leading ones"),
    "a peer of global memory": (body("%v = view %x¦.peer(0)"), "only a symmetric buffer can be addressed on a peer"),
    "two steps at once": (body("%v = view %x[0]¦.T"), "expected a statement, found '.'"),
}

CALLS: Final = {
    "no such unit": (body("%x <- ¦@g(%x)"), "no unit @g"),
    "no arguments": (UNIT + body("%x <- @f ¦on s"), "expected '(', found 'on'"),
    "the wrong number of arguments": (UNIT + body("¦%x <- @f()"), "@f takes 1 arguments"),
    "another type": (UNIT + body("¦%x <- @f(%x)"), "size 0 of %x of @f does not fit the other arguments"),
    "a condition as an argument": (UNIT + body("%x <- @f(¦%k < 2)"), "an argument is a buffer or a number, not a condition"),
    "an output that does not fit": (
        UNIT + body("%v = view %x[0 : 2]\n¦%y <- @f(%v)", "%x: f32[4], inout %y: f32[3]"),
        "@f does not fit into %y: an output is neither cast nor broadcast",
    ),
    "too few outputs": (UNIT + body("¦@f(%x)", "%x: f32[2]"), "@f has 1 results"),
    "no stream": (UNIT + body("%y <- @f(%x) on ¦%x", "%x: f32[2], inout %y: f32[2]"), "expected a stream, found '%x'"),
    "main with an index": (UNIT + body("¦%y <- @f(%x) on main[0]", "%x: f32[2], inout %y: f32[2]"), "the stream main has no index"),
    "it awaits a number": (UNIT + body("%y <- @f(%x) awaits ¦%k", "%x: f32[2], inout %y: f32[2], %k: int"), "%k is not a buffer"),
}  # fmt: skip

COMMUNICATIONS: Final = {
    "an unknown modifier": (body("%x <- allgather(%x ¦along 0)"), "along is no modifier of allgather"),
    "a modifier of another kind": (body("¦%y <- allgather(%x to 0)", "%x: f32[4], inout %y: f32[8]"), "allgather takes no `to`"),
    "a modifier twice": (body("%y <- allgather(%x dim 0 ¦dim 0)", "%x: f32[4], inout %y: f32[8]"), "dim is there twice"),
    "a modifier that is missing": (body("¦%y <- broadcast(%x)", "%x: f32[4], inout %y: f32[4]"), "broadcast needs `from`"),
    "half a dimension": (body("%y <- allgather(%x dim ¦0.5)", "%x: f32[4], inout %y: f32[8]"), "expected a dimension, found '0.5'"),
    "a negative dimension": (body("%y <- allgather(%x dim ¦-1)", "%x: f32[4], inout %y: f32[8]"), "expected a dimension, found '-'"),
    "a root outside the team": (body("¦%y <- broadcast(%x from 2)", "%x: f32[4], inout %y: f32[4]"), "`from 2` is not a position in the team"),
    "no input": (body("¦%y <- allgather()", "inout %y: f32[8]"), "allgather takes 1 inputs and writes 1 buffers"),
    "no output": (body("¦allgather(%x)"), "allgather takes 1 inputs and writes 1 buffers"),
    "an output that does not fit": (body("¦%y <- allgather(%x)", "%x: f32[4], inout %y: f32[7]"), "allgather of %x does not fit into %y"),
    "parts that are not even": (body("¦%y <- reduce_scatter(%x)", "%x: f32[3], inout %y: f32[1]"), "reduce_scatter divides dimension 0 evenly"),
    "no team": (body("¦barrier()", mesh=""), "barrier needs a mesh"),
    "an axis that is none": (body("¦barrier() over dp"), "the mesh has no axis 'dp'"),
    "over a number": (body("barrier() over ¦2"), "expected a mesh axis, found '2'"),
    "over half a rank": (body("barrier() over [0, ¦0.5]"), "expected a rank, found '0.5'"),
    "over a rank twice": (body("¦barrier() over [0, 0]"), "a team lists mesh axes or distinct ranks"),
    "over nothing": (body("¦barrier() over []"), "a team lists mesh axes or distinct ranks"),
    "a local one over a team": (body("¦%y <- copy(%x) over tp", "%x: f32[4], inout %y: f32[4]"), "copy is local, so it takes no `over`"),
    "counts that are none": (body("%y <- alltoallv(%x send ¦2 recv [1, 1])", "%x: f32[4], inout %y: f32[4]"), "expected a buffer, found '2'"),
    "a flag that is none": (body("¦wait(%x value 1)"), "wait needs a flag: a 0-d i32 or i64 buffer"),
}

GROUPS: Final = {
    "no block": (body("group on s ¦send(%x to 0)"), "expected '{', found 'send'"),
    "a statement that is no communication": (body("¦group { %a = zeros f32[2] }"), "a group holds communications and views only"),
    "two teams": (body("¦group { send(%x to 0)\nsend(%x to 0) over [0, 1] }"), "the communications of a group are of one team"),
    "a barrier": (body("¦group { barrier() }"), "barrier does not belong in a group"),
    "a name inside": (body("¦group { !e = send(%x to 0) }"), "a part of a group has no name of its own: the parts begin and end together"),
    "data that flows": (
        body("¦group { %y <- allreduce(%x)\n%z <- allreduce(%y) }", "%x: f32[4], inout %y: f32[4], inout %z: f32[4]"),
        "no data flows inside a group: one part writes what another touches",
    ),
    "another stream inside": (
        body("¦group on s { %y <- allreduce(%x) on t }", "%x: f32[4], inout %y: f32[4]"), "the communications of a group run on the group's stream",
    ),
}  # fmt: skip

SYNCS: Final = {
    "no arrow": (body("sync a ¦main"), "expected '->', found 'main'"),
    "no stream": (body("sync a -> ¦"), "expected a stream, found '}'"),
    "an event on the right": (body("sync a -> ¦!e"), "expected a stream, found '!e'"),
    "an event that nothing has": (body("sync ¦!e -> main"), "no statement is named !e"),
    "an event that two have": (body("!e = barrier()\n¦!e = barrier()"), "the event !e names two statements"),
    "an event of a binding": (body("!e = %a ¦= zeros f32[2]"), "expected '<-', found '='"),
    "an event of a loop": (body("!e = ¦for %i in 0 .. 2 {}"), "expected a statement, found 'for'"),
    "an event without its statement": (body("!e ¦barrier()"), "expected '=', found 'barrier'"),
    "an index that is missing": (body("sync a[¦] -> main"), "expected an expression, found ']'"),
}

LOOPS_AND_BRANCHES: Final = {
    "a loop over no name": (body("for ¦i in 0 .. 2 {}"), "expected a loop index, as %name, found 'i'"),
    "a loop without in": (body("for %i ¦= 0 .. 2 {}"), "expected 'in', found '='"),
    "a loop without bounds": (body("for %i in 2 ¦{}"), "expected '..', found '{'"),
    "a loop with no step": (body("for %i in 0 .. 2 step ¦{}"), "expected an expression, found '{'"),
    "a step of 0": (body("¦for %i in 0 .. 2 step 0 {}"), "a loop's step is at least 1"),
    "half a step": (body("¦for %i in 0 .. 2 step 0.5 {}"), "0.5 is not an integer"),
    "a bound of its own index": (body("for %i in 0 .. ¦%i {}"), "%i is not known here"),
    "a loop index after its loop": (body("for %i in 0 .. 2 {}\n¦%v = view %x[%i]"), "%i is not in scope in this statement"),
    "a branch without a condition": (body("if ¦{}"), "expected an expression, found '{'"),
    "a branch without a block": (body("if %t ¦free %x"), "expected '{', found 'free'"),
    "an else of its own": (body("¦else {}"), "expected a statement, found 'else'"),
    "else if": (body("if %t {} else ¦if %t {}"), "expected '{', found 'if'"),
    "a buffer of the other branch": (body("if %t { %a = zeros f32[2] } else { ¦%b = view %a[0] }"), "%a is not known here"),
}

CASES: Final = {
    f"{rule}: {name}": case
    for rule, cases in (
        ("file", FILE), ("unit", UNITS), ("operation", OPERATIONS), ("program", PROGRAMS), ("type", TYPES), ("expression", EXPRESSIONS),
        ("statement", STATEMENTS), ("view", VIEWS), ("call", CALLS), ("communication", COMMUNICATIONS), ("group", GROUPS), ("sync", SYNCS),
        ("loops and branches", LOOPS_AND_BRANCHES),
    )
    for name, case in cases.items()
}  # fmt: skip


def parse_marked(marked: str) -> tuple[ParseError, str, int, int]:
    """The error of a marked text, the text, and the line and column of the mark."""
    before, mark, after = marked.partition(MARK)
    assert mark, "the case marks no place"
    assert MARK not in after, "the case marks two places"
    text = before + after
    with pytest.raises(ParseError) as caught:
        parse_program(text, "p.hir")
    return caught.value, text, before.count("\n") + 1, len(before.rpartition("\n")[2]) + 1


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_reported_where_it_stands(case: str) -> None:
    marked, message = CASES[case]
    error, text, line, column = parse_marked(marked)
    shown = str(error).splitlines()
    assert shown[0] == f"p.hir:{line}:{column}: {message}"
    assert shown[1] == text.split("\n")[line - 1] == error.text
    assert shown[2] == " " * (column - 1) + "^"
    assert (error.line, error.column) == (line, column)


def test_the_mistake_carries_what_was_expected_and_the_cure() -> None:
    error, *_ = parse_marked(body("%v = view %x[%k ¦%k]"))
    assert error.cure == "for modulo write a space after it: % %k"
    error, *_ = parse_marked(body("%y = zeros ¦float32[4]"))
    assert error.expected is not None
    assert error.expected.startswith("f64, f32, f16, bf16")
    error, *_ = parse_marked(CALLS["an output that does not fit"][0])
    assert (error.expected, error.got) == ("f32[2]", "f32[3]")


def test_the_caret_stands_under_the_place_also_after_tabs() -> None:
    error, text, *_ = parse_marked("program @p() {\n\t\t¦$\n}")
    shown = str(error).splitlines()
    assert shown[1] == "\t\t$"
    assert shown[2] == "\t\t^"
    assert text.count("\t") == 2


def test_modulo_may_begin_a_line() -> None:
    """Only on one line is a name after a number a mistake: the next statement may begin with a name."""
    assert "view %x[%k % 2]" in str(parse_program(body("%v = view %x[%k\n% 2]")))


def test_units_alone_are_a_file() -> None:
    units, p = parse_file(UNIT)
    assert list(units) == ["@f"]
    assert p is None


@pytest.mark.parametrize(
    "text",
    [
        "program @p(%t: bool) { " + "if %t { " * 2000 + "}" * 2001,
        "program @p(%k: int) { if " + "(" * 3000 + "%k < 1" + ")" * 3000 + " {} }",
        "program @p(%k: int) { if " + "%k + " * 5000 + "%k < 1 {} }",
    ],
    ids=["blocks", "parentheses", "sums"],
)
def test_text_that_is_nested_too_deeply_is_refused(text: str) -> None:
    with pytest.raises(ParseError, match="the text is nested too deeply"):
        parse_program(text)


EVERYTHING: Final = """\
unit @u(%a: f32[m, 4], %k: int, %f: float, %t: bool) {
  %s = sum(%a, dims = [0], keepdim = true, dtype = f64)
  %g = gelu(%a, approximate = "tanh")
  %v, %i = topk(%g, k = %k)
  %o = aten.odd.default(%v, [1, 2.5], none, true)
  return %s, %i, %o
}
program @p(%x: f32[m, 4], inout %y: bf16[2 * m], %k: int, %f: float, %t: bool, %c: i64[2]) mesh(dp, tp = 2) scheduled {
  %q = full(-0.5) f32[m, 4] symmetric
  %fl = zeros i32[] symmetric
  %h = alloc f32[2] host
  !e = %q <- copy(%x)
  for %i in 1 .. m step 2 {
    %v = view %q[%i, 0 : min(%k, 3)]
    %w = view %q.reshape(4 * m)
    %pv = view %q.permute(1, 0)
    %ex = view %v.expand(3, min(%k, 3))
    %pe = view %q.peer(rank(tp) % 2)
    sync !e -> s[%i % 3]
    if ~%t & (%i < %k | epoch == 1) {
      %q <- reduce(%x max to 0) over (dp, tp) on s[%i % 3]
    } else {
      group on comm {
        send(%x to 0) over [0, 1]
        %v <- recv(from 1) over [0, 1]
      }
    }
    signal(%fl to 0 value %i)
    wait(%fl value 1) on comm
    %x2 = alloc f32[m, 4]
    %x2 <- alltoallv(%x send [1, %i] recv %c) over tp
  }
  free %h
  barrier()
  return %q, %x
}"""
TOKEN: Final = re.compile(r"%\w+|@\w+|!\w+|\d+\.\d+|\w+|<-|->|\.\.|//|\s+|.")
WORDS: Final = [*sorted({t for t in TOKEN.findall(EVERYTHING) if t.strip()}), "$", "0.5", "-1", "9" * 20, "é", '"', "%", "inf", "nan", "f8e4m3"]


@pytest.mark.parametrize("seed", range(8))
def test_damaged_text_is_refused_or_is_another_program(seed: int) -> None:
    """Words left out, exchanged, put in: never another error than ParseError, and what does parse has a text that parses back."""
    rng = random.Random(seed)
    for _ in range(60):
        tokens = TOKEN.findall(EVERYTHING)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            i, j = rng.randrange(len(tokens)), rng.randrange(len(tokens))
            match rng.randrange(4):
                case 0:
                    tokens[i] = ""
                case 1:
                    tokens[i] = rng.choice(WORDS)
                case 2:
                    tokens[i] += " " + rng.choice(WORDS) + " "
                case 3:
                    tokens[i], tokens[j] = tokens[j], tokens[i]
        try:
            p = parse_program("".join(tokens))
        except ParseError:
            continue
        assert parse_program(str(p)) == p
