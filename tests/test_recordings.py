"""Jobs of several files, of channels apart, of parts of files, for a language alone: with a fake engine, real audio."""

import asyncio
import base64
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine, segment, spoken
from file_server import Answer, Exchange, FileServer, answer, if_authorized
from media import RATE, encode, pcm, silence, speech, wav
from served import SPEECH, job, service, speech_for
from served import answer as answer_of
from served import error as error_of

from whisper_worker import speech as speech_room
from whisper_worker.errors import OutOfMemory, ShuttingDown
from whisper_worker.live import Progress, Watcher
from whisper_worker.recordings import FILES_AT_ONCE
from whisper_worker.service import Service
from whisper_worker.settings import Threads
from whisper_worker.speech import Speech
from whisper_worker.stop import Stop
from whisper_worker.transcript import Said

BASE64 = base64.b64encode(SPEECH).decode()
MP3 = encode("mp3", "libmp3lame", [speech()])


@pytest.fixture
def _private_addresses_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS", "true")


def several(*audios: Any, **options: Any) -> dict[str, Any]:
    return {"id": "job", "input": {"audios": list(audios), **options}}


def inline(file: bytes) -> dict[str, str]:
    return {"audio_base64": base64.b64encode(file).decode()}


class Told:
    """Says of each piece how many seconds it has."""

    def __call__(self, heard: Speech, _: Stop) -> Said:
        return Said((segment(0, 1, f" {round(len(heard.samples) / RATE)}"),), language=spoken("en"))


# --- several files


def test_each_of_several_files_has_its_own_result_or_error_in_their_order() -> None:
    output = answer_of(several(inline(SPEECH), inline(b"hello"), "data:audio/ogg;base64," + BASE64))
    assert [result.get("transcription") for result in output["results"]] == ["Hello.", None, "Hello."]
    assert output["results"][1] == {"error": "NOT_AUDIO: the file is text, not audio"}
    assert output["duration"] == pytest.approx(2 * 4.22)
    assert (output["model"], output["device"], output["warnings"]) == ("fake", "cpu", [])
    assert set(output["timings"]) == {"download", "decode", "queue", "inference", "upload", "total"}


def test_one_file_in_a_list_gives_a_list() -> None:
    assert len(answer_of(several(inline(SPEECH)))["results"]) == 1


def test_a_list_of_failures_is_no_failed_job() -> None:
    results = answer_of(several(inline(b"hello"), inline(b"<html>")))["results"]
    assert [result["error"][:10] for result in results] == ["NOT_AUDIO:"] * 2


class Gathering:
    """Answers when all that it waits for have asked."""

    def __init__(self, count: int, body: bytes) -> None:
        self._barrier = threading.Barrier(count)
        self._answer = answer(200, body)

    def __call__(self, exchange: Exchange) -> None:
        self._barrier.wait(30)
        self._answer(exchange)


@pytest.mark.usefixtures("_private_addresses_are_allowed")
def test_files_of_one_job_are_fetched_at_the_same_time() -> None:
    count = FILES_AT_ONCE
    together: Answer = Gathering(count, SPEECH)
    with FileServer({f"/{n}": together for n in range(count)}) as files:
        output = answer_of(several(*(files.url(f"/{n}") for n in range(count))))
    assert [result["transcription"] for result in output["results"]] == ["Hello."] * count


@pytest.mark.usefixtures("_private_addresses_are_allowed")
def test_stalled_downloads_of_many_jobs_with_many_files_hold_up_no_other() -> None:
    threads = Threads(inter=1, intra=1, batch=1, jobs=12, media=1)

    async def run(served: Service, files: FileServer) -> dict[str, Any]:
        stalled = [files.url("/stall")] * FILES_AT_ONCE
        hanging = [asyncio.create_task(served.run(several(*stalled))) for _ in range(threads.jobs - 1)]
        await asyncio.to_thread(files.wait_for_request, "/stall", len(hanging) * FILES_AT_ONCE)
        output = await served.run({"id": "other", "input": {"audio": files.url("/good")}})
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        return output

    with FileServer({"/good": answer(200, SPEECH)}) as files, service(threads=threads) as served:
        assert asyncio.run(asyncio.wait_for(run(served, files), 60))["transcription"] == "Hello."


