"""Hand-written stand-ins with the real shapes."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

from whisper_worker.audio import SAMPLE_RATE, Samples
from whisper_worker.pieces import Piece
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

    def walk(self, pieces: Sequence[Piece], samples: Samples, request: Request, stop: Stop) -> "FakeWalk":
        return FakeWalk(self, pieces, samples, request, stop)

    def reload(self) -> None:
        self.reloads += 1

    def close(self) -> None:
        self.closed = True


class FakeWalk:
    first_run: float | None = None

    def __init__(
        self, engine: FakeEngine, pieces: Sequence[Piece], samples: Samples, request: Request, stop: Stop
    ) -> None:
        self._engine = engine
        self._pieces = pieces
        self._samples = samples
        self._request = request
        self._stop = stop
        self.language: Future[Language] = Future()

    def piece(self, index: int) -> Iterator[Said]:
        said = self._said(index)
        if said.language and not self.language.done():
            self.language.set_result(said.language)
        yield replace(said, until=self._pieces[index].spans[-1].end / SAMPLE_RATE)

    def _said(self, index: int) -> Said:
        self._stop.check()
        engine, request, piece = self._engine, self._request, self._pieces[index]
        engine.pieces += 1
        engine.threads.add(threading.current_thread().name)
        speech = piece.speech(self._samples)
        if engine.act:
            return engine.act(speech, self._stop)
        if speech.is_empty:
            return Said()
        start = piece.spans[0].start / SAMPLE_RATE
        words = (Word(" Hello.", start + 0.1, start + 0.9, 0.8),) if request.word_timestamps else None
        translated = (segment(start, start + 1, " Translated."),) if request.translate else ()
        return Said((segment(start, start + 1, " Hello.", words),), translated, (request.language or "de", 0.9))
