"""Where to cut a recording into pieces that can be transcribed side by side: at its pauses, so that no word is cut.

Knows no model and no thread: who transcribes the pieces, and puts what comes of them in order, is further out.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from whisper_worker.audio import SAMPLE_RATE, Samples
from whisper_worker.speech import FRAME, MIN_S, Heard, Span, Speech

MIN_REST = SAMPLE_RATE  # samples; a seam is no place to cut when less than this is left behind it
LONG_PAUSE = SAMPLE_RATE * 3 // 5 // FRAME  # frames; a sentence ends there: a longer one is no better place to cut


@dataclass(frozen=True)
class Piece:
    """A part of a recording that is transcribed on its own. `index` counts from 0, in the recording's order."""

    index: int
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """Of audio in its spans, without what lies between them."""
        return sum(map(len, self.spans)) / SAMPLE_RATE

    def speech(self, samples: Samples) -> Speech:
        """What the model hears of it, copied out of the recording's `samples`."""
        joined = np.concatenate([samples[span.start : span.end] for span in self.spans])
        if len(self.spans) == 1 and self.spans[0].start == 0:
            return Speech(joined)
        return Speech(joined, [{"start": span.start, "end": span.end} for span in self.spans])


@dataclass(frozen=True)
class Track:
    """What is transcribed of one channel of a recording: the `pieces` of its `samples`. `channel` None: of the mix."""

    samples: Samples
    pieces: tuple[Piece, ...]
    channel: int | None = None

    @property
    def speech_s(self) -> float:
        """Seconds in its pieces."""
        return sum(piece.seconds for piece in self.pieces)

    @property
    def is_spoken(self) -> bool:
        """Whether that is enough to be speech."""
        return self.speech_s >= MIN_S


def whole(samples: Samples) -> list[Piece]:
    """All of a recording as one piece; none without a sample."""
    return [Piece(0, spans)] if (spans := _everything(samples)) else []


def cut(heard: Heard, max_s: float, *, keep_silence: bool) -> list[Piece]:
    """The pieces of a recording, in order, each of at most `max_s` seconds; `max_s` is 3 or more.

    Together they hold every sample of `heard.spans` once and nothing else, or with `keep_silence` of all of the
    recording. What fits in one piece is one; else all but the last two are at least half full, and these have a second
    or more. Without speech, or without a sample, there are none.
    """
    line = _Line(_everything(heard.samples) if keep_silence else heard.spans)
    longest = int(max_s * SAMPLE_RATE)
    cuts = [0]
    while line.length - cuts[-1] > longest:
        cuts.append(_next_cut(line, heard, cuts[-1], longest))
    if line.length:
        cuts.append(line.length)
    return [Piece(index, line.between(*ends)) for index, ends in enumerate(pairwise(cuts))]


def _everything(samples: Samples) -> tuple[Span, ...]:
    return (Span(0, len(samples)),) if len(samples) else ()


def _next_cut(line: "_Line", heard: Heard, begin: int, longest: int) -> int:
    """Where the piece that begins at sample `begin` of the line ends.

    A seam is best. Without one, a pause in the second half of what is allowed, and of two thirds of what is left:
    31 s become 15 and 16, not 30 and 1.
    """
    left = line.length - begin
    latest = min(longest, left * 2 // 3)
    earliest = latest // 2
    seam = line.last_seam(begin + min(longest, left - MIN_REST))
    if seam >= begin + earliest:
        return seam
    shift = line.shift(begin + earliest)
    return _pause(heard, begin + earliest + shift, begin + latest + shift) - shift


def _pause(heard: Heard, begin: int, end: int) -> int:
    """The sample from `begin` to `end` of the recording at which a cut does least harm.

    The middle of the longest pause, or shortly before speech goes on after the last of several long ones. When nobody
    pauses, where speech is least certain: the mean of three frames finds gaps between words better than one, or ten.
    """
    first = begin // FRAME
    frames = heard.probabilities[first : end // FRAME + 1]
    pauses = np.flatnonzero(np.diff(frames < heard.silent, prepend=False, append=False)).reshape(-1, 2).tolist()
    if pauses:
        length, resumes = max((min(after - start, LONG_PAUSE), after) for start, after in pauses)
        place = resumes - length / 2
    else:
        place = np.convolve(frames, np.ones(3), "valid").argmin() + 1.5
    return min(max(int((first + place) * FRAME), begin), end)


@dataclass(frozen=True)
class _Line:
    """Spans one behind the other, as if there were nothing between them. A seam is where one of them ends."""

    spans: tuple[Span, ...]

    @cached_property
    def seams(self) -> list[int]:
        return list(accumulate(map(len, self.spans)))

    @property
    def length(self) -> int:
        """Samples."""
        return self.seams[-1] if self.seams else 0

    def last_seam(self, place: int) -> int:
        """The last one not after `place`; 0 if there is none."""
        before = bisect_right(self.seams, place)
        return self.seams[before - 1] if before else 0

    def shift(self, place: int) -> int:
        """What to add to a place in the span that holds `place`, for its sample in the recording."""
        return self._shift(bisect_right(self.seams, place))

    def between(self, begin: int, end: int) -> tuple[Span, ...]:
        """The samples from `begin` to before `end`, as spans of the recording."""
        touched = range(bisect_right(self.seams, begin), bisect_left(self.seams, end) + 1)
        return tuple(self._part(index, begin, end) for index in touched)

    def _part(self, index: int, begin: int, end: int) -> Span:
        span, shift = self.spans[index], self._shift(index)
        return Span(max(span.start, begin + shift), min(span.end, end + shift))

    def _shift(self, index: int) -> int:
        return self.spans[index].end - self.seams[index]
