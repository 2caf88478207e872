"""The README's promises: its tables are the code's, its examples run as they stand, and callers of RunPod's own worker
find what it says they do."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from caller import ROUTES, STATION_WORDS, words
from file_server import FileServer
from local_endpoint import API_KEY, ENDPOINT_ID, LocalEndpoint
from media import CLIP_WORDS
from served import answer, job, service
from worker_process import ROOT, WorkerProcess

from whisper_worker.errors import WorkerError
from whisper_worker.request import InputRules, Request, parse_request

README = (ROOT / "README.md").read_text()
TALK, WALK = "https://example.org/talk.mp3", "https://example.org/walk.mp3"  # the recordings in its examples
API = "https://api.runpod.ai/v2"

Json = dict[str, Any]


def table(header: str) -> list[list[str]]:
    """The cells of the README's table with that first line."""
    _, _, below = README.partition(f"\n{header}\n")
    lines = below.partition("\n\n")[0].splitlines()[1:]
    assert lines, f"no table with the header {header}"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in (f"{line[:-1]} " for line in lines)]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# --- errors


def codes(kind: type[WorkerError] = WorkerError) -> Iterator[str]:
    for each in kind.__subclasses__():
        yield each.code
        yield from codes(each)


def test_the_readme_explains_each_error_code_and_no_other() -> None:
    explained = [code for row in table("| code | meaning |") for code in quoted(row[0])]
    assert sorted(explained) == sorted(set(codes()))


# --- streams


def streamed(job: Json) -> list[Json]:
    async def items() -> list[Json]:
        with service() as served:
            async with aclosing(served.stream(job)) as stream:
                return [item async for item in stream]

    return asyncio.run(items())


def test_the_items_of_a_stream_have_the_fields_in_the_table() -> None:
    told = {quoted(item)[0].split('"')[3]: quoted(fields) for item, fields in table("| item | fields |")}
    items = [*streamed(job()), *streamed(job(b"hello"))][:-1]  # that is RunPod's sign for an error
    fields = {item.pop("type"): set(item) for item in items}
    assert fields.keys() == told.keys()
    assert fields["info"] == set(told["info"])
    assert fields["segments"] == {"segments"}
    assert fields["error"] == set(told["error"]) - {"FAILED"}  # the status


def test_the_items_of_several_files_say_which_file_they_are_about() -> None:
    files = [{"audio_base64": job()["input"]["audio_base64"]}] * 2
    *items, last = streamed({"id": "several", "input": {"audios": files}})
    assert sorted((item["type"], item["audio"]) for item in items) == [
        ("info", 0),
        ("info", 1),
        ("segments", 0),
        ("segments", 1),
    ]
    assert [each["transcription"] for each in last["results"]] == ["Hello.", "Hello."]
    assert not any("segments" in each for each in last["results"])


# --- callers of RunPod's own worker

DROP_IN = table("| | field | theirs | ours | what differs |")

THEIR_DEFAULTS: Json = {
    "audio": None,
    "audio_base64": None,
    "model": "base",
    "transcription": "plain_text",
    "translate": False,
    "translation": "plain_text",
    "language": None,
    "temperature": 0,
    "best_of": 5,
    "beam_size": 5,
    "patience": 1.0,
    "length_penalty": 0,
    "suppress_tokens": "-1",
    "initial_prompt": None,
    "condition_on_previous_text": True,
    "temperature_increment_on_fallback": 0.2,
    "compression_ratio_threshold": 2.4,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
    "enable_vad": False,
    "word_timestamps": False,
}
THEIR_OUTPUTS = {"detected_language", "transcription", "translation", "device", "model", "segments", "word_timestamps"}
THEIR_TEST_INPUT: Json = {
    "audio": "https://github.com/runpod-workers/sample-inputs/raw/main/audio/gettysburg.wav",
    "model": "large-v2",
    "transcription": "plain text",
    "translate": False,
    "temperature": 0,
    "best_of": 5,
    "beam_size": 5,
    "suppress_tokens": "-1",
    "condition_on_previous_text": False,
    "temperature_increment_on_fallback": 0.2,
    "compression_ratio_threshold": 2.4,
    "logprob_threshold": -1,
    "no_speech_threshold": 0.6,
}


def rows(direction: str) -> dict[str, list[str]]:
    """`theirs` and `ours` by the name of the field."""
    return {quoted(field)[0]: [theirs, ours] for which, field, theirs, ours, _ in DROP_IN if which == direction}


def test_the_table_has_each_of_their_inputs_with_its_default() -> None:
    told = {name: json.loads(quoted(theirs)[0]) if theirs else None for name, (theirs, _) in rows("in").items()}
    assert told == THEIR_DEFAULTS


@pytest.mark.parametrize("name", THEIR_DEFAULTS)
def test_our_default_is_the_one_in_the_table(name: str) -> None:
    ours = rows("in")[name][1]
    told = json.loads(quoted(ours)[0]) if ours else None
    default = Request.model_fields[name].default
    assert (told, type(told)) == (default, type(default))


def test_the_table_says_of_each_field_with_another_default_why() -> None:
    why = {quoted(field)[0]: reason for way, field, _, _, reason in DROP_IN if way == "in"}
    unlike = {name for name, (theirs, ours) in rows("in").items() if theirs != ours}
    assert unlike >= {"model", "length_penalty", "condition_on_previous_text", "enable_vad"}
    assert [name for name in unlike if not why[name]] == []


def test_their_own_test_input_is_accepted_as_it_is() -> None:
    parse_request(THEIR_TEST_INPUT, InputRules(allow_local_files=False, max_base64_bytes=1))


