"""What can be seen of a job while it runs, and how it is cancelled: the whole worker as a real process."""

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import requests
from caller import FILES, HTML, LONG, ONE_TRY, ROUTES, SILENCE, STATION, STATION_WORDS, WINDOW, Caller, words
from file_server import Answer, Exchange, FileServer, head
from local_endpoint import WORKER_ID, Job, LocalEndpoint
from media import CLIP, CLIP_WORDS, pcm, speech, wav
from worker_process import ROOT, WorkerProcess, run_handler, worker_env

from whisper_worker.fetch import STALL_S

LONG_JOB = {"audio": f"{FILES}/long.wav", **ONE_TRY}
HELD_S = 60  # a test that fails leaves its gate closed
WINDOW_BY_WINDOW = {"BATCH_SIZE": "1"}  # the first segments are there long before the last

Json = dict[str, Any]


@pytest.fixture(scope="module")
def files() -> Iterator[FileServer]:
    with FileServer(ROUTES) as server:
        yield server


def held(body: bytes, gate: Event) -> Answer:
    """The file's beginning at once, and the rest when the gate is open."""

    def act(exchange: Exchange) -> None:
        exchange.send(head(200, f"Content-Length: {len(body)}") + body[:1000])
        gate.wait(HELD_S)
        exchange.send(body[1000:])

    return act


@dataclass(frozen=True)
class Place:
    """A worker, who gives it jobs, and who sends them."""

    endpoint: LocalEndpoint
    worker: WorkerProcess
    caller: Caller

    def run(self, job_input: Json) -> Job:
        return self.endpoint.jobs[self.caller.run(job_input)]

    def wait_until_transcribing(self, job: Job) -> None:
        self.worker.wait_for_message("event=transcribe", f"job={job.id} ")

    def message_number(self, event: str, job: Job) -> int:
        start = f"event={event} job={job.id} "
        return next(n for n, message in enumerate(self.worker.messages) if message.startswith(start))


@contextmanager
def place(files: FileServer, **env: str) -> Iterator[Place]:
    usual = {"LOG_LEVEL": "DEBUG", "INTER_THREADS": "2", "RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS": "true"}
    with LocalEndpoint() as endpoint, WorkerProcess(endpoint, **usual, **env) as worker:
        worker.wait_until_ready()
        with closing(Caller(endpoint, files)) as caller:
            yield Place(endpoint, worker, caller)


# --- a stream of segments


@pytest.fixture(scope="module")
def streaming(files: FileServer) -> Iterator[Place]:
    with place(files, STREAMING="true", STREAM_INTERVAL_S="0.1", **WINDOW_BY_WINDOW) as streaming:
        yield streaming


@dataclass(frozen=True)
class Stream:
    """What a caller read of a long job."""

    early: Json  # what `/stream` answered when the first segments had come
    items: list[Json]  # all, those included
    final: Json  # the final status

    def of_type(self, kind: str) -> list[Json]:
        return [item for item in self.items if item["type"] == kind]

    def all(self, name: str) -> list[Json]:
        """The segments, or words, of all the items."""
        return list(chain.from_iterable(item[name] for item in self.of_type("segments")))


@pytest.fixture(scope="module")
def stream(streaming: Place) -> Stream:
    caller, job = streaming.caller, streaming.run({**LONG_JOB, "word_timestamps": True})
    streaming.worker.wait_for(lambda: len(job.streamed) >= 2)
    early = caller.unread(job.id)
    items = [chunk["output"] for chunk in early["stream"]] + list(caller.stream(job.id))
    return Stream(early, items, caller.status(job.id))


def test_the_audio_and_the_first_segments_are_told_while_the_job_runs(stream: Stream) -> None:
    assert stream.early["status"] == "IN_PROGRESS"
    assert [chunk["output"]["type"] for chunk in stream.early["stream"]][:2] == ["info", "segments"]


def test_the_first_item_tells_language_and_duration(stream: Stream) -> None:
    info = stream.items[0]
    assert (info["detected_language"], round(info["duration"])) == ("en", 169)
    assert stream.of_type("info") == [info]


def test_streamed_segments_are_numbered_without_a_gap_and_in_the_order_of_time(stream: Stream) -> None:
    segments = stream.all("segments")
    assert len(segments) > 6
    assert [segment["id"] for segment in segments] == list(range(1, len(segments) + 1))
    starts = [segment["start"] for segment in segments]
    assert starts == sorted(starts)


def test_the_segments_of_a_long_job_come_in_several_items(stream: Stream) -> None:
    assert len(stream.of_type("segments")) > 1


def test_no_streamed_item_is_near_the_megabyte_at_which_runpod_splits_it(stream: Stream) -> None:
    assert max(len(json.dumps(item)) for item in stream.items) < 500_000


