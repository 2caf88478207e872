"""Large results: in a bucket of moto's real server, at a caller's own URL, and on the ways there that fail."""

import logging
import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import botocore.auth
import botocore.session
import pytest
import requests
from botocore.config import Config
from file_server import Answer, Exchange, FileServer, answer, in_turn, redirect, taken
from moto.server import ThreadedMotoServer

from whisper_worker import storage, web
from whisper_worker.errors import UploadFailed, UploadRefused, WorkerError
from whisper_worker.request import parse_s3_config
from whisper_worker.settings import Settings
from whisper_worker.stop import Stop, Stopped
from whisper_worker.storage import Bucket, File, UploadLimits

LIMITS = UploadLimits(timeout_s=60, attempts=3)
TEXT = "Grüße, 你好 🎉\n"
RESULT = File("result.json", f'{{"transcription": "{TEXT.strip()}"}}'.encode(), "application/json")
SUBTITLES = File("result.srt", TEXT.encode(), "application/x-subrip; charset=utf-8")
SECRET = "s3cret/key+0123456789"  # noqa: S105  (of no one)
BUCKET = Bucket("http://127.0.0.1:1", "results", "AKID", SECRET, None, is_trusted=True)
SHORT_S = 0.3


@pytest.fixture(autouse=True)
def _only_loopback_and_short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def watched(self: socket.socket, address: Any) -> None:
        assert address[0].startswith("127."), f"tried to connect to {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    monkeypatch.delenv("RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS", raising=False)
    monkeypatch.setattr(web, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def _private_addresses_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS", "true")


@pytest.fixture
def _silence_is_soon_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SILENCE_S", SHORT_S)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The endpoint's URL, with the bucket `results`."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    requests.put(f"http://{host}:{port}/results", timeout=10).raise_for_status()
    yield f"http://{host}:{port}"
    server.stop()


def stored(bucket: Bucket, *files: File, job: str = "job-1", **changes: Any) -> dict[str, str]:
    limits = replace(LIMITS, **changes)
    return storage.store(files or [RESULT], bucket, prefix=job, expires_s=600, limits=limits, stop=Stop())


def put(url: str, file: File = RESULT, stop: Stop | None = None, **changes: Any) -> None:
    storage.put(url, file, limits=replace(LIMITS, **changes), stop=stop or Stop())


# A bucket


def test_each_file_is_had_by_its_link_as_it_was_with_its_type(s3: str) -> None:
    links = stored(replace(BUCKET, endpoint_url=s3), RESULT, SUBTITLES)
    assert list(links) == ["result.json", "result.srt"]
    for file in (RESULT, SUBTITLES):
        response = requests.get(links[file.name], timeout=10)
        assert (response.status_code, response.content) == (200, file.data)
        assert response.headers["Content-Type"] == file.content_type
    assert requests.get(links["result.srt"], timeout=10).text == TEXT


@pytest.mark.parametrize(
    ("job", "folder"),
    [("3f2-u1", "3f2-u1"), ("../../a", "_.._a"), ("a/b?c#d%", "a_b_c_d_"), ("ä 1", "__1"), ("..", "_"), ("", "_")],
)
def test_objects_lie_in_a_folder_of_the_jobs_name_which_leads_nowhere_else(s3: str, job: str, folder: str) -> None:
    links = stored(replace(BUCKET, endpoint_url=s3), job=job)
    assert links["result.json"].partition("?")[0] == f"{s3}/results/{folder}/result.json"
    assert requests.get(links["result.json"], timeout=10).content == RESULT.data


@pytest.mark.parametrize("data", [b"", bytes(3_000_000)], ids=["empty", "3 MB"])
def test_a_file_may_be_empty_or_large(s3: str, data: bytes) -> None:
    links = stored(replace(BUCKET, endpoint_url=s3), replace(RESULT, data=data))
    assert requests.get(links["result.json"], timeout=10).content == data


def test_a_missing_bucket_is_named_as_the_storage_names_it(s3: str) -> None:
    with pytest.raises(UploadFailed, match=rf"^{s3}: the server answered HTTP 404 \(NoSuchBucket\)$"):
        stored(replace(BUCKET, endpoint_url=s3, name="nowhere"))


@pytest.mark.usefixtures("_private_addresses_are_allowed")
def test_a_jobs_own_bucket_is_used_with_its_fields(s3: str) -> None:
    raw = {"endpointUrl": s3, "accessId": "AKID", "accessSecret": SECRET, "bucketName": "results"}
    links = stored(Bucket.of_job(parse_s3_config(raw)), job="own")
    assert requests.get(links["result.json"], timeout=10).content == RESULT.data


def test_the_operators_bucket_may_be_private_but_a_jobs_may_not() -> None:
    bodies: list[bytes] = []
    with FileServer({"/results/job-1/result.json": taken(bodies)}) as server:
        stored(replace(BUCKET, endpoint_url=server.url("")))
        with pytest.raises(UploadRefused, match="isn't public"):
            stored(replace(BUCKET, endpoint_url=server.url(""), is_trusted=False))
    assert bodies == [RESULT.data]


def test_the_settings_have_a_bucket_or_none() -> None:
    assert Bucket.of_settings(Settings.from_env({})) is None
    env = {
        "BUCKET_ENDPOINT_URL": "https://s3.example",
        "BUCKET_NAME": "results",
        "BUCKET_ACCESS_KEY_ID": "AKID",
        "BUCKET_SECRET_ACCESS_KEY": SECRET,
        "BUCKET_REGION": "here",
    }
    assert Bucket.of_settings(Settings.from_env(env)) == Bucket(
        "https://s3.example", "results", "AKID", SECRET, "here", is_trusted=True
    )


@pytest.mark.parametrize("endpoint", ["http://", "http://[::1", "http://a:99999", "http://a..b", "ftp://127.0.0.1"])
def test_an_endpoint_that_is_no_address_is_a_failed_upload(endpoint: str) -> None:
    with pytest.raises((UploadFailed, UploadRefused)):
        stored(replace(BUCKET, endpoint_url=endpoint))


# Signatures

ENDPOINTS = [
    ("https://s3.eu-central-1.amazonaws.com", "virtual", "eu-central-1", "https://results.s3.eu-central-1.amazonaws.com/"),
    ("https://s3.cn-north-1.amazonaws.com.cn", "virtual", "cn-north-1", "https://results.s3.cn-north-1.amazonaws.com.cn/"),
    ("https://s3-us-west-2.amazonaws.com/", "virtual", "us-west-2", "https://results.s3-us-west-2.amazonaws.com/"),
    ("https://s3.amazonaws.com", "virtual", "us-east-1", "https://results.s3.amazonaws.com/"),
    ("https://s3.us-west-002.backblazeb2.com", "path", "us-west-002", "https://s3.us-west-002.backblazeb2.com/results/"),
    ("https://acc.r2.cloudflarestorage.com", "path", "us-east-1", "https://acc.r2.cloudflarestorage.com/results/"),
    ("http://10.1.2.3:9000", "path", "us-east-1", "http://10.1.2.3:9000/results/"),
    ("http://[fd00::1]:9000", "path", "us-east-1", "http://[fd00::1]:9000/results/"),
    ("https://minio.example:443/s3/", "path", "us-east-1", "https://minio.example:443/s3/results/"),
    ("https://results.example", "path", "us-east-1", "https://results.example/results/"),  # perhaps its own name
]  # fmt: skip


@pytest.mark.parametrize(("endpoint", "style", "region", "folder"), ENDPOINTS)
@pytest.mark.parametrize("key", ["job-1/result.json", "a b~c/ä%+&=.txt"])
def test_links_are_those_that_aws_own_client_makes(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, style: str, region: str, folder: str, key: str
) -> None:
    now = datetime.now(timezone.utc)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: now)
    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name=region,
        aws_access_key_id="AKID",
        aws_secret_access_key=SECRET,
        config=Config(signature_version="s3v4", s3={"addressing_style": style}),
    )
    there = {"Bucket": "results", "Key": key}
    bucket = replace(BUCKET, endpoint_url=endpoint)
    got = bucket.signed_url("GET", key, 600)
    assert got.startswith(folder)
    assert got == client.generate_presigned_url("get_object", there, ExpiresIn=600)
    assert bucket.signed_url("PUT", key, 60, "text/plain") == client.generate_presigned_url(
        "put_object", {**there, "ContentType": "text/plain"}, ExpiresIn=60
    )


