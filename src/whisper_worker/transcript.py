"""What the worker makes: words, segments, a transcript. Plain values, all times in seconds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Task = Literal["transcribe", "translate"]
"""What a text is made by: in the language spoken, or English."""


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
    are those of the model's vocabulary, timestamp tokens included. `words` is None unless they were asked for,
    `language` (a code) unless it may change, `channel` (from 0) unless each is transcribed apart.
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
    language: str | None = None
    channel: int | None = None


@dataclass(frozen=True)
class Language:
    """A language by its code, with its probability; `likely`: the most probable ones with theirs, best first.

    `is_sure`: that among those in question it is this one; more audio wouldn't tell better.
    """

    code: str
    probability: float
    likely: tuple[tuple[str, float], ...]
    is_sure: bool = True

    @classmethod
    def given(cls, code: str) -> "Language":
        """One that isn't detected but told."""
        return cls(code, 1.0, ((code, 1.0),))


@dataclass(frozen=True)
class Transcript:
    """All segments of one recording in order, in the file's times. Without speech there are none, and no language.

    `duration`: seconds of the recording. `task` translate: the text is English, whatever the language spoken.
    """

    segments: tuple[Segment, ...]
    language: Language | None
    duration: float
    task: Task = "transcribe"


@dataclass(frozen=True)
class Said:
    """What the model makes of a part of a recording, in times from its start. `translated`: in English, where asked.

    `until`: with those before it, no segment of its channel is missing up to this second; the translation may be.
    """

    segments: tuple[Segment, ...] = ()
    translated: tuple[Segment, ...] = ()
    language: Language | None = None
    until: float = 0.0
    channel: int | None = None

    def shifted(self, frames: int) -> "Said":
        """With places in the audio that the model heard (`Segment.seek`) so much later."""
        segments, translated = (
            tuple(replace(segment, seek=segment.seek + frames) for segment in part)
            for part in (self.segments, self.translated)
        )
        return replace(self, segments=segments, translated=translated)


class Growing:
    """The transcript and the translation of a recording of `duration` seconds, which grow by a part at a time.

    The parts of each channel come in order. What has been added is final: later parts change nothing in it, and come
    behind it; so what one channel says is held back until the others have come as far. `until`: up to this second it is
    complete. `offset`: where in the file the recording begins; the segments given have the file's times.
    """

    def __init__(
        self,
        duration: float,
        said: Iterable[Said] = (),
        *,
        offset: float = 0.0,
        channels: Sequence[int | None] = (None,),
        task: Task = "transcribe",
    ) -> None:
        self.duration = duration
        self._task = task
        self._offset = offset
        self._tracks = {channel: _Track() for channel in channels}
        self._language: Language | None = None
        self._segments: list[Segment] = []
        self._held_back: list[Segment] = []
        for part in said:
            self.add(part)

    def add(self, said: Said) -> tuple[Segment, ...]:
        """The segments of the transcript that are new."""
        self._language = self._language or said.language
        track = self._tracks[said.channel]
        track.until = max(track.until, min(said.until, self.duration))
        self._held_back += track.segments.add(said.segments, self.duration, said.channel)
        track.translated.add(said.translated, self.duration, said.channel)
        return self._release()

    def end(self) -> tuple[Segment, ...]:
        """No more will come. The segments that are new, those that were held back."""
        for track in self._tracks.values():
            track.until = self.duration
        return self._release()

    @property
    def until(self) -> float:
        """Seconds from the recording's start."""
        return min((track.until for track in self._tracks.values()), default=self.duration)

    @property
    def language(self) -> Language | None:
        return self._language

    @property
    def transcript(self) -> Transcript:
        return Transcript(tuple(self._segments), self._language, self.duration, self._task)

    @property
    def translation(self) -> Transcript:
        translated = [segment for track in self._tracks.values() for segment in track.translated.all]
        return Transcript(tuple(self._numbered(_in_order(translated), 1)), self._language, self.duration, "translate")

    def tail(self, characters: int) -> str:
        """The end of the text so far."""
        text = ""
        for segment in reversed(self._segments):
            text = segment.text + text
            if len(text) >= characters:
                break
        return text[-characters:].strip()

    def _release(self) -> tuple[Segment, ...]:
        until = self.until if len(self._tracks) > 1 else self.duration
        waiting = _in_order(self._held_back)
        new = self._numbered((s for s in waiting if s.start <= until), len(self._segments) + 1)
        self._held_back = [segment for segment in waiting if segment.start > until]
        self._segments += new
        return tuple(new)

    def _numbered(self, segments: Iterable[Segment], first: int) -> list[Segment]:
        """With their ids, and the file's times."""
        return [_later(replace(s, id=number), self._offset) for number, s in enumerate(segments, start=first)]


class _Row:
    """Segments of one channel, in order."""

    def __init__(self) -> None:
        self.all: list[Segment] = []

    def add(self, segments: Iterable[Segment], duration: float, channel: int | None) -> list[Segment]:
        """Those that are new."""
        new = [replace(segment, channel=channel) for segment in within(segments, duration, after=self.all)]
        self.all += new
        return new


class _Track:
    """One channel: what is said in it, and up to where."""

    def __init__(self) -> None:
        self.until = 0.0
        self.segments = _Row()
        self.translated = _Row()


def within(segments: Iterable[Segment], duration: float, after: Sequence[Segment] = ()) -> tuple[Segment, ...]:
    """The segments that lie inside a recording of `duration` seconds, in order, numbered, behind those `after` which
    they come.

    The model believes in windows of 30 s: on short files it gives ends, even whole segments, past the end of the
    audio. Such ends are clamped, such segments dropped, and `start <= end` holds for segments and words alike.
    """
    kept: list[Segment] = []
    earliest = after[-1].start if after else 0.0
    for segment in _in_order(segments):
        if segment.start >= duration:
            continue
        start, end = _clamp(max(segment.start, earliest), segment.end, duration)
        words = segment.words and tuple(_word_within(word, duration) for word in segment.words)
        kept.append(replace(segment, id=len(after) + len(kept) + 1, start=start, end=end, words=words))
    return tuple(kept)


def _in_order(segments: Iterable[Segment]) -> list[Segment]:
    return sorted(segments, key=lambda segment: segment.start)


def _later(segment: Segment, seconds: float) -> Segment:
    """The segment and its words, so much later; rounded again, to the millisecond."""
    if not seconds:
        return segment
    words = segment.words and tuple(
        replace(word, start=round(word.start + seconds, 3), end=round(word.end + seconds, 3)) for word in segment.words
    )
    start, end = round(segment.start + seconds, 3), round(segment.end + seconds, 3)
    return replace(segment, start=start, end=end, words=words)


def _word_within(word: Word, duration: float) -> Word:
    start, end = _clamp(word.start, word.end, duration)
    return replace(word, start=start, end=end)


def _clamp(start: float, end: float, duration: float) -> tuple[float, float]:
    """Both times rounded once, to the millisecond, and never past the end (rounded down, lest rounding pass it)."""
    last = int(duration * 1000) / 1000
    start = min(max(round(start, 3), 0.0), last)
    return start, min(max(round(end, 3), start), last)
