"""The package as users get it: the list of packages, the wheel, the two commands of the README, and an import that stays light."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[3]
FOLDERS: Final = ("hostir", "kernels", "dispatch", "launch")
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())


def installed(path: Path) -> str:
    """Where a file of the tree lands when installed."""
    name = path.relative_to(ROOT).as_posix()
    return name if name.startswith("hostir/") else f"hostir/{name}"


def shipped() -> dict[str, Path]:
    """Every file under the four folders, by its place in the wheel."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    return {installed(path): path for path in files if "__pycache__" not in path.parts}


def test_the_list_of_packages_is_the_tree() -> None:
    folders = {name.rpartition("/")[0] for name in shipped() if name.endswith(".py")}
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(folder.replace("/", ".") for folder in folders)
    assert {f"{folder}/__init__.py" for folder in folders} <= set(shipped())


def test_the_wheel_holds_the_tree_and_works(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    source.mkdir()
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(site)
    info = f"hostir-{PROJECT['project']['version']}.dist-info"
    beside = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    assert names == {*shipped(), *(f"{info}/{name}" for name in beside)}

    code = "import hostir, hostir.kernels, hostir.dispatch; print(hostir.__file__, hostir.kernels.__file__, hostir.HostIrError.__name__)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=site, env={"PYTHONPATH": str(site)}, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert run.stdout.split() == [f"{site}/hostir/__init__.py", f"{site}/hostir/kernels/__init__.py", "HostIrError"]


@pytest.mark.parametrize("name", ["kernels", "dispatch", "launch", "hostir.hostir"])
def test_a_second_copy_under_another_name_is_refused(name: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {name}"
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert run.returncode == 1
    assert f"not as {name}" in run.stderr


def test_the_readme_has_two_commands_and_ci_runs_the_second() -> None:
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) == 2
    first, second = commands
    assert first.endswith("&& hostir demo")
    assert second.endswith("&& python -m pytest")
    assert second in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_readme_example_runs_as_written() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    run = subprocess.run([sys.executable, "-c", example], cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "program @host_sum(" in run.stdout


def test_import_hostir_loads_nothing_heavy() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import hostir"
    run = subprocess.run([sys.executable, "-X", "importtime", "-c", code], check=True, capture_output=True, text=True)
    loaded = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "hostir" in loaded
    assert not {name for name in loaded if name.partition(".")[0] in ("torch", "triton", "numpy", "rich", "cloudpickle")}
    assert {name for name in loaded if name.startswith("hostir.")} == set()


def test_the_version_is_written_twice_and_agrees() -> None:
    import hostir

    assert hostir.__version__ == PROJECT["project"]["version"]
