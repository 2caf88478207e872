"""The formats, against files looked through by eye, and against the readers that others made of them."""

import json as json_text
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
import srt as srt_reader
import webvtt
from fakes import segment

from whisper_worker.formats import (
    FORMATS,
    Layout,
    formatted_text,
    json,
    lrc,
    plain_text,
    render,
    segment_dict,
    srt,
    tsv,
    verbose_json,
    vtt,
)
from whisper_worker.request import FormatName
from whisper_worker.transcript import Language, Segment, Transcript, Word

GOLDEN = Path(__file__).parent / "golden"
ENGLISH = Language.given("en")


def transcript(*segments: Segment, **fields: Any) -> Transcript:
    return Transcript(segments, **{"language": ENGLISH, "duration": 400_000.0, **fields})


TWO = transcript(segment(0, 1.5, " Hello there."), segment(59.9996, 61, " Tom & Jerry --> <home>"))
ODD_TIMES = transcript(
    segment(0, 1.5, " Hello there."),
    segment(59.9996, 61.23456, " Tom & Jerry --> <home>\tand\nback."),
    segment(61.5, 61.5, " No time at all."),
    segment(3599.9999, 3661.5, " שלום לכולם, مرحبا بكم"),
    segment(3700, 3701, " "),
    segment(360_000.004, 360_001, "一百个小时了。"),
)
WORDS = (
    Word(" Tom", 0.0, 0.5, 0.9),
    Word(" &", 0.5, 0.625, 0.8),
    Word(" Jerry", 1.0, 1.5, 0.7),
    Word(" <ran>", 1.5, 2.25, 0.6),
)
SPOKEN = transcript(segment(0, 2.5, " Tom & Jerry <ran>", WORDS), segment(3, 4, " No words here.", ()))
CHANNELS = transcript(
    replace(segment(0, 1, " Hello?"), channel=0),
    replace(segment(0.5, 2, " Who is <there>?", None), channel=1, language="en"),
)
TRANSLATED = transcript(segment(1, 2, " Good day."), task="translate", language=Language.given("de"), duration=2.00049)


@pytest.mark.parametrize(
    ("name", "said", "layout"),
    [
        ("odd_times.srt", ODD_TIMES, Layout()),
        ("odd_times.vtt", ODD_TIMES, Layout()),
        ("odd_times.tsv", ODD_TIMES, Layout()),
        ("odd_times.lrc", ODD_TIMES, Layout()),
        ("odd_times.formatted_text", ODD_TIMES, Layout()),
        ("wrapped.srt", ODD_TIMES, Layout(max_line_width=10, max_line_count=2)),
        ("highlighted.srt", SPOKEN, Layout(highlight_words=True)),
        ("highlighted.vtt", SPOKEN, Layout(max_line_width=8, highlight_words=True)),
        ("words.json", SPOKEN, Layout()),
        ("words.verbose_json", SPOKEN, Layout()),
        ("translated.verbose_json", TRANSLATED, Layout()),
        ("channels.srt", CHANNELS, Layout()),
        ("channels.vtt", CHANNELS, Layout()),
        ("channels.tsv", CHANNELS, Layout()),
        ("channels.lrc", CHANNELS, Layout()),
        ("channels.formatted_text", CHANNELS, Layout()),
        ("channels.plain_text", CHANNELS, Layout()),
        ("channels.json", CHANNELS, Layout()),
    ],
)
def test_formats_are_as_they_were(name: str, said: Transcript, layout: Layout) -> None:
    made = render(name.split(".")[1], said, layout)
    text = made if isinstance(made, str) else json_text.dumps(made, indent=2, ensure_ascii=False) + "\n"
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def test_all_formats_that_a_caller_may_ask_for_are_made() -> None:
    assert set(FORMATS) == set(get_args(FormatName))


def test_plain_text_is_one_line() -> None:
    assert plain_text(TWO) == "Hello there. Tom & Jerry --> <home>"


def test_formatted_text_has_a_line_for_each_segment() -> None:
    assert formatted_text(TWO) == "Hello there.\nTom & Jerry --> <home>"


def test_srt_numbers_its_cues_and_rounds_times_once() -> None:
    assert srt(TWO) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there.\n\n2\n00:01:00,000 --> 00:01:01,000\nTom & Jerry -> <home>\n\n"
    )


def test_no_arrow_is_left_in_srt() -> None:
    assert "\na -> b -> c\n" in srt(transcript(segment(0, 1, "a ---> b -----> c")))


def test_vtt_has_its_header_and_escapes() -> None:
    assert vtt(TWO) == (
        "WEBVTT\n\n"
        "00:00:00.000 --> 00:00:01.500\nHello there.\n\n"
        "00:01:00.000 --> 00:01:01.000\nTom &amp; Jerry --&gt; &lt;home&gt;\n\n"
    )


@pytest.mark.parametrize(
    ("seconds", "subtitle", "lyric"),
    [
        (0, "00:00:00.000", "00:00.00"),
        (59.9944, "00:00:59.994", "00:59.99"),
        (59.9996, "00:01:00.000", "01:00.00"),
        (3599.9999, "01:00:00.000", "60:00.00"),
        (3661.5, "01:01:01.500", "61:01.50"),
        (5999.996, "01:39:59.996", "100:00.00"),
        (360_000, "100:00:00.000", "6000:00.00"),
    ],
)
def test_timestamps_carry_into_minutes_and_hours(seconds: float, subtitle: str, lyric: str) -> None:
    said = transcript(segment(seconds, seconds + 1))
    assert f"{subtitle} --> " in vtt(said)
    assert f"{subtitle.replace('.', ',')} --> " in srt(said)
    assert lrc(said) == f"[{lyric}]Hello.\n"