def test_the_last_item_is_the_result_without_the_segments(stream: Stream) -> None:
    result = stream.items[-1]
    assert stream.of_type("result") == [result]
    assert not {"segments", "word_timestamps"} & result.keys()


def test_the_streamed_segments_have_the_text_of_the_result(stream: Stream) -> None:
    streamed = words(" ".join(segment["text"] for segment in stream.all("segments")))
    assert streamed == words(stream.items[-1]["transcription"])
    assert CLIP_WORDS in streamed


def test_the_status_of_a_streamed_job_has_all_its_items(stream: Stream) -> None:
    assert stream.final["status"] == "COMPLETED"
    assert stream.final["output"] == stream.items


def test_words_are_streamed_with_their_segments(stream: Stream) -> None:
    timed, segments = stream.all("word_timestamps"), stream.all("segments")
    assert words("".join(word["word"] for word in timed)) == words("".join(segment["text"] for segment in segments))
    starts = [word["start"] for word in timed]
    assert starts == sorted(starts)


def test_readers_of_a_stream_are_told_of_its_error(streaming: Place) -> None:
    job = streaming.run({"audio_base64": HTML})
    (item,) = streaming.caller.stream(job.id)
    assert (item["type"], item["code"]) == ("error", "NOT_AUDIO")
    status = streaming.caller.status(job.id)
    assert (status["status"], status["error"]) == ("FAILED", f"NOT_AUDIO: {item['message']}")


def test_a_stream_of_silence_has_no_language_and_no_segments(streaming: Place) -> None:
    info, result = streaming.caller.stream(streaming.run({"audio_base64": SILENCE}).id)
    assert (info["type"], info["detected_language"]) == ("info", None)
    assert (result["type"], result["transcription"]) == ("result", "")


def test_a_job_that_is_cancelled_while_it_streams_ends_and_leaves_its_neighbour_right(streaming: Place) -> None:
    job = streaming.run(LONG_JOB)
    streaming.worker.wait_for(lambda: len(job.streamed) >= 2)
    neighbour = streaming.run({"audio_base64": STATION})
    streaming.caller.cancel(job.id)
    streaming.worker.wait_for_message("event=job_cancelled", f"job={job.id} ")
    result = streaming.caller.result(neighbour.id)["output"][-1]
    assert words(result["transcription"]) == STATION_WORDS
    assert job.posts == []
    assert {item["type"] for item in job.streamed} == {"info", "segments"}


def test_an_item_that_runpod_did_not_take_is_sent_again_before_the_next(streaming: Place) -> None:
    streaming.endpoint.fail_next("job-stream", 500)
    job = streaming.run({"audio_base64": WINDOW})
    streaming.caller.result(job.id)
    assert [item["type"] for item in job.streamed] == ["info", "segments", "result"]
    assert streaming.endpoint.requests[f"job-stream/{WORKER_ID}/{job.id}"] == 4


def test_when_no_item_is_taken_the_result_still_arrives_with_all_of_them(files: FileServer) -> None:
    with place(files, STREAMING="true", RESULT_RETRY_S="1") as streaming:
        streaming.endpoint.fail_next("job-stream", 500, times=1000)
        job = streaming.run({"audio_base64": STATION})
        output = streaming.caller.result(job.id)["output"]
    assert job.streamed == []
    assert [item["type"] for item in output] == ["info", "segments", "result"]
    assert words(output[-1]["transcription"]) == STATION_WORDS


def test_items_that_are_too_large_together_leave_the_segments_to_the_stream(files: FileServer) -> None:
    with place(files, STREAMING="true", MAX_INLINE_BYTES="1000") as streaming:
        job = streaming.run({"audio_base64": STATION, "word_timestamps": True})
        info, result = streaming.caller.result(job.id)["output"]
    assert [item["type"] for item in job.streamed] == ["info", "segments", "result"]
    assert result.pop("warnings") == ["left out, for the reply to arrive: the segments, which are in the stream"]
    assert [info, {**result, "warnings": []}] == [job.streamed[0], job.streamed[-1]]


def test_the_local_api_answers_with_all_items() -> None:
    arguments = ("--rp_serve_api", "--rp_api_host", "127.0.0.1", "--rp_api_port", "0")
    with WorkerProcess(None, *arguments, STREAMING="true") as worker:
        url = worker.wait_for_message("running on http://").partition(" on ")[2].split()[0]
        with requests.post(f"{url}/runsync", json={"input": {"audio_base64": WINDOW}}, timeout=60) as response:
            items = response.json()["output"]
    assert [item["type"] for item in items] == ["info", "segments", "result"]
    assert words(items[-1]["transcription"]) == CLIP_WORDS


# --- on a terminal


