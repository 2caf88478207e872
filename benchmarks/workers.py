"""Which calls of one model run side by side, and what a batch gains: faster-whisper and CTranslate2 without the worker.

In `data`: `parallel` and `grid`, lists with each setting and what each repeat measured.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from time import monotonic
from typing import NamedTuple

from benchmarks.arguments import counts
from benchmarks.contenders import Model, model
from benchmarks.raw import WINDOW_S, RawModel, speech
from benchmarks.report import Chart, Report, Table, Value
from benchmarks.turns import Figures, take_turns
from whisper_worker.settings import available_cores

NAME = "workers"
HELP = "parallel calls of one model, and threads × batch: windows per second"
QUICK = {"windows": 4, "batch": [1, 2], "window_s": 16.0, "repeats": 1}

CALLS = 2


class Parallel(NamedTuple):
    num_workers: int
    at_once: bool


class Threads(NamedTuple):
    inter: int
    intra: int


class Cell(NamedTuple):
    inter: int
    intra: int
    batch: int


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--inter", type=counts, default=[1, 2, 4], help="calls at the same time (1,2,4)")
    parser.add_argument("--intra", type=counts, default=[1, 2, 4], help="CPU threads of each; 1 on a GPU (1,2,4)")
    parser.add_argument("--batch", type=counts, default=[1, 2, 4, 8], help="windows of a call (1,2,4,8)")
    parser.add_argument("--windows", type=int, default=16, help="windows of one measurement (%(default)s)")
    parser.add_argument("--window-s", type=float, default=WINDOW_S, help="seconds of a window (%(default)g)")


def run(options: Namespace) -> Report:
    loaded = model(options)
    parallel = _parallel(loaded, options)
    grid = _grid(loaded, options)
    return Report(
        NAME,
        "Parallel calls and batches",
        tables=[_parallel_table(parallel), _grid_table(grid)],
        charts=[_chart(grid)],
        notes=[
            f"The first table: faster-whisper's `transcribe` of {WINDOW_S:g} s, with one CPU thread for each worker.",
            f"The second: {options.windows} windows of {options.window_s:g} s of real speech, encoded and decoded with "
            "beam 5 by as many calls at once as `inter_threads`. More threads than cores are left out.",
            "Figures are medians of the repeats; a ratio is the median of the ratios within one repeat.",
        ],
        data={"parallel": parallel.listed(), "grid": grid.listed()},
    )


# Two calls of faster-whisper.


def _parallel(loaded: Model, options: Namespace) -> Figures[Parallel]:
    models = {number: RawModel.load(loaded, inter=number) for number in (1, CALLS)}
    samples = speech(WINDOW_S)
    for raw in models.values():
        raw.transcribe(samples)

    def measure(setting: Parallel) -> Mapping[str, float]:
        calls = [lambda: models[setting.num_workers].transcribe(samples)] * CALLS
        return {"seconds": _seconds(calls, at_once=CALLS if setting.at_once else 1)}

    settings = [Parallel(number, at_once) for number in models for at_once in (False, True)]
    return take_turns(settings, options.repeats, measure, "two calls")


def _parallel_table(figures: Figures[Parallel]) -> Table:
    rows: list[list[Value]] = []
    for number in (1, CALLS):
        in_turn, at_once = Parallel(number, at_once=False), Parallel(number, at_once=True)
        seconds = [figures.median(setting, "seconds") for setting in (in_turn, at_once)]
        rows.append([number, *seconds, figures.ratio(in_turn, "seconds", to=at_once)])
    columns = ["num_workers", "one after the other, s", "at once, s", "times faster"]
    return Table(f"{CALLS} calls of faster-whisper from {CALLS} Python threads", columns, rows)


# Threads and batches of CTranslate2.


def _grid(loaded: Model, options: Namespace) -> Figures[Cell]:
    """All models stay loaded, so that a turn is only the calls."""
    threads = _possible_threads(options)
    models = {setting: RawModel.load(loaded, *setting) for setting in threads}
    windows = models[threads[0]].windows(options.windows, options.window_s)
    for raw in models.values():
        raw.decode(windows[:1])

    def measure(cell: Cell) -> Mapping[str, float]:
        raw = models[Threads(cell.inter, cell.intra)]
        batches = [windows[start : start + cell.batch] for start in range(0, len(windows), cell.batch)]
        calls = [lambda batch=batch: raw.decode(batch) for batch in batches]
        return {"windows_per_s": len(windows) / _seconds(calls, at_once=cell.inter)}

    cells = [Cell(*setting, batch) for setting, batch in product(threads, options.batch)]
    return take_turns(cells, options.repeats, measure, "threads and batches")


def _possible_threads(options: Namespace) -> list[Threads]:
    if options.device == "cuda":
        return [Threads(inter, 1) for inter in options.inter]
    pairs = [Threads(*pair) for pair in product(options.inter, options.intra)]
    return [pair for pair in pairs if pair.inter * pair.intra <= available_cores()]


def _grid_table(grid: Figures[Cell]) -> Table:
    first = next(iter(grid.by_setting))
    rows = [
        [*cell, grid.median(cell, "windows_per_s"), grid.ratio(cell, "windows_per_s", to=first)]
        for cell in grid.by_setting
    ]
    columns = ["inter_threads", "intra_threads", "batch", "windows/s", "times the first row"]
    return Table("CTranslate2: encode and generate", columns, rows)


def _chart(grid: Figures[Cell]) -> Chart:
    batches = list(dict.fromkeys(cell.batch for cell in grid.by_setting))
    series: dict[str, list[float | None]] = {}
    for cell in grid.by_setting:
        label = f"inter {cell.inter}, intra {cell.intra}"
        series.setdefault(label, []).append(grid.median(cell, "windows_per_s"))
    return Chart("grid", "Windows per second", "batch", "windows/s", batches, series, log_x=True)


def _seconds(calls: Sequence[Callable[[], None]], at_once: int) -> float:
    """How long all calls take, so many of them at the same time."""
    with ThreadPoolExecutor(at_once) as pool:
        started = monotonic()
        for call in [pool.submit(call) for call in calls]:
            call.result()
        return monotonic() - started
