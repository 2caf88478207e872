"""Who speaks when in a recording (Silero VAD, as faster-whisper ships it), and the way back to the recording's times.

Voice activity detection runs once for each job, on the media pool; what of it the model then hears, `pieces` decides.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import faster_whisper.transcribe as fw
import numpy as np
from faster_whisper.vad import get_vad_model
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from whisper_worker.audio import SAMPLE_RATE, Samples
from whisper_worker.request import VadParameters
from whisper_worker.stop import Stop

FRAME = 512  # samples for which the detector gives one probability of speech: 32 ms
LOOK_BACK = 64  # samples before a frame that it sees too
BLOCK = 256  # frames in one run of it: 8 s, some MB. More take memory and save no time
BLOCKS_AT_ONCE = 8  # before another recording has its turn
DEFAULTS = VadParameters()

MIN_S = 0.1  # less than this isn't speech: the model invents text for it, and word alignment once crashed on it
SNAP_S = 0.5  # a segment that reaches so little into the next stretch of speech belongs to its own
LOUD = 0.5  # amplitude to which quiet recordings are raised for the detector, which is deaf to whispering levels
MAX_GAIN = 1000.0
GAUGED = 500_000  # samples, about, that tell how loud a recording is

Probabilities = NDArray[np.float32]


@dataclass(frozen=True)
class Span:
    """The samples from `start` to before `end` of a recording."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Heard:
    """A recording and where speech is in it.

    `samples`: the recording itself, float32, shape (n,). `probabilities`: that of speech for each `FRAME` of it, the
    last padded; float32, shape (ceil(n / FRAME),). `spans`: the stretches of speech in order; they may touch, and don't
    overlap. `silent`: the probability below which a frame is taken for silence.
    """

    samples: Samples
    probabilities: Probabilities
    spans: tuple[Span, ...]
    silent: float = DEFAULTS.silent


@dataclass(frozen=True)
class Speech:
    """What the model hears of a recording.

    `samples`: float32, shape (n,), stretches of the recording joined. `chunks`: their start and end samples in the file
    (the shape of faster-whisper's VAD), or None for one stretch from the file's start.
    """

    samples: Samples
    chunks: list[dict[str, int]] | None = None

    @property
    def duration(self) -> float:
        """Seconds."""
        return len(self.samples) / SAMPLE_RATE

    @property
    def is_empty(self) -> bool:
        return self.duration < MIN_S

    def in_file_time(self, segments: Iterable[fw.Segment]) -> Iterator[fw.Segment]:
        """The segments, whose times count from the start of `samples`, with the times of the recording.

        The model gives ends, even whole segments, past the end of what it hears, where another piece may follow:
        such ends are clamped, such segments dropped.
        """
        inside = (_clamp(s, self.duration) for s in segments if s.start < self.duration)
        if not self.chunks:
            return inside
        lengths = (chunk["end"] - chunk["start"] for chunk in self.chunks[:-1])
        seams = [samples / SAMPLE_RATE for samples in accumulate(lengths)]
        return iter(fw.restore_speech_timestamps((_snap(s, seams) for s in inside), self.chunks, SAMPLE_RATE))


def listen(samples: Samples, stop: Stop, vad: VadParameters = DEFAULTS) -> Heard:
    """Run the detector over a recording, block by block; `stop` is read before each. Raises Stopped.

    Takes a few MB beside `samples`, however long they are.
    """
    listener = Listener(samples, vad)
    while not listener.is_done:
        listener.go_on(stop)
    return listener.heard


