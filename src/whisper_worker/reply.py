"""Transcript → the job's output (`output` says what is in it), as strictly valid JSON of a size that arrives.

RunPod drops a reply that can't be encoded or has too many bytes, and the caller waits for it until the job times out:
what is too large is stored elsewhere (`files`, `stored`), loses its details, or becomes an error (`fitting`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from whisper_worker.errors import ResultTooLarge, WorkerError
from whisper_worker.formats import FORMATS, Layout, render, segment_dict
from whisper_worker.output import (
    DetectionOutput,
    FactsOutput,
    LanguageOutput,
    PartialOutput,
    SeveralOutput,
    Text,
    TextOutput,
    TranscriptOutput,
    WordOutput,
)
from whisper_worker.request import Request
from whisper_worker.storage import File
from whisper_worker.transcript import Growing, Language, Segment, Transcript, Word

Json = dict[str, Any]

STREAMED = ("segments", "word_timestamps")  # what a stream's result doesn't repeat
DETAILS = "left out, for the reply to arrive: tokens and word_timestamps"
SEGMENTS = "left out, for the reply to arrive: segments"
TEXTS = ("transcription", "translation")  # empty when they are stored, and each of the others isn't there
TEXTS_IN_FORMATS = ("outputs", "translation_outputs")
TEXT_START = 200  # characters


@dataclass(frozen=True)
class Facts:
    """What the reply says besides the text. Durations in seconds."""

    model: str
    device: str
    duration: float
    duration_after_vad: float
    warnings: tuple[str, ...]


def build(request: Request, transcript: Transcript, translation: Transcript | None, facts: Facts) -> TranscriptOutput:
    """The output for one file, in plain Python types. `transcript` is a translation with `task: translate`."""
    layout = _layout(request)
    text = render(request.transcription, transcript, layout) if request.wants_transcription else None
    if not request.wants_transcription:
        translation = transcript
    said: TextOutput = {
        "segments": _segments(transcript.segments),
        "transcription": text,
        "translation": render(request.translation, translation, layout) if translation else None,
    }
    if request.word_timestamps:
        said["word_timestamps"] = _words(transcript.segments)
    if request.formats:
        said["outputs"] = _in_formats(request.formats, transcript, layout)
        if translation and request.wants_transcription:
            said["translation_outputs"] = _in_formats(request.formats, translation, layout)
    return cast(TranscriptOutput, {**said, **_language(transcript.language), **_facts(facts)})


def detection(language: Language | None, facts: Facts) -> DetectionOutput:
    return {**_language(language), **_facts(facts)}


def several(results: Sequence[Mapping[str, Any]], facts: Facts) -> SeveralOutput:
    """The output for several files, of theirs."""
    return cast(SeveralOutput, {"results": list(results), **_facts(facts)})


def partial(request: Request, so_far: Growing) -> PartialOutput:
    """What had been done of a file whose job is broken off."""
    transcript = so_far.transcript
    language = _language(transcript.language)
    output: PartialOutput = {
        "seconds_done": round(so_far.until, 3),
        "seconds_total": round(so_far.duration, 3),
        "detected_language": language["detected_language"],
        "language_probability": language["language_probability"],
        "language_probabilities": language["language_probabilities"],
        "segments": _segments(transcript.segments),
    }
    if request.wants_transcription:
        output["transcription"] = render(request.transcription, transcript, _layout(request))
    else:
        output["translation"] = render(request.translation, transcript, _layout(request))
    if request.word_timestamps:
        output["word_timestamps"] = _words(transcript.segments)
    return output


def info_item(facts: Facts, language: Language | None, audio: int | None = None) -> Json:
    """A stream's first item; of the `audio`th of several files."""
    return {"type": "info", **_which(audio), **_language(language), **_facts(facts)}


def segments_item(request: Request, segments: Sequence[Segment], audio: int | None = None) -> Json:
    words: Json = {"word_timestamps": _words(segments)} if request.word_timestamps else {}
    return {"type": "segments", **_which(audio), "segments": _segments(segments), **words}


def result_item(output: Mapping[str, Any]) -> Json:
    """A stream's last item, of a job's output."""
    return {"type": "result", **_each(output, _without_streamed)}


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


def fits(output: Mapping[str, Any], max_bytes: int) -> bool:
    """Whether it can be a reply. Raises what `encoded` raises."""
    return size({"output": output}) <= max_bytes


def fitting(output: Json, max_bytes: int) -> Json:
    """The output, without its details when it is too large. Raises ResultTooLarge, and what `encoded` raises."""
    if fits(output, max_bytes):
        return output
    smaller = without_details(output)
    if fits(smaller, max_bytes):
        return smaller
    raise ResultTooLarge(
        f"the result has {size(output)} bytes, still {size(smaller)} without tokens and words, and {max_bytes} "
        "fit into a reply: name an upload_url or an s3Config, or send the audio in parts"
    )


