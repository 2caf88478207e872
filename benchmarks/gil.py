"""Whether Python goes on while the model computes: another thread's speed, and the lag of the worker's event loop.

In `data`: `turns`, a list with each setting and what each repeat measured; `lags_ms`, phase → repeats → p50, p99, max.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import ClassVar, NamedTuple

from local_endpoint import LocalEndpoint

from benchmarks.contenders import START_S, Model, model
from benchmarks.corpus import write_wav
from benchmarks.lag_worker import TICK_S
from benchmarks.process import Process
from benchmarks.raw import WINDOW_S, RawModel, speech
from benchmarks.report import Report, Table, Value
from benchmarks.turns import Figures, percentile, progress, take_turns

NAME = "gil"
HELP = "what other Python threads keep while the model computes; the event loop's lag under load"
QUICK = {"seconds": 1.0, "jobs": 2, "repeats": 1}

COUNTS_AT_ONCE = 10_000
WORK = {
    "elsewhere": "encode and generate, in another process",
    "generate": "encode and generate",
    "transcribe": "faster-whisper's transcribe",
}
JOB_S = 10.0
SETTLE_S = 1.0  # after the last job, before the loop counts as idle
JOBS_S = 600.0  # at most, for all of a turn


class Setting(NamedTuple):
    """What runs: a thread with one kind of WORK, one that counts, or both."""

    work: str | None
    counts: bool


ALONE = Setting(None, counts=True)
CONTROL = Setting("elsewhere", counts=True)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement (%(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=12, help=f"jobs of {JOB_S:g} s in the worker under load (%(default)s)"
    )


def run(options: Namespace) -> Report:
    loaded = model(options)
    speeds = _speeds(loaded, options)
    lags = _lags(loaded, options)
    return Report(
        NAME,
        "The GIL: Python beside the model",
        tables=[_speed_table(speeds), _lag_table(lags)],
        notes=[
            "Work in another process shares no GIL with the counting thread: what both lose there, they lose to the "
            "machine. What is lost beyond that is in the last column.",
            "Counting: a loop in pure Python, the worst neighbour there is. Work: one thread that makes one call after "
            f"the other, each for {WINDOW_S:g} s of real speech.",
            f"Lag: how late a coroutine of the worker's event loop wakes that asked for {TICK_S * 1000:g} ms.",
            "Speeds and lags are medians of the repeats; a ratio is the median of the ratios within one repeat.",
        ],
        data={"turns": speeds.listed(), "lags_ms": lags},
    )


# Another thread.


def _speeds(loaded: Model, options: Namespace) -> Figures[Setting]:
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=Elsewhere.load, initargs=(loaded,)) as elsewhere:
        raw = RawModel.load(loaded, inter=1)
        (window,), samples = raw.windows(1, WINDOW_S), speech(WINDOW_S)
        work: dict[str, Callable[[], None]] = {
            "elsewhere": lambda: elsewhere.submit(Elsewhere.call).result(),
            "generate": lambda: raw.decode([window]),
            "transcribe": lambda: raw.transcribe(samples),
        }
        for call in work.values():  # what is only slow once
            call()

        def measure(setting: Setting) -> Mapping[str, float]:
            call = work[setting.work] if setting.work else (lambda: time.sleep(0.1))
            return _side_by_side(call, options.seconds, setting.counts)

        settings = [ALONE, *(Setting(name, counts) for name in WORK for counts in (False, True))]
        return take_turns(settings, options.repeats, measure, "speed of threads")


class Elsewhere:
    """The other process: its model, and its work."""

    _call: ClassVar[Callable[[], None]]

    @classmethod
    def load(cls, loaded: Model) -> None:
        raw = RawModel.load(loaded, inter=1)
        windows = raw.windows(1, WINDOW_S)
        cls._call = lambda: raw.decode(windows)

    @classmethod
    def call(cls) -> None:
        cls._call()


def _side_by_side(call: Callable[[], None], seconds: float, counts: bool) -> dict[str, float]:
    """A thread repeats `call` for so long, until the last ends, while this one counts, or waits."""
    ended = Event()

    def calls_per_s() -> float:
        started, calls = time.monotonic(), 0
        try:
            while time.monotonic() - started < seconds:
                call()
                calls += 1
            return calls / (time.monotonic() - started)
        finally:
            ended.set()

    with ThreadPoolExecutor(1, "work") as pool:
        working: Future[float] = pool.submit(calls_per_s)
        counts_per_s = _counts_per_s(ended) if counts else 0.0
        return {"calls_per_s": working.result(), "counts_per_s": counts_per_s}


def _counts_per_s(ended: Event) -> float:
    started, count = time.monotonic(), 0
    while not ended.is_set():
        for _ in range(COUNTS_AT_ONCE):
            count += 1
    return count / (time.monotonic() - started)


def _speed_table(speeds: Figures[Setting]) -> Table:
    rows: list[list[Value]] = [["nothing", speeds.median(ALONE, "counts_per_s") / 1e6, 1.0, None, None]]
    for name, label in WORK.items():
        alone, together = Setting(name, counts=False), Setting(name, counts=True)
        rows.append(
            [
                label,
                speeds.median(together, "counts_per_s") / 1e6,
                speeds.ratio(together, "counts_per_s", to=ALONE),
                speeds.ratio(together, "calls_per_s", to=alone),
                speeds.ratio(together, "counts_per_s", to=CONTROL),
            ]
        )
    columns = [
        "beside",
        "counted, millions/s",
        "of its speed alone",
        "the work's, of its speed alone",
        "of that beside another process",
    ]
    return Table("A thread of pure Python beside one that transcribes", columns, rows)


# The event loop.


def _lags(loaded: Model, options: Namespace) -> dict[str, list[dict[str, float]]]:
    """By phase. Each repeat has a worker of its own."""
    turns = [_lags_of_worker(loaded, options) for _ in progress(range(options.repeats), "event loop")]
    return {phase: [turn[phase] for turn in turns] for phase in turns[0]}


def _lags_of_worker(loaded: Model, options: Namespace) -> dict[str, dict[str, float]]:
    with TemporaryDirectory() as folder:
        audio, log = Path(folder) / "speech.wav", Path(folder) / "lags"
        write_wav(audio, speech(JOB_S))
        program = ["-m", "benchmarks.lag_worker"]
        with LocalEndpoint() as endpoint, Process(endpoint, loaded, program, LAG_FILE=str(log)) as process:
            process.wait_until_ready(START_S)
            process.run([audio], JOBS_S)  # starts the clock
            sent = time.monotonic()
            process.run([audio] * options.jobs, JOBS_S)
            ended = time.monotonic()
            time.sleep(SETTLE_S + options.seconds)
        lines = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    return {
        "under load": _summary([lag for at, lag in lines if sent <= at <= ended]),
        "idle": _summary([lag for at, lag in lines if at > ended + SETTLE_S]),
    }


def _summary(lags: list[float]) -> dict[str, float]:
    return {
        "p50": percentile(lags, 50) * 1000,
        "p99": percentile(lags, 99) * 1000,
        "max": max(lags) * 1000,
        "ticks": len(lags),
    }


def _lag_table(lags: Mapping[str, list[dict[str, float]]]) -> Table:
    figures: Figures[str] = Figures(lags)
    columns = ["the worker is", "p50, ms", "p99, ms", "max, ms"]
    rows: list[list[Value]] = [
        [phase, *(figures.median(phase, figure) for figure in ("p50", "p99", "max"))] for phase in lags
    ]
    return Table("Lag of the worker's event loop", columns, rows)
