"""What can be seen of a job while it runs, and how jobs are broken off, told with a fake engine."""

import asyncio
import gc
import threading
import time
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from fakes import FakeEngine, segment, spoken
from media import pcm, silence, wav
from served import THREADS, answer, job, service, service_in_parts, speech_for

from whisper_worker import fetch
from whisper_worker.errors import EXIT_HUNG, DownloadFailed, ShuttingDown, Unhealthy
from whisper_worker.live import Progress, Watcher
from whisper_worker.service import Service
from whisper_worker.settings import Threads
from whisper_worker.speech import Speech
from whisper_worker.stop import Stop
from whisper_worker.transcript import Said

PIECES: dict[str, Any] = {"PIECE_SECONDS": "5", "STREAM_INTERVAL_S": "0"}


def long_job(seconds: int = 32, **options: Any) -> dict[str, Any]:
    return job(wav(pcm(speech_for(seconds))), **options)


async def items_of(served: Service, asked: dict[str, Any]) -> list[dict[str, Any]]:
    async with aclosing(served.stream(asked)) as stream:
        return [item async for item in stream]


def streamed(asked: dict[str, Any], engine: FakeEngine | None = None, **env: Any) -> list[dict[str, Any]]:
    with service(engine, **{**PIECES, **env}) as served:
        return asyncio.run(items_of(served, asked))


class FirstPieceOnly:
    """Says something in the first piece that comes; the others run until they are stopped."""

    def __init__(self) -> None:
        self.segment = segment(0, 1)
        self.is_said = threading.Event()
        self.goes_on = threading.Event()
        self.stopped = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, _: Speech, stop: Stop) -> Said:
        with self._lock:
            is_first = not self.is_said.is_set()
            self.is_said.set()
        if is_first:
            return Said((self.segment,), language=spoken("en", 0.9))
        self.goes_on.set()
        try:
            while True:
                stop.wait(60)
        finally:
            self.stopped.set()


# --- a stream


def test_a_stream_has_the_same_as_the_plain_output_in_items() -> None:
    items = streamed(long_job(word_timestamps=True))
    plain = answer(long_job(word_timestamps=True), **PIECES)
    assert [items[0]["type"], *{item["type"] for item in items[1:-1]}, items[-1]["type"]] == [
        "info",
        "segments",
        "result",
    ]
    for name in ("segments", "word_timestamps"):
        assert [part for item in items[1:-1] for part in item[name]] == plain[name]
    parts = {*plain} - {"segments", "word_timestamps", "timings"}
    assert {name: items[-1][name] for name in parts} == {name: plain[name] for name in parts}
    assert set(items[0]) - {"type"} <= parts


def test_the_first_items_come_while_the_job_is_still_being_transcribed() -> None:
    act = FirstPieceOnly()

    async def run(served: Service) -> None:
        async with aclosing(served.stream(long_job(condition_on_previous_text=True))) as stream:
            assert (await anext(stream))["detected_language"] == "en"
            assert (await anext(stream))["segments"][0]["text"] == " Hello."

    with service(FakeEngine(act), **PIECES) as served:
        asyncio.run(run(served))


def test_without_speech_a_stream_tells_that_the_language_is_unknown() -> None:
    info, result = streamed(job(wav(pcm(silence(2)))))
    assert (info["type"], info["detected_language"], info["duration"]) == ("info", None, 2.0)
    assert (result["type"], result["transcription"]) == ("result", "")


def test_a_failed_stream_ends_with_an_item_for_its_reader_and_one_for_runpod() -> None:
    told, failure = streamed(job(b"hello"))
    assert told == {"type": "error", "code": "NOT_AUDIO", "message": "the file is text, not audio"}
    assert failure["error"] == "NOT_AUDIO: the file is text, not audio"


def test_a_result_too_large_for_one_reply_can_be_streamed() -> None:
    items = streamed(long_job(), MAX_INLINE_BYTES="1000")
    assert items[-1]["type"] == "result"


def test_a_slow_reader_slows_the_job_down() -> None:
    engine = FakeEngine(lambda *_: Said((segment(0, 1, " word" * 20_000),), language=spoken("en", 0.9)))

    async def run(served: Service) -> None:
        async with aclosing(served.stream(long_job(200))) as stream:
            await anext(stream)
            await asyncio.sleep(0.5)  # enough for all forty
            assert engine.pieces <= 3 + 2 * (1 + THREADS.inter * THREADS.batch)  # an item full, and those ahead
            items = [item async for item in stream]
        assert engine.pieces >= 40
        assert items[-1]["type"] == "result"

    with service(engine, **PIECES) as served:
        asyncio.run(run(served))


def test_a_cancelled_stream_has_ended_when_it_says_so() -> None:
    act = FirstPieceOnly()

    async def run(served: Service) -> None:
        reader = asyncio.create_task(items_of(served, long_job()))
        assert await asyncio.to_thread(act.goes_on.wait, 30)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert act.stopped.is_set()

    with service(FakeEngine(act), **PIECES) as served:
        asyncio.run(run(served))


