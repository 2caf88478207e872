"""What memory the weights, each running call and a long file take.

In `data`, in bytes, of the memory of the model's device, medians of the repeats:

- `weights_bytes`: what loading the model adds; on a GPU with its context
- `kept_bytes`: what is held beyond that after calls of one window, while none runs
- `working_bytes_per_window`: a list of `batch`, `window_s` and `bytes`: the peak beyond the weights while one call with
  so many windows of so many seconds runs, divided by the windows
- `workers`: a list of `inter_threads` and the Levels of the device and of the process
- `files`: a list of `minutes`, `who` (`faster-whisper` or `worker`), `loaded_bytes` and `peak_bytes` of the process
"""

import multiprocessing
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, NamedTuple, TypeVar

from local_endpoint import LocalEndpoint

from benchmarks import BEAM_SIZE
from benchmarks.arguments import counts, numbers
from benchmarks.contenders import START_S, Memory, Model, model
from benchmarks.corpus import write_wav
from benchmarks.machine import gpu
from benchmarks.process import Process, forget_peak
from benchmarks.raw import LANGUAGE, WINDOW_S, RawModel, speech
from benchmarks.report import Chart, Report, Table, Value
from benchmarks.turns import Figures, progress, take_turns
from whisper_worker.settings import MiB

NAME = "memory"
HELP = "of the weights, of each running call, and of a long file"
QUICK = {"workers": [1, 2], "batch": [1, 2], "window_s": [16.0], "minutes": [1.0], "rounds": 1, "repeats": 1}

SAMPLE_S = 0.02
FILE_S = 3600.0  # at most, for one file in the worker

T = TypeVar("T")
Meter = Callable[[], int]  # → bytes held now


class Setting(NamedTuple):
    """So many calls at the same time, each with so many windows."""

    inter: int
    batch: int
    window_s: float


@dataclass(frozen=True)
class Levels:
    """Bytes held: by the process before and after the model was loaded, while calls ran, and after them."""

    before: int
    loaded: int
    active: int
    peak: int
    after: int

    @property
    def working(self) -> int:
        return self.peak - self.loaded


ONE_CALL = Setting(1, 1, WINDOW_S)


@dataclass(frozen=True)
class File:
    """What a process held before a file of so many minutes, and at most while it was transcribed."""

    minutes: float
    who: str
    loaded_bytes: int
    peak_bytes: int

    @property
    def added_bytes(self) -> int:
        return self.peak_bytes - self.loaded_bytes


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--workers", type=counts, default=[1, 2, 4, 8], help="calls at the same time (1,2,4,8)")
    parser.add_argument("--batch", type=counts, default=[1, 2, 4, 8], help="windows of one call (1,2,4,8)")
    parser.add_argument("--window-s", type=numbers, default=[16.0, WINDOW_S], help="seconds of a window (16,30)")
    parser.add_argument("--rounds", type=int, default=3, help="calls that follow each other (%(default)s)")
    parser.add_argument("--minutes", type=numbers, default=[10.0, 60.0], help="lengths of long files (10,60)")


def run(options: Namespace) -> Report:
    loaded = model(options)
    workers = [Setting(number, 1, WINDOW_S) for number in options.workers]
    windows = [Setting(1, batch, window_s) for window_s in options.window_s for batch in options.batch]
    figures = _turns(loaded, list(dict.fromkeys([ONE_CALL, *workers, *windows])), options)
    files = _files(loaded, options.minutes)
    tables = [_workers_table(figures, workers, "device"), _windows_table(figures, windows)]
    if options.device == "cuda":
        tables.append(_workers_table(figures, workers, "process"))
    if files:
        tables.append(_files_table(files))
    return Report(
        NAME,
        "Memory",
        tables=tables,
        charts=[_chart(figures, workers)],
        notes=[
            "MiB. Each setting has a process of its own; medians of the repeats.",
            f"A call: encode and generate, beam {BEAM_SIZE}, of one window of {WINDOW_S:g} s unless told otherwise; "
            f"{options.rounds} by each thread. `malloc_trim` isn't called.",
            "Device: on a CPU the resident memory of the process, on a GPU what NVML says is used, by other programs "
            f"too; looked at every {SAMPLE_S * 1000:g} ms.",
            "Files: resident memory, its peak as the kernel records it, measured once; faster-whisper has `vad_filter` "
            "on; the worker, once loaded, also holds the SDK and the speech detector.",
        ],
        data=_data(figures, workers, windows, files),
    )


# Calls, each setting in a process of its own.


def _turns(loaded: Model, settings: list[Setting], options: Namespace) -> Figures[Setting]:
    """Figures are named `device.peak` and so on, and `process.peak` for the process beside a GPU."""

    def measure(setting: Setting) -> Mapping[str, float]:
        levels = _in_fresh_process(partial(_measure_calls, loaded, setting, options.rounds))
        return {f"{where}.{name}": value for where, held in levels.items() for name, value in asdict(held).items()}

    return take_turns(settings, options.repeats, measure, "calls")


def _in_fresh_process(call: Callable[[], T]) -> T:
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit this one's memory
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(call).result()