def test_a_local_stream_is_printed_as_it_comes_an_item_a_line(tmp_path: Path) -> None:
    path = tmp_path / "talk.wav"
    path.write_bytes(wav(pcm(np.tile(speech(), 5))))
    job = json.dumps({"input": {"audio": str(path)}})
    with WorkerProcess(None, "--test_input", job, STREAMING="true", PIECE_SECONDS="5", **WINDOW_BY_WINDOW) as worker:
        worker.wait_for_message("Local testing complete")
        lines = worker.messages
    types = [(json.loads(line)["type"], n) for n, line in enumerate(lines) if line.startswith("{")]
    assert [name for name, _ in groupby(name for name, _ in types)] == ["info", "segments", "result"]
    (done,) = (n for n, line in enumerate(lines) if "event=job_done " in line)
    assert dict(reversed(types))["segments"] < done


def test_a_bad_local_stream_prints_its_error_and_ends_with_code_1() -> None:
    ended = run_handler("--test_input", json.dumps({"input": {"audio_base64": HTML}}), STREAMING="true")
    assert ended.returncode == 1
    (item,) = (json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{"))
    assert (item["type"], item["code"]) == ("error", "NOT_AUDIO")


LOCAL_JOB = ("--test_input", json.dumps({"input": {"audio": str(CLIP)}}))
BAR = r"transcribe: +100%\|.*4\.2/4\.2 .*s"


def test_on_a_terminal_a_bar_shows_the_seconds_of_audio_that_are_done() -> None:
    terminal, worker_end = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))  # without a size there is no room for it
    with (
        os.fdopen(terminal, "rb", buffering=0) as shown,
        subprocess.Popen(
            [sys.executable, "handler.py", *LOCAL_JOB],
            cwd=ROOT,
            env=worker_env(LOG_LEVEL="ERROR"),
            stdout=subprocess.DEVNULL,
            stderr=worker_end,
        ) as process,
    ):
        os.close(worker_end)
        text = b"".join(until_closed(shown)).decode()
    assert process.returncode == 0
    assert re.search(BAR, text), text


def until_closed(terminal: Any) -> Iterator[bytes]:
    """What is written to it. Linux tells that nobody can write any more by an error."""
    try:
        while data := terminal.read(4096):
            yield data
    except OSError:
        return


def test_off_a_terminal_there_is_no_bar() -> None:
    ended = run_handler(*LOCAL_JOB, LOG_LEVEL="ERROR")
    assert ended.returncode == 0
    assert ended.stderr == ""


# --- progress


@pytest.fixture(scope="module")
def reporting(files: FileServer) -> Iterator[Place]:
    with place(files, PROGRESS_INTERVAL_S="0.1", **WINDOW_BY_WINDOW) as reporting:
        yield reporting


@dataclass(frozen=True)
class Reported:
    """What was told of a long job: first by `/status`, while its download was held and while it was transcribed."""

    downloading: Json
    transcribing: Json
    final: Json
    job: Job

    @property
    def stages(self) -> list[str]:
        return [name for name, _ in groupby(report["stage"] for report in self.job.reports)]


@pytest.fixture(scope="module")
def reported(reporting: Place, files: FileServer) -> Reported:
    gate = Event()
    files.routes["/held.wav"] = held(LONG, gate)
    job = reporting.run({"audio": f"{FILES}/held.wav", **ONE_TRY})
    reporting.worker.wait_for(lambda: job.reports)
    downloading = reporting.caller.status(job.id)
    gate.set()
    reporting.worker.wait_for(lambda: job.reports[-1]["text_tail"])
    transcribing = reporting.caller.status(job.id)
    return Reported(downloading, transcribing, reporting.caller.result(job.id), job)


def test_the_status_of_a_job_tells_how_far_it_has_come(reported: Reported) -> None:
    start = {"progress": 0, "stage": "download", "seconds_done": 0, "seconds_total": None, "text_tail": ""}
    assert (reported.downloading["status"], reported.downloading["output"]) == ("IN_PROGRESS", start)
    now = reported.transcribing["output"]
    assert reported.transcribing["status"] == "IN_PROGRESS"
    assert (now["stage"], round(now["seconds_total"])) == ("transcribe", 169)
    assert now["progress"] == round(now["seconds_done"] / now["seconds_total"], 3) > 0


def test_progress_never_goes_back(reported: Reported) -> None:
    for name in ("progress", "seconds_done"):
        told = [report[name] for report in reported.job.reports]
        assert told == sorted(told)


def test_the_stages_are_told_in_their_order(reported: Reported) -> None:
    order = ["download", "decode", "transcribe"]
    assert reported.stages == [stage for stage in order if stage in reported.stages]
    assert {"download", "transcribe"} <= set(reported.stages)  # decoding can be over between two reports


