"""Each field of a job's input, sent once to the whole service with real audio and real models: it does what its
description promises.

A row is a field, an input without it, the same with it, and what must be different then, which its name says. Texts are
compared where decoding is certain; at temperatures above 0 the model draws at random, and only figures are.
"""

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import requests
import srt
import webvtt
from caller import FILES, STATION, STATION_WORDS, words
from conftest import RECORDINGS, find_multilingual
from file_server import Answer, FileServer, answer, if_authorized, taken
from media import CLIP, CLIP_WORDS, RATE, Floats, encode, noise, pcm, silence, speech, wav
from moto.server import ThreadedMotoServer
from pydantic import BaseModel
from real_service import RealService, real_service

from whisper_worker.audio import decode
from whisper_worker.request import Request
from whisper_worker.stop import Stop

Json = dict[str, Any]
Check = Callable[[Any, Any], None]

TIGHT_BYTES = 2500
TOKEN = "let-me-in"  # noqa: S105  (of no one)
UPLOADED: list[bytes] = []
ROUTES: dict[str, Answer] = {
    "/window.ogg": answer(200, CLIP.read_bytes()),
    "/private.ogg": if_authorized(TOKEN, answer(200, CLIP.read_bytes())),
    "/upload": taken(UPLOADED),
}


# --- what is said. A value that is a function is called when its row runs: making it takes time, or may skip the row


def in_base64(samples: Floats) -> str:
    return base64.b64encode(wav(pcm(samples))).decode()


def decoded(file: str) -> Floats:
    samples: Floats = decode(BytesIO(base64.b64decode(file)), Stop(), max_seconds=60).samples
    return samples


def quicker(samples: Floats, rate: float) -> Floats:
    places = np.arange(0, len(samples), rate)
    return np.asarray(np.interp(places, np.arange(len(samples)), samples), np.float32)


def in_noise(samples: Floats, level: float) -> Floats:
    return samples + noise(len(samples) / RATE + 1, level)[: len(samples)]


@cache
def station() -> Floats:
    """Another sentence, of the same voice."""
    return decoded(STATION)


WINDOW = base64.b64encode(CLIP.read_bytes()).decode()
WINDOW_S = len(speech()) / RATE


@cache
def twice() -> str:
    return in_base64(np.tile(speech(), 2))


@cache
def with_a_pause() -> str:
    return in_base64(np.concatenate([speech(), silence(1), speech()]))


@cache
def window_then_station() -> str:
    return in_base64(np.concatenate([speech(), station()]))


@cache
def hardly_heard() -> str:
    """So fast and in such noise that the model has to guess, and every option of the search tells."""
    return in_base64(in_noise(quicker(speech(), 1.3), 0.03))


@cache
def thrice_in_noise() -> str:
    return in_base64(in_noise(np.tile(speech(), 3), 0.05))


@cache
def nothing() -> str:
    """In which the model hears words nevertheless."""
    return in_base64(silence(10))


@cache
def mostly_silence() -> str:
    return in_base64(np.concatenate([speech(), silence(66)]))


@cache
def two_channels() -> str:
    """The first says the one sentence, and then the second the other."""
    left = np.concatenate([speech(), np.zeros_like(station())])
    right = np.concatenate([np.zeros_like(speech()), station()])
    return in_base64(np.stack([left, right], axis=1))


@cache
def two_streams() -> str:
    return base64.b64encode(encode("matroska", "libopus", [speech(), station()])).decode()


def recorded(name: str) -> bytes:
    if not RECORDINGS.is_dir():
        pytest.skip("no recordings of human speech")
    return (RECORDINGS / name).read_bytes()


@cache
def spanish() -> str:
    """Su llamada es la primera en línea y será atendida por el próximo representante."""
    return base64.b64encode(recorded("es_asterisk_queue-youarenext_8k.wav")).decode()


@cache
def spanish_then_english() -> str:
    return in_base64(np.concatenate([decoded(spanish()), silence(3), speech()]))


def base_model() -> str:
    return find_multilingual().name


