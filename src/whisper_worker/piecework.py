"""The pieces of many jobs on a bounded number of threads: side by side, their results in order. Knows no speech.

Everything here but the work itself runs on the event loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TypeVar

from whisper_worker.stop import Stop, Stopped, in_thread

AHEAD = 2  # pieces for each thread that a job can have

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
        self, stop: Stop, act: Callable[[Piece], T], pieces: Sequence[Piece], *, side_by_side: bool = True
    ) -> AsyncGenerator[T, None]:
        """`act` of each piece, on the threads, begun and given in their order.

        Only so many are begun ahead of the one that is given next: who takes them slowly slows the work down.
        When one raises, that is raised in its place. When the caller leaves early or is cancelled, `stop` is set, and
        no thread works on a piece any more when this ends: iterate inside `contextlib.aclosing`.
        """
        results: list[asyncio.Future[T]] = [asyncio.get_running_loop().create_future() for _ in pieces]
        waiting = iter(zip(pieces, results, strict=True))
        ahead = asyncio.Semaphore(AHEAD * (1 + self._extra_threads))

        async def walk(place: AbstractAsyncContextManager[object]) -> None:
            for _ in pieces:
                await ahead.acquire()
                async with place:  # given back after each piece: another job may be next
                    piece, result = next(waiting, (None, None))
                    if piece is None or result is None:
                        return
                    try:
                        result.set_result(await in_thread(self._pool, stop, act, piece))
                    except Exception as error:
                        result.set_exception(error)
                    except asyncio.CancelledError:  # this walk, or what it waits for, by `close`
                        result.set_exception(Stopped())
                        result.exception()  # seen, even if nobody is left to ask for it
                        raise

        helpers = min(self._extra_threads, len(pieces) - 1) if side_by_side else 0
        places: list[AbstractAsyncContextManager[object]] = [nullcontext(), *[self._extra] * helpers]
        walks = [asyncio.create_task(walk(place)) for place in places]
        try:
            for result in results:
                yield await asyncio.shield(result)
                ahead.release()
        finally:
            for task in walks:
                task.cancel()
            await asyncio.gather(*walks, return_exceptions=True)
            for result in results:
                if not result.cancel():
                    result.exception()  # seen: nobody will ask for it any more

    def close(self) -> None:
        """Jobs should have ended."""
        self._pool.shutdown(wait=False, cancel_futures=True)
