"""Downloads: from good servers, failing ones and hostile ones, all on loopback addresses."""

import asyncio
import gzip
import io
import socket
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
from file_server import FILE, PAGE, FileServer, answer, if_authorized, in_turn, redirect
from runpod.serverless.utils import rp_ssrf

from whisper_worker import fetch, web
from whisper_worker.errors import DownloadFailed, DownloadRefused, TimedOut, TooLarge, WorkerError
from whisper_worker.request import origin
from whisper_worker.stop import Stop, Stopped, in_loose_thread

LIMITS = fetch.DownloadLimits(max_bytes=1024 * 1024, timeout_s=60, attempts=3, max_redirects=3)
SHORT_S = 0.3


@pytest.fixture(autouse=True)
def _loopback_is_allowed_and_patience_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS", "true")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(fetch, "STALL_S", SHORT_S)
    monkeypatch.setattr(web, "FIRST_PAUSE_S", 0.01)


@pytest.fixture(autouse=True)
def visited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were connected to. Another than a loopback address fails the test before it is reached."""
    addresses: list[str] = []
    connect = socket.socket.connect

    def watched(self: socket.socket, address: Any) -> None:
        addresses.append(address[0])
        assert address[0].startswith("127."), f"tried to connect to {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    return addresses


@pytest.fixture
def _only_public_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS")


@pytest.fixture
def _127_0_0_1_passes_for_public(_only_public_addresses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rp_ssrf, "is_safe_address", lambda ip: ip == "127.0.0.1")


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer() as server:
        yield server


def downloaded(url: str, headers: dict[str, str] | None = None, **changes: Any) -> bytes:
    to = io.BytesIO()
    fetch.download(url, to, replace(LIMITS, **changes), Stop(), headers)
    return to.getvalue()


def name_resolves(monkeypatch: pytest.MonkeyPatch, name: str, *turns: list[str]) -> None:
    """Each time `name` is asked for, it has the addresses of the next turn."""
    getaddrinfo, left = socket.getaddrinfo, iter(turns)

    def fake(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        addresses = next(left) if host == name else [host]
        return [info for address in addresses for info in getaddrinfo(address, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", fake)


# What arrives


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/file", FILE),
        ("/chunks", FILE),
        ("/gzip", FILE),
        ("/redirect", FILE),
        ("/page", PAGE),  # that it isn't audio, the decoder will say
        ("/empty", b""),
        ("/length-too-small", FILE[:1000]),
    ],
)
def test_what_the_server_sends_is_written(server: FileServer, path: str, content: bytes) -> None:
    assert downloaded(server.url(path)) == content
    assert server.requests[path] == 1


@pytest.mark.parametrize("path", ["/broken-once", "/busy-once", "/cut-off-once"])
def test_the_second_try_replaces_what_the_first_one_left(server: FileServer, path: str) -> None:
    assert downloaded(server.url(path)) == FILE
    assert server.requests[path] == 2


@pytest.mark.parametrize("encoding", ["", "identity", "aws-chunked", "binary", "UTF-8"])
def test_an_encoding_that_names_no_compression_changes_nothing(encoding: str) -> None:
    """Object stores repeat what was once uploaded with a file, however wrong."""
    with FileServer({"/odd": answer(200, FILE, f"Content-Encoding: {encoding}")}) as server:
        assert downloaded(server.url("/odd")) == FILE


@pytest.mark.parametrize("encoding", ["gzip", " GZIP", "x-gzip", "aws-chunked,gzip"])
def test_what_is_stored_gzipped_is_unpacked(encoding: str) -> None:
    with FileServer({"/odd": answer(200, gzip.compress(FILE), f"Content-Encoding: {encoding}")}) as server:
        assert downloaded(server.url("/odd")) == FILE


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip"])
def test_a_compression_that_was_not_asked_for_is_named(encoding: str) -> None:
    with FileServer({"/odd": answer(200, FILE, f"Content-Encoding: {encoding}")}) as server:
        with pytest.raises(DownloadFailed, match=f"compressed as {encoding}"):
            downloaded(server.url("/odd"))
        assert server.requests["/odd"] == 1


@pytest.mark.parametrize("path", ["/file", "/chunks", "/gzip"])
def test_a_file_may_be_exactly_as_large_as_allowed(server: FileServer, path: str) -> None:
    assert downloaded(server.url(path), max_bytes=len(FILE)) == FILE
    with pytest.raises(TooLarge):
        downloaded(server.url(path), max_bytes=len(FILE) - 1)


@pytest.mark.parametrize("length", ["", "none", "-1", "1,2", "\xb2", "1" * 5000])
def test_a_content_length_that_is_no_length_either_harms_nothing_or_fails_in_words(length: str) -> None:
    odd = answer(200, FILE, f"Content-Length: {length}")
    with FileServer({"/odd": odd}) as server, suppress(DownloadFailed, TooLarge):
        assert downloaded(server.url("/odd")) == FILE


# What fails, and how often it is tried


@pytest.mark.parametrize("path", ["/missing", "/forbidden", "/no-content"])
def test_a_final_answer_is_not_asked_for_again(server: FileServer, path: str) -> None:
    with pytest.raises(DownloadFailed):
        downloaded(server.url(path))
    assert server.requests[path] == 1


@pytest.mark.parametrize(
    "path",
    [
        "/broken",
        "/cut-off",
        "/cut-off-between-chunks",
        "/cut-off-in-chunk",
        "/gzip-broken",
        "/no-answer",
        "/stall",
    ],
)
def test_what_may_pass_is_tried_as_often_as_allowed(server: FileServer, path: str) -> None:
    with pytest.raises(DownloadFailed):
        downloaded(server.url(path))
    assert server.requests[path] == LIMITS.attempts


def test_a_port_that_nobody_listens_on_is_a_failed_download(visited: list[str]) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        with pytest.raises(DownloadFailed):
            downloaded(f"http://127.0.0.1:{unheard.getsockname()[1]}/file")
    assert len(visited) == LIMITS.attempts


def test_a_name_that_nobody_knows_is_a_failed_download(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unknown(host: str, *_: Any, **__: Any) -> None:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(DownloadFailed):
        downloaded("http://files.example/a.mp3")
    assert asked == ["files.example"] * LIMITS.attempts


@pytest.mark.parametrize("host", ["a..example", "a" * 64 + ".example", "a\0.example"])
def test_a_host_that_can_be_no_name_is_a_failed_download(host: str) -> None:
    with pytest.raises(DownloadFailed):
        downloaded(f"http://{host}/a.mp3")


# Size


@pytest.mark.parametrize("path", ["/endless", "/endless-chunks", "/huge", "/gzip-bomb"])
def test_more_bytes_than_allowed_are_refused_at_the_first_try(server: FileServer, path: str) -> None:
    with pytest.raises(TooLarge):
        downloaded(server.url(path))
    assert server.requests[path] == 1


def test_the_body_of_a_redirect_is_not_read() -> None:
    with FileServer() as server:
        assert downloaded(server.url("/redirect-with-large-body")) == FILE
    assert server.sent["/redirect-with-large-body"] == 0, "32 MiB were taken, 1 MiB is allowed"


# Time


def test_a_trickle_ends_with_the_total_time(server: FileServer) -> None:
    with pytest.raises(TimedOut):
        downloaded(server.url("/trickle"), timeout_s=SHORT_S)
    assert server.requests["/trickle"] == 1


def test_a_trickle_that_decodes_to_nothing_ends_with_the_total_time() -> None:
    limits = replace(LIMITS, timeout_s=SHORT_S)
    with ThreadPoolExecutor(1) as pool, FileServer() as server:
        work = pool.submit(fetch.download, server.url("/gzip-of-nothing"), io.BytesIO(), limits, Stop())
        with pytest.raises((TimedOut, DownloadFailed)):
            work.result(3)


@pytest.mark.parametrize("path", ["/stall", "/redirect-to-stall"])
def test_silence_ends_with_the_total_time(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(fetch, "STALL_S", 60)
    with FileServer({"/redirect-to-stall": redirect("/stall")}) as server, pytest.raises(TimedOut):
        downloaded(server.url(path), timeout_s=SHORT_S)


def test_all_tries_share_the_total_time(server: FileServer) -> None:
    with pytest.raises((DownloadFailed, TimedOut)):
        downloaded(server.url("/broken"), timeout_s=SHORT_S, attempts=1000)
    assert 1 < server.requests["/broken"] < 1000


# Redirects


def test_a_redirect_loop_ends_after_as_many_as_allowed(server: FileServer) -> None:
    with pytest.raises(DownloadFailed):
        downloaded(server.url("/redirect-loop"))
    assert server.requests["/redirect-loop"] == LIMITS.max_redirects + 1


@pytest.mark.parametrize("location", ["http://[::1", "http://127.0.0.1:99999/", "http://a..example/"])
def test_a_redirect_to_a_malformed_address_is_a_failed_download(location: str) -> None:
    with FileServer({"/away": redirect(location)}) as server:
        with pytest.raises(DownloadFailed):
            downloaded(server.url("/away"))
        assert server.requests["/away"] == 1


def test_a_redirect_without_location_is_a_failed_download(server: FileServer) -> None:
    with pytest.raises(DownloadFailed):
        downloaded(server.url("/redirect-nowhere"))
    assert server.requests["/redirect-nowhere"] == 1


@pytest.mark.parametrize(
    "location", ["file:///etc/hostname", "file:///redirect", "ftp://127.0.0.1/a.mp3", "data:audio/wav;base64,AAAA"]
)
def test_a_redirect_to_another_scheme_is_refused(location: str) -> None:
    with FileServer({"/away": redirect(location)}) as server:
        with pytest.raises(DownloadRefused):
            downloaded(server.url("/away"))
        assert server.requests["/away"] == 1


# Addresses that aren't public


@pytest.mark.usefixtures("_only_public_addresses")
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.2",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "localhost",
        "0.0.0.0",  # noqa: S104  (an address to visit, none to bind)
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "[::ffff:169.254.169.254]",
        "[fe80::1]",
        "[fd00:ec2::254]",
    ],
)
def test_an_address_that_is_not_public_is_refused_before_any_connection(
    server: FileServer, visited: list[str], host: str
) -> None:
    with pytest.raises(DownloadRefused):
        downloaded(f"http://{host}:{server.port}/file")
    assert visited == []
    assert not server.requests


@pytest.mark.usefixtures("_only_public_addresses")
@pytest.mark.parametrize("name", ["files.example", "redirect.example"])
@pytest.mark.parametrize("addresses", [["169.254.169.254"], ["93.184.216.34", "10.0.0.1"]])
def test_a_name_with_an_address_that_is_not_public_is_refused_before_any_connection(
    monkeypatch: pytest.MonkeyPatch, visited: list[str], name: str, addresses: list[str]
) -> None:
    name_resolves(monkeypatch, name, addresses)
    with pytest.raises(DownloadRefused):
        downloaded(f"http://{name}/latest/meta-data")
    assert visited == []


@pytest.mark.usefixtures("_127_0_0_1_passes_for_public")
def test_a_redirect_inwards_is_refused_before_any_connection(visited: list[str]) -> None:
    with FileServer(host="127.0.0.2") as inner, FileServer({"/in": redirect(inner.url("/file"))}) as outer:
        with pytest.raises(DownloadRefused):
            downloaded(outer.url("/in"))
        assert outer.requests["/in"] == 1
        assert not inner.requests
    assert visited == ["127.0.0.1"]


@pytest.mark.usefixtures("_127_0_0_1_passes_for_public")
@pytest.mark.parametrize(
    "location", ["http://169.254.169.254/latest", "http://[::1]/", "//127.0.0.2/", "http://2130706434/"]
)
def test_a_redirect_to_an_address_that_is_not_public_is_refused(visited: list[str], location: str) -> None:
    with FileServer({"/in": redirect(location)}) as outer, pytest.raises(DownloadRefused):
        downloaded(outer.url("/in"))
    assert visited == ["127.0.0.1"]


@pytest.mark.usefixtures("_127_0_0_1_passes_for_public")
def test_the_address_that_was_checked_is_the_one_connected_to(
    server: FileServer, monkeypatch: pytest.MonkeyPatch, visited: list[str]
) -> None:
    name_resolves(monkeypatch, "files.example", ["127.0.0.1"], ["127.0.0.2"])
    assert downloaded(f"http://files.example:{server.port}/file") == FILE
    assert visited == ["127.0.0.1"]


def test_a_proxy_that_would_resolve_the_name_unchecked_is_not_used(
    server: FileServer, monkeypatch: pytest.MonkeyPatch, visited: list[str]
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.9:9")
    downloaded(server.url("/file"))
    assert set(visited) == {"127.0.0.1"}


# The caller's headers

TOKEN = "t0ken"  # noqa: S105  (of no one)
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}", "X-Api-Key": "k3y"}


def heard(server: FileServer, path: str) -> list[str]:
    """What each request for the path had of the caller's headers."""
    names = [name.lower() for name in AUTHORIZED]
    return ["".join(f"{name} " for name in names if name in each.headers) for each in server.received[path]]


