"""The story of one job: request → model → its recordings' outputs → reply; and what becomes of its failures.

Everything here runs on the event loop, which waits for no work: `recordings` says on which threads that is done.
"""

import asyncio
import gc
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

from whisper_worker import log, reply, storage, web
from whisper_worker.endings import Endings
from whisper_worker.errors import (
    InternalError,
    OutOfMemory,
    ResultTooLarge,
    Unhealthy,
    UploadFailed,
    UploadRefused,
    WorkerError,
    forget_locals,
)
from whisper_worker.health import Health
from whisper_worker.job import Job, Recording
from whisper_worker.live import Outbox, Watcher
from whisper_worker.recordings import FILES_AT_ONCE, Recordings
from whisper_worker.registry import Loaded, Registry
from whisper_worker.request import InputRules, is_data_url, is_url, parse_request, parse_s3_config
from whisper_worker.settings import Settings, Threads
from whisper_worker.stop import in_loose_thread, in_thread, wait_out
from whisper_worker.transcript import Segment

FILE_UPLOAD_S = 5.0  # more for each file that is stored
SPARE_UPLOADERS = 64  # threads that silent servers may hold, while other jobs' results are stored

Json = dict[str, Any]


class Service:
    """Answers jobs, many at a time."""

    def __init__(self, settings: Settings, threads: Threads, registry: Registry, health: Health) -> None:
        self._settings = settings
        self._registry = registry
        self._health = health
        self._endings = Endings(settings, health)
        self._rules = InputRules(bool(settings.allow_local_files), settings.max_base64_bytes, settings.max_audios)
        self._bucket = storage.Bucket.of_settings(settings)
        self._uploads = storage.UploadLimits()
        self._recordings = Recordings(settings, threads)
        self._places = asyncio.Semaphore(threads.jobs)  # the SDK's local API hands over any number of jobs
        self._replies = ThreadPoolExecutor(threads.jobs, "reply")
        self._uploaders = ThreadPoolExecutor(threads.jobs + SPARE_UPLOADERS, "upload")

    async def run(self, job: Mapping[str, Any], watcher: Watcher | None = None) -> dict[str, Any]:
        """The output for one RunPod job (`{"id": …, "input": …}`).

        Every failure becomes `{"error": "CODE: sentence"}`, with what was done as `partial` where that is something.
        Only CancelledError is raised, once nothing of the job is running any more.
        """
        return await self._run(Job(str(job.get("id", "unknown")), watcher or Watcher()), job)

    async def stream(self, job: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The output for one RunPod job as items: `info`, `segments` as they come, and `result`.

        A failure's last items are `error`, and then `{"error": "CODE: sentence"}`, which is RunPod's sign for it.
        Left early, or cancelled, it ends the job, and then itself: iterate inside `contextlib.aclosing`.
        """
        running = Job(str(job.get("id", "unknown")), Watcher(), is_streamed=True)

        def packed(segments: Sequence[Segment], audio: int | None) -> dict[str, Any]:
            return reply.segments_item(running.request, segments, audio)

        running.watcher = outbox = Outbox(self._settings.stream_interval_s, packed, reply.size)
        work = asyncio.create_task(self._run(running, job))
        work.add_done_callback(lambda _: outbox.close())
        try:
            async with aclosing(outbox.items()) as items:
                async for item in items:
                    yield item
            output = await work
        finally:
            work.cancel()
            await wait_out(work)
        if error := output.get("error"):
            yield reply.error_item(error)
        yield output

    @property
    def is_winding_up(self) -> bool:
        """Whether threads still work for jobs that have been broken off."""
        return self._endings.is_winding_up

    def end_jobs(self, error: WorkerError) -> None:
        """Break off all jobs, and those to come, with `error` as their answer. From any thread."""
        self._endings.end_all(error)

    async def _run(self, job: Job, given: Mapping[str, Any]) -> dict[str, Any]:
        try:
            job.accept(parse_request(given.get("input"), self._rules))
            job.bucket = parse_s3_config(given["s3Config"]) if given.get("s3Config") else None
            return await self._endings.unless_ended(job, lambda: self._answer(job))
        except asyncio.CancelledError:
            log.event("job_cancelled", job=job.id, total_s=job.watch.total_s)
            raise
        except Exception as error:
            explained = self._explained(job, error)
        return await in_thread(self._replies, job.stop, self._failed, job, explained)

    def _explained(self, job: Job, error: Exception, recording: Recording | None = None) -> WorkerError:
        """A failure as its caller may read it; the log has the whole of it, and nothing else keeps what led to it."""
        explained = self._logged(job, error, recording)
        forget_locals(error)
        explained.__cause__ = explained.__context__ = None
        return explained.with_traceback(None)

    def _logged(self, job: Job, error: Exception, recording: Recording | None) -> WorkerError:
        index = recording.index if recording else None
        if isinstance(error, WorkerError):
            if isinstance(error, Unhealthy):
                self._health.give_up(error)
            # The cause, if any, goes into the log only: it may hold addresses, paths and tokens.
            caused = error.__cause__ is not None
            log.event(
                "job_failed", job=job.id, audio=index, level=log.WARNING, trace=caused, code=error.code, reply=error
            )
            return error
        log.event("job_failed", job=job.id, audio=index, level=log.ERROR, trace=True)
        if isinstance(error, MemoryError):
            return OutOfMemory("the worker has too little memory for this job at the moment: try again")
        return InternalError(f"something went wrong; the worker's log has the details of job {job.id}")

    def _failed(self, job: Job, error: WorkerError) -> dict[str, Any]:
        _make_room_after(error)
        try:
            so_far = job.done_so_far() if error.breaks_off else None
            return reply.of_error(error, so_far, self._settings.max_inline_bytes)
        except (ValueError, MemoryError):  # a score is no number
            return error.reply

    def _failed_file(self, recording: Recording, error: WorkerError) -> Json:
        """The result for one of several files."""
        _make_room_after(error)
        try:
            so_far = recording.done_so_far() if error.breaks_off else None
        except (ValueError, MemoryError):
            return error.reply
        return {**error.reply, "partial": so_far} if so_far else error.reply

    async def _answer(self, job: Job) -> Json:
        async with AsyncExitStack() as stack:
            with job.watch.timing("queue"):
                model = await stack.enter_async_context(self._registry.leased(job.request.model))
                model.engine.check(job.request)
                await stack.enter_async_context(self._places)
            sources = [_kind(recording) for recording in job.recordings]
            log.event("job_start", job=job.id, model=model.name, source=sources[0], files=len(sources))
            if job.request.audios is None:
                output = await self._recordings.output(job.recordings[0], model)
            else:
                output = await self._several(job, model)
            answer = await self._reply(job, output)
            model.canary.count_job()
        log.event(
            "job_done",
            job=job.id,
            audio_s=output["duration"],
            total_s=job.watch.total_s,
            rtf=job.watch.total_s / output["duration"] if output["duration"] else None,
            language=output.get("detected_language"),
            segments=len(output.get("segments", ())),
            warnings=len(answer["warnings"]) or None,
            stored="stored" in answer or None,
        )
        return answer

    async def _several(self, job: Job, model: Loaded) -> Json:
        """Each file's output or error, in the request's order; they share the job's time, and its other limits."""
        places = asyncio.Semaphore(FILES_AT_ONCE)

        async def answered(recording: Recording) -> Json:
            try:
                async with places:
                    recording.output = await self._recordings.output(recording, model)
                    return recording.output
            except Unhealthy:
                raise
            except Exception as error:
                explained = self._explained(job, error, recording)
            recording.output = await in_thread(self._replies, job.stop, self._failed_file, recording, explained)
            return recording.output

        work = [asyncio.create_task(answered(recording)) for recording in job.recordings]
        try:
            results = await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()
            for task in work:
                await wait_out(task)
        done = [result for result in results if "error" not in result]
        facts = reply.Facts(
            model=model.engine.name,
            device=model.engine.device,
            duration=sum(result["duration"] for result in done),
            duration_after_vad=sum(result["duration_after_vad"] for result in done),
            warnings=(),
        )
        return dict(reply.several(results, facts))

    async def _reply(self, job: Job, output: Json) -> Json:
        """The output with its timings; what is too large for a reply is stored where the job or the worker says."""
        max_bytes = self._settings.max_inline_bytes

        def complete() -> tuple[Json, bool]:
            whole = {**output, "timings": job.watch.timings()}
            return whole, reply.fits(whole, max_bytes)

        def fitting(whole: Json, instead_of: WorkerError | None = None) -> Json:
            try:
                return reply.fitting(reply.result_item(whole) if job.is_streamed else whole, max_bytes)
            except ResultTooLarge as error:
                raise instead_of or error from None

        whole, fits = await in_thread(self._replies, job.stop, complete)
        if fits and not job.is_streamed:
            return whole
        if not fits and (job.request.upload_url or job.bucket or self._bucket):
            try:
                with job.watch.timing("upload"):
                    links = await in_loose_thread(self._uploaders, job.stop, self._store, job, whole)
                whole = await in_thread(self._replies, job.stop, reply.stored, whole, links)
                whole["timings"] = job.watch.timings()
            except (UploadFailed, UploadRefused) as error:
                log.event("upload_failed", job=job.id, level=log.WARNING, trace=True)
                whole["warnings"] = [*whole["warnings"], f"the result couldn't be stored: {error}"]
                return await in_thread(self._replies, job.stop, fitting, whole, error)
        return await in_thread(self._replies, job.stop, fitting, whole)

    def _store(self, job: Job, output: Json) -> dict[str, str]:
        """The links to it, by file name. On an I/O thread."""
        files = list(reply.files(job.request, output))
        limits = replace(self._uploads, timeout_s=self._uploads.timeout_s + len(files) * FILE_UPLOAD_S)
        if url := job.request.upload_url:
            storage.put(url, files[0], limits=limits, stop=job.stop)
            return {files[0].name: web.without_secrets(url)}
        bucket = storage.Bucket.of_job(job.bucket) if job.bucket else self._bucket
        assert bucket is not None
        return storage.store(
            files,
            bucket,
            prefix=job.id,
            expires_s=self._settings.result_url_expires_s,
            limits=limits,
            stop=job.stop,
        )

    def close(self) -> None:
        """End the threads. Jobs should have ended."""
        self._recordings.close()
        self._replies.shutdown(wait=False, cancel_futures=True)
        self._uploaders.shutdown(wait=False, cancel_futures=True)


def _make_room_after(error: WorkerError) -> None:
    """What there was too little memory for goes now, and not when Python next looks for what only knows itself. Takes
    tenths of a second."""
    if isinstance(error, OutOfMemory):
        gc.collect()


def _kind(recording: Recording) -> str:
    """Of source, for the log."""
    audio = recording.source.audio
    if audio is None or is_data_url(audio):
        return "base64"
    return web.without_secrets(audio) if is_url(audio) else "local"
