"""How fast jobs are answered, against the plain worker that most people write and against faster-whisper alone.

In `data`: `figures`, load → contender → what each repeat measured; `answers`, load → contender → all repeats' jobs.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Protocol

from benchmarks import load
from benchmarks.contenders import (
    DOWNLOAD_S,
    Contender,
    FasterWhisper,
    PlainWorker,
    Running,
    Worker,
    add_worker_argument,
    model,
)
from benchmarks.load import Answer, Load, Sound
from benchmarks.models import PREFIX as RANDOM
from benchmarks.report import Chart, Report, Table, Value
from benchmarks.turns import Figures, take_turns

NAME = "jobs"
HELP = "jobs per second and latency, against a plain worker and against faster-whisper alone"
QUICK = {"jobs": 4, "repeats": 1, "loads": ["short"], "contenders": ["plain", "ceiling", "worker"]}

CLIPS = {"short": (2.0, 5.0), "medium": (8.0, 14.0), "mixed": (3.0, 15.0)}  # seconds
FILES = {"ten-minutes": 600.0, "hour": 3600.0}
LOADS = [*CLIPS, *FILES, "beside"]
LONE_JOBS = 5  # sent one after another, for the latency of a job that has the worker for itself
HEAD_START_S = 1.0  # of the long file, before clips come beside it

PLAIN = ("plain", "plain-vad")
CEILING = ("ceiling", "ceiling-vad")
NOTES = (
    "plain: a synchronous RunPod handler with faster-whisper's defaults, one job at a time; plain-vad: with its speech "
    "detection.",
    "ceiling: faster-whisper alone, as many calls at once as the worker makes, the worker's decoding options, audio "
    "decoded beforehand, no endpoint and no download; ceiling-vad: with its speech detection.",
    "full-windows: the worker with FIT_WINDOWS=false, so that it decodes the same windows as the others.",
    f"The workers download each job's file from a server that takes {DOWNLOAD_S:g} s to answer.",
    "Figures are medians of the repeats. A ratio is the median of the ratios within one repeat, to the faster of plain "
    "and plain-vad, or of ceiling and ceiling-vad.",
)


class Scene(Protocol):
    """Jobs that are measured together. `columns`: figure → its heading; with `is_race`, speeds are compared."""

    columns: ClassVar[Mapping[str, str]]
    is_race: ClassVar[bool]

    @property
    def title(self) -> str: ...

    def measure(self, running: Running) -> tuple[dict[str, float], list[Answer]]: ...


@dataclass(frozen=True)
class Clips:
    """Many clips, all sent at once."""

    columns: ClassVar[Mapping[str, str]] = {
        "jobs_per_s": "jobs/s",
        "p50_s": "p50, s",
        "p95_s": "p95, s",
        "lone_s": "lone job's p50, s",
    }
    is_race: ClassVar[bool] = True

    sounds: Sequence[Sound]
    between: tuple[float, float]

    @property
    def title(self) -> str:
        shortest_s, longest_s = self.between
        return f"{len(self.sounds)} clips of {shortest_s:g} to {longest_s:g} s, sent at once"

    def measure(self, running: Running) -> tuple[dict[str, float], list[Answer]]:
        lone = running.answers(Load(self.sounds[:LONE_JOBS], in_flight=1))
        answers = running.answers(Load(self.sounds))
        figures = {
            "jobs_per_s": load.jobs_per_s(answers),
            "p50_s": load.latency(answers, 50),
            "p95_s": load.latency(answers, 95),
            "lone_s": load.latency(lone, 50),
        }
        return figures, answers


@dataclass(frozen=True)
class File:
    """One long file, alone."""

    columns: ClassVar[Mapping[str, str]] = {"seconds": "seconds", "real_time": "times real time"}
    is_race: ClassVar[bool] = True

    sound: Sound

    @property
    def title(self) -> str:
        return f"One file of {self.sound.seconds:g} s, alone"

    def measure(self, running: Running) -> tuple[dict[str, float], list[Answer]]:
        answers = running.answers(Load([self.sound]))
        seconds = load.latency(answers, 50)
        figures = {
            "seconds": seconds,
            "real_time": self.sound.seconds / seconds,
            "jobs_per_s": load.jobs_per_s(answers),
        }
        return figures, answers


@dataclass(frozen=True)
class Beside:
    """Clips that come one by one while a long file is transcribed: fair is who makes them wait little longer."""

    columns: ClassVar[Mapping[str, str]] = {
        "alone_p50_s": "clips alone: p50, s",
        "p50_s": "beside the file: p50, s",
        "slower": "times as long",
        "alone_p95_s": "alone: p95, s",
        "p95_s": "beside: p95, s",
        "file_s": "the file, s",
    }
    is_race: ClassVar[bool] = False

    file: Sound
    clips: Sequence[Sound]
    interval_s: float

    @property
    def title(self) -> str:
        return (
            f"One file of {self.file.seconds:g} s, and beside it {len(self.clips)} clips of {CLIPS['short'][0]:g} to "
            f"{CLIPS['short'][1]:g} s, one every {self.interval_s:g} s"
        )

    def measure(self, running: Running) -> tuple[dict[str, float], list[Answer]]:
        starts_s = [HEAD_START_S + number * self.interval_s for number in range(len(self.clips))]
        alone = running.answers(Load(self.clips, starts_s))
        of_file, *of_clips = running.answers(Load([self.file, *self.clips], [0.0, *starts_s]))
        beside = [answer for answer in of_clips if answer.sent_s < of_file.ended_s]
        figures = {
            "alone_p50_s": load.latency(alone, 50),
            "alone_p95_s": load.latency(alone, 95),
            "p50_s": load.latency(beside, 50),
            "p95_s": load.latency(beside, 95),
            "slower": load.latency(beside, 50) / load.latency(alone, 50),
            "file_s": load.latency([of_file], 50),
        }
        return figures, [of_file, *of_clips]


@dataclass
class Turns:
    """A scene and what the contenders made of it. `answers` are those of all repeats."""

    scene: Scene
    contenders: Mapping[str, Contender]
    has_wer: bool
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    figures: Figures[str] = field(init=False)

    def take(self, repeats: int, timeout_s: float, label: str) -> None:
        def measure(name: str) -> dict[str, float]:
            with self.contenders[name].running(timeout_s) as running:
                figures, answers = self.scene.measure(running)
            self.answers.setdefault(name, []).extend(answers)
            return figures | ({"wer": 100 * load.word_error_rate(answers)} if self.has_wer else {})

        self.figures = take_turns(list(self.contenders), repeats, measure, label)

    def table(self) -> Table:
        columns = {**self.scene.columns, **({"wer": "WER, %"} if self.has_wer else {})}
        ratios = {"times plain": PLAIN, "times ceiling": CEILING} if self.scene.is_race else {}
        rows = [
            [
                name,
                *(self.figures.median(name, figure) for figure in columns),
                *(self._times(name, references) for references in ratios.values()),
            ]
            for name in self.contenders
        ]
        return Table(self.scene.title, ["contender", *columns.values(), *ratios], rows)

    def _times(self, name: str, references: Sequence[str]) -> Value:
        """How many times as fast as the fastest of the references."""
        present = [other for other in references if other in self.contenders and all(self._speeds(other))]
        return min((self.figures.ratio(name, "jobs_per_s", other) for other in present), default=None)

    def _speeds(self, name: str) -> list[float]:
        return self.figures.all(name, "jobs_per_s")

    def failures(self) -> list[str]:
        told = (load.failures(answers, f"{self.scene.title}, {name}") for name, answers in self.answers.items())
        return [line for lines in told for line in lines]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=24, help="clips of a load (%(default)s)")
    parser.add_argument(
        "--loads",
        type=_names,
        default=LOADS,
        help=f"of {','.join(LOADS)}, and `file:SECONDS` and `beside:SECONDS` for other lengths (all named)",
    )
    parser.add_argument(
        "--contenders", type=_names, help=f"of {','.join([*PLAIN, *CEILING])},worker,full-windows (all)"
    )
    add_worker_argument(parser)
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between clips beside a file (%(default)s)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds that a load may take (%(default)s)")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def run(options: Namespace) -> Report:
    contenders = _contenders(options)
    all_turns: dict[str, Turns] = {}
    for name in options.loads:
        turns = Turns(_scene(name, options), contenders, has_wer=not options.model.startswith(RANDOM))
        turns.take(options.repeats, options.timeout, label=name)
        all_turns[name] = turns
    failures = [line for turns in all_turns.values() for line in turns.failures()]
    return Report(
        NAME,
        "Jobs: how fast they are answered",
        tables=[turns.table() for turns in all_turns.values()],
        charts=_charts(all_turns),
        notes=[*NOTES, *failures],
        data={
            "figures": {name: turns.figures.by_setting for name, turns in all_turns.items()},
            "answers": {
                name: {contender: list(map(asdict, answers)) for contender, answers in turns.answers.items()}
                for name, turns in all_turns.items()
            },
        },
    )


def _contenders(options: Namespace) -> dict[str, Contender]:
    loaded = model(options)
    worker = Worker(loaded)
    standard: dict[str, Contender] = {
        "plain": PlainWorker(loaded),
        "plain-vad": PlainWorker(loaded, vad_filter=True),
        "ceiling": FasterWhisper(loaded, worker.threads),
        "ceiling-vad": FasterWhisper(loaded, worker.threads, vad_filter=True),
        "worker": worker,
        "full-windows": Worker(loaded, {"FIT_WINDOWS": "false"}),
    }
    chosen = options.contenders or list(standard)
    if unknown := [name for name in chosen if name not in standard]:
        raise SystemExit(f"--contenders: {', '.join(unknown)} is none of {', '.join(standard)}")
    extra = {name: Worker(loaded, settings) for name, settings in options.worker}
    return {**{name: standard[name] for name in chosen}, **extra}


def _scene(name: str, options: Namespace) -> Scene:
    if name in CLIPS:
        return Clips(load.clips(*CLIPS[name], options.jobs), CLIPS[name])
    kind, _, seconds = name.partition(":")
    if name in FILES or (kind == "file" and seconds):
        return File(load.recording(FILES[name] if name in FILES else float(seconds)))
    if kind == "beside":
        file = load.recording(float(seconds or FILES["hour"]))
        return Beside(file, load.clips(*CLIPS["short"], options.jobs), options.interval)
    raise SystemExit(f"--loads: {name} is none of {', '.join(LOADS)}, file:SECONDS, beside:SECONDS")


def _charts(all_turns: Mapping[str, Turns]) -> list[Chart]:
    """Bars of the loads of clips, a colour for each contender."""
    clips = {name: turns for name, turns in all_turns.items() if name in CLIPS}
    if not clips:
        return []
    contenders = next(iter(clips.values())).contenders
    speeds = {
        contender: [turns.figures.median(contender, "jobs_per_s") for turns in clips.values()]
        for contender in contenders
    }
    return [Chart("speed", "Clips sent at once", "load", "jobs/s", list(clips), speeds, kind="bar")]
