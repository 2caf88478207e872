"""The story of one job, told with a fake engine and real everything else."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine, segment, spoken
from media import RATE, noise, pcm, silence, speech, video_without_sound, wav
from served import SPEECH, answer, error, job, raising, service, speech_for, together

from whisper_worker.service import Service
from whisper_worker.settings import Threads
from whisper_worker.speech import Speech
from whisper_worker.stop import Stop
from whisper_worker.transcript import Said

# --- the reply


def test_a_reply_has_the_official_fields_and_ours() -> None:
    output = answer(job())
    assert {key: value for key, value in output.items() if key not in ("segments", "timings")} == {
        "detected_language": "de",
        "language_probability": 0.9,
        "language_probabilities": {"de": 0.9},
        "transcription": "Hello.",
        "translation": None,
        "device": "cpu",
        "model": "fake",
        "duration": 4.22,
        "duration_after_vad": 4.22,
        "warnings": [],
    }
    assert output["segments"] == [
        {
            "id": 1,
            "seek": 0,
            "start": 0.0,
            "end": 1.0,
            "text": " Hello.",
            "tokens": [50363, 18435, 13, 50413],
            "temperature": 0.0,
            "avg_logprob": -0.25,
            "compression_ratio": 1.1,
            "no_speech_prob": 0.01,
        }
    ]
    assert set(output["timings"]) == {"download", "decode", "queue", "inference", "upload", "total"}
    assert output["timings"]["total"] >= output["timings"]["decode"] > 0


def test_words_come_flat_when_they_are_asked_for() -> None:
    assert answer(job(word_timestamps=True))["word_timestamps"] == [{"word": " Hello.", "start": 0.1, "end": 0.9}]


@pytest.mark.parametrize("name", ["transcription", "translation"])
def test_each_text_has_its_own_format(name: str) -> None:
    output = answer(job(translate=True, **dict[str, Any]({name: "vtt"})))
    assert output[name].startswith("WEBVTT")
    assert not output["translation" if name == "transcription" else "transcription"].startswith("WEBVTT")


def test_a_translation_comes_beside_the_transcription() -> None:
    output = answer(job(translate=True))
    assert (output["transcription"], output["translation"]) == ("Hello.", "Translated.")


def test_an_english_model_says_that_it_cannot_translate() -> None:
    output = answer(job(translate=True), FakeEngine(english_only=True))
    assert output["translation"] == "Hello."
    assert "can't translate" in output["warnings"][0]


SILENT = {
    "silence": wav(pcm(silence(3))),
    "noise": wav(pcm(noise(3))),
    "a header": wav(pcm(silence(0))),
    "10 ms of speech": wav(pcm(speech()[16000:16160])),
}


@pytest.mark.parametrize("file", SILENT.values(), ids=SILENT.keys())
def test_without_speech_the_transcript_is_empty_and_the_language_unknown(file: bytes) -> None:
    output = answer(job(file, translate=True, word_timestamps=True))
    assert output["segments"] == output["word_timestamps"] == []
    assert output["transcription"] == output["translation"] == ""
    assert output["detected_language"] is output["language_probability"] is None
    assert output["duration_after_vad"] < 0.1


def test_without_vad_all_of_the_audio_is_heard() -> None:
    assert answer(job(wav(pcm(silence(3))), enable_vad=False))["transcription"] == "Hello."


def test_damage_is_told_in_warnings() -> None:
    assert "cut off" in answer(job(SPEECH[: len(SPEECH) // 2]))["warnings"][0]


# --- errors


ERRORS = {
    "input": ({"id": "x", "input": {"audio": "http://a.test/x", "beam": 1}}, "BAD_INPUT: beam: unknown field"),
    "no input": ({"id": "x"}, "BAD_INPUT: input: must be an object"),
    "base64": ({"id": "x", "input": {"audio_base64": "%%%"}}, "BAD_INPUT: audio_base64: is not valid base64"),
    "missing file": (
        {"id": "x", "input": {"audio": "/no/such/file"}},
        "BAD_INPUT: audio: no such file on this machine",
    ),
    "text": (job(b"hello"), "NOT_AUDIO: the file is text"),
    "no sound": (job(video_without_sound()), "NO_AUDIO_STREAM: "),
    "loopback": (
        {"id": "x", "input": {"audio": "http://127.0.0.1:9/a?t=s3cret"}},
        "DOWNLOAD_REFUSED: http://127.0.0.1:9/a:",
    ),
}


@pytest.mark.parametrize(("given", "expected"), ERRORS.values(), ids=ERRORS.keys())
def test_what_goes_wrong_is_told_with_its_code(given: dict[str, Any], expected: str) -> None:
    text = error(given)
    assert text.startswith(expected)
    assert "s3cret" not in text
    assert "/no/such" not in text


def test_audio_over_the_limit_is_too_long(caplog: pytest.LogCaptureFixture) -> None:
    assert error(job(id="job-3"), MAX_AUDIO_S="2").startswith("TOO_LONG: ")
    assert "event=job_failed job=job-3 code=TOO_LONG" in caplog.text


def test_a_reply_over_the_limit_is_an_error_not_a_loss() -> None:
    assert error(job(), MAX_INLINE_BYTES="300").startswith("RESULT_TOO_LARGE: ")


def test_what_was_not_foreseen_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    text = error(job(id="job-7"), raising(ZeroDivisionError("at /secret/path?token=1")))
    assert text == "INTERNAL: something went wrong; the worker's log has the details of job job-7"
    assert "ZeroDivisionError: at /secret/path" in caplog.text


def test_too_little_memory_is_told() -> None:
    assert error(job(), raising(MemoryError())).startswith("OUT_OF_MEMORY: ")


def test_a_reply_that_json_cannot_hold_is_an_error_not_a_loss() -> None:
    nan = Said((segment(0, 1),), language=spoken("en", float("nan")))
    assert error(job(), FakeEngine(lambda *_: nan)).startswith("INTERNAL: ")


def test_a_job_over_its_time_is_stopped() -> None:
    stopped = threading.Event()

    def act(speech: Speech, stop: Stop) -> Said:
        try:
            while True:
                stop.wait(60)
        finally:
            stopped.set()

    assert error(job(), FakeEngine(act), JOB_TIMEOUT_S="0.5") == "TIMEOUT: the job took longer than 0.5 s"
    assert stopped.is_set()


# --- many at once


def test_two_jobs_are_transcribed_at_the_same_moment() -> None:
    both = threading.Barrier(2, timeout=30)

    def act(speech: Speech, stop: Stop) -> Said:
        both.wait()  # fails unless two are here together
        return Said(language=spoken("en", 1.0))

    with service(FakeEngine(act)) as served:
        outputs = together(job(), job(), served=served)
    assert [output["detected_language"] for output in outputs] == ["en", "en"]


def test_the_pieces_of_long_audio_are_put_back_in_order() -> None:
    output = answer(job(wav(pcm(np.tile(speech(), 8)))), PIECE_SECONDS="5")
    starts = [segment["start"] for segment in output["segments"]]
    assert len(starts) >= 7
    assert starts == sorted(starts)
    assert [segment["id"] for segment in output["segments"]] == list(range(1, len(starts) + 1))


def test_pieces_of_one_job_are_transcribed_side_by_side() -> None:
    both = threading.Barrier(2, timeout=30)

    def act(speech: Speech, stop: Stop) -> Said:
        both.wait()  # fails unless two are here together
        return Said(language=spoken("en", 1.0))

    output = answer(job(wav(pcm(speech_for(8)))), FakeEngine(act), PIECE_SECONDS="5")
    assert output["detected_language"] == "en"


def test_pieces_that_need_the_text_before_them_wait_for_it() -> None:
    lock = threading.Lock()

    def act(speech: Speech, stop: Stop) -> Said:
        assert lock.acquire(blocking=False)  # fails if another is here too
        stop.wait(0.02)
        lock.release()
        return Said(language=spoken("en", 1.0))

    long = job(wav(pcm(speech_for(16))), condition_on_previous_text=True)
    assert "error" not in answer(long, FakeEngine(act), PIECE_SECONDS="5")


def test_a_failing_piece_ends_its_job_and_stops_the_others() -> None:
    second, stopped = threading.Event(), threading.Event()

    def act(speech: Speech, stop: Stop) -> Said:
        if speech.chunks is None or speech.chunks[0]["start"] < RATE:  # the first, whichever thread comes first
            assert second.wait(30)
            raise MemoryError
        second.set()
        try:
            while True:
                stop.wait(60)
        finally:
            stopped.set()

    assert error(job(wav(pcm(speech_for(8)))), FakeEngine(act), PIECE_SECONDS="5").startswith("OUT_OF_MEMORY")
    assert stopped.is_set()


def test_audio_is_decoded_while_the_model_is_busy() -> None:
    """With one worker of the model occupied, a bad file is still found out."""
    release, entered = threading.Event(), threading.Event()

    def act(speech: Speech, stop: Stop) -> Said:
        entered.set()
        assert release.wait(30)
        return Said(language=spoken("en", 1.0))

    async def run(served: Service) -> None:
        busy = asyncio.create_task(served.run(job()))
        assert await asyncio.to_thread(entered.wait, 30)
        assert (await served.run(job(b"hello")))["error"].startswith("NOT_AUDIO")
        release.set()
        assert "error" not in await busy

    with service(FakeEngine(act), Threads(inter=1, intra=1, batch=1, jobs=4, media=1)) as served:
        asyncio.run(run(served))


def test_no_more_jobs_are_in_flight_than_there_are_places() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def act(speech: Speech, stop: Stop) -> Said:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        stop.wait(0.02)
        with lock:
            running -= 1
        return Said(language=spoken("en", 1.0))

    with service(FakeEngine(act), Threads(inter=4, intra=1, batch=1, jobs=2, media=2)) as served:
        together(*(job() for _ in range(8)), served=served)
    assert most <= 2


def test_one_failing_job_leaves_the_others_alone() -> None:
    with service() as served:
        outputs = together(job(), job(b"hello"), job(), {"id": "x", "input": None}, job(), served=served)
    assert ["error" in output for output in outputs] == [False, True, False, True, False]


def test_a_cancelled_job_has_ended_when_it_says_so_and_leaves_the_others_alone() -> None:
    entered, ended = threading.Event(), threading.Event()

    def act(speech: Speech, stop: Stop) -> Said:
        if entered.is_set():
            return Said(language=spoken("en", 1.0))
        entered.set()
        try:
            while True:
                stop.wait(60)
        finally:
            ended.set()

    async def run(served: Service) -> None:
        first = asyncio.create_task(served.run(job()))
        assert await asyncio.to_thread(entered.wait, 30)
        second = asyncio.create_task(served.run(job()))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert ended.is_set()
        assert (await second)["detected_language"] == "en"

    with service(FakeEngine(act)) as served:
        asyncio.run(run(served))


def test_a_job_cancelled_while_it_waits_for_a_place_never_starts() -> None:
    release, entered = threading.Event(), threading.Event()

    def act(speech: Speech, stop: Stop) -> Said:
        entered.set()
        assert release.wait(30)
        return Said(language=spoken("en", 1.0))

    async def run(served: Service, engine: FakeEngine) -> None:
        first = asyncio.create_task(served.run(job()))
        assert await asyncio.to_thread(entered.wait, 30)
        second = asyncio.create_task(served.run(job()))
        await asyncio.sleep(0)  # its first turn ends where it must wait
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        release.set()
        await first
        assert engine.pieces == 1

    engine = FakeEngine(act)
    with service(engine, Threads(inter=1, intra=1, batch=1, jobs=1, media=1)) as served:
        asyncio.run(run(served, engine))


def test_the_event_loop_is_free_while_a_job_is_decoded_and_transcribed() -> None:
    """A coroutine beside the job gets its turn all the time; a step on the loop would hold it up."""
    turns_inside: list[int] = []
    turns = 0

    def act(speech: Speech, stop: Stop) -> Said:
        before = turns
        while turns < before + 10:  # hangs here if the loop waits for this thread
            stop.wait(0.001)
        turns_inside.append(turns - before)
        return Said(language=spoken("en", 1.0))

    async def run(served: Service) -> None:
        nonlocal turns
        task = asyncio.create_task(served.run(job()))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        assert "error" not in task.result()

    with service(FakeEngine(act), JOB_TIMEOUT_S="30") as served:
        asyncio.run(run(served))
    assert turns_inside[0] >= 10


# --- what is left behind


@pytest.mark.parametrize("file", [SPEECH, b"hello"], ids=["good", "bad"])
def test_a_local_file_is_read_and_left_where_it_is(file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "talk.ogg"
    path.write_bytes(file)
    output = answer({"id": "x", "input": {"audio": str(path)}})
    assert ("error" in output) == (file != SPEECH)
    assert path.read_bytes() == file


def test_closing_ends_the_threads_and_the_engine() -> None:
    engine = FakeEngine()
    with service(engine) as served:
        together(job(), served=served)
    assert engine.closed
    for thread in threading.enumerate():
        if thread.name.startswith(("io_", "media_", "piece_")):
            thread.join(30)
            assert not thread.is_alive()
