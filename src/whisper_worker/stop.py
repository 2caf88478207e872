"""How a job's coroutine tells its threads to stop, and waits until they have.

A thread can't be cancelled, so work that may take long reads the job's `Stop` between its steps (a chunk of a download,
a packet of audio, a segment).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from threading import Event, Lock
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Stopped(Exception):
    """Raised inside a job's thread once nobody wants its result any more. It never becomes a reply."""


class Stop:
    """One for each job. Set by its coroutine, read by its threads."""

    def __init__(self) -> None:
        self._event = Event()
        self._lock = Lock()
        self._awaited: set[Future[Any]] = set()

    def set(self) -> None:
        with self._lock:
            self._event.set()
            awaited = list(self._awaited)
        for future in awaited:
            future.cancel()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raises Stopped once set."""
        if self._event.is_set():
            raise Stopped

    def result_of(self, future: "Future[T]") -> T:
        """Wait for it. Once set, one that hasn't begun is cancelled, and Stopped is raised; what runs ends first."""
        with self._lock:
            self._awaited.add(future)
        try:
            if self.is_set:
                future.cancel()
            return future.result()
        except CancelledError:
            raise Stopped from None
        finally:
            with self._lock:
                self._awaited.discard(future)

    def wait(self, seconds: float) -> None:
        """Sleep for so long; raises Stopped at once when set."""
        self._event.wait(seconds)
        self.check()


async def in_thread(pool: Executor, stop: Stop, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `act` on `pool`, and wait for it without holding the event loop.

    When the awaiting task is cancelled, `stop` is set and CancelledError is raised only after the thread has ended: its
    slot is then really free and its files can go. Work that hasn't begun never begins.
    """
    work = pool.submit(act, *args, **kwargs)
    result = asyncio.wrap_future(work)
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        stop.set()
        work.cancel()
        while not result.done():
            try:
                await asyncio.wait([result])
            except asyncio.CancelledError:
                continue  # cancelled once more while the thread winds up: the first one is raised below
        if not result.cancelled():
            result.exception()  # mark it as seen: nobody waits for it any more
        raise


async def in_loose_thread(pool: Executor, stop: Stop, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `in_thread`, but when cancelled it ends at once, and the thread whenever it notices.

    For a download: a server can hold a thread in its socket for longer than a caller should wait.
    """
    try:
        return await asyncio.wrap_future(pool.submit(act, *args, **kwargs))
    except asyncio.CancelledError:
        stop.set()
        raise
