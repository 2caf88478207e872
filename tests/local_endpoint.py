"""One RunPod endpoint on a loopback address: the API that callers use, and the queue that workers take jobs from.

The server runs on the event loop of its own thread, and only that thread changes its state. Tests read the state from
theirs, wait for a change of it with `wait_for`, and order faults with `fail_next`, `slow` and `answers_held`. How
RunPod's servers behave is known from the SDK and the documentation alone.
"""

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from threading import Thread
from typing import Any, TypeVar

from aiohttp import web

ENDPOINT_ID = "local"
API_KEY = "local-key"
WORKER_ID = "worker-1"
MAX_REQUEST_BYTES = 20_000_000
SYNC_WAIT_MS = 90_000
HANG_UP = 0  # in place of a status
TAKE_AND_HANG_UP = -1  # the same, when the request has been dealt with
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMED_OUT")

T = TypeVar("T")


@dataclass
class Job:
    """What the endpoint knows of one job. Times are those of `time.monotonic`."""

    id: str
    request: dict[str, Any]  # as posted: `input`, and perhaps `policy`, `webhook`, `s3Config`
    status: str = "IN_QUEUE"
    output: Any = None
    error: str | None = None
    worker_id: str | None = None
    submitted: float = field(default_factory=time.monotonic)
    taken: float | None = None
    ended: float | None = None
    posts: list[dict[str, Any]] = field(default_factory=list)  # the bodies of each accepted job-done
    streamed: list[Any] = field(default_factory=list)  # all that the worker has sent for `/stream`
    chunks: deque[Any] = field(default_factory=deque)  # of that, what the caller hasn't read yet

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    @property
    def reports(self) -> list[dict[str, Any]]:
        """What was posted of its progress."""
        return [post["output"] for post in self.posts if post.get("status") == "IN_PROGRESS"]

    @property
    def results(self) -> list[dict[str, Any]]:
        """What was posted as its result: one, unless the worker errs."""
        return [post for post in self.posts if post.get("status") != "IN_PROGRESS"]

    def end(self, status: str) -> None:
        self.status, self.ended = status, time.monotonic()

    def reply(self) -> dict[str, Any]:
        """As `/status` tells it, in milliseconds: a key only where it has a value."""
        taken, ended = self.taken, self.ended
        facts = {
            "delayTime": round((taken - self.submitted) * 1000) if taken else None,
            "executionTime": round((ended - taken) * 1000) if taken and ended else None,
            "workerId": self.worker_id,
            "output": self.output,
            "error": self.error,
        }
        return {"id": self.id, "status": self.status, **{k: v for k, v in facts.items() if v is not None}}


