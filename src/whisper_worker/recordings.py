"""The story of one recording, a job's only one or one of several: media file → audio → pieces of speech → its output.

Everything here runs on the event loop and waits for work that other threads do: the download and I/O pools fetch, the
media pool decodes and looks for speech, the piece threads transcribe, waiting for the model's threads in turn. So the
I/O of many jobs overlaps, the next jobs' audio is ready when the model is free, and the loop stays free.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar

from whisper_worker import fetch, log, pieces, reply, sources, speech
from whisper_worker.audio import SAMPLE_RATE, Audio, Part, Samples, decode
from whisper_worker.errors import TooLong
from whisper_worker.job import Recording
from whisper_worker.pieces import Piece, Track
from whisper_worker.piecework import Piecework
from whisper_worker.registry import Loaded
from whisper_worker.request import Clip, Request, is_url
from whisper_worker.settings import Settings, Threads
from whisper_worker.stop import in_loose_thread, in_thread
from whisper_worker.transcriber import Walk
from whisper_worker.transcript import Growing, Language, Task

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
T = TypeVar("T")
U = TypeVar("U")


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

    async def output(self, recording: Recording, model: Loaded) -> Json:
        """The output for one file, without timings. Raises what `errors` holds."""
        recording.tell("download")
        async with self._media_file(recording) as file:
            recording.tell("decode")
            if recording.request.task == "detect_language":
                return await self._detection(recording, model, file)
            material = await self._material(recording, model, await self._decode_in_turn(recording, file))
        so_far = await self._transcribe_well(recording, model, material)
        return await in_thread(self._media, recording.stop, _output, recording.request, model, so_far, material.facts)

    async def _detection(self, recording: Recording, model: Loaded, file: IO[bytes]) -> Json:
        """Of no more of the file than it takes to be sure."""
        most_s = min(LONGEST_LISTEN_S, self._settings.max_audio_s)
        longest_s = min(FIRST_LISTEN_S, most_s)
        while True:
            audio = await self._decode(recording, file, _part(recording.request, longest_s), most_s)
            material = await self._material(recording, model, audio)
            with self._timed(recording, model.engine.walk(material.tracks, recording.request, recording.stop)) as walk:
                async with aclosing(self._side_by_side(recording, lambda walk: [walk.detect()], [walk])) as results:
                    [language] = [result async for result in results]
            is_all = audio.reaches_end or audio.duration < longest_s - 1 or longest_s >= most_s
            if is_all or (language and language.is_sure):
                recording.inform(material.facts, language)
                return dict(reply.detection(language, material.facts))
            longest_s = min(longest_s * 2, most_s)

    @asynccontextmanager
    async def _media_file(self, recording: Recording) -> AsyncIterator[IO[bytes]]:
        """The caller's file, open. A downloaded one has no name on the disk: closed, it is gone."""
        file: IO[bytes]
        source = recording.source
        with recording.watch.timing("download"):
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

    async def _decode(self, recording: Recording, file: IO[bytes], part: Part, max_seconds: float) -> Audio:
        def act() -> Audio:
            return decode(
                file, recording.stop, max_seconds=max_seconds, extension=sources.extension(recording.source), part=part
            )

        return await in_thread(self._media, recording.stop, recording.watch.timed("decode", act))

    async def _decode_in_turn(self, recording: Recording, file: IO[bytes]) -> Audio:
        """One file of a job after the other: what one leaves of the longest audio is there for the next."""
        job, most_s = recording.job, self._settings.max_audio_s
        async with job.decoding:
            try:
                audio = await self._decode(recording, file, _part(job.request), most_s - job.audio_s)
            except TooLong as error:
                if not job.audio_s:
                    raise
                raise TooLong(f"the job's files are together longer than the {most_s:g} s that are allowed") from error
            job.audio_s += len(audio.channels) * audio.duration
            return audio

    async def _material(self, recording: Recording, model: Loaded, audio: Audio) -> "_Material":
        numbered = recording.request.heard_channels == "split"
        tracks = [
            Track(samples, tuple(await self._cut(recording, model, samples)), number if numbered else None)
            for number, samples in enumerate(audio.channels)
        ]
        request, engine = recording.request, model.engine
        facts = reply.Facts(
            model=engine.name,
            device=engine.device,
            duration=audio.duration,
            duration_after_vad=sum(track.speech_s for track in tracks),
            warnings=(*audio.warnings, *self._remarks(request, model, audio), *engine.remarks(request)),
        )
        return _Material(audio, tracks, facts)

    async def _cut(self, recording: Recording, model: Loaded, samples: Samples) -> list[Piece]:
        """All that is speech, or all there is without `enable_vad`."""
        request = recording.request
        keep_all = not request.enable_vad
        longest_s = min(self._longest_s(request, model), request.vad.max_speech_duration_s or math.inf)
        if keep_all and len(samples) <= longest_s * SAMPLE_RATE:
            return pieces.whole(samples)
        listener = speech.Listener(samples, request.vad)

        def act() -> list[Piece] | None:
            listener.go_on(recording.stop)
            return pieces.cut(listener.heard, longest_s, keep_silence=keep_all) if listener.is_done else None

        while True:  # one step of many: short recordings of other jobs pass long ones
            cut = await in_thread(self._media, recording.stop, recording.watch.timed("decode", act))
            if cut is not None:
                return cut

    async def _transcribe_well(self, recording: Recording, model: Loaded, material: "_Material") -> Growing:
        """The transcript; when there is none though somebody speaks, and it turns out that the model is to blame, once
        more, by a model that was loaded again."""
        reloads = model.canary.reloads
        so_far = await self._transcribe(recording, model, material)
        if so_far.transcript.segments or material.facts.duration_after_vad < DEAF_S:
            return so_far
        await model.canary.try_model()
        return so_far if model.canary.reloads == reloads else await self._transcribe(recording, model, material)

    async def _transcribe(self, recording: Recording, model: Loaded, material: "_Material") -> Growing:
        recording.transcript = so_far = material.growing(recording.request)
        recording.tell("transcribe")
        with self._timed(recording, model.engine.walk(material.tracks, recording.request, recording.stop)) as walk:
            log.event("transcribe", job=recording.job.id, audio=recording.index, level=log.DEBUG, pieces=len(walk))
            # When nobody speaks, it is in no language, whatever the job asks for.
            with _informed(recording, material.facts, walk) if material.spoken else nullcontext():
                async with aclosing(self._side_by_side(recording, walk.piece, range(len(walk)))) as results:
                    async for said in results:
                        await recording.pass_on(so_far.add(said))
            await recording.pass_on(so_far.end())
        recording.inform(material.facts, None)  # when nobody speaks
        return so_far

    @contextmanager
    def _timed(self, recording: Recording, walk: Walk) -> Iterator[Walk]:
        """Its time waits in the queue until the model begins with it."""
        began = time.monotonic()
        yield walk
        first_run = walk.first_run or began
        recording.watch.add("queue", first_run - began)
        recording.watch.add("inference", time.monotonic() - first_run)

    def _side_by_side(
        self, recording: Recording, act: Callable[[T], Iterable[U]], parts: Sequence[T]
    ) -> AsyncGenerator[U, None]:
        """On the piece threads, unless each needs the text before it."""
        return self._pieces.in_order(
            recording.stop,
            act,
            parts,
            side_by_side=not recording.request.condition_on_previous_text,
            own_thread=recording.job.own_thread if recording.is_one_of_several else None,
        )

    def _longest_s(self, request: Request, model: Loaded) -> float:
        """Of a piece, unless the caller wants shorter ones."""
        may_change = request.multilingual and not model.engine.speaks_english_only
        return min(self._settings.piece_seconds, ONE_LANGUAGE_S if may_change else math.inf)

    def _remarks(self, request: Request, model: Loaded, audio: Audio) -> Iterator[str]:
        """What of the request has no effect, or less than it says."""
        yield from request.remarks
        end, there_s = request.clip.end if request.clip else None, audio.offset + audio.duration
        if end is not None and audio.reaches_end and there_s < end - SHORT_BY_S:
            yield f"the clip ends at {end:g} s, but the audio at {there_s:.1f} s"
        wanted_s, longest_s = request.vad.max_speech_duration_s, self._longest_s(request, model)
        if wanted_s and wanted_s > longest_s:
            yield f"pieces have at most {longest_s:g} s here: max_speech_duration_s has no effect"

    def close(self) -> None:
        """End the threads. Jobs should have ended."""
        self._downloaders.shutdown(wait=False, cancel_futures=True)
        self._io.shutdown(wait=False)  # files may still wait there to be closed
        self._media.shutdown(wait=False, cancel_futures=True)
        self._pieces.close()


