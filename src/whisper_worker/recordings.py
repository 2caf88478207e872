"""The story of one recording, a job's only one or one of several: media file → audio → pieces of speech → its output.

Everything here runs on the event loop and waits for work that other threads do: the download and I/O pools fetch, the
media pool decodes and looks for speech, the piece threads transcribe, waiting for the model's threads in turn. So the
I/O of many jobs overlaps, the next jobs' audio is ready when the model is free, and the loop stays free.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from tempfile import TemporaryFile
from typing import IO, Any

from whisper_worker import fetch, log, pieces, reply, sources, speech
from whisper_worker.audio import SAMPLE_RATE, Audio, Part, Samples, decode
from whisper_worker.errors import TooLong
from whisper_worker.job import Job, Recording
from whisper_worker.pieces import Piece, Track
from whisper_worker.piecework import Piecework
from whisper_worker.registry import Loaded
from whisper_worker.request import Clip, Request, VadParameters, is_url
from whisper_worker.settings import Settings, Threads
from whisper_worker.stop import in_loose_thread, in_thread
from whisper_worker.transcriber import Walk
from whisper_worker.transcript import Growing, Language

FILES_AT_ONCE = 8  # of one job
# A hostile server can hold a download's thread longer than its job lives: so many may hang before other downloads must
# wait. Nothing else uses these threads.
SPARE_DOWNLOADERS = 64
ONE_LANGUAGE_S = 12.0  # a window has one language, and the model drops what is said in another
SHORT_BY_S = 0.3  # missing at a clip's end, worth a word
DEAF_S = 1.0  # so much speech without a word makes one look whether the model is well
FIRST_LISTEN_S = 60.0  # of a file whose language is wanted; twice as much where that isn't enough, and so on
LONGEST_LISTEN_S = 16 * FIRST_LISTEN_S

Json = dict[str, Any]


class Recordings:
    """Transcribes many at a time, on the threads it owns."""

    def __init__(self, settings: Settings, threads: Threads) -> None:
        self._settings = settings
        self._downloads = fetch.DownloadLimits(
            max_bytes=settings.max_download_bytes,
            timeout_s=settings.download_timeout_s,
            attempts=settings.download_attempts,
            max_redirects=settings.max_redirects,
        )
        self._io = ThreadPoolExecutor(threads.jobs, "io")
        self._downloaders = ThreadPoolExecutor(threads.jobs * FILES_AT_ONCE + SPARE_DOWNLOADERS, "download")
        self._media = ThreadPoolExecutor(threads.media, "media")
        # A job alone must be able to keep the model busy: as many pieces as it takes windows at once, and one more.
        self._pieces = Piecework(threads.jobs, extra=threads.inter * threads.batch)

    async def output(self, job: Job, recording: Recording, model: Loaded) -> Json:
        """The output for one file, without timings. Raises what `errors` holds."""
        job.tell("download", recording)
        async with self._media_file(job, recording) as file:
            job.tell("decode", recording)
            if job.request.task == "detect_language":
                return await self._detection(job, recording, model, file)
            audio = await self._decode_in_turn(job, recording, file)
        tracks = await self._tracks(job, recording, audio)
        facts = _facts(job.request, model, audio, tracks)
        so_far = await self._transcribe_well(job, recording, model, tracks, audio, facts)
        return await in_thread(self._media, recording.stop, _output, job.request, model, so_far, facts)

    async def _detection(self, job: Job, recording: Recording, model: Loaded, file: IO[bytes]) -> Json:
        """Of no more of the file than it takes to be sure."""
        longest_s = FIRST_LISTEN_S
        while True:
            part = _part(job.request, longest_s)
            audio = await self._decode(job, recording, file, part, self._settings.max_audio_s)
            tracks = await self._tracks(job, recording, audio)
            walk = model.engine.walk(tracks, job.request, recording.stop)
            own = job.own_thread if recording.index is not None else None
            work = self._pieces.in_order(recording.stop, lambda walk: [walk.detect()], [walk], own_thread=own)
            async with aclosing(work) as results:
                [language] = [result async for result in results]
            is_all = audio.reaches_end or audio.duration < longest_s - 1 or longest_s >= LONGEST_LISTEN_S
            if is_all or (language and language.is_sure):
                facts = _facts(job.request, model, audio, tracks)
                job.inform(recording, facts, language)
                return dict(reply.detection(language, facts))
            longest_s *= 2

    @asynccontextmanager
    async def _media_file(self, job: Job, recording: Recording) -> AsyncIterator[IO[bytes]]:
        """The caller's file, open. A downloaded one has no name on the disk: closed, it is gone."""
        file: IO[bytes]
        source = recording.source
        with job.watch.timing("download"):
            if source.audio is not None and is_url(source.audio):
                file = await self._download(recording, source.audio)
            else:
                file = await in_thread(self._io, recording.stop, sources.open_source, source)
        try:
            yield file
        finally:
            self._io.submit(file.close)  # giving back the blocks of a large file takes a while

    async def _download(self, recording: Recording, url: str) -> IO[bytes]:
        file = TemporaryFile(prefix="whisper-worker-")  # noqa: SIM115  (closed by the caller, or below)
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def act() -> None:
            loop.call_soon_threadsafe(begun.set)
            fetch.download(url, file, self._downloads, recording.stop, recording.source.headers)

        work = asyncio.ensure_future(in_loose_thread(self._downloaders, recording.stop, act))
        work.add_done_callback(lambda _: begun.set())
        try:
            await begun.wait()  # hung threads of other jobs' downloads may hold it up
            await asyncio.wait([work], timeout=self._downloads.timeout_s + fetch.STALL_S)
            if not work.done():
                raise fetch.timed_out(url, self._downloads)
            work.result()
        except BaseException:
            work.cancel()
            self._io.submit(file.close)
            raise
        return file

    async def _decode(self, job: Job, recording: Recording, file: IO[bytes], part: Part, max_seconds: float) -> Audio:
        def act() -> Audio:
            return decode(
                file, recording.stop, max_seconds=max_seconds, extension=sources.extension(recording.source), part=part
            )

        return await in_thread(self._media, recording.stop, job.watch.timed("decode", act))

    async def _decode_in_turn(self, job: Job, recording: Recording, file: IO[bytes]) -> Audio:
        """One file of a job after the other: what one leaves of the longest audio is there for the next."""
        async with job.decoding:
            most_s = self._settings.max_audio_s
            try:
                audio = await self._decode(job, recording, file, _part(job.request), most_s - job.audio_s)
            except TooLong as error:
                if not job.audio_s:
                    raise
                raise TooLong(f"the job's files are together longer than the {most_s:g} s that are allowed") from error
            job.audio_s += len(audio.channels) * audio.duration
            return audio

    async def _tracks(self, job: Job, recording: Recording, audio: Audio) -> list[Track]:
        """What will be transcribed of each channel."""
        numbered = job.request.channels == "split"
        return [
            Track(samples, tuple(await self._cut(job, recording, samples)), number if numbered else None)
            for number, samples in enumerate(audio.channels)
        ]

    async def _cut(self, job: Job, recording: Recording, samples: Samples) -> list[Piece]:
        """All that is speech, or all there is without `enable_vad`."""
        vad = job.request.vad_parameters or VadParameters()
        keep_all = not job.request.enable_vad
        longest_s = min(self._settings.piece_seconds, vad.max_speech_duration_s or math.inf)
        if job.request.multilingual:
            longest_s = min(longest_s, ONE_LANGUAGE_S)
        if keep_all and len(samples) <= longest_s * SAMPLE_RATE:
            return pieces.whole(samples)
        listener = speech.Listener(samples, vad)

        def act() -> list[Piece] | None:
            listener.go_on(recording.stop)
            return pieces.cut(listener.heard, longest_s, keep_silence=keep_all) if listener.is_done else None

        while True:  # one step of many: short recordings of other jobs pass long ones
            cut = await in_thread(self._media, recording.stop, job.watch.timed("decode", act))
            if cut is not None:
                return cut

    async def _transcribe_well(
        self, job: Job, recording: Recording, model: Loaded, tracks: list[Track], audio: Audio, facts: reply.Facts
    ) -> Growing:
        """The transcript; when there is none though somebody speaks, and it turns out that the model is to blame, once
        more, by a model that was loaded again."""
        reloads = model.canary.reloads
        so_far = await self._transcribe(job, recording, model, tracks, audio, facts)
        if so_far.transcript.segments or facts.duration_after_vad < DEAF_S:
            return so_far
        await model.canary.try_model()
        if model.canary.reloads == reloads:
            return so_far
        return await self._transcribe(job, recording, model, tracks, audio, facts)

    async def _transcribe(
        self, job: Job, recording: Recording, model: Loaded, tracks: list[Track], audio: Audio, facts: reply.Facts
    ) -> Growing:
        began = time.monotonic()
        walk = model.engine.walk(tracks, job.request, recording.stop)
        log.event("transcribe", job=job.id, audio=recording.index, level=log.DEBUG, pieces=len(walk))
        spoken = [track.channel for track in tracks if track.speech_s >= speech.MIN_S]
        recording.transcript = so_far = Growing(
            audio.duration,
            offset=audio.offset,
            channels=spoken or [None],
            task="transcribe" if job.request.wants_transcription else "translate",
        )
        job.tell("transcribe", recording)
        if spoken:  # else nobody speaks, in whatever language the job asks for
            _when_known(walk, lambda language: job.inform(recording, facts, language))
        work = self._pieces.in_order(
            recording.stop,
            walk.piece,
            range(len(walk)),
            side_by_side=not job.request.condition_on_previous_text,
            own_thread=job.own_thread if recording.index is not None else None,
        )
        async with aclosing(work) as results:
            async for said in results:
                if new := so_far.add(said):
                    await job.watcher.segments(new, recording.index)
                job.tell("transcribe", recording)
        if new := so_far.end():
            await job.watcher.segments(new, recording.index)
        job.tell("transcribe", recording)
        job.inform(recording, facts, None)  # when nobody speaks
        job.watch.add("queue", (walk.first_run or began) - began)
        job.watch.add("inference", time.monotonic() - (walk.first_run or began))
        return so_far

    def close(self) -> None:
        """End the threads. Jobs should have ended."""
        self._downloaders.shutdown(wait=False, cancel_futures=True)
        self._io.shutdown(wait=False)  # files may still wait there to be closed
        self._media.shutdown(wait=False, cancel_futures=True)
        self._pieces.close()