CLEAR = {"audio_base64": WINDOW}
TWICE = {"audio_base64": twice}
TWO_PIECES = {"audio_base64": twice, "vad_parameters": {"max_speech_duration_s": 5}}
PAUSE = {"audio_base64": with_a_pause}
SHORT_PAUSES = {"min_silence_duration_ms": 100}
BOTH = {"audio_base64": window_then_station}
CHANNELS = {"audio_base64": two_channels}
ONE_TRY = {"temperature_increment_on_fallback": 0}
SILENCE = {"audio_base64": nothing, "enable_vad": False, **ONE_TRY}
HARD = {"audio_base64": hardly_heard, **ONE_TRY}
NEVER_GOOD_ENOUGH = {"logprob_threshold": -0.01}
FOREIGN = {"audio_base64": spanish, "model": base_model}
LOWER_CASE = "please open the window, and close the door, before"


# --- rows


@dataclass(frozen=True)
class Row:
    """`tight`: the worker's replies may have no more than `TIGHT_BYTES`."""

    field: str
    without: Json
    given: Json
    check: Check
    tight: bool

    def __str__(self) -> str:
        return f"{self.field}: {self.check.__name__.replace('_', ' ')}"


ROWS: list[Row] = []


def row(field: str, without: Json, *, tight: bool = False, **given: Any) -> Callable[[Check], Check]:
    """The decorated function is called with the outputs without and with what is `given`; None leaves a field out."""

    def add(check: Check) -> Check:
        ROWS.append(Row(field, without, {**without, **given}, check, tight))
        return check

    return add


def said(output: Json) -> str:
    return words(output["transcription"])


def figure(output: Json, name: str) -> float:
    """The mean of the segments'."""
    return float(np.mean([segment[name] for segment in output["segments"]]))


def figures(output: Json, name: str) -> set[float]:
    return {segment[name] for segment in output["segments"]}


def tokens_of_windows(output: Json) -> list[list[int]]:
    places = sorted(figures(output, "seek"))
    return [[t for s in output["segments"] if s["seek"] == place for t in s["tokens"]] for place in places]


# Where the audio comes from


@row("audio", {"audio_base64": STATION}, audio_base64=None, audio=f"{FILES}/window.ogg")
def the_file_is_downloaded(without: Json, given: Json) -> None:
    assert (said(without), said(given)) == (STATION_WORDS, CLIP_WORDS)


@row("audio", {"audio_base64": STATION}, audio_base64=None, audio=f"data:audio/ogg;base64,{WINDOW}")
def a_data_url_is_the_file(without: Json, given: Json) -> None:
    assert (said(without), said(given)) == (STATION_WORDS, CLIP_WORDS)


@row("audio_base64", {"audio": f"{FILES}/window.ogg"}, audio=None, audio_base64=STATION)
def it_is_the_file(without: Json, given: Json) -> None:
    assert (said(without), said(given)) == (CLIP_WORDS, STATION_WORDS)


@row("audio_base64", {"audio": f"{FILES}/window.ogg"}, audio=None, audio_base64=f"data:audio/ogg;base64,{STATION}")
def it_may_be_a_data_url(without: Json, given: Json) -> None:
    assert (said(without), said(given)) == (CLIP_WORDS, STATION_WORDS)


@row(
    "audios",
    CLEAR,
    audio_base64=None,
    audios=[
        {"audio_base64": STATION},
        {"audio_base64": base64.b64encode(b"hello").decode()},
        f"{FILES}/missing",
        f"{FILES}/window.ogg",
    ],
)
def each_has_its_output_or_its_error_in_order(without: Json, given: Json) -> None:
    assert "results" not in without
    first, text, missing, last = given["results"]
    assert (said(first), said(last)) == (STATION_WORDS, CLIP_WORDS)
    assert text["error"].startswith("NOT_AUDIO")
    assert missing["error"].startswith("DOWNLOAD_FAILED")
    assert given["duration"] == pytest.approx(first["duration"] + last["duration"], abs=0.002)


@row("audios.audio", {"audios": [{"audio_base64": STATION}]}, audios=[{"audio": f"{FILES}/window.ogg"}])
def an_items_file_is_downloaded(without: Json, given: Json) -> None:
    assert (said(without["results"][0]), said(given["results"][0])) == (STATION_WORDS, CLIP_WORDS)


@row("audios.audio_base64", {"audios": [f"{FILES}/window.ogg"]}, audios=[{"audio_base64": STATION}])
def it_is_the_items_file(without: Json, given: Json) -> None:
    assert (said(without["results"][0]), said(given["results"][0])) == (CLIP_WORDS, STATION_WORDS)


