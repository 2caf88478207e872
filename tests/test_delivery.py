"""Whatever RunPod answers, a result arrives, or the log says that it is lost; and nothing overtakes anything."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import requests
from aiohttp import ClientSession
from caller import STATION, STATION_WORDS, WINDOW, Caller, words
from file_server import FileServer
from local_endpoint import ENDPOINT_ID, HANG_UP, TAKE_AND_HANG_UP, WORKER_ID, LocalEndpoint
from media import CLIP_WORDS
from worker_process import WorkerProcess

from whisper_worker import delivery
from whisper_worker.delivery import Courier, Outcome, Reports
from whisper_worker.delivery import _outcome as outcome_of
from whisper_worker.live import Progress

SDK_TRIES = 3
SOON_S, NEVER_S = 0.001, 3600.0  # intervals
ENV = {"RESULT_TIMEOUT_S": "1", "PROGRESS_INTERVAL_S": "3600"}  # a report would take a fault that is meant for a result


# --- the real worker


@pytest.fixture(scope="module")
def worker(endpoint: LocalEndpoint) -> Iterator[WorkerProcess]:
    with WorkerProcess(endpoint, **ENV) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture
def caller(endpoint: LocalEndpoint, worker: WorkerProcess) -> Iterator[Caller]:
    with FileServer() as files:
        caller = Caller(endpoint, files)
        yield caller
        caller.close()


@pytest.fixture
def small(endpoint: LocalEndpoint) -> Iterator[Callable[[int], None]]:
    """Lets the endpoint take results of so many bytes only."""
    before = endpoint.max_result_bytes

    def limit(max_bytes: int) -> None:
        endpoint.max_result_bytes = max_bytes

    yield limit
    endpoint.max_result_bytes = before


@pytest.mark.parametrize(
    ("status", "times"),
    [(500, SDK_TRIES), (HANG_UP, 2), (429, 1), (408, 1), (503, 1)],
    ids=["500 as often as the SDK tries", "hung up", "429", "408", "503"],
)
def test_a_result_that_runpod_does_not_take_arrives_once_it_does(
    caller: Caller, endpoint: LocalEndpoint, status: int, times: int
) -> None:
    endpoint.fail_next("job-done", status, times)
    job_id = caller.run({"audio_base64": WINDOW})
    assert words(caller.result(job_id)["output"]["transcription"]) == CLIP_WORDS
    assert sent(endpoint, job_id) == times + 1
    assert len(endpoint.jobs[job_id].posts) == 1


def test_a_result_that_is_not_answered_in_time_is_sent_again(
    caller: Caller, endpoint: LocalEndpoint, worker: WorkerProcess
) -> None:
    endpoint.slow["job-done"] = NEVER_S
    job_id = caller.run({"audio_base64": STATION})
    worker.wait_for_message("event=delivery_retried", f"job={job_id} ", "no answer within 1 s")
    del endpoint.slow["job-done"]
    assert words(caller.result(job_id)["output"]["transcription"]) == STATION_WORDS
    assert len(endpoint.jobs[job_id].posts) == 1


def test_an_error_that_runpod_does_not_take_is_sent_again(caller: Caller, endpoint: LocalEndpoint) -> None:
    endpoint.fail_next("job-done", 500)
    job_id = caller.run("please transcribe")
    assert caller.result(job_id)["error"].startswith("BAD_INPUT: ")
    assert sent(endpoint, job_id) == 2


def test_other_jobs_are_answered_while_one_result_waits(
    caller: Caller, endpoint: LocalEndpoint, worker: WorkerProcess
) -> None:
    endpoint.fail_next("job-done", 500, SDK_TRIES)
    waiting = caller.run("please transcribe")
    endpoint.wait_for(lambda: sent(endpoint, waiting) == SDK_TRIES)
    assert caller.result(caller.run({"audio_base64": WINDOW}))["status"] == "COMPLETED"
    assert caller.result(waiting)["status"] == "FAILED"


def test_a_result_that_runpod_finds_too_large_arrives_without_its_details_and_says_so(
    caller: Caller, endpoint: LocalEndpoint, small: Callable[[int], None]
) -> None:
    job_input = {"audio_base64": STATION, "word_timestamps": True}
    whole = caller.result(caller.run(job_input))["output"]
    small(len(json.dumps({"output": whole})) - 200)  # the seconds in `timings` aren't always of the same length

    smaller = caller.result(caller.run(job_input))["output"]
    assert smaller["transcription"] == whole["transcription"]
    assert [segment["tokens"] for segment in smaller["segments"]] == [[]] * len(whole["segments"])
    assert "word_timestamps" not in smaller
    assert ["left out" in warning for warning in smaller["warnings"]] == [True]


def test_a_result_that_runpod_finds_too_large_without_its_details_fails_the_job(
    caller: Caller, small: Callable[[int], None]
) -> None:
    small(300)
    result = caller.result(caller.run({"audio_base64": STATION, "word_timestamps": True}))
    assert result["status"] == "FAILED"
    assert result["error"].startswith("RESULT_TOO_LARGE: ")


def test_a_result_whose_job_runpod_does_not_know_is_not_sent_again(
    caller: Caller, endpoint: LocalEndpoint, worker: WorkerProcess
) -> None:
    endpoint.fail_next("job-done", 404)
    job_id = caller.run({"audio_base64": WINDOW})
    worker.wait_for_message("event=result_lost", f"job={job_id} ", "HTTP 404")
    assert caller.result(caller.run({"audio_base64": STATION}))["status"] == "COMPLETED"
    assert sent(endpoint, job_id) == 1


def test_a_worker_whose_results_are_never_taken_says_so_and_goes_on() -> None:
    with FileServer() as files, LocalEndpoint() as endpoint, WorkerProcess(endpoint, RESULT_RETRY_S="1") as worker:
        caller = Caller(endpoint, files)
        endpoint.fail_next("job-done", 500, times=1000)
        for _ in range(2):
            job_id = caller.run({"audio_base64": WINDOW})
            worker.wait_for_message("event=result_lost", f"job={job_id}")
        caller.close()
        assert worker.stop() == 0


def sent(endpoint: LocalEndpoint, job_id: str) -> int:
    return endpoint.requests[f"job-done/{WORKER_ID}/{job_id}"]


# --- the courier


class Round:
    """One job at a local endpoint, and how often the courier has gone there."""

    def __init__(self, endpoint: LocalEndpoint) -> None:
        posted = requests.post(f"{endpoint.url}/{ENDPOINT_ID}/run", json={"input": {}}, timeout=10)
        self.job = endpoint.jobs[posted.json()["id"]]
        self.endpoint = endpoint

    def tries(self, operation: str = "job-done") -> int:
        return self.endpoint.requests[f"{operation}/{WORKER_ID}/{self.job.id}"]

    @asynccontextmanager
    async def courier(
        self, timeout_s: float = 10, retry_s: float = 60, in_haste: asyncio.Event | None = None
    ) -> AsyncIterator[Courier]:
        async with ClientSession() as session:
            yield Courier(session, self.job.id, timeout_s=timeout_s, retry_s=retry_s, in_haste=in_haste)


@pytest.fixture
def round_(monkeypatch: pytest.MonkeyPatch) -> Iterator[Round]:
    """With an endpoint of its own, whose addresses the SDK would have read at its import, and hardly a pause."""
    with LocalEndpoint() as endpoint:
        env = endpoint.worker_env()
        for name, key in (("JOB_DONE_URL", "OUTPUT"), ("JOB_STREAM_URL", "STREAM")):
            url = env[f"RUNPOD_WEBHOOK_POST_{key}"].replace("$RUNPOD_POD_ID", WORKER_ID)
            monkeypatch.setattr(delivery, name, url)
        monkeypatch.setattr(delivery, "FIRST_PAUSE_S", 0.001)
        yield Round(endpoint)


def run(act: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(act, 30))


def test_what_a_job_has_to_say_arrives_in_its_order_whatever_fails(round_: Round) -> None:
    round_.endpoint.fail_next("job-stream", 500, times=2)
    round_.endpoint.fail_next("job-done", 500)

    async def act() -> None:
        async with round_.courier() as courier:
            await courier.report({"progress": 0.1})  # lost: the next one is newer
            await courier.report({"progress": 0.2})
            await courier.item({"n": 1})
            await courier.item({"n": 2})
            await courier.result([{"output": "done"}], streamed=True)

    run(act())
    assert round_.job.posts == [{"status": "IN_PROGRESS", "output": {"progress": 0.2}}, {"output": "done"}]
    assert round_.job.streamed == [{"n": 1}, {"n": 2}]
    assert round_.job.status == "COMPLETED"
    assert (round_.tries("job-done"), round_.tries("job-stream")) == (3, 4)


def test_the_first_body_that_is_small_enough_is_the_result(round_: Round) -> None:
    round_.endpoint.fail_next("job-done", 413, times=2)

    async def act() -> None:
        async with round_.courier() as courier:
            await courier.result(({"output": body} for body in ("large", "smaller", "small", "least")), streamed=False)

    run(act())
    assert [post["output"] for post in round_.job.posts] == ["small"]


def test_a_result_that_was_taken_without_an_answer_is_sent_again_as_it_was(round_: Round) -> None:
    round_.endpoint.fail_next("job-done", TAKE_AND_HANG_UP)

    async def act() -> None:
        async with round_.courier() as courier:
            await courier.result(({"output": body} for body in ("large", "small")), streamed=False)

    run(act())
    assert round_.job.posts == [{"output": "large"}] * 2


@pytest.mark.parametrize(
    ("status", "size", "arrives", "tries"),
    [(400, 1_000, "large", 2), (400, 1_000_001, "small", 2), (413, 1_000, "small", 2), (403, 1_000, None, 1)],
    ids=["400 of a small one", "400 of a large one", "413", "403"],
)
def test_a_result_that_is_refused_is_sent_again_or_smaller_or_not_any_more(
    round_: Round, status: int, size: int, arrives: str | None, tries: int
) -> None:
    round_.endpoint.fail_next("job-done", status)
    bodies = {"large": "x" * size, "small": "y"}

    async def act() -> None:
        async with round_.courier() as courier:
            await courier.result(({"output": body} for body in bodies.values()), streamed=False)

    run(act())
    assert [post["output"] for post in round_.job.posts] == ([bodies[arrives]] if arrives else [])
    assert round_.tries() == tries


def test_a_body_that_gets_no_answer_is_not_followed_by_a_smaller_one(round_: Round) -> None:
    round_.endpoint.fail_next("job-done", 500, times=1000)

    async def act() -> None:
        async with round_.courier(retry_s=0) as courier:
            await courier.result([{"output": "large"}, {"output": "small"}], streamed=False)

    run(act())
    assert round_.tries() == 1


def test_an_item_that_is_given_up_lets_those_behind_it_have_one_try_each(round_: Round) -> None:
    round_.endpoint.slow["job-stream"] = NEVER_S

    async def act() -> None:
        async with round_.courier(timeout_s=0.05, retry_s=0.2) as courier:
            await courier.item({"n": 1})
            tries = round_.tries("job-stream")
            assert tries > 1
            await courier.item({"n": 2})
            await courier.item({"n": 3})
            assert round_.tries("job-stream") == tries + 2
            await courier.result([{"output": [1, 2, 3]}], streamed=True)

    run(act())
    assert round_.job.output == [1, 2, 3]


@pytest.mark.parametrize("status", [401, 404, 413])
def test_an_item_that_runpod_refuses_is_lost_and_the_log_says_so(
    round_: Round, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    round_.endpoint.fail_next("job-stream", status)

    async def act() -> None:
        async with round_.courier() as courier:
            await courier.item({"n": 1})
            assert courier.has_lost_items

    run(act())
    assert f'event=item_lost job={round_.job.id} why="HTTP {status}"' in caplog.text
    assert round_.tries("job-stream") == 1


def test_after_a_lost_item_the_next_one_does_not_hold_up_the_job_for_as_long(round_: Round) -> None:
    round_.endpoint.fail_next("job-stream", 404)

    async def act() -> None:
        async with round_.courier(timeout_s=60) as courier:
            await courier.item({"n": 1})
            round_.endpoint.slow["job-stream"] = NEVER_S
            await asyncio.wait_for(courier.item({"n": 2}), delivery.ITEM_RETRY_S / 2)

    run(act())
    assert round_.tries("job-stream") == 2


def test_a_job_that_is_cancelled_does_not_go_on_with_its_delivery(round_: Round) -> None:
    round_.endpoint.slow["job-done"] = NEVER_S

    async def act() -> None:
        async with round_.courier() as courier:
            delivering = asyncio.create_task(courier.result([{"output": "done"}], streamed=False))
            await asyncio.to_thread(round_.endpoint.wait_for, round_.tries)
            delivering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await delivering

    run(act())
    assert round_.job.posts == []


# --- the reports


class NotedCourier(Courier):
    """Notes what it carries, and takes as long as it is told."""

    def __init__(self) -> None:
        self.carried: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.set_out = asyncio.Event()
        self.may_arrive = asyncio.Event()
        self.may_arrive.set()

    async def report(self, progress: dict[str, Any]) -> None:
        self.set_out.set()
        await self.may_arrive.wait()
        self.carried.put_nowait(progress)

    async def arrived_s(self) -> float:
        """How far the job had come in the next report that arrives."""
        seconds: float = (await self.carried.get())["seconds_done"]
        return seconds


def at(seconds: float) -> Progress:
    return Progress("transcribe", seconds, 60)


def test_a_job_that_ends_within_the_interval_has_no_report() -> None:
    async def act() -> None:
        courier = NotedCourier()
        async with Reports(courier, NEVER_S) as reports:
            reports.progress(at(1))
        assert courier.carried.empty()

    run(act())


def test_the_newest_progress_is_reported_and_only_when_it_has_changed() -> None:
    async def act() -> None:
        courier = NotedCourier()
        async with Reports(courier, SOON_S) as reports:
            for seconds in (1, 2):
                reports.progress(at(seconds))
            assert await courier.arrived_s() == 2
            reports.progress(at(2))
            await asyncio.sleep(20 * SOON_S)
            reports.progress(at(3))
            assert await courier.arrived_s() == 3
        assert courier.carried.empty()

    run(act())


def test_nothing_is_reported_once_the_job_is_not_wanted() -> None:
    async def act() -> None:
        courier, is_wanted = NotedCourier(), asyncio.Event()
        is_wanted.set()
        async with Reports(courier, SOON_S, is_wanted.is_set) as reports:
            reports.progress(at(1))
            assert await courier.arrived_s() == 1
            is_wanted.clear()
            reports.progress(at(2))
            await asyncio.sleep(20 * SOON_S)
        assert courier.carried.empty()

    run(act())


class BrokenCourier(NotedCourier):
    async def report(self, _: dict[str, Any]) -> None:
        self.set_out.set()
        raise ZeroDivisionError


def test_a_fault_in_reporting_is_nothing_to_the_job() -> None:
    async def act() -> None:
        courier = BrokenCourier()
        async with Reports(courier, SOON_S) as reports:
            reports.progress(at(1))
            await courier.set_out.wait()

    run(act())


def test_the_block_is_left_when_the_report_on_its_way_has_arrived_and_nothing_follows() -> None:
    async def act() -> None:
        courier = NotedCourier()
        courier.may_arrive.clear()

        async def job() -> None:
            async with Reports(courier, SOON_S) as reports:
                reports.progress(at(1))
                await courier.set_out.wait()
                reports.progress(at(2))

        task = asyncio.create_task(job())
        await courier.set_out.wait()
        await asyncio.sleep(20 * SOON_S)
        assert not task.done()
        courier.may_arrive.set()
        await task
        await asyncio.sleep(20 * SOON_S)
        assert await courier.arrived_s() == 1
        assert courier.carried.empty()

    run(act())


@pytest.mark.parametrize(
    ("status", "size", "outcome"),
    [
        (200, 10, Outcome.TAKEN),
        (413, 10, Outcome.TOO_LARGE),
        (400, 2_000_000, Outcome.TOO_LARGE),  # RunPod's own answer
        (400, 10, Outcome.FAILED),
        (408, 10, Outcome.FAILED),
        (429, 10, Outcome.FAILED),
        (503, 10, Outcome.FAILED),
        (401, 10, Outcome.REFUSED),
        (404, 2_000_000, Outcome.REFUSED),
    ],
)
def test_answers_are_told_apart(status: int, size: int, outcome: Outcome) -> None:
    assert outcome_of(status, size) is outcome


def test_a_report_without_an_answer_is_the_last_and_the_result_outlives_it(
    round_: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint deals with the report late, when it has the result already, and takes that back."""
    monkeypatch.setattr(delivery, "ASTRAY_S", 0.5)
    round_.endpoint.slow["job-done"] = 0.4

    async def act() -> None:
        async with round_.courier(timeout_s=0.1) as courier:
            await courier.report({"progress": 0.1})
            del round_.endpoint.slow["job-done"]
            await courier.report({"progress": 0.2})
            await courier.result([{"output": "done"}], streamed=False)

    run(act())
    assert [post.get("status", "result") for post in round_.job.posts] == ["result", "IN_PROGRESS", "result"]
    assert round_.job.status == "COMPLETED"