def test_a_file_behind_a_bearer_token_is_had_with_it_alone() -> None:
    with FileServer({"/private": if_authorized(TOKEN, answer(200, FILE))}) as server:
        assert downloaded(server.url("/private"), AUTHORIZED) == FILE
        with pytest.raises(DownloadFailed, match="HTTP 401"):
            downloaded(server.url("/private"))


def test_each_try_has_the_headers() -> None:
    private = if_authorized(TOKEN, in_turn(answer(500), answer(200, FILE)))
    with FileServer({"/private": private}) as server:
        assert downloaded(server.url("/private"), AUTHORIZED) == FILE


@pytest.mark.parametrize("name", ["User-Agent", "user-agent", "USER-AGENT"])
def test_a_header_of_the_caller_takes_the_place_of_ours(server: FileServer, name: str) -> None:
    downloaded(server.url("/file"), {name: "caller's", "accept": "audio/*"})
    (request,) = server.received["/file"]
    assert (request.headers["user-agent"], request.headers["accept"]) == ("caller's", "audio/*")


def test_a_header_goes_before_a_user_in_the_url() -> None:
    with FileServer({"/private": if_authorized(TOKEN, answer(200, FILE))}) as server:
        assert downloaded(server.url("/private", user="us3r:pa55@"), AUTHORIZED) == FILE


