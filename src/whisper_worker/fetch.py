"""A caller's URL → a file, safely. Runs on the download pool.

What may be visited is checked in `web.py`, at each redirect. Here are the redirects, the bytes, the seconds, the tries,
and errors without a URL's secrets.

The caller's headers go to the origin of the URL they came with (scheme, host and port), and nowhere else. Once a
redirect has left it they aren't sent any more, not even if the next one leads back: a foreign host must not choose
what is asked for in the caller's name.
"""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import urljoin

import requests
import urllib3

from whisper_worker import web
from whisper_worker.errors import DownloadFailed, DownloadRefused, TimedOut, TooLarge
from whisper_worker.request import origin
from whisper_worker.stop import Stop
from whisper_worker.web import without_secrets

CHUNK_BYTES = 64 * 1024
STALL_S = 10.0  # a socket that is silent for so long counts as lost; also how late a stop can be noticed
ZIPPED = ("gzip", "x-gzip", "deflate")  # zlib unpacks these
COMPRESSED = (*ZIPPED, "br", "zstd", "compress", "x-compress")
REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True)
class DownloadLimits:
    max_bytes: int
    timeout_s: float
    attempts: int
    max_redirects: int


@dataclass(frozen=True)
class _Download:
    """What each step of one download needs to know."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    limits: DownloadLimits
    effort: web.Effort


def download(
    url: str, to: IO[bytes], limits: DownloadLimits, stop: Stop, headers: Mapping[str, str] | None = None
) -> None:
    """Write the file at `url` to `to`, from its beginning. `headers` are the caller's, and go before our own.

    Raises DownloadRefused (address, scheme), DownloadFailed (status, connection), TooLarge, TimedOut (the total
    time, not that of one read), or Stopped soon after `stop` is set.
    """
    wanted = _Download(url, headers or {}, limits, web.Effort.begin(limits.timeout_s, limits.attempts, stop))
    try:
        wanted.effort.persist(lambda: _attempt(wanted, to))
    except web.Refused as refused:
        raise DownloadRefused(f"{without_secrets(url)}: {refused}") from refused.__cause__
    except web.Failed as failed:
        raise DownloadFailed(f"{without_secrets(url)}: {failed}") from failed.__cause__
    except web.OutOfTime:
        raise timed_out(url, limits) from None


def timed_out(url: str, limits: DownloadLimits) -> TimedOut:
    return TimedOut(f"{without_secrets(url)}: not downloaded within {limits.timeout_s:g} s")


def _attempt(wanted: _Download, to: IO[bytes]) -> None:
    max_bytes = wanted.limits.max_bytes
    with _opened(wanted) as response:
        if web.may_pass(response.status_code):
            raise web.Lost(f"the server answered HTTP {response.status_code}")
        if response.status_code != 200:
            raise web.Failed(f"the server answered HTTP {response.status_code}")
        declared = response.headers.get("Content-Length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
            raise TooLarge(f"the file has {declared[:20]} bytes, {max_bytes} are allowed")
        to.seek(0)
        to.truncate()
        for data in _unpacked(response, wanted.effort):
            wanted.effort.check()
            to.write(data)
            if to.tell() > max_bytes:
                raise TooLarge(f"the file has more than the {max_bytes} bytes that are allowed")


def _received(body: Any, effort: web.Effort) -> Iterator[bytes]:
    """What arrives, as it arrives: `read` and `iter_content` wait for a full chunk, on a trickle for hours."""
    while True:
        try:
            data = body.read1(CHUNK_BYTES, decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            effort.check()
            raise web.Lost("the connection was lost") from error
        if not data:
            return
        yield data


def _unpacked(response: requests.Response, effort: web.Effort) -> Iterator[bytes]:
    """The body without its compression. We ask for none, but object stores repeat what a file was uploaded with:
    `gzip`, or names of no compression (`aws-chunked`), which change nothing.

    Yields at least once for each piece that comes in, if only nothing: urllib3's own decoding loops on empty blocks,
    where no time limit reaches.
    """
    received = _received(response.raw, effort)
    encodings = response.headers.get("Content-Encoding", "").lower().replace(" ", "").split(",")
    compressions = [encoding for encoding in encodings if encoding in COMPRESSED]
    if not compressions:
        yield from received
        return
    if len(compressions) > 1 or compressions[0] not in ZIPPED:
        raise web.Failed(f"the file comes compressed as {', '.join(compressions)}")
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # either header
    try:
        for piece in received:
            while piece:
                yield unpacker.decompress(piece, CHUNK_BYTES)
                piece = unpacker.unconsumed_tail
    except zlib.error as error:
        raise web.Lost("the file came in a broken encoding") from error
    if not unpacker.eof:
        raise web.Lost("the file came in a broken encoding")


@contextmanager
def _opened(wanted: _Download) -> Iterator[requests.Response]:
    """The answer behind all redirects, whose bodies are not read."""
    here, headers = wanted.url, wanted.headers
    for _ in range(wanted.limits.max_redirects + 1):
        with web.answered("GET", here, wanted.effort, silence_s=STALL_S, headers=headers) as response:
            if response.status_code not in REDIRECTS:
                yield response
                return
            location = response.headers.get("Location")
        if not location:
            raise web.Failed("it redirects to nowhere")
        try:
            here = urljoin(here, location)
            if origin(here) != origin(wanted.url):
                headers = {}
        except ValueError:
            raise web.Failed("it redirects to no valid URL") from None
    raise web.Failed(f"it redirects more than {wanted.limits.max_redirects} times")
