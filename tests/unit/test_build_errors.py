"""Every mistake that the builder and the checker find: its message, and that it names the program and the user's line.

The cases stand in build_mistakes.py. The last test reads the source: a message that no case produces is a missing case.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import pytest

import hostir as hir
from hostir.errors import BuildError, UnitTraceError
from hostir.ir import nodes
from hostir.ir.check import check_program
from hostir.ir.views import view_type
from hostir.types import TensorType, Var, dtype_of
from tests.unit.build_mistakes import CASES, Bench, twice

ROOT: Final = Path(__file__).resolve().parents[2]


def lines_of(do: Callable[..., object]) -> range:
    """The lines of a case that its error may name: the line marked ``# here``, else all of it."""
    do = getattr(do, "__wrapped__", do)
    assert isinstance(do, FunctionType)
    first = do.__code__.co_firstlineno
    last = max(line for *_, line in do.__code__.co_lines() if line is not None)
    source = Path(do.__code__.co_filename).read_text().splitlines()
    here = [n for n in range(first, last + 1) if source[n - 1].endswith("# here")]
    return range(here[0], here[0] + 1) if here else range(first, last + 1)


def error_of(do: Callable[[Bench], object]) -> BuildError:
    with pytest.raises(BuildError) as caught, hir.Program("t", mesh=hir.Mesh((2, 2), ("dp", "tp"))) as p:
        do(Bench(p))
    return caught.value


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_found_at_the_line_that_makes_it(case: str) -> None:
    do, message = CASES[case]
    error = error_of(do)
    assert error.message == message
    assert error.loc is not None
    if case == "structure: an output bound in a loop":  # found when the block of the program ends
        assert error.loc.file == __file__
    else:
        assert error.loc.file == str(Path(__file__).with_name("build_mistakes.py"))
        assert error.loc.line in lines_of(do)


@pytest.mark.parametrize("case", [c for c in CASES if c != "structure: if: Python's and"])
def test_a_mistake_names_its_program(case: str) -> None:
    """All but the truth value of a host expression, which belongs to no program."""
    assert error_of(CASES[case][0]).program == "t"


@pytest.mark.parametrize(
    ("case", "statement", "expected", "got", "cure"),
    [
        ("values: an input that is written", "%x <- copy(%y)", None, None, 'declare it so: p.input("x", …, inout=True)'),
        ("views: index: past the end", "a view of %x: f32[4, 6]", "0 .. 3", "4", None),
        ("call: an output that does not fit", "%v <- @twice(%x)", "f32[4, 6]", "f32[6]", None),
        ("communication: allgather: an output that does not fit", "%z <- allgather(%x)", "f32[16, 6]", "f32[4, 6]", None),
        ("communication: alltoall: uneven", "%z <- alltoall(%x split 1)", "a multiple of 4", "6", None),
        ("structure: loop: a step back", "for %i in 4 .. 0 step -1 {", None, "-1", None),
        ("structure: loop: without with", None, None, None, "with p.loop(…):"),
        ("structure: size: of another axis", "size", "dp, tp", "pp", None),
        ("not a tensor: +", None, None, None, "p.call(unit, …, out=buf) or p.add(a, b, out=c); an in-place update names the buffer on both sides"),
    ],
)
def test_the_facts_and_the_cure(case: str, statement: str | None, expected: str | None, got: str | None, cure: str | None) -> None:
    error = error_of(CASES[case][0])
    assert (error.statement, error.expected, error.got, error.cure) == (statement, expected, got, cure)


# ------------------------------------------------------------------------------------------------------- the life of a program


def test_names_are_checked_before_there_is_a_program() -> None:
    for make, message in (
        (lambda: hir.Program("my program"), "'my program' is no name"),
        (lambda: hir.Program("p", mesh=4), "a program's mesh is a hir.Mesh"),
        (lambda: hir.sym("2m"), "'2m' is no name"),
        (lambda: hir.sym("epoch"), "'epoch' cannot name a size: it is a word of program text"),
        (lambda: hir.sym("f32"), "'f32' cannot name a size: it is a word of program text"),
    ):
        with pytest.raises(BuildError) as caught:
            make()
        assert caught.value.message == message
        assert caught.value.loc is not None
        assert caught.value.loc.file == __file__


def test_without_a_mesh_there_are_no_ranks() -> None:
    with hir.Program("alone") as p:
        x = p.input("x", (4,), "f32", inout=True)
        with pytest.raises(BuildError, match="a program without a mesh has no ranks"):
            p.rank()
        with pytest.raises(BuildError, match="allreduce needs a mesh") as caught:
            p.allreduce(x)
        assert caught.value.cure == 'hir.Program(name, mesh=hir.Mesh(("tp",))), or a rank list: over=[0, 1]'