@row("audio_headers", {"audio": f"{FILES}/private.ogg"}, audio_headers={"Authorization": f"Bearer {TOKEN}"})
def they_open_a_door(without: Json, given: Json) -> None:
    assert without["error"].startswith("DOWNLOAD_FAILED")
    assert said(given) == CLIP_WORDS


@row(
    "audios.audio_headers",
    {"audios": [{"audio": f"{FILES}/private.ogg"}], "audio_headers": {"Authorization": "Bearer nobody"}},
    audios=[{"audio": f"{FILES}/private.ogg", "audio_headers": {"Authorization": f"Bearer {TOKEN}"}}],
    audio_headers=None,
)
def an_items_own_stand_in_for_the_jobs(without: Json, given: Json) -> None:
    assert without["results"][0]["error"].startswith("DOWNLOAD_FAILED")
    assert said(given["results"][0]) == CLIP_WORDS


# What of it is heard


@row("audio_stream", {"audio_base64": two_streams}, audio_stream=1)
def another_stream_is_heard(without: Json, given: Json) -> None:
    assert (said(without), said(given)) == (CLIP_WORDS, STATION_WORDS)


@row("channels", CHANNELS, channels="split")
def segments_say_which_channel_speaks(without: Json, given: Json) -> None:
    assert not any("channel" in segment for segment in without["segments"])
    for channel, text in enumerate((CLIP_WORDS, STATION_WORDS)):
        assert words("".join(s["text"] for s in given["segments"] if s["channel"] == channel)) == text


@row("channels", CHANNELS, channels=1)
def one_channel_is_heard_alone(without: Json, given: Json) -> None:
    assert (said(without), said(given)) == (f"{CLIP_WORDS} {STATION_WORDS}", STATION_WORDS)


@row("channels", {**CHANNELS, "channels": 1}, channels="mix")
def all_channels_are_heard_as_one(without: Json, given: Json) -> None:
    assert (said(without), said(given)) == (STATION_WORDS, f"{CLIP_WORDS} {STATION_WORDS}")


@row("clip", BOTH, clip={"start": 0.0, "end": WINDOW_S})
def only_that_part_is_heard(without: Json, given: Json) -> None:
    assert (said(without), said(given)) == (f"{CLIP_WORDS} {STATION_WORDS}", CLIP_WORDS)
    assert given["duration"] == pytest.approx(WINDOW_S, abs=0.01) != without["duration"]


@row("clip.start", BOTH, clip={"start": WINDOW_S})
def what_is_before_it_is_not_heard_and_times_stay_the_files(without: Json, given: Json) -> None:
    assert (said(without), said(given)) == (f"{CLIP_WORDS} {STATION_WORDS}", STATION_WORDS)
    assert given["segments"][0]["start"] >= WINDOW_S
    assert given["segments"][-1]["end"] == pytest.approx(without["segments"][-1]["end"], abs=1)


@row("clip.end", {**BOTH, "clip": {"start": 0.5}}, clip={"start": 0.5, "end": WINDOW_S})
def what_is_behind_it_is_not_heard(without: Json, given: Json) -> None:
    assert said(without).endswith(STATION_WORDS)
    assert said(given).endswith("before you go home")
    assert given["segments"][-1]["end"] <= WINDOW_S


@row("enable_vad", {"audio_base64": nothing}, enable_vad=False)
def what_is_no_speech_is_heard_too(without: Json, given: Json) -> None:
    assert (without["segments"], without["duration_after_vad"]) == ([], 0)
    assert (len(given["segments"]), given["duration_after_vad"]) == (1, 10)


@row("vad_parameters", PAUSE, vad_parameters={"min_silence_duration_ms": 100, "speech_pad_ms": 0})
def other_stretches_are_taken_for_speech(without: Json, given: Json) -> None:
    assert without["duration_after_vad"] == without["duration"]
    assert given["duration_after_vad"] < without["duration_after_vad"] - 1


@row("vad_parameters.threshold", CLEAR, vad_parameters={"threshold": 0.9999})
def hardly_anything_is_speech(without: Json, given: Json) -> None:
    assert without["duration_after_vad"] > 4
    assert (given["duration_after_vad"], given["segments"]) == (0, [])


@row(
    "vad_parameters.neg_threshold",
    {**PAUSE, "vad_parameters": SHORT_PAUSES},
    vad_parameters={**SHORT_PAUSES, "neg_threshold": 0.001},
)
def speech_hardly_ever_ends(without: Json, given: Json) -> None:
    assert without["duration_after_vad"] < without["duration"] == given["duration_after_vad"]


