"""All that a GPU has to tell, in one command and less than ten minutes: `python -m benchmarks gpu`.

Each step is a benchmark of this package in a process of its own, so that the next finds the device's memory empty. One
that exceeds its budget is ended, and the rest goes on. `--quick` tries the same on a CPU, with small sizes.

In `data`: step → its whole report, as it also stands in the step's own file.
"""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.models import find
from benchmarks.report import Report, Table, Value

NAME = "gpu"
HELP = "workers, memory, gil and jobs on a GPU, within ten minutes"
QUICK = {"device": "cpu", "model": "random:tiny"}
IS_IN_ALL = False

STOP_S = 20  # for a step that has exceeded its budget to end its processes


@dataclass(frozen=True)
class Step:
    name: str
    budget_s: float
    sizes: Sequence[str]


STEPS = (
    Step("workers", 130, ["--inter", "1,2,4", "--batch", "1,2,4,8,16", "--windows", "32"]),
    Step("memory", 110, ["--repeats", "1", "--workers", "1,2,4", "--batch", "1,8,16", "--minutes", ""]),
    Step("jobs", 170, ["--repeats", "1", "--loads", "short,mixed", "--contenders", "plain,ceiling,worker"]),
    Step("gil", 80, ["--seconds", "3", "--jobs", "32"]),
)


@dataclass(frozen=True)
class Outcome:
    step: Step
    seconds: float
    said: str
    report: dict[str, Any] | None  # as in the step's file


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(device="cuda", model="random:large-v3-turbo")
    names = [step.name for step in STEPS]
    parser.add_argument("--steps", type=lambda text: text.split(","), default=names, help=f"of {','.join(names)} (all)")


def run(options: Namespace) -> Report:
    find(options.model)  # once, and outside the budgets: it may have to be made
    outcomes = [_outcome(step, options) for step in STEPS if step.name in options.steps]
    rows: list[list[Value]] = [[each.step.name, each.step.budget_s, each.seconds, each.said] for each in outcomes]
    reports = {each.step.name: each.report for each in outcomes if each.report}
    tables = [Table(**table) for report in reports.values() for table in report["tables"]]
    return Report(
        NAME,
        "The worker and its libraries on a GPU",
        tables=[Table("Steps", ["step", "budget, s", "took, s", "outcome"], rows), *tables],
        notes=[f"{name}: {note}" for name, report in reports.items() for note in report["notes"]],
        data=reports,
    )


def _outcome(step: Step, options: Namespace) -> Outcome:
    """Runs the step. It never raises: what went wrong is what the outcome says."""
    file: Path = options.out / f"{step.name}.json"
    file.unlink(missing_ok=True)  # an earlier run's
    started = time.monotonic()
    said = _run(_command(step, options), step.budget_s)
    seconds = time.monotonic() - started
    report = json.loads(file.read_text()) if file.exists() else None
    return Outcome(step, seconds, said, report)


def _command(step: Step, options: Namespace) -> list[str]:
    shared = ["--device", options.device, "--compute-type", options.compute_type, "--model", options.model]
    sizes = ["--quick"] if options.quick else ["--repeats", str(options.repeats), *step.sizes]
    return [sys.executable, "-m", "benchmarks", step.name, *shared, "--out", str(options.out.absolute()), *sizes]


def _run(command: Sequence[str], budget_s: float) -> str:
    """Its progress goes to stderr, and its report to its files."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)  # noqa: S603
    try:
        code = process.wait(budget_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return "ended: over its budget"
    except BaseException:
        _end(process)
        raise
    return "done" if code == 0 else f"failed with code {code}: see the log"


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, which lets a benchmark stop the workers it started; then by force."""
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