def test_a_stream_that_is_cancelled_twice_has_ended_when_it_says_so() -> None:
    entered, released = threading.Event(), threading.Event()

    async def run(served: Service) -> None:
        reader = asyncio.create_task(items_of(served, job()))
        assert await asyncio.to_thread(entered.wait, 30)
        for _ in range(3):
            reader.cancel()
            await asyncio.sleep(0.02)
        assert not reader.done()
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert not served.is_winding_up

    with service(stubborn(entered, released)) as served:
        asyncio.run(run(served))


# --- progress


class Notes(Watcher):
    def __init__(self) -> None:
        self.all: list[Progress] = []

    def progress(self, progress: Progress) -> None:
        self.all.append(progress)


def test_progress_goes_from_stage_to_stage_and_never_back() -> None:
    notes = Notes()
    with service(**PIECES) as served:
        asyncio.run(served.run(long_job(), notes))
    assert list(dict.fromkeys(note.stage for note in notes.all)) == ["download", "decode", "transcribe"]
    done = [note.seconds_done for note in notes.all]
    assert done == sorted(done)
    assert (done[0], notes.all[0].seconds_total) == (0, None)
    assert (done[-1], notes.all[-1].fraction) == (32, 1)
    assert notes.all[-1].text_tail.endswith("Hello. Hello.")
    assert len(set(done)) >= 7


# --- broken off


def test_a_job_over_its_time_tells_what_was_done() -> None:
    output = answer(long_job(timeout_s=1, condition_on_previous_text=True), FakeEngine(FirstPieceOnly()), **PIECES)
    assert output["error"] == "TIMEOUT: the job took longer than 1 s"
    partial = output["partial"]
    assert [part["text"] for part in partial["segments"]] == [" Hello."]
    assert (partial["transcription"], partial["detected_language"]) == ("Hello.", "en")
    assert 2.5 <= partial["seconds_done"] <= 5
    assert partial["seconds_total"] == 32


@pytest.mark.parametrize(("asked", "allowed"), [(0.5, "60"), (60, "0.5")])
def test_the_stricter_of_two_times_counts(asked: float, allowed: str) -> None:
    act = FirstPieceOnly()
    act.is_said.set()
    output = answer(job(timeout_s=asked), FakeEngine(act), JOB_TIMEOUT_S=allowed)
    assert output["error"] == "TIMEOUT: the job took longer than 0.5 s"
    assert output["partial"]["segments"] == []
    assert act.stopped.is_set()


def test_what_a_broken_off_job_has_done_is_left_out_where_it_does_not_fit() -> None:
    asked = long_job(timeout_s=1, condition_on_previous_text=True)
    output = answer(asked, FakeEngine(FirstPieceOnly()), **PIECES, MAX_INLINE_BYTES="100")
    assert output == {"error": "TIMEOUT: the job took longer than 1 s"}


def test_jobs_are_ended_with_what_they_have_done_and_later_ones_never_start() -> None:
    act = FirstPieceOnly()
    engine = FakeEngine(act)

    async def run(served: Service) -> None:
        running = asyncio.create_task(served.run(long_job(condition_on_previous_text=True)))
        assert await asyncio.to_thread(act.goes_on.wait, 30)
        served.end_jobs(ShuttingDown("too late"))
        ended = await running
        assert ended["error"] == "SHUTTING_DOWN: too late"
        assert len(ended["partial"]["segments"]) == 1
        assert act.stopped.is_set()
        assert await served.run(job()) == {"error": "SHUTTING_DOWN: too late"}

    with service(engine, **PIECES) as served:
        asyncio.run(run(served))
    assert engine.pieces == 2


class Download:
    """In place of `fetch.download`: ends when it is told to, with `error` if there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        monkeypatch.setattr(fetch, "download", self)
        self.has_begun = threading.Event()
        self._may_end = threading.Event()
        self._error = error

    def __call__(self, *_: object) -> None:
        self.has_begun.set()
        assert self._may_end.wait(30)
        if self._error:
            raise self._error

    def end_within_this_turn(self) -> None:
        """The event loop can't know of it yet: it stands still meanwhile."""
        self._may_end.set()
        time.sleep(0.1)


URL_JOB = {"id": "job", "input": {"audio": "https://files.test/talk.mp3"}}


def test_a_cancellation_that_comes_when_the_download_ends_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, notes, download = FakeEngine(), Notes(), Download(monkeypatch)

    async def run(served: Service) -> None:
        running = asyncio.create_task(served.run(URL_JOB, notes))
        assert await asyncio.to_thread(download.has_begun.wait, 30)
        download.end_within_this_turn()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with service(engine) as served:
        asyncio.run(run(served))
    assert {note.stage for note in notes.all} == {"download"}
    assert engine.pieces == 0


