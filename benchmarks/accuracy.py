"""Whether the worker hears as well as faster-whisper called directly, on real recordings with their transcripts.

A check: where it makes more errors in some language, the command ends with code 1. In `data`: `clips`, each with what
was said and, for each repeat, what both heard; `languages`, the sums of their errors.
"""

import json
import re
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from av.error import FFmpegError
from local_endpoint import Job, LocalEndpoint

from benchmarks import BEAM_SIZE, corpus, wer
from benchmarks.contenders import START_S, Model, model, send
from benchmarks.models import PREFIX as RANDOM
from benchmarks.process import Process
from benchmarks.report import Chart, Report, Table, Value
from benchmarks.turns import progress

NAME = "accuracy"
HELP = "word error rates on real recordings, beside faster-whisper called directly (a check)"
QUICK = {"per_language": 1}
IS_IN_ALL = False  # a check, and its recordings may not be there

MANIFEST = "manifest.jsonl"
SILENT = "no speech"  # in place of a language
SPEAKERS = re.compile(r"left: (.*) / right: (.*)")  # the transcript of a recording with a speaker on each side
COUNTS = ["said", "worker's errors", "library's errors", "difference", "worker, %", "library, %"]


@dataclass(frozen=True)
class Heard:
    """What was made of a clip."""

    text: str = ""
    failure: str | None = None


@dataclass(frozen=True)
class Clip:
    """A recording and what is said in it: nothing, where `language` is None."""

    file: Path
    language: str | None
    seconds: float
    text: str
    has_two_speakers: bool = False

    @classmethod
    def of(cls, facts: Mapping[str, Any], folder: Path) -> "Clip":
        """From a line of the manifest."""
        file, language, seconds, text = (facts[key] for key in ("file", "lang", "seconds", "text"))
        if facts.get("channels") == 2 and (sides := SPEAKERS.fullmatch(text)):
            return cls(folder / file, language, seconds, " ".join(sides.groups()), has_two_speakers=True)
        return cls(folder / file, language, seconds, text)

    @property
    def group(self) -> str:
        return self.language or SILENT

    @property
    def options(self) -> dict[str, str]:
        """What the worker is asked for, besides the text."""
        return {"channels": "split"} if self.has_two_speakers else {}

    def errors(self, heard: Heard) -> tuple[int, int]:
        """Those made, and the words (or characters) said. A failure has missed all, and is an error in itself."""
        language = self.language or "en"  # where nothing is said, each word is one too many in any language
        errors, said = wer.errors(wer.normalise(heard.text, language), wer.normalise(self.text, language))
        return max(errors, 1) if heard.failure else errors, said


@dataclass(frozen=True)
class Score:
    """Words (or characters) said, and how many errors each made in them."""

    said: int = 0
    worker: int = 0
    library: int = 0

    def __add__(self, other: "Score") -> "Score":
        return Score(self.said + other.said, self.worker + other.worker, self.library + other.library)

    @property
    def difference(self) -> int:
        """Above zero: the worker is worse."""
        return self.worker - self.library

    @property
    def cells(self) -> list[Value]:
        """Under `COUNTS`."""
        rates = [100 * errors / self.said if self.said else None for errors in (self.worker, self.library)]
        return [self.said, self.worker, self.library, self.difference, *rates]


@dataclass(frozen=True)
class Pair:
    """What both made of a clip, once for each repeat."""

    clip: Clip
    worker: Sequence[Heard]
    library: Sequence[Heard]

    @property
    def score(self) -> Score:
        """The sums of the repeats."""
        of_worker, of_library = (list(map(self.clip.errors, heard)) for heard in (self.worker, self.library))
        return Score(
            sum(said for _, said in of_worker),
            sum(errors for errors, _ in of_worker),
            sum(errors for errors, _ in of_library),
        )

    @property
    def failures(self) -> list[str]:
        """A sentence for each; one that comes again in each repeat is told once."""
        both = [*(("worker", heard) for heard in self.worker), *(("library", heard) for heard in self.library)]
        told = [f"{self.clip.file.name}: the {who} failed with: {h.failure}" for who, h in both if h.failure]
        return list(dict.fromkeys(told))