@pytest.mark.parametrize(
    ("endpoint", "name", "url"),
    [
        ("https://results.s3.eu-north-1.amazonaws.com", "results", "https://results.s3.eu-north-1.amazonaws.com/a"),
        ("https://results.s3.us-west-004.backblazeb2.com/", "results", "https://results.s3.us-west-004.backblazeb2.com/a"),
        ("https://other.s3.eu-north-1.amazonaws.com", "results", "https://other.s3.eu-north-1.amazonaws.com/results/a"),
        ("https://s3.eu-north-1.amazonaws.com", "with.dots", "https://s3.eu-north-1.amazonaws.com/with.dots/a"),
        ("https://s3.eu-north-1.amazonaws.com", "Old_Style", "https://s3.eu-north-1.amazonaws.com/Old_Style/a"),
        ("https://u:p@minio.example?x#y", "results", "https://minio.example/results/a"),
    ],
)  # fmt: skip
def test_an_endpoint_may_have_the_bucket_in_its_host(endpoint: str, name: str, url: str) -> None:
    assert replace(BUCKET, endpoint_url=endpoint, name=name).url("a") == url


def test_the_operators_region_goes_before_that_in_the_host() -> None:
    bucket = replace(BUCKET, endpoint_url="https://s3.eu-north-1.amazonaws.com", region="elsewhere")
    assert "%2Felsewhere%2Fs3%2F" in bucket.signed_url("GET", "a", 600)