@row(
    "vad_parameters.min_speech_duration_ms",
    {**BOTH, "vad_parameters": SHORT_PAUSES},
    vad_parameters={**SHORT_PAUSES, "min_speech_duration_ms": 60_000},
)
def shorter_speech_is_left_out(without: Json, given: Json) -> None:
    assert said(without) == f"{CLIP_WORDS} {STATION_WORDS}"
    assert (said(given), given["duration_after_vad"]) == ("", 0)


@row("vad_parameters.min_silence_duration_ms", PAUSE, vad_parameters={"min_silence_duration_ms": 100})
def a_shorter_pause_is_left_out(without: Json, given: Json) -> None:
    assert without["duration_after_vad"] == without["duration"]
    assert given["duration_after_vad"] < without["duration_after_vad"] - 0.5


@row(
    "vad_parameters.speech_pad_ms",
    {**PAUSE, "vad_parameters": SHORT_PAUSES},
    vad_parameters={**SHORT_PAUSES, "speech_pad_ms": 0},
)
def nothing_around_speech_belongs_to_it(without: Json, given: Json) -> None:
    assert given["duration_after_vad"] == pytest.approx(without["duration_after_vad"] - 4 * 0.4, abs=0.5)


@row("vad_parameters.max_speech_duration_s", TWICE, vad_parameters={"max_speech_duration_s": 5})
def the_model_hears_shorter_pieces(without: Json, given: Json) -> None:
    assert figures(without, "seek") == {0}
    assert len(figures(given, "seek")) == 2
    assert said(without) == said(given)


# Which model, task and language


@row("model", CLEAR, model=base_model)
def another_model_answers(without: Json, given: Json) -> None:
    assert (without["model"], without["language_probabilities"]) == ("bundled", {"en": 1.0})
    assert (given["model"], len(given["language_probabilities"])) == (base_model(), 5)


@row("task", FOREIGN, task="translate")
def there_is_only_a_translation(without: Json, given: Json) -> None:
    assert ("primera en línea" in without["transcription"], without["translation"]) == (True, None)
    assert given["transcription"] is None
    assert "the next representative" in given["translation"]
    assert "the next representative" in "".join(segment["text"] for segment in given["segments"])
    assert given["detected_language"] == "es"


@row("task", {**FOREIGN, "task": "translate"}, task="transcribe")
def there_is_only_a_transcription(without: Json, given: Json) -> None:
    assert without["transcription"] is None
    assert ("primera en línea" in given["transcription"], given["translation"]) == (True, None)


@row("task", {"audio_base64": mostly_silence, "model": base_model}, task="detect_language")
def there_is_only_the_language_of_as_much_as_that_needs(without: Json, given: Json) -> None:
    assert said(without) == CLIP_WORDS
    assert not {"segments", "transcription", "translation"} & given.keys()
    assert (given["detected_language"], given["duration"]) == ("en", 60)
    assert without["duration"] > 70


@row("translate", FOREIGN, translate=True)
def there_is_a_translation_too(without: Json, given: Json) -> None:
    assert without["translation"] is None
    assert "the next representative" in given["translation"]
    assert given["transcription"] == without["transcription"]


@row("language", FOREIGN, language="english")
def the_text_is_in_the_language_told(without: Json, given: Json) -> None:
    assert (without["detected_language"], "representante" in without["transcription"]) == ("es", True)
    assert (given["detected_language"], given["language_probability"]) == ("en", 1)
    assert "the next representative" in given["transcription"]


@row("language", {**FOREIGN, "language": "en"}, language="auto")
def auto_is_detected(without: Json, given: Json) -> None:
    assert (without["detected_language"], given["detected_language"]) == ("en", "es")


@row("languages", {**CLEAR, "model": base_model}, languages=["german", "nl"])
def no_other_is_detected(without: Json, given: Json) -> None:
    assert without["detected_language"] == "en"
    assert given["detected_language"] in ("de", "nl")
    assert set(given["language_probabilities"]) == {"de", "nl"}
    assert given["language_probability"] < 0.1  # it is English


