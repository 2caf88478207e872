"""What the worker makes: words, segments, a transcript. Plain values, all times in seconds of the caller's file."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Word:
    """One word with the punctuation that sticks to it; `word` keeps the leading space of the model's token."""

    word: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True)
class Segment:
    """A stretch of text between two timestamps of the model, with the figures of the window it came from.

    `id` counts from 1. `seek` is the window's place in the audio that the model heard, in frames of 10 ms. `tokens`
    are those of the model's vocabulary, timestamp tokens included. `words` is None unless they were asked for.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] | None = None


@dataclass(frozen=True)
class Transcript:
    """All segments of one file in order. Without speech there are none, and the language is None."""

    segments: tuple[Segment, ...]
    language: str | None
    language_probability: float | None


Language = tuple[str, float]
"""Code and probability."""


@dataclass(frozen=True)
class Said:
    """What the model makes of a piece of a file, in the file's times. `translated`: in English, where asked for."""

    segments: tuple[Segment, ...] = ()
    translated: tuple[Segment, ...] = ()
    language: Language | None = None

    def shifted(self, frames: int) -> "Said":
        """With places in the audio that the model heard (`Segment.seek`) so much later."""
        segments, translated = (
            tuple(replace(segment, seek=segment.seek + frames) for segment in part)
            for part in (self.segments, self.translated)
        )
        return replace(self, segments=segments, translated=translated)


class Growing:
    """The transcript and the translation of a file of `duration` seconds, which grow by a piece at a time, in order.

    What has been added is final: later pieces change nothing in it.
    """

    def __init__(self, duration: float, said: Iterable[Said] = ()) -> None:
        self.duration = duration
        self._language: Language | tuple[None, None] = None, None
        self._segments: list[Segment] = []
        self._translated: list[Segment] = []
        for part in said:
            self.add(part)

    def add(self, said: Said) -> tuple[Segment, ...]:
        """The segments of the transcript that are new."""
        if said.language and not self._language[0]:
            self._language = said.language
        new = within(said.segments, self.duration, first_id=len(self._segments) + 1)
        self._segments += new
        self._translated += within(said.translated, self.duration, first_id=len(self._translated) + 1)
        return new

    @property
    def transcript(self) -> Transcript:
        return Transcript(tuple(self._segments), *self._language)

    @property
    def translation(self) -> Transcript:
        return Transcript(tuple(self._translated), *self._language)

    def tail(self, characters: int) -> str:
        """The end of the text so far."""
        text = ""
        for segment in reversed(self._segments):
            text = segment.text + text
            if len(text) >= characters:
                break
        return text[-characters:].strip()


def within(segments: Iterable[Segment], duration: float, first_id: int = 1) -> tuple[Segment, ...]:
    """The segments that lie inside a file of `duration` seconds, in order, numbered from `first_id` on.

    The model believes in windows of 30 s: on short files it gives ends, even whole segments, past the end of the
    audio. Such ends are clamped, such segments dropped, and `start <= end` holds for segments and words alike.
    """
    kept: list[Segment] = []
    for segment in sorted(segments, key=lambda s: s.start):
        if segment.start >= duration:
            continue
        start, end = _clamp(segment.start, segment.end, duration)
        words = segment.words and tuple(_word_within(word, duration) for word in segment.words)
        kept.append(replace(segment, id=first_id + len(kept), start=start, end=end, words=words))
    return tuple(kept)


def _word_within(word: Word, duration: float) -> Word:
    start, end = _clamp(word.start, word.end, duration)
    return replace(word, start=start, end=end)


def _clamp(start: float, end: float, duration: float) -> tuple[float, float]:
    """Both times rounded once, to the millisecond, and never past the end (rounded down, lest rounding pass it)."""
    last = int(duration * 1000) / 1000
    start = min(max(round(start, 3), 0.0), last)
    return start, min(max(round(end, 3), start), last)
