"""Jobs to send, and what became of them. Knows nothing of who transcribes."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import nan

import numpy as np

from benchmarks import corpus, wer
from benchmarks.turns import percentile
from whisper_worker.audio import SAMPLE_RATE, Samples

LANGUAGE = "en"  # the demo model knows no other


@dataclass(frozen=True, eq=False)
class Sound:
    """Speech that a job is about, and what is said in it."""

    name: str
    samples: Samples
    text: str

    @property
    def seconds(self) -> float:
        return len(self.samples) / SAMPLE_RATE


@dataclass(frozen=True)
class Load:
    """One job for each sound: sent at its second, but never more than `in_flight` at the same time."""

    sounds: Sequence[Sound]
    starts_s: Sequence[float] = ()  # none: all at once
    in_flight: int | None = None  # None: any number


class JobFailed(Exception):
    """The text is one sentence."""


@dataclass(frozen=True)
class Answer:
    """What became of one job: the text that was `said`, and the one heard. Times are those of one clock."""

    said: str
    sent_s: float
    ended_s: float
    text: str = ""
    failure: str | None = None

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.sent_s


def answers(load: Load, transcribe: Callable[[Sound], str]) -> list[Answer]:
    """Send the load; the answers are in the order of its sounds. `transcribe` is called by a thread for each job."""

    def send(sound: Sound, start_s: float) -> Answer:
        time.sleep(max(0.0, began + start_s - time.monotonic()))
        sent_s = time.monotonic()
        try:
            text = transcribe(sound)
        except JobFailed as failure:
            return Answer(sound.text, sent_s, time.monotonic(), failure=str(failure))
        return Answer(sound.text, sent_s, time.monotonic(), text)

    with ThreadPoolExecutor(load.in_flight or len(load.sounds), "caller") as callers:
        began = time.monotonic()
        return list(callers.map(send, load.sounds, load.starts_s or [0.0] * len(load.sounds)))


def seconds(given: Sequence[Answer]) -> float:
    """From the first job's sending to the last result."""
    return max(answer.ended_s for answer in given) - min(answer.sent_s for answer in given)


# Of those that failed, the next three say nothing.


def jobs_per_s(given: Sequence[Answer]) -> float:
    return len(latencies_s(given)) / seconds(given)


def latencies_s(given: Sequence[Answer]) -> list[float]:
    return [answer.latency_s for answer in given if answer.failure is None]


def latency(given: Sequence[Answer], percent: float) -> float:
    """NaN when all have failed."""
    return percentile(latencies_s(given) or [nan], percent)


def failures(given: Sequence[Answer], label: str) -> list[str]:
    """A sentence for the report, or none."""
    why = [answer.failure for answer in given if answer.failure]
    return [f"{label}: {len(why)} of {len(given)} jobs failed, the first with: {why[0]}"] if why else []


def word_error_rate(given: Sequence[Answer]) -> float:
    """Of all answers together. A failed job has heard nothing."""
    return wer.rate(
        wer.errors(wer.normalise(answer.text, LANGUAGE), wer.normalise(answer.said, LANGUAGE)) for answer in given
    )


def clips(shortest_s: float, longest_s: float, count: int) -> list[Sound]:
    """So many, their lengths evenly spread and in mixed order: always the same. Repeated where there are too few.

    Where there is none of that length, shorter ones are joined.
    """
    step_s = (longest_s - shortest_s) / max(count - 1, 1)
    lengths_s = (
        [shortest_s + step_s * number for number in range(count)] if count > 1 else [shortest_s / 2 + longest_s / 2]
    )
    fitting = [clip for clip in corpus.clips([LANGUAGE]) if shortest_s <= clip.seconds <= longest_s]
    if not fitting:
        return [recording(length_s) for length_s in lengths_s]
    unused: list[corpus.Clip] = []
    chosen = []
    for wanted_s in lengths_s:
        unused = unused or fitting.copy()
        clip = min(unused, key=lambda clip: abs(clip.seconds - wanted_s))
        unused.remove(clip)
        chosen.append(clip)
    np.random.default_rng(0).shuffle(chosen)
    return [Sound(clip.name, clip.load(), clip.text) for clip in chosen]


def recording(seconds: float) -> Sound:
    """One file of that length, with many clips in it."""
    made = corpus.long_recording(seconds, LANGUAGE)
    return Sound(f"recording of {seconds:g} s", made.samples, made.text)