@pytest.mark.parametrize("location", ["/private", "private?x=y", "{server}/private", "//{host}/private"])
def test_a_redirect_within_the_origin_keeps_the_headers(location: str) -> None:
    routes = {"/private": if_authorized(TOKEN, answer(200, FILE))}
    with FileServer(routes) as server:
        server.routes["/away"] = redirect(
            location.format(server=server.url("").upper().replace("HTTP", "http"), host=f"{server.host}:{server.port}")
        )
        assert downloaded(server.url("/away"), AUTHORIZED) == FILE


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_redirect_to_another_port_or_host_gets_none_of_the_headers(host: str) -> None:
    with FileServer(host=host) as other, FileServer({"/away": redirect(other.url("/file"))}) as server:
        assert downloaded(server.url("/away"), AUTHORIZED) == FILE
        assert heard(server, "/away") == ["authorization x-api-key "]
        assert heard(other, "/file") == [""]


def test_a_name_and_its_address_are_two_origins() -> None:
    with FileServer() as server:
        server.routes["/away"] = redirect(f"http://localhost:{server.port}/file")
        assert downloaded(server.url("/away"), AUTHORIZED) == FILE
        assert heard(server, "/file") == [""]


def test_once_a_redirect_has_left_the_origin_none_that_leads_back_gets_the_headers() -> None:
    with FileServer() as other, FileServer({"/away": redirect(other.url("/back"))}) as server:
        other.routes["/back"] = redirect(server.url("/file"))
        assert downloaded(server.url("/away"), AUTHORIZED) == FILE
        assert (heard(other, "/back"), heard(server, "/file")) == ([""], [""])


