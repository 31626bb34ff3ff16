"""The reference page says what the code does: its examples run, its messages are real, its lists are complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import hostir as hir
from hostir import errors
from hostir.ir.diagnostics import Diagnostic
from hostir.ir.kinds import COMMS, REDUCTIONS
from hostir.ir.parse import parse_program
from hostir.types import DTYPES, MEMORIES
from tests.unit.docs.blocks import Block, check, standalone, tagged

PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "ir.md"
TEXT: Final = PAGE.read_text()
ERRORS: Final = [
    cls.__name__ for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, hir.HostIrError) and cls is not hir.HostIrError
]
WITHOUT_EXAMPLE: Final = {"DeviceMemoryError"}


def section(title: str) -> str:
    """The page from the heading ``title`` to the next one of its level or above."""
    start = re.search(rf"^(#+) {re.escape(title)}$", TEXT, re.MULTILINE)
    assert start, f"{PAGE.name} has no section {title!r}"
    rest = TEXT[start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def first_cells(title: str) -> list[str]:
    """The first column of a section's table."""
    rows = [line.split("|")[1].strip() for line in section(title).split("\n### ", maxsplit=1)[0].splitlines() if line.startswith("|")]
    return rows[2:]


@pytest.mark.parametrize("block", list(tagged(PAGE, "hir")), ids=str)
def test_programs_on_the_page_are_canonical_text(block: Block) -> None:
    assert str(parse_program(block.text)) + "\n" == block.text


@pytest.mark.parametrize("block", list(tagged(PAGE, "python error")), ids=lambda b: b.heading)
def test_an_example_raises_the_error_of_its_section_with_this_message(block: Block) -> None:
    error = standalone().error(block)
    assert type(error).__name__ == block.heading
    check(PAGE, block, str(error))


def test_the_list_of_errors_is_closed_and_each_has_an_example() -> None:
    headings = re.findall(r"^### (\w+)$", section("Errors"), re.MULTILINE)
    assert sorted(headings) == sorted(ERRORS)
    examples = [b.heading for b in tagged(PAGE, "python error")]
    assert sorted(examples) == sorted(set(ERRORS) - WITHOUT_EXAMPLE)


def test_the_table_of_communications_is_complete_and_its_texts_parse() -> None:
    assert first_cells("Communications") == list(COMMS)
    for line in section("Communications").splitlines():
        if "`%y <-" in line or line.startswith(("| send", "| barrier", "| signal", "| wait")):
            text = line.split("|")[2].strip().strip("`").replace(" e", " rank(tp)").replace(" v)", " 1)")
            parse_statement(text)


def parse_statement(text: str) -> Any:
    kind = re.sub(r".*<- ", "", text).split("(")[0]
    sizes = {
        "allgather": "[4, 4]", "gather": "[4, 4]", "reduce_scatter": "[1, 4]", "scatter": "[1, 4]", "alltoall": "[1, 8]",
    }  # fmt: skip
    params = f"%x: f32[2, 4], inout %y: f32{sizes.get(kind, '[2, 4]')}, %c: i64[2], %f: i32[]"
    return parse_program(f"program @p({params}) mesh(tp = 2) {{ {text} }}")


def test_the_statements_in_the_table_parse() -> None:
    assert first_cells("Statements") == ["alloc", "free", "view", "call", "communication", "group", "sync", "for", "if"]
    unit = "unit @unit(%a: f32[4], %b: f32[4], %k: int) { %t = mul(%a, %k)\n return %t }\n"
    params = "inout %y: f32[4], %a: f32[4], %b: f32[4], %k: int, %x: f32[4, 8], %t: bool, %i: int, %z: f32[n]"
    for text in (
        "%q = full(2.5) f32[4] host",
        "%q = zeros f32[4]\nfree %q",
        "%v = view %x[%i]",
        "%y <- @unit(%a, %b, %k + 1) on s",
        "group on comm { barrier_free }".replace("barrier_free", "send(%x to 0)"),
        "sync comm -> main",
        "!e = barrier()\nsync !e -> main",
        "for %j in 0 .. n step 2 { }",
        "if %i > 0 & %t { } else { }",
    ):
        parse_program(f"{unit}program @p({params}) mesh(tp) {{ {text} }}")


def test_the_lists_of_words_are_complete() -> None:
    values = section("Values")
    assert "`" + " ".join(DTYPES) + "`" in values.replace("\n", " ")
    assert all(f"`{memory}`" in values for memory in MEMORIES)
    listed = re.search(r"Reductions are (.*?)\.", section("Communications"))
    assert listed
    assert re.findall(r"`(\w+)`", listed[1]) == list(REDUCTIONS)
    kinds = re.search(r"``kind`` is one of ([\w, \n]+)\.", str(Diagnostic.__doc__))
    assert kinds
    assert first_cells("Checks") == re.findall(r"\w+", kinds[1])


def test_what_the_page_calls_planned_is_counted() -> None:
    """Who builds one of them takes the word out, here and there."""
    assert TEXT.lower().count("*planned*") == 2  # how it is marked; awaits


def test_what_needs_the_transport_symm_is_refused_by_others() -> None:
    def main(world: Any) -> str:
        with hir.Program("put", mesh=world.mesh("tp")) as p:
            x = p.input("x", (4,), torch.float32)
            flag = p.empty((), torch.int32, memory="symmetric", name="flag")
            box = p.empty((4,), torch.float32, memory="symmetric", name="box")
            p.copy(x, out=box.peer(1 - p.rank()))
            p.signal(flag, to=1 - p.rank(), value=1)
            p.wait(flag, value=1)
            p.output(p.add(box, 0))
        assert hir.parse(str(p)) == p
        with pytest.raises(hir.HostIrError) as caught:
            hir.compile(p)(torch.ones(4))
        return caught.value.message

    messages = hir.launch.spawn(main, 2, transport="threads", device="cpu")
    assert messages == ["peers' memory is addressed with the transport symm only"] * 2
