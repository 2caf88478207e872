"""What can be seen of a job while it runs: its progress, or its segments as they come.

The service tells a `Watcher`, on the event loop. Who looks on decides what becomes of it: RunPod's `/status` and
`/stream` (`job_loop`), a terminal (`local`), nobody.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from whisper_worker.stop import is_set_within
from whisper_worker.transcript import Segment

Stage = Literal["download", "decode", "transcribe"]
STAGES: tuple[Stage, ...] = get_args(Stage)
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
        """What is known of the audio; once for each file, before its first segments."""

    async def segments(self, segments: Sequence[Segment], audio: int | None = None) -> None:
        """New ones, in order; of the `audio`th of several files. The job goes on when this returns."""


class Outbox(Watcher):
    """Packs what comes of a job into items, for a reader who takes them one after the other.

    Segments are there as soon as they exist, but not earlier than `interval_s` after those before, as long as the job
    runs. While as much waits as fits into one item, the job waits too: a slow reader slows it down.
    """

    def __init__(
        self,
        interval_s: float,
        item: Callable[[Sequence[Segment], int | None], Item],
        size: Callable[[Item], int],
        max_bytes: int = ITEM_BYTES,
    ) -> None:
        self._interval_s = interval_s
        self._item = item
        self._size = size
        self._max_bytes = max_bytes
        self._infos: list[Item] = []
        self._waiting: list[tuple[Segment, int | None, int]] = []  # with their file, and their bytes
        self._closed = asyncio.Event()
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    def info(self, info: Item) -> None:
        self._infos.append(info)
        self._news.set()

    async def segments(self, segments: Sequence[Segment], audio: int | None = None) -> None:
        self._waiting += [(segment, audio, self._size(self._item([segment], audio))) for segment in segments]
        self._news.set()
        while sum(size for *_, size in self._waiting) >= self._max_bytes:
            self._room.clear()
            await self._room.wait()

    def close(self) -> None:
        """Nothing more will come: what waits is given without delay."""
        self._closed.set()
        self._news.set()

    async def items(self) -> AsyncGenerator[Item, None]:
        """Until closed, and empty."""
        due = 0.0
        while self._infos or self._waiting or not self._closed.is_set():
            await self._news.wait()
            self._news.clear()
            while self._infos:
                yield self._infos.pop(0)
            while self._waiting:
                await is_set_within(self._closed, max(due - time.monotonic(), 0))
                while self._infos:  # of a file whose segments may be among those that wait
                    yield self._infos.pop(0)
                item = self._item(*self._pack())
                due = time.monotonic() + self._interval_s
                yield item

    def _pack(self) -> tuple[list[Segment], int | None]:
        """As many of one file as fit, one at least."""
        pack: list[Segment] = []
        audio, room = self._waiting[0][1], self._max_bytes
        while self._waiting and self._waiting[0][1] == audio and (not pack or self._waiting[0][2] <= room):
            segment, _, size = self._waiting.pop(0)
            pack.append(segment)
            room -= size
        self._room.set()
        return pack, audio