@dataclass(frozen=True)
class _Material:
    """What there is to transcribe."""

    audio: Audio
    tracks: list[Track]
    facts: reply.Facts

    @property
    def spoken(self) -> list[int | None]:
        """The channels that somebody speaks on."""
        return [track.channel for track in self.tracks if track.is_spoken]

    def growing(self, request: Request) -> Growing:
        """Its transcript, of which nothing is there yet."""
        task: Task = "transcribe" if request.wants_transcription else "translate"
        return Growing(self.audio.duration, offset=self.audio.offset, channels=self.spoken or [None], task=task)


def _part(request: Request, longest_s: float = math.inf) -> Part:
    """What of the file is wanted, and at most so much of it."""
    clip = request.clip or Clip()
    end = min(math.inf if clip.end is None else clip.end, clip.start + longest_s)
    return Part(request.audio_stream, request.heard_channels, clip.start, None if math.isinf(end) else end)


def _output(request: Request, model: Loaded, so_far: Growing, facts: reply.Facts) -> Json:
    """On the media pool."""
    transcript, translation = so_far.transcript, None
    if request.wants_both:
        english = model.engine.speaks_english_only
        translation = replace(transcript, task="translate") if english else so_far.translation
    return dict(reply.build(request, transcript, translation, facts))


@contextmanager
def _informed(recording: Recording, facts: reply.Facts, walk: Walk) -> Iterator[None]:
    """Inside the `with`, who looks on is told the language as soon as it is known."""

    def note(language: "asyncio.Future[Language]") -> None:
        if not language.cancelled() and not language.exception():  # the job fails with what the exception is about
            recording.inform(facts, language.result())

    known = asyncio.wrap_future(walk.language)
    known.add_done_callback(note)
    try:
        yield
    finally:
        known.cancel()  # unless it has been told; it would keep the audio