def test_a_cue_without_length_gets_a_millisecond() -> None:
    assert "00:00:02.000 --> 00:00:02.001" in vtt(transcript(segment(2, 2)))


@pytest.mark.parametrize("make", [formatted_text, srt, vtt, tsv, lrc])
def test_white_space_inside_a_segment_does_not_break_its_line(make: Callable[[Transcript], str]) -> None:
    text = make(transcript(segment(0, 1, " one\n\ntwo\tthree\u2028four\r\nfive")))
    assert "one two three four five\n" in text + "\n"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain_text", ""),
        ("formatted_text", ""),
        ("srt", ""),
        ("vtt", "WEBVTT\n\n"),
        ("json", {"segments": []}),
        ("verbose_json", {"task": "transcribe", "language": "", "duration": 2.0, "text": "", "segments": []}),
        ("tsv", "start\tend\ttext\n"),
        ("lrc", ""),
    ],
)
def test_nothing_said_is_an_empty_text(name: str, expected: object) -> None:
    assert render(name, Transcript((), None, 2.0)) == expected


SAID = {
    "odd times": (ODD_TIMES, Layout()),
    "wrapped": (ODD_TIMES, Layout(max_line_width=12, max_line_count=2)),
    "words": (SPOKEN, Layout(max_words_per_line=2)),
}


@pytest.mark.parametrize(("said", "layout"), SAID.values(), ids=SAID.keys())
def test_readers_of_srt_and_of_vtt_find_the_same_cues(said: Transcript, layout: Layout) -> None:
    from_srt = [
        (cue.start / timedelta(milliseconds=1), cue.end / timedelta(milliseconds=1), cue.content)
        for cue in srt_reader.parse(srt(said, layout))
    ]
    from_vtt = [
        (cue.start_time.in_milliseconds(), cue.end_time.in_milliseconds(), unescaped(cue.raw_text))
        for cue in webvtt.from_string(vtt(said, layout)).captions
    ]
    assert from_srt == [(start, end, text.replace("-->", "->")) for start, end, text in from_vtt]
    assert [cue.index for cue in srt_reader.parse(srt(said, layout))] == list(range(1, len(from_srt) + 1))
    words = [word for text in from_vtt for word in text[2].split()]
    assert "".join(words) == "".join("".join(s.text for s in said.segments).split())


def unescaped(text: str) -> str:
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def test_readers_find_the_times_of_the_segments() -> None:
    expected = [(0, 1500), (60_000, 61_235), (61_500, 61_501), (3_600_000, 3_661_500), (360_000_004, 360_001_000)]
    cues = webvtt.from_string(vtt(ODD_TIMES)).captions
    assert [(cue.start_time.in_milliseconds(), cue.end_time.in_milliseconds()) for cue in cues] == expected


def test_readers_of_vtt_find_the_channels_as_voices() -> None:
    assert [(cue.voice, unescaped(cue.text)) for cue in webvtt.from_string(vtt(CHANNELS)).captions] == [
        ("Channel 0", "Hello?"),
        ("Channel 1", "Who is <there>?"),
    ]


def test_a_table_has_whole_milliseconds_and_a_tab_between_columns() -> None:
    header, *rows = [line.split("\t") for line in tsv(ODD_TIMES).splitlines()]
    assert header == ["start", "end", "text"]
    assert rows[1] == ["60000", "61235", "Tom & Jerry --> <home> and back."]
    assert rows[2][:2] == ["61500", "61500"]


OFFICIAL = (
    "id",
    "seek",
    "start",
    "end",
    "text",
    "tokens",
    "temperature",
    "avg_logprob",
    "compression_ratio",
    "no_speech_prob",
)


def test_a_segment_has_the_official_keys_and_those_it_was_given() -> None:
    assert tuple(segment_dict(segment(0, 1))) == OFFICIAL
    rich = replace(segment(0, 1, words=()), language="de", channel=0)
    assert set(segment_dict(rich)) - set(OFFICIAL) == {"words", "language", "channel"}
    assert segment_dict(SPOKEN.segments[0])["words"][0] == {
        "word": " Tom",
        "start": 0.0,
        "end": 0.5,
        "probability": 0.9,
    }


@pytest.mark.parametrize("make", [json, verbose_json])
def test_json_is_strict_and_comes_back_the_same(make: Callable[[Transcript], dict[str, Any]]) -> None:
    made = make(SPOKEN)
    assert json_text.loads(json_text.dumps(made, allow_nan=False)) == made


def test_verbose_json_has_openais_keys_and_no_others() -> None:
    made = verbose_json(SPOKEN)
    assert set(made) == {"task", "language", "duration", "text", "segments", "words"}
    assert all(tuple(item) == OFFICIAL for item in made["segments"])
    assert [item["id"] for item in made["segments"]] == [0, 1]
    assert made["words"][2] == {"word": "Jerry", "start": 1.0, "end": 1.5}
    assert made["language"] == "english"


def test_verbose_json_without_words_has_no_list_of_them() -> None:
    assert "words" not in verbose_json(TWO)


def test_the_text_of_a_translation_is_english() -> None:
    made = verbose_json(TRANSLATED)
    assert (made["task"], made["language"]) == ("translate", "english")
    assert verbose_json(replace(TRANSLATED, task="transcribe"))["language"] == "german"
