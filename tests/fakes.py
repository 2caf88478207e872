"""Hand-written stand-ins with the real shapes."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from whisper_worker.audio import SAMPLE_RATE
from whisper_worker.model_files import ModelFiles
from whisper_worker.models import Model
from whisper_worker.pieces import Piece, Track
from whisper_worker.request import Request
from whisper_worker.speech import Speech
from whisper_worker.stop import Stop
from whisper_worker.transcript import Language, Said, Segment, Word


def segment(start: float, end: float, text: str = " Hello.", words: tuple[Word, ...] | None = None) -> Segment:
    return Segment(
        id=1,
        seek=0,
        start=start,
        end=end,
        text=text,
        tokens=(50363, 18435, 13, 50413),
        temperature=0.0,
        avg_logprob=-0.25,
        compression_ratio=1.1,
        no_speech_prob=0.01,
        words=words,
    )


class FakeEngine:
    """Says "Hello." in each piece. `act`, when given, runs in its place, in the piece's thread."""

    name = "fake"
    device = "cpu"
    longest_call_s = 0.0

    def __init__(self, act: Callable[[Speech, Stop], Said] | None = None, english_only: bool = False) -> None:
        self.speaks_english_only = english_only
        self.pieces = 0
        self.reloads = 0
        self.threads: set[str] = set()
        self.closed = False
        self.act = act

    def check(self, request: Request) -> None:
        pass

    def remarks(self, request: Request) -> tuple[str, ...]:
        return ("it can't translate",) if self.speaks_english_only and request.translate else ()

    def walk(self, tracks: Sequence[Track], request: Request, stop: Stop) -> "FakeWalk":
        return FakeWalk(self, tracks, request, stop)

    def reload(self) -> None:
        self.reloads += 1

    def close(self) -> None:
        self.closed = True


class FakeWalk:
    first_run: float | None = None

    def __init__(self, engine: FakeEngine, tracks: Sequence[Track], request: Request, stop: Stop) -> None:
        self._engine = engine
        self._places = [(track, piece) for track in tracks if track.is_spoken for piece in track.pieces]
        self._request = request
        self._stop = stop
        self.language: Future[Language] = Future()

    def __len__(self) -> int:
        return len(self._places)

    def detect(self) -> Language | None:
        self._stop.check()
        return spoken("de") if self._places else None

    def piece(self, index: int) -> Iterator[Said]:
        track, piece = self._places[index]
        said = self._said(track, piece)
        if said.language and not self.language.done():
            self.language.set_result(said.language)
        yield replace(said, until=piece.spans[-1].end / SAMPLE_RATE, channel=track.channel)

    def _said(self, track: Track, piece: Piece) -> Said:
        self._stop.check()
        engine, request = self._engine, self._request
        engine.pieces += 1
        engine.threads.add(threading.current_thread().name)
        if engine.act:
            return engine.act(piece.speech(track.samples), self._stop)
        start = piece.spans[0].start / SAMPLE_RATE
        words = (Word(" Hello.", start + 0.1, start + 0.9, 0.8),) if request.word_timestamps else None
        translated = (segment(start, start + 1, " Translated."),) if request.translate else ()
        return Said((segment(start, start + 1, " Hello.", words),), translated, spoken(request.language or "de"))


def spoken(code: str, probability: float = 0.9) -> Language:
    return Language(code, probability, ((code, probability),))


class FakeHub:
    """Finds, downloads and loads models that don't exist; each step (`find base`, `load base`, `free base`) is noted.

    Those in `fails` raise what they are told, on their thread; those that are held wait there until they are let go.
    Models in `far` have to be downloaded (`download base`).
    """

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.far: set[str] = set()
        self.fails: dict[str, Exception] = {}
        self.engines: dict[str, FakeEngine] = {}
        self._held: set[str] = set()
        self._changed = threading.Condition()  # guards all above

    def find(self, model: Model) -> ModelFiles | None:
        self._step(f"find {model.name}")
        return None if model.name in self.far else ModelFiles(model.name, Path("/models") / model.name)

    def download(self, model: Model) -> ModelFiles:
        self._step(f"download {model.name}")
        return ModelFiles(model.name, Path("/models") / model.name)

    def load(self, files: ModelFiles) -> FakeEngine:
        self._step(f"load {files.name}")
        engine = self.engines[files.name] = self.engine(files.name)
        return engine

    def engine(self, name: str) -> FakeEngine:
        engine = _FreedEngine(lambda: self._step(f"free {name}"))
        engine.name = name
        return engine

    def hold(self, step: str) -> None:
        with self._changed:
            self._held.add(step)

    def let_go(self, step: str) -> None:
        with self._changed:
            self._held.discard(step)
            self._changed.notify_all()

    async def begun(self, step: str, times: int = 1) -> None:
        """Wait until it has."""
        assert await asyncio.to_thread(self._wait_for, lambda: self.steps.count(step) >= times), f"no {step}"

    async def begun_of(self, names: Sequence[str], count: int) -> list[str]:
        """Wait until the downloads of so many have: which of them. They begin in any order."""

        def begun() -> list[str]:
            return [name for name in names if f"download {name}" in self.steps]

        assert await asyncio.to_thread(self._wait_for, lambda: len(begun()) >= count), f"only {begun()}"
        return begun()

    def _step(self, step: str) -> None:
        with self._changed:
            self.steps.append(step)
            self._changed.notify_all()
        assert self._wait_for(lambda: step not in self._held), f"{step} was never let go"
        if step in self.fails:
            raise self.fails[step]

    def _wait_for(self, holds: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(holds, timeout=20)


class _FreedEngine(FakeEngine):
    def __init__(self, on_close: Callable[[], None]) -> None:
        super().__init__()
        self._on_close = on_close

    def close(self) -> None:
        super().close()
        self._on_close()
