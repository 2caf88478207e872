"""The whole worker as a real process, against a local endpoint and RunPod's own client."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from caller import FILES, HTML, ONE_TRY, ROUTES, SILENCE, STATION, STATION_WORDS, WINDOW, Caller, words
from file_server import FileServer
from local_endpoint import WORKER_ID, LocalEndpoint
from media import CLIP, CLIP_WORDS
from worker_process import ROOT, WorkerProcess, run_handler, worker_env

SRT = r"1\n00:00:0\d,\d{3} --> 00:00:0\d,\d{3}\n[A-Za-z].*"
VTT = r"WEBVTT\n\n00:00:0\d\.\d{3} --> 00:00:0\d\.\d{3}\n[A-Za-z].*"


@dataclass(frozen=True)
class Good:
    name: str
    input: dict[str, Any]
    words: str
    shape: str = r"([A-Za-z].*[.])?"  # what the whole of `transcription` matches


@dataclass(frozen=True)
class Bad:
    name: str
    input: Any
    error: str  # how it begins


GOOD = [
    Good("base64", {"audio_base64": WINDOW}, CLIP_WORDS),
    Good("another base64", {"audio_base64": STATION}, STATION_WORDS),
    Good("url", {"audio": f"{FILES}/window.ogg"}, CLIP_WORDS),
    Good("url with a signature", {"audio": f"{FILES}/station.ogg?signature=SECRET"}, STATION_WORDS),
    Good("redirect", {"audio": f"{FILES}/moved"}, STATION_WORDS),
    Good("base64 to srt", {"audio_base64": WINDOW, "transcription": "srt"}, CLIP_WORDS, SRT),
    Good("url to srt", {"audio": f"{FILES}/station.ogg", "transcription": "srt"}, STATION_WORDS, SRT),
    Good("base64 to vtt", {"audio_base64": STATION, "transcription": "vtt"}, STATION_WORDS, VTT),
    Good("formatted text", {"audio_base64": WINDOW, "transcription": "formatted_text"}, CLIP_WORDS),
    Good("word timestamps", {"audio_base64": STATION, "word_timestamps": True}, STATION_WORDS),
    Good("url to vtt", {"audio": f"{FILES}/window.ogg", "transcription": "vtt"}, CLIP_WORDS, VTT),
    Good("no vad", {"audio_base64": WINDOW, "enable_vad": False}, CLIP_WORDS),
    Good("silence", {"audio_base64": SILENCE}, ""),
]
BAD = [
    Bad("text", "please transcribe", "BAD_INPUT: input: must be an object"),
    Bad("empty", {}, "BAD_INPUT: give exactly one of audio, audio_base64 and audios"),
    Bad("unknown field", {"audio_base64": WINDOW, "langauge": "en"}, "BAD_INPUT: langauge: unknown field"),
    Bad("local path", {"audio": str(CLIP)}, "BAD_INPUT: audio: must be an http or https URL"),
    Bad("404", {"audio": f"{FILES}/missing?signature=SECRET"}, "DOWNLOAD_FAILED: http://127.0.0.1:"),
    Bad("url of a web page", {"audio": f"{FILES}/page?signature=SECRET"}, "NOT_AUDIO: "),
    Bad("base64 of a web page", {"audio_base64": HTML}, "NOT_AUDIO: "),
]


@pytest.fixture(scope="module")
def files() -> Iterator[FileServer]:
    with FileServer(ROUTES) as server:
        yield server


@dataclass(frozen=True)
class Evening:
    """What is left of a worker that found twenty jobs waiting, did them all, and was told to end."""

    results: dict[str, dict[str, Any]]  # each job's final status, by the case's name
    endpoint: LocalEndpoint
    worker: WorkerProcess
    exit_code: int
    files_left: list[Path]

    def message_numbers(self, event: str) -> list[int]:
        return [n for n, message in enumerate(self.worker.messages) if message.startswith(f"event={event} ")]


@pytest.fixture(scope="module")
def evening(files: FileServer, tmp_path_factory: pytest.TempPathFactory) -> Evening:
    folder = tmp_path_factory.mktemp("worker")
    env = {"LOG_LEVEL": "DEBUG", "INTER_THREADS": "2", "RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS": "true"}
    with LocalEndpoint() as endpoint, WorkerProcess(endpoint, TMPDIR=str(folder), **env) as worker:
        caller = Caller(endpoint, files)
        mixed = [case for pair in zip(GOOD, BAD, strict=False) for case in pair] + GOOD[len(BAD) :]
        ids = {case.name: caller.run(case.input) for case in mixed}
        worker.wait_for(lambda: all(job.is_final for job in endpoint.jobs.values()))
        results = {name: caller.status(job_id) for name, job_id in ids.items()}
        caller.close()
        exit_code = worker.stop()
        files_left = list(folder.rglob("*"))
        return Evening(results, endpoint, worker, exit_code, files_left)


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_each_good_job_of_twenty_sent_at_once_comes_back_with_its_words(evening: Evening, case: Good) -> None:
    result = evening.results[case.name]
    assert result["status"] == "COMPLETED", result
    text = result["output"]["transcription"]
    assert words(text) == case.words
    assert re.fullmatch(case.shape, text.strip(), re.DOTALL), text


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_each_bad_job_of_twenty_sent_at_once_fails_with_its_code(evening: Evening, case: Bad) -> None:
    result = evening.results[case.name]
    assert result["status"] == "FAILED", result
    assert result["error"].startswith(case.error)


def test_word_timestamps_are_those_of_the_job_that_asked_for_them(evening: Evening) -> None:
    outputs = {case.name: evening.results[case.name]["output"] for case in GOOD}
    assert [name for name, output in outputs.items() if "word_timestamps" in output] == ["word timestamps"]
    timed = outputs["word timestamps"]["word_timestamps"]
    assert words("".join(word["word"] for word in timed)) == STATION_WORDS
    starts = [word["start"] for word in timed]
    assert starts == sorted(starts)


def test_no_error_holds_a_trace_a_path_or_the_query_of_a_url(evening: Evening) -> None:
    errors = " ".join(evening.results[case.name]["error"] for case in BAD)
    for secret in ("SECRET", "Traceback", 'File "', ".py", str(ROOT), str(CLIP), "/tmp"):  # noqa: S108  (not a folder in use)
        assert secret not in errors


def test_two_windows_are_decoded_at_the_same_moment(evening: Evening) -> None:
    assert any(message.endswith(" running=2") for message in evening.worker.events("model_call"))


def test_no_more_are_decoded_at_once_than_the_operator_allows(evening: Evening) -> None:
    assert {message.partition(" running=")[2] for message in evening.worker.events("model_call")} <= {"1", "2"}


def test_the_worker_holds_more_jobs_than_it_decodes(evening: Evening) -> None:
    assert evening.endpoint.most_in_progress == 20


def test_the_model_is_loaded_once(evening: Evening) -> None:
    assert len(evening.worker.events("model_loaded")) == 1


def test_the_warm_up_comes_before_the_first_job_even_when_jobs_wait_already(evening: Evening) -> None:
    (warmed_up,) = evening.message_numbers("warmed_up")
    assert warmed_up < min(evening.message_numbers("job_start") + evening.message_numbers("job_failed"))


def test_each_result_is_sent_once(evening: Evening) -> None:
    assert [len(job.results) for job in evening.endpoint.jobs.values()] == [1] * 20


def test_heartbeats_name_the_jobs_in_progress(evening: Evening) -> None:
    named = {job_id for ping in evening.endpoint.pings for job_id in ping}
    assert named
    assert named <= evening.endpoint.jobs.keys()


def test_after_sigterm_the_worker_ends_in_order_and_leaves_no_file(evening: Evening) -> None:
    assert evening.exit_code == 0
    assert evening.files_left == []


@pytest.fixture(scope="module")
def worker(endpoint: LocalEndpoint) -> Iterator[WorkerProcess]:
    env = {"LOG_LEVEL": "DEBUG", "INTER_THREADS": "2", "RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS": "true"}
    with WorkerProcess(endpoint, **env) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture
def caller(endpoint: LocalEndpoint, files: FileServer, worker: WorkerProcess) -> Iterator[Caller]:
    caller = Caller(endpoint, files)
    yield caller
    caller.close()


def test_a_result_that_runpod_did_not_take_is_sent_again(caller: Caller, endpoint: LocalEndpoint) -> None:
    endpoint.fail_next("job-done", 500)
    job_id = caller.run({"audio_base64": WINDOW})
    assert words(caller.result(job_id)["output"]["transcription"]) == CLIP_WORDS
    assert endpoint.requests[f"job-done/{WORKER_ID}/{job_id}"] == 2


@pytest.mark.parametrize("status", [204, 400])
def test_the_worker_asks_again_when_it_got_no_job(caller: Caller, endpoint: LocalEndpoint, status: int) -> None:
    asked = f"job-take/{WORKER_ID}"
    before = endpoint.requests[asked]
    endpoint.fail_next("job-take", status, times=2)
    endpoint.release_polls()
    endpoint.wait_for(lambda: endpoint.requests[asked] >= before + 2)
    assert caller.result(caller.run({"audio_base64": STATION}))["status"] == "COMPLETED"


def test_a_caller_can_wait_for_the_result_in_one_request(caller: Caller) -> None:
    output = caller.client.run_sync({"input": {"audio_base64": STATION}}, timeout=60)
    assert words(output["transcription"]) == STATION_WORDS


def test_a_bad_job_is_answered_while_a_long_one_is_transcribed_and_a_cancelled_one_leaves_the_others_right(
    caller: Caller, endpoint: LocalEndpoint, worker: WorkerProcess
) -> None:
    long = caller.run({"audio": f"{FILES}/long.wav", **ONE_TRY})
    worker.wait_for_message("event=transcribe", f"job={long} ")

    assert caller.result(caller.run("please transcribe"))["status"] == "FAILED"
    assert caller.status(long)["status"] == "IN_PROGRESS"

    others = {name: caller.run({"audio_base64": name}) for name in (WINDOW, STATION)}
    caller.cancel(long)
    worker.wait_for_message("event=job_cancelled", f"job={long} ")
    said = {name: words(caller.result(job_id)["output"]["transcription"]) for name, job_id in others.items()}
    assert said == {WINDOW: CLIP_WORDS, STATION: STATION_WORDS}
    assert caller.status(long)["status"] == "CANCELLED"
    assert endpoint.jobs[long].results == []


def test_settings_that_cannot_be_used_end_the_process_with_one_line_before_anything_slow() -> None:
    ended = run_handler(INTER_THREADS="x")
    assert ended.returncode == 1
    assert re.fullmatch(r"whisper_worker: INTER_THREADS='x': .*\n", ended.stdout + ended.stderr)


def test_a_test_input_on_the_command_line_prints_its_words() -> None:
    ended = run_handler("--test_input", json.dumps({"input": {"audio": str(CLIP)}}))
    assert ended.returncode == 0, ended.stderr
    assert CLIP_WORDS in words(ended.stdout)


def test_a_bad_test_input_on_the_command_line_ends_with_code_1() -> None:
    ended = run_handler("--test_input", json.dumps({"input": {"audio_base64": HTML}}))
    assert ended.returncode == 1
    assert "NOT_AUDIO" in ended.stdout


def test_the_local_api_answers_several_jobs_at_once() -> None:
    arguments = ("--rp_serve_api", "--rp_api_host", "127.0.0.1", "--rp_api_port", "0")
    with WorkerProcess(None, *arguments, LOG_LEVEL="DEBUG", INTER_THREADS="2") as worker:
        url = worker.wait_for_message("running on http://").partition(" on ")[2].split()[0]

        def transcribe(audio_base64: str) -> str:
            body = {"input": {"audio_base64": audio_base64}}
            with requests.post(f"{url}/runsync", json=body, timeout=60) as response:
                return words(response.json()["output"]["transcription"])

        with ThreadPoolExecutor(4) as callers:
            said = list(callers.map(transcribe, [WINDOW, STATION, WINDOW, STATION]))
        assert said == [CLIP_WORDS, STATION_WORDS, CLIP_WORDS, STATION_WORDS]
        assert any(message.endswith(" running=2") for message in map(_plain, worker.messages))


def _plain(message: str) -> str:
    return message.rpartition("| ")[2]


def test_importing_the_handler_starts_nothing() -> None:
    code = (
        "import sys, threading, handler;"
        "print(threading.active_count(), {'runpod', 'faster_whisper', 'ctranslate2', 'numpy'} & set(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=worker_env(), capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout == "1 set()\n"
