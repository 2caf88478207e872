"""What growth costs: more jobs in flight, and longer files.

In `data`: `in_flight`, a list with the fields of `measured.Point`; `lengths`, seconds → what each repeat measured.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import mean

from benchmarks import load
from benchmarks.arguments import counts, numbers
from benchmarks.contenders import Model, Worker, add_worker_argument, model
from benchmarks.load import Answer, Load
from benchmarks.measured import Point
from benchmarks.report import Chart, Report, Table
from benchmarks.turns import Figures, percentile, take_turns
from whisper_worker.settings import GiB, MiB, Settings

NAME = "growth"
HELP = "what more jobs in flight and longer files cost: speed, latency and memory"
QUICK = {"jobs": 4, "repeats": 1, "in_flight": [1, 2], "lengths": [10.0, 30.0]}

CLIPS = (8.0, 14.0)  # seconds
ROUNDS = 2  # at least so many jobs for each place
DEFAULTS = "worker"  # name of the variant without settings of its own


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=24, help="clips for each number in flight, or more (%(default)s)")
    parser.add_argument(
        "--in-flight", type=counts, default=[1, 2, 4, 8, 16, 32, 64], help="numbers of jobs, such as 1,2,4 (to 64)"
    )
    parser.add_argument(
        "--clips", type=numbers, default=CLIPS, metavar="MIN,MAX", help="seconds of the jobs' audio (8,14)"
    )
    parser.add_argument(
        "--lengths", type=numbers, default=[10.0, 60.0, 600.0, 3600.0, 10800.0], help="seconds of files (10 s to 3 h)"
    )
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds that a job may take (%(default)s)")
    add_worker_argument(parser)


def run(options: Namespace) -> Report:
    loaded = model(options)
    points, failures = _in_flight(loaded, options)
    lengths = _lengths(loaded, options)
    tables = [table for table in (_in_flight_table(points), _lengths_table(lengths)) if table.rows]
    return Report(
        NAME,
        "Growth: what more jobs in flight and longer files cost",
        tables=tables,
        charts=_charts(points),
        notes=[
            "Jobs in flight: as many jobs are under way all the time as the worker takes (JOB_CONCURRENCY); one that "
            "ends is followed by the next. Latency counts from the sending, and so with the worker's polls and the "
            "download.",
            "Peak: the largest resident set of the worker's process.",
            *failures,
        ],
        data={"in_flight": [asdict(point) for point in points], "lengths": lengths.by_setting},
    )


def _in_flight(loaded: Model, options: Namespace) -> tuple[list[Point], list[str]]:
    """A point for each at which jobs ended well, and a sentence for each at which some failed."""
    variants = {DEFAULTS: {}, **dict(options.worker)}
    workers = {
        (name, jobs): Worker(loaded, {**settings, "JOB_CONCURRENCY": str(jobs)})
        for name, settings in variants.items()
        for jobs in options.in_flight
    }
    answers: dict[tuple[str, int], list[Answer]] = {key: [] for key in workers}

    def measure(key: tuple[str, int]) -> dict[str, float]:
        _, jobs = key
        shortest_s, longest_s = options.clips
        sounds = load.clips(shortest_s, longest_s, max(options.jobs, ROUNDS * jobs))
        with workers[key].running(options.timeout) as running:
            given = running.answers(Load(sounds, in_flight=jobs))
            peak_bytes = running.memory().peak_bytes
        answers[key] += given
        clip_s = mean(sound.seconds for sound in sounds)
        return {"jobs_per_s": load.jobs_per_s(given), "peak_bytes": peak_bytes, "clip_s": clip_s}

    figures = take_turns(list(workers), options.repeats, measure, "jobs in flight")
    points = [
        Point(
            variant=name,
            inter_threads=worker.threads.inter,
            batch_size=worker.threads.batch,
            job_concurrency=jobs,
            clip_s=figures.median((name, jobs), "clip_s"),
            jobs_per_s=figures.median((name, jobs), "jobs_per_s"),
            latencies_s=load.latencies_s(answers[name, jobs]),
            peak_bytes=int(max(figures.all((name, jobs), "peak_bytes"))),
        )
        for (name, jobs), worker in workers.items()
        if load.latencies_s(answers[name, jobs])
    ]
    told = (load.failures(given, f"{name} with {jobs} in flight") for (name, jobs), given in answers.items())
    return points, [line for lines in told for line in lines]


def _in_flight_table(points: Sequence[Point]) -> Table:
    return Table(
        "Jobs in flight",
        ["worker", "in flight", "jobs/s", "audio s per s", "p50, s", "p95, s", "peak, MiB"],
        [
            [
                point.variant,
                point.job_concurrency,
                point.jobs_per_s,
                point.audio_s_per_s,
                percentile(point.latencies_s, 50),
                percentile(point.latencies_s, 95),
                round(point.peak_bytes / MiB),
            ]
            for point in points
        ],
    )


def _lengths(loaded: Model, options: Namespace) -> Figures[float]:
    """One file alone, by its seconds."""

    def measure(seconds: float) -> dict[str, float]:
        sound = load.recording(seconds)
        with Worker(loaded, _long_enough(seconds, options.timeout)).running(options.timeout) as running:
            before = running.memory()
            (answer,) = running.answers(Load([sound]))
            after = running.memory()
        if answer.failure:
            raise RuntimeError(f"the file of {seconds:g} s failed: {answer.failure}")
        return {"seconds": answer.latency_s, "grown_bytes": after.peak_bytes - before.held_bytes}

    return take_turns(options.lengths, options.repeats, measure, "lengths")


def _lengths_table(figures: Figures[float]) -> Table:
    rows = []
    for length_s in figures.by_setting:
        seconds = figures.median(length_s, "seconds")
        grown = round(figures.median(length_s, "grown_bytes") / MiB)
        rows.append([length_s, seconds, length_s / seconds, grown])
    return Table("One file alone", ["file, s", "seconds", "times real time", "peak over the loaded model, MiB"], rows)


def _long_enough(seconds: float, timeout_s: float) -> dict[str, str]:
    """The settings that let such a file pass, where the defaults don't."""
    limits = Settings()
    return {
        **({"MAX_AUDIO_S": f"{seconds:g}"} if seconds > limits.max_audio_s else {}),
        **({"JOB_TIMEOUT_S": f"{timeout_s:g}"} if timeout_s > limits.job_timeout_s else {}),
    }


def _charts(points: Sequence[Point]) -> list[Chart]:
    """A line for each variant."""
    if not points:
        return []
    at = sorted({point.job_concurrency for point in points})
    by_place = {(point.variant, point.job_concurrency): point for point in points}

    def chart(name: str, y_label: str, figure: Callable[[Point], float]) -> Chart:
        lines = {
            variant: [figure(by_place[variant, jobs]) if (variant, jobs) in by_place else None for jobs in at]
            for variant in dict.fromkeys(point.variant for point in points)
        }
        return Chart(name, f"Jobs in flight: {name}", "jobs in flight", y_label, at, lines, log_x=True)

    return [
        chart("speed", "jobs/s", lambda point: point.jobs_per_s),
        chart("latency", "p95, s", lambda point: percentile(point.latencies_s, 95)),
        chart("memory", "peak, GiB", lambda point: point.peak_bytes / GiB),
    ]