@row(
    "multilingual",
    {"audio_base64": spanish_then_english, "model": base_model, "vad_parameters": {"max_speech_duration_s": 7}},
    multilingual=True,
)
def each_window_has_its_language(without: Json, given: Json) -> None:
    assert not any("language" in segment for segment in without["segments"])
    assert [segment["language"] for segment in given["segments"]] == ["es", "en"]
    assert figure(given, "avg_logprob") > figure(without, "avg_logprob")


# Formats


def plain_text(text: Any) -> None:
    assert text.count("\n") == 0
    assert words(text) == f"{CLIP_WORDS} {STATION_WORDS}"


def formatted_text(text: Any) -> None:
    assert [words(line) for line in text.split("\n")] == [CLIP_WORDS, STATION_WORDS]


def srt_subtitles(text: Any) -> None:
    assert [words(cue.content) for cue in srt.parse(text)] == [CLIP_WORDS, STATION_WORDS]


def vtt_subtitles(text: Any) -> None:
    assert [words(cue.text) for cue in webvtt.from_string(text).captions] == [CLIP_WORDS, STATION_WORDS]


def json_segments(text: Any) -> None:
    assert [(s["id"], words(s["text"])) for s in text["segments"]] == [(1, CLIP_WORDS), (2, STATION_WORDS)]


def openai_verbose_json(text: Any) -> None:
    assert (text["language"], words(text["text"])) == ("english", f"{CLIP_WORDS} {STATION_WORDS}")
    assert [segment["id"] for segment in text["segments"]] == [0, 1]


def tsv_table(text: Any) -> None:
    head, *rows = (line.split("\t") for line in text.splitlines())
    assert head == ["start", "end", "text"]
    assert [words(line[2]) for line in rows] == [CLIP_WORDS, STATION_WORDS]
    assert 0 <= int(rows[0][0]) < int(rows[0][1]) <= int(rows[1][0]) < int(rows[1][1])


def lrc_lyrics(text: Any) -> None:
    assert [line[0] + line[9] for line in text.splitlines()] == ["[]", "[]"]
    assert [words(line) for line in text.splitlines()] == [CLIP_WORDS, STATION_WORDS]


IN_FORMAT: dict[str, Callable[[Any], None]] = {
    "plain_text": plain_text,
    "formatted_text": formatted_text,
    "srt": srt_subtitles,
    "vtt": vtt_subtitles,
    "json": json_segments,
    "verbose_json": openai_verbose_json,
    "tsv": tsv_table,
    "lrc": lrc_lyrics,
}
TRANSLATED = {**BOTH, "translate": True}  # by a model that can't: its translation is the transcription


def comes_in(field: str, name: str) -> Check:
    def check(without: Json, given: Json) -> None:
        IN_FORMAT[name](given[field])
        assert given[field] != without[field]
        assert given["segments"] == without["segments"]

    check.__name__ = f"it_comes_as_{name}"
    return check


for _name in IN_FORMAT:
    _other = "srt" if _name == "plain_text" else "plain_text"
    row("transcription", {**BOTH, "transcription": _other}, transcription=_name)(comes_in("transcription", _name))
    row("translation", {**TRANSLATED, "translation": _other}, translation=_name)(comes_in("translation", _name))


@row("formats", TRANSLATED, formats=[*IN_FORMAT])
def each_is_there_by_its_name(without: Json, given: Json) -> None:
    assert not {"outputs", "translation_outputs"} & without.keys()
    for field in ("outputs", "translation_outputs"):
        assert list(given[field]) == list(IN_FORMAT)
        for name, check in IN_FORMAT.items():
            check(given[field][name])


@row("word_timestamps", CLEAR, word_timestamps=True)
def each_word_has_its_times(without: Json, given: Json) -> None:
    assert "word_timestamps" not in without
    assert [words(word["word"]) for word in given["word_timestamps"]] == CLIP_WORDS.split()
    assert [word["word"] for s in given["segments"] for word in s["words"]] == [
        word["word"] for word in given["word_timestamps"]
    ]
    starts = [word["start"] for word in given["word_timestamps"]]
    assert starts == sorted(set(starts))


SUBTITLES = {**CLEAR, "transcription": "srt", "word_timestamps": True}


def cue_texts(output: Json) -> list[str]:
    return [cue.content for cue in srt.parse(output["transcription"])]


