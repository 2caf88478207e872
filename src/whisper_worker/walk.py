"""One recording's way through the model: language, prompts, and what is said in each piece. Knows no faster-whisper."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from whisper_worker.audio import SAMPLE_RATE
from whisper_worker.pieces import Track
from whisper_worker.request import Request
from whisper_worker.shared_model import FRAMES_PER_S, MAX_PROMPT_TOKENS, Caller, Languages
from whisper_worker.speech import Speech
from whisper_worker.stop import Stop, Stopped
from whisper_worker.transcript import Language, Said, Segment, Task

if TYPE_CHECKING:
    from whisper_worker.engine import Engine  # which makes walks

PROMPT_RESET_TEMPERATURE = 0.5  # faster-whisper's default: what was decoded hotter is no good prompt for what follows
TRANSLATED_WINDOWS = 8  # of a piece, whose encoding is kept for its translation

SURE = 0.7  # of the probability of all languages in question; one that has less needs more audio to tell
DETECTION_WINDOWS = 4  # at most, where the first leaves the language in doubt
LIKELY = 5  # languages that are told
CHANGED = 0.5  # a window's language that is less probable is taken for that of the window before


class Walk:
    """One recording's way through the model: piece by piece, or several at once, each on a thread of its own.

    The pieces of all tracks are numbered by when they begin. With `condition_on_previous_text` they must be asked for
    one after the other.
    """

    def __init__(self, engine: "Engine", tracks: Sequence[Track], request: Request, stop: Stop) -> None:
        self.first_run: float | None = None
        """When, in monotonic seconds, the first window reached the model."""
        self._engine = engine
        self._request = request
        self._stop = stop
        self._hotwords = len(engine.tokens(request.hotwords)) if request.hotwords else 0
        self._may_change = request.multilingual and not engine.speaks_english_only
        self._ways = [_Way(track) for track in tracks if track.is_spoken]  # else it's the only piece
        places = [(way, place) for way in self._ways for place in range(len(way.track.pieces))]
        self._places = sorted(places, key=lambda place: place[0].start(place[1]))
        self.language: Future[Language] = Future()
        """That of the recording, once it is known; it fails when the first piece does, or holds no speech."""
        if known := "en" if engine.speaks_english_only else request.language:
            self.language.set_result(Language.given(known))

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self._places)

    def piece(self, index: int) -> Iterator[Said]:
        """What is said in one piece, segment by segment, and its translation. Takes as long as it takes, all on the
        thread that iterates; raises OutOfMemory, Unhealthy or Stopped.

        Unless the language is known, the first piece finds it for all: the others wait for that.
        """
        way, place = self._places[index]
        before = way.frames_before(place)
        try:
            with self._engine.faults_told_apart():
                for said in self._piece(index, way, place):
                    yield said.shifted(before)
        finally:
            for found in (self.language if index == 0 else None, way.last_languages[place]):
                if found and not found.done():
                    found.set_exception(Stopped())  # whatever it is: that is what the job fails with

    def detect(self) -> Language | None:
        """The language, without any text; None when nobody speaks. Takes as long as it takes, as `piece`."""
        if self._places and not self.language.done():
            with self._engine.faults_told_apart():
                self.language.set_result(self._detected())
        return self.language.result(0) if self._places else None

    def _piece(self, index: int, way: "_Way", place: int) -> Iterator[Said]:
        self._stop.check()
        speech = way.speech(place)
        request, engine = self._request, self._engine
        caller = Caller(
            self._stop,
            passes=partial(engine.passes, request),
            on_run=self._note_run,
            hotwords=self._hotwords,
            max_new_tokens=request.max_new_tokens,
            keeps=TRANSLATED_WINDOWS if request.wants_both else 1,
            rank=index,  # the segments of the first piece that isn't done are waited for
        )
        with engine.called_for(caller):
            if index == 0 and not self.language.done():
                self.language.set_result(self._detected((way, place, speech)))
            language = self._stop.wait_for(self.language)
            main: Task = "transcribe" if request.wants_transcription else "translate"
            prefix = request.prefix if index == 0 else None
            ear = self._ear(way, place)
            for segment in self._segments(main, way.transcribed, place, speech, caller, ear, prefix):
                yield Said((segment,), (), language, segment.end, way.track.channel)
            if self._may_change:
                way.last_languages[place].set_result(ear.language)
            translated: tuple[Segment, ...] = ()
            if request.wants_both and not engine.speaks_english_only:
                ear = self._ear(way, place)
                translated = tuple(self._segments("translate", way.translated, place, speech, caller, ear))
        yield Said((), translated, language, way.end(place), way.track.channel)

    def _segments(
        self,
        task: Task,
        before: list[Segment],
        place: int,
        speech: Speech,
        caller: Caller,
        ear: "_Ear",
        prefix: str | None = None,
    ) -> Iterator[Segment]:
        """Of one piece, each added to those `before` it."""
        caller.choose = ear.choose
        segments = self._engine.segments(
            speech,
            self._request,
            task=task,
            language=self.language.result(0).code,
            prompt=self._prompt(place, before),
            prefix=prefix,
        )
        for segment in segments:
            if self._may_change:
                segment = replace(segment, language=ear.language)
            before.append(segment)
            yield segment

    def _ear(self, way: "_Way", place: int) -> "_Ear":
        """The one for a piece's windows. The piece before may be on its way still: a window in doubt waits for it."""

        def before() -> str:
            if place == 0:
                return self.language.result(0).code
            return self._stop.wait_for(way.last_languages[place - 1])

        return _Ear(before, self._request.languages)

    def _detected(self, here: "tuple[_Way, int, Speech] | None" = None) -> Language:
        """What is spoken in the window that is most likely to tell, and in others when it doesn't.

        `here`: the piece that this thread goes on with, whose window is then encoded already.
        """
        loudest = max(self._ways, key=lambda way: way.track.speech_s)
        heard: list[dict[str, float]] = []
        for place in _spread(len(loudest.track.pieces), DETECTION_WINDOWS):
            if here and here[:2] == (loudest, place):
                languages = self._engine.languages(here[2])
            else:
                with self._engine.called_for(Caller(self._stop, on_run=self._note_run)):
                    languages = self._engine.languages(loudest.speech(place))
            heard.append(_probabilities(languages, self._request.languages))
            language = _most_likely(heard)
            if language.is_sure:
                break
        return language

    def _prompt(self, place: int, before: Sequence[Segment]) -> str | list[int] | None:
        """What a piece's first window is shown: nearly what it would be if the job were one walk through all windows.

        That walk isn't made, because it needs the features of the whole recording: 3.3 GB for an hour.
        """
        if place == 0:
            return self._request.initial_prompt
        if not self._request.condition_on_previous_text:
            return None
        tokens: list[int] = []
        for segment in reversed(before):
            if segment.temperature > PROMPT_RESET_TEMPERATURE or len(tokens) > MAX_PROMPT_TOKENS:
                break
            tokens = [*segment.tokens, *tokens]
        else:
            tokens = self._engine.tokens(self._request.initial_prompt or "") + tokens
        return tokens[-MAX_PROMPT_TOKENS:]

    def _note_run(self) -> None:
        self.first_run = self.first_run or time.monotonic()


