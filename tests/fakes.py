"""Hand-written stand-ins with the real shapes."""

import threading
from collections.abc import Callable

from whisper_worker.request import Request
from whisper_worker.speech import Speech
from whisper_worker.stop import Stop
from whisper_worker.transcript import NOTHING_SAID, Segment, Transcript, Word, within


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
    """Says "Hello." to any speech. `act`, when given, runs in its place, in the thread of the model pool."""

    name = "fake"
    device = "cpu"

    def __init__(self, act: Callable[[Speech, Stop], Transcript] | None = None, english_only: bool = False) -> None:
        self.speaks_english_only = english_only
        self.calls: list[tuple[str, str | None]] = []
        self.threads: set[str] = set()
        self.closed = False
        self._act = act

    def check(self, request: Request) -> None:
        pass

    def transcribe(
        self, speech: Speech, request: Request, stop: Stop, *, duration: float, task: str, language: str | None
    ) -> Transcript:
        stop.check()
        self.calls.append((task, language))
        self.threads.add(threading.current_thread().name)
        if self._act:
            return self._act(speech, stop)
        if speech.is_empty:
            return NOTHING_SAID
        text = " Hello." if task == "transcribe" else " Translated."
        words = (Word(text, 0.1, 0.9, 0.8),) if request.word_timestamps else None
        return Transcript(within([segment(0, 1, text, words)], duration), language or "de", 0.9)

    def close(self) -> None:
        self.closed = True