def by_language(pairs: Iterable[Pair]) -> dict[str, Score]:
    """The sums, without the clips in which two speak at once."""
    scores: dict[str, Score] = {}
    for pair in pairs:
        if not pair.clip.has_two_speakers:
            scores[pair.clip.group] = scores.get(pair.clip.group, Score()) + pair.score
    return scores


def failures(scores: Mapping[str, Score]) -> list[str]:
    """A sentence for each language in which the worker is worse."""
    return [
        f"{name}: errors of the worker {score.worker}, of the library {score.library}"
        for name, score in scores.items()
        if score.difference > 0
    ]


def verdict(scores: Mapping[str, Score]) -> str:
    """One sentence, with the differences where there are any."""
    differences = [f"{name} {score.difference:+d}" for name, score in scores.items() if score.difference]
    told = f"Errors more or less than the library's: {', '.join(differences) or 'none'}."
    worse = [name for name, score in scores.items() if score.difference > 0]
    if worse:
        return f"The worker is worse than the library in: {', '.join(worse)}. {told}"
    return f"The worker is no worse than the library in any language. {told}"


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(repeats=1)  # beam search gives the same text each time; only a fallback draws at random
    parser.add_argument(
        "--clips", type=Path, help=f"folder of recordings with a {MANIFEST} (shared/audio beside the project)"
    )
    parser.add_argument("--per-language", type=int, help="clips of each language at most (all)")
    parser.add_argument("--texts", action="store_true", help="print what was said and what was heard")
    parser.add_argument(
        "--vad-filter",
        action=BooleanOptionalAction,
        default=True,
        help="whether the library leaves out what it takes for no speech, as the worker does (%(default)s)",
    )
    parser.add_argument(
        "--timeout", type=float, default=3600.0, help="seconds for the worker's jobs of a repeat (%(default)s)"
    )


def run(options: Namespace) -> Report:
    if options.model.startswith(RANDOM):
        raise SystemExit(f"--model {options.model}: says the same words whatever it hears")
    loaded = model(options)
    clips, by_library = _heard_by_library(read(options.clips or corpus.SHARED), loaded, options)
    by_worker = _heard_by_worker(clips, loaded, options)
    pairs = [Pair(*row) for row in zip(clips, by_worker, by_library, strict=True)]
    scores = by_language(pairs)
    return Report(
        NAME,
        "Accuracy: the worker beside faster-whisper called directly",
        tables=tables(pairs, scores, with_texts=options.texts),
        charts=[_chart(scores)],
        notes=[*_notes(options), *(failure for pair in pairs for failure in pair.failures), verdict(scores)],
        failures=failures(scores),
        data={
            "clips": [{**asdict(pair), "clip": {**asdict(pair.clip), "file": pair.clip.file.name}} for pair in pairs],
            "languages": {name: asdict(score) for name, score in scores.items()},
        },
    )