def test_speech_is_looked_for_in_short_files_while_it_is_in_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one thread for it, and it takes turns."""
    monkeypatch.setattr(speech_room, "BLOCKS_AT_ONCE", 1)
    begun, known = threading.Event(), threading.Event()
    steps: list[int] = []
    real = speech_room.Listener.go_on

    def noted(self: speech_room.Listener, stop: Stop) -> None:
        steps.append(len(self._samples))
        begun.set()
        assert known.wait(30)
        real(self, stop)

    monkeypatch.setattr(speech_room.Listener, "go_on", noted)

    async def run(served: Service) -> None:
        long = asyncio.create_task(served.run(job(wav(pcm(silence(80))))))
        assert await asyncio.to_thread(begun.wait, 30)
        short = asyncio.create_task(served.run(job(wav(pcm(silence(2))))))
        await asyncio.sleep(0.1)  # in which it gets in line
        known.set()
        await asyncio.gather(long, short)

    with service(threads=Threads(inter=1, intra=1, batch=1, jobs=2, media=1)) as served:
        asyncio.run(run(served))
    assert steps.index(2 * RATE) < 5
    assert steps.count(80 * RATE) == 10


@pytest.mark.usefixtures("_private_addresses_are_allowed")
def test_each_file_is_fetched_with_its_own_headers_or_the_jobs() -> None:
    routes = {"/a": if_authorized("one", answer(200, SPEECH)), "/b": if_authorized("two", answer(200, SPEECH))}
    with FileServer(routes) as files:
        output = answer_of(
            several(
                files.url("/a"),
                {"audio": files.url("/b"), "audio_headers": {"Authorization": "Bearer two"}},
                {"audio": files.url("/b")},
                audio_headers={"authorization": "Bearer one"},
            )
        )
    assert [result.get("transcription") for result in output["results"]] == ["Hello.", "Hello.", None]
    assert output["results"][2]["error"].endswith("the server answered HTTP 401")


def test_a_file_that_fails_in_the_model_leaves_the_others_alone() -> None:
    waiting, failed = threading.Event(), threading.Event()

    def act(heard: Speech, stop: Stop) -> Said:
        if len(heard.samples) < 3 * RATE:
            assert waiting.wait(30)
            failed.set()
            raise OutOfMemory("none left")
        waiting.set()
        assert failed.wait(30)
        stop.wait(0.1)  # in which the other one's end would reach this one
        return Said((segment(0, 1),), language=spoken("en"))

    output = answer_of(several(inline(wav(pcm(speech_for(2)))), inline(SPEECH)), FakeEngine(act))
    assert output["results"][0]["error"] == "OUT_OF_MEMORY: none left"
    assert output["results"][0]["partial"]["segments"] == []
    assert output["results"][1]["transcription"] == "Hello."


def test_a_file_that_is_given_up_midway_tells_what_was_done_of_it() -> None:
    calls = iter(range(10))

    def act(*_: object) -> Said:
        if next(calls):
            raise OutOfMemory("none left")
        return Said((segment(0, 1),), language=spoken("en"))

    one = several(inline(wav(pcm(speech_for(12)))), condition_on_previous_text=True)
    [result] = answer_of(one, FakeEngine(act), PIECE_SECONDS="5")["results"]
    assert result["error"] == "OUT_OF_MEMORY: none left"
    assert result["partial"]["transcription"] == "Hello."


def test_what_was_done_of_a_file_gives_way_too_when_the_reply_is_too_large() -> None:
    calls = iter(range(10))

    def act(*_: object) -> Said:
        if next(calls):
            raise OutOfMemory("none left")
        return Said((replace(segment(0, 1), tokens=tuple(range(1000))),), language=spoken("en"))

    one = several(inline(wav(pcm(speech_for(12)))), condition_on_previous_text=True)
    output = answer_of(one, FakeEngine(act), PIECE_SECONDS="5", MAX_INLINE_BYTES="3000")
    assert output["results"][0]["partial"]["segments"][0]["tokens"] == []
    assert "left out" in output["warnings"][0]


def test_files_together_are_no_longer_than_one_may_be() -> None:
    results = answer_of(several(*[inline(SPEECH)] * 3), MAX_AUDIO_S="10")["results"]
    assert sorted(result.get("error", "")[:9] for result in results) == ["", "", "TOO_LONG:"]


def test_there_may_be_only_so_many_files() -> None:
    assert error_of(several(*[inline(SPEECH)] * 3), MAX_AUDIOS="2") == "BAD_INPUT: audios: has 3 files, 2 are allowed"


def test_a_job_of_several_files_that_is_broken_off_tells_what_was_done_of_each() -> None:
    begun = threading.Event()

    def act(heard: Speech, stop: Stop) -> Said:
        if len(heard.samples) < 3 * RATE:
            return Said((segment(0, 1),), language=spoken("en"))
        begun.set()
        stop.wait(60)
        raise AssertionError

    async def run(served: Service) -> dict[str, Any]:
        task = asyncio.create_task(served.run(several(inline(wav(pcm(speech_for(2)))), inline(SPEECH), inline(b"x"))))
        assert await asyncio.to_thread(begun.wait, 30)
        served.end_jobs(ShuttingDown("it ends"))
        return await task

    with service(FakeEngine(act)) as served:
        output = asyncio.run(run(served))
    assert output["error"] == "SHUTTING_DOWN: it ends"
    first, second, third = output["partial"]["results"]
    assert (first["transcription"], first["duration"]) == ("Hello.", 2.0)  # it was done
    assert second["segments"] == []
    assert third == {"error": "NOT_AUDIO: the file is text, not audio"}


def test_a_cancelled_job_of_several_files_has_ended_when_it_says_so() -> None:
    begun = threading.Semaphore(0)
    running: list[int] = []

    def act(heard: Speech, stop: Stop) -> Said:
        running.append(1)
        begun.release()
        try:
            stop.wait(60)
        finally:
            running.pop()
        raise AssertionError

    async def run(served: Service) -> None:
        task = asyncio.create_task(served.run(several(*[inline(SPEECH)] * 3)))
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not running

    with service(FakeEngine(act)) as served:
        asyncio.run(run(served))


def test_files_of_one_job_are_transcribed_side_by_side_but_leave_others_their_thread() -> None:
    """The job has its own thread and the extra ones; another job's thread isn't one of those."""
    inside, most, together = 0, 0, threading.Condition()

    def act(heard: Speech, stop: Stop) -> Said:
        nonlocal inside, most
        with together:
            inside += 1
            most = max(most, inside)
            together.notify_all()
            together.wait_for(lambda: most >= 3, timeout=20)
            inside -= 1
        return Said((segment(0, 1),), language=spoken("en"))

    answer_of(several(*[inline(SPEECH)] * 8), FakeEngine(act))
    assert most == 3  # one, and inter_threads × batch_size


class Notes(Watcher):
    def __init__(self) -> None:
        self.all: list[Progress] = []

    def progress(self, progress: Progress) -> None:
        self.all.append(progress)


def test_the_progress_of_several_files_is_that_of_all_and_never_goes_back() -> None:
    notes = Notes()
    with service() as served:
        asyncio.run(served.run(several(inline(SPEECH), inline(b"x"), inline(SPEECH)), notes))
    done = [note.seconds_done for note in notes.all]
    assert done == sorted(done)
    stages = [("download", "decode", "transcribe").index(note.stage) for note in notes.all]
    assert stages == sorted(stages)
    assert notes.all[-1].seconds_total == notes.all[-1].seconds_done == pytest.approx(8.44, abs=0.01)


def test_a_stream_of_several_files_says_of_each_item_whose_it_is() -> None:
    async def run(served: Service) -> list[dict[str, Any]]:
        async with aclosing(served.stream(several(inline(SPEECH), inline(b"x"), inline(SPEECH)))) as stream:
            return [item async for item in stream]

    with service(STREAM_INTERVAL_S="0") as served:
        *items, result = asyncio.run(run(served))
    assert sorted((item["type"], item["audio"]) for item in items) == [
        ("info", 0),
        ("info", 2),
        ("segments", 0),
        ("segments", 2),
    ]
    for audio in (0, 2):
        assert [item["type"] for item in items if item["audio"] == audio] == ["info", "segments"]
    assert result["type"] == "result"
    assert [set(each) & {"segments", "error", "transcription"} for each in result["results"]] == [
        {"transcription"},
        {"error"},
        {"transcription"},
    ]


def test_what_there_is_too_little_memory_for_goes_at_once() -> None:
    """Not when Python next looks for what knows itself: the caller is told to try again."""
    kept: list[weakref.ref[Any]] = []

    class Full(FakeEngine):
        def walk(self, tracks: Any, request: Any, stop: Stop) -> Any:
            kept.extend(weakref.ref(track.samples) for track in tracks)
            return super().walk(tracks, request, stop)

    def act(*_: object) -> Said:
        raise OutOfMemory("none left")

    async def run(served: Service) -> list[bool]:
        outputs = await asyncio.gather(served.run(job()), served.run(several(inline(SPEECH))))
        assert "OUT_OF_MEMORY" in str(outputs[0]["error"]) + str(outputs[1]["results"])
        return [samples() is None for samples in kept]

    gc.collect()
    gc.disable()
    try:
        with service(Full(act)) as served:
            assert asyncio.run(run(served)) == [True, True]
    finally:
        gc.enable()


# --- channels


def stereo(left: Any, right: Any) -> bytes:
    length = max(len(left), len(right))
    sides = [np.pad(side, (0, length - len(side))) for side in (left, right)]
    return wav(pcm(np.stack(sides, axis=1)))


CALL = stereo(
    np.concatenate([speech(), silence(6), speech()]),
    np.concatenate([silence(5), speech(), silence(6)]),
)


def test_channels_apart_are_merged_by_time() -> None:
    output = answer_of(job(CALL, channels="split", formats=["srt"]), PIECE_SECONDS="6")
    assert [(s["channel"], s["id"]) for s in output["segments"]] == [(0, 1), (1, 2), (0, 3)]
    starts = [s["start"] for s in output["segments"]]
    assert starts == sorted(starts)
    assert starts[0] < 1
    assert 4 < starts[1] < 6
    assert 9 < starts[2] < 11
    assert "Channel 1: Hello." in output["outputs"]["srt"]
    assert output["warnings"] == []


def test_one_channel_is_heard_alone() -> None:
    output = answer_of(job(CALL, channels=1))
    [only] = output["segments"]
    assert 4 < only["start"] < 6
    assert "channel" not in only


@pytest.mark.parametrize("channels", [2, 255])
def test_a_channel_that_is_not_there_is_refused(channels: int) -> None:
    assert error_of(job(CALL, channels=channels)).startswith("BAD_INPUT: channels: the audio has 2 channels")


def test_one_channel_apart_is_channel_0_with_a_warning() -> None:
    output = answer_of(job(channels="split"))
    assert output["segments"][0]["channel"] == 0
    assert len(output["warnings"]) == 1


def test_words_of_channels_apart_are_in_the_order_of_time_and_say_whose_they_are() -> None:
    output = answer_of(job(CALL, channels="split", word_timestamps=True), PIECE_SECONDS="6")
    words = output["word_timestamps"]
    assert [word["channel"] for word in words] == [0, 1, 0]
    assert [word["start"] for word in words] == sorted(word["start"] for word in words)


def test_channels_are_streamed_in_the_order_of_time() -> None:
    async def run(served: Service) -> list[dict[str, Any]]:
        async with aclosing(served.stream(job(CALL, channels="split"))) as stream:
            return [item async for item in stream]

    with service(STREAM_INTERVAL_S="0", PIECE_SECONDS="6") as served:
        items = asyncio.run(run(served))
    segments = [s for item in items if item["type"] == "segments" for s in item["segments"]]
    assert [s["id"] for s in segments] == [1, 2, 3]
    assert [s["channel"] for s in segments] == [0, 1, 0]


# --- parts of a file


def test_a_clip_is_all_that_is_read_and_has_the_files_times() -> None:
    file = wav(pcm(np.concatenate([silence(20), speech(), silence(20)])))
    output = answer_of(job(file, clip={"start": 18, "end": 26}, word_timestamps=True))
    assert output["duration"] == 8
    [only] = output["segments"]
    assert 19 < only["start"] < 21
    assert only["words"][0]["start"] == pytest.approx(only["start"] + 0.1)
    assert output["word_timestamps"][0]["start"] == only["words"][0]["start"]


def test_a_clip_that_reaches_behind_the_end_says_so() -> None:
    assert answer_of(job(clip={"start": 1, "end": 60}))["warnings"] == ["the clip ends at 60 s, but the audio at 4.2 s"]
    assert answer_of(job(clip={"start": 1, "end": 4}))["warnings"] == []


def test_a_clip_behind_the_end_is_refused_with_the_length() -> None:
    assert error_of(job(clip={"start": 60})).startswith("BAD_INPUT: clip: the audio ends at 4.")


def test_a_clip_of_a_file_that_is_too_long_is_allowed() -> None:
    assert answer_of(job(wav(pcm(speech_for(60))), clip={"end": 5}), MAX_AUDIO_S="10")["duration"] == 5


# --- a language alone


class Undecided(FakeEngine):
    """Is sure of the language once it has heard so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.heard: list[float] = []
        self._seconds = seconds

    def walk(self, tracks: Any, request: Any, stop: Stop) -> Any:
        walk = super().walk(tracks, request, stop)
        self.heard.append(sum(track.speech_s for track in tracks))
        is_sure = self.heard[-1] > self._seconds
        language = replace(spoken("nl", 0.9 if is_sure else 0.5), is_sure=is_sure)
        walk.detect = lambda: language  # type: ignore[method-assign]
        return walk


