"""What there is to say of a job → RunPod, until it has arrived. All on the event loop.

The SDK's own sending isn't used: it gives up after three tries within seconds, or at the first timeout, logs that and
drops the result; its progress reports overtake each other and the result.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from enum import Enum, auto
from io import BytesIO
from typing import Any

from aiohttp import ClientConnectorError, ClientError, ClientSession, ClientTimeout
from runpod.serverless.modules.rp_http import JOB_DONE_URL, JOB_STREAM_URL

from whisper_worker import log, reply
from whisper_worker.live import Progress, Watcher
from whisper_worker.stop import is_set_within, wait_out

Json = dict[str, Any]

HEADERS = {"charset": "utf-8", "Content-Type": "application/x-www-form-urlencoded"}  # as the SDK has it: it's JSON
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
REPORT_TIMEOUT_S = 15.0  # the result waits for a report on its way
ASTRAY_S = 10.0  # after which one without an answer has arrived, or never will
HASTY_TRY_S = 3.0
ITEM_RETRY_S = 10.0  # the job waits for an item on its way; one that is given up is in the result as well
SMALL_BYTES = 1_000_000  # what RunPod refuses with 400 and isn't larger has another fault


class Outcome(Enum):
    TAKEN = auto()
    TOO_LARGE = auto()
    REFUSED = auto()  # for good
    FAILED = auto()  # another try may fare better
    UNANSWERED = auto()  # the same; but it may have arrived


class Courier:
    """Carries one job's reports, items and result, each after the one before has arrived or been given up.

    Once `in_haste` is set there is little time left: then each try is over within `HASTY_TRY_S`, and each pause within
    `FIRST_PAUSE_S`; only results are tried again, and nothing is reported.
    """

    def __init__(
        self,
        session: ClientSession,
        job_id: str,
        *,
        timeout_s: float,
        retry_s: float,
        in_haste: asyncio.Event | None = None,
    ) -> None:
        self.has_lost_items = False
        self._session = session
        self._job_id = job_id
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._in_haste = in_haste or asyncio.Event()
        self._report_astray_until = 0.0

    async def report(self, progress: Json) -> None:
        """In one try: the next one is newer."""
        if time.monotonic() < self._report_astray_until or self._in_haste.is_set():
            return
        body = {"status": "IN_PROGRESS", "output": progress}
        outcome, _ = await self._deliver(
            JOB_DONE_URL, body, timeout_s=min(REPORT_TIMEOUT_S, self._timeout_s), retry_s=0
        )
        if outcome is Outcome.UNANSWERED:
            self._report_astray_until = time.monotonic() + ASTRAY_S

    async def item(self, item: Json) -> None:
        """For the readers of `/stream`. After one that is lost, the job isn't held up for long any more."""
        hurry = self.has_lost_items or self._in_haste.is_set()
        timeout_s, retry_s = (1.0, 0.0) if hurry else (ITEM_RETRY_S, ITEM_RETRY_S)
        outcome, why = await self._deliver(
            JOB_STREAM_URL,
            {"output": item},
            timeout_s=min(timeout_s, self._timeout_s),
            retry_s=min(retry_s, self._retry_s),
        )
        if outcome is not Outcome.TAKEN:
            self.has_lost_items = True
            log.event("item_lost", job=self._job_id, level=log.WARNING, why=why)

    async def result(self, bodies: Iterable[Json], *, streamed: bool) -> None:
        """The first of the bodies that isn't too large for RunPod."""

        async def deliver(body: Json) -> tuple[Outcome, str]:
            return await self._deliver(
                JOB_DONE_URL,
                body,
                timeout_s=self._timeout_s,
                retry_s=self._retry_s,
                is_result=True,
                streamed=streamed,
            )

        for body in bodies:
            outcome, why = await deliver(body)
            if outcome is not Outcome.TOO_LARGE:
                break
        if outcome is not Outcome.TAKEN:
            log.event("result_lost", job=self._job_id, level=log.ERROR, why=why)
        elif (left_s := self._report_astray_until - time.monotonic()) > 0:
            # It may yet arrive, and would take the result back: the job would be in progress for ever.
            await is_set_within(self._in_haste, left_s)
            await deliver(body)

    async def _deliver(
        self,
        url: str,
        body: Json,
        *,
        timeout_s: float,
        retry_s: float,
        is_result: bool = False,
        streamed: bool = False,
    ) -> tuple[Outcome, str]:
        """What became of it, and RunPod's last answer."""
        data = await asyncio.to_thread(reply.encoded, body)
        url = f"{url.replace('$ID', self._job_id)}&isStream={str(streamed).lower()}"
        give_up_at, pause_s = time.monotonic() + retry_s, FIRST_PAUSE_S
        while True:
            outcome, why = await self._try(url, data, timeout_s)
            if outcome not in (Outcome.FAILED, Outcome.UNANSWERED):
                return outcome, why
            if self._in_haste.is_set() and not is_result:
                return outcome, why
            pause_s = FIRST_PAUSE_S if self._in_haste.is_set() else pause_s
            if time.monotonic() + pause_s > give_up_at:
                log.event("delivery_failed", job=self._job_id, level=log.WARNING, why=why)
                return outcome, why
            log.event("delivery_retried", job=self._job_id, why=why, pause_s=pause_s)
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _pause(self, seconds: float) -> None:
        if self._in_haste.is_set():
            await asyncio.sleep(seconds)
        else:
            await is_set_within(self._in_haste, seconds)

    async def _try(self, url: str, data: bytes, timeout_s: float) -> tuple[Outcome, str]:
        trying = asyncio.ensure_future(self._post(url, data, timeout_s))
        hasty = asyncio.ensure_future(self._in_haste.wait())
        try:
            await asyncio.wait([trying, hasty], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([trying], timeout=HASTY_TRY_S)
            return trying.result() if trying.done() else (Outcome.UNANSWERED, f"no answer, and {HASTY_TRY_S:g} s left")
        finally:
            trying.cancel()
            hasty.cancel()

    async def _post(self, url: str, data: bytes, timeout_s: float) -> tuple[Outcome, str]:
        headers = {**HEADERS, "X-Request-ID": self._job_id}
        body = BytesIO(data)  # sent in parts, between which the loop is free
        timeout = ClientTimeout(total=timeout_s)
        try:
            async with self._session.post(url, data=body, headers=headers, timeout=timeout) as answer:
                await answer.read()
        except asyncio.TimeoutError:
            return Outcome.UNANSWERED, f"no answer within {timeout_s:g} s"
        except ClientConnectorError:
            return Outcome.FAILED, "no connection"
        except (ClientError, OSError) as error:
            return Outcome.UNANSWERED, f"the connection was lost: {type(error).__name__}"
        return _outcome(answer.status, len(data)), f"HTTP {answer.status}"


def _outcome(status: int, size: int) -> Outcome:
    if status < 300:
        return Outcome.TAKEN
    if status == 413 or (status == 400 and size > SMALL_BYTES):
        return Outcome.TOO_LARGE
    return Outcome.FAILED if status in (400, 408, 429) or status >= 500 else Outcome.REFUSED


class Reports(Watcher):
    """Inside its `async with`, the job's newest progress is reported every `interval_s`, if there is any.

    The first report comes after one interval, so that short jobs have none; when the block is left, the last one has
    arrived or been given up. None is sent any more once the job isn't wanted.
    """

    def __init__(self, courier: Courier, interval_s: float, is_wanted: Callable[[], bool] = lambda: True) -> None:
        self._courier = courier
        self._interval_s = interval_s
        self._is_wanted = is_wanted
        self._newest: Progress | None = None
        self._over = asyncio.Event()

    def progress(self, progress: Progress) -> None:
        self._newest = progress

    async def __aenter__(self) -> "Reports":
        self._sending = asyncio.create_task(self._send())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await wait_out(self._sending)
        if error := self._sending.exception():  # whatever becomes of a report, it's nothing to the job
            log.event("report_failed", level=log.ERROR, error=error)

    async def _send(self) -> None:
        sent = None
        while not await is_set_within(self._over, self._interval_s):
            if self._newest and self._newest != sent and self._is_wanted():
                sent = self._newest
                await self._courier.report(sent.report())
