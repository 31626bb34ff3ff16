"""The command ``hostir``: each subcommand is one row here and imports its own module only when it is chosen.

Exit codes are the interface for scripts: 0 fine, 1 the check failed (or the ranks did), 2 wrong use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from hostir.errors import HostIrError, InputError

if TYPE_CHECKING:
    from hostir.ir.nodes import Program

OK: Final = 0
FAILED: Final = 1
WRONG_USE: Final = 2
INTERRUPTED: Final = 130  # as shells say it

TRANSPORTS: Final = ("gloo", "nccl", "symm", "threads")

Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; ``argv`` defaults to the command line. Returns the exit code."""
    options = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.handler
    try:
        return run(options)
    except HostIrError as error:
        print(f"hostir: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    from hostir import __version__

    parser = argparse.ArgumentParser(prog="hostir", description="Host programs on many GPUs.")
    parser.add_argument("--version", action="version", version=f"hostir {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    _add_demo(commands)
    _add_run(commands)
    _add_show(commands)
    _add_verify(commands)
    _add_simulate(commands)
    _add_doctor(commands)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("at least one rank is needed")
    return int(text)


def _add_demo(commands: Subcommands) -> None:
    command = commands.add_parser("demo", help="the main job on this machine, checked against torch")
    command.add_argument("-n", "--ranks", type=_count, default=4, metavar="N", help="how many ranks (default: %(default)s)")
    command.add_argument("--transport", choices=TRANSPORTS, help="how ranks talk (default: what suits the devices)")
    command.add_argument("--one-gpu", action="store_true", help="all ranks on one GPU at the same time, under an MPS daemon of their own")
    command.add_argument("--out", metavar="DIR", help="the folder for the timeline's picture and trace (default: a temporary one)")
    command.add_argument("--quiet", action="store_true", help="print nothing: the exit code says whether all was right")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.set_defaults(handler=_demo)


def _demo(options: argparse.Namespace) -> int:
    from hostir.demo import main as demo

    return demo(options.ranks, options.transport, out=options.out, one_gpu=options.one_gpu, quiet=options.quiet, as_json=options.json)


def _add_run(commands: Subcommands) -> None:
    command = commands.add_parser("run", help="run a script on N ranks of this machine")
    command.add_argument("-n", "--ranks", type=_count, required=True, metavar="N", help="how many ranks")
    command.add_argument("--transport", choices=TRANSPORTS, help="how ranks talk (default: what suits the devices)")
    command.add_argument("--one-gpu", action="store_true", help="all ranks on one GPU at the same time, under an MPS daemon of their own")
    command.add_argument("script", metavar="script.py", help="the script; inside, hir.launch.init() gives each rank its World")
    command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    command.set_defaults(handler=_run)


def _run(options: argparse.Namespace) -> int:
    from hostir.launch import run_script

    try:
        run_script(options.ranks, [options.script, *options.arguments], options.transport, one_gpu=options.one_gpu)
    except InputError as error:  # refused before a rank started; what ranks raise is a RankError
        print(f"hostir run: {error}", file=sys.stderr)
        return WRONG_USE
    return OK


def _add_show(commands: Subcommands) -> None:
    command = commands.add_parser("show", help="parse a program and print its canonical text")
    command.add_argument("file", metavar="FILE.hir", help="the program's text; - reads standard input")
    command.add_argument("--quiet", action="store_true", help="print nothing: the exit code says whether it parses")
    command.set_defaults(handler=_show)


def _show(options: argparse.Namespace) -> int:
    text = _read(options.file)
    if text is None:
        return WRONG_USE
    from hostir.ir.parse import parse_program

    program = parse_program(text, file=options.file)
    if not options.quiet:
        print(program)
    return OK


def _add_verify(commands: Subcommands) -> None:
    command = commands.add_parser("verify", help="check a program for every rank: indices, races, agreement, deadlock, lifetimes")
    _add_program(command)
    command.add_argument("--quiet", action="store_true", help="print nothing: the exit code says whether the program is right")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.set_defaults(handler=_verify)


def _add_program(command: argparse.ArgumentParser) -> None:
    """The file of a program, and the sizes that its text leaves open."""
    command.add_argument("file", metavar="FILE.hir", help="the program's text; - reads standard input")
    command.add_argument("--mesh", type=_mesh, metavar="N | NxN | axis=N,...", help="mesh sizes that the text leaves open")
    command.add_argument("--dim", type=_assignment, action="append", default=[], metavar="m=64", help="a symbolic size; may be repeated")
    command.add_argument("--scalar", type=_assignment, action="append", default=[], metavar="k=3", help="a host number; may be repeated")


def _assignment(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not name.isidentifier() or not value.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=number")
    return name, int(value)


def _mesh(text: str) -> int | tuple[int, ...] | dict[str, int]:
    if all(part.isdecimal() and int(part) for part in text.split("x")):
        sizes = tuple(int(part) for part in text.split("x"))
        return sizes if len(sizes) > 1 else sizes[0]
    return dict(_assignment(part) for part in text.split(","))


def _mesh_of(program: Program, mesh: int | tuple[int, ...] | dict[str, int] | None) -> int | dict[str, int] | None:
    """Sizes without names go to the program's axes in order."""
    if not isinstance(mesh, tuple):
        return mesh
    names = [axis.name for axis in program.axes]
    if len(names) != len(mesh):
        raise InputError(f"the mesh {'x'.join(map(str, mesh))} has {len(mesh)} axes", program=program.name, expected=", ".join(names) or "no axes")
    return dict(zip(names, mesh, strict=True))


def _verify(options: argparse.Namespace) -> int:
    text = _read(options.file)
    if text is None:
        return WRONG_USE
    from hostir.ir.parse import parse_program
    from hostir.ir.verify import verify

    program = parse_program(text, file=options.file)
    try:
        report = verify(program, _mesh_of(program, options.mesh), dims=dict(options.dim), scalars=dict(options.scalar), check=False)
    except InputError as error:
        print(f"hostir verify: {error}", file=sys.stderr)
        return WRONG_USE
    if options.json:
        import json

        print(json.dumps(report.as_dict()))
    elif not options.quiet:
        print(report)
    return OK if report.ok else FAILED


def _add_simulate(commands: Subcommands) -> None:
    command = commands.add_parser("simulate", help="predict how long a program takes on a machine, and why")
    _add_program(command)
    command.add_argument("--machine", default="h200", metavar="NAME", help="h200, h100, cpu, or a file of Machine.save (default: %(default)s)")
    command.add_argument("--overlap", choices=("auto", "off"), default="auto", help="off puts everything on one stream (default: %(default)s)")
    command.add_argument("--png", metavar="FILE", help="write a picture (needs matplotlib)")
    command.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev or chrome://tracing")
    command.add_argument("--quiet", action="store_true", help="print nothing")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.set_defaults(handler=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    text = _read(options.file)
    if text is None:
        return WRONG_USE
    from hostir.ir.parse import parse_program
    from hostir.sim.machine import Machine
    from hostir.sim.simulate import simulate

    program = parse_program(text, file=options.file)
    try:
        machine, mesh = Machine.named(options.machine), _mesh_of(program, options.mesh)
        timeline = simulate(program, machine, mesh, dims=dict(options.dim), scalars=dict(options.scalar), overlap=options.overlap)
    except InputError as error:
        print(f"hostir simulate: {error}", file=sys.stderr)
        return WRONG_USE
    if options.json:
        import json

        print(json.dumps(timeline.as_dict()))
    elif not options.quiet:
        import shutil

        print(timeline.report(min(shutil.get_terminal_size().columns, 140)))
    try:
        if options.trace:
            timeline.save(options.trace)
        if options.png:
            timeline.plot(options.png)
    except OSError as error:
        print(f"hostir simulate: {error}", file=sys.stderr)
        return WRONG_USE
    return OK


def _add_doctor(commands: Subcommands) -> None:
    command = commands.add_parser("doctor", help="what this machine has, what is missing and the cure")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.set_defaults(handler=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from hostir.doctor import main as doctor

    return doctor(as_json=options.json)


def _read(file: str) -> str | None:
    """The text of ``file``, or None after saying why it cannot be read."""
    if file == "-":
        return sys.stdin.read()
    try:
        with open(file, encoding="utf-8") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError) as error:
        print(f"hostir: {file} cannot be read: {error}", file=sys.stderr)
        return None


if __name__ == "__main__":
    sys.exit(main())
