"""The SDK's job loop, with an end that loses nothing, and results that arrive.

The SDK's own loop ends badly. Its request for work is a long poll, and after SIGTERM the endpoint may still answer it
with a job: that one is put into a queue which nobody reads any more, while the process waits for the poll for up to
90 s. None of the hooks of `runpod.serverless.start` reaches that: the handler isn't called, and the concurrency
modifier can neither stop the asking nor wait. So this loop takes the place of the SDK's, as a subclass of it: asking
for work, heartbeats and stop signals stay the SDK's.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from aiohttp import ClientSession
from runpod.serverless.modules.rp_job import get_job
from runpod.serverless.modules.rp_scale import JobScaler

from whisper_worker import log, reply
from whisper_worker.delivery import Courier, Reports
from whisper_worker.errors import ResultTooLarge, ShuttingDown, Unhealthy
from whisper_worker.health import Health
from whisper_worker.process import end_process
from whisper_worker.service import Service
from whisper_worker.settings import Settings

ASK_PAUSE_S = 0.5
LAST_WORDS_S = 5.0  # for delivering the answers of jobs that were broken off at the end

Json = dict[str, Any]


class JobLoop(JobScaler):  # type: ignore[misc]
    """Takes jobs and answers them until it is told to end, or the worker is past help.

    Told to end (SIGTERM, SIGINT) it asks for no more work. The jobs that it has, and any that the open request for work
    still brings, go on within the grace; it is over sooner when there are none, or when the signal comes twice. Then
    what is left fails with SHUTTING_DOWN.

    The open request is waited for as the jobs are, even when there are none: who hangs up on it can lose a job, because
    the endpoint needn't notice that nobody is there any more.
    """

    def __init__(
        self,
        config: Json,
        *,
        service: Service,
        health: Health,
        settings: Settings,
        signals: list[int] | None = None,
    ) -> None:
        """`signals`: those to end that came before there was a loop; its own are added."""
        super().__init__(config)
        self.jobs_fetcher = self._ask  # the SDK lets itself be given these two, but only for local tests
        self.jobs_handler = self._answer
        self._service = service
        self._health = health
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()  # something below, or the number of jobs, has changed
        self._signals = [] if signals is None else signals
        self._asks_no_more = False
        self._has_asked_last = False
        self._begun: set[str] = set()  # jobs whose task runs
        self._stopped_early: set[str] = set()  # jobs that were cancelled before they had begun

    # The SDK's own methods, which it calls.

    def handle_shutdown(self, signum: int, frame: object) -> None:  # noqa: ARG002
        self._signals.append(signum)
        if self._loop:
            self._loop.call_soon_threadsafe(self._news.set)

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        loops = asyncio.create_task(super().run())
        with self._health.alarm.heard() as sick:
            sick.add_done_callback(lambda _: self._news.set())
            end = asyncio.create_task(self._end_when_told(sick))
            await asyncio.wait({loops, end}, return_when=asyncio.FIRST_COMPLETED)
            end.cancel()
        loops.cancel()
        with suppress(asyncio.CancelledError):
            await loops

    async def set_scale(self) -> None:
        """Called before each request for work."""
        if self._asks_no_more:
            self._has_asked_last = True
            self._news.set()
            await asyncio.Event().wait()  # until this loop is cancelled
        await super().set_scale()

    async def handle_job(self, session: ClientSession, job: Json) -> None:
        self._begun.add(job["id"])
        try:
            await super().handle_job(session, job)
        finally:
            self._begun.discard(job["id"])
            self._news.set()

    async def stop_job(self, job_id: str) -> bool:
        if job_id in self._begun:
            return bool(await super().stop_job(job_id))
        if self.job_progress.get(job_id):  # with a task perhaps, but one that never began wouldn't tidy up
            self._stopped_early.add(job_id)
        return False

    # The end.

    async def _end_when_told(self, sick: "asyncio.Future[Unhealthy]") -> None:
        await self._until(lambda: self._signals or sick.done())
        self._asks_no_more = True
        if not sick.done():
            grace_s = self._settings.shutdown_grace_s
            log.event("shutdown", jobs=self.job_progress.get_job_count(), grace_s=grace_s)
            await self._until(lambda: self._has_ended_all() or len(self._signals) > 1 or sick.done(), grace_s)
        self._service.end_jobs(ShuttingDown("the worker ended before the job was done: send it again"))
        await self._until(lambda: not self.current_occupancy(), LAST_WORDS_S)
        log.event("shutdown_done", unanswered=self.job_progress.get_job_count())
        if sick.done():
            end_process(sick.result().exit_code)  # threads that hang can't be waited for, by asyncio neither

    def _has_ended_all(self) -> bool:
        return self._has_asked_last and not self.current_occupancy()

    async def _until(self, holds: Callable[[], object], timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not holds():
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            self._news.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), left_s)

    # Work.

    async def _ask(self, session: ClientSession, jobs_needed: int) -> list[Json] | None:
        """The SDK asks again at once, thousands of times a second, when it gets no answer or a quick no."""
        began = time.monotonic()
        try:
            jobs: list[Json] | None = await get_job(session, jobs_needed)
        except Exception:
            await asyncio.sleep(ASK_PAUSE_S)
            raise
        if not jobs and time.monotonic() - began < ASK_PAUSE_S:
            await asyncio.sleep(ASK_PAUSE_S)
        return jobs

    async def _answer(self, session: ClientSession, config: Json, job: Json) -> None:  # noqa: ARG002
        if job["id"] in self._stopped_early:
            self._stopped_early.discard(job["id"])
            log.event("job_cancelled", job=job["id"], note="before it began")
            return
        settings = self._settings
        courier = Courier(session, job["id"], timeout_s=settings.result_timeout_s, retry_s=settings.result_retry_s)
        if settings.streaming:
            await self._answer_with_items(courier, job)
        else:
            await self._answer_with_one(courier, job)

    async def _answer_with_one(self, courier: Courier, job: Json) -> None:
        async with Reports(courier, self._settings.progress_interval_s) as reports:
            output = await self._service.run(job, reports)
        await courier.result(_smaller_and_smaller(output), streamed=False)

    async def _answer_with_items(self, courier: Courier, job: Json) -> None:
        items: list[Json] = []
        failure: Json = {}
        async with aclosing(self._service.stream(job)) as stream:
            async for item in stream:
                if "error" in item:
                    failure = item
                else:
                    items.append(item)
                    await courier.item(item)
        if failure:
            bodies = _smaller_and_smaller(failure)
        else:
            fits = await asyncio.to_thread(reply.size, items) <= self._settings.max_inline_bytes
            bodies = _aggregates(items, fits)
        await courier.result(bodies, streamed=True)


def _smaller_and_smaller(output: Json) -> Iterator[Json]:
    """What to send as the result of a job: the next where the one before is refused."""
    if "error" in output:
        yield _failed(output)
        yield _failed({**output, "partial": None})
    else:
        yield {"output": output}
        yield {"output": reply.without_details(output)}
        yield ResultTooLarge("RunPod didn't take the result: send the audio in parts").reply


def _aggregates(items: list[Json], fits: bool) -> Iterator[Json]:
    """As above, of a stream: the items once more, for callers of `/run`; without the segments when that's too large."""
    if fits:
        yield {"output": items}
    note = "left out, for the reply to arrive: the segments, which are in the stream"
    *rest, result = (item for item in items if item["type"] != "segments")
    yield {"output": [*rest, {**result, "warnings": [*result["warnings"], note]}]}
    yield ResultTooLarge("RunPod didn't take the result: send the audio in parts").reply


def _failed(output: Mapping[str, Any]) -> Json:
    """In RunPod's own fields, as the SDK makes them of what a handler returns."""
    body: Json = {"error": output["error"]}
    if output.get("partial"):
        body["output"] = {"partial": output["partial"]}
    if output.get("refresh_worker"):
        body["stopPod"] = True
    return body
