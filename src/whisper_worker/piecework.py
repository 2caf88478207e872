"""The pieces of many jobs on a bounded number of threads: side by side, their results in order. Knows no speech.

Everything here but the work itself runs on the event loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Generic, TypeVar

from whisper_worker.stop import Stop, Stopped, in_thread

AHEAD = 2  # pieces for each thread that a job can have, begun and not yet given to the end
HANDED_OVER = 256  # results of one piece that may wait to be taken

Piece = TypeVar("Piece")
T = TypeVar("T")


class Piecework:
    """Threads for up to `jobs` jobs at a time.

    One thread is each job's own: its pieces go on whatever others do. `extra` threads go in turn, a piece each, to jobs
    that have more.
    """

    def __init__(self, jobs: int, extra: int) -> None:
        self._pool = ThreadPoolExecutor(jobs + extra, "piece")
        self._extra_threads = extra
        self._extra = asyncio.Semaphore(extra)

    async def in_order(
        self,
        stop: Stop,
        act: Callable[[Piece], Iterable[T]],
        pieces: Sequence[Piece],
        *,
        side_by_side: bool = True,
        own_thread: asyncio.Lock | None = None,
    ) -> AsyncGenerator[T, None]:
        """What `act` gives for each piece, on the threads, in the pieces' order; each result as soon as it is there.

        Who takes them slowly slows the work down: only so many pieces are begun, and results made, ahead of the one
        that is given next. When one raises, that is raised in its place. When the caller leaves early or is cancelled,
        `stop` is set, and no thread works on a piece any more when this ends: iterate inside `contextlib.aclosing`.
        A job that does several of these at once gives its `own_thread` to all: they take turns at the one it has.
        """
        lines: list[_Line[T]] = [_Line() for _ in pieces]
        waiting = iter(zip(pieces, lines, strict=True))
        ahead = asyncio.Semaphore(AHEAD * (1 + self._extra_threads))

        async def walk(place: AbstractAsyncContextManager[object]) -> None:
            for _ in pieces:
                await ahead.acquire()
                async with place:  # given back after each piece: another job may be next
                    piece, line = next(waiting, (None, None))
                    if piece is None or line is None:
                        return
                    try:
                        await in_thread(self._pool, stop, line.hand_over, stop, act, piece)
                    except Exception as error:
                        line.end(error)
                    except asyncio.CancelledError:  # this walk, or what it waits for, by `close`
                        line.end(Stopped())
                        raise
                    else:
                        line.end()

        own = own_thread or nullcontext()
        helpers = min(self._extra_threads, len(pieces) - (own_thread is None)) if side_by_side else 0
        places: list[AbstractAsyncContextManager[object]] = [own, *[self._extra] * helpers]
        walks = [asyncio.create_task(walk(place)) for place in places]
        try:
            for line in lines:
                while await line.has_more():
                    yield line.take()
                ahead.release()
        finally:
            for task in walks:
                task.cancel()
            await asyncio.gather(*walks, return_exceptions=True)

    def close(self) -> None:
        """Jobs should have ended."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Line(Generic[T]):
    """The results of one piece, on their way from its thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[T] = asyncio.Queue(HANDED_OVER)
        self._news = asyncio.Event()
        self._has_ended = False
        self._error: Exception | None = None

    def hand_over(self, stop: Stop, act: Callable[[Piece], Iterable[T]], piece: Piece) -> None:
        """On the piece's thread, which waits while too many wait to be taken. Raises what `act` raises, or Stopped."""
        for result in act(piece):
            stop.result_of(asyncio.run_coroutine_threadsafe(self._put(result), self._loop))

    def end(self, error: Exception | None = None) -> None:
        self._has_ended, self._error = True, error
        self._news.set()

    async def has_more(self) -> bool:
        """False at the end; or raises what ended the piece."""
        while self._results.empty():
            if self._error:
                raise self._error
            if self._has_ended:
                return False
            self._news.clear()
            await self._news.wait()
        return True

    def take(self) -> T:
        return self._results.get_nowait()

    async def _put(self, result: T) -> None:
        await self._results.put(result)
        self._news.set()