def test_a_report_that_runpod_does_not_answer_holds_up_the_result_only_for_its_time(
    round_: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "ASTRAY_S", 0.0)
    round_.endpoint.slow["job-done"] = NEVER_S

    async def act() -> None:
        async with round_.courier(timeout_s=0.05) as courier:
            async with Reports(courier, SOON_S) as reports:
                reports.progress(at(1))
                await asyncio.to_thread(round_.endpoint.wait_for, round_.tries)
            del round_.endpoint.slow["job-done"]
            await courier.result([{"output": "done"}], streamed=False)

    run(act())
    assert round_.job.posts == [{"output": "done"}]


# --- in haste


def test_in_haste_an_item_that_is_not_answered_is_let_go_and_the_result_arrives(
    round_: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "HASTY_TRY_S", 0.05)
    round_.endpoint.slow["job-stream"] = NEVER_S
    in_haste = asyncio.Event()

    async def act() -> None:
        async with round_.courier(in_haste=in_haste) as courier:
            sending = asyncio.create_task(courier.item({"n": 1}))
            await asyncio.to_thread(round_.endpoint.wait_for, lambda: round_.tries("job-stream"))
            in_haste.set()
            await sending
            await courier.report({"progress": 0.5})
            await courier.result([{"output": "done"}], streamed=True)

    run(act())
    assert round_.job.posts == [{"output": "done"}]


