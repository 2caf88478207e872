"""The model hub on a loopback address: as much of its API as the worker's download asks for, of a folder's files.

`routes` of the file server under it can be replaced, so that it fails in the ways in which a hub does.
"""

import hashlib
import json
from pathlib import Path
from threading import Event
from typing import Any

from file_server import Answer, Exchange, FileServer, answer, head

COMMIT = "1" * 40
LARGE = 1_000_000  # bytes; from here on a file is one of Git LFS, and has a SHA-256


class LocalHub(FileServer):
    """Has one repository; use it in a `with`. `env` is what makes a process take it for the hub."""

    def __init__(self, repository: str, folder: Path) -> None:
        self._files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.question = f"/api/models/{repository}"
        self.paths = {name: f"/{repository}/resolve/{COMMIT}/{name}" for name in self._files}
        answers = {self.paths[name]: self._file(data) for name, data in self._files.items()}
        super().__init__({**answers, self.question: self.about(self._files)})

    def __enter__(self) -> "LocalHub":
        super().__enter__()
        return self

    @property
    def env(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url(""), "NO_PROXY": "127.0.0.1"}

    def about(self, files: dict[str, bytes]) -> Answer:
        """An answer to what there is in the repository."""
        siblings = [_sibling(name, data) for name, data in files.items()]
        return answer(200, json.dumps({"id": "x", "sha": COMMIT, "siblings": siblings}).encode())

    def stop_after(self, name: str, count: int) -> Event:
        """Send so many bytes of the file to the first request for it, and then no more; to others what they ask for.
        Tells when they are sent."""
        data, path, sent = self._files[name], self.paths[name], Event()

        def cut(exchange: Exchange) -> None:
            if exchange.number > 1:
                return self._file(data)(exchange)
            exchange.send(head(200, f"Content-Length: {len(data)}") + data[:count])
            sent.set()
            return exchange.stall()

        self.routes[path] = cut
        return sent

    def _file(self, data: bytes) -> Answer:
        def send(exchange: Exchange) -> None:
            first = int(exchange.request.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            status, part = (206, data[first:]) if first else (200, data)
            where = [f"Content-Range: bytes {first}-{len(data) - 1}/{len(data)}"] if first else []
            exchange.send(head(status, f"Content-Length: {len(part)}", *where) + part)

        return send


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    sibling = {"rfilename": name, "size": len(data), "blobId": blob}
    if len(data) >= LARGE:
        lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return {**sibling, "lfs": lfs}
    return sibling
