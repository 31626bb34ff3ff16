"""A unit's evaluation as statements of a larger generated function: no call, no argument lists, every lookup bound beforehand.

The evaluator's own code for a given way of writing outputs is taken apart (``ast``), its numbered locals are renamed, arguments and
outputs are replaced by what they are called outside, and every ``torch.…`` function becomes a constant of the generated function.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from hostir.dispatch.evaluate import Evaluator
from hostir.torch_forms import GLOBALS

_PARSING: Final = threading.Lock()  # Python 3.11 miscounts its recursion when two threads build syntax trees at once


def _parse(text: str) -> ast.stmt:
    with _PARSING:
        return ast.parse(text).body[0]


def _expression(text: str) -> ast.expr:
    with _PARSING:
        return ast.parse(text, mode="eval").body


class Namespace:
    """The constants of a generated function: objects by name, equal objects once."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def constant(self, value: Any, prefix: str = "k") -> str:
        """A name for ``value``."""
        if (name := self._names.get(id(value))) is None:
            name = self._names[id(value)] = f"{prefix}{len(self.values)}"
            self.values[name] = value
        return name


class Late:
    """A constant that needs the views of a binding: made when they are known."""

    def __init__(self, make: Callable[[Mapping[str, Any]], Any]) -> None:
        self._make = make

    def __call__(self, values: Mapping[str, Any]) -> Any:
        return self._make(values)


class _Rename(ast.NodeTransformer):
    """Names replaced by expressions, ``torch.x.y(…)`` by a constant."""

    def __init__(self, swap: Callable[[str], ast.expr | None], dotted: Callable[[str], ast.expr | None]) -> None:
        self._swap = swap
        self._dotted = dotted

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._swap(node.id) or node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        found = self._dotted(ast.unparse(node))
        return found if found is not None else self.generic_visit(node)


def inline(
    evaluator: Evaluator, args: Sequence[Any], outs: Sequence[torch.Tensor], arg_names: Sequence[str], out_names: Sequence[str],
    names: Namespace, tag: str,
) -> list[str]:  # fmt: skip
    """Statements that do what ``evaluator.run(args, outs)`` does for tensors that lie in memory as these do.

    ``arg_names`` and ``out_names`` are expressions that stand for them; ``tag`` makes the locals of this use unique.
    """
    text, constants, device = evaluator.code(args, outs)
    function = _parse(text)
    assert isinstance(function, ast.FunctionDef)
    given: dict[str, ast.expr] = {}
    outside: Mapping[str, Any] = {**GLOBALS, **constants}
    ranks = {f"a{i}": a.dim() for i, a in enumerate(args) if isinstance(a, torch.Tensor)}

    def swap(name: str) -> ast.expr | None:
        if name in given:
            return given[name]
        if name == "device":
            return _name(names.constant(device))
        if name in constants or name in ("apart", "keep"):
            return _name(names.constant(outside[name] if name in outside else evaluator.helpers[name]))
        return None

    def dotted(text: str) -> ast.expr | None:
        head, _, rest = text.partition(".")
        if head not in GLOBALS:
            return None
        value: Any = GLOBALS[head]
        for part in rest.split("."):
            value = getattr(value, part)
        return _name(names.constant(value))

    rename = _Rename(swap, dotted)
    lines: list[str] = []
    for statement in function.body:
        if isinstance(statement, ast.Return):
            continue
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            target, value = statement.targets[0].id, statement.value
            if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and value.value.id in ("a", "o"):
                known = arg_names if value.value.id == "a" else out_names
                index = ast.literal_eval(value.slice)
                given[target] = _expression(known[index])
                continue
            if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Attribute):  # n_0 = a1.shape[0]
                position, at = int(ast.unparse(value.value.value)[1:]), ast.literal_eval(value.slice)
                given[target] = ast.Constant(int(args[position].shape[at]))
                continue
            if isinstance(value, ast.Name) and value.id in given:  # t0 = o0
                given[target] = given[value.id]
                continue
        if isinstance(statement, ast.Delete):
            kept = [t for t in statement.targets if isinstance(t, ast.Name) and t.id not in given]
            if kept:
                lines.append(f"del {', '.join(f'{tag}{t.id}' for t in kept)}")
            continue
        _flatten_matmul(statement, ranks)
        if isinstance(statement, ast.Assign):
            for t in ast.walk(statement.targets[0]):
                if isinstance(t, ast.Name):
                    given.pop(t.id, None)
            new = rename.visit(statement)
            for t in ast.walk(new.targets[0]):
                if isinstance(t, ast.Name):
                    given[t.id] = _name(f"{tag}{t.id}")
            new.targets[0] = _Rename(given.get, lambda _: None).visit(new.targets[0])
            lines.append(ast.unparse(new))
        else:
            lines.append(ast.unparse(rename.visit(statement)))
    return lines


def _flatten_matmul(statement: ast.stmt, ranks: Mapping[str, int]) -> None:
    """``torch.matmul`` of two matrices is ``torch.mm``, which costs less on the host; the bits are the same."""
    for call in ast.walk(statement):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.matmul" and len(call.args) == 2:
            operands = [ast.unparse(a) for a in call.args]
            if all(ranks.get(o) == 2 for o in operands):
                call.func = _expression("torch.mm")


def _name(text: str) -> ast.Name:
    return ast.Name(text, ast.Load())