def test_copy_and_wait_are_local() -> None:
    with hir.Program("local"):
        pass
    x = nodes.Buffer("x", TensorType(dtype_of("f32"), (4,)))
    y = nodes.Buffer("y", TensorType(dtype_of("f32"), (4,)))
    data = nodes.ProgramData("local", (x, y), frozenset({y}), (nodes.Axis("tp", 2),), body=(nodes.Comm("copy", (y,), (x,), team=("tp",)),))
    with pytest.raises(BuildError, match="copy is local, so it takes no `over`"):
        check_program(nodes.Program(data))


def test_a_sealed_program_takes_no_more_statements() -> None:
    with hir.Program("done") as p:
        x = p.input("x", (4,), "f32", inout=True)
    for use in (lambda: p.add(x, 1, out=x), lambda: p.zeros(4, "f32"), lambda: p.loop(2), lambda: x[0], lambda: p.__enter__()):
        with pytest.raises(BuildError, match="the program done is sealed") as caught:
            use()
        assert caught.value.cure == "statements are written inside its with block"


def test_a_program_whose_block_raised_is_dead() -> None:
    p = hir.Program("dead")
    x = p.input("x", (4,), "f32", inout=True)

    def build() -> None:
        with p:
            raise KeyError

    with pytest.raises(KeyError):
        build()
    with pytest.raises(BuildError, match="the program dead is dead") as caught:
        p.add(x, 1, out=x)
    assert caught.value.cure == "build it again"
    with pytest.raises(BuildError, match="the program dead is dead: its with block raised"):
        str(p)


def test_an_exception_that_is_caught_around_a_loop_still_kills_the_program() -> None:
    p = hir.Program("half")
    x = p.input("x", (4,), "f32", inout=True)

    def loop() -> None:
        with p.loop(4):
            raise KeyError

    def build() -> None:
        with p:
            with pytest.raises(KeyError):
                loop()
            with pytest.raises(BuildError, match="the program half is dead"):
                p.add(x, 1, out=x)

    with pytest.raises(BuildError, match="the program half is dead"):
        build()


def test_after_a_refused_statement_the_program_goes_on() -> None:
    with hir.Program("patient") as p:
        x = p.input("x", (4,), "f32", inout=True)
        with pytest.raises(BuildError):
            p.copy(x, out=p.input("y", (4,), "f32"))
        p.add(x, 1, out=x)
    assert str(p).count("<-") == 1


def test_a_unit_that_cannot_be_traced_names_program_and_line() -> None:
    with hir.Program("t") as p:
        x = p.input("x", (4,), "f32")
        with pytest.raises(UnitTraceError, match="cannot be traced") as caught:
            p.call(lambda a: a.nope(), x)
    assert caught.value.program == "t"
    assert caught.value.loc is not None
    assert caught.value.loc.file == __file__


# --------------------------------------------------------------------------------------- programs that no builder would have made


F32: Final = dtype_of("f32")


def program_of(*body: nodes.Stmt, params: tuple[Any, ...] = (), results: tuple[nodes.Buffer, ...] = ()) -> nodes.Program:
    return nodes.Program(nodes.ProgramData("made", params, axes=(nodes.Axis("tp", 2),), body=body, results=results))


def made_wrong() -> Iterator[tuple[str, nodes.Program]]:
    a, b = nodes.Buffer("a", TensorType(F32, (4,))), nodes.Buffer("b", TensorType(F32, (4,)))
    first = nodes.Index((0,))
    v = nodes.Buffer("v", TensorType(F32, ()), a, first)
    wrong = nodes.Buffer("w", TensorType(F32, (3,)), a, first)
    group = nodes.Stream("s")
    x = nodes.Buffer("x", TensorType(F32, (4,)))
    yield "a buffer is bound once", program_of(nodes.Alloc(a), nodes.Alloc(a))
    yield "%v is a view, so it cannot be an input", program_of(params=(v,))
    yield "%v is a view and cannot be allocated", program_of(nodes.Alloc(a), nodes.Alloc(v))
    yield "%w is not this view of %a", program_of(nodes.Alloc(a), nodes.View(wrong, a, first))
    yield "%b is not known here", program_of(nodes.Alloc(a), nodes.Comm("copy", (a,), (b,)))
    yield "gossip is no communication", program_of(nodes.Alloc(a), nodes.Comm("gossip", (a,), (a,)))
    yield "allgather takes 1 inputs and writes 1 buffers", program_of(nodes.Alloc(a), nodes.Comm("allgather", (a,)))
    yield "broadcast needs `from`", program_of(nodes.Alloc(a), nodes.Comm("broadcast", (a,), (a,)))
    yield "allgather takes no `to`", program_of(nodes.Alloc(a), nodes.Comm("allgather", (a,), (a,), to=0))
    yield "%k is not in scope in this statement", program_of(nodes.For(Var("i"), 0, Var("k"), 1, ()))
    yield "%a is used after its memory was freed", program_of(nodes.Alloc(a), nodes.Free(a), results=(a,))
    yield (
        "the communications of a group run on the group's stream",
        program_of(nodes.Group((nodes.Comm("send", (), (x,), to=0, stream=nodes.Stream("t")),), group), params=(x,)),
    )
    yield (
        "a part of a group has no name of its own: the parts begin and end together",
        program_of(nodes.Group((nodes.Comm("send", (), (x,), to=0, stream=group, event=nodes.Event("e")),), group), params=(x,)),
    )
    yield "@twice has 1 results", program_of(nodes.Call((), nodes.Unit("twice", twice.fusion((x.type,))), (x,)), params=(x,))


