"""The story of one job: request → media file → audio → pieces of speech → transcript → reply.

Everything here runs on the event loop and waits for work that other threads do: the download and I/O pools fetch, the
media pool decodes and looks for speech, the piece threads transcribe, waiting for the model's threads in turn. So the
I/O of many jobs overlaps, the next jobs' audio is ready when the model is free, and the loop stays free.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from tempfile import TemporaryFile
from typing import IO, Any

from whisper_worker import fetch, log, pieces, reply, sources, speech
from whisper_worker.audio import Audio, decode
from whisper_worker.endings import Endings
from whisper_worker.errors import InternalError, OutOfMemory, Unhealthy, WorkerError
from whisper_worker.health import Health
from whisper_worker.job import Job
from whisper_worker.live import Outbox, Watcher
from whisper_worker.pieces import Piece
from whisper_worker.piecework import Piecework
from whisper_worker.request import InputRules, Request, parse_request
from whisper_worker.settings import Settings, Threads
from whisper_worker.stop import in_loose_thread, in_thread, wait_out
from whisper_worker.transcriber import Transcriber
from whisper_worker.transcript import Growing, Language, Segment

# A hostile server can hold a download's thread longer than its job lives: so many may hang before other downloads must
# wait. Nothing else uses these threads.
SPARE_DOWNLOADERS = 64
DEAF_S = 1.0  # so much speech without a word makes one look whether the model is well


class Service:
    """Answers jobs, many at a time."""

    def __init__(self, settings: Settings, threads: Threads, engine: Transcriber, health: Health) -> None:
        self._settings = settings
        self._engine = engine
        self._health = health
        self._endings = Endings(settings, health)
        self._rules = InputRules(bool(settings.allow_local_files), settings.max_base64_bytes)
        self._downloads = fetch.DownloadLimits(
            max_bytes=settings.max_download_bytes,
            timeout_s=settings.download_timeout_s,
            attempts=settings.download_attempts,
            max_redirects=settings.max_redirects,
        )
        self._places = asyncio.Semaphore(threads.jobs)  # the SDK's local API hands over any number of jobs
        self._io = ThreadPoolExecutor(threads.jobs, "io")
        self._downloaders = ThreadPoolExecutor(threads.jobs + SPARE_DOWNLOADERS, "download")
        self._media = ThreadPoolExecutor(threads.media, "media")
        # A job alone must be able to keep the model busy: as many pieces as it takes windows at once, and one more.
        self._pieces = Piecework(threads.jobs, extra=threads.inter * threads.batch)

    async def run(self, job: Mapping[str, Any], watcher: Watcher | None = None) -> dict[str, Any]:
        """The output for one RunPod job (`{"id": …, "input": …}`).

        Every failure becomes `{"error": "CODE: sentence"}`, with what was done as `partial` where that is something.
        Only CancelledError is raised, once nothing of the job is running any more.
        """
        return await self._run(Job(str(job.get("id", "unknown")), watcher or Watcher()), job.get("input"))

    async def stream(self, job: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The output for one RunPod job as items: `info`, `segments` as they come, and `result`.

        A failure's last items are `error`, and then `{"error": "CODE: sentence"}`, which is RunPod's sign for it.
        Left early, or cancelled, it ends the job, and then itself: iterate inside `contextlib.aclosing`.
        """
        running = Job(str(job.get("id", "unknown")), Watcher(), is_streamed=True)

        def packed(segments: Sequence[Segment]) -> dict[str, Any]:
            return reply.segments_item(running.request, segments)

        running.watcher = outbox = Outbox(self._settings.stream_interval_s, packed, reply.size)
        work = asyncio.create_task(self._run(running, job.get("input")))
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

    async def _run(self, job: Job, raw: Any) -> dict[str, Any]:
        try:
            job.request = parse_request(raw, self._rules)
            self._engine.check(job.request)
            output = await self._endings.unless_ended(job, lambda: self._answer(job))
            self._health.count_job()
            return output
        except asyncio.CancelledError:
            log.event("job_cancelled", job=job.id, total_s=job.watch.total_s)
            raise
        except WorkerError as error:
            if isinstance(error, Unhealthy):
                self._health.give_up(error)
            # The cause, if any, goes into the log only: it may hold addresses, paths and tokens.
            caused = error.__cause__ is not None
            log.event("job_failed", job=job.id, level=log.WARNING, trace=caused, code=error.code, reply=error)
            return await in_thread(self._io, job.stop, self._failed, job, error)
        except MemoryError:
            log.event("job_failed", job=job.id, level=log.ERROR, trace=True)
            return OutOfMemory("the worker has too little memory for this job at the moment: try again").reply
        except Exception:
            log.event("job_failed", job=job.id, level=log.ERROR, trace=True)
            return InternalError(f"something went wrong; the worker's log has the details of job {job.id}").reply

    def _failed(self, job: Job, error: WorkerError) -> dict[str, Any]:
        so_far = job.done_so_far() if error.breaks_off else None
        try:
            return reply.of_error(error, so_far, self._settings.max_inline_bytes)
        except ValueError:  # a score is no number
            return error.reply

    async def _answer(self, job: Job) -> dict[str, Any]:
        request = job.request
        log.event("job_start", job=job.id, source=_source_kind(request))
        async with self._place(job):
            job.tell("download")
            async with self._media_file(job) as file:
                job.tell("decode")
                audio = await self._decode(job, file)
            cut = await self._cut(job, audio)
            facts = reply.Facts(
                model=self._engine.name,
                device=self._engine.device,
                duration=audio.duration,
                duration_after_vad=sum(piece.seconds for piece in cut),
                warnings=audio.warnings + self._remarks(request),
            )
            so_far = await self._transcribe_well(job, cut, audio, facts)
            output = await self._output(job, so_far, facts)
        log.event(
            "job_done",
            job=job.id,
            audio_s=audio.duration,
            total_s=job.watch.total_s,
            rtf=job.watch.total_s / audio.duration if audio.duration else None,
            language=so_far.transcript.language,
            segments=len(so_far.transcript.segments),
            warnings=len(facts.warnings) or None,
        )
        return output

    @asynccontextmanager
    async def _place(self, job: Job) -> AsyncIterator[None]:
        """One of the places for jobs in flight."""
        with job.watch.timing("queue"):
            await self._places.acquire()
        try:
            yield
        finally:
            self._places.release()

    @asynccontextmanager
    async def _media_file(self, job: Job) -> AsyncIterator[IO[bytes]]:
        """The caller's file, open. A downloaded one has no name on the disk: closed, it is gone."""
        audio, audio_base64 = job.request.audio, job.request.audio_base64
        file: IO[bytes]
        with job.watch.timing("download"):
            if audio is None:
                file = await in_thread(self._io, job.stop, sources.from_base64, audio_base64 or "")
            elif sources.is_url(audio):
                file = await self._download(job, audio)
            else:
                file = await in_thread(self._io, job.stop, sources.open_local, audio)
        try:
            yield file
        finally:
            self._io.submit(file.close)  # giving back the blocks of a large file takes a while

    async def _download(self, job: Job, url: str) -> IO[bytes]:
        file = TemporaryFile(prefix="whisper-worker-")  # noqa: SIM115  (closed by the caller, or below)
        act = in_loose_thread(self._downloaders, job.stop, fetch.download, url, file, self._downloads, job.stop)
        work = asyncio.ensure_future(act)
        try:
            await asyncio.wait([work], timeout=self._downloads.timeout_s + fetch.STALL_S)
            if not work.done():
                raise fetch.timed_out(url, self._downloads)
            work.result()
        except BaseException:
            work.cancel()
            self._io.submit(file.close)
            raise
        return file

    async def _decode(self, job: Job, file: IO[bytes]) -> Audio:
        act = job.watch.timed("decode", decode)
        extension = sources.extension(job.request)
        limit_s = self._settings.max_audio_s
        return await in_thread(self._media, job.stop, act, file, job.stop, max_seconds=limit_s, extension=extension)

    async def _cut(self, job: Job, audio: Audio) -> list[Piece]:
        """The pieces that will be transcribed: all that is speech, or all there is without `enable_vad`."""
        keep_all, longest_s = not job.request.enable_vad, self._settings.piece_seconds
        if keep_all and audio.duration <= longest_s:
            return pieces.whole(audio.samples)

        def act() -> list[Piece]:
            heard = speech.listen(audio.samples, job.stop)
            return pieces.cut(heard, longest_s, keep_silence=keep_all)

        return await in_thread(self._media, job.stop, job.watch.timed("decode", act))

    async def _transcribe_well(self, job: Job, cut: list[Piece], audio: Audio, facts: reply.Facts) -> Growing:
        """The transcript; when there is none though somebody speaks, and it turns out that the model is to blame, once
        more, by a model that was loaded again."""
        reloads = self._health.reloads
        so_far = await self._transcribe(job, cut, audio, facts)
        if so_far.transcript.segments or facts.duration_after_vad < DEAF_S:
            return so_far
        await self._health.try_model()
        return so_far if self._health.reloads == reloads else await self._transcribe(job, cut, audio, facts)

    async def _transcribe(self, job: Job, cut: list[Piece], audio: Audio, facts: reply.Facts) -> Growing:
        request, began, so_far = job.request, time.monotonic(), Growing(audio.duration)
        job.transcript = so_far
        job.tell("transcribe")
        walk = self._engine.walk(cut, audio.samples, request, job.stop)
        log.event("transcribe", job=job.id, level=log.DEBUG, pieces=len(cut))
        if facts.duration_after_vad >= speech.MIN_S:  # else nobody speaks, in whatever language the job asks for
            asyncio.wrap_future(walk.language).add_done_callback(lambda language: _inform(job, facts, language))
        side_by_side = not request.condition_on_previous_text
        work = self._pieces.in_order(job.stop, walk.piece, range(len(cut)), side_by_side=side_by_side)
        async with aclosing(work) as results:
            async for said in results:
                new = so_far.add(said)
                job.tell("transcribe")
                if new:
                    await job.watcher.segments(new)
        so_far.until = audio.duration
        job.tell("transcribe")
        job.inform(facts, (None, None))  # when nobody speaks
        job.watch.add("queue", (walk.first_run or began) - began)
        job.watch.add("inference", time.monotonic() - (walk.first_run or began))
        return so_far

    def _remarks(self, request: Request) -> tuple[str, ...]:
        """What the caller should know of what became of the request."""
        if not (request.translate and self._engine.speaks_english_only):
            return ()
        return (f"the model {self._engine.name} can't translate: the translation is its transcription",)

    async def _output(self, job: Job, so_far: Growing, facts: reply.Facts) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            transcript, translation = so_far.transcript, None
            if job.request.translate:
                translation = transcript if self._engine.speaks_english_only else so_far.translation
            output = reply.build(job.request, transcript, translation, facts)
            output["timings"] = job.watch.timings()
            if job.is_streamed:
                output = reply.result_item(output)
            return reply.fitting(output, self._settings.max_inline_bytes)

        return await in_thread(self._media, job.stop, act)

    def close(self) -> None:
        """End the threads, then free the model. Jobs should have ended."""
        self._downloaders.shutdown(wait=False, cancel_futures=True)
        self._io.shutdown(wait=False)  # files may still wait there to be closed
        self._media.shutdown(wait=False, cancel_futures=True)
        self._pieces.close()
        self._engine.close()


def _inform(job: Job, facts: reply.Facts, language: "asyncio.Future[Language]") -> None:
    if not language.cancelled() and not language.exception():  # the job fails with what the exception is about
        job.inform(facts, language.result())


def _source_kind(request: Request) -> str:
    if request.audio is None:
        return "base64"
    return fetch.without_secrets(request.audio) if sources.is_url(request.audio) else "local"
