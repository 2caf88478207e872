"""What the rest of the worker needs of an engine; `engine` says what each member promises."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

from whisper_worker.pieces import Track
from whisper_worker.request import Request
from whisper_worker.stop import Stop
from whisper_worker.transcript import Language, Said


class Walk(Protocol):
    first_run: float | None
    language: "Future[Language]"

    def __len__(self) -> int: ...

    def piece(self, index: int) -> Iterator[Said]: ...

    def detect(self) -> Language | None: ...


class Transcriber(Protocol):
    name: str
    device: str
    speaks_english_only: bool

    @property
    def longest_call_s(self) -> float: ...

    def check(self, request: Request) -> None: ...

    def remarks(self, request: Request) -> tuple[str, ...]: ...

    def walk(self, tracks: Sequence[Track], request: Request, stop: Stop) -> Walk: ...

    def reload(self) -> None: ...

    def close(self) -> None: ...
