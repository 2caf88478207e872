"""What the worker makes: words, segments, a transcript. Plain values, all times in seconds of the caller's file."""

from collections.abc import Iterable, Sequence
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
    """What the model makes of a part of a file, in the file's times. `translated`: in English, where asked for.

    `until`: with those before it, no segment is missing up to this second; the translation may be.
    """

    segments: tuple[Segment, ...] = ()
    translated: tuple[Segment, ...] = ()
    language: Language | None = None
    until: float = 0.0

    def shifted(self, frames: int) -> "Said":
        """With places in the audio that the model heard (`Segment.seek`) so much later."""
        segments, translated = (
            tuple(replace(segment, seek=segment.seek + frames) for segment in part)
            for part in (self.segments, self.translated)
        )
        return replace(self, segments=segments, translated=translated)


class Growing:
    """The transcript and the translation of a file of `duration` seconds, which grow by a part at a time, in order.

    What has been added is final: later parts change nothing in it, and come behind it. `until`: up to this second it
    is complete.
    """

    def __init__(self, duration: float, said: Iterable[Said] = ()) -> None:
        self.duration = duration
        self.until = 0.0
        self._language: Language | tuple[None, None] = None, None
        self._segments: list[Segment] = []
        self._translated: list[Segment] = []
        for part in said:
            self.add(part)

    def add(self, said: Said) -> tuple[Segment, ...]:
        """The segments of the transcript that are new."""
        if said.language and not self._language[0]:
            self._language = said.language
        self.until = max(self.until, min(said.until, self.duration))
        new = within(said.segments, self.duration, after=self._segments)
        self._segments += new
        self._translated += within(said.translated, self.duration, after=self._translated)
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


def within(segments: Iterable[Segment], duration: float, after: Sequence[Segment] = ()) -> tuple[Segment, ...]:
    """The segments that lie inside a file of `duration` seconds, in order, numbered, behind those `after` which they
    come.

    The model believes in windows of 30 s: on short files it gives ends, even whole segments, past the end of the
    audio. Such ends are clamped, such segments dropped, and `start <= end` holds for segments and words alike.
    """
    kept: list[Segment] = []
    earliest = after[-1].start if after else 0.0
    for segment in sorted(segments, key=lambda s: s.start):
        if segment.start >= duration:
            continue
        start, end = _clamp(max(segment.start, earliest), segment.end, duration)
        words = segment.words and tuple(_word_within(word, duration) for word in segment.words)
        kept.append(replace(segment, id=len(after) + len(kept) + 1, start=start, end=end, words=words))
    return tuple(kept)


def _word_within(word: Word, duration: float) -> Word:
    start, end = _clamp(word.start, word.end, duration)
    return replace(word, start=start, end=end)


def _clamp(start: float, end: float, duration: float) -> tuple[float, float]:
    """Both times rounded once, to the millisecond, and never past the end (rounded down, lest rounding pass it)."""
    last = int(duration * 1000) / 1000
    start = min(max(round(start, 3), 0.0), last)
    return start, min(max(round(end, 3), start), last)