WRONG: Final = dict(made_wrong())


@pytest.mark.parametrize("message", WRONG)
def test_a_program_that_a_pass_made_wrong_is_refused(message: str) -> None:
    with pytest.raises(BuildError) as caught:
        check_program(WRONG[message])
    assert caught.value.message == message


def test_an_index_with_a_point_is_refused_in_any_program() -> None:
    with pytest.raises(BuildError, match=r"index 0\.5 of dimension 0 is not an integer"):
        view_type(TensorType(F32, (4,)), nodes.Index((0.5,)))


MESHES: Final[dict[str, Callable[[], object]]] = {
    "a mesh of several axes needs their names": lambda: hir.Mesh((2, 2)),
    "mesh axes need distinct names that are identifiers, not ['tp', 'tp']": lambda: hir.Mesh((2, 2), ("tp", "tp")),
    "mesh axes need distinct names that are identifiers, not ['größe']": lambda: hir.Mesh((2,), ("größe",)),
    "a mesh with axes ['tp'] needs one size of at least 1 for each": lambda: hir.Mesh((0,), ("tp",)),
    "a mesh lists each of its ranks once": lambda: hir.Mesh((2,), ("tp",), ranks=(0, 0)),
    "the mesh has no axis 'pp'": lambda: hir.Mesh(("tp",))["pp"],
    "the mesh (tp) has no sizes yet": lambda: hir.Mesh(("tp",)).sizes,
}


@pytest.mark.parametrize("message", MESHES)
def test_a_mesh_that_is_none_is_refused(message: str) -> None:
    with pytest.raises(BuildError) as caught:
        MESHES[message]()
    assert caught.value.message == message
    assert caught.value.loc is not None
    assert caught.value.loc.line in lines_of(MESHES[message])


# ------------------------------------------------------------------------------------------------------- nothing is left out


def raised(path: Path) -> Iterator[tuple[int, re.Pattern[str]]]:
    """The messages of the BuildErrors that a module raises, as patterns."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id="BuildError") | ast.Attribute(attr="_error"), args=[first, *_]):
                if not isinstance(first, ast.Name):
                    yield node.lineno, re.compile(pattern_of(first))


def pattern_of(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return re.escape(text)
        case ast.JoinedStr(values=values):
            return "".join(re.escape(str(v.value)) if isinstance(v, ast.Constant) else ".+" for v in values)
    raise AssertionError(ast.dump(node))


CHECKED: Final = (
    "build.py",
    "build_blocks.py",
    "build_comm.py",
    "build_ops.py",
    "buffers.py",
    "mesh.py",
    "ir/check.py",
    "ir/views.py",
    "graph/unify.py",
)


@pytest.mark.parametrize("module", CHECKED)
def test_every_message_has_a_case(module: str) -> None:
    known = [m for _, m in CASES.values()] + list(WRONG) + list(MESHES)
    known += [
        "a program's mesh is a hir.Mesh", "'epoch' cannot name a size: it is a word of program text", "a program without a mesh has no ranks",
        "allreduce needs a mesh", "copy is local, so it takes no `over`", "the program done is sealed",
        "index 0.5 of dimension 0 is not an integer",
    ]  # fmt: skip
    patterns = list(raised(ROOT / "hostir" / module))
    assert patterns
    missing = [f"{module}:{line}: {p.pattern}" for line, p in patterns if not any(p.fullmatch(m) for m in known)]
    assert not missing
