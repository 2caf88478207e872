"""How jobs and workers end that don't end well: the whole worker as a process, some with a model that falls ill."""

import base64
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from caller import SILENCE, STATION, STATION_WORDS, WINDOW, Caller, words
from file_server import FileServer
from local_endpoint import WORKER_ID, Job, LocalEndpoint
from media import CLIP_WORDS, encode, speech
from sick_worker import FILE, Control
from worker_process import WorkerProcess

from whisper_worker.errors import EXIT_HUNG, EXIT_SICK

OUT_OF_MEMORY = "CUDA failed with error out of memory"
SHORT = {"audio_base64": WINDOW}
OTHER = {"audio_base64": STATION}
CLIPS = 24
LONG = {  # the clip over and over compresses so well that each window would be tried at six temperatures
    "audio_base64": base64.b64encode(encode("ogg", "libopus", [np.tile(speech(), CLIPS)])).decode(),
    "temperature_increment_on_fallback": 0,
}
ENV = {"LOG_LEVEL": "DEBUG", "INTER_THREADS": "2", "PIECE_SECONDS": "6", "PROGRESS_INTERVAL_S": "0.1"}
NO_REPORTS = {"PROGRESS_INTERVAL_S": "3600"}  # in the way of what happens to results


@dataclass(frozen=True)
class Ward:
    """A worker, who asks it, and who makes its model ill."""

    endpoint: LocalEndpoint
    worker: WorkerProcess
    caller: Caller
    model: Control

    def begin(self, *inputs: dict[str, Any]) -> list[str]:
        """The ids of new jobs, all of which are being transcribed."""
        ids = [self.caller.run(job_input) for job_input in inputs]
        for job_id in ids:
            self.worker.wait_for_message("event=transcribe ", f"job={job_id} ")
        return ids

    def job(self, job_id: str) -> Job:
        return self.endpoint.jobs[job_id]

    def results(self, job_ids: list[str]) -> list[dict[str, Any]]:
        return [self.caller.result(job_id) for job_id in job_ids]

    def said(self, job_ids: list[str]) -> list[str]:
        results = self.results(job_ids)
        assert [result["status"] for result in results] == ["COMPLETED"] * len(results), results
        return [words(result["output"]["transcription"]) for result in results]

    def tell_to_end(self, signal_number: int = signal.SIGTERM) -> None:
        """And wait until it knows."""
        self.worker.send(signal_number)
        self.worker.wait_for_message("event=shutdown ")

    @property
    def requests_for_work(self) -> int:
        return self.endpoint.requests[f"job-take/{WORKER_ID}"]


@contextmanager
def ward(folder: Path, *, hold_s: float = 1, env: Mapping[str, str] | None = None) -> Iterator[Ward]:
    model = Control(folder)
    with (
        FileServer() as files,
        LocalEndpoint(hold_s) as endpoint,
        WorkerProcess(
            endpoint, program=("tests/sick_worker.py",), **{**ENV, FILE: str(model.file), **(env or {})}
        ) as worker,
    ):
        caller = Caller(endpoint, files)
        try:
            worker.wait_until_ready()
            yield Ward(endpoint, worker, caller, model)
        finally:
            model.heal()  # a call that hangs would hold up the end
            caller.close()


@pytest.fixture(scope="module")
def shared_ward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    with ward(tmp_path_factory.mktemp("ward")) as shared:
        yield shared


@pytest.fixture
def lasting(shared_ward: Ward) -> Iterator[Ward]:
    """A worker that other tests use as well."""
    yield shared_ward
    shared_ward.model.heal()


def assert_is_part_of_long(partial: dict[str, Any]) -> None:
    """Some of the pieces of `LONG`, and all that is said in those."""
    assert 0 < partial["seconds_done"] < partial["seconds_total"] == pytest.approx(CLIPS * 4.22, abs=0.1)
    starts = [segment["start"] for segment in partial["segments"]]
    assert starts
    assert starts == sorted(starts)
    assert partial["segments"][-1]["end"] <= partial["seconds_done"] + 1
    said = words(partial["transcription"]).split()
    assert said == words(" ".join(segment["text"] for segment in partial["segments"])).split()
    assert said[:12] == CLIP_WORDS.split()


# --- deadlines


