"""Transcript → the text or JSON a caller asked for. One table of pure functions; a new format is one more row.

Where channels are transcribed apart, text that has lines or cues says who speaks: WebVTT with voice tags, the others
with "Channel 0: " before the text.
"""

import html
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from whisper_worker.languages import LANGUAGES
from whisper_worker.subtitles import PLAIN, Cue, Layout, cues, label, to_ms
from whisper_worker.transcript import Segment, Transcript

__all__ = ["FORMATS", "PLAIN", "Format", "Layout", "render", "segment_dict"]

Json = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """How it is made, and what it is as a file."""

    render: Callable[[Transcript, Layout], str | Json]
    extension: str
    mime_type: str


def render(name: str, transcript: Transcript, layout: Layout = PLAIN) -> str | Json:
    """The transcript in the format of that name. Only subtitles have a layout."""
    return FORMATS[name].render(transcript, layout)


def plain_text(transcript: Transcript, _layout: Layout = PLAIN) -> str:
    """All text on one line, without channels."""
    return " ".join(text for _, text in _spoken(transcript))


def formatted_text(transcript: Transcript, _layout: Layout = PLAIN) -> str:
    """One line for each segment."""
    return "\n".join(label(segment) + text for segment, text in _spoken(transcript))


def srt(transcript: Transcript, layout: Layout = PLAIN) -> str:
    """SubRip subtitles. Its readers know no escapes, so an arrow inside the text is written shorter."""
    return "".join(
        f"{number}\n{_times(cue, comma=True)}\n{re.sub('-{2,}>', '->', _underlined(cue))}\n\n"
        for number, cue in enumerate(cues(transcript.segments, layout, labelled=True), start=1)
    )


def vtt(transcript: Transcript, layout: Layout = PLAIN) -> str:
    """WebVTT subtitles: header, full timestamps, and `&`, `<`, `>` escaped as its cue text demands."""
    blocks = (
        f"{_times(cue)}\n{_voice(cue)}{_underlined(cue, lambda text: html.escape(text, quote=False))}\n\n"
        for cue in cues(transcript.segments, layout)
    )
    return "WEBVTT\n\n" + "".join(blocks)


def tsv(transcript: Transcript, _layout: Layout = PLAIN) -> str:
    """A table of segments, as Whisper's own program writes it: times in milliseconds, and no tabs in the text."""
    rows = (
        f"{to_ms(segment.start)}\t{to_ms(segment.end)}\t{label(segment)}{text}\n"
        for segment, text in _spoken(transcript)
    )
    return "start\tend\ttext\n" + "".join(rows)


def lrc(transcript: Transcript, _layout: Layout = PLAIN) -> str:
    """Lyrics, a line a segment. They have no hours: minutes go on past 99."""
    return "".join(f"[{_lrc_time(segment.start)}]{label(segment)}{text}\n" for segment, text in _spoken(transcript))


def json(transcript: Transcript, _layout: Layout = PLAIN) -> Json:
    """The segments with all that is known of them."""
    return {"segments": [segment_dict(segment) for segment in transcript.segments]}


def verbose_json(transcript: Transcript, _layout: Layout = PLAIN) -> Json:
    """OpenAI's `verbose_json`: segments count from 0, words stand in one list, without spaces, and only if there are
    any; the language is that of the text, by its English name (without speech an empty one: clients expect a string).
    """
    words = [
        {"word": word.word.strip(), "start": word.start, "end": word.end}
        for segment in transcript.segments
        for word in segment.words or ()
    ]
    return {
        "task": transcript.task,
        "language": _language_name(transcript),
        "duration": round(transcript.duration, 3),
        "text": "".join(segment.text for segment in transcript.segments).strip(),
        "segments": [{**_figures(segment), "id": number} for number, segment in enumerate(transcript.segments)],
        **({"words": words} if words else {}),
    }


def segment_dict(segment: Segment) -> Json:
    """A segment in plain Python types: the official worker's keys, and `words`, `language`, `channel` where it has
    them."""
    extra: Json = {"language": segment.language, "channel": segment.channel}
    if segment.words is not None:
        extra["words"] = [
            {"word": word.word, "start": word.start, "end": word.end, "probability": word.probability}
            for word in segment.words
        ]
    return {**_figures(segment), **{name: value for name, value in extra.items() if value is not None}}


FORMATS: dict[str, Format] = {
    "plain_text": Format(plain_text, "txt", "text/plain; charset=utf-8"),
    "formatted_text": Format(formatted_text, "txt", "text/plain; charset=utf-8"),
    "srt": Format(srt, "srt", "application/x-subrip"),
    "vtt": Format(vtt, "vtt", "text/vtt"),
    "json": Format(json, "json", "application/json"),
    "verbose_json": Format(verbose_json, "json", "application/json"),
    "tsv": Format(tsv, "tsv", "text/tab-separated-values; charset=utf-8"),
    "lrc": Format(lrc, "lrc", "text/plain; charset=utf-8"),  # has no type of its own
}


def _spoken(transcript: Transcript) -> Iterator[tuple[Segment, str]]:
    """The segments that have text, each with its text on one line."""
    for segment in transcript.segments:
        if text := " ".join(segment.text.split()):
            yield segment, text


def _figures(segment: Segment) -> Json:
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


def _language_name(transcript: Transcript) -> str:
    if transcript.task == "translate":
        return LANGUAGES["en"]
    return LANGUAGES[transcript.language.code] if transcript.language else ""


def _voice(cue: Cue) -> str:
    return "" if cue.channel is None else f"<v Channel {cue.channel}>"


def _underlined(cue: Cue, escape: Callable[[str], str] = str) -> str:
    if cue.spoken is None:
        return escape(cue.text)
    start, end = cue.spoken
    return f"{escape(cue.text[:start])}<u>{escape(cue.text[start:end])}</u>{escape(cue.text[end:])}"


def _times(cue: Cue, *, comma: bool = False) -> str:
    return f"{_timestamp(cue.start_ms, comma)} --> {_timestamp(cue.end_ms, comma)}"


def _timestamp(ms: int, comma: bool) -> str:
    seconds, ms = divmod(ms, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{',' if comma else '.'}{ms:03}"


def _lrc_time(seconds: float) -> str:
    whole, hundredths = divmod(round(seconds * 100), 100)
    minutes, whole = divmod(whole, 60)
    return f"{minutes:02}:{whole:02}.{hundredths:02}"