LONG = encode("ogg", "libopus", [speech_for(200)])


def test_a_language_is_detected_without_text() -> None:
    engine = Undecided(0)
    output = answer_of(job(task="detect_language"), engine)
    assert engine.pieces == 0
    assert {key: value for key, value in output.items() if key != "timings"} == {
        "detected_language": "nl",
        "language_probability": 0.9,
        "language_probabilities": {"nl": 0.9},
        "device": "cpu",
        "model": "fake",
        "duration": 4.22,
        "duration_after_vad": 4.22,
        "warnings": [],
    }


@pytest.mark.parametrize(("seconds", "read"), [(0, [60]), (80, [60, 120]), (1000, [60, 120, 200])])
def test_no_more_is_read_than_a_language_needs(seconds: float, read: list[float]) -> None:
    engine = Undecided(seconds)
    output = answer_of(job(LONG, task="detect_language"), engine)
    assert output["duration"] == pytest.approx(read[-1], abs=0.1)
    assert len(engine.heard) == len(read)
    assert output["warnings"] == []


def test_no_more_is_read_for_a_language_than_audio_may_be_long() -> None:
    engine = Undecided(1000)
    assert answer_of(job(LONG, task="detect_language"), engine, MAX_AUDIO_S="100")["duration"] == 100
    assert len(engine.heard) == 2


