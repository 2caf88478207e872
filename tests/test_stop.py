"""How jobs wait for their threads, and how they leave them."""

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from whisper_worker.errors import NotAudio
from whisper_worker.stop import Alarm, Stop, Stopped, in_loose_thread, in_thread, is_set_within

InThread = Callable[..., Coroutine[Any, Any, Any]]

both = pytest.mark.parametrize("run", [in_thread, in_loose_thread])


class Work:
    """Runs in a thread from the time that it is begun to the time that it is released."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = threading.Event()
        self.released = threading.Event()
        self.ended = threading.Event()
        self._error = error

    def __call__(self) -> str:
        self.begun.set()
        try:
            assert self.released.wait(10), "nobody released the work"
            if self._error:
                raise self._error
            return "done"
        finally:
            self.ended.set()


async def begun(task: "asyncio.Task[Any]", work: Work) -> None:
    assert await asyncio.to_thread(work.begun.wait, 10)
    assert not task.done()


async def turns_of_the_loop() -> None:
    """Enough of them for all that can happen without a thread's doing."""
    for _ in range(20):
        await asyncio.sleep(0)


def is_set(stop: Stop) -> bool:
    try:
        stop.check()
    except Stopped:
        return True
    return False


@both
def test_arguments_go_in_and_the_result_comes_out(run: InThread) -> None:
    async def main() -> None:
        assert await run(pool, Stop(), int, "ff", base=16) == 255

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(main())


@both
def test_an_exception_passes_and_stops_nothing(run: InThread) -> None:
    def act() -> None:
        raise NotAudio("it is a picture")

    async def main() -> None:
        stop = Stop()
        with pytest.raises(NotAudio, match="it is a picture"):
            await run(pool, stop, act)
        assert not is_set(stop)

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(main())


@both
def test_the_event_loop_is_free_meanwhile(run: InThread) -> None:
    work = Work()

    async def main() -> None:
        asyncio.get_running_loop().call_soon(work.released.set)
        assert await run(pool, Stop(), work) == "done"

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(main())


@both
def test_work_that_has_not_begun_when_cancelled_never_begins(run: InThread) -> None:
    before, after = Work(), Work()

    async def main() -> None:
        pool.submit(before)
        task = asyncio.create_task(run(pool, stop, after))
        await turns_of_the_loop()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not before.ended.is_set(), "the cancel waited for another's work"
        before.released.set()

    stop = Stop()
    with ThreadPoolExecutor(1) as pool:
        asyncio.run(main())
    assert before.ended.is_set()
    assert not after.begun.is_set()
    assert is_set(stop)


@pytest.mark.parametrize("cancels", [1, 2, 3])
@pytest.mark.parametrize("error", [None, Stopped(), NotAudio("it is a picture")])
def test_a_cancel_sets_the_stop_and_waits_until_the_thread_has_ended(cancels: int, error: Exception | None) -> None:
    work, stop = Work(error), Stop()

    async def main() -> None:
        task = asyncio.create_task(in_thread(pool, stop, work))
        await begun(task, work)
        for _ in range(cancels):
            task.cancel()
            await turns_of_the_loop()
            assert is_set(stop)
            assert not task.done()
        work.released.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.ended.is_set()

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(main())


def test_a_time_limit_is_raised_only_after_the_thread_has_ended() -> None:
    stop = Stop()
    ended = threading.Event()

    def act() -> None:
        try:
            stop.wait(10)  # raises as soon as the time limit sets it
        finally:
            ended.set()

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(in_thread(pool, stop, act), 0.05)
        assert ended.is_set()

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(main())


def test_a_loose_thread_is_left_at_once_and_told_to_stop() -> None:
    work, stop = Work(), Stop()

    async def main() -> None:
        task = asyncio.create_task(in_loose_thread(pool, stop, work))
        await begun(task, work)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_set(stop)
        assert not work.ended.is_set()

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(main())  # the loop is closed before the thread has ended
        work.released.set()
    assert work.ended.is_set()


@both
def test_the_error_of_a_thread_that_was_left_is_not_reported(run: InThread) -> None:
    work, reports = Work(Stopped()), []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        task = asyncio.create_task(run(pool, Stop(), work))
        await begun(task, work)
        task.cancel()
        await turns_of_the_loop()
        work.released.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(work.ended.wait, 10)
        del task
        gc.collect()
        await turns_of_the_loop()

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(main())
    assert reports == []


def test_a_stop_that_is_not_set_lets_work_go_on() -> None:
    stop = Stop()
    stop.check()
    stop.wait(0)


def test_a_stop_ends_a_wait_at_once() -> None:
    stop = Stop()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stop.wait, 60)
        stop.set()
        with pytest.raises(Stopped):
            waiting.result(10)


# --- an alarm


def test_an_alarm_is_heard_by_all_who_wait_from_any_thread() -> None:
    alarm: Alarm[str] = Alarm()

    async def hear() -> str:
        with alarm.heard() as message:
            return await message

    async def run() -> list[str]:
        hearers = [asyncio.create_task(hear()) for _ in range(3)]
        await turns_of_the_loop()
        threading.Thread(target=alarm.ring, args=["fire"]).start()
        return await asyncio.gather(*hearers)

    assert asyncio.run(run()) == ["fire"] * 3


def test_all_hear_an_alarm_before_any_can_act_on_it() -> None:
    alarm: Alarm[str] = Alarm()

    async def run() -> None:
        with alarm.heard() as first, alarm.heard() as second, alarm.heard() as third:
            all_futures = (first, second, third)
            seen: list[list[bool]] = []
            for future in all_futures:
                future.add_done_callback(lambda _: seen.append([f.done() for f in all_futures]))
            ringer = threading.Thread(target=alarm.ring, args=["fire"])
            ringer.start()
            await asyncio.gather(*all_futures)
            ringer.join()
            assert seen == [[True] * 3] * 3

    asyncio.run(run())


def test_who_comes_later_hears_the_first_message_at_once_and_later_ones_do_not_count() -> None:
    alarm: Alarm[str] = Alarm()
    assert [alarm.ring("fire"), alarm.ring("flood"), alarm.has_rung] == [True, False, True]

    async def run() -> str:
        with alarm.heard() as message:
            return message.result()

    assert asyncio.run(run()) == "fire"


def test_an_alarm_rings_even_when_a_loop_of_those_who_waited_is_over() -> None:
    alarm: Alarm[str] = Alarm()
    waiting = alarm.heard()

    async def run() -> None:
        waiting.__enter__()

    asyncio.run(run())
    assert alarm.ring("fire")


def test_who_no_longer_waits_is_forgotten() -> None:
    alarm: Alarm[str] = Alarm()

    async def run() -> None:
        for _ in range(10):
            with alarm.heard():
                pass

    asyncio.run(run())
    assert not alarm._hearers


# --- waiting for an event


@pytest.mark.parametrize("seconds", [60, None])
def test_a_cancellation_that_comes_with_the_event_is_not_lost(seconds: float | None) -> None:
    async def main() -> None:
        event = asyncio.Event()
        waiting = asyncio.create_task(is_set_within(event, seconds))
        await turns_of_the_loop()
        event.set()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())


def test_an_event_is_waited_for_until_it_is_set_or_the_time_is_over() -> None:
    async def main() -> None:
        event = asyncio.Event()
        assert not await is_set_within(event, 0.001)
        asyncio.get_running_loop().call_soon(event.set)
        assert await is_set_within(event, 60)

    asyncio.run(main())
