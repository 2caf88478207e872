"""The JSON Schema that the worker prints: it says of inputs and outputs what the worker does with them."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine, segment, spoken
from file_server import FileServer, taken
from jsonschema import Draft202012Validator
from media import RATE, pcm, wav
from served import answer, job, raising, service, speech_for
from worker_process import ROOT, worker_env

from whisper_worker import reply
from whisper_worker.errors import EXIT_SICK, BadInput, OutOfMemory, Unhealthy
from whisper_worker.formats import FORMATS
from whisper_worker.request import FORMAT_NAMES, InputRules, parse_request
from whisper_worker.schema import markdown_tables, schema
from whisper_worker.service import Service
from whisper_worker.speech import Speech
from whisper_worker.stop import Stop
from whisper_worker.transcript import Said

URL = "https://example.org/a.mp3"
RULES = InputRules(allow_local_files=False, max_base64_bytes=1000)
INPUT = Draft202012Validator(schema()["input"])

Json = dict[str, Any]


def printed(*arguments: str) -> str:
    command = [sys.executable, "-m", "whisper_worker.schema", *arguments]
    env = worker_env(PYTHONPATH=str(ROOT / "src"))
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_command_prints_a_valid_schema_of_the_input_and_of_the_output() -> None:
    both = json.loads(printed())
    assert both == schema()
    for each in both.values():
        Draft202012Validator.check_schema(each)


def test_the_readme_has_the_tables_that_the_command_prints() -> None:
    tables = printed("--markdown")
    assert tables == "\n\n".join(markdown_tables()) + "\n"
    readme = (ROOT / "README.md").read_text()
    assert [table for table in tables.strip().split("\n\n") if f"\n\n{table}\n\n" not in readme] == []


def test_every_format_that_can_be_asked_for_can_be_made() -> None:
    assert set(FORMAT_NAMES) == set(FORMATS)


# --- inputs

GOOD: dict[str, Json] = {
    "a URL": {"audio": URL},
    "base64": {"audio_base64": "UklGRg=="},
    "a data: URL": {"audio": "data:audio/wav;base64,UklGRg=="},
    "several files": {"audios": [URL, {"audio_base64": "UklGRg=="}, {"audio": URL, "audio_headers": {"A": "b"}}]},
    "headers": {"audio": URL, "audio_headers": {"Authorization": "Bearer token"}},
    "one part of one channel of one stream": {"audio": URL, "audio_stream": 1, "channels": 0, "clip": {"start": 3}},
    "each channel": {"audio": URL, "channels": "split", "clip": {"start": 0.5, "end": 1}},
    "a language's name": {"audio": URL, "language": "German"},
    "some languages": {"audio": URL, "languages": ["de", "French"], "multilingual": True},
    "the official spelling of a format": {"audio": URL, "transcription": "plain text"},
    "more formats": {"audio": URL, "formats": ["verbose_json", "tsv", "lrc"]},
    "subtitles of words": {"audio": URL, "transcription": "srt", "word_timestamps": True, "highlight_words": True},
    "a list of temperatures": {"audio": URL, "temperature": [0, 0.4]},
    "tokens in a text": {"audio": URL, "suppress_tokens": "-1"},
    "tokens in a list": {"audio": URL, "suppress_tokens": [-1, 50257]},
    "detection of speech": {"audio": URL, "vad_parameters": {"threshold": 0.3, "speech_pad_ms": 100}},
    "a place for the result": {"audio": URL, "upload_url": "https://example.org/put?signature=x"},
    "null, which counts as absent": {"audio": URL, "audio_base64": None, "temperature": None, "clip": {"start": None}},
    "null in one of several files": {"audios": [{"audio": None, "audio_base64": "UklGRg=="}]},
}
BAD: dict[str, Any] = {
    "no object": [URL],
    "no audio": {"language": "de"},
    "null for audio": {"audio": None},
    "two audios": {"audio": URL, "audio_base64": "UklGRg=="},
    "one audio and several": {"audio": URL, "audios": [URL]},
    "no file among several": {"audios": []},
    "two audios in one of several files": {"audios": [{"audio": URL, "audio_base64": "UklGRg=="}]},
    "an unknown field": {"audio": URL, "beams": 5},
    "an unknown field of a part": {"audio": URL, "clip": {"begin": 3}},
    "a number in quotes": {"audio": URL, "beam_size": "5"},
    "a fraction": {"audio": URL, "beam_size": 2.5},
    "true for a number": {"audio": URL, "temperature": True},
    "a number for true": {"audio": URL, "translate": 1},
    "a number for a text": {"audio": URL, "language": 5},
    "a text for a list": {"audio": URL, "languages": "de"},
    "a list for a text": {"audio": URL, "initial_prompt": ["a"]},
    "too many beams": {"audio": URL, "beam_size": 11},
    "a temperature below 0": {"audio": URL, "temperature": [-0.1]},
    "an unknown format": {"audio": URL, "formats": ["pdf"]},
    "an unknown task": {"audio": URL, "task": "summarize"},
    "a channel below 0": {"audio": URL, "channels": -1},
    "a word that is no channel": {"audio": URL, "channels": "left"},
    "a token that no model has": {"audio": URL, "suppress_tokens": [99_999]},
    "a threshold of 2": {"audio": URL, "vad_parameters": {"threshold": 2}},
}


@pytest.mark.parametrize("given", GOOD.values(), ids=GOOD.keys())
def test_a_good_input_is_good_by_the_schema_and_to_the_worker(given: Json) -> None:
    INPUT.validate(given)
    parse_request(given, RULES)


@pytest.mark.parametrize("given", BAD.values(), ids=BAD.keys())
def test_a_bad_input_is_bad_by_the_schema_and_to_the_worker(given: Any) -> None:
    assert not INPUT.is_valid(given)
    with pytest.raises(BadInput):
        parse_request(given, RULES)


# --- outputs


def closed(described: Any) -> Any:
    """The schema, with no room for a field that it doesn't name."""
    if isinstance(described, list):
        return [closed(each) for each in described]
    if not isinstance(described, Mapping):
        return described
    inner = {key: closed(value) for key, value in described.items()}
    return {**inner, "additionalProperties": False} if isinstance(described.get("properties"), Mapping) else inner


