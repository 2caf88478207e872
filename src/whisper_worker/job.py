"""One job on its way: what is known of it, and where its seconds go. On the event loop, but for the stopwatch."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from whisper_worker import reply
from whisper_worker.live import TAIL, Progress, Stage, Watcher
from whisper_worker.request import Request
from whisper_worker.stop import Stop
from whisper_worker.transcript import Growing, Language

T = TypeVar("T")


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


@dataclass
class Job:
    """One job on its way: what was asked, the signal that ends its threads, where its seconds go, and who looks on."""

    id: str
    watcher: Watcher
    is_streamed: bool = False
    stop: Stop = field(default_factory=Stop)
    watch: Stopwatch = field(default_factory=Stopwatch)
    request: Request = field(init=False)
    transcript: Growing | None = None
    """From when its pieces are transcribed on."""
    _told_s: float = 0.0
    _informed: bool = False

    def tell(self, stage: Stage) -> None:
        """Whoever looks on; never of less than before, not even when the job is transcribed once more."""
        so_far = self.transcript or Growing(0.0)
        self._told_s = max(self._told_s, so_far.until)
        self.watcher.progress(Progress(stage, self._told_s, so_far.duration or None, so_far.tail(TAIL)))

    def inform(self, facts: reply.Facts, language: Language | tuple[None, None]) -> None:
        """Of the audio; only the first time counts."""
        if not self._informed:
            self._informed = True
            self.watcher.info(reply.info_item(facts, language))

    def done_so_far(self) -> dict[str, Any] | None:
        return reply.partial(self.request, self.transcript) if self.transcript else None
