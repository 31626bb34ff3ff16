"""The names of ``import hostir as hir``: one list, seen alike by Python, type checkers and editors."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest

import hostir

ROOT: Final = Path(__file__).resolve().parents[3]


def table() -> dict[str, str]:
    """What Python sees, as public name -> ``module:attribute``; a submodule is an attribute of its package."""
    rows: dict[str, str] = vars(hostir)["_PUBLIC"]
    return {name: where if ":" in where else ":".join(where.rsplit(".", 1)) for name, where in rows.items()}


def declared() -> dict[str, str]:
    """What type checkers see: the imports under TYPE_CHECKING."""
    tree = ast.parse((ROOT / "hostir" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    rows = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: f"{node.module}:{alias.name}" for node in rows for alias in node.names}


def test_python_type_checkers_and_star_imports_see_the_same_names() -> None:
    assert declared() == table()
    assert hostir.__all__ == sorted(table())
    assert set(hostir.__all__) <= set(dir(hostir))


@pytest.mark.parametrize("name", hostir.__all__)
def test_a_public_name_is_the_object_that_the_table_names(name: str) -> None:
    module, _, attribute = table()[name].partition(":")
    parent = import_module(module)
    found = getattr(hostir, name)
    assert found is getattr(parent, attribute) or found is sys.modules.get(f"{module}.{attribute}")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = vars(hostir)["__getattr__"]("nonsense")
    assert not hasattr(hostir, "nonsense")


@pytest.mark.parametrize(
    "name", [name for name in hostir.__all__ if (ROOT / "hostir" / f"{name}.py").exists() and ":" in vars(hostir)["_PUBLIC"][name]]
)
def test_importing_a_submodule_does_not_hide_the_public_name(name: str) -> None:
    code = f"import hostir.{name}, hostir, types; assert not isinstance(hostir.{name}, types.ModuleType), hostir.{name}"
    subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"], check=True)