def _measure_calls(loaded: Model, setting: Setting, rounds: int) -> dict[str, Levels]:
    with ExitStack() as stack:
        meters: dict[str, Meter] = {"process": lambda: Memory.of(os.getpid()).held_bytes}
        if loaded.device == "cuda":
            nvml, handle = stack.enter_context(gpu())
            meters["device"] = lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        before = _read(meters)
        raw = RawModel.load(loaded, inter=setting.inter)
        windows = raw.windows(setting.batch, setting.window_s)
        weights = _read(meters)
        with _watched(meters) as readings:
            _call_at_once(lambda: raw.decode(windows), setting.inter, rounds)
        after = _read(meters)
    levels = {}
    for name in meters:
        during = [reading[name] for reading in readings]
        levels[name] = Levels(before[name], weights[name], int(median(during)), max(during), after[name])
    return {"device": levels["process"], **levels}  # a CPU's memory is the process's


def _call_at_once(call: Callable[[], None], threads: int, rounds: int) -> None:
    def repeat(_: int) -> None:
        for _ in range(rounds):
            call()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(repeat, range(threads)))


def _read(meters: Mapping[str, Meter]) -> dict[str, int]:
    return {name: meter() for name, meter in meters.items()}


@contextmanager
def _watched(meters: Mapping[str, Meter]) -> Iterator[list[dict[str, int]]]:
    """The list fills by itself, every SAMPLE_S, until the `with` ends."""
    readings: list[dict[str, int]] = []
    ended = Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            readings.append(_read(meters))

    thread = Thread(target=watch, name="watch")
    thread.start()
    try:
        yield readings
    finally:
        ended.set()
        thread.join()


# A long file, with all that comes before its decoding.


def _files(loaded: Model, lengths: Sequence[float]) -> list[File]:
    files = []
    with TemporaryDirectory() as folder:
        audio = Path(folder) / "speech.wav"
        for minutes in progress(lengths, "files"):
            write_wav(audio, speech(minutes * 60))
            alone = _in_fresh_process(partial(_transcribe_alone, loaded, audio))
            files += [File(minutes, "faster-whisper", *alone), File(minutes, "worker", *_in_worker(loaded, audio))]
    return files


def _transcribe_alone(loaded: Model, audio: Path) -> tuple[int, int]:
    """Bytes held before the file, and at most."""
    raw = RawModel.load(loaded, inter=1)
    before = Memory.of(os.getpid()).held_bytes
    forget_peak(os.getpid())
    segments, _ = raw.whisper.transcribe(str(audio), vad_filter=True, beam_size=BEAM_SIZE, language=LANGUAGE)
    for _ in segments:
        pass
    return before, Memory.of(os.getpid()).peak_bytes


def _in_worker(loaded: Model, audio: Path) -> tuple[int, int]:
    with LocalEndpoint() as endpoint, Process(endpoint, loaded, ["handler.py"]) as process:
        process.wait_until_ready(START_S)
        before = process.memory.held_bytes
        forget_peak(process.pid)
        process.run([audio], FILE_S)
        return before, process.memory.peak_bytes


# The report.


def _workers_table(figures: Figures[Setting], workers: Sequence[Setting], where: str) -> Table:
    rows: list[list[Value]] = []
    for setting in workers:
        held = _median_levels(figures, setting, where)
        levels = [held.before, held.loaded, held.active, held.peak, held.after, held.working / setting.inter]
        rows.append([setting.inter, *(level / MiB for level in levels)])
    columns = ["calls at once", "before", "loaded", "while they run", "peak", "after", "peak over loaded, each"]
    return Table(f"Memory of the {where}: one model, so many calls at once", columns, rows)


def _chart(figures: Figures[Setting], workers: Sequence[Setting]) -> Chart:
    held = [_median_levels(figures, setting, "device") for setting in workers]
    series = {name: [getattr(levels, name) / MiB for levels in held] for name in ("loaded", "peak", "after")}
    return Chart("calls", "Memory of one model", "calls at once", "MiB", [s.inter for s in workers], series)


def _windows_table(figures: Figures[Setting], windows: Sequence[Setting]) -> Table:
    rows: list[list[Value]] = []
    for setting in windows:
        working = _median_levels(figures, setting, "device").working
        rows.append([setting.window_s, setting.batch, working / MiB, working / setting.batch / MiB])
    columns = ["window, s", "batch", "peak over loaded", "for each window"]
    return Table("Memory of one call", columns, rows)


def _files_table(files: Sequence[File]) -> Table:
    rows: list[list[Value]] = [
        [file.minutes, file.who, *(count / MiB for count in (file.loaded_bytes, file.peak_bytes, file.added_bytes))]
        for file in files
    ]
    return Table("Memory of a long file", ["minutes", "by", "loaded", "peak", "peak over loaded"], rows)


def _median_levels(figures: Figures[Setting], setting: Setting, where: str) -> Levels:
    return Levels(*(int(figures.median(setting, f"{where}.{level.name}")) for level in fields(Levels)))


def _data(
    figures: Figures[Setting], workers: Sequence[Setting], windows: Sequence[Setting], files: Sequence[File]
) -> dict[str, Any]:
    on_device = {setting: _median_levels(figures, setting, "device") for setting in (ONE_CALL, *workers, *windows)}
    single = on_device[ONE_CALL]
    return {
        "weights_bytes": single.loaded - single.before,
        "kept_bytes": max(single.after - single.loaded, 0),
        "working_bytes_per_window": [
            {"batch": s.batch, "window_s": s.window_s, "bytes": max(on_device[s].working, 0) // s.batch}
            for s in windows
        ],
        "workers": [
            {
                "inter_threads": setting.inter,
                "device": asdict(on_device[setting]),
                "process": asdict(_median_levels(figures, setting, "process")),
            }
            for setting in workers
        ],
        "files": [asdict(file) for file in files],
    }
