"""A made program: its text, the mesh that it is right for, and the units that made programs call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hostir.ir.nodes import Program
from hostir.ir.parse import parse_program
from hostir.mesh import Mesh

ROW: Final = 12  # divisible by every team size up to 4
ROWS: Final = 4

UNITS: Final = """
unit @mix(%a: i64[n], %b: i64[n]) {
  %t = mul(%a, 3)
  %u = mul(%b, 5)
  %o = add(%t, %u)
  return %o
}
unit @step(%a: i64[n], %k: int) {
  %t = mul(%a, 7)
  %o = add(%t, %k)
  return %o
}
unit @both(%a: i64[n], %b: i64[n]) {
  %s = add(%a, %b)
  %d = sub(%a, %b)
  return %s, %d
}
unit @table(%a: i64[m, n], %b: i64[m, n]) {
  %t = mul(%a, 11)
  %o = sub(%t, %b)
  return %o
}
"""


@dataclass(frozen=True)
class Made:
    """A program as text, on the mesh that it is right for."""

    text: str
    axes: tuple[tuple[str, int], ...]

    @property
    def mesh(self) -> Mesh:
        return Mesh(tuple(n for _, n in self.axes), tuple(a for a, _ in self.axes))

    def parse(self) -> Program:
        return parse_program(self.text)
