"""A server of files on a loopback address that answers well, or in the ways in which servers fail or attack. What is
sent to it, it takes if the answer does.

An answer is a function of one exchange; `ROUTES` has one under each path. No answer outlives the server: closing it
ends their connections and wakes those that pause.
"""

import gzip
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedIOBase
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Condition, Event, Thread
from types import TracebackType

FILE = bytes(range(256)) * 1000
PAGE = b"<!doctype html><title>Sign in</title>"
ZEROS = bytes(32 * 1024 * 1024)  # more than the buffers of a connection hold, so who doesn't read it keeps it back
PACE_S = 0.02  # from one drop of a trickle to the next


@dataclass(frozen=True)
class Received:
    method: str
    target: str  # path and query
    headers: Mapping[str, str]  # by names in lower case
    body: BufferedIOBase


class Exchange:
    """One request, and the connection to answer it on."""

    def __init__(self, request: "Received", connection: socket.socket, number: int, closing: Event) -> None:
        self.request = request
        self.number = number  # 1 for the first request of a path
        self._connection = connection
        self._closing = closing

    def take(self) -> bytes:
        """The request's body."""
        return self.request.body.read(int(self.request.headers.get("content-length", 0)))

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def trickle(self, data: bytes) -> None:
        """A few bytes now and then, for ever."""
        while not self._closing.wait(PACE_S):
            self.send(data)

    def reset(self) -> None:
        """Close the connection so that the other side sees an error."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.close()

    def stall(self) -> None:
        self._closing.wait()


Answer = Callable[[Exchange], None]


def head(status: int, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Reason", "Connection: close", *headers, "", ""]).encode("latin-1")


def answer(status: int, body: bytes = b"", *headers: str) -> Answer:
    """Adds a true Content-Length unless `headers` say how long the body is."""
    if not any(line.startswith(("Content-Length:", "Transfer-Encoding:")) for line in headers):
        headers = (*headers, f"Content-Length: {len(body)}")
    return lambda exchange: exchange.send(head(status, *headers) + body)


def redirect(location: str, body: bytes = b"") -> Answer:
    return answer(302, body, f"Location: {location}")


def taken(into: list[bytes], then: Answer | None = None) -> Answer:
    """Reads the body, which goes to `into`, and then answers: with 200 unless told otherwise."""

    def act(exchange: Exchange) -> None:
        into.append(exchange.take())
        (then or answer(200))(exchange)

    return act


def if_authorized(token: str, then: Answer) -> Answer:
    def act(exchange: Exchange) -> None:
        is_authorized = exchange.request.headers.get("authorization") == f"Bearer {token}"
        (then if is_authorized else answer(401))(exchange)

    return act


def in_turn(*answers: Answer) -> Answer:
    """The first to a path's first request, and so on; the last to all that follow."""
    return lambda exchange: answers[min(exchange.number, len(answers)) - 1](exchange)


def _endless(exchange: Exchange) -> None:
    exchange.send(head(200))
    while True:
        exchange.send(FILE)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _endless_chunks(exchange: Exchange) -> None:
    exchange.send(head(200, "Transfer-Encoding: chunked"))
    while True:
        exchange.send(_chunk(FILE))


def _huge(exchange: Exchange) -> None:
    exchange.send(head(200, f"Content-Length: {10**15}"))
    exchange.stall()


def _trickle(exchange: Exchange) -> None:
    exchange.send(head(200))
    exchange.trickle(b"a")


def _stall(exchange: Exchange) -> None:
    exchange.send(head(200, f"Content-Length: {len(FILE)}") + FILE[:1000])
    exchange.stall()


def _headers_for_ever(exchange: Exchange) -> None:
    exchange.send(b"HTTP/1.1 200 OK\r\nX-Padding: ")
    exchange.trickle(b"a")


def _chunk_head_for_ever(exchange: Exchange) -> None:
    exchange.send(head(200, "Transfer-Encoding: chunked") + b"ff;")
    exchange.trickle(b"a")


def _gzip_of_nothing(exchange: Exchange) -> None:
    """Blocks without content: much to decode, nothing to give."""
    exchange.send(head(200, "Content-Encoding: gzip") + gzip.compress(b"")[:10])
    exchange.trickle(b"\x00\x00\x00\xff\xff")