@row("max_line_width", SUBTITLES, max_line_width=20)
def no_line_is_wider(without: Json, given: Json) -> None:
    [cue] = cue_texts(without)
    assert (len(cue) > 20, cue.count("\n")) == (True, 0)
    assert max(len(line) for cue in cue_texts(given) for line in cue.split("\n")) in range(15, 21)
    assert said(given) == CLIP_WORDS


@row("max_line_count", {**SUBTITLES, "max_line_width": 20}, max_line_count=2)
def no_cue_has_more_lines(without: Json, given: Json) -> None:
    assert [cue.count("\n") > 1 for cue in cue_texts(without)] == [True]
    assert max(cue.count("\n") for cue in cue_texts(given)) == 1
    assert said(given) == CLIP_WORDS


@row("max_words_per_line", SUBTITLES, max_words_per_line=3)
def no_line_has_more_words(without: Json, given: Json) -> None:
    assert [len(cue.split()) for cue in cue_texts(without)] == [12]
    assert [len(cue.split()) for cue in cue_texts(given)] == [3, 3, 3, 3]


@row("highlight_words", SUBTITLES, highlight_words=True)
def each_word_is_underlined_once(without: Json, given: Json) -> None:
    assert "<u>" not in without["transcription"]
    marked = [words(text.partition("<u>")[2].partition("</u>")[0]) for text in cue_texts(given) if "<u>" in text]
    assert marked == CLIP_WORDS.split()


# How it is decoded


@row("beam_size", {**HARD, "beam_size": 1}, beam_size=5)
def more_beams_find_a_likelier_text(without: Json, given: Json) -> None:
    assert said(given) != said(without)
    assert figure(given, "avg_logprob") > figure(without, "avg_logprob")


@row("patience", HARD, patience=5.0)
def a_longer_search_finds_a_likelier_text(without: Json, given: Json) -> None:
    assert said(given) != said(without)
    assert figure(given, "avg_logprob") > figure(without, "avg_logprob")


@row("length_penalty", {**HARD, "length_penalty": 2.0}, length_penalty=0.0)
def without_it_short_texts_win(without: Json, given: Json) -> None:
    assert len(said(given)) < len(said(without))


@row("temperature", CLEAR, temperature=1.0)
def the_text_is_drawn_at_it(without: Json, given: Json) -> None:
    assert figures(without, "temperature") == {0}
    assert figures(given, "temperature") == {1}


@row(
    "temperature",
    {**CLEAR, **NEVER_GOOD_ENOUGH, **ONE_TRY},
    temperature_increment_on_fallback=None,
    temperature=[0, 0.3],
)
def each_of_a_list_is_tried(without: Json, given: Json) -> None:
    assert figures(without, "temperature") == {0}
    assert figures(given, "temperature") == {0.3}


DRAWN = {
    "audio_base64": thrice_in_noise,
    "temperature": 1.0,
    "vad_parameters": {"max_speech_duration_s": 5},
    "max_new_tokens": 20,  # at random some never end
    "no_speech_threshold": 1.0,
}


@row("best_of", {**DRAWN, "best_of": 1}, best_of=10)
def the_likeliest_of_more_candidates_is_likelier(without: Json, given: Json) -> None:
    # One draw comes to -3.5 ± 1, the best of ten to -0.9 ± 0.1.
    assert figure(given, "avg_logprob") > figure(without, "avg_logprob") + 0.3


@row("repetition_penalty", TWICE, repetition_penalty=3.0)
def a_word_that_was_said_is_less_likely_to_come_again(without: Json, given: Json) -> None:
    def repeated(output: Json) -> float:
        windows = tokens_of_windows(output)
        return sum(len(window) - len(set(window)) for window in windows) / sum(map(len, windows))

    assert repeated(without) > 0.3
    assert repeated(given) < repeated(without) / 2


@row("no_repeat_ngram_size", TWICE, no_repeat_ngram_size=3)
def no_three_tokens_come_twice(without: Json, given: Json) -> None:
    def is_repeated(output: Json) -> list[bool]:
        threes = [list(zip(w, w[1:], w[2:], strict=False)) for w in tokens_of_windows(output)]
        return [len(window) > len(set(window)) for window in threes]

    assert any(is_repeated(without))
    assert not any(is_repeated(given))


@row("max_new_tokens", {**CLEAR, **ONE_TRY}, max_new_tokens=8)
def a_windows_text_ends_after_so_many_and_not_before(without: Json, given: Json) -> None:
    assert [len(window) for window in tokens_of_windows(without)] == [15]
    assert [len(window) for window in tokens_of_windows(given)] == [8]


