"""What fitted windows cost in words and save in work: their length is chosen by this.

Real clips go through the worker's engine, without voice activity detection, and without being told the language where
the model knows several. Work is processor time, which other programs disturb less than a clock's. In `data`:
`settings`, each with its counts by language and what it heard where the words differ from those of full windows.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks import corpus, wer
from benchmarks.arguments import numbers
from benchmarks.contenders import Model, model
from benchmarks.corpus import Clip
from benchmarks.report import Chart, Report, Table, Value
from benchmarks.turns import progress
from whisper_worker.audio import SAMPLE_RATE, Samples
from whisper_worker.engine import Engine
from whisper_worker.model_files import find
from whisper_worker.pieces import Track, whole
from whisper_worker.request import Request
from whisper_worker.settings import Settings, Threads, available_cores
from whisper_worker.stop import Stop
from whisper_worker.transcript import Growing

NAME = "fit"
HELP = "fitted windows: word errors and work for each length"
QUICK = {"clips": 10, "lengths": [30.0, 16.0]}

FULL_S = 30.0


@dataclass(frozen=True)
class Heard:
    """What became of one clip."""

    clip: Clip
    text: str
    language: str
    edits: int
    words: int


@dataclass(frozen=True)
class Result:
    """`cpu_s`: of all clips. `again`: windows that were decoded a second time, in full."""

    heard: Sequence[Heard]
    cpu_s: float
    again: int

    def word_error_rate(self, language: str | None = None) -> float:
        """In percent, of the clips in a language, or of all."""
        chosen = [h for h in self.heard if language in (None, h.clip.language)]
        return 100 * wer.rate((h.edits, h.words) for h in chosen)

    @property
    def languages_wrong(self) -> int:
        return sum(h.language != h.clip.language for h in self.heard)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--clips", type=int, default=500, help="at most, of all languages together (%(default)s)")
    parser.add_argument("--languages", default="", help="codes with commas between; all that the model knows")
    lengths = [FULL_S, 20.0, 16.0, 12.0]
    parser.add_argument("--lengths", type=numbers, default=lengths, help="seconds; 30 is a full window (30,20,16,12)")


def run(options: Namespace) -> Report:
    loaded = model(options)
    results = {length_s: _measured(loaded, length_s, options) for length_s in options.lengths}
    heard = results[options.lengths[0]].heard
    languages = sorted({one.clip.language for one in heard})
    return Report(
        NAME,
        "Fitted windows",
        tables=[_table(results, languages)],
        charts=[_chart(results)],
        notes=[
            f"{len(heard)} clips of {sum(one.clip.seconds for one in heard) / len(heard):.1f} s on average, beam 5, "
            "without voice activity detection, the language not given.",
            "A clip taken for another language counts as words wrong, too.",
            "`again`: windows whose text failed a threshold and that were decoded a second time, in full.",
        ],
        data={"settings": [_data(length_s, result, heard) for length_s, result in results.items()]},
    )


def _measured(loaded: Model, length_s: float, options: Namespace) -> Result:
    cores = available_cores()
    threads = Threads(inter=cores, intra=1, batch=1, jobs=cores, media=cores)
    settings = Settings(fit_windows=length_s < FULL_S, fit_window_s=length_s)
    engine = _CountingEngine.load(find(loaded.folder), loaded.device, loaded.compute_type, threads, settings)
    languages = options.languages.split(",") if options.languages else None
    clips = corpus.clips(["en"] if engine.speaks_english_only else languages, options.clips)
    with ThreadPoolExecutor(cores) as pool:
        samples = list(pool.map(Clip.load, clips))
        began = time.process_time()
        work = [pool.submit(_heard, engine, *clip) for clip in zip(clips, samples, strict=True)]
        heard = [done.result() for done in progress(work, f"windows of {length_s:g} s")]
        cpu_s = time.process_time() - began
    engine.close()
    assert isinstance(engine, _CountingEngine)
    return Result(heard, cpu_s, engine.again)


class _CountingEngine(Engine):
    again = 0

    def passes(self, request: Request, result: Any) -> bool:
        passed = super().passes(request, result)
        self.again += not passed
        return passed


def _heard(engine: Engine, clip: Clip, samples: Samples) -> Heard:
    walk = engine.walk([Track(samples, tuple(whole(samples)))], Request(), Stop())
    heard = Growing(len(samples) / SAMPLE_RATE, walk.piece(0)).transcript
    text = wer.normalise("".join(segment.text for segment in heard.segments), clip.language)
    language = heard.language.code if heard.language else ""
    return Heard(clip, text, language, *wer.errors(text, wer.normalise(clip.text, clip.language)))


def _table(results: Mapping[float, Result], languages: Sequence[str]) -> Table:
    first = next(iter(results.values()))
    rows: list[list[Value]] = []
    for length_s, result in results.items():
        clips = len(result.heard)
        row: list[Value] = ["none" if length_s >= FULL_S else f"{length_s:g} s"]
        row += [result.word_error_rate(), *(result.word_error_rate(language) for language in languages)]
        row += [result.languages_wrong, result.again, result.cpu_s / clips, first.cpu_s / result.cpu_s]
        rows.append(row)
    columns = ["short windows", "WER, %", *(f"{language}, %" for language in languages)]
    columns += ["language wrong", "again", "CPU s a clip", "times faster"]
    return Table("Word errors and work", columns, rows)


def _chart(results: Mapping[float, Result]) -> Chart:
    series = {"word error rate, %": [result.word_error_rate() for result in results.values()]}
    work = {"CPU s in 10 clips": [10 * result.cpu_s / len(result.heard) for result in results.values()]}
    return Chart("lengths", "Length of short windows", "length, s", "", list(results), {**series, **work})


def _data(length_s: float, result: Result, full: Sequence[Heard]) -> dict[str, Any]:
    differing = [
        {"clip": mine.clip.name, "text": mine.text, "full": theirs.text}
        for mine, theirs in zip(result.heard, full, strict=True)
        if mine.text != theirs.text
    ]
    return {
        "length_s": length_s,
        "edits": sum(one.edits for one in result.heard),
        "words": sum(one.words for one in result.heard),
        "languages_wrong": result.languages_wrong,
        "again": result.again,
        "cpu_s": result.cpu_s,
        "differing": differing,
    }
