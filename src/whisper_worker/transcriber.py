"""What the rest of the worker needs of an engine; `engine` says what each member promises."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

from whisper_worker.audio import Samples
from whisper_worker.pieces import Piece
from whisper_worker.request import Request
from whisper_worker.stop import Stop
from whisper_worker.transcript import Language, Said


class Walk(Protocol):
    first_run: float | None
    language: "Future[Language]"

    def piece(self, index: int) -> Iterator[Said]: ...


class Transcriber(Protocol):
    name: str
    device: str
    speaks_english_only: bool

    @property
    def longest_call_s(self) -> float: ...

    def check(self, request: Request) -> None: ...

    def walk(self, pieces: Sequence[Piece], samples: Samples, request: Request, stop: Stop) -> Walk: ...

    def reload(self) -> None: ...

    def close(self) -> None: ...