@pytest.mark.parametrize(
    ("url", "other", "is_same"),
    [
        ("http://a/", "http://a:80/x?y", True),
        ("https://a:443", "HTTPS://user@A/", True),
        ("https://a/", "http://a/", False),
        ("http://a/", "https://a/", False),
        ("https://a/", "http://a:443/", False),
        ("https://a/", "https://a:8443/", False),
        ("https://a/", "https://a.b/", False),
        ("https://a/", "https://b.a/", False),
    ],
)
def test_an_origin_is_scheme_host_and_port(url: str, other: str, is_same: bool) -> None:
    assert (origin(url) == origin(other)) is is_same


def test_a_default_port_in_the_url_is_not_in_the_host_header_as_signatures_expect(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: connect(self, (address[0], server.port)))
    assert downloaded(f"http://{server.host}:80/file") == FILE
    assert server.received["/file"][0].headers["host"] == server.host


@pytest.mark.parametrize("path", ["/missing", "/broken", "/no-answer", "/redirect-loop", "/stall"])
def test_headers_are_in_no_sentence_cause_or_log(
    server: FileServer, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with pytest.raises(WorkerError) as caught:
        downloaded(server.url(path), AUTHORIZED)
    told = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert [secret for secret in (TOKEN, "k3y", "Bearer") if secret in told] == []


# What the caller reads


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/missing", {}),
        ("/broken", {}),
        ("/no-answer", {}),
        ("/cut-off", {}),
        ("/huge", {}),
        ("/endless", {}),
        ("/trickle", {"timeout_s": SHORT_S}),
        ("/redirect-loop", {}),
        ("/redirect-nowhere", {}),
        ("/to-secret-malformed", {}),
        ("/to-secret-missing", {}),
        ("/to-secret-scheme", {}),
    ],
)
def test_a_sentence_holds_no_user_password_query_or_fragment(path: str, changes: dict[str, Any]) -> None:
    routes = {
        "/to-secret-malformed": redirect("http://us3r:pa55@[::1?token=s3cret"),
        "/to-secret-missing": redirect("/missing?token=s3cret"),
        "/to-secret-scheme": redirect("ftp://us3r:pa55@127.0.0.1/?token=s3cret"),
    }
    with FileServer(routes) as server, pytest.raises(WorkerError) as caught:
        downloaded(server.url(f"{path}?token=s3cret#fr4gment", user="us3r:pa55@"), **changes)
    said = str(caught.value)
    assert [secret for secret in ("us3r", "pa55", "token", "s3cret", "fr4gment") if secret in said] == []


