"""A caller's URL → a file, safely. Runs on the download pool.

Addresses are checked by the SDK's SSRF protection: only public ones, at each redirect, and the connection goes to the
very address that was checked, through no proxy. Its `safe_get` isn't used: `requests` reads the body of each redirect
into memory, past every limit. Ours are also the bytes, the seconds, the tries, and errors without a URL's secrets.
"""

import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import urljoin, urlsplit, urlunsplit

import requests
import urllib3
from runpod.serverless.utils.rp_ssrf import PinnedIPAdapter, SSRFError, resolve_and_validate

from whisper_worker.errors import DownloadFailed, DownloadRefused, TimedOut, TooLarge
from whisper_worker.stop import Stop

CHUNK_BYTES = 64 * 1024
STALL_S = 10.0  # a socket that is silent for so long counts as lost; also how late a stop can be noticed
FIRST_PAUSE_S = 0.5
ZIPPED = ("gzip", "x-gzip", "deflate")  # zlib unpacks these
COMPRESSED = (*ZIPPED, "br", "zstd", "compress", "x-compress")
REDIRECTS = (301, 302, 303, 307, 308)

HEADERS = {"User-Agent": "whisper-worker", "Accept": "*/*", "Accept-Encoding": "identity"}


@dataclass(frozen=True)
class DownloadLimits:
    max_bytes: int
    timeout_s: float
    attempts: int
    max_redirects: int


class _Lost(Exception):
    """This try failed in a way that the next may not."""


@dataclass(frozen=True)
class _Download:
    """What each step of one download needs to know."""

    url: str
    limits: DownloadLimits
    deadline: float
    stop: Stop

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise timed_out(self.url, self.limits)

    def failed(self, why: str) -> DownloadFailed:
        return DownloadFailed(f"{without_secrets(self.url)}: {why}")


def download(url: str, to: IO[bytes], limits: DownloadLimits, stop: Stop) -> None:
    """Write the file at `url` to `to`, from its beginning.

    Raises DownloadRefused (address, scheme), DownloadFailed (status, connection), TooLarge, TimedOut (the total
    time, not that of one read), or Stopped soon after `stop` is set.
    """
    wanted = _Download(url, limits, time.monotonic() + limits.timeout_s, stop)
    for attempt in range(1, limits.attempts + 1):
        try:
            _attempt(wanted, to)
            return
        except _Lost as lost:
            pause_s = FIRST_PAUSE_S * 2 ** (attempt - 1)
            if attempt == limits.attempts or time.monotonic() + pause_s >= wanted.deadline:
                raise wanted.failed(str(lost)) from lost.__cause__
            stop.wait(pause_s)


