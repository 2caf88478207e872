"""Segments → the text a caller asked for. One table of pure functions; a new format is one more row."""

import html
from collections.abc import Callable, Sequence

from whisper_worker.transcript import Segment


def plain_text(segments: Sequence[Segment]) -> str:
    """All text on one line."""
    return " ".join(_line(segment) for segment in segments)


def formatted_text(segments: Sequence[Segment]) -> str:
    """One line for each segment."""
    return "\n".join(_line(segment) for segment in segments)


def srt(segments: Sequence[Segment]) -> str:
    """SubRip subtitles. Its readers know no escapes, so an arrow inside the text is written shorter."""
    return "".join(
        f"{number}\n{_times(segment, comma=True)}\n{_line(segment).replace('-->', '->')}\n\n"
        for number, segment in enumerate(segments, start=1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """WebVTT subtitles: header, full timestamps, and `&`, `<`, `>` escaped as its cue text demands."""
    cues = (f"{_times(segment)}\n{html.escape(_line(segment), quote=False)}\n\n" for segment in segments)
    return "WEBVTT\n\n" + "".join(cues)


FORMATS: dict[str, Callable[[Sequence[Segment]], str]] = {
    "plain_text": plain_text,
    "formatted_text": formatted_text,
    "srt": srt,
    "vtt": vtt,
}


def _line(segment: Segment) -> str:
    """The segment's text on one line: an empty line inside would end a subtitle's cue."""
    return " ".join(segment.text.split())


def _times(segment: Segment, *, comma: bool = False) -> str:
    start_ms = round(segment.start * 1000)
    end_ms = max(round(segment.end * 1000), start_ms + 1)  # WebVTT wants each cue to end after its start
    return f"{_timestamp(start_ms, comma)} --> {_timestamp(end_ms, comma)}"


def _timestamp(ms: int, comma: bool) -> str:
    seconds, ms = divmod(ms, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{',' if comma else '.'}{ms:03}"
