"""What the job loop adds to the SDK's, where a whole worker wouldn't show it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import FakeEngine
from runpod.serverless.modules.worker_state import JobsProgress
from served import job, service_and_health

from whisper_worker import job_loop
from whisper_worker.job_loop import JobLoop
from whisper_worker.settings import Settings


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def loop(engine: FakeEngine) -> Iterator[JobLoop]:
    with service_and_health(engine) as (service, health):
        yield JobLoop({}, service=service, health=health, settings=Settings.from_env({}))
    JobsProgress().clear()


class Session:
    """Takes everything."""

    def __init__(self) -> None:
        self.posted: list[bytes] = []

    def post(self, _: str, *, data: bytes, **__: Any) -> "Session":
        self.posted.append(data)
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