def without_secrets(url: str) -> str:
    """The URL without user, query and fragment, where tokens and signatures are."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return urlunsplit((parts.scheme, f"{host}:{parts.port}" if parts.port else host, parts.path, "", ""))


def timed_out(url: str, limits: DownloadLimits) -> TimedOut:
    return TimedOut(f"{without_secrets(url)}: not downloaded within {limits.timeout_s:g} s")


def _attempt(wanted: _Download, to: IO[bytes]) -> None:
    max_bytes = wanted.limits.max_bytes
    with _opened(wanted) as response:
        if response.status_code == 429 or response.status_code >= 500:
            raise _Lost(f"the server answered HTTP {response.status_code}")
        if response.status_code != 200:
            raise wanted.failed(f"the server answered HTTP {response.status_code}")
        declared = response.headers.get("Content-Length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
            raise TooLarge(f"the file has {declared[:20]} bytes, {max_bytes} are allowed")
        to.seek(0)
        to.truncate()
        for data in _unpacked(wanted, response):
            wanted.stop.check()
            wanted.check_time()
            to.write(data)
            if to.tell() > max_bytes:
                raise TooLarge(f"the file has more than the {max_bytes} bytes that are allowed")


def _received(wanted: _Download, body: Any) -> Iterator[bytes]:
    """What arrives, as it arrives: `read` and `iter_content` wait for a full chunk, on a trickle for hours."""
    while True:
        try:
            data = body.read1(CHUNK_BYTES, decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            wanted.check_time()
            raise _Lost("the connection was lost") from error
        if not data:
            return
        yield data


def _unpacked(wanted: _Download, response: requests.Response) -> Iterator[bytes]:
    """The body without its compression. We ask for none, but object stores repeat what a file was uploaded with:
    `gzip`, or names of no compression (`aws-chunked`), which change nothing.

    Yields at least once for each piece that comes in, if only nothing: urllib3's own decoding loops on empty blocks,
    where no time limit reaches.
    """
    received = _received(wanted, response.raw)
    encodings = response.headers.get("Content-Encoding", "").lower().replace(" ", "").split(",")
    compressions = [encoding for encoding in encodings if encoding in COMPRESSED]
    if not compressions:
        yield from received
        return
    if len(compressions) > 1 or compressions[0] not in ZIPPED:
        raise wanted.failed(f"the file comes compressed as {', '.join(compressions)}")
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # either header
    try:
        for piece in received:
            while piece:
                yield unpacker.decompress(piece, CHUNK_BYTES)
                piece = unpacker.unconsumed_tail
    except zlib.error as error:
        raise _Lost("the file came in a broken encoding") from error
    if not unpacker.eof:
        raise _Lost("the file came in a broken encoding")


@contextmanager
def _opened(wanted: _Download) -> Iterator[requests.Response]:
    """The answer behind all redirects, whose bodies are not read."""
    here = wanted.url
    for _ in range(wanted.limits.max_redirects + 1):
        with _answered(wanted, here) as response:
            if response.status_code not in REDIRECTS:
                yield response
                return
            location = response.headers.get("Location")
        if not location:
            raise wanted.failed("it redirects to nowhere")
        try:
            here = urljoin(here, location)
        except ValueError as error:
            raise wanted.failed("it redirects to no valid URL") from error
    raise wanted.failed(f"it redirects more than {wanted.limits.max_redirects} times")


@contextmanager
def _answered(wanted: _Download, here: str) -> Iterator[requests.Response]:
    """The answer to one GET of `here`, from the first of its addresses that can be reached."""
    request = _prepared(wanted, here)
    addresses = _public_addresses(wanted, here)
    while True:
        address = addresses.pop(0)
        wanted.check_time()
        patience_s = min(STALL_S, max(wanted.deadline - time.monotonic(), 0.1))
        with closing(PinnedIPAdapter(address)) as adapter:
            try:
                response = adapter.send(request, stream=True, timeout=patience_s, verify=True)
            except requests.exceptions.SSLError as error:
                raise wanted.failed("no secure connection could be made") from error
            except (requests.exceptions.InvalidURL, UnicodeError) as error:
                raise wanted.failed("it is no valid URL") from error
            except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                if addresses:
                    continue
                wanted.check_time()
                raise _Lost("the server can't be reached, or doesn't answer") from error
            with response:
                yield response
                return


def _public_addresses(wanted: _Download, here: str) -> list[str]:
    """The addresses of the host in `here`, all of them public. Raises DownloadRefused, DownloadFailed or _Lost."""
    try:
        parts = urlsplit(here)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise wanted.failed("it redirects to no valid URL") from error
    if parts.scheme not in ("http", "https"):
        raise DownloadRefused(f"{without_secrets(wanted.url)}: it leads to something that isn't http or https")
    if not host:
        raise wanted.failed("it redirects to a URL without a host")
    try:
        return list(resolve_and_validate(host, port))
    except SSRFError as error:
        if isinstance(error.__cause__, socket.gaierror):
            raise _Lost("the host's name can't be resolved") from error
        raise DownloadRefused(f"{without_secrets(wanted.url)}: it leads to an address that isn't public") from error
    except (UnicodeError, ValueError) as error:  # a name that can't be a host's
        raise wanted.failed("it is no valid URL") from error


def _prepared(wanted: _Download, here: str) -> requests.PreparedRequest:
    try:
        return requests.Request("GET", here, headers=HEADERS).prepare()
    except (requests.exceptions.RequestException, UnicodeError, ValueError) as error:
        raise wanted.failed("it is no valid URL") from error