class LocalEndpoint:
    """Use it in a `with`. `hold_s` is how long a worker's request for work stays open before it is answered 204."""

    def __init__(self, hold_s: float = 3.0) -> None:
        self.hold_s = hold_s
        self.jobs: dict[str, Job] = {}
        self.requests: Counter[str] = Counter()  # all that came, by path: "run", "job-done/worker-1/job-3" …
        self.pings: list[list[str]] = []  # for each heartbeat the jobs it said to be in progress
        self.most_in_progress = 0  # jobs that workers held at the same moment
        self.slow: dict[str, float] = {}  # operation, such as "job-done" → seconds until it is answered
        self.max_result_bytes = MAX_REQUEST_BYTES  # a larger job-done is answered 413
        self._held: set[str] = set()
        self._faults: dict[str, deque[int]] = {}
        self._stops: dict[str, list[str]] = {}  # worker → ids of jobs that it should stop
        self._unfinished: set[asyncio.Future[web.StreamResponse]] = set()
        self._releases = 0
        self._numbers = count(1)
        self._change = asyncio.Event()  # set at the next change of anything above, and then replaced
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="local-endpoint")
        self._runner = web.AppRunner(self._app(), access_log=None, handler_cancellation=True, shutdown_timeout=1)
        self._address = ""

    def __enter__(self) -> "LocalEndpoint":
        self._thread.start()
        self._on_loop(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.release_polls()
        self._loop.call_soon_threadsafe(self._drop_unfinished)
        self._on_loop(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # What tests use, from any thread.

    @property
    def url(self) -> str:
        """The callers' base URL: `runpod.endpoint_url_base`, or with `/ENDPOINT_ID/run` behind it a job's address."""
        return f"{self._address}/v2"

    def worker_env(self, worker_id: str = WORKER_ID) -> dict[str, str]:
        """What RunPod puts into a worker's environment. The SDK appends `&…` to the URLs, and fills in `$…`."""
        base = f"{self._address}/v2/{ENDPOINT_ID}"
        return {
            "RUNPOD_WEBHOOK_GET_JOB": f"{base}/job-take/$ID?gpu=none",
            "RUNPOD_WEBHOOK_POST_OUTPUT": f"{base}/job-done/$RUNPOD_POD_ID/$ID?gpu=none",
            "RUNPOD_WEBHOOK_POST_STREAM": f"{base}/job-stream/$RUNPOD_POD_ID/$ID?gpu=none",
            "RUNPOD_WEBHOOK_PING": f"{base}/ping/$RUNPOD_POD_ID",
            "RUNPOD_PING_INTERVAL": "1000",
            "RUNPOD_POD_ID": worker_id,
            "RUNPOD_ENDPOINT_ID": ENDPOINT_ID,
            "RUNPOD_AI_API_KEY": API_KEY,
            "RUNPOD_SKIP_AUTO_SYSTEM_CHECKS": "true",
            "RUNPOD_SKIP_GPU_CHECK": "true",
        }

    def wait_for(self, holds: Callable[[], T], timeout_s: float = 60) -> T:
        """Wait until `holds` returns something true, and return that. Raises asyncio.TimeoutError.

        `holds` is called on the server's loop after each change, so it sees no half-made one.
        """
        return self._on_loop(self._until(holds, timeout_s))

    def wait_until_ended(self, job_id: str, timeout_s: float = 60) -> Job:
        job = self.jobs[job_id]
        self.wait_for(lambda: job.is_final, timeout_s)
        return job

    def fail_next(self, operation: str, status: int, times: int = 1) -> None:
        """Answer the next requests of a kind (`job-take`, single or batch; `job-done`, `run` …) with `status` alone, or
        with `HANG_UP` or `TAKE_AND_HANG_UP` close the connection without an answer."""
        self._faults.setdefault(operation, deque()).extend([status] * times)

    def faults_left(self, operation: str) -> int:
        """So many of those that were ordered have met no request yet."""
        return len(self._faults.get(operation, ()))

    @contextmanager
    def answers_held(self, operation: str) -> Iterator[None]:
        """Inside the `with`, requests of a kind are dealt with, but their answers don't leave."""
        self._loop.call_soon_threadsafe(self._held.add, operation)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._held.discard, operation)
            self._loop.call_soon_threadsafe(self._changed)

    def release_polls(self) -> None:
        """End the requests for work that are open now, as if their time were over."""

        def release() -> None:
            self._releases += 1
            self._changed()

        self._loop.call_soon_threadsafe(release)

    # The server's inside. All of it runs on the loop, and nothing is awaited between a look and a change.

    def _on_loop(self, act: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(act, self._loop).result()

    def _drop_unfinished(self) -> None:
        for task in self._unfinished:
            task.cancel()

    async def _start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self._address = f"http://{host}:{port}"

    def _changed(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def _until(self, holds: Callable[[], T], timeout_s: float) -> T:
        async def wait() -> T:
            while not (result := holds()):
                await self._change.wait()
            return result

        return await asyncio.wait_for(wait(), timeout_s)

    async def _hold(self, holds: Callable[[], object]) -> None:
        """A long poll: wait for `holds`, for `hold_s`, or for `release_polls`."""
        releases = self._releases
        with suppress(asyncio.TimeoutError):
            await self._until(lambda: self._releases != releases or holds(), self.hold_s)

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._note_and_fail], client_max_size=MAX_REQUEST_BYTES)
        root = f"/v2/{ENDPOINT_ID}"
        app.add_routes(
            [
                web.post(f"{root}/run", self._run),
                web.post(f"{root}/runsync", self._runsync),
                web.get(f"{root}/status/{{job}}", self._status),
                web.get(f"{root}/stream/{{job}}", self._stream),
                web.post(f"{root}/cancel/{{job}}", self._cancel),
                web.post(f"{root}/purge-queue", self._purge_queue),
                web.get(f"{root}/health", self._health),
                web.get(f"{root}/job-take/{{worker}}", self._job_take),
                web.get(f"{root}/job-take-batch/{{worker}}", self._job_take),
                web.get(f"{root}/job-stop/{{worker}}", self._job_stop),
                web.post(f"{root}/job-done/{{worker}}/{{job}}", self._job_done),
                web.post(f"{root}/job-stream/{{worker}}/{{job}}", self._job_stream),
                web.get(f"{root}/ping/{{worker}}", self._ping),
            ]
        )
        return app

    @web.middleware
    async def _note_and_fail(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        path = request.path.removeprefix(f"/v2/{ENDPOINT_ID}/").replace("job-take-batch/", "job-take/")
        operation = path.partition("/")[0]
        self.requests[path] += 1
        self._changed()
        serving = self._serve(request, operation, handler)
        if operation not in ("job-done", "job-stream"):
            return await serving
        # What has come in whole is dealt with, however late, even if nobody waits for the answer any more.
        await request.read()
        task = asyncio.ensure_future(serving)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return await asyncio.shield(task)

    async def _serve(
        self,
        request: web.Request,
        operation: str,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        await asyncio.sleep(self.slow.get(operation, 0))
        if faults := self._faults.get(operation):
            status = faults.popleft()
            if status == TAKE_AND_HANG_UP:
                await handler(request)
            if status in (HANG_UP, TAKE_AND_HANG_UP) and request.transport:
                request.transport.close()
            return web.Response(status=status if status > 0 else 500)
        answer = await handler(request)
        while operation in self._held:
            await self._change.wait()
        return answer

    def _job(self, request: web.Request) -> Job:
        try:
            return self.jobs[request.match_info["job"]]
        except KeyError:
            raise web.HTTPNotFound(text='{"error": "job not found"}', content_type="application/json") from None

    def _queue(self) -> list[Job]:
        return self._with_status("IN_QUEUE")

    def _with_status(self, status: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.status == status]

    # The callers' side.

    async def _submit(self, request: web.Request, prefix: str) -> Job:
        body = await request.json()
        if not isinstance(body, dict) or "input" not in body:
            raise web.HTTPBadRequest(text='{"error": "input is required"}', content_type="application/json")
        job = Job(f"{prefix}{next(self._numbers)}", body)
        self.jobs[job.id] = job
        self._changed()
        return job

    async def _run(self, request: web.Request) -> web.Response:
        job = await self._submit(request, "job-")
        return web.json_response({"id": job.id, "status": "IN_QUEUE"})

    async def _runsync(self, request: web.Request) -> web.Response:
        job = await self._submit(request, "sync-")
        with suppress(asyncio.TimeoutError):
            await self._until(lambda: job.is_final, int(request.query.get("wait", SYNC_WAIT_MS)) / 1000)
        return web.json_response(job.reply())

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self._job(request).reply())

    async def _stream(self, request: web.Request) -> web.Response:
        job = self._job(request)
        chunks = [{"output": chunk} for chunk in job.chunks]
        job.chunks.clear()
        return web.json_response({"status": job.status, "stream": chunks})

    async def _cancel(self, request: web.Request) -> web.Response:
        job = self._job(request)
        self._break_off(job, "CANCELLED")
        return web.json_response({"id": job.id, "status": job.status})

    def _break_off(self, job: Job, status: str) -> None:
        if job.is_final:
            return
        if job.worker_id:
            self._stops.setdefault(job.worker_id, []).append(job.id)
        job.end(status)
        self._changed()

    async def _purge_queue(self, _: web.Request) -> web.Response:
        purged = self._queue()
        for job in purged:
            del self.jobs[job.id]
        self._changed()
        return web.json_response({"removed": len(purged), "status": "completed"})

    async def _health(self, _: web.Request) -> web.Response:
        statuses = {"completed": "COMPLETED", "failed": "FAILED", "inProgress": "IN_PROGRESS", "inQueue": "IN_QUEUE"}
        jobs = {name: len(self._with_status(status)) for name, status in statuses.items()}
        workers = {path.split("/")[1] for path in self.requests if path.startswith("job-take/")}
        running = {job.worker_id for job in self._with_status("IN_PROGRESS")}
        return web.json_response(
            {"jobs": {**jobs, "retried": 0}, "workers": {"idle": len(workers - running), "running": len(running)}}
        )

    # The workers' side.

    async def _job_take(self, request: web.Request) -> web.Response:
        await self._hold(self._queue)
        size = request.query.get("batch_size")
        jobs = self._queue()[: int(size or 1)]
        if not jobs:
            return web.Response(status=204)
        for job in jobs:
            self._hand_out(job, request.match_info["worker"])
        self.most_in_progress = max(self.most_in_progress, len(self._with_status("IN_PROGRESS")))
        self._changed()
        bodies = [{**job.request, "id": job.id} for job in jobs]
        return web.json_response(bodies if size else bodies[0])

    def _hand_out(self, job: Job, worker: str) -> None:
        job.status, job.worker_id, job.taken = "IN_PROGRESS", worker, time.monotonic()
        if limit_ms := job.request.get("policy", {}).get("executionTimeout"):
            self._loop.call_later(limit_ms / 1000, self._break_off, job, "TIMED_OUT")

    async def _job_stop(self, request: web.Request) -> web.Response:
        worker = request.match_info["worker"]
        await self._hold(lambda: self._stops.get(worker))
        job_ids = self._stops.pop(worker, [])
        return web.json_response({"jobsToStop": job_ids}) if job_ids else web.Response(status=204)

    async def _job_done(self, request: web.Request) -> web.Response:
        """A result, or a progress update: one that comes after the result takes it back, as it does on RunPod."""
        job = self._job(request)
        if len(await request.read()) > self.max_result_bytes:
            raise web.HTTPRequestEntityTooLarge(self.max_result_bytes, len(await request.read()))
        result = await _strict_json(request)
        job.posts.append(result)
        if job.status not in ("CANCELLED", "TIMED_OUT"):
            job.output, job.error = result.get("output"), result.get("error")
            if result.get("status") == "IN_PROGRESS":
                job.status = "IN_PROGRESS"
            else:
                job.end("FAILED" if job.error else "COMPLETED")
        self._changed()
        return web.Response()

    async def _job_stream(self, request: web.Request) -> web.Response:
        job, item = self._job(request), (await _strict_json(request)).get("output")
        job.streamed.append(item)
        job.chunks.append(item)
        self._changed()
        return web.Response()

    async def _ping(self, request: web.Request) -> web.Response:
        self.pings.append([job_id for job_id in request.query.get("job_id", "").split(",") if job_id])
        self._changed()
        return web.Response()


async def _strict_json(request: web.Request) -> dict[str, Any]:
    """The body, whatever its declared type: the SDK says it is a form. NaN and infinity are refused with a 400."""
    try:
        body: dict[str, Any] = json.loads(await request.text(), parse_constant=_refuse)
    except ValueError as error:
        raise web.HTTPBadRequest(text=str(error)) from error
    return body


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