def with_speech(their_input: Json) -> Json:
    return job(**{name: value for name, value in their_input.items() if not name.startswith("audio")})


def test_their_own_test_input_is_answered_with_each_of_their_outputs() -> None:
    output = answer(with_speech(THEIR_TEST_INPUT), MODEL="large-v2")
    assert THEIR_OUTPUTS - set(output) == {"word_timestamps"}  # which weren't asked for
    assert output["transcription"] == "Hello."


@cache
def output_of_all_fields() -> Json:
    """Of each of their fields with their default, or another where that is nothing."""
    fields = {**THEIR_DEFAULTS, "language": "de", "initial_prompt": "Ada", "translate": True, "word_timestamps": True}
    return answer(with_speech(fields), MODEL="base")


def test_a_request_with_each_of_their_fields_is_answered_with_each_of_their_outputs() -> None:
    assert set(output_of_all_fields()) >= THEIR_OUTPUTS
    assert rows("out").keys() - {"translation_time"} == THEIR_OUTPUTS


@pytest.mark.parametrize("name", ["segments", "word_timestamps"])
def test_items_of_lists_have_the_fields_that_theirs_have(name: str) -> None:
    [item] = output_of_all_fields()[name]
    assert set(item) >= set(quoted(rows("out")[name][0])) >= {"start", "end"}


def test_the_models_that_their_callers_name_can_all_be_offered() -> None:
    names = ["tiny", "small", "medium", "large-v1", "large-v2", "large-v3"]
    output = answer(job(model="base"), MODEL="base", MODELS=",".join(names))
    assert output["transcription"] == "Hello."


# --- examples


@dataclass(frozen=True)
class Place:
    """An endpoint whose worker answers, and what is on the net."""

    endpoint: LocalEndpoint
    files: FileServer

    def run(self, command: list[str], example: str) -> str:
        """What an example prints. Only the addresses in it are others."""
        for there, here in (
            (API, self.endpoint.url),
            (TALK, self.files.url("/window.ogg")),
            (WALK, self.files.url("/station.ogg")),
        ):
            example = example.replace(there, here)
        env = {
            **os.environ,
            "ENDPOINT_ID": ENDPOINT_ID,
            "RUNPOD_API_KEY": API_KEY,
            "RUNPOD_ENDPOINT_BASE_URL": self.endpoint.url,
        }
        ran = subprocess.run([*command, example], env=env, capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, Place]]:
    """One worker that answers with objects, and one that streams."""
    with ExitStack() as stack:
        files = stack.enter_context(FileServer(ROUTES))
        made, workers = {}, []
        for name, streaming in (("plain", "false"), ("streaming", "true")):
            endpoint = stack.enter_context(LocalEndpoint())
            env = {"STREAMING": streaming, "INTER_THREADS": "1", "RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS": "true"}
            workers.append(stack.enter_context(WorkerProcess(endpoint, **env)))
            made[name] = Place(endpoint, files)
        for worker in workers:
            worker.wait_until_ready()
        yield made


def examples(language: str, *, with_part: str) -> list[str]:
    return [block for block in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if with_part in block]


def python(place: Place, with_part: str) -> str:
    [example] = examples("python", with_part=with_part)
    return place.run([sys.executable, "-c"], example)


def curl(place: Place, with_part: str) -> list[Json]:
    """The objects that it prints."""
    if not shutil.which("curl"):
        pytest.skip("no curl on this machine")
    [example] = [each for each in examples("sh", with_part=with_part) if API in each]
    printed, answers = place.run(["sh", "-c"], example), []
    while printed:
        each, end = json.JSONDecoder().raw_decode(printed)
        answers.append(each)
        printed = printed[end:].lstrip()
    return answers


def assert_words_are_underlined(subtitles: str) -> None:
    assert subtitles.startswith("WEBVTT\n")
    assert len(re.findall("<u>", subtitles)) == len(CLIP_WORDS.split())


def test_the_curl_example_transcribes_several_files_too_and_makes_subtitles(places: dict[str, Place]) -> None:
    one, several, subtitles = (each["output"] for each in curl(places["plain"], "runsync"))
    assert words(one["transcription"]) == CLIP_WORDS
    assert [words(each["transcription"]) for each in several["results"]] == [CLIP_WORDS, STATION_WORDS]
    assert_words_are_underlined(subtitles["transcription"])


def test_the_python_example_transcribes_several_files_too_and_makes_subtitles(places: dict[str, Place]) -> None:
    texts, header, subtitles = python(places["plain"], "run_sync").partition("WEBVTT\n")
    assert [words(line) for line in texts.splitlines()] == [CLIP_WORDS, CLIP_WORDS, STATION_WORDS]
    assert_words_are_underlined(header + subtitles)


def test_the_curl_example_of_a_stream_prints_its_items_until_the_end(places: dict[str, Place]) -> None:
    answers = curl(places["streaming"], "/stream/")
    items = [chunk["output"] for each in answers for chunk in each["stream"]]
    assert [item["type"] for item in items] == ["info", "segments", "result"]
    assert answers[-1]["status"] == "COMPLETED"


def test_the_python_example_of_a_stream_prints_its_segments(places: dict[str, Place]) -> None:
    assert words(python(places["streaming"], ".stream()")) == CLIP_WORDS


def test_each_example_is_there_in_three_languages() -> None:
    for language in ("sh", "python", "js"):
        assert len([each for each in examples(language, with_part="talk.mp3") if "ENDPOINT_ID" in each]) == 2
