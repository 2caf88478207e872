"""The command line: `python -m benchmarks NAME [options]`, or `all` for one after the other.

A benchmark is a module of this package with what `Benchmark` lists; it is found by that, so a new one is only a new
file. It knows nothing of files and of the machine: it returns a Report, and the rest is done here.
"""

import argparse
import importlib
import pkgutil
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import benchmarks
from benchmarks.machine import machine
from benchmarks.report import Report

ALL = "all"


class Benchmark(Protocol):
    NAME: str
    HELP: str
    QUICK: Mapping[str, Any]  # option → the default that it has with `--quick`

    def add_arguments(self, parser: ArgumentParser) -> None: ...

    def run(self, options: Namespace) -> Report: ...


@cache
def found() -> dict[str, Benchmark]:
    """The benchmarks of this package by name."""
    names = (f"benchmarks.{module.name}" for module in pkgutil.iter_modules(benchmarks.__path__))
    modules = [importlib.import_module(name) for name in names if name != "benchmarks.__main__"]
    listed = [cast(Benchmark, module) for module in modules if hasattr(module, "NAME") and hasattr(module, "run")]
    return {benchmark.NAME: benchmark for benchmark in listed}


def parsed(benchmark: Benchmark, arguments: Sequence[str]) -> Namespace:
    """The options of one benchmark. With `--quick` its own small sizes stand where none is given."""
    parser = ArgumentParser(f"python -m benchmarks {benchmark.NAME}", description=benchmark.HELP)
    _add_common_arguments(parser)
    benchmark.add_arguments(parser)
    if "--quick" in arguments:
        parser.set_defaults(**benchmark.QUICK)
    options = parser.parse_args(arguments)
    if options.compute_type == "auto":
        options.compute_type = "int8" if options.device == "cpu" else "float16"
    return options


def measured(benchmark: Benchmark, options: Namespace) -> Report:
    """The benchmark's report, complete with where and how it was measured."""
    report = benchmark.run(options)
    chosen = {key: value for key, value in vars(options).items() if key != "out"}
    if Path(chosen["model"]).is_dir():
        chosen["model"] = Path(chosen["model"]).name  # where it lies is nobody's business
    return replace(report, machine=machine(options.device), options=chosen)


def main() -> None:
    benchmarks_by_name = found()
    lines = [f"  {name:10} {benchmark.HELP}" for name, benchmark in benchmarks_by_name.items()]
    parser = ArgumentParser(
        "python -m benchmarks",
        usage="python -m benchmarks NAME [options]",
        description="\n".join(["Benchmarks:", *lines, f"  {ALL:10} each of them, with the options they share"]),
        epilog="`NAME --help` tells the options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=[*benchmarks_by_name, ALL])
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command = parser.parse_args()
    if command.name == ALL:
        sys.exit(_run_all(command.options))
    benchmark = benchmarks_by_name[command.name]
    sys.exit(_run_and_save(benchmark, parsed(benchmark, command.options)))


def _run_all(arguments: Sequence[str]) -> int:
    """Each but the checks, and those made of others. One that fails is told, and doesn't keep the rest from running."""
    shared = ArgumentParser(f"python -m benchmarks {ALL}")
    _add_common_arguments(shared)
    shared.parse_args(arguments)
    failed = []
    for name, benchmark in found().items():
        if not getattr(benchmark, "IS_IN_ALL", True):
            continue
        print(f"\n{name}: {benchmark.HELP}", file=sys.stderr)
        try:
            has_failed = _run_and_save(benchmark, parsed(benchmark, arguments))
        except Exception:
            traceback.print_exc()
            has_failed = True
        if has_failed:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def _run_and_save(benchmark: Benchmark, options: Namespace) -> bool:
    """True when something was found that must not be."""
    report = measured(benchmark, options)
    print(report.markdown())
    for path in report.save(options.out):
        print(path, file=sys.stderr)
    return bool(report.failures)


def _add_common_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the model runs (%(default)s)")
    parser.add_argument(
        "--compute-type", default="auto", help="number format of the weights: int8 on a CPU, float16 on a GPU"
    )
    parser.add_argument(
        "--model",
        default="bundled",
        help="a folder, a size, `bundled`, `multilingual` (the tests' Whisper base), or `random:SIZE`, random weights "
        "in the shape of a size (%(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns of each setting (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(".benchmarks"), help="folder for the results (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, not how fast")