def test_a_report_ends_with_the_text_so_far(reported: Reported) -> None:
    tail = words(reported.transcribing["output"]["text_tail"])
    assert tail
    assert tail in words(reported.final["output"]["transcription"])


def test_no_report_comes_after_the_result(reported: Reported) -> None:
    assert reported.final["status"] == "COMPLETED"
    assert reported.job.results == [reported.job.posts[-1]]


def test_a_report_on_its_way_is_not_overtaken_by_the_result(reporting: Place, files: FileServer) -> None:
    gate = Event()
    files.routes["/held.ogg"] = held(CLIP.read_bytes(), gate)
    reporting.endpoint.slow["job-done"] = 1
    job = reporting.run({"audio": f"{FILES}/held.ogg"})
    reporting.worker.wait_for(lambda: reporting.endpoint.requests[f"job-done/{WORKER_ID}/{job.id}"])
    del reporting.endpoint.slow["job-done"]  # for the result; the report has been asked for already
    gate.set()
    assert reporting.caller.result(job.id)["status"] == "COMPLETED"
    assert job.results == [job.posts[-1]] != job.posts


# --- cancelled jobs


@pytest.fixture(scope="module")
def tmp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worker")


@pytest.fixture(scope="module")
def crowded(files: FileServer, tmp_folder: Path) -> Iterator[Place]:
    with place(files, JOB_CONCURRENCY="4", PROGRESS_INTERVAL_S="60", TMPDIR=str(tmp_folder)) as crowded:
        yield crowded


@dataclass(frozen=True)
class Crowd:
    """Four long jobs that ran at once; one was cancelled, and a fifth job, a short one, had waited for its place."""

    cancelled: Job
    others: list[Job]
    fifth: Job


@pytest.fixture(scope="module")
def crowd(crowded: Place) -> Crowd:
    first, cancelled, *rest = (crowded.run(LONG_JOB) for _ in range(4))
    for job in (first, cancelled, *rest):
        crowded.wait_until_transcribing(job)
    fifth = crowded.run({"audio_base64": WINDOW})
    crowded.caller.cancel(cancelled.id)
    crowded.worker.wait_for(lambda: all(job.is_final for job in (first, *rest, fifth)))
    return Crowd(cancelled, [first, *rest], fifth)


def text(job: Job) -> str:
    return str(job.output["transcription"])


def test_the_place_of_a_cancelled_job_is_free_while_the_others_run(crowded: Place, crowd: Crowd) -> None:
    assert crowded.endpoint.most_in_progress == 4
    started = crowded.message_number("job_start", crowd.fifth)
    assert started > crowded.message_number("job_cancelled", crowd.cancelled)
    assert started < min(crowded.message_number("job_done", job) for job in crowd.others)
    assert words(text(crowd.fifth)) == CLIP_WORDS


def test_a_cancelled_job_leaves_the_text_of_the_others_as_it_is_for_one_alone(crowd: Crowd, reported: Reported) -> None:
    assert [text(job) for job in crowd.others] == [text(reported.job)] * 3


def test_nothing_is_posted_for_a_cancelled_job(crowd: Crowd) -> None:
    assert (crowd.cancelled.status, crowd.cancelled.posts) == ("CANCELLED", [])


def test_a_job_shorter_than_the_interval_has_no_report(crowd: Crowd) -> None:
    assert crowd.fifth.posts == crowd.fifth.results


def test_a_job_that_is_cancelled_while_it_downloads_ends_before_its_download(crowded: Place, files: FileServer) -> None:
    job = crowded.run({"audio": f"{FILES}/stall"})
    files.wait_for_request("/stall")
    crowded.caller.cancel(job.id)
    # The thread in the socket notices after STALL_S.
    crowded.worker.wait_for_message("event=job_cancelled", f"job={job.id} ", timeout_s=STALL_S / 2)
    assert job.posts == []


def test_jobs_that_have_ended_leave_no_file_not_even_one_without_a_name(
    crowded: Place, crowd: Crowd, files: FileServer, tmp_folder: Path
) -> None:
    worker, stalls = crowded.worker, crowded.run({"audio": f"{FILES}/stall"})
    jobs = [crowded.run({"audio": f"{FILES}/{name}"}) for name in ("window.ogg", "page", "missing")]
    worker.wait_for(lambda: all(job.is_final for job in jobs))
    worker.wait_for(lambda: worker.open_files_in(tmp_folder))  # where it would be seen if one stayed
    crowded.caller.cancel(stalls.id)
    for job in (crowd.cancelled, stalls):
        worker.wait_for_message("event=job_cancelled", f"job={job.id} ")
    worker.wait_for(lambda: not worker.open_files_in(tmp_folder), timeout_s=10)  # a thread closes them
    assert list(tmp_folder.rglob("*")) == []