def read(folder: Path) -> list[Clip]:
    """The clips that the folder's manifest lists."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise SystemExit(f"--clips: the folder {folder.name} with a {MANIFEST} isn't there")
    return [Clip.of(json.loads(line), folder) for line in manifest.read_text("utf-8").splitlines() if line]


def chosen(clips: Iterable[Clip], *, english_only: bool, per_language: int | None) -> list[Clip]:
    """Those that the model can be asked about, and so many of each language. Silence has no language."""
    taken: Counter[tuple[str, bool]] = Counter()
    kept = []
    for clip in clips:
        kind = (clip.group, clip.has_two_speakers)
        if english_only and clip.language not in ("en", None):
            continue
        if per_language is not None and taken[kind] >= per_language:
            continue
        taken[kind] += 1
        kept.append(clip)
    return kept


# Those who hear.


def _heard_by_library(clips: Sequence[Clip], loaded: Model, options: Namespace) -> tuple[list[Clip], list[list[Heard]]]:
    """With the clips that it was asked about: whether a model knows English only is known once it is loaded."""
    from faster_whisper import WhisperModel  # here: every benchmark's file is imported, and this takes seconds

    whisper = WhisperModel(loaded.folder, device=loaded.device, compute_type=loaded.compute_type)
    clips = chosen(clips, english_only=not whisper.model.is_multilingual, per_language=options.per_language)
    if not clips:
        raise SystemExit("--clips: there is none that the model could be asked about")

    def heard(clip: Clip) -> Heard:
        try:
            segments, _ = whisper.transcribe(str(clip.file), beam_size=BEAM_SIZE, vad_filter=options.vad_filter)
            return Heard("".join(segment.text for segment in segments).strip())
        except FFmpegError as error:
            return Heard(failure=error.strerror)  # without the path

    return clips, [[heard(clip) for _ in range(options.repeats)] for clip in progress(clips, "library")]


def _heard_by_worker(clips: Sequence[Clip], loaded: Model, options: Namespace) -> list[list[Heard]]:
    """The jobs of a repeat are sent at once: what the worker hears must not depend on other jobs."""
    with LocalEndpoint() as endpoint, Process(endpoint, loaded, ["handler.py"]) as worker:
        worker.wait_until_ready(START_S)

        def all_heard() -> list[Heard]:
            jobs = [send(endpoint, str(clip.file), **clip.options) for clip in clips]
            worker.wait_for(lambda: all(job.is_final for job in jobs), options.timeout)
            return [_heard(job) for job in jobs]

        turns = [all_heard() for _ in progress(range(options.repeats), "worker")]
    return [list(of_clip) for of_clip in zip(*turns, strict=True)]


def _heard(job: Job) -> Heard:
    if job.status != "COMPLETED":
        return Heard(failure=job.error or job.status)
    segments = job.output["segments"]  # of each channel apart, or of none
    return Heard("".join(s["text"] for s in sorted(segments, key=lambda s: s.get("channel", 0))).strip())


# The report.


def tables(pairs: Sequence[Pair], scores: Mapping[str, Score], *, with_texts: bool) -> list[Table]:
    alone = [pair for pair in pairs if not pair.clip.has_two_speakers]
    together = [pair for pair in pairs if pair.clip.has_two_speakers]
    made = [_clips_table("Clips", alone)]
    if together:
        made.append(_clips_table("Two speakers at once, whom only the worker hears apart; not in the sums", together))
    if with_texts:
        made += [_texts_table(pair) for pair in pairs]
    total = sum(scores.values(), Score())
    rows = [[name, *score.cells] for name, score in [*sorted(scores.items()), ("total", total)]]
    return [*made, Table("Languages", ["language", *COUNTS], rows)]


def _clips_table(title: str, pairs: Sequence[Pair]) -> Table:
    rows = [[pair.clip.file.name, pair.clip.group, pair.clip.seconds, *pair.score.cells] for pair in pairs]
    return Table(title, ["clip", "language", "seconds", *COUNTS], rows)


def _texts_table(pair: Pair) -> Table:
    """A text that a repeat gave again isn't."""
    heard = {"worker": pair.worker, "library": pair.library}
    texts = [(who, text) for who, all_heard in heard.items() for text in dict.fromkeys(h.text for h in all_heard)]
    return Table(pair.clip.file.name, ["", "text"], [("said", pair.clip.text), *texts])


def _chart(scores: Mapping[str, Score]) -> Chart:
    spoken = {name: score for name, score in sorted(scores.items()) if score.said}
    series = {
        "worker": [100 * score.worker / score.said for score in spoken.values()],
        "library": [100 * score.library / score.said for score in spoken.values()],
    }
    return Chart("languages", "Errors", "language", "% of what was said", list(spoken), series, kind="bar")


def _notes(options: Namespace) -> list[str]:
    return [
        "worker: `handler.py` with its default settings, a job for each clip, all sent at once, with default inputs: "
        "beam 5, language detected, speech detection, no text of earlier windows shown, short windows fitted.",
        f"library: `WhisperModel(folder, device, compute_type).transcribe(file, beam_size={BEAM_SIZE}, "
        f"vad_filter={options.vad_filter})`, one clip after the other; all else is its default: language detected, "
        "text of earlier windows shown, full windows.",
        "Both load the same weights in the same number format and are given the same file by its name.",
        "Capitals, punctuation, accents and the spelling of numbers are no errors. In "
        f"{', '.join(sorted(wer.WITHOUT_SPACES))} characters are counted, in other languages words; the total adds "
        "them as they are.",
        f"{SILENT}: each word is one that was invented.",
        "Two speakers at once, one on each side: the worker is asked to hear the sides apart (`channels: split`), the "
        "library mixes them. The rate is of the left side's words with the right side's after them.",
        f"Errors and words are sums of the repeats ({options.repeats}). What is decoded again at a higher temperature "
        "is drawn at random, and may differ each time.",
    ]