@pytest.mark.parametrize("name", ["results", "results--use1-az4--x-s3"])  # AWS' clients ask for a session with these
def test_signing_opens_no_connection_and_reads_none_of_the_machines_aws_settings(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("looked for an address")

    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(key, "from-the-machine")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.9:9")
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    url = replace(BUCKET, endpoint_url="http://127.0.0.1:9", name=name).signed_url("PUT", "a", 600)
    assert url.startswith(f"http://127.0.0.1:9/{name}/a?")
    assert "from-the-machine" not in url
    assert "Security-Token" not in url


# A caller's URL, and what may become of a request

with_private_addresses = pytest.mark.usefixtures("_private_addresses_are_allowed")


@with_private_addresses
@pytest.mark.parametrize("status", [200, 201, 204])
def test_the_callers_url_gets_the_bytes_by_put_with_their_length_and_type(status: int) -> None:
    bodies: list[bytes] = []
    with FileServer({"/there": taken(bodies, answer(status))}) as server:
        put(server.url("/there?X-Amz-Signature=a%2Fb%3D&x=y%20z"))
        (request,) = server.received["/there"]
    assert bodies == [RESULT.data]
    assert (request.method, request.target) == ("PUT", "/there?X-Amz-Signature=a%2Fb%3D&x=y%20z")
    assert request.headers["content-type"] == "application/json"
    assert request.headers["content-length"] == str(len(RESULT.data))
    assert "transfer-encoding" not in request.headers


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.0.0.1", "169.254.169.254", "[::1]"])
def test_a_callers_url_at_an_address_that_is_not_public_is_refused_before_any_connection(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))
    with pytest.raises(UploadRefused):
        put(f"http://{host}:80/there")


@with_private_addresses
@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_sent_again_in_full(status: int) -> None:
    bodies: list[bytes] = []
    busy = taken(bodies, answer(status))
    with FileServer({"/busy": in_turn(busy, busy, taken(bodies))}) as server:
        put(server.url("/busy"))
    assert bodies == [RESULT.data] * 3


@with_private_addresses
def test_a_lost_connection_is_tried_again() -> None:
    bodies: list[bytes] = []
    with FileServer({"/lost": in_turn(lambda _: None, taken(bodies))}) as server:
        put(server.url("/lost"))
    assert bodies == [RESULT.data]


