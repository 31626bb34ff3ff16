"""What the source itself must hold: imports that point down, no hidden state, no long files, no words that do not belong here."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
MAX_LINES: Final = 500

# Lowest first. A module may import its own layer and those before it. `trace_symbols` is of the layer `trace`, and so on; "hostir" is
# the package itself, with the public names.
LAYERS: Final = (
    ("errors",), ("expr",), ("dims",), ("types",), ("mesh",), ("graph",), ("ir",), ("sim",), ("passes",),
    ("torch",), ("trace",), ("buffers", "build"), ("kernels",), ("runtime",), ("dispatch",), ("overlap",), ("frontends",),
    ("hostir",), ("launch",), ("doctor",), ("demo",), ("cli",), ("__main__",),
)  # fmt: skip
HEIGHT: Final = {name: i for i, layer in enumerate(LAYERS) for name in layer}

# Imports that do point up, inside a function, and why. One that is gone leaves this table.
UPWARD: Final = {
    ("hostir.mesh", "hostir.runtime.world"): "Mesh.from_torch binds to the world that this thread has entered, if any",
    ("hostir.sim.machine", "hostir.runtime.calibrate"): "Machine.calibrate measures on a device, which takes torch",
    ("hostir.sim.simulate", "hostir.passes.schedule"): "simulate schedules a program that has no schedule yet, as compile does",
}


def modules() -> dict[str, Path]:
    """Every module of the package by import name, with the folders beside hostir/ mapped into it."""
    found = {}
    for folder in ("hostir", "kernels", "dispatch", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if folder == "hostir" else ("hostir", *parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES: Final = modules()


def layer(module: str) -> str:
    name = "hostir" if module == "hostir" else module.split(".")[1]
    return name if name.startswith("_") else name.partition("_")[0]


def without_torch(module: str) -> bool:
    return HEIGHT[layer(module)] <= HEIGHT["passes"]


def imports(path: Path) -> Iterator[str]:
    """Every module that ``path`` imports, wherever the statement stands; a name taken from a package counts as its submodule if it is one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def project_files() -> Iterator[Path]:
    """The project's own files: those of its folders and those beside them, nothing that a build or a tool left behind."""
    yield from (path for path in sorted(ROOT.iterdir()) if path.is_file())
    for folder in ("hostir", "kernels", "dispatch", "launch", "tests", "docs", "examples", "benchmarks", ".ci"):
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.is_file() and "__pycache__" not in path.parts)


def test_every_module_belongs_to_a_layer() -> None:
    strangers = {module for module in MODULES if layer(module) not in HEIGHT}
    assert not strangers, "give them a place in LAYERS"


def test_imports_point_down() -> None:
    up = {
        (module, target)
        for module, path in MODULES.items()
        for target in imports(path)
        if module != "hostir" and target.partition(".")[0] == "hostir" and HEIGHT[layer(target)] > HEIGHT[layer(module)]
    }
    assert up == set(UPWARD)


def test_nothing_up_to_passes_names_torch() -> None:
    found = {
        (module, target)
        for module, path in MODULES.items()
        if without_torch(module)
        for target in imports(path)
        if target.partition(".")[0] in ("torch", "triton")
    }
    assert not found


def test_nothing_up_to_passes_loads_torch() -> None:
    names = sorted(module for module in MODULES if without_torch(module))
    assert "hostir.types" in names
    code = f"""
import sys
from importlib import import_module
sys.path.insert(0, {str(ROOT)!r})
for name in {names!r}:
    import_module(name)
    for heavy in ("torch", "triton"):
        assert heavy not in sys.modules, f"{{name}} loads {{heavy}}"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in project_files() if path.suffix == ".py"}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def mutable(value: ast.expr | None) -> bool:
    match value:
        case ast.List() | ast.Dict() | ast.Set() | ast.ListComp() | ast.DictComp() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name in {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary"}
        case _:
            return False


def module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import, also under ``if``, ``try``, ``with`` and loops."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from module_level(getattr(node, inner, []))


def state(path: Path) -> Iterator[str]:
    """The module-level variables of ``path`` that something could change: tables are annotated Final, names are not rebound."""
    tree = ast.parse(path.read_text())
    for node in module_level(tree.body):
        match node:
            case ast.Assign(targets=targets, value=value) if mutable(value):
                yield from (ast.unparse(t) for t in targets if ast.unparse(t) != "__all__")
            case ast.AnnAssign(target=target, annotation=annotation, value=value) if mutable(value):
                if "Final" not in ast.unparse(annotation):
                    yield ast.unparse(target)
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Global):
            yield f"global {', '.join(inner.names)}"


def test_no_module_keeps_mutable_state() -> None:
    found = {module: names for module, path in MODULES.items() if (names := list(state(path)))}
    assert not found, "annotate tables that stay as they are with Final; pass the rest in"


def test_the_state_check_sees_state(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text("a = []\nb: dict[int, int] = {}\nif a:\n    c = set()\ndef f():\n    global a\n    d = []\nE: Final = {}\n__all__ = []\n")
    assert list(state(file)) == ["a", "b", "c", "global a"]


def test_the_text_speaks_of_the_project_only() -> None:
    # Written so that this file does not match itself.
    words = re.compile(
        r"(?<![\w.])/(wor[k]|far[m])/|/tm[p]/v\b|\.\./share[d]|(?<![\w/.-])share[d]/(design|feasibility|style|parity|peer|cases|gpu|hooks)"
        r"|bash_job[s]|subagen[t]|workplac[e]|\bissue[ ]#?\d+",
        re.IGNORECASE,
    )
    found = []
    for path in project_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}:{n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if words.search(line)]
    assert not found
