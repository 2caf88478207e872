"""How what comes of a job becomes items, and what is told of its progress."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from fakes import segment

from whisper_worker.live import Item, Outbox, Progress
from whisper_worker.transcript import Segment

NEVER_S = 3600.0  # an interval that isn't waited for


def run(act: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(act, 10))


def outbox(interval_s: float = 0, max_bytes: int = 1000) -> Outbox:
    """Its items hold the texts, and have as many bytes."""
    return Outbox(interval_s, _item, lambda item: sum(map(len, item["texts"])), max_bytes)


def _item(segments: Sequence[Segment], audio: int | None) -> Item:
    return {"texts": [segment.text for segment in segments]} | ({} if audio is None else {"audio": audio})


def said(*texts: str) -> list[Segment]:
    return [segment(0, 1, text) for text in texts]


async def turns_of_the_loop() -> None:
    """Enough of them for all that can happen without time going by."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_an_item_is_there_as_soon_as_there_is_something_for_it() -> None:
    async def act() -> None:
        box = outbox(NEVER_S)
        async with aclosing(box.items()) as items:
            first = asyncio.ensure_future(anext(items))
            await turns_of_the_loop()
            assert not first.done()
            await box.segments(said("a"))
            assert await first == {"texts": ["a"]}

    run(act())


def test_the_next_item_waits_for_the_interval_and_takes_what_comes_meanwhile() -> None:
    async def act() -> None:
        box = outbox(NEVER_S)
        async with aclosing(box.items()) as items:
            await box.segments(said("a"))
            await anext(items)
            second = asyncio.ensure_future(anext(items))
            await box.segments(said("b"))
            await box.segments(said("c"))
            await turns_of_the_loop()
            assert not second.done()
            box.close()
            assert await second == {"texts": ["b", "c"]}

    run(act())


def test_the_next_item_comes_by_itself_when_the_interval_is_over() -> None:
    async def act() -> None:
        box = outbox(0.01)
        async with aclosing(box.items()) as items:
            await box.segments(said("a"))
            await anext(items)
            await box.segments(said("b"))
            assert await anext(items) == {"texts": ["b"]}

    run(act())


@pytest.mark.parametrize(
    ("texts", "packs"),
    [
        (["aaa", "bbb", "ccc", "ddd"], [["aaa", "bbb"], ["ccc", "ddd"]]),
        (["aaa", "bbbbbb", "ccc"], [["aaa"], ["bbbbbb"], ["ccc"]]),
        (["aaa", "bbbbb"], [["aaa", "bbbbb"]]),
        (["aaaaaaaaaa", "b"], [["aaaaaaaaaa"], ["b"]]),
        (["a", "bbbbbbbbbb"], [["a"], ["bbbbbbbbbb"]]),
    ],
    ids=["as many as fit", "in order", "to the last byte", "a large one alone", "a large one behind another"],
)
def test_an_item_has_no_more_bytes_than_it_may_but_one_segment_at_least(
    texts: list[str], packs: list[list[str]]
) -> None:
    async def act() -> None:
        box = outbox(max_bytes=8)
        job = asyncio.create_task(box.segments(said(*texts)))
        job.add_done_callback(lambda _: box.close())
        async with aclosing(box.items()) as items:
            assert [item["texts"] async for item in items] == packs

    run(act())


def test_the_job_waits_while_a_whole_item_does() -> None:
    async def act() -> None:
        box = outbox(max_bytes=8)
        await box.segments(said("aaaa"))
        job = asyncio.create_task(box.segments(said("bbbb", "c")))
        await turns_of_the_loop()
        assert not job.done()
        async with aclosing(box.items()) as items:
            assert await anext(items) == {"texts": ["aaaa", "bbbb"]}
            await job

    run(act())


def test_closed_it_gives_the_rest_without_delay_and_ends() -> None:
    async def act() -> None:
        box = outbox(NEVER_S, max_bytes=8)
        async with aclosing(box.items()) as items:
            await box.segments(said("aaa"))
            await anext(items)
            job = asyncio.create_task(box.segments(said("bbbbbb", "cccccc")))
            await turns_of_the_loop()
            box.close()
            assert [item["texts"] async for item in items] == [["bbbbbb"], ["cccccc"]]
            await job

    run(act())


def test_closed_without_anything_it_ends_without_an_item() -> None:
    async def act() -> None:
        box = outbox(NEVER_S)
        async with aclosing(box.items()) as items:
            rest = asyncio.ensure_future(anext(items, None))
            await turns_of_the_loop()
            box.close()
            assert await rest is None

    run(act())


def test_what_is_known_of_the_audio_comes_before_its_segments() -> None:
    async def act() -> None:
        box = outbox(NEVER_S)
        await box.segments(said("a"))
        box.info({"type": "info"})
        box.close()
        async with aclosing(box.items()) as items:
            assert [item async for item in items] == [{"type": "info"}, {"texts": ["a"]}]

    run(act())


def test_what_is_known_of_the_audio_comes_at_once_and_delays_no_segment() -> None:
    async def act() -> None:
        box = outbox(NEVER_S)
        async with aclosing(box.items()) as items:
            first = asyncio.ensure_future(anext(items))
            box.info({"type": "info"})
            assert await first == {"type": "info"}
            await box.segments(said("a"))
            assert await anext(items) == {"texts": ["a"]}

    run(act())


@pytest.mark.parametrize(
    ("progress", "fraction"),
    [
        (Progress("download"), 0.0),
        (Progress("transcribe", 0.0, 0.0), 0.0),
        (Progress("transcribe", 15.0, 60.0), 0.25),
        (Progress("transcribe", 60.001, 60.0), 1.0),
    ],
    ids=["unknown length", "no length", "a quarter", "past the end"],
)
def test_progress_is_a_fraction_of_the_audio(progress: Progress, fraction: float) -> None:
    assert progress.fraction == fraction


def test_a_report_has_the_progress_as_status_shows_it() -> None:
    assert Progress("transcribe", 20.00049, 60.0, "and then").report() == {
        "progress": 0.333,
        "stage": "transcribe",
        "seconds_done": 20.0,
        "seconds_total": 60.0,
        "text_tail": "and then",
    }


def test_a_report_says_of_an_unknown_length_that_it_is_unknown() -> None:
    assert Progress("download").report() == {
        "progress": 0.0,
        "stage": "download",
        "seconds_done": 0.0,
        "seconds_total": None,
        "text_tail": "",
    }
