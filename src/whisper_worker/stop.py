"""How a job's coroutine tells its threads to stop, and waits until they have.

A thread can't be cancelled, so work that may take long reads the job's `Stop` between its steps (a chunk of a download,
a packet of audio, a segment).
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Stopped(Exception):
    """Raised inside a job's thread once nobody wants its result any more. It never becomes a reply."""


class Stop:
    """One for each job, and of that one for each of its files. Set by their coroutines, read by their threads."""

    def __init__(self, whole: "Stop | None" = None) -> None:
        self._signal: Future[Any] = Future()
        self.whole: Stop = whole or self
        """That of the job."""

    def part(self) -> "Stop":
        """One for a part of the job, which is set with this one, or alone."""
        part = Stop(self)
        self._signal.add_done_callback(lambda _: part.set())
        return part

    def set(self) -> None:
        with suppress(InvalidStateError):  # it was set before
            self._signal.set_result(None)

    def check(self) -> None:
        """Raises Stopped once set."""
        if self._signal.done():
            raise Stopped

    def wait(self, seconds: float) -> None:
        """Sleep for so long; raises Stopped at once when set."""
        wait([self._signal], seconds)
        self.check()

    def wait_for(self, future: "Future[T]") -> T:
        """Its result; raises Stopped at once when set before it is there."""
        wait([future, self._signal], return_when=FIRST_COMPLETED)
        if not future.done():
            raise Stopped
        return future.result()

    def result_of(self, future: "Future[T]") -> T:
        """As `wait_for`, but once set, what hasn't begun is cancelled, and what runs ends first."""
        try:
            return self.wait_for(future)
        except Stopped:
            if future.cancel():
                raise
            return future.result()


def see(work: "asyncio.Future[Any]") -> None:
    """Look at its exception, if any: nobody asks for that any more, and asyncio would complain."""
    if not work.cancelled():
        work.exception()


async def wait_out(work: "asyncio.Future[Any]") -> None:
    """Until it has ended, however often this is cancelled meanwhile; that is raised then."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


async def is_set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """What `asyncio.wait_for` is for; but before Python 3.12 that loses a cancellation that comes with the event."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=seconds)
        return event.is_set()
    finally:
        waiting.cancel()


class Alarm(Generic[T]):
    """Rings at most once, from any thread, and is heard by all who wait for it along with something else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._hearers: set[asyncio.Future[T]] = set()
        self.message: T | None = None
        """Its only one, once it has rung."""

    @property
    def has_rung(self) -> bool:
        return self.message is not None

    def ring(self, message: T) -> bool:
        """False when it had rung before: the first message counts."""
        with self._lock:
            if self.has_rung:
                return False
            self.message = message
            hearers = list(self._hearers)
        for loop in {future.get_loop() for future in hearers}:
            with suppress(RuntimeError):  # it has ended meanwhile
                # All in one turn: who hears it first may act on the others.
                loop.call_soon_threadsafe(_settle, [f for f in hearers if f.get_loop() is loop], message)
        return True

    @contextmanager
    def heard(self) -> Iterator["asyncio.Future[T]"]:
        """A future of the running loop, with the message once there is one."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._hearers.add(future)
            if self.message is not None:
                future.set_result(self.message)
        try:
            yield future
        finally:
            with self._lock:
                self._hearers.discard(future)
            future.cancel()


def _settle(futures: "list[asyncio.Future[T]]", message: T) -> None:
    for future in futures:
        if not future.done():
            future.set_result(message)


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
        with suppress(asyncio.CancelledError):  # once more, while the thread winds up: the first one is raised below
            await wait_out(result)
        see(result)
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