def test_a_job_ends_at_its_callers_deadline_with_what_is_done_and_another_goes_on(lasting: Ward) -> None:
    lasting.model.ail(slow_s=1)
    [late] = lasting.begin({**LONG, "timeout_s": 10})
    lasting.worker.wait_for(lambda: any(report["seconds_done"] for report in lasting.job(late).reports))
    lasting.model.ail(hangs=True)  # else it would be done in time
    [other] = lasting.begin(OTHER)
    result = lasting.caller.result(late)
    assert (result["status"], result["error"]) == ("FAILED", "TIMEOUT: the job took longer than 10 s")
    assert_is_part_of_long(result["output"]["partial"])
    lasting.model.heal()
    assert lasting.said([other]) == [STATION_WORDS]


def test_the_operators_deadline_and_a_callers_both_hold(tmp_path: Path) -> None:
    with ward(tmp_path, env={"JOB_TIMEOUT_S": "3"}) as visited:
        visited.model.ail(slow_s=2)
        limits: list[dict[str, Any]] = [{}, {"timeout_s": 600}, {"timeout_s": 1}]
        results = visited.results([visited.caller.run({**LONG, **limit}) for limit in limits])
        assert [result["error"] for result in results] == [
            "TIMEOUT: the job took longer than 3 s",
            "TIMEOUT: the job took longer than 3 s",
            "TIMEOUT: the job took longer than 1 s",
        ]


# --- too little memory


@pytest.mark.parametrize("where", ["encode", "generate"])
def test_a_call_without_enough_memory_is_made_again_alone(where: str, lasting: Ward) -> None:
    failed_before = len(lasting.worker.events("model_call_failed"))
    lasting.model.ail(where=where, error=OUT_OF_MEMORY, calls=1)
    assert lasting.said([lasting.caller.run(SHORT)]) == [CLIP_WORDS]
    [failed] = lasting.worker.events("model_call_failed")[failed_before:]
    assert OUT_OF_MEMORY in failed


def test_one_call_without_enough_memory_leaves_all_jobs_right(lasting: Ward) -> None:
    lasting.model.ail(hangs=True)
    jobs = lasting.begin(SHORT, OTHER, SHORT)
    lasting.model.ail(error=OUT_OF_MEMORY, calls=1)
    assert lasting.said(jobs) == [CLIP_WORDS, STATION_WORDS, CLIP_WORDS]


def test_a_job_that_never_has_enough_memory_fails_and_the_next_is_right(lasting: Ward) -> None:
    lasting.model.ail(error=OUT_OF_MEMORY)
    result = lasting.caller.result(lasting.caller.run(SHORT))
    assert result["status"] == "FAILED"
    assert result["error"].startswith("OUT_OF_MEMORY: the device has too little memory")
    lasting.model.heal()
    assert lasting.said([lasting.caller.run(SHORT)]) == [CLIP_WORDS]


# --- a model that hears nothing


def test_jobs_of_a_deaf_model_are_done_again_when_it_has_been_loaded_again(lasting: Ward) -> None:
    lasting.model.ail(hangs=True)
    jobs = lasting.begin(SHORT, OTHER)
    lasting.model.ail(deaf=True, until_reload=True)
    assert lasting.said(jobs) == [CLIP_WORDS, STATION_WORDS]
    assert sum(message.startswith("event=model_reloaded ") for message in lasting.worker.messages) == 1


def test_the_model_is_tried_after_so_many_jobs(tmp_path: Path) -> None:
    with ward(tmp_path, env={"CANARY_JOBS": "2"}) as visited:
        visited.results([visited.caller.run(SHORT), visited.caller.run(SHORT)])
        visited.worker.wait_for_message("event=canary alike=1 ")
        numbers = {name: at(visited.worker, f"event={name} ") for name in ("job_done", "canary")}
        assert len(numbers["canary"]) == 1
        assert numbers["canary"] > numbers["job_done"][1:]


def at(worker: WorkerProcess, beginning: str) -> list[int]:
    return [number for number, message in enumerate(worker.messages) if message.startswith(beginning)]


# --- a worker past help


@dataclass(frozen=True)
class Illness:
    name: str
    symptoms: dict[str, Any]
    exit_code: int = EXIT_SICK
    env: dict[str, str] = field(default_factory=dict)


ILLEGAL_ACCESS = {"error": "CUDA failed with error an illegal memory access was encountered"}
ILLNESSES = [
    Illness("hangs", {"hangs": True}, EXIT_HUNG, {"WINDOW_TIMEOUT_S": "3"}),
    Illness("illegal access", ILLEGAL_ACCESS),
    Illness("illegal access while it streams", ILLEGAL_ACCESS, env={"STREAMING": "true"}),
    Illness("cublas", {"error": "cuBLAS failed with status CUBLAS_STATUS_EXECUTION_FAILED"}),
    Illness("deaf", {"deaf": True}),
]