def _part(request: Request, longest_s: float = math.inf) -> Part:
    """What of the file is wanted, and at most so much of it."""
    clip = request.clip or Clip()
    end = min(math.inf if clip.end is None else clip.end, clip.start + longest_s)
    return Part(request.audio_stream, request.channels, clip.start, None if math.isinf(end) else end)


def _facts(request: Request, model: Loaded, audio: Audio, tracks: list[Track]) -> reply.Facts:
    return reply.Facts(
        model=model.engine.name,
        device=model.engine.device,
        duration=audio.duration,
        duration_after_vad=sum(track.speech_s for track in tracks),
        warnings=(*audio.warnings, *_remarks(request, audio), *model.engine.remarks(request)),
    )


def _remarks(request: Request, audio: Audio) -> Iterator[str]:
    yield from request.remarks
    end, there_s = request.clip.end if request.clip else None, audio.offset + audio.duration
    if end is not None and audio.reaches_end and there_s < end - SHORT_BY_S:
        yield f"the clip ends at {end:g} s, but the audio at {there_s:.1f} s"


def _output(request: Request, model: Loaded, so_far: Growing, facts: reply.Facts) -> Json:
    """On the media pool."""
    transcript, translation = so_far.transcript, None
    if request.wants_transcription and request.wants_translation:
        english = model.engine.speaks_english_only
        translation = replace(transcript, task="translate") if english else so_far.translation
    return dict(reply.build(request, transcript, translation, facts))


def _when_known(walk: Walk, act: Any) -> None:
    """`act` with the language, on the event loop, as soon as it is known; never where it isn't found."""

    def note(language: "asyncio.Future[Language]") -> None:
        if not language.cancelled() and not language.exception():  # the job fails with what the exception is about
            act(language.result())

    asyncio.wrap_future(walk.language).add_done_callback(note)
