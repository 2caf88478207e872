"""What becomes of a result that is too large for a reply: with a fake engine, and a real S3 server."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
import requests
from fakes import FakeEngine, segment, spoken
from file_server import FileServer, answer, taken
from moto.server import ThreadedMotoServer
from served import answer as answer_of
from served import error as error_of
from served import job, service

from whisper_worker import web
from whisper_worker.service import Service
from whisper_worker.transcript import Said, Word

TEXT = " Grüße" * 500
SMALL: dict[str, Any] = {"MAX_INLINE_BYTES": "3000"}
NO_DETAILS = "left out, for the reply to arrive: tokens and word_timestamps"


@pytest.fixture(autouse=True)
def _pauses_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def _private_addresses_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS", "true")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The endpoint's URL, with the buckets `operators` and `callers`."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for bucket in ("operators", "callers"):
        requests.put(f"http://{host}:{port}/{bucket}", timeout=10).raise_for_status()
    yield f"http://{host}:{port}"
    server.stop()


def operators(s3: str) -> dict[str, Any]:
    return {
        **SMALL,
        "BUCKET_ENDPOINT_URL": s3,
        "BUCKET_NAME": "operators",
        "BUCKET_ACCESS_KEY_ID": "AKID",
        "BUCKET_SECRET_ACCESS_KEY": "s3cret",
    }


def callers(s3: str, bucket: str = "callers") -> dict[str, str]:
    return {"endpointUrl": s3, "bucketName": bucket, "accessId": "AKID", "accessSecret": "s3cret"}


def talkative(text: str = TEXT) -> FakeEngine:
    words = tuple(Word(word, 0.1, 0.2, 0.5) for word in (" Grüße",) * 20)
    return FakeEngine(lambda *_: Said((segment(0, 1, text, words),), (segment(0, 1, " Hi."),), spoken("de")))


def fetched(link: str) -> requests.Response:
    response = requests.get(link, timeout=10)
    response.raise_for_status()
    return response


def test_a_large_result_goes_to_the_operators_bucket_in_all_its_formats(s3: str) -> None:
    given = job(transcription="srt", formats=["vtt", "plain_text"], translate=True, word_timestamps=True)
    output = answer_of(given, talkative(), **operators(s3))
    links = output["stored"]
    assert list(links) == [
        "result.json",
        "transcription.srt",
        "transcription.vtt",
        "transcription.plain_text.txt",
        "translation.plain_text.txt",
        "translation.vtt",
    ]
    whole = fetched(links["result.json"]).json()
    assert whole["segments"][0]["text"] == TEXT
    assert whole["transcription"] == fetched(links["transcription.srt"]).content.decode()
    assert whole["outputs"]["vtt"] == fetched(links["transcription.vtt"]).content.decode()
    assert whole["outputs"]["plain_text"] == TEXT.strip()
    assert fetched(links["translation.plain_text.txt"]).text == "Hi."
    assert len(whole["word_timestamps"]) == 20
    assert output["summary"] == {"segments": 1, "characters": len(TEXT.strip()), "text_start": TEXT.strip()[:200]}
    assert (output["segments"], output["transcription"], output["translation"]) == ([], None, None)
    assert output["bytes"] == len(fetched(links["result.json"]).content)
    assert output["detected_language"] == whole["detected_language"] == "de"
    assert output["timings"]["upload"] > 0
    assert len(json.dumps(output)) < 6000


def test_a_result_that_fits_is_stored_nowhere(s3: str) -> None:
    assert "stored" not in answer_of(job(), **operators(s3))


@pytest.mark.usefixtures("_private_addresses_are_allowed")
def test_a_jobs_own_bucket_goes_before_the_operators(s3: str) -> None:
    output = answer_of({**job(), "s3Config": callers(s3)}, talkative(), **operators(s3))
    assert output["stored"]["result.json"].startswith(f"{s3}/callers/job/result.json?")
    assert fetched(output["stored"]["result.json"]).json()["transcription"] == TEXT.strip()


@pytest.mark.usefixtures("_private_addresses_are_allowed")
def test_a_callers_own_url_goes_before_all_buckets_and_gets_the_json(s3: str) -> None:
    received: list[bytes] = []
    with FileServer({"/put": taken(received)}) as files:
        given = {**job(upload_url=files.url("/put?signature=s3cret")), "s3Config": callers(s3)}
        output = answer_of(given, talkative(), **operators(s3))
        [request] = files.received["/put"]
    assert (request.method, request.target) == ("PUT", "/put?signature=s3cret")
    assert request.headers["content-type"] == "application/json"
    assert json.loads(received[0])["segments"][0]["text"] == TEXT
    assert output["stored"] == {"result.json": files.url("/put")}


def test_callers_cannot_have_results_sent_to_private_addresses(s3: str) -> None:
    """Nor would their job fail: the text fits without its details."""
    for given in (
        {**job(word_timestamps=True), "s3Config": callers(s3)},
        job(word_timestamps=True, upload_url=s3 + "/callers/x?signature=s3cret"),
    ):
        output = answer_of(given, talkative(" Hi." * 100), MAX_INLINE_BYTES="2500")
        assert "stored" not in output
        assert output["transcription"].startswith("Hi. Hi.")
        assert output["warnings"][-1] == NO_DETAILS
        assert output["warnings"][0].startswith("the result couldn't be stored: http://127.0.0.1")
        assert "s3cret" not in str(output)


@pytest.mark.usefixtures("_private_addresses_are_allowed")
def test_a_result_that_can_go_nowhere_is_an_error_that_says_why(s3: str) -> None:
    given = {**job(), "s3Config": callers(s3, "no-such-bucket")}
    assert error_of(given, talkative(), **SMALL) == f"UPLOAD_FAILED: {s3}: the server answered HTTP 404 (NoSuchBucket)"
    with FileServer({"/put": answer(403)}) as files:
        told = error_of(job(upload_url=files.url("/put?signature=s3cret")), talkative(), **SMALL)
    assert told == f"UPLOAD_FAILED: {files.url('')}: the server answered HTTP 403"


def test_without_any_storage_the_details_go_first_and_then_the_sizes_are_told() -> None:
    output = answer_of(job(word_timestamps=True), talkative(" Hi." * 100), MAX_INLINE_BYTES="2500")
    assert output["warnings"] == [NO_DETAILS]
    assert output["segments"][0]["tokens"] == []
    assert "words" not in output["segments"][0]
    assert "word_timestamps" not in output
    told = error_of(job(), talkative(), **SMALL)
    assert told.startswith("RESULT_TOO_LARGE: the result has ")
    assert "and 3000 fit into a reply" in told


def test_texts_in_json_lose_their_details_too() -> None:
    given = job(
        transcription="json", formats=["verbose_json"], translate=True, translation="json", word_timestamps=True
    )
    whole = answer_of(given, talkative(" Hi." * 100))
    output = answer_of(given, talkative(" Hi." * 100), MAX_INLINE_BYTES=str(len(json.dumps(whole)) - 1500))
    texts = [output["transcription"], output["translation"], output["outputs"]["verbose_json"]]
    for text in [*texts, output["translation_outputs"]["verbose_json"]]:
        assert text["segments"][0]["tokens"] == []
        assert "words" not in text["segments"][0]
        assert "words" not in text
    assert output["warnings"] == [NO_DETAILS]


@pytest.mark.usefixtures("_private_addresses_are_allowed")
def test_a_stream_whose_result_cannot_be_stored_is_none_the_worse(s3: str) -> None:
    """Its segments, which make it too large, have been streamed."""

    async def run(served: Service) -> list[dict[str, Any]]:
        given = {**job(transcription="plain_text", word_timestamps=True), "s3Config": callers(s3, "no-such-bucket")}
        async with aclosing(served.stream(given)) as stream:
            return [item async for item in stream]

    with service(talkative(" Hi." * 200), STREAM_INTERVAL_S="0", MAX_INLINE_BYTES="2000") as served:
        *_, result = asyncio.run(run(served))
    assert result["type"] == "result"
    assert result["transcription"].startswith("Hi. Hi.")
    assert "couldn't be stored" in result["warnings"][0]


def test_results_of_several_files_are_stored_together(s3: str) -> None:
    one = {"audio_base64": job()["input"]["audio_base64"]}
    given = {"id": "many", "input": {"audios": [one, {"audio_base64": "aGVsbG8="}, one], "transcription": "srt"}}
    output = answer_of(given, talkative(), **operators(s3))
    assert list(output["stored"]) == ["result.json", "0/transcription.srt", "2/transcription.srt"]
    whole = fetched(output["stored"]["result.json"]).json()
    assert whole["results"][0]["transcription"] == fetched(output["stored"]["2/transcription.srt"]).content.decode()
    assert [result.get("summary", {}).get("segments") for result in output["results"]] == [1, None, 1]
    assert output["results"][1] == whole["results"][1]


def test_a_stream_says_where_its_large_result_is(s3: str) -> None:
    async def run(served: Service) -> list[dict[str, Any]]:
        async with aclosing(served.stream(job(transcription="srt"))) as stream:
            return [item async for item in stream]

    with service(talkative(), STREAM_INTERVAL_S="0", **operators(s3)) as served:
        _, segments, result = asyncio.run(run(served))
    assert segments["segments"][0]["text"] == TEXT
    assert "segments" not in result
    assert fetched(result["stored"]["transcription.srt"]).content.decode().endswith("Grüße\n\n")


def test_a_bucket_that_is_described_wrongly_is_refused_before_any_work() -> None:
    given = {**job(), "s3Config": {**callers("https://s3.test"), "bucketName": "../x"}}
    assert error_of(given).startswith("BAD_INPUT: s3Config.bucketName: ")
