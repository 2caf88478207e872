"""A caller's URL → a file, safely. Runs on the I/O pool.

Addresses, schemes and each redirect are checked by the SDK's `safe_get`, which connects to no address that isn't
public. Ours are the bytes, the seconds, the tries, and errors that don't repeat a URL's secrets.
"""

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import urlsplit, urlunsplit

import requests
import urllib3
from runpod.serverless.utils.rp_ssrf import SSRFError, safe_get

from whisper_worker.errors import DownloadFailed, DownloadRefused, TimedOut, TooLarge
from whisper_worker.stop import Stop

CHUNK_BYTES = 64 * 1024
STALL_S = 10.0  # a socket that is silent for so long counts as lost; also how late a stop can be noticed
FIRST_PAUSE_S = 0.5
NO_LIMIT = 2**63  # safe_get's own size limit is put out of reach: it can't be told from a refused address

HEADERS = {"User-Agent": "whisper-worker", "Accept": "*/*", "Accept-Encoding": "identity"}


@dataclass(frozen=True)
class DownloadLimits:
    max_bytes: int
    timeout_s: float
    attempts: int
    max_redirects: int


class _Lost(Exception):
    """This try failed in a way that the next may not."""


def download(url: str, to: IO[bytes], limits: DownloadLimits, stop: Stop) -> None:
    """Write the file at `url` to `to`, from its beginning.

    Raises DownloadRefused (address, scheme), DownloadFailed (status, connection), TooLarge, TimedOut (the total
    time, not that of one read), or Stopped soon after `stop` is set.
    """
    deadline = time.monotonic() + limits.timeout_s
    for attempt in range(1, limits.attempts + 1):
        try:
            _attempt(url, to, limits, deadline, stop)
            return
        except _Lost as lost:
            pause_s = FIRST_PAUSE_S * 2 ** (attempt - 1)
            if attempt == limits.attempts or time.monotonic() + pause_s >= deadline:
                raise DownloadFailed(f"{without_secrets(url)}: {lost}") from lost.__cause__
            stop.wait(pause_s)


def without_secrets(url: str) -> str:
    """The URL without user, query and fragment, where tokens and signatures are."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return urlunsplit((parts.scheme, f"{host}:{parts.port}" if parts.port else host, parts.path, "", ""))


def timed_out(url: str, limits: DownloadLimits) -> TimedOut:
    return TimedOut(f"{without_secrets(url)}: not downloaded within {limits.timeout_s:g} s")


def _attempt(url: str, to: IO[bytes], limits: DownloadLimits, deadline: float, stop: Stop) -> None:
    with _open(url, limits, deadline) as response:
        if response.status_code == 429 or response.status_code >= 500:
            raise _Lost(f"the server answered HTTP {response.status_code}")
        if response.status_code != 200:
            raise DownloadFailed(f"{without_secrets(url)}: the server answered HTTP {response.status_code}")
        declared = response.headers.get("Content-Length", "")
        expected = int(declared) if declared.isdigit() else None
        if expected is not None and expected > limits.max_bytes:
            raise TooLarge(f"the file has {expected} bytes, {limits.max_bytes} are allowed")
        to.seek(0)
        to.truncate()
        for data in _received(response.raw, url, limits, deadline):
            stop.check()
            to.write(data)
            if to.tell() > limits.max_bytes:
                raise TooLarge(f"the file has more than the {limits.max_bytes} bytes that are allowed")
        if expected is not None and response.raw.tell() < expected:
            raise _Lost(f"the connection ended after {response.raw.tell()} of {expected} bytes")


def _received(body: Any, url: str, limits: DownloadLimits, deadline: float) -> Iterator[bytes]:
    """What arrives, as it arrives: `read` and `iter_content` wait for a full chunk, on a trickle for hours."""
    while True:
        try:
            data = body.read1(CHUNK_BYTES, decode_content=True)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            _check_time(url, limits, deadline)
            raise _Lost("the connection was lost") from error
        _check_time(url, limits, deadline)
        if not data:
            return
        yield data


def _open(url: str, limits: DownloadLimits, deadline: float) -> requests.Response:
    _check_time(url, limits, deadline)
    patience_s = min(STALL_S, max(deadline - time.monotonic(), 0.1))
    try:
        response: requests.Response = safe_get(
            url,
            timeout=patience_s,
            headers=HEADERS,
            max_bytes=NO_LIMIT,
            max_redirects=limits.max_redirects,
        )
        return response
    except SSRFError as error:
        if isinstance(error.__cause__, socket.gaierror):
            raise _Lost("the host's name can't be resolved") from error
        if "redirect" in str(error):
            raise DownloadFailed(f"{without_secrets(url)}: it redirects too often, or nowhere") from error
        raise DownloadRefused(
            f"{without_secrets(url)}: it leads to an address or scheme that isn't public http or https"
        ) from error
    except requests.exceptions.Timeout as error:
        _check_time(url, limits, deadline)
        raise _Lost("the server doesn't answer") from error
    except requests.exceptions.SSLError as error:
        raise DownloadFailed(f"{without_secrets(url)}: no secure connection could be made") from error
    except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema, UnicodeError) as error:
        raise DownloadFailed(f"{without_secrets(url)}: it is no valid URL") from error
    except (requests.exceptions.RequestException, OSError) as error:
        raise _Lost("no connection could be made") from error
    except ValueError as error:  # what urllib.parse says of a redirect to a malformed address
        raise DownloadFailed(f"{without_secrets(url)}: it redirects to no valid URL") from error


def _check_time(url: str, limits: DownloadLimits, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise timed_out(url, limits)