@with_private_addresses
def test_all_addresses_of_a_host_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[bytes] = []
    getaddrinfo = socket.getaddrinfo

    def two(_host: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [info for address in ("127.0.0.9", "127.0.0.1") for info in getaddrinfo(address, *args, **kwargs)]

    with FileServer({"/there": taken(bodies)}) as server:
        monkeypatch.setattr(socket, "getaddrinfo", two)
        put(f"http://results.example:{server.port}/there", attempts=1)
    assert bodies == [RESULT.data]


@with_private_addresses
@pytest.mark.parametrize(
    ("path", "said", "tries"),
    [
        ("/forbidden", r"HTTP 403 \(AccessDenied\)$", 1),
        ("/odd", r"HTTP 400$", 1),
        ("/moved", r"HTTP 302, redirects aren't followed$", 1),
        ("/broken", r"HTTP 500$", LIMITS.attempts),
        ("/lost", "can't be reached, or doesn't answer$", LIMITS.attempts),
    ],
)
def test_what_fails_is_told_with_the_host_alone(path: str, said: str, tries: int) -> None:
    with FileServer(_failing()) as server:
        with pytest.raises(UploadFailed, match=rf"^http://127\.0\.0\.1:{server.port}: .*{said}"):
            put(server.url(path))
        assert server.requests[path] == tries
        assert not server.requests["/elsewhere"]


def _failing() -> dict[str, Answer]:
    return {
        "/forbidden": taken([], answer(403, b"<?xml?><Error><Code>AccessDenied</Code></Error>")),
        "/odd": taken([], answer(400, b"<Code>s3cret-0123 and more</Code>")),
        "/moved": taken([], redirect("/elsewhere")),
        "/broken": taken([], answer(500)),
        "/lost": lambda _: None,
        "/silent": taken([], Exchange.stall),
    }


@with_private_addresses
def test_silence_ends_with_the_total_time() -> None:
    with FileServer(_failing()) as server, pytest.raises(UploadFailed, match=r"not stored within 0\.3 s"):
        put(server.url("/silent"), timeout_s=SHORT_S)


@with_private_addresses
def test_a_server_that_takes_nothing_ends_with_the_total_time() -> None:
    large = replace(RESULT, data=bytes(32_000_000))
    with FileServer({"/stuck": Exchange.stall}) as server, pytest.raises(UploadFailed, match="not stored within"):
        put(server.url("/stuck"), large, timeout_s=SHORT_S)


def test_all_files_of_a_job_share_the_total_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(web, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def late(exchange: Exchange) -> None:
        now[0] += LIMITS.timeout_s + 1
        taken([])(exchange)

    with FileServer({"/results/job-1/result.json": late}) as server:
        with pytest.raises(UploadFailed, match="not stored within 60 s"):
            stored(replace(BUCKET, endpoint_url=server.url("")), RESULT, SUBTITLES)
        assert server.requests["/results/job-1/result.json"] == 1
        assert not server.requests["/results/job-1/result.srt"]


# Stopping


@with_private_addresses
def test_a_stop_ends_the_sending() -> None:
    stop, begun, stopped = Stop(), threading.Event(), threading.Event()
    rest: list[bytes] = []

    def slow(exchange: Exchange) -> None:
        exchange.request.body.read(1000)
        begun.set()
        assert stopped.wait(10)
        rest.append(exchange.take())

    large = replace(RESULT, data=bytes(64_000_000))
    with ThreadPoolExecutor(1) as pool, FileServer({"/slow": slow}) as server:
        work = pool.submit(put, server.url("/slow"), large, stop)
        assert begun.wait(10)
        stop.set()
        stopped.set()
        with pytest.raises(Stopped):
            work.result(10)
        assert server.requests["/slow"] == 1
    assert sum(map(len, rest)) < len(large.data) / 2, "it was sent in spite of the stop"


@pytest.mark.usefixtures("_silence_is_soon_a_loss")
@with_private_addresses
def test_a_stop_while_the_server_is_silent_is_noticed_when_that_counts_as_lost() -> None:
    stop = Stop()
    with ThreadPoolExecutor(1) as pool, FileServer(_failing()) as server:
        work = pool.submit(put, server.url("/silent"), stop=stop)
        server.wait_for_request("/silent")
        stop.set()
        with pytest.raises(Stopped):
            work.result(10)
        assert server.requests["/silent"] == 1


@with_private_addresses
def test_a_stop_ends_the_pause_before_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "FIRST_PAUSE_S", 30)
    pausing = threading.Event()

    class PausingStop(Stop):
        def wait(self, seconds: float) -> None:
            pausing.set()
            super().wait(seconds)

    stop = PausingStop()
    with ThreadPoolExecutor(1) as pool, FileServer(_failing()) as server:
        work = pool.submit(put, server.url("/broken"), stop=stop)
        assert pausing.wait(10)
        stop.set()
        with pytest.raises(Stopped):
            work.result(10)


# Secrets


@pytest.mark.usefixtures("_silence_is_soon_a_loss")
@with_private_addresses
@pytest.mark.parametrize("path", ["/forbidden", "/odd", "/moved", "/broken", "/lost", "/silent", "/unheard"])
def test_no_signature_path_or_password_is_in_a_sentence_its_cause_or_the_log(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with FileServer({f"{path}/p4th": route for path, route in _failing().items()}) as server:
        port = 1 if path == "/unheard" else server.port
        url = f"http://us3r:pa55@127.0.0.1:{port}{path}/p4th?X-Amz-Signature=s1gned#fr4gment"
        with pytest.raises(WorkerError) as caught:
            put(url)
    told = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert [secret for secret in ("us3r", "pa55", "p4th", "Amz", "s1gned", "fr4gment") if secret in told] == []


@pytest.mark.parametrize("answered", [True, False])
def test_no_signature_or_key_of_a_bucket_is_in_a_sentence_its_cause_or_the_log(
    answered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with FileServer({"/results/job-1/result.json": taken([], answer(403))}) as server:
        bucket = replace(BUCKET, endpoint_url=server.url("", user="us3r:pa55@") if answered else "http://127.0.0.1:1")
        with pytest.raises(WorkerError) as caught:
            stored(bucket)
        asked = [request.target for request in server.received["/results/job-1/result.json"]]
    told = "".join(traceback.format_exception(caught.value)) + caplog.text + repr(bucket)
    signatures = [target.rpartition("X-Amz-Signature=")[2] for target in asked]
    assert len(signatures) == answered
    assert [secret for secret in (SECRET, "Amz", "us3r", "pa55", *signatures) if secret in told] == []


def test_botocore_is_loaded_only_where_it_signs() -> None:
    """It takes long to import, which every cold start would pay."""
    script = "import whisper_worker.storage, sys; sys.exit('botocore' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=env, check=False).returncode == 0
