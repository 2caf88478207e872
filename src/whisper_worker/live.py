"""What can be seen of a job while it runs: its progress, or its segments as they come.

The service tells a `Watcher`, on the event loop. Who looks on decides what becomes of it: RunPod's `/status` and
`/stream` (`job_loop`), a terminal (`local`), nobody.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from whisper_worker.stop import is_set_within
from whisper_worker.transcript import Segment

Stage = Literal["download", "decode", "transcribe"]
Item = dict[str, Any]
"""One item of a stream, ready for JSON."""

TAIL = 160  # characters of the text so far that a report ends with
ITEM_BYTES = 250_000  # of JSON, in one item at most: RunPod splits those over 1 MB


@dataclass(frozen=True)
class Progress:
    """How far a job has come: seconds of its audio, the total None until it is known."""

    stage: Stage
    seconds_done: float = 0.0
    seconds_total: float | None = None
    text_tail: str = ""

    @property
    def fraction(self) -> float:
        return min(self.seconds_done / self.seconds_total, 1.0) if self.seconds_total else 0.0

    def report(self) -> dict[str, Any]:
        """As `/status` shows it."""
        total = self.seconds_total
        return {
            "progress": round(self.fraction, 3),
            "stage": self.stage,
            "seconds_done": round(self.seconds_done, 3),
            "seconds_total": None if total is None else round(total, 3),
            "text_tail": self.text_tail,
        }


class Watcher:
    """Told of one job, on the event loop; this one doesn't look. `progress` never goes back."""

    def progress(self, progress: Progress) -> None:
        pass

    def info(self, info: Item) -> None:
        """What is known of the audio; once, before the first segments."""

    async def segments(self, segments: Sequence[Segment]) -> None:
        """New ones, in order. The job goes on when this returns."""


class Outbox(Watcher):
    """Packs what comes of a job into items, for a reader who takes them one after the other.

    Segments are there as soon as they exist, but not earlier than `interval_s` after those before, as long as the job
    runs. While as much waits as fits into one item, the job waits too: a slow reader slows it down.
    """

    def __init__(
        self,
        interval_s: float,
        item: Callable[[Sequence[Segment]], Item],
        size: Callable[[Item], int],
        max_bytes: int = ITEM_BYTES,
    ) -> None:
        self._interval_s = interval_s
        self._item = item
        self._size = size
        self._max_bytes = max_bytes
        self._info: Item | None = None
        self._waiting: list[tuple[Segment, int]] = []  # with their bytes
        self._closed = asyncio.Event()
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    def info(self, info: Item) -> None:
        self._info = info
        self._news.set()

    async def segments(self, segments: Sequence[Segment]) -> None:
        self._waiting += [(segment, self._size(self._item([segment]))) for segment in segments]
        self._news.set()
        while sum(size for _, size in self._waiting) >= self._max_bytes:
            self._room.clear()
            await self._room.wait()

    def close(self) -> None:
        """Nothing more will come: what waits is given without delay."""
        self._closed.set()
        self._news.set()

    async def items(self) -> AsyncGenerator[Item, None]:
        """Until closed, and empty."""
        due = 0.0
        while self._info or self._waiting or not self._closed.is_set():
            await self._news.wait()
            self._news.clear()
            if self._info:
                info, self._info = self._info, None
                yield info
            while self._waiting:
                await is_set_within(self._closed, max(due - time.monotonic(), 0))
                item = self._item(self._pack())
                due = time.monotonic() + self._interval_s
                yield item

    def _pack(self) -> list[Segment]:
        """As many as fit, one at least."""
        pack: list[Segment] = []
        room = self._max_bytes
        while self._waiting and (not pack or self._waiting[0][1] <= room):
            segment, size = self._waiting.pop(0)
            pack.append(segment)
            room -= size
        self._room.set()
        return pack