@row("max_new_tokens", {**CLEAR, **ONE_TRY, "initial_prompt": "word " * 60}, max_new_tokens=8)
def behind_a_long_prompt_it_has_as_many(without: Json, given: Json) -> None:
    assert [len(window) > 12 for window in tokens_of_windows(without)] == [True]
    assert [len(window) for window in tokens_of_windows(given)] == [8]


@row("suppress_tokens", CLEAR, suppress_tokens=[-1, 4324])
def a_suppressed_word_does_not_come(without: Json, given: Json) -> None:
    assert 4324 in without["segments"][0]["tokens"]
    assert 4324 not in given["segments"][0]["tokens"]
    assert ("window" in said(without).split(), "window" in said(given).split()) == (True, False)


@row("suppress_tokens", CLEAR, suppress_tokens="-1, 4324")
def they_may_be_separated_by_commas(without: Json, given: Json) -> None:
    assert 4324 in without["segments"][0]["tokens"]
    assert 4324 not in given["segments"][0]["tokens"]


@row("suppress_tokens", {**SILENCE, "initial_prompt": "[BLANK_AUDIO] [BLANK_AUDIO]"}, suppress_tokens=[])
def symbols_come_when_none_are_suppressed(without: Json, given: Json) -> None:
    assert "[" not in without["transcription"]
    assert given["transcription"].startswith("[BLANK_AUDIO]")


@row("initial_prompt", TWO_PIECES, initial_prompt=LOWER_CASE)
def the_first_window_is_written_in_its_style(without: Json, given: Json) -> None:
    assert [s["text"].strip()[0] for s in without["segments"]] == ["P", "P"]
    assert [s["text"].strip()[0] for s in given["segments"]] == ["p", "P"]


@row("prefix", TWO_PIECES, prefix="Thank you,")
def the_first_windows_text_begins_with_it(without: Json, given: Json) -> None:
    assert not any("Thank you" in segment["text"] for segment in without["segments"])
    assert [s["text"].strip().startswith("Thank you,") for s in given["segments"]] == [True, False]


@row("hotwords", TWO_PIECES, hotwords="please open the window, and close the door")
def each_window_is_written_in_their_style(without: Json, given: Json) -> None:
    assert not any("window," in segment["text"] for segment in without["segments"])
    assert ["window," in segment["text"] for segment in given["segments"]] == [True, True]


@row("condition_on_previous_text", {**TWO_PIECES, "initial_prompt": LOWER_CASE}, condition_on_previous_text=True)
def a_window_goes_on_in_the_style_of_the_one_before(without: Json, given: Json) -> None:
    assert [s["text"].strip()[0] for s in without["segments"]] == ["p", "P"]
    assert [s["text"].strip()[0] for s in given["segments"]] == ["p", "p"]


# When a window is tried again, or left out


@row(
    "temperature_increment_on_fallback", {**CLEAR, **NEVER_GOOD_ENOUGH, **ONE_TRY}, temperature_increment_on_fallback=1
)
def a_failed_window_is_tried_again_one_step_hotter(without: Json, given: Json) -> None:
    assert figures(without, "temperature") == {0}
    assert figures(given, "temperature") == {1}


@row("compression_ratio_threshold", {**CLEAR, "temperature": [0, 0.3]}, compression_ratio_threshold=0.5)
def text_that_repeats_itself_fails(without: Json, given: Json) -> None:
    assert figures(without, "temperature") == {0}
    assert figures(given, "temperature") == {0.3}


@row("logprob_threshold", {**CLEAR, "temperature": [0, 0.3]}, logprob_threshold=-0.01)
def unlikely_text_fails(without: Json, given: Json) -> None:
    assert figures(without, "temperature") == {0}
    assert figures(given, "temperature") == {0.3}


@row("no_speech_threshold", {**CLEAR, **NEVER_GOOD_ENOUGH, **ONE_TRY, "no_speech_threshold": 1}, no_speech_threshold=0)
def a_failed_window_gives_no_text(without: Json, given: Json) -> None:
    assert (said(without), said(given)) == (CLIP_WORDS, "")


@row(
    "hallucination_silence_threshold",
    {**SILENCE, "word_timestamps": True},
    hallucination_silence_threshold=0.2,
)
def what_is_invented_in_silence_is_left_out(without: Json, given: Json) -> None:
    assert said(without) != ""
    assert said(given) == ""


