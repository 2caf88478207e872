"""The SDK's job loop, with an end that loses nothing, and results that arrive.

The SDK's own loop ends badly. Its request for work is a long poll, and after SIGTERM the endpoint may still answer it
with a job: that one is put into a queue which nobody reads any more, while the process waits for the poll for up to
90 s. None of the hooks of `runpod.serverless.start` reaches that: the handler isn't called, and the concurrency
modifier can neither stop the asking nor wait. So this loop takes the place of the SDK's, as a subclass of it: asking
for work, heartbeats and stop signals stay the SDK's.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from aiohttp import ClientSession
from runpod.serverless.modules.rp_job import get_job
from runpod.serverless.modules.rp_scale import JobScaler

from whisper_worker import log, reply
from whisper_worker.delivery import Courier, Reports
from whisper_worker.errors import InternalError, ResultTooLarge, ShuttingDown, Unhealthy
from whisper_worker.health import Health
from whisper_worker.process import LAST_RESORT_S, end_process, end_process_in
from whisper_worker.service import Service
from whisper_worker.settings import Settings
from whisper_worker.stop import is_set_within

ASK_PAUSE_S = 0.5
STOP_KEPT_S = 5.0  # a stop may come before its job does, which has another way
LAST_WORDS_S = 10.0  # for delivering the answers of jobs that were broken off at the end
NOT_TAKEN = ResultTooLarge("RunPod didn't take the result: send the audio in parts")

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
        self._in_haste = asyncio.Event()  # to deliver what there is
        self._begun: set[str] = set()  # jobs whose task runs
        self._ended: deque[str] = deque(maxlen=1000)  # the last jobs
        self._stopped: dict[str, float] = {}  # jobs that are to be stopped, and since when

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
        self._forget_old_stops()
        with suppress(ValueError):
            self._ended.remove(job["id"])
        self._begun.add(job["id"])
        try:
            await super().handle_job(session, job)
        finally:
            self._begun.discard(job["id"])
            self._stopped.pop(job["id"], None)
            self._ended.append(job["id"])
            self._news.set()

    async def stop_job(self, job_id: str) -> bool:
        if job_id in self._ended:
            return False  # too late; a job that is tried again has the same id
        self._stopped[job_id] = time.monotonic()
        # A task that hasn't begun wouldn't tidy up; and a job may still be on its way here.
        return bool(await super().stop_job(job_id)) if job_id in self._begun else False

    def _forget_old_stops(self) -> None:
        oldest = time.monotonic() - STOP_KEPT_S
        kept = {name: since for name, since in self._stopped.items() if since > oldest or name in self._begun}
        self._stopped = kept

    # The end.

    async def _end_when_told(self, sick: "asyncio.Future[Unhealthy]") -> None:
        await self._until(lambda: self._signals or sick.done())
        self._asks_no_more = True
        if not sick.done():
            grace_s = self._settings.shutdown_grace_s
            end_process_in(grace_s + LAST_RESORT_S, 0)
            log.event("shutdown", jobs=self.job_progress.get_job_count(), grace_s=grace_s)

            def is_over() -> bool:
                return self._has_ended_all() or len(self._signals) > 1 or sick.done()

            await self._until(is_over, grace_s - LAST_WORDS_S)
            self._in_haste.set()
            await self._until(is_over, min(grace_s, LAST_WORDS_S))
        self._in_haste.set()
        if not sick.done():  # else they have heard the same alarm
            self._service.end_jobs(ShuttingDown("the worker ended before the job was done: send it again"))
        await self._until(lambda: not self.current_occupancy(), LAST_WORDS_S)
        for job in self.job_progress:
            log.event("result_lost", job=str(job), level=log.ERROR, why="the worker ended")
        log.event("shutdown_done", unanswered=self.job_progress.get_job_count())
        if sick.done():
            end_process(sick.result().exit_code)
        if self.job_progress or self._service.is_winding_up or self._health.is_trying_model:
            end_process(0)  # asyncio would wait for the threads

    def _has_ended_all(self) -> bool:
        return self._has_asked_last and not self.current_occupancy()

    async def _until(self, holds: Callable[[], object], timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not holds():
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            self._news.clear()
            await is_set_within(self._news, left_s)

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
        if job["id"] in self._stopped:
            log.event("job_cancelled", job=job["id"], note="before it began")
            return
        settings = self._settings
        courier = Courier(
            session,
            job["id"],
            timeout_s=settings.result_timeout_s,
            retry_s=settings.result_retry_s,
            in_haste=self._in_haste,
        )
        try:
            bodies = await (self._items_of if settings.streaming else self._output_of)(courier, job)
        except Exception:  # a fault of ours: the caller shouldn't have to wait until the job's time is over
            log.event("job_failed", job=job["id"], level=log.ERROR, trace=True)
            bodies = iter([InternalError(f"the worker's log has the details of job {job['id']}").reply])
        await courier.result(bodies, streamed=settings.streaming)

    async def _output_of(self, courier: Courier, job: Json) -> Iterator[Json]:
        """What to send as the job's result: the next where RunPod finds the one before too large. So below."""
        interval_s = self._settings.progress_interval_s
        async with Reports(courier, interval_s, lambda: job["id"] not in self._stopped) as reports:
            return _smaller_and_smaller(await self._service.run(job, reports))

    async def _items_of(self, courier: Courier, job: Json) -> Iterator[Json]:
        items: list[Json] = []
        async with aclosing(self._service.stream(job)) as stream:
            async for item in stream:
                if "error" in item:
                    return _smaller_and_smaller(item)
                items.append(item)
                await courier.item(item)
        fits = await asyncio.to_thread(reply.size, items) <= self._settings.max_inline_bytes
        return _aggregates(items, fits, all_were_streamed=not courier.has_lost_items)


def _smaller_and_smaller(output: Json) -> Iterator[Json]:
    if "error" in output:
        yield _failed(output)
        yield _failed({**output, "partial": None})
    else:
        yield {"output": output}
        yield {"output": reply.without_details(output)}
        yield NOT_TAKEN.reply


def _aggregates(items: list[Json], fits: bool, all_were_streamed: bool) -> Iterator[Json]:
    """The items once more, for callers of `/run`; without the segments when that's too large."""
    if fits:
        yield {"output": items}
    where = "which are in the stream" if all_were_streamed else "of which some were lost"
    note = f"left out, for the reply to arrive: the segments, {where}"
    *rest, result = (item for item in items if item["type"] != "segments")
    yield {"output": [*rest, {**result, "warnings": [*result["warnings"], note]}]}
    yield NOT_TAKEN.reply


def _failed(output: Mapping[str, Any]) -> Json:
    """In RunPod's own fields, as the SDK makes them of what a handler returns."""
    body: Json = {"error": output["error"]}
    if output.get("partial"):
        body["output"] = {"partial": output["partial"]}
    if output.get("refresh_worker"):
        body["stopPod"] = True
    return body