def test_channels_are_mixed_where_only_the_language_is_wanted() -> None:
    output = answer_of(job(CALL, task="detect_language", channels="split"))
    assert output["duration_after_vad"] <= output["duration"]


def test_the_time_that_detection_takes_is_told() -> None:
    timings = answer_of(job(task="detect_language"))["timings"]
    assert timings["inference"] > 0 or timings["total"] < 1  # the fake one takes no time


def test_a_clip_is_all_that_its_language_is_looked_for_in() -> None:
    engine = Undecided(1000)
    assert answer_of(job(LONG, task="detect_language", clip={"start": 10, "end": 80}), engine)["duration"] == 70
    assert len(engine.heard) == 2


def test_where_nobody_speaks_there_is_no_language() -> None:
    output = answer_of(job(wav(pcm(silence(3))), task="detect_language"))
    assert output["detected_language"] is output["language_probability"] is None
    assert output["language_probabilities"] == {}


# --- what becomes of what was asked


@pytest.mark.parametrize(
    ("options", "remark"),
    [
        ({"max_line_width": 40}, "only the formats srt and vtt use max_line_width"),
        ({"task": "detect_language", "word_timestamps": True}, "detect_language doesn't use word_timestamps"),
        ({"translation": "srt"}, "there is no translation: its format has no effect"),
    ],
)
def test_what_has_no_effect_is_told_in_warnings(options: dict[str, Any], remark: str) -> None:
    assert remark in " ".join(answer_of(job(**options))["warnings"])