def assert_is(kind: str, output: Json) -> None:
    """That it is told apart from all other kinds, too."""
    described = closed(schema()["output"])
    valid = [
        each["$ref"]
        for each in described["anyOf"]
        if Draft202012Validator({**described, "anyOf": [each]}).is_valid(output)
    ]
    assert valid == [f"#/$defs/{kind}"]


def test_a_plain_output() -> None:
    output = answer(job())
    assert_is("TranscriptOutput", output)
    assert set(output) == set(schema()["output"]["$defs"]["TranscriptOutput"]["required"]) | {"timings"}


def test_an_output_of_silence() -> None:
    assert_is("TranscriptOutput", answer(job(wav(pcm(speech_for(1) * 0)))))


def test_an_output_with_words_a_translation_and_all_formats() -> None:
    output = answer(job(word_timestamps=True, translate=True, translation="json", formats=list(FORMATS)))
    assert_is("TranscriptOutput", output)
    unnamed = set(schema()["output"]["$defs"]["TranscriptOutput"]["properties"]) - set(output)
    assert unnamed == {"stored", "bytes", "summary"}


def test_an_output_with_channels_and_languages() -> None:
    def act(speech: Speech, stop: Stop) -> Said:
        said = segment(0, 1)
        return Said((type(said)(**{**vars(said), "language": "de"}),), language=spoken("de"))

    stereo = np.stack([speech_for(2), speech_for(4)[2 * RATE :]], axis=1)
    assert_is("TranscriptOutput", answer(job(wav(pcm(stereo)), channels="split"), FakeEngine(act)))


def test_an_output_that_is_only_a_translation() -> None:
    assert_is("TranscriptOutput", answer(job(task="translate", formats=["srt"])))


def test_an_output_that_is_only_a_language() -> None:
    assert_is("DetectionOutput", answer(job(task="detect_language")))


def several(engine: FakeEngine | None = None, **options: Any) -> Json:
    items = [{"audio_base64": job()["input"]["audio_base64"]}, {"audio_base64": "aGVsbG8="}]
    return answer({"id": "several", "input": {"audios": items, **options}}, engine)


def test_an_output_of_several_files_one_of_them_bad() -> None:
    output = several()
    assert [set(result) == {"error"} for result in output["results"]] == [False, True]
    assert_is("SeveralOutput", output)


