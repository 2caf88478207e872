"""One job on its way: what is known of it, and where its seconds go. On the event loop, but for the stopwatch."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from whisper_worker import reply
from whisper_worker.live import STAGES, TAIL, Progress, Stage, Watcher
from whisper_worker.request import Request, S3Config, Source
from whisper_worker.stop import Stop
from whisper_worker.transcript import Growing, Language, Segment

T = TypeVar("T")


class Stopwatch:
    """Where a job's seconds go. Time between a step's request and its start on a thread counts as `queue`."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._seconds = {"download": 0.0, "decode": 0.0, "queue": 0.0, "inference": 0.0, "upload": 0.0}

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


class Recording:
    """One of a job's files on its way. `index`: which one, where there are several. `stop` ends its threads alone."""

    def __init__(self, job: "Job", source: Source, index: int | None) -> None:
        self.job = job
        self.source = source
        self.index = index
        self.stop = job.stop.part()
        self.transcript: Growing | None = None
        """From when its pieces are transcribed on."""
        self.output: dict[str, Any] | None = None
        """Of several files: the output, or error, once there is one."""
        self._informed = False

    @property
    def request(self) -> Request:
        return self.job.request

    @property
    def watch(self) -> Stopwatch:
        return self.job.watch

    @property
    def is_one_of_several(self) -> bool:
        return self.index is not None

    @property
    def seconds_total(self) -> float | None:
        """None until it is known."""
        if self.transcript is None:
            return 0.0 if self.output else None
        return self.transcript.duration

    @property
    def seconds_done(self) -> float:
        return self.transcript.until if self.transcript else 0.0

    def done_so_far(self) -> dict[str, Any] | None:
        """All of its output, or what there is of it; None when that is nothing."""
        if self.output:
            return self.output
        return dict(reply.partial(self.request, self.transcript)) if self.transcript else None

    def tell(self, stage: Stage) -> None:
        """Whoever looks on at the job."""
        self.job.tell(stage, self.transcript)

    def inform(self, facts: reply.Facts, language: Language | None) -> None:
        """Of the audio; only the first time counts."""
        if not self._informed:
            self._informed = True
            self.job.watcher.info(reply.info_item(facts, language, self.index))

    async def pass_on(self, segments: Sequence[Segment]) -> None:
        """To whoever looks on."""
        if segments:
            await self.job.watcher.segments(segments, self.index)
        self.tell("transcribe")


@dataclass
class Job:
    """One job on its way: what was asked, the signal that ends its threads, where its seconds go, and who looks on."""

    id: str
    watcher: Watcher
    is_streamed: bool = False
    stop: Stop = field(default_factory=Stop)
    watch: Stopwatch = field(default_factory=Stopwatch)
    request: Request = field(init=False)
    bucket: S3Config | None = None
    recordings: list[Recording] = field(default_factory=list)
    own_thread: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Its files, where there are several, take turns at the piece thread that is the job's own."""
    decoding: asyncio.Lock = field(default_factory=asyncio.Lock)
    audio_s: float = 0.0
    """Seconds decoded so far."""
    _told_s: float = 0.0
    _stage: Stage = "download"

    def accept(self, request: Request) -> None:
        self.request = request
        self.recordings = [
            Recording(self, source, None if request.audios is None else index)
            for index, source in enumerate(request.sources)
        ]

    def tell(self, stage: Stage, transcript: Growing | None) -> None:
        """Whoever looks on; never of less than before, not even when a file is transcribed once more."""
        self._stage = max(stage, self._stage, key=STAGES.index)
        self._told_s = max(self._told_s, sum(each.seconds_done for each in self.recordings))
        totals = [each.seconds_total for each in self.recordings]
        total = None if None in totals else sum(total or 0.0 for total in totals)
        tail = transcript.tail(TAIL) if transcript else ""
        self.watcher.progress(Progress(self._stage, self._told_s, total or None, tail))

    def done_so_far(self) -> dict[str, Any] | None:
        """None when that is nothing."""
        parts = [each.done_so_far() for each in self.recordings]
        if not any(parts):
            return None
        return parts[0] if self.request.audios is None else {"results": parts}
