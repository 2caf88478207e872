"""Pieces of several jobs on a bounded number of threads, with plain integers."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

from whisper_worker.piecework import HANDED_OVER, Piecework
from whisper_worker.stop import Stop

SOON_S = 20


@contextmanager
def piecework(jobs: int = 2, extra: int = 2) -> Iterator[Piecework]:
    work = Piecework(jobs, extra)
    try:
        yield work
    finally:
        work.close()


async def results(work: Piecework, act: Callable[[int], Any], count: int, **options: Any) -> list[Any]:
    async with aclosing(work.in_order(Stop(), once(act), range(count), **options)) as given:
        return [result async for result in given]


def once(act: Callable[[int], Any]) -> Callable[[int], Iterator[Any]]:
    """One result for each piece."""

    def give(piece: int) -> Iterator[Any]:
        yield act(piece)

    return give


def test_results_come_in_order_however_long_each_takes() -> None:
    later = threading.Event()

    def act(piece: int) -> int:
        if piece == 0:
            assert later.wait(SOON_S)  # the first piece ends after the second has
        if piece == 1:
            later.set()
        return 10 * piece

    with piecework() as work:
        assert asyncio.run(results(work, act, 7)) == [0, 10, 20, 30, 40, 50, 60]


def test_a_result_is_given_before_the_later_ones_are_there() -> None:
    given = threading.Event()

    def act(piece: int) -> int:
        assert piece < 2 or given.wait(SOON_S)
        return piece

    async def run(work: Piecework) -> list[int]:
        seen = []
        async with aclosing(work.in_order(Stop(), once(act), range(4))) as stream:
            async for result in stream:
                seen.append(result)
                if result == 1:
                    given.set()
        return seen

    with piecework(extra=0) as work:
        assert asyncio.run(run(work)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("options", "most"), [({}, 3), ({"side_by_side": False}, 1)])
def test_a_job_alone_has_its_own_thread_and_the_extra_ones(options: dict[str, Any], most: int) -> None:
    with piecework(jobs=5, extra=2) as work:
        assert asyncio.run(results(work, most_at_once(together=most), 9, **options))[-1] == most


def most_at_once(together: int) -> Callable[[int], int]:
    """The largest number of pieces seen at one moment; the first ones wait until so many are there."""
    lock, now, most, reached = threading.Lock(), 0, 0, threading.Event()

    def act(piece: int) -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            if now == together:
                reached.set()
        assert reached.wait(SOON_S)
        with lock:
            now -= 1
            return most

    return act


def test_a_short_job_does_not_wait_for_the_pieces_of_long_ones() -> None:
    release, all_taken = threading.Event(), threading.Barrier(4, timeout=SOON_S)

    def hold(piece: int) -> int:
        if piece < 3:
            all_taken.wait()
        assert release.wait(SOON_S)
        return piece

    async def run(work: Piecework) -> None:
        long = asyncio.create_task(results(work, hold, 50))
        await asyncio.to_thread(all_taken.wait)  # its own thread and both extra ones
        assert await results(work, lambda piece: piece, 1) == [0]
        release.set()
        assert await long == list(range(50))

    with piecework(jobs=2, extra=2) as work:
        asyncio.run(run(work))


def test_what_a_piece_raises_is_raised_in_its_place() -> None:
    def act(piece: int) -> int:
        if piece == 2:
            raise ValueError("two")
        return piece

    async def run(work: Piecework) -> None:
        async with aclosing(work.in_order(Stop(), once(act), range(6))) as given:
            async for result in given:
                seen.append(result)

    seen: list[int] = []
    with piecework() as work, pytest.raises(ValueError, match="two"):
        asyncio.run(run(work))
    assert seen == [0, 1]


async def cancel(stream: "asyncio.Task[Any]") -> None:
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream


async def leave(stream: "asyncio.Task[Any]") -> None:
    with pytest.raises(KeyError):
        await stream


@pytest.mark.parametrize("way", [cancel, leave])
def test_when_the_caller_goes_no_thread_works_on(way: Callable[["asyncio.Task[Any]"], Any]) -> None:
    stop, lock, at_work = Stop(), threading.Lock(), 0
    busy = threading.Event()

    def act(piece: int) -> int:
        nonlocal at_work
        if piece == 0 and way is leave:
            assert busy.wait(SOON_S)
            return 0
        with lock:
            at_work += 1
            if at_work == 2:
                busy.set()
        try:
            while True:
                stop.wait(SOON_S)
        finally:
            with lock:
                at_work -= 1

    async def consume(work: Piecework) -> None:
        given: AsyncIterator[int] = work.in_order(stop, once(act), range(50))
        async with aclosing(given) as stream:  # type: ignore[type-var]
            async for _ in stream:
                raise KeyError

    async def run(work: Piecework) -> None:
        task = asyncio.create_task(consume(work))
        assert await asyncio.to_thread(busy.wait, SOON_S)
        await way(task)
        assert at_work == 0

    with piecework() as work:
        asyncio.run(run(work))


def test_no_pieces_give_no_results() -> None:
    with piecework() as work:
        assert asyncio.run(results(work, lambda piece: piece, 0)) == []


def test_who_takes_results_slowly_slows_the_work_down() -> None:
    begun: list[int] = []

    async def run(work: Piecework) -> None:
        async with aclosing(work.in_order(Stop(), once(begun.append), range(1000))) as given:
            await anext(given)
            await asyncio.sleep(0.1)  # enough for all thousand
            assert len(begun) <= 1 + 2 * 3
            assert len([result async for result in given]) == 999

    with piecework(jobs=1, extra=2) as work:
        asyncio.run(run(work))
    assert sorted(begun) == list(range(1000))


def test_results_of_a_piece_come_as_they_are_made_and_those_of_later_pieces_behind_them() -> None:
    second_piece_done, first_taken = threading.Event(), threading.Event()

    def act(piece: int) -> Iterator[str]:
        if piece == 1:
            yield from "bcd"
            second_piece_done.set()
        else:
            yield "a"
            assert first_taken.wait(SOON_S)  # before the piece has ended
            assert second_piece_done.wait(SOON_S)
            yield "A"

    async def run(work: Piecework) -> str:
        seen = ""
        async with aclosing(work.in_order(Stop(), act, range(2))) as given:
            async for result in given:
                seen += result
                first_taken.set()
        return seen

    with piecework() as work:
        assert asyncio.run(run(work)) == "aAbcd"


def test_a_piece_with_many_results_waits_until_they_are_taken() -> None:
    made: list[int] = []

    def act(_: int) -> Iterator[int]:
        for number in range(5 * HANDED_OVER):
            made.append(number)
            yield number

    async def run(work: Piecework) -> None:
        async with aclosing(work.in_order(Stop(), act, range(1))) as given:
            await anext(given)
            await asyncio.sleep(0.3)  # enough for all of them
            assert len(made) <= HANDED_OVER + 3
            assert [result async for result in given] == list(range(1, 5 * HANDED_OVER))

    with piecework() as work:
        asyncio.run(run(work))


def test_a_piece_whose_results_nobody_takes_ends_when_the_caller_goes() -> None:
    ended = threading.Event()

    def act(_: int) -> Iterator[int]:
        try:
            yield from range(5 * HANDED_OVER)
        finally:
            ended.set()

    async def run(work: Piecework) -> None:
        async with aclosing(work.in_order(Stop(), act, range(1))) as given:
            await anext(given)

    with piecework() as work:
        asyncio.run(run(work))
    assert ended.is_set()
