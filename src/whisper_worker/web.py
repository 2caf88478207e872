"""One HTTP request to a place that a stranger may have named. Knows nothing of files and results. Runs on I/O threads.

Addresses are checked by the SDK's SSRF protection: only public ones, and the connection goes to the very address that
was checked, through no proxy, and no redirect is followed. Its `safe_get` isn't used: `requests` reads the body of each
redirect into memory, past every limit.

No sentence here holds a URL, and no cause either: those who name the place say which part of it may be told, and the
log prints causes in full.
"""

import io
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import requests
import urllib3
from runpod.serverless.utils.rp_ssrf import PinnedIPAdapter, SSRFError, resolve_and_validate

from whisper_worker.request import PORTS, origin
from whisper_worker.stop import Stop

FIRST_PAUSE_S = 0.5
HEADERS = {"User-Agent": "whisper-worker", "Accept": "*/*", "Accept-Encoding": "identity"}


class Refused(Exception):
    """The URL leads to an address this worker must not visit."""


class Failed(Exception):
    """It is allowed, but another try won't help."""


class Lost(Exception):
    """This try failed in a way that the next may not."""


class OutOfTime(Exception):
    """The total time is over, that of all tries."""


@dataclass(frozen=True)
class Effort:
    """How long, and how often, something is tried."""

    deadline: float
    attempts: int
    stop: Stop

    @classmethod
    def begin(cls, timeout_s: float, attempts: int, stop: Stop) -> "Effort":
        return cls(time.monotonic() + timeout_s, attempts, stop)

    def check(self) -> None:
        """Raises Stopped or OutOfTime."""
        self.stop.check()
        if time.monotonic() > self.deadline:
            raise OutOfTime

    def patience_s(self, silence_s: float) -> float:
        return min(silence_s, max(self.deadline - time.monotonic(), 0.1))

    def persist(self, act: Callable[[], None]) -> None:
        """Until it isn't Lost, with pauses; Failed when there is no more time, or there were enough tries."""
        for attempt in range(1, self.attempts + 1):
            try:
                act()
                return
            except Lost as lost:
                pause_s = FIRST_PAUSE_S * 2 ** (attempt - 1)
                if attempt == self.attempts or time.monotonic() + pause_s >= self.deadline:
                    raise Failed(str(lost)) from lost.__cause__
                self.stop.wait(pause_s)


@contextmanager
def answered(
    method: str,
    url: str,
    effort: Effort,
    *,
    silence_s: float,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    is_trusted: bool = False,
) -> Iterator[requests.Response]:
    """The answer, its body unread, from the first of the host's addresses that can be reached.

    A connection that is silent for `silence_s` counts as lost: so late, too, can a stop be noticed. `headers` go before
    our own. With `is_trusted`, the address may be a private one. Raises Refused, Failed, Lost, OutOfTime or Stopped.
    """
    addresses = _addresses(url, is_trusted)
    while True:
        address = addresses.pop(0)
        effort.check()
        request = _prepared(method, url, headers or {}, _Body(body, effort) if body else None)
        with closing(PinnedIPAdapter(address)) as adapter:
            try:
                response = adapter.send(request, stream=True, timeout=effort.patience_s(silence_s), verify=True)
            except requests.exceptions.SSLError as error:
                raise Failed("no secure connection could be made") from _tellable(error)
            except (requests.exceptions.InvalidURL, UnicodeError):
                raise Failed("it leads to no valid URL") from None
            except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                if addresses:
                    continue
                effort.check()
                raise Lost("the server can't be reached, or doesn't answer") from _tellable(error)
            with response:
                yield response
                return


def may_pass(status: int) -> bool:
    """Whether it is worth another try."""
    return status == 429 or status >= 500


def without_secrets(url: str) -> str:
    """The URL without user, query and fragment, where tokens and signatures are."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return urlunsplit((parts.scheme, f"{host}:{parts.port}" if parts.port else host, parts.path, "", ""))


class _Body(io.BytesIO):
    """Asks before each chunk whether to go on. The length is kept: storage takes no chunked encoding."""

    def __init__(self, data: bytes, effort: Effort) -> None:
        super().__init__(data)
        self._effort = effort

    def read(self, size: int | None = -1) -> bytes:
        self._effort.check()
        return super().read(size)


def _addresses(url: str, is_trusted: bool) -> list[str]:
    """Those of the URL's host, all of them public unless it is trusted."""
    try:
        scheme, host, port = origin(url)
    except ValueError:
        raise Failed("it leads to no valid URL") from None
    if scheme not in PORTS:
        raise Refused("it leads to something that isn't http or https")
    if not host or port is None:
        raise Failed("it leads to a URL without a host")
    try:
        if is_trusted:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(info[4][0]) for info in found))
        return list(resolve_and_validate(host, port))
    except SSRFError as error:
        if isinstance(error.__cause__, socket.gaierror):
            raise Lost("the host's name can't be resolved") from error
        raise Refused("it leads to an address that isn't public") from error
    except socket.gaierror as error:
        raise Lost("the host's name can't be resolved") from error
    except (UnicodeError, ValueError):  # a name that can't be a host's
        raise Failed("it leads to no valid URL") from None


def _prepared(method: str, url: str, headers: Mapping[str, str], body: _Body | None) -> requests.PreparedRequest:
    try:
        request = requests.Request(method, _without_default_port(url), headers=HEADERS, data=body).prepare()
    except (requests.exceptions.RequestException, UnicodeError, ValueError):
        raise Failed("it leads to no valid URL") from None
    request.headers.update(headers)  # only now: `requests` puts a user in the URL above a header, and quotes bad ones
    return request


def _without_default_port(url: str) -> str:
    """Signatures hold for a `Host` without it, which is what clients send; the SDK's adapter repeats the URL's."""
    parts = urlsplit(url)
    if parts.port is None or parts.port != PORTS.get(parts.scheme):
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition(":")[0]))


def _tellable(error: Exception) -> BaseException | None:
    """What is behind an error of `requests`, where urllib3's own sentence repeats the URL with its query."""
    inner = error.args[0] if error.args else None
    return inner.reason if isinstance(inner, urllib3.exceptions.MaxRetryError) else error
