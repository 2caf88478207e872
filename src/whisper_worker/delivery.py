"""What there is to say of a job → RunPod, until it has arrived. All on the event loop.

The SDK's own sending isn't used: it gives up after three tries within seconds, or at the first timeout, logs that and
drops the result; its progress reports overtake each other and the result.
"""

import asyncio
import json
import time
from collections.abc import Iterable
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout
from runpod.serverless.modules.rp_http import JOB_DONE_URL, JOB_STREAM_URL

from whisper_worker import log
from whisper_worker.live import Progress, Watcher

Json = dict[str, Any]

HEADERS = {"charset": "utf-8", "Content-Type": "application/x-www-form-urlencoded"}  # as the SDK has it: it's JSON
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
REPORT_TIMEOUT_S = 5.0  # the result waits for a report on its way
ITEM_RETRY_S = 60.0  # an item that was given up isn't lost: the result has it as well
TOO_LARGE = (400, 413)  # RunPod's answers to a body that it finds too large


class Courier:
    """Carries one job's reports, items and result, each after the one before has arrived or been given up."""

    def __init__(self, session: ClientSession, job_id: str, *, timeout_s: float, retry_s: float) -> None:
        self._session = session
        self._job_id = job_id
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._item_retry_s = min(ITEM_RETRY_S, retry_s)

    async def report(self, progress: Json) -> None:
        """In one try: the next one is newer."""
        body = {"status": "IN_PROGRESS", "output": progress}
        await self._deliver(JOB_DONE_URL, body, timeout_s=min(REPORT_TIMEOUT_S, self._timeout_s), retry_s=0)

    async def item(self, item: Json) -> None:
        """For the readers of `/stream`."""
        status = await self._deliver(JOB_STREAM_URL, {"output": item}, retry_s=self._item_retry_s)
        if status is None:
            self._item_retry_s = 0  # those behind it wouldn't arrive either: don't hold up the job for each

    async def result(self, bodies: Iterable[Json], *, streamed: bool) -> None:
        """The first of the bodies that RunPod takes; each is smaller than the one before."""
        for body in bodies:
            status = await self._deliver(JOB_DONE_URL, body, retry_s=self._retry_s, streamed=streamed)
            if status not in TOO_LARGE:
                break
        if status is None or status >= 300:
            log.event("result_lost", job=self._job_id, level=log.ERROR, status=status)

    async def _deliver(
        self, url: str, body: Json, *, retry_s: float, timeout_s: float | None = None, streamed: bool = False
    ) -> int | None:
        """The status of RunPod's answer, None when there was none that counts in all the tries."""
        data = await asyncio.to_thread(_encoded, body)
        url = f"{url.replace('$ID', self._job_id)}&isStream={str(streamed).lower()}"
        give_up_at, pause_s = time.monotonic() + retry_s, FIRST_PAUSE_S
        while True:
            status, why = await self._try(url, data, timeout_s or self._timeout_s)
            if not why:
                return status
            if time.monotonic() + pause_s > give_up_at:
                log.event("delivery_failed", job=self._job_id, level=log.WARNING, why=why)
                return None
            log.event("delivery_retried", job=self._job_id, why=why, pause_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _try(self, url: str, data: bytes, timeout_s: float) -> tuple[int, str | None]:
        """The answer's status, and why another try may fare better, if so."""
        headers = {**HEADERS, "X-Request-ID": self._job_id}
        try:
            async with self._session.post(
                url, data=data, headers=headers, timeout=ClientTimeout(total=timeout_s)
            ) as answer:
                await answer.read()
        except asyncio.TimeoutError:
            return 0, f"no answer within {timeout_s:g} s"
        except (ClientError, OSError) as error:
            return 0, f"no connection: {type(error).__name__}"
        passes = answer.status in (408, 429) or answer.status >= 500
        return answer.status, f"HTTP {answer.status}" if passes else None


class Reports(Watcher):
    """Inside its `async with`, the job's newest progress is reported every `interval_s`, if there is any.

    The first report comes after one interval, so that short jobs have none; when the block is left, the last one has
    arrived or been given up.
    """

    def __init__(self, courier: Courier, interval_s: float) -> None:
        self._courier = courier
        self._interval_s = interval_s
        self._newest: Progress | None = None
        self._over = asyncio.Event()

    def progress(self, progress: Progress) -> None:
        self._newest = progress

    async def __aenter__(self) -> "Reports":
        self._sending = asyncio.create_task(self._send())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await self._sending

    async def _send(self) -> None:
        sent = None
        while not await self._is_over_within(self._interval_s):
            if self._newest and self._newest != sent:
                sent = self._newest
                await self._courier.report(sent.report())

    async def _is_over_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._over.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True


def _encoded(body: Json) -> bytes:
    return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
