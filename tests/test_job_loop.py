"""What the job loop adds to the SDK's, where a whole worker wouldn't show it."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import pytest
from fakes import FakeEngine, segment, spoken
from media import pcm, wav
from runpod.serverless.modules.worker_state import JobsProgress
from served import THREADS, job, service_in_parts, speech_for

from whisper_worker import job_loop
from whisper_worker.job_loop import JobLoop
from whisper_worker.piecework import AHEAD
from whisper_worker.settings import Settings
from whisper_worker.speech import Speech
from whisper_worker.stop import Stop
from whisper_worker.transcript import Said


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def loop(engine: FakeEngine) -> Iterator[JobLoop]:
    with loop_of(engine) as loop:
        yield loop


@contextmanager
def loop_of(engine: FakeEngine | None = None, service: Any = None, **env: Any) -> Iterator[JobLoop]:
    """With a service of its own, unless one is given."""
    with service_in_parts(engine, **env) as (served, health, _):
        yield JobLoop({}, service=service or served, health=health, settings=Settings.from_env(env))
    JobsProgress().clear()


class Session:
    """Takes everything."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.posted: list[bytes] = []

    def post(self, url: str, *, data: BytesIO, **_: Any) -> "Session":
        self.urls.append(url)
        self.posted.append(data.getvalue())
        return self

    status = 200

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def read(self) -> bytes:
        return b""


def test_a_job_that_is_cancelled_before_it_began_never_begins(loop: JobLoop, engine: FakeEngine) -> None:
    session: Any = Session()

    async def run() -> None:
        for name in ("cancelled", "wanted"):
            loop.job_progress.add({"id": name, "input": {}})
        assert await loop.stop_job("cancelled") is False  # the SDK knows of no task that it could cancel
        for name in ("cancelled", "wanted"):
            await loop.jobs_handler(session, {}, job(id=name))

    asyncio.run(run())
    assert (len(session.posted), engine.pieces) == (1, 1)


def test_a_job_that_is_cancelled_when_its_task_has_not_begun_keeps_no_place(loop: JobLoop, engine: FakeEngine) -> None:
    session: Any = Session()

    async def run() -> None:
        loop.job_progress.add({"id": "cancelled", "input": {}})
        await loop.jobs_queue.put(job(id="cancelled"))
        task = asyncio.create_task(loop.handle_job(session, await loop.jobs_queue.get()))
        loop.jobs_tasks["cancelled"] = task
        await loop.stop_job("cancelled")
        await asyncio.wait([task])

    asyncio.run(run())
    assert loop.current_occupancy() == 0
    assert (session.posted, engine.pieces) == ([], 0)


@pytest.mark.parametrize(("kept_s", "posted"), [(60.0, 0), (0.0, 1)])
def test_a_stop_may_come_shortly_before_its_job(
    loop: JobLoop, monkeypatch: pytest.MonkeyPatch, kept_s: float, posted: int
) -> None:
    monkeypatch.setattr(job_loop, "STOP_KEPT_S", kept_s)
    session: Any = Session()

    async def run() -> None:
        await loop.stop_job("later")
        loop.job_progress.add({"id": "later", "input": {}})
        await loop.jobs_queue.put(job(id="later"))
        await loop.handle_job(session, await loop.jobs_queue.get())

    asyncio.run(run())
    assert len(session.posted) == posted


# --- what the service and RunPod do wrong


class BrokenService:
    """Raises what nobody has foreseen."""

    async def run(self, *_: object) -> dict[str, Any]:
        raise ZeroDivisionError("at /secret/path")

    async def stream(self, *_: object) -> AsyncGenerator[dict[str, Any], None]:
        yield {"type": "info"}
        raise ZeroDivisionError("at /secret/path")


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_a_job_is_answered_whatever_the_service_raises(streaming: str, caplog: pytest.LogCaptureFixture) -> None:
    session: Any = Session()
    with loop_of(service=BrokenService(), STREAMING=streaming) as loop:
        asyncio.run(loop.jobs_handler(session, {}, job()))
    assert json.loads(session.posted[-1]) == {"error": "INTERNAL: the worker's log has the details of job job"}
    assert "ZeroDivisionError: at /secret/path" in caplog.text