def test_in_haste_a_result_that_is_not_answered_is_tried_again_at_once(
    round_: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "HASTY_TRY_S", 0.05)
    round_.endpoint.slow["job-done"] = NEVER_S
    in_haste = asyncio.Event()

    async def act() -> None:
        async with round_.courier(in_haste=in_haste) as courier:
            sending = asyncio.create_task(courier.result([{"output": "done"}], streamed=False))
            await asyncio.to_thread(round_.endpoint.wait_for, round_.tries)
            del round_.endpoint.slow["job-done"]
            in_haste.set()
            await sending

    run(act())
    assert round_.job.status == "COMPLETED"


def test_a_report_that_could_not_be_sent_is_not_the_last(round_: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    url = round_.endpoint.worker_env()["RUNPOD_WEBHOOK_POST_OUTPUT"].replace("$RUNPOD_POD_ID", WORKER_ID)

    async def act() -> None:
        async with round_.courier() as courier:
            monkeypatch.setattr(delivery, "JOB_DONE_URL", "http://127.0.0.1:9/$ID?")  # nobody listens
            await courier.report({"progress": 0.1})
            monkeypatch.setattr(delivery, "JOB_DONE_URL", url)
            await courier.report({"progress": 0.2})

    run(act())
    assert round_.job.posts == [{"status": "IN_PROGRESS", "output": {"progress": 0.2}}]
