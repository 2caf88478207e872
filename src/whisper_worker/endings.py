"""How a job ends before it is done: its time is over, the worker ends, or its caller cancels it. On the event loop."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from whisper_worker import log
from whisper_worker.errors import EXIT_HUNG, TimedOut, Unhealthy, WorkerError
from whisper_worker.health import Health
from whisper_worker.job import Job
from whisper_worker.settings import Settings
from whisper_worker.stop import Alarm, Stopped, see

WIND_UP_S = 2.0  # for the threads of a job that is over its time; then it is answered all the same

T = TypeVar("T")


class Endings:
    """Of all jobs: each runs inside `unless_ended`."""

    def __init__(self, settings: Settings, health: Health) -> None:
        self._job_timeout_s = settings.job_timeout_s
        self._thread_timeout_s = settings.window_timeout_s
        self._health = health
        self._closing: Alarm[WorkerError] = Alarm()
        self._winding_up: set[asyncio.Task[Any]] = set()

    @property
    def is_winding_up(self) -> bool:
        """Whether threads still work for jobs that have been broken off."""
        return bool(self._winding_up)

    def end_all(self, error: WorkerError) -> None:
        """Break off all jobs, and those to come, with `error`. From any thread."""
        self._closing.ring(error)

    async def unless_ended(self, job: Job, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns, unless its time is over before, or the worker ends.

        When this raises CancelledError, none of the job's threads is at work any more, unless they hang.
        """
        limit_s = min(self._job_timeout_s, job.request.timeout_s or math.inf)
        with self._closing.heard() as closing, self._health.alarm.heard() as hung:
            if not (closing.done() or hung.done()):
                task = asyncio.create_task(work())
                task.add_done_callback(see)  # a cancellation may come when it has just failed
                ends: list[asyncio.Future[Any]] = [task, closing, hung]
                try:
                    left_s = max(limit_s - job.watch.total_s, 0)
                    await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    await self._break_off(job, task, hung)
                    raise
                await self._break_off(job, task, hung, patience_s=WIND_UP_S)
                if task.done() and not task.cancelled() and not isinstance(task.exception(), Stopped):
                    return task.result()
            for ending in (hung, closing):
                if ending.done():
                    raise ending.result().with_traceback(None)  # shared by all jobs, and it would grow with each
            raise TimedOut(f"the job took longer than {limit_s:g} s")

    async def _break_off(
        self, job: Job, task: "asyncio.Task[Any]", hung: "asyncio.Future[Any]", patience_s: float = math.inf
    ) -> None:
        """End the task, and wait for the end of its threads; for so long at most, and not when the model hangs.

        It keeps its place until they have ended. If they don't, the worker is past help.
        """
        if task.done():
            return
        job.stop.set()
        task.cancel()
        give_up = Unhealthy("a thread hangs: send the job again, another worker takes it", EXIT_HUNG)
        alarm = asyncio.get_running_loop().call_later(self._thread_timeout_s, self._health.give_up, give_up)
        self._winding_up.add(task)
        task.add_done_callback(lambda _: alarm.cancel())
        task.add_done_callback(self._winding_up.discard)
        until, cancelled = time.monotonic() + patience_s, False
        while not (task.done() or hung.done()) and (left_s := until - time.monotonic()) > 0:
            try:
                timeout_s = None if math.isinf(left_s) else left_s
                await asyncio.wait([task, hung], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                cancelled = True  # raised again below
        if not task.done():
            log.event("job_left_running", job=job.id, level=log.WARNING)
        if cancelled:
            raise asyncio.CancelledError
