"""Which parts of a recording hold speech (Silero VAD, as faster-whisper ships it), and the way back to its times.

Voice activity detection runs once for each job, on the media pool; the model then hears only what is left.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import faster_whisper.transcribe as fw
import numpy as np
from faster_whisper.vad import VadOptions, collect_chunks, get_speech_timestamps

from whisper_worker.audio import SAMPLE_RATE, Samples

# onnxruntime, which runs the detector, reports its use to its maker over the network unless told not to before it is
# imported (by faster-whisper, at the first detection). Other people's recordings are nobody's business.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

MIN_S = 0.1  # less than this isn't speech: the model invents text for it, and word alignment once crashed on it
SNAP_S = 0.5  # a segment that reaches so little into the next stretch of speech belongs to its own
LOUD = 0.5  # amplitude to which quiet recordings are raised for the detector, which is deaf to whispering levels
MAX_GAIN = 1000.0


@dataclass(frozen=True)
class Speech:
    """What the model hears of a recording.

    `samples`: float32, shape (n,), the stretches of speech joined. `chunks`: their start and end samples in the file
    (the shape of faster-whisper's VAD), or None when nothing was taken out.
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
        """The segments, whose times count from the start of `samples`, with the times of the recording."""
        if not self.chunks:
            return iter(segments)
        lengths = (chunk["end"] - chunk["start"] for chunk in self.chunks[:-1])
        seams = [samples / SAMPLE_RATE for samples in accumulate(lengths)]
        return iter(fw.restore_speech_timestamps((_snap(s, seams) for s in segments), self.chunks, SAMPLE_RATE))


def whole(samples: Samples) -> Speech:
    """All of it, unheard."""
    return Speech(samples)


def find_speech(samples: Samples) -> Speech:
    """The stretches of speech with faster-whisper's default options; none at all is an empty `Speech`."""
    if not len(samples):
        return Speech(samples)
    chunks = get_speech_timestamps(samples * _gain(samples), VadOptions())
    if not chunks:
        return Speech(samples[:0])
    return Speech(np.concatenate(collect_chunks(samples, chunks)[0]), chunks)


def _gain(samples: Samples) -> np.float32:
    loud = float(np.percentile(np.abs(samples), 99.9))
    return np.float32(min(max(LOUD / loud, 1.0), MAX_GAIN) if loud else 1.0)


def _snap(segment: fw.Segment, seams: list[float]) -> fw.Segment:
    """Keep a segment on its side of a seam: an end just past one would come out behind the silence taken out there."""
    for seam in seams:
        if segment.start < seam < segment.end:
            if segment.end - seam < SNAP_S and segment.end - seam < seam - segment.start:
                segment.end = seam
            elif seam - segment.start < SNAP_S:
                segment.start = seam
    return segment