_file = answer(200, FILE)
_cut_off = answer(200, ZEROS[: 2 * len(FILE)], f"Content-Length: {3 * len(FILE)}")  # longer than the whole file

ROUTES: dict[str, Answer] = {
    "/file": _file,
    "/page": answer(200, PAGE, "Content-Type: text/html"),
    "/empty": answer(200),
    "/chunks": answer(200, _chunk(FILE) + _chunk(b""), "Transfer-Encoding: chunked"),
    "/gzip": answer(200, gzip.compress(FILE), "Content-Encoding: gzip"),
    "/gzip-bomb": answer(200, gzip.compress(ZEROS), "Content-Encoding: gzip"),
    "/gzip-broken": answer(200, PAGE, "Content-Encoding: gzip"),
    "/no-content": answer(204),
    "/forbidden": answer(403),
    "/missing": answer(404),
    "/broken": answer(500),
    "/broken-once": in_turn(answer(500, PAGE), _file),
    "/busy-once": in_turn(answer(429, PAGE, "Retry-After: 0"), _file),
    "/cut-off": _cut_off,
    "/cut-off-once": in_turn(_cut_off, _file),
    "/cut-off-between-chunks": answer(200, _chunk(FILE), "Transfer-Encoding: chunked"),
    "/cut-off-in-chunk": answer(200, _chunk(FILE)[:-1000], "Transfer-Encoding: chunked"),
    "/length-too-small": answer(200, FILE, "Content-Length: 1000"),
    "/no-answer": lambda _: None,
    "/endless": _endless,
    "/endless-chunks": _endless_chunks,
    "/huge": _huge,
    "/trickle": _trickle,
    "/stall": _stall,
    "/headers-for-ever": _headers_for_ever,
    "/chunk-head-for-ever": _chunk_head_for_ever,
    "/gzip-of-nothing": _gzip_of_nothing,
    "/redirect": redirect("/file"),
    "/redirect-loop": redirect("/redirect-loop"),
    "/redirect-nowhere": answer(302),
    "/redirect-with-large-body": redirect("/file", ZEROS),
}


class FileServer(ThreadingTCPServer):
    """Serves `ROUTES` and its own; use it in a `with`."""

    allow_reuse_address = True
    request_queue_size = 128
    daemon_threads = False  # so that closing waits for them

    def __init__(self, routes: Mapping[str, Answer] | None = None, host: str = "127.0.0.1") -> None:
        self.routes = {**ROUTES, **(routes or {})}
        self.requests: Counter[str] = Counter()  # by path, without the query
        self.received: dict[str, list[Received]] = defaultdict(list)  # the same requests
        self.sent: Counter[str] = Counter()  # the answers whose last byte has been taken
        self.closing = Event()
        self._changed = Condition()
        self._connections: set[socket.socket] = set()
        super().__init__((host, 0), _Handler)
        self.host, self.port = self.socket.getsockname()
        self._thread = Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> "FileServer":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self._thread.join()
        self.closing.set()
        with self._changed:
            for connection in self._connections:
                with suppress(OSError):  # the client may have gone
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def url(self, path: str, user: str = "") -> str:
        return f"http://{user}{self.host}:{self.port}{path}"

    def wait_for_request(self, path: str, count: int = 1) -> None:
        """Or so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.requests[path] >= count, timeout=20), f"nobody asked for {path}"

    def serve(self, request: Received, connection: socket.socket) -> None:
        path = request.target.partition("?")[0]
        with self._changed:
            self.received[path].append(request)
            self.requests[path] += 1
            number = self.requests[path]
            self._changed.notify_all()
        self.routes.get(path, answer(404))(Exchange(request, connection, number, self.closing))
        with self._changed:
            self.sent[path] += 1

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        assert isinstance(request, socket.socket)
        with self._changed:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        assert isinstance(request, socket.socket)
        with self._changed:
            self._connections.discard(request)
        super().shutdown_request(request)


class _Handler(StreamRequestHandler):
    server: FileServer
    connection: socket.socket

    def handle(self) -> None:
        with suppress(OSError):  # the client has gone
            request_line = self.rfile.readline().decode().split()
            headers = {}
            while line := self.rfile.readline().decode("latin-1").strip():
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            if request_line:
                request = Received(request_line[0], request_line[1], headers, self.rfile)
                self.server.serve(request, self.connection)
