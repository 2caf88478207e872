"""Transcript → the job's output: the official worker's fields and ours, as strictly valid JSON of a size that arrives.

RunPod drops a reply that can't be encoded or has too many bytes, and the caller waits for it until the job times out:
`checked` makes an error of those.
"""

import json
from dataclasses import dataclass
from typing import Any

from whisper_worker.errors import ResultTooLarge
from whisper_worker.formats import FORMATS
from whisper_worker.request import Request
from whisper_worker.transcript import Segment, Transcript


@dataclass(frozen=True)
class Facts:
    """What the reply says besides the text. Durations in seconds."""

    model: str
    device: str
    duration: float
    duration_after_vad: float
    warnings: tuple[str, ...]


def build(request: Request, transcript: Transcript, translation: Transcript | None, facts: Facts) -> dict[str, Any]:
    """The output for one job, in plain Python types; `timings` are added by the service when they are complete."""
    output = {
        "segments": [_segment(segment) for segment in transcript.segments],
        "detected_language": transcript.language,
        "language_probability": transcript.language_probability,
        "transcription": FORMATS[request.transcription](transcript.segments),
        "translation": FORMATS[request.translation](translation.segments) if translation else None,
        "device": facts.device,
        "model": facts.model,
        "duration": round(facts.duration, 3),
        "duration_after_vad": round(facts.duration_after_vad, 3),
        "warnings": list(facts.warnings),
    }
    if request.word_timestamps:
        output["word_timestamps"] = [
            {"word": word.word, "start": word.start, "end": word.end}
            for segment in transcript.segments
            for word in segment.words or ()
        ]
    return output


def checked(output: dict[str, Any], max_bytes: int) -> dict[str, Any]:
    """The output as it is. Raises ResultTooLarge, or ValueError or TypeError when JSON can't hold it (NaN, numpy)."""
    size = len(json.dumps({"output": output}, ensure_ascii=False, allow_nan=False).encode())
    if size > max_bytes:
        raise ResultTooLarge(f"the result has {size} bytes, {max_bytes} fit into a reply: send the audio in parts")
    return output


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "id": segment.id,
        "seek": segment.seek,
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }
