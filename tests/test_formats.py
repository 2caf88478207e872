"""The text formats, against what their readers demand."""

import re

import pytest
from fakes import segment

from whisper_worker.formats import FORMATS, formatted_text, plain_text, srt, vtt

TWO = (segment(0, 1.5, " Hello there."), segment(59.9996, 61, " Tom & Jerry --> <home>"))


def test_plain_text_is_one_line() -> None:
    assert plain_text(TWO) == "Hello there. Tom & Jerry --> <home>"


def test_formatted_text_has_a_line_for_each_segment() -> None:
    assert formatted_text(TWO) == "Hello there.\nTom & Jerry --> <home>"


def test_srt_numbers_its_cues_and_rounds_times_once() -> None:
    assert srt(TWO) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there.\n\n2\n00:01:00,000 --> 00:01:01,000\nTom & Jerry -> <home>\n\n"
    )


def test_vtt_has_its_header_and_escapes() -> None:
    assert vtt(TWO) == (
        "WEBVTT\n\n"
        "00:00:00.000 --> 00:00:01.500\nHello there.\n\n"
        "00:01:00.000 --> 00:01:01.000\nTom &amp; Jerry --&gt; &lt;home&gt;\n\n"
    )


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "00:00:00.000"),
        (59.9994, "00:00:59.999"),
        (59.9996, "00:01:00.000"),
        (3599.9999, "01:00:00.000"),
        (3661.5, "01:01:01.500"),
        (360_000, "100:00:00.000"),
    ],
)
def test_timestamps_carry_into_minutes_and_hours(seconds: float, expected: str) -> None:
    assert f"{expected} --> " in vtt([segment(seconds, seconds + 1)])


def test_a_cue_without_length_gets_a_millisecond() -> None:
    assert "00:00:02.000 --> 00:00:02.001" in vtt([segment(2, 2)])


@pytest.mark.parametrize("make", [srt, vtt])
def test_a_line_break_inside_a_segment_does_not_end_its_cue(make: object) -> None:
    assert callable(make)
    assert "one two three\n\n" in make([segment(0, 1, " one\n\ntwo\tthree")])


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_said_is_an_empty_text(name: str) -> None:
    assert re.fullmatch(r"(WEBVTT\n\n)?", FORMATS[name](()))