class NoItems(Session):
    """Takes the result, but refuses the items of the stream."""

    def post(self, url: str, *, data: BytesIO, **_: Any) -> Session:
        self.status = 404 if "STREAM" in url else 200
        return super().post(url, data=data)


def test_a_result_without_its_segments_says_when_the_stream_lacks_some_as_well() -> None:
    session: Any = NoItems()
    with loop_of(STREAMING="true", MAX_INLINE_BYTES="700") as loop:
        asyncio.run(loop.jobs_handler(session, {}, job()))
    _, result = json.loads(session.posted[-1])["output"]
    assert result["warnings"] == ["left out, for the reply to arrive: the segments, of which some were lost"]


class SlowStream(Session):
    """Takes a while for the first item."""

    def __init__(self) -> None:
        super().__init__()
        self.has_come = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def read(self) -> bytes:
        self.has_come.set()
        await self.may_answer.wait()
        return b""


def test_a_job_is_not_transcribed_to_its_end_while_runpod_does_not_take_its_items() -> None:
    engine = FakeEngine(lambda *_: Said((segment(0, 1, " word" * 20_000),), language=spoken("en", 0.9)))

    async def run(loop: JobLoop) -> None:
        session: Any = SlowStream()
        answering = asyncio.create_task(loop.jobs_handler(session, {}, job(wav(pcm(speech_for(200))))))
        await session.has_come.wait()
        await asyncio.sleep(0.5)  # enough for all forty
        assert engine.pieces <= 3 + AHEAD * (1 + THREADS.inter * THREADS.batch)  # an item full, and those ahead
        session.may_answer.set()
        await answering
        assert engine.pieces >= 40

    with loop_of(engine, STREAMING="true", PIECE_SECONDS="5", STREAM_INTERVAL_S="0") as loop:
        asyncio.run(run(loop))


class Reported(Session):
    """Notes when it is told that the transcription has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.is_told = asyncio.Event()

    def post(self, url: str, *, data: BytesIO, **_: Any) -> Session:
        if b'"transcribe"' in data.getvalue():
            self.is_told.set()
        return super().post(url, data=data)


def test_nothing_is_reported_of_a_cancelled_job_whose_threads_need_a_while_to_end() -> None:
    goes_on, is_last, may_end = threading.Event(), threading.Event(), threading.Event()
    interval_s = 0.1
    engine = FakeEngine()

    def act(_: Speech, stop: Stop) -> Said:
        if engine.pieces == 1:
            assert goes_on.wait(30)
        else:
            is_last.set()
            assert may_end.wait(30)
        return Said((segment(0, 1),))

    async def run(loop: JobLoop) -> None:
        session: Any = Reported()
        await loop.jobs_queue.put(job(wav(pcm(speech_for(12))), condition_on_previous_text=True))
        task = asyncio.create_task(loop.handle_job(session, await loop.jobs_queue.get()))
        loop.jobs_tasks["job"] = task
        await session.is_told.wait()
        goes_on.set()  # and there is something new to report
        assert await asyncio.to_thread(is_last.wait, 30)
        assert await loop.stop_job("job")
        reported = len(session.posted)
        await asyncio.sleep(3 * interval_s)
        assert not task.done()
        may_end.set()
        await asyncio.wait([task])
        assert len(session.posted) == reported

    engine.act = act
    with loop_of(engine, PIECE_SECONDS="5", PROGRESS_INTERVAL_S=f"{interval_s}") as loop:
        asyncio.run(run(loop))


def test_a_stop_that_comes_when_its_job_has_ended_does_not_stop_another_try_of_it(loop: JobLoop) -> None:
    session: Any = Session()

    async def run() -> None:
        for _ in range(2):
            loop.job_progress.add({"id": "again", "input": {}})
            await loop.jobs_queue.put(job(id="again"))
            await loop.handle_job(session, await loop.jobs_queue.get())
            await loop.stop_job("again")

    asyncio.run(run())
    assert len(session.posted) == 2