@dataclass(frozen=True)
class PastHelp:
    """What is left of a worker that had two jobs when it fell ill for good."""

    illness: Illness
    results: list[dict[str, Any]]
    jobs: list[Job]
    exit_code: int


@pytest.fixture(scope="module", params=ILLNESSES, ids=lambda illness: illness.name)
def past_help(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PastHelp:
    illness: Illness = request.param
    with ward(tmp_path_factory.mktemp("ward"), env=illness.env) as visited:
        visited.model.ail(hangs=True)
        jobs = visited.begin(SHORT, OTHER)
        visited.model.ail(**illness.symptoms)
        exit_code = visited.worker.wait_until_ended()
        return PastHelp(illness, visited.results(jobs), list(map(visited.job, jobs)), exit_code)


def test_a_worker_past_help_fails_all_its_jobs(past_help: PastHelp) -> None:
    assert [result["status"] for result in past_help.results] == ["FAILED", "FAILED"]
    for result in past_help.results:
        assert result["error"].startswith("WORKER_UNHEALTHY: ")
        assert result["error"].endswith("send the job again, another worker takes it")


def test_a_worker_past_help_asks_to_be_replaced(past_help: PastHelp) -> None:
    assert [job.posts[-1]["stopPod"] for job in past_help.jobs] == [True, True]


def test_a_worker_past_help_ends_by_itself_and_says_why(past_help: PastHelp) -> None:
    assert past_help.exit_code == past_help.illness.exit_code


def test_a_device_that_fails_in_a_batch_of_several_jobs_fails_them_all(tmp_path: Path) -> None:
    with ward(tmp_path, env={"INTER_THREADS": "1", "INTRA_THREADS": "1", "BATCH_SIZE": "4"}) as visited:
        visited.model.ail(hangs=True)
        visited.begin(SHORT)
        visited.worker.wait_for_message("event=model_call ", "jobs=1 ")
        jobs = visited.begin(OTHER, SHORT, OTHER)
        visited.results([visited.caller.run({"audio_base64": SILENCE})])  # by then those before it wait for the model
        visited.model.ail(where="encode", **ILLEGAL_ACCESS)
        assert visited.worker.wait_until_ended() == EXIT_SICK
        assert [result["error"].split(": ")[0] for result in visited.results(jobs)] == ["WORKER_UNHEALTHY"] * 3
        assert any("windows=3 jobs=3 " in call for call in visited.worker.events("model_call"))


def test_a_worker_past_help_tells_it_though_runpod_does_not_listen_at_once(tmp_path: Path) -> None:
    with ward(tmp_path, env=NO_REPORTS) as visited:
        visited.model.ail(hangs=True)
        jobs = visited.begin(SHORT)
        visited.endpoint.fail_next("job-done", 500, times=6)
        visited.model.ail(**ILLEGAL_ACCESS)
        assert visited.worker.wait_until_ended() == EXIT_SICK
        assert visited.results(jobs)[0]["error"].startswith("WORKER_UNHEALTHY: ")


def test_the_local_api_is_watched_as_well(tmp_path: Path) -> None:
    model, arguments = Control(tmp_path), ("--rp_serve_api", "--rp_api_host", "127.0.0.1", "--rp_api_port", "0")
    env = {**ENV, FILE: str(model.file), "WINDOW_TIMEOUT_S": "2"}
    with WorkerProcess(None, *arguments, program=("tests/sick_worker.py",), **env) as worker:
        url = worker.wait_for_message("running on http://").partition(" on ")[2].split()[0]
        worker.wait_for_message("event=warmed_up ", timeout_s=0)
        model.ail(hangs=True)
        with requests.post(f"{url}/runsync", json={"input": SHORT}, timeout=60) as response:
            assert response.json()["error"].startswith("WORKER_UNHEALTHY: ")
        assert worker.wait_until_ended() == EXIT_HUNG


def test_a_worker_whose_model_is_found_deaf_ends_though_it_has_no_job(tmp_path: Path) -> None:
    with ward(tmp_path, hold_s=600, env={"CANARY_JOBS": "1"}) as visited:
        visited.model.ail(deaf=True)
        assert visited.said([visited.caller.run({"audio_base64": SILENCE})]) == [""]
        assert visited.worker.wait_until_ended() == EXIT_SICK


# --- told to end


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_the_worker_finishes_its_job_first(signal_number: int, tmp_path: Path) -> None:
    with ward(tmp_path) as visited:
        visited.model.ail(hangs=True)
        jobs = visited.begin(SHORT)
        visited.tell_to_end(signal_number)
        visited.model.heal()
        assert visited.worker.wait_until_ended() == 0
        assert visited.said(jobs) == [CLIP_WORDS]
        assert any(message.startswith("event=model_unloaded ") for message in visited.worker.messages)


def hurry_by_its_grace(visited: Ward) -> None:
    visited.tell_to_end()


def hurry_by_a_second_signal(visited: Ward) -> None:
    visited.tell_to_end()
    visited.worker.send(signal.SIGTERM)


@pytest.mark.parametrize("symptoms", [{"hangs": True}, {"slow_s": 600}], ids=["hangs", "is slow"])
def test_told_to_end_the_worker_ends_though_a_call_of_the_model_goes_on(
    symptoms: dict[str, Any], tmp_path: Path
) -> None:
    with ward(tmp_path, env={"SHUTDOWN_GRACE_S": "1"}) as visited:
        visited.model.ail(**symptoms)
        jobs = visited.begin(SHORT)
        visited.tell_to_end()
        assert visited.worker.wait_until_ended() == 0
        assert [result["error"].split(": ")[0] for result in visited.results(jobs)] == ["SHUTTING_DOWN"]


def test_heartbeats_go_on_while_a_job_does_after_a_signal_to_the_whole_group(tmp_path: Path) -> None:
    with ward(tmp_path) as visited:
        visited.model.ail(hangs=True)
        jobs = visited.begin(SHORT)
        visited.worker.send_to_all(signal.SIGTERM)
        visited.worker.wait_for_message("event=shutdown ")
        heard = len(visited.endpoint.pings)
        visited.worker.wait_for(lambda: visited.endpoint.pings[heard:].count(jobs) > 1)
        visited.model.heal()
        assert visited.worker.wait_until_ended() == 0
        assert visited.said(jobs) == [CLIP_WORDS]


@pytest.mark.parametrize(("grace_s", "hurry"), [("1", hurry_by_its_grace), ("600", hurry_by_a_second_signal)])
def test_a_job_that_is_not_done_in_time_for_the_end_fails_with_what_is_done(
    grace_s: str, hurry: Callable[[Ward], None], tmp_path: Path
) -> None:
    with ward(tmp_path, env={"SHUTDOWN_GRACE_S": grace_s}) as visited:
        visited.model.ail(slow_s=2, after=2)
        [long] = visited.begin(LONG)
        job = visited.job(long)
        visited.worker.wait_for(lambda: job.output and job.output["seconds_done"])
        hurry(visited)
        assert visited.worker.wait_until_ended() == 0
        [result] = visited.results([long])
        assert (result["status"], result["error"].split(": ")[0]) == ("FAILED", "SHUTTING_DOWN")
        assert_is_part_of_long(result["output"]["partial"])


def test_a_job_that_the_open_request_for_work_brings_after_the_signal_is_answered(tmp_path: Path) -> None:
    with ward(tmp_path, hold_s=60) as visited:
        visited.tell_to_end()
        job_id = visited.caller.run(SHORT)
        assert visited.worker.wait_until_ended() == 0
        assert visited.said([job_id]) == [CLIP_WORDS]
        assert visited.requests_for_work == 1


def test_a_result_in_a_long_pause_between_two_tries_is_delivered_before_the_end(tmp_path: Path) -> None:
    with ward(tmp_path, env={**NO_REPORTS, "SHUTDOWN_GRACE_S": "1"}) as visited:
        visited.endpoint.fail_next("job-done", 500, times=7)
        job_id = visited.caller.run(SHORT)
        visited.worker.wait_for_message("event=delivery_retried ", "pause_s=8")
        visited.tell_to_end()
        assert visited.worker.wait_until_ended() == 0
        assert visited.said([job_id]) == [CLIP_WORDS]


def test_a_result_that_runpod_never_takes_is_named_in_the_log_at_the_end(tmp_path: Path) -> None:
    with ward(tmp_path, env={**NO_REPORTS, "SHUTDOWN_GRACE_S": "1"}) as visited:
        visited.endpoint.fail_next("job-done", 500, times=1000)
        job_id = visited.caller.run(SHORT)
        visited.worker.wait_for_message("event=delivery_retried ")
        visited.tell_to_end()
        assert visited.worker.wait_until_ended() == 0
        [lost] = visited.worker.events("result_lost")
        assert f"job={job_id} " in lost


def test_an_idle_worker_waits_for_its_open_request_no_longer_than_its_grace(tmp_path: Path) -> None:
    with ward(tmp_path, hold_s=600, env={"SHUTDOWN_GRACE_S": "1"}) as visited:
        visited.tell_to_end()
        assert visited.worker.wait_until_ended() == 0
        assert visited.requests_for_work == 1


def test_an_idle_worker_ends_when_its_open_request_is_over_and_makes_no_other(tmp_path: Path) -> None:
    with ward(tmp_path, hold_s=600, env={"SHUTDOWN_GRACE_S": "600"}) as visited:
        visited.tell_to_end()
        visited.endpoint.release_polls()
        assert visited.worker.wait_until_ended() == 0
        assert visited.requests_for_work == 1


# --- streams


@dataclass(frozen=True)
class BrokenOff:
    """What is left of a streamed job that was broken off when some of its segments were out."""

    code: str
    items: list[dict[str, Any]]
    result: dict[str, Any]


def over_its_time(visited: Ward) -> str:
    [job_id] = visited.begin({**LONG, "timeout_s": 5})
    return job_id


def over_the_workers_time(visited: Ward) -> str:
    [job_id] = visited.begin(LONG)
    visited.worker.wait_for(lambda: len(visited.job(job_id).streamed) > 1)
    visited.tell_to_end()
    return job_id


BREAKS = {"TIMEOUT": over_its_time, "SHUTTING_DOWN": over_the_workers_time}


@pytest.fixture(scope="module", params=BREAKS)
def broken_off(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BrokenOff:
    env = {"STREAMING": "true", "SHUTDOWN_GRACE_S": "1"}
    with ward(tmp_path_factory.mktemp("ward"), env=env) as visited:
        visited.model.ail(slow_s=2, after=2)
        job_id = BREAKS[request.param](visited)
        return BrokenOff(request.param, list(visited.caller.stream(job_id)), visited.caller.result(job_id))


def test_readers_of_a_stream_that_is_broken_off_get_what_is_done_and_then_the_error(broken_off: BrokenOff) -> None:
    info, *segments, error = broken_off.items
    assert (info["type"], error["type"], error["code"]) == ("info", "error", broken_off.code)
    streamed = [segment for item in segments for segment in item["segments"]]
    assert streamed == broken_off.result["output"]["partial"]["segments"]
    assert streamed


def test_a_streamed_job_that_is_broken_off_fails_with_what_is_done(broken_off: BrokenOff) -> None:
    assert (broken_off.result["status"], broken_off.result["error"].split(": ")[0]) == ("FAILED", broken_off.code)
    assert_is_part_of_long(broken_off.result["output"]["partial"])


# --- cancelled


def test_a_job_that_is_cancelled_while_it_is_handed_out_is_not_begun_and_another_goes_on(tmp_path: Path) -> None:
    with ward(tmp_path, hold_s=600) as visited:
        asked_for_stops = f"job-stop/{WORKER_ID}"
        visited.worker.wait_for(lambda: visited.endpoint.requests[asked_for_stops] == 1)
        with visited.endpoint.answers_held("job-take"):
            cancelled = visited.caller.run(SHORT)
            visited.worker.wait_for(lambda: visited.job(cancelled).status == "IN_PROGRESS")
            visited.caller.cancel(cancelled)
            visited.worker.wait_for(lambda: visited.endpoint.requests[asked_for_stops] == 2)
        visited.worker.wait_for_message("event=job_cancelled ", f"job={cancelled} ")
        assert visited.said([visited.caller.run(OTHER)]) == [STATION_WORDS]
        assert not any(f"job={cancelled} " in message for message in visited.worker.events("job_start"))
        assert visited.job(cancelled).posts == []


# --- told to end while it starts


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("event", ["settings", "model_loaded", "warmed_up"])
def test_told_to_end_while_it_starts_the_worker_ends(event: str, signal_number: int) -> None:
    with LocalEndpoint(hold_s=1) as endpoint, WorkerProcess(endpoint, **ENV) as worker:
        worker.wait_for_message(f"event={event} ")
        worker.send(signal_number)
        assert worker.wait_until_ended() == 0