# How the answer comes


@row("timeout_s", TWICE, timeout_s=0.001)
def the_job_ends_in_time(without: Json, given: Json) -> None:
    assert "error" not in without
    assert given["error"] == "TIMEOUT: the job took longer than 0.001 s"


LARGE = {**CLEAR, "word_timestamps": True, "formats": ["json", "verbose_json", "srt"]}


@row("upload_url", LARGE, tight=True, upload_url=f"{FILES}/upload?signature=1")
def a_large_result_is_put_there(without: Json, given: Json) -> None:
    assert "stored" not in without
    assert "left out" in without["warnings"][-1]
    whole = json.loads(UPLOADED[-1])
    assert (said(whole), len(UPLOADED[-1])) == (CLIP_WORDS, given["bytes"])
    assert (given["transcription"], given["segments"], given["summary"]["segments"]) == (None, [], 1)
    assert list(given["stored"]) == ["result.json"]


# --- the tests


@pytest.fixture(scope="module")
def files() -> Iterator[FileServer]:
    with FileServer(ROUTES) as server:
        yield server


class Asked:
    """Answers inputs, each but once."""

    def __init__(self, service: RealService, files: FileServer) -> None:
        self.service = service
        self._files = files
        self._known: dict[tuple[str, bool], Json] = {}

    def outputs(self, *inputs: Json, tight: bool) -> list[Json]:
        given = [self.filled(each) for each in inputs]
        keys = [(json.dumps(each, sort_keys=True), tight) for each in given]
        new = {
            key: {"id": "job", "input": each} for key, each in zip(keys, given, strict=True) if key not in self._known
        }
        self._known.update(zip(new, self.service.outputs(*new.values(), tight=tight), strict=True))
        return [self._known[key] for key in keys]

    def filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self.filled(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.filled(inner) for inner in value]
        if callable(value):
            return value()
        return value.replace(FILES, self._files.url("")) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def asked(files: FileServer) -> Iterator[Asked]:
    with real_service(TIGHT_BYTES) as service:
        yield Asked(service, files)


@pytest.fixture(autouse=True)
def _private_addresses_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS", "true")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_field_does_what_it_promises(row: Row, asked: Asked) -> None:
    row.check(*asked.outputs(row.without, row.given, tight=row.tight))


def test_a_jobs_own_bucket_takes_what_is_too_large(asked: Asked) -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        requests.put(f"{url}/mine", timeout=10).raise_for_status()
        config = {"endpointUrl": url, "accessId": "AKID", "accessSecret": "secret", "bucketName": "mine"}
        job = {"id": "large", "input": asked.filled(LARGE), "s3Config": config}
        [given] = asked.service.outputs(job, tight=True)
        links = given["stored"]
        assert links["result.json"].startswith(f"{url}/mine/large/result.json?")
        assert "AKID" in links["result.json"]
        assert "secret" not in json.dumps(given)
        assert said(requests.get(links["result.json"], timeout=10).json()) == CLIP_WORDS
        subtitles = requests.get(links["transcription.srt"], timeout=10).text
        assert [words(cue.content) for cue in srt.parse(subtitles)] == [CLIP_WORDS]
    finally:
        server.stop()


def test_each_field_has_a_row() -> None:
    fields = {name for name, _ in fields_of(Request)}
    assert {row.field for row in ROWS} == fields


def test_each_word_that_a_field_takes_has_a_row() -> None:
    words_of_fields = {(name, word) for name, kind in fields_of(Request) for word in literals(kind)}
    used = {(row.field, row.given[row.field]) for row in ROWS if isinstance(row.given.get(row.field), str)}
    used |= {(row.field, word) for row in ROWS if row.field == "formats" for word in row.given["formats"]}
    assert words_of_fields <= used


def fields_of(model: type[BaseModel], within: str = "") -> Iterator[tuple[str, Any]]:
    """With those of the objects in it, as `clip.start`; and what each may be."""
    for name, field in model.model_fields.items():
        yield within + name, field.annotation
        for inner in parts(field.annotation):
            if get_origin(inner) is None and isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from fields_of(inner, f"{within}{name}.")


def literals(annotation: Any) -> set[str]:
    return {word for part in parts(annotation) if get_origin(part) is Literal for word in get_args(part)}


def parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from parts(inner)