def test_an_output_of_several_files_that_is_only_their_languages() -> None:
    assert_is("SeveralOutput", several(task="detect_language"))


def little_less_than(output: Json) -> str:
    """The size of a reply that this is too large for, if only by its details."""
    return str(reply.size({"output": output}) - 40)


def test_an_output_that_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS", "true")
    bodies: list[bytes] = []
    with FileServer({"/put": taken(bodies)}) as server:
        given = job(formats=list(FORMATS), word_timestamps=True, upload_url=server.url("/put?signature=x"))
        output = answer(given, MAX_INLINE_BYTES="1500")
    assert {"stored", "bytes", "summary"} <= set(output)
    assert_is("TranscriptOutput", output)
    [body] = bodies
    assert_is("TranscriptOutput", json.loads(body))


def test_an_output_without_its_details() -> None:
    timed = job(word_timestamps=True)
    output = answer(timed, MAX_INLINE_BYTES=little_less_than(answer(timed)))
    assert "left out" in output["warnings"][-1]
    assert_is("TranscriptOutput", output)


def test_an_error() -> None:
    assert_is("ErrorOutput", answer(job(b"hello")))


def said_once(then: Exception) -> FakeEngine:
    """Says something in the first piece, and fails in the second."""
    said: list[Speech] = []

    def act(speech: Speech, stop: Stop) -> Said:
        said.append(speech)
        if len(said) > 1:
            raise then
        return Said((segment(0, 1),), language=spoken("de"))

    return FakeEngine(act)


def test_an_error_with_what_was_done() -> None:
    long = job(wav(pcm(speech_for(40))), condition_on_previous_text=True, word_timestamps=True)
    output = answer(long, said_once(then=OutOfMemory("full")))
    assert len(output["partial"]["segments"]) == 1
    assert_is("ErrorOutput", output)
    smaller = answer(long, said_once(then=OutOfMemory("full")), MAX_INLINE_BYTES=little_less_than(output))
    assert "left out" in smaller["partial"]["warnings"][-1]
    assert_is("ErrorOutput", smaller)


def test_an_error_with_what_was_done_of_several_files() -> None:
    output = several(raising(Unhealthy("sick", EXIT_SICK)))
    assert output.pop("refresh_worker")  # for RunPod; no caller sees it
    assert [bool(part) for part in output["partial"]["results"]] == [True, True]
    assert output["partial"]["results"][1]["error"].startswith("NOT_AUDIO: ")
    assert_is("ErrorOutput", output)


# --- items of streams


def streamed(given: Json, engine: FakeEngine | None = None) -> list[Json]:
    async def run(served: Service) -> list[Json]:
        async with aclosing(served.stream(given)) as stream:
            return [item async for item in stream]

    with service(engine, STREAM_INTERVAL_S="0") as served:
        return asyncio.run(run(served))


ITEMS = Draft202012Validator(closed(schema()["item"]))
ONE = {"audio_base64": job()["input"]["audio_base64"]}
STREAMS: dict[str, Json] = {
    "one file": job(word_timestamps=True, formats=["srt"]),
    "several files": {"id": "several", "input": {"audios": [ONE, {"audio_base64": "aGVsbG8="}, ONE]}},
    "a language": job(task="detect_language"),
}


@pytest.mark.parametrize("given", STREAMS.values(), ids=STREAMS.keys())
def test_the_items_of_a_stream(given: Json) -> None:
    items = streamed(given)
    for item in items:
        ITEMS.validate(item)
    assert items[0]["type"] == "info"
    assert items[-1]["type"] == "result"


def test_the_items_of_a_stream_in_which_one_of_several_files_fails_midway() -> None:
    long = {"audio_base64": job(wav(pcm(speech_for(40))))["input"]["audio_base64"]}
    given = {"id": "several", "input": {"audios": [long], "condition_on_previous_text": True}}
    *_, result = items = streamed(given, said_once(then=OutOfMemory("full")))
    for item in items:
        ITEMS.validate(item)
    assert "segments" not in result["results"][0]["partial"]


def test_the_items_of_a_stream_that_fails() -> None:
    *items, sign = streamed(job(b"hello"))
    for item in items:
        ITEMS.validate(item)
    assert items[-1]["code"] == "NOT_AUDIO"
    assert_is("ErrorOutput", sign)
