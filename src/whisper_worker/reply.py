"""Transcript → the job's output: the official worker's fields and ours, as strictly valid JSON of a size that arrives.

RunPod drops a reply that can't be encoded or has too many bytes, and the caller waits for it until the job times out:
`fitting` makes an error of those.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whisper_worker.errors import ResultTooLarge, WorkerError
from whisper_worker.formats import FORMATS
from whisper_worker.request import Request
from whisper_worker.transcript import Growing, Segment, Transcript

Json = dict[str, Any]

STREAMED = ("segments", "word_timestamps")  # what a stream's result doesn't repeat
DETAILS = "left out, for the reply to arrive: tokens and word_timestamps"


@dataclass(frozen=True)
class Facts:
    """What the reply says besides the text. Durations in seconds."""

    model: str
    device: str
    duration: float
    duration_after_vad: float
    warnings: tuple[str, ...]


def build(request: Request, transcript: Transcript, translation: Transcript | None, facts: Facts) -> Json:
    """The output for one job, in plain Python types; `timings` are added by the service when they are complete."""
    return {
        **timed(request, transcript.segments),
        **_language((transcript.language, transcript.language_probability)),
        "transcription": FORMATS[request.transcription](transcript.segments),
        "translation": FORMATS[request.translation](translation.segments) if translation else None,
        **_facts(facts),
    }


def timed(request: Request, segments: Sequence[Segment]) -> Json:
    """All that has times: the segments, and where asked for their words."""
    output: Json = {"segments": [_segment(segment) for segment in segments]}
    if request.word_timestamps:
        output["word_timestamps"] = [
            {"word": word.word, "start": word.start, "end": word.end}
            for segment in segments
            for word in segment.words or ()
        ]
    return output


def partial(request: Request, so_far: Growing) -> Json:
    """What a job that is broken off has done."""
    transcript = so_far.transcript
    return {
        "seconds_done": round(so_far.until, 3),
        "seconds_total": round(so_far.duration, 3),
        **_language((transcript.language, transcript.language_probability)),
        "transcription": FORMATS[request.transcription](transcript.segments),
        **timed(request, transcript.segments),
    }


def info_item(facts: Facts, language: tuple[str | None, float | None]) -> Json:
    """A stream's first item."""
    return {"type": "info", **_language(language), **_facts(facts)}


def segments_item(request: Request, segments: Sequence[Segment]) -> Json:
    return {"type": "segments", **timed(request, segments)}


def result_item(output: Json) -> Json:
    """A stream's last item, of a job's output."""
    return {"type": "result", **{name: value for name, value in output.items() if name not in STREAMED}}


def error_item(error: str) -> Json:
    """A stream's last item when the job fails. It has no field `error`: RunPod's SDK would drop it from the stream."""
    code, _, message = error.partition(": ")
    return {"type": "error", "code": code, "message": message}


def encoded(output: Any) -> bytes:
    """As JSON. Raises ValueError or TypeError when JSON can't hold it (NaN, numpy)."""
    return json.dumps(output, ensure_ascii=False, allow_nan=False).encode()


def size(output: Any) -> int:
    """Bytes of JSON. Raises what `encoded` raises."""
    return len(encoded(output))


def fitting(output: Json, max_bytes: int) -> Json:
    """The output, without its details when it is too large. Raises ResultTooLarge, and what `size` raises."""
    if size({"output": output}) <= max_bytes:
        return output
    smaller = without_details(output)
    if (bytes_ := size({"output": smaller})) <= max_bytes:
        return smaller
    raise ResultTooLarge(f"the result has {bytes_} bytes, {max_bytes} fit into a reply: send the audio in parts")


def of_error(error: WorkerError, so_far: Json | None, max_bytes: int) -> Json:
    """The output of a failed job, with what it had done, as far as that fits."""
    if so_far is None:
        return error.reply
    for part in (so_far, without_details(so_far), {**so_far, "segments": [], "word_timestamps": []}):
        output = {**error.reply, "partial": part}
        if size({"output": output}) <= max_bytes:
            return output
    return error.reply


def without_details(output: Json) -> Json:
    """The same text in fewer bytes: what most callers can do without is left out, and `warnings` say so."""
    smaller = {name: value for name, value in output.items() if name != "word_timestamps"}
    if "segments" in output:
        smaller["segments"] = [{**segment, "tokens": []} for segment in output["segments"]]
    return {**smaller, "warnings": [*output.get("warnings", ()), DETAILS]}


def _facts(facts: Facts) -> Json:
    return {
        "device": facts.device,
        "model": facts.model,
        "duration": round(facts.duration, 3),
        "duration_after_vad": round(facts.duration_after_vad, 3),
        "warnings": list(facts.warnings),
    }


def _language(language: tuple[str | None, float | None]) -> Json:
    return {"detected_language": language[0], "language_probability": language[1]}


def _segment(segment: Segment) -> Json:
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