def test_pieces_that_may_change_their_language_are_short() -> None:
    file = wav(pcm(speech_for(28)))
    changing = answer_of(job(file, multilingual=True), FakeEngine(Told()))
    assert all(int(s["text"]) <= 12 for s in changing["segments"])
    assert len(answer_of(job(file, multilingual=True), FakeEngine(Told(), english_only=True))["segments"]) == 1


def test_a_wish_for_longer_pieces_than_there_are_is_told_to_have_no_effect() -> None:
    wish: dict[str, Any] = {"vad_parameters": {"max_speech_duration_s": 20}}
    assert answer_of(job(**wish))["warnings"] == []
    [told] = answer_of(job(**wish, multilingual=True))["warnings"]
    assert told == "pieces have at most 12 s here: max_speech_duration_s has no effect"


def test_pieces_are_no_longer_than_the_caller_wants_speech_to_be() -> None:
    file = wav(pcm(speech_for(28)))
    assert len(answer_of(job(file), FakeEngine(Told()))["segments"]) == 1
    shorter = answer_of(job(file, vad_parameters={"max_speech_duration_s": 10}), FakeEngine(Told()))
    assert all(int(s["text"]) <= 10 for s in shorter["segments"])
    assert len(shorter["segments"]) >= 3


def test_more_formats_come_beside_the_official_fields() -> None:
    output = answer_of(job(formats=["vtt", "json"], translate=True, word_timestamps=True))
    assert output["transcription"] == "Hello."
    assert output["outputs"]["vtt"].startswith("WEBVTT")
    assert output["outputs"]["json"]["segments"][0]["words"][0]["word"] == " Hello."
    assert "Translated." in output["translation_outputs"]["vtt"]


def test_the_translation_alone_is_the_text() -> None:
    output = answer_of(job(task="translate", translation="srt", formats=["plain_text"]))
    assert output["transcription"] is None
    assert output["translation"].startswith("1\n00:00:00,000")
    assert output["outputs"] == {"plain_text": "Hello."}
    assert "translation_outputs" not in output


@pytest.fixture
def files() -> Iterator[FileServer]:
    with FileServer({"/talk.mp3": if_authorized("t0ken", answer(200, MP3))}) as server:
        yield server


@pytest.mark.usefixtures("_private_addresses_are_allowed")
def test_a_download_is_made_with_the_callers_headers_which_are_logged_nowhere(
    files: FileServer, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"id": "x", "input": {"audio": files.url("/talk.mp3"), "audio_headers": {"Authorization": "Bearer t0ken"}}}
    with caplog.at_level("DEBUG"):
        assert answer_of(given)["transcription"] == "Hello."
    assert "t0ken" not in caplog.text
    assert "HTTP 401" in error_of({"id": "x", "input": {"audio": files.url("/talk.mp3")}})