class _Way:
    """One track's part of a walk: its pieces, and what has been said in it so far, for the prompts."""

    def __init__(self, track: Track) -> None:
        self.track = track
        self.transcribed: list[Segment] = []
        self.translated: list[Segment] = []
        self.last_languages: list[Future[str]] = [Future() for _ in track.pieces]
        """That of each piece's last window, when they may change."""

    def speech(self, place: int) -> Speech:
        return self.track.pieces[place].speech(self.track.samples)

    def start(self, place: int) -> int:
        """Samples."""
        return self.track.pieces[place].spans[0].start

    def end(self, place: int) -> float:
        """Up to where, in seconds, nothing is missing once the piece is done: behind the last one nobody speaks."""
        is_last = place == len(self.track.pieces) - 1
        return (len(self.track.samples) if is_last else self.track.pieces[place].spans[-1].end) / SAMPLE_RATE

    def frames_before(self, place: int) -> int:
        return round(sum(piece.seconds for piece in self.track.pieces[:place]) * FRAMES_PER_S)


class _Ear:
    """Which language a window is taken for when that may change: that of the window before, unless it is clear."""

    def __init__(self, before: Callable[[], str], allowed: Sequence[str] | None) -> None:
        self._before = before
        self._allowed = allowed
        self._language: str | None = None

    @property
    def language(self) -> str:
        """Of the last window."""
        if self._language is None:
            self._language = self._before()
        return self._language

    def choose(self, languages: Languages) -> Languages:
        best = _most_likely([_probabilities(languages, self._allowed)])
        if best.probability >= CHANGED:
            self._language = best.code
        return [(f"<|{self.language}|>", best.probability)]


def _probabilities(languages: Languages, allowed: Sequence[str] | None) -> dict[str, float]:
    """By code; those of the allowed ones as they are: small, where none of them is spoken."""
    every = {token.strip("<|>"): probability for token, probability in languages}
    return {code: every.get(code, 0.0) for code in allowed or every}


def _most_likely(heard: Sequence[dict[str, float]]) -> Language:
    """Of what several windows say, on average."""
    means = {code: sum(window.get(code, 0.0) for window in heard) / len(heard) for code in heard[0]}
    likely = sorted(means.items(), key=lambda item: -item[1])[:LIKELY]
    code, probability = likely[0]
    return Language(code, probability, tuple(likely), is_sure=probability >= SURE * sum(means.values()))


def _spread(count: int, most: int) -> list[int]:
    """The first of so many places, and others far from each other and from it."""
    if count <= most:
        return list(range(count))
    return [round(number * (count - 1) / (most - 1)) for number in range(most)]