@pytest.mark.parametrize("turns", range(6))
def test_a_cancellation_that_comes_when_the_download_fails_leaves_no_complaint_of_asyncio(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, turns: int
) -> None:
    download = Download(monkeypatch, DownloadFailed("the server is gone"))

    async def run(served: Service) -> None:
        running = asyncio.create_task(served.run(URL_JOB))
        assert await asyncio.to_thread(download.has_begun.wait, 30)
        download.end_within_this_turn()
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])

    with service() as served:
        asyncio.run(run(served))
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_when_the_model_hangs_jobs_are_answered_though_their_threads_never_end() -> None:
    entered, released = threading.Event(), threading.Event()

    def act(speech: Speech, stop: Stop) -> Said:
        entered.set()
        assert released.wait(30)
        return Said()

    async def run() -> None:
        with service_in_parts(FakeEngine(act)) as (served, health, _):
            running = [asyncio.create_task(served.run(job())) for _ in range(2)]
            cancelled = asyncio.create_task(served.run(job()))
            assert await asyncio.to_thread(entered.wait, 30)
            cancelled.cancel()
            health.give_up(Unhealthy("it hangs", EXIT_HUNG))
            outputs = await asyncio.gather(*running)
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert [(o["error"], o["refresh_worker"]) for o in outputs] == [("WORKER_UNHEALTHY: it hangs", True)] * 2
            released.set()

    asyncio.run(run())


# --- a deaf model


class Deaf:
    """Hears nothing while `is_deaf`, until the weights have been read again `cured_by` times."""

    def __init__(self, cured_by: int) -> None:
        self.engine = FakeEngine(self)
        self.is_deaf = False
        self._cured_by = cured_by

    def __call__(self, *_: object) -> Said:
        if self.is_deaf and self.engine.reloads < self._cured_by:
            return Said(language=spoken("en", 0.5))
        return Said((segment(0, 1),), language=spoken("en", 0.9))


def heard_by(deaf: Deaf, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        return await asyncio.gather(*map(served.run, jobs))

    with service_in_parts(deaf.engine) as (served, _, model):
        model.canary.warm_up()
        deaf.is_deaf = True
        return asyncio.run(run())


def test_jobs_that_a_deaf_model_heard_nothing_in_are_transcribed_again_by_a_new_one() -> None:
    deaf = Deaf(cured_by=1)
    assert [output["transcription"] for output in heard_by(deaf, job(), job(), job())] == ["Hello."] * 3
    assert deaf.engine.reloads == 1


def test_progress_does_not_go_back_when_a_job_is_transcribed_again() -> None:
    deaf, notes = Deaf(cured_by=1), Notes()
    with service_in_parts(deaf.engine, **PIECES) as (served, _, model):
        model.canary.warm_up()
        deaf.is_deaf = True
        asyncio.run(served.run(long_job(), notes))
    done = [note.seconds_done for note in notes.all]
    assert done == sorted(done)
    assert deaf.engine.reloads == 1


def test_a_model_that_stays_deaf_is_given_up() -> None:
    deaf = Deaf(cured_by=2)
    assert [output["error"][:16] for output in heard_by(deaf, job(), job())] == ["WORKER_UNHEALTHY"] * 2
    assert deaf.engine.reloads == 1


def test_where_nobody_speaks_the_model_is_not_suspected() -> None:
    deaf = Deaf(cured_by=1)
    assert heard_by(deaf, job(wav(pcm(silence(3)))))[0]["transcription"] == ""
    assert deaf.engine.reloads == 0


# --- threads that don't end


def stubborn(entered: threading.Event, released: threading.Event) -> FakeEngine:
    """Its piece reads no stop."""

    def act(speech: Speech, stop: Stop) -> Said:
        entered.set()
        assert released.wait(30)
        return Said()

    return FakeEngine(act)


def test_a_job_over_its_time_is_answered_though_a_thread_goes_on_and_keeps_its_place_until_that_ends() -> None:
    entered, released = threading.Event(), threading.Event()
    engine = stubborn(entered, released)

    async def run(served: Service) -> None:
        assert (await served.run(job(timeout_s=0.5)))["error"] == "TIMEOUT: the job took longer than 0.5 s"
        assert served.is_winding_up
        second = asyncio.create_task(served.run(job()))
        await asyncio.sleep(0.2)
        assert engine.pieces == 1  # there is one place only
        released.set()
        assert "error" not in await second
        assert not served.is_winding_up

    with service(engine, Threads(inter=1, intra=1, batch=1, jobs=1, media=1)) as served:
        asyncio.run(run(served))


def test_a_thread_that_never_ends_makes_the_worker_unhealthy() -> None:
    entered, released = threading.Event(), threading.Event()

    async def run() -> None:
        with service_in_parts(stubborn(entered, released), WINDOW_TIMEOUT_S="0.3") as (served, health, _):
            cancelled = asyncio.create_task(served.run(job()))
            assert await asyncio.to_thread(entered.wait, 30)
            cancelled.cancel()
            with health.alarm.heard() as alarm:
                assert (await alarm).exit_code == EXIT_HUNG
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            released.set()

    asyncio.run(run())


def test_a_score_that_is_no_number_does_not_take_the_answer_of_a_broken_off_job_with_it() -> None:
    act = FirstPieceOnly()
    act.segment = replace(segment(0, 1), avg_logprob=float("nan"))
    output = answer(long_job(timeout_s=1, condition_on_previous_text=True), FakeEngine(act), **PIECES)
    assert output == {"error": "TIMEOUT: the job took longer than 1 s"}