def files(request: Request, output: Mapping[str, Any]) -> Iterator[File]:
    """What is stored of an output: all of it as JSON, and each text in the formats asked for."""
    yield File("result.json", encoded(output), "application/json")
    results = output.get("results")
    for folder, result in [("", output)] if results is None else [(f"{i}/", each) for i, each in enumerate(results)]:
        for text, name, others in (
            ("transcription", request.transcription, "outputs"),
            ("translation", request.translation, "translation_outputs"),
        ):
            if result.get(text) is not None:
                texts = {name: result[text], **result.get(others, {})}
                if text == "translation" and result.get("transcription") is None:
                    texts = {**texts, **result.get("outputs", {})}
                yield from (_file(folder + text, format, content) for format, content in texts.items())


def stored(output: Json, links: Mapping[str, str]) -> Json:
    """The reply for an output that is stored under these links."""
    return {**_each(output, _summarised), "stored": dict(links), "bytes": size(output)}


def of_error(error: WorkerError, so_far: Json | None, max_bytes: int) -> Json:
    """The output of a failed job, with what it had done, as far as that fits."""
    if so_far is None:
        return error.reply
    smaller = without_details(so_far)
    smallest = {**_each(so_far, _without_segments), "warnings": [*so_far.get("warnings", ()), SEGMENTS]}
    for part in (so_far, smaller, smallest):
        output = {**error.reply, "partial": part}
        if fits(output, max_bytes):
            return output
    return error.reply


def without_details(output: Json) -> Json:
    """The same text in fewer bytes: what most callers can do without is left out, and `warnings` say so."""
    return {**_each(output, _without_details), "warnings": [*output.get("warnings", ()), DETAILS]}


def _each(output: Mapping[str, Any], act: Any) -> Json:
    """The output with `act` done to what it holds for each file: all of an output, or what there is beside an error."""
    if "results" in output:
        return {**output, "results": [result and _each(result, act) for result in output["results"]]}
    if "partial" in output:
        return {**output, "partial": _each(output["partial"], act)}
    return dict(act(output))


def _without_streamed(output: Json) -> Json:
    return {name: value for name, value in output.items() if name not in STREAMED}


def _without_details(output: Json) -> Json:
    """Of the output for a file, and of a text in JSON, which has words and segments of its own."""
    smaller = {name: value for name, value in output.items() if name not in ("word_timestamps", "words")}
    if "segments" in output:
        smaller["segments"] = [_without_details({**segment, "tokens": []}) for segment in output["segments"]]
    for name in TEXTS:
        if isinstance(output.get(name), dict):
            smaller[name] = _without_details(output[name])
    for name in TEXTS_IN_FORMATS:
        if name in output:
            texts = output[name].items()
            smaller[name] = {name: _without_details(text) if isinstance(text, dict) else text for name, text in texts}
    return smaller


def _without_segments(output: Json) -> Json:
    return {**_without_details(output), "segments": []} if "segments" in output else output


def _summarised(output: Json) -> Json:
    if "segments" not in output:
        return output
    text = "".join(segment["text"] for segment in output["segments"]).strip()
    summary = {"segments": len(output["segments"]), "characters": len(text), "text_start": text[:TEXT_START]}
    kept = {name: value for name, value in output.items() if name not in ("word_timestamps", *TEXTS_IN_FORMATS)}
    return {**kept, "segments": [], **{name: None for name in TEXTS if name in output}, "summary": summary}


def _file(text: str, format: str, content: Text) -> File:
    """Of one text in one format; several formats can have the same extension."""
    extension = FORMATS[format].extension
    data = content.encode() if isinstance(content, str) else encoded(content)
    name = f"{text}.{format}" if extension == format else f"{text}.{format}.{extension}"
    return File(name, data, FORMATS[format].mime_type)


def _layout(request: Request) -> Layout:
    return Layout(request.max_line_width, request.max_line_count, request.max_words_per_line, request.highlight_words)


def _in_formats(names: Sequence[str], transcript: Transcript, layout: Layout) -> dict[str, Text]:
    return {name: render(name, transcript, layout) for name in names}


def _which(audio: int | None) -> Json:
    return {} if audio is None else {"audio": audio}


def _facts(facts: Facts) -> FactsOutput:
    return {
        "device": facts.device,
        "model": facts.model,
        "duration": round(facts.duration, 3),
        "duration_after_vad": round(facts.duration_after_vad, 3),
        "warnings": list(facts.warnings),
    }


def _language(language: Language | None) -> LanguageOutput:
    return {
        "detected_language": language.code if language else None,
        "language_probability": language.probability if language else None,
        "language_probabilities": dict(language.likely) if language else {},
    }


def _segments(segments: Sequence[Segment]) -> list[Any]:
    return [segment_dict(segment) for segment in segments]


def _words(segments: Sequence[Segment]) -> list[WordOutput]:
    """In order: those of channels apart interlock."""
    words: list[WordOutput] = []
    for segment in segments:
        channel: Json = {} if segment.channel is None else {"channel": segment.channel}
        words += [cast(WordOutput, {**_word(word), **channel}) for word in segment.words or ()]
    return sorted(words, key=lambda word: word["start"]) if any("channel" in word for word in words) else words


def _word(word: Word) -> WordOutput:
    return {"word": word.word, "start": word.start, "end": word.end}