@pytest.mark.usefixtures("_only_public_addresses")
def test_the_sentence_of_a_refusal_holds_no_secrets() -> None:
    with pytest.raises(DownloadRefused) as caught:
        downloaded("http://us3r:pa55@127.0.0.1/a.mp3?token=s3cret")
    assert "http://127.0.0.1/a.mp3:" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "harmless"),
    [
        ("https://files.example/a/b.mp3", "https://files.example/a/b.mp3"),
        ("https://files.example", "https://files.example"),
        ("https://user:pw@files.example/b.mp3?token=x#y", "https://files.example/b.mp3"),
        ("https://user:p@w@files.example/b.mp3", "https://files.example/b.mp3"),
        ("https://token@files.example?x", "https://files.example"),
        ("https://files.example:8443/b.mp3?x", "https://files.example:8443/b.mp3"),
        ("http://user:pw@[2001:db8::1]:80/b.mp3?x", "http://[2001:db8::1]:80/b.mp3"),
        ("HTTP://Files.Example/B.mp3?x", "http://files.example/B.mp3"),
    ],
)
def test_a_url_without_secrets_keeps_scheme_host_port_and_path(url: str, harmless: str) -> None:
    assert web.without_secrets(url) == harmless


# Stopping


class _Watched(io.BytesIO):
    """Tells of the first byte."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = Event()

    def write(self, data: Any) -> int:
        self.begun.set()
        return super().write(data)


class _PausingStop(Stop):
    """Tells of the first pause."""

    def __init__(self) -> None:
        super().__init__()
        self.pausing = Event()

    def wait(self, seconds: float) -> None:
        self.pausing.set()
        super().wait(seconds)


def test_a_stop_ends_a_trickling_download() -> None:
    to, stop = _Watched(), Stop()
    with ThreadPoolExecutor(1) as pool, FileServer() as server:
        work = pool.submit(fetch.download, server.url("/trickle"), to, LIMITS, stop)
        assert to.begun.wait(10)
        stop.set()
        with pytest.raises(Stopped):
            work.result(10)


def test_a_stop_ends_the_pause_before_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "FIRST_PAUSE_S", 30)
    stop = _PausingStop()
    with ThreadPoolExecutor(1) as pool, FileServer() as server:
        work = pool.submit(fetch.download, server.url("/broken"), io.BytesIO(), LIMITS, stop)
        assert stop.pausing.wait(10)
        stop.set()
        with pytest.raises(Stopped):
            work.result(10)
        assert server.requests["/broken"] == 1


@pytest.mark.parametrize("path", ["/headers-for-ever", "/chunk-head-for-ever"])
def test_what_comes_before_a_body_may_hold_its_thread_but_not_the_job(path: str) -> None:
    ended, stop = Event(), Stop()

    def download(url: str) -> None:
        try:
            fetch.download(url, io.BytesIO(), LIMITS, stop)
        finally:
            ended.set()

    async def job(pool: ThreadPoolExecutor, server: FileServer) -> None:
        work = asyncio.ensure_future(in_loose_thread(pool, stop, download, server.url(path)))
        await asyncio.to_thread(server.wait_for_request, path)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(work, 0.1)

    with ThreadPoolExecutor(1) as pool:
        with FileServer() as server:
            asyncio.run(job(pool, server))
        assert ended.wait(10), "the thread wasn't set free when the server went"
