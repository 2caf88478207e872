"""The story of one job: request → media file → audio → pieces of speech → transcript → reply.

Everything here runs on the event loop and waits for work that other threads do: the download and I/O pools fetch, the
media pool decodes and looks for speech, the piece threads transcribe, waiting for the model's threads in turn. So the
I/O of many jobs overlaps, the next jobs' audio is ready when the model is free, and the loop stays free.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any, Protocol, TypeVar

from whisper_worker import fetch, log, pieces, reply, sources, speech
from whisper_worker.audio import Audio, Samples, decode
from whisper_worker.errors import InternalError, OutOfMemory, TimedOut, WorkerError
from whisper_worker.pieces import Piece
from whisper_worker.piecework import Piecework
from whisper_worker.request import InputRules, Request, parse_request
from whisper_worker.settings import Settings, Threads
from whisper_worker.stop import Stop, in_loose_thread, in_thread
from whisper_worker.transcript import Said, Transcript, joined

# A hostile server can hold a download's thread longer than its job lives: so many may hang before other downloads must
# wait. Nothing else uses these threads.
SPARE_DOWNLOADERS = 64

T = TypeVar("T")


class Walk(Protocol):
    """See `engine.Walk` for what each member promises."""

    first_run: float | None

    def piece(self, index: int) -> Said: ...


class Transcriber(Protocol):
    """What the service needs of an engine; see `engine.Engine` for what each member promises."""

    name: str
    device: str
    speaks_english_only: bool

    def check(self, request: Request) -> None: ...

    def walk(self, pieces: Sequence[Piece], samples: Samples, request: Request, stop: Stop) -> Walk: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """One job on its way: what was asked, the signal that ends its threads, and where its seconds go."""

    id: str
    request: Request
    stop: Stop
    watch: "Stopwatch"


class Service:
    """Answers jobs, many at a time."""

    def __init__(self, settings: Settings, threads: Threads, engine: Transcriber) -> None:
        self._settings = settings
        self._engine = engine
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

    async def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The output for one RunPod job (`{"id": …, "input": …}`).

        Every failure becomes `{"error": "CODE: sentence"}`. Only CancelledError is raised, once nothing of the job is
        running any more.
        """
        job_id = str(job.get("id", "unknown"))
        watch = Stopwatch()
        try:
            return await self._within_time(self._answer(job_id, job.get("input"), watch))
        except asyncio.CancelledError:
            log.event("job_cancelled", job=job_id, total_s=watch.total_s)
            raise
        except WorkerError as error:
            # The cause, if any, goes into the log only: it may hold addresses, paths and tokens.
            caused = error.__cause__ is not None
            log.event("job_failed", job=job_id, level=log.WARNING, trace=caused, code=error.code, reply=error)
            return error.reply
        except MemoryError:
            log.event("job_failed", job=job_id, level=log.ERROR, trace=True)
            return OutOfMemory("the worker has too little memory for this job at the moment: try again").reply
        except Exception:
            log.event("job_failed", job=job_id, level=log.ERROR, trace=True)
            return InternalError(f"something went wrong; the worker's log has the details of job {job_id}").reply

    async def _within_time(self, answer: Coroutine[Any, Any, T]) -> T:
        limit_s = self._settings.job_timeout_s
        try:
            return await asyncio.wait_for(answer, limit_s)
        except asyncio.TimeoutError as error:
            raise TimedOut(f"the job took longer than {limit_s:g} s") from error

    async def _answer(self, job_id: str, raw: Any, watch: "Stopwatch") -> dict[str, Any]:
        request = parse_request(raw, self._rules)
        self._engine.check(request)
        job = Job(job_id, request, Stop(), watch)
        log.event("job_start", job=job.id, source=_source_kind(request))
        async with self._place(job):
            async with self._media_file(job) as file:
                audio = await self._decode(job, file)
            cut = await self._cut(job, audio)
            transcript, translation = await self._transcribe(job, cut, audio)
            facts = reply.Facts(
                model=self._engine.name,
                device=self._engine.device,
                duration=audio.duration,
                duration_after_vad=sum(piece.seconds for piece in cut),
                warnings=audio.warnings + self._remarks(request),
            )
            output = await self._output(job, transcript, translation, facts)
        log.event(
            "job_done",
            job=job.id,
            audio_s=audio.duration,
            total_s=watch.total_s,
            rtf=watch.total_s / audio.duration if audio.duration else None,
            language=transcript.language,
            segments=len(transcript.segments),
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
        try:
            work = in_loose_thread(self._downloaders, job.stop, fetch.download, url, file, self._downloads, job.stop)
            await asyncio.wait_for(work, self._downloads.timeout_s + fetch.STALL_S)
        except BaseException as error:
            self._io.submit(file.close)
            if isinstance(error, asyncio.TimeoutError):
                raise fetch.timed_out(url, self._downloads) from error
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

    async def _transcribe(self, job: Job, cut: list[Piece], audio: Audio) -> tuple[Transcript, Transcript | None]:
        """The transcript, and the translation if one was asked for."""
        request, began = job.request, time.monotonic()
        walk = self._engine.walk(cut, audio.samples, request, job.stop)
        log.event("transcribe", job=job.id, level=log.DEBUG, pieces=len(cut))
        side_by_side = not request.condition_on_previous_text
        work = self._pieces.in_order(job.stop, walk.piece, range(len(cut)), side_by_side=side_by_side)
        async with aclosing(work) as results:
            said = [result async for result in results]
        job.watch.add("queue", (walk.first_run or began) - began)
        job.watch.add("inference", time.monotonic() - (walk.first_run or began))

        transcript, translation = joined(said, audio.duration)
        if not request.translate:
            return transcript, None
        return transcript, transcript if self._engine.speaks_english_only else translation

    def _remarks(self, request: Request) -> tuple[str, ...]:
        """What the caller should know of what became of the request."""
        if not (request.translate and self._engine.speaks_english_only):
            return ()
        return (f"the model {self._engine.name} can't translate: the translation is its transcription",)

    async def _output(
        self, job: Job, transcript: Transcript, translation: Transcript | None, facts: reply.Facts
    ) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            output = reply.build(job.request, transcript, translation, facts)
            output["timings"] = job.watch.timings()
            return reply.checked(output, self._settings.max_inline_bytes)

        return await in_thread(self._media, job.stop, act)

    def close(self) -> None:
        """End the threads, then free the model. Jobs should have ended."""
        self._downloaders.shutdown(wait=False, cancel_futures=True)
        self._io.shutdown(wait=False)  # files may still wait there to be closed
        self._media.shutdown(wait=False, cancel_futures=True)
        self._pieces.close()
        self._engine.close()


def _source_kind(request: Request) -> str:
    if request.audio is None:
        return "base64"
    return fetch.without_secrets(request.audio) if sources.is_url(request.audio) else "local"


class Stopwatch:
    """Where a job's seconds go. Time between a step's request and its start on a thread counts as `queue`."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._seconds = {"download": 0.0, "decode": 0.0, "queue": 0.0, "inference": 0.0}

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._started

    @contextmanager
    def timing(self, step: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(step, time.monotonic() - started)

    def add(self, step: str, seconds: float) -> None:
        self._seconds[step] += seconds

    def timed(self, step: str, act: Callable[..., T]) -> Callable[..., T]:
        """`act`, with its time as `step`, and the time from now to its start as `queue`."""
        asked = time.monotonic()

        def run(*args: Any, **kwargs: Any) -> T:
            self.add("queue", time.monotonic() - asked)
            with self.timing(step):
                return act(*args, **kwargs)

        return run

    def timings(self) -> dict[str, float]:
        return {step: round(seconds, 3) for step, seconds in {**self._seconds, "total": self.total_s}.items()}