class Listener:
    """The detector on its way through a recording: some blocks at a time, so that several recordings can take turns."""

    def __init__(self, samples: Samples, vad: VadParameters = DEFAULTS) -> None:
        self._samples = samples
        self._vad = vad
        self._probabilities: Probabilities = np.empty(-(-len(samples) // FRAME), np.float32)
        self._done = 0  # frames
        self._gain: np.float32 | None = None
        self._hidden = self._cell = np.zeros((1, 1, 128), np.float32)

    @property
    def is_done(self) -> bool:
        return self._done == len(self._probabilities)

    def go_on(self, stop: Stop) -> None:
        """With the next `BLOCKS_AT_ONCE`; takes tenths of a second. `stop` is read before each. Raises Stopped."""
        detect = get_vad_model().session.run
        if self._gain is None:
            self._gain = _gain(self._samples)
        for _ in range(BLOCKS_AT_ONCE):
            stop.check()
            first, last = self._done, min(self._done + BLOCK, len(self._probabilities))
            if first == last:
                return
            given = {"input": _frames(self._samples, first, last) * self._gain, "h": self._hidden, "c": self._cell}
            self._probabilities[first:last], self._hidden, self._cell = detect(None, given)
            self._done = last

    @property
    def heard(self) -> Heard:
        """Once it is done."""
        spans = find_spans(self._probabilities, len(self._samples), self._vad)
        return Heard(self._samples, self._probabilities, spans, self._vad.silent)


def find_spans(probabilities: Probabilities, length: int, vad: VadParameters = DEFAULTS) -> tuple[Span, ...]:
    """The stretches of speech in a recording of `length` samples, as faster-whisper has it.

    `max_speech_duration_s` isn't read: how long speech is cut, `pieces` decides.
    """
    turns = ((start * FRAME, min(end * FRAME, length)) for start, end in _turns(probabilities, vad))
    shortest = _samples(vad.min_speech_duration_ms)
    return tuple(_padded([(start, end) for start, end in turns if end - start > shortest], length, vad))


def _turns(probabilities: Probabilities, vad: VadParameters) -> Iterator[tuple[int, int]]:
    """Of each stretch of speech its first frame, and the frame at which the long pause behind it begins."""
    pause = _samples(vad.min_silence_duration_ms)
    spoken = [*np.flatnonzero(probabilities >= vad.threshold).tolist(), len(probabilities)]
    start = spoken[0]
    for here, there in pairwise(spoken):
        if there - here > 1 and (there - here) * FRAME > pause:
            silent = here + np.flatnonzero(probabilities[here:there] < vad.silent)
            if len(silent) and (silent[-1] - silent[0]) * FRAME >= pause:
                yield start, int(silent[0])
                start = there
    if start < len(probabilities):
        yield start, len(probabilities)


def _padded(turns: list[tuple[int, int]], length: int, vad: VadParameters) -> Iterator[Span]:
    """With what belongs to them around them; where there isn't enough for two of them, each gets half."""
    padding = _samples(vad.speech_pad_ms)
    gaps = [there - here for (_, here), (there, _) in pairwise(turns)]
    shares = [gap // 2 if gap < 2 * padding else padding for gap in gaps]
    for (start, end), before, behind in zip(turns, [padding, *shares], [*shares, padding], strict=False):
        yield Span(max(start - before, 0), min(end + behind, length))


def _samples(milliseconds: int) -> int:
    return milliseconds * SAMPLE_RATE // 1000


def _frames(samples: Samples, first: int, last: int) -> Samples:
    """The frames from `first` to before `last`, each with the samples it looks back on: (frames, LOOK_BACK + FRAME)."""
    start, end = first * FRAME - LOOK_BACK, last * FRAME
    missing = max(-start, 0), max(end - len(samples), 0)
    stretch = np.pad(samples[max(start, 0) : end], missing)
    return sliding_window_view(stretch, LOOK_BACK + FRAME)[::FRAME]


def _gain(samples: Samples) -> np.float32:
    if not len(samples):
        return np.float32(1.0)
    step = len(samples) // GAUGED | 1  # odd, lest it meet mains hum (320 samples at 50 Hz) always at the same point
    loud = float(np.percentile(np.abs(samples[::step]), 99.9))
    return np.float32(min(max(LOUD / loud, 1.0), MAX_GAIN) if loud else 1.0)


def _clamp(segment: fw.Segment, duration: float) -> fw.Segment:
    segment.end = min(segment.end, duration)
    for word in segment.words or ():
        word.start, word.end = min(word.start, duration), min(word.end, duration)
    return segment


def _snap(segment: fw.Segment, seams: list[float]) -> fw.Segment:
    """Keep a segment on its side of a seam: an end just past one would come out behind the silence taken out there."""
    for seam in seams:
        if segment.start < seam < segment.end:
            if segment.end - seam < SNAP_S and segment.end - seam < seam - segment.start:
                segment.end = seam
            elif seam - segment.start < SNAP_S:
                segment.start = seam
    return segment
