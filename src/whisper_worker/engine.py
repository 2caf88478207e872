"""The loaded model: speech → transcript. All that the worker knows of faster-whisper is here.

faster-whisper runs on the threads of the pieces, which mostly wait; what it asks of the model goes through
`shared_model` and that one's threads.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import ctranslate2
import faster_whisper.transcribe as fw
from faster_whisper.vad import get_vad_model

from whisper_worker import log
from whisper_worker.audio import SAMPLE_RATE, Samples
from whisper_worker.errors import EXIT_SICK, BadInput, OutOfMemory, Unhealthy, UnknownModel
from whisper_worker.models import ModelFiles
from whisper_worker.pieces import Piece
from whisper_worker.request import Request
from whisper_worker.settings import Settings, SettingsError, Threads
from whisper_worker.shared_model import (
    FRAMES_PER_S,
    Caller,
    Fit,
    Mel,
    SharedModel,
    is_device_lost,
    is_memory_error,
)
from whisper_worker.speech import Speech
from whisper_worker.stop import Stop, Stopped
from whisper_worker.transcript import Language, Said, Segment, Word

MAX_PROMPT_TOKENS = 223  # half the decoder's 448 positions, less the token that opens a prompt
PROMPT_RESET_TEMPERATURE = 0.5  # faster-whisper's default: what was decoded hotter is no good prompt for what follows
FIT_LOG_PROB = -0.5  # mean log probability of a fitted window's tokens; measured, see docs/tuning.md
TRANSLATED_WINDOWS = 8  # of a piece, whose encoding is kept for its translation

Task = Literal["transcribe", "translate"]


def choose_device(settings: Settings) -> str:
    """`cpu` or `cuda`."""
    if settings.device != "auto":
        return settings.device
    return "cuda" if ctranslate2.get_cuda_device_count() else "cpu"


def choose_compute_type(settings: Settings, device: str) -> str:
    """Raises SettingsError when the device can't compute so."""
    if settings.compute_type == "auto":
        return "int8" if device == "cpu" else "float16"
    try:
        possible = ctranslate2.get_supported_compute_types(device)
    except RuntimeError:  # DEVICE=cuda without one: loading the model says it better
        return settings.compute_type
    if settings.compute_type not in {*possible, "default"}:
        kinds = ", ".join(sorted(possible))
        raise SettingsError(f"COMPUTE_TYPE={settings.compute_type!r}: this {device} can compute in {kinds}")
    return settings.compute_type


class Engine:
    """One model, loaded once, shared by all jobs."""

    def __init__(self, whisper: fw.WhisperModel, files: ModelFiles, threads: Threads, settings: Settings) -> None:
        self._whisper = whisper
        self._files = files
        self._end_of_text = self._token("<|endoftext|>")
        self._model = SharedModel(
            whisper.model,
            self._token("<|startoftranscript|>"),
            threads=threads.inter,
            batch_size=threads.batch,
            max_wait_s=settings.batch_wait_s,
            fit=Fit(length=round(settings.fit_window_s * FRAMES_PER_S)) if settings.fit_windows else None,
        )
        whisper.model = self._model
        whisper.feature_extractor = _Features(whisper.feature_extractor, self._model, at_once=threads.media)
        self.name = files.name
        self.device: str = whisper.model.device
        self.speaks_english_only = not whisper.model.is_multilingual

    @classmethod
    def load(cls, files: ModelFiles, device: str, compute_type: str, threads: Threads, settings: Settings) -> "Engine":
        """Read the weights. Takes seconds; CTranslate2 lets other threads run meanwhile."""
        started = time.monotonic()
        whisper = fw.WhisperModel(
            str(files.folder),
            device=device,
            compute_type=compute_type,
            cpu_threads=threads.intra,
            num_workers=threads.inter,
            local_files_only=True,
        )
        get_vad_model()  # read now: it is made on first use, by each thread that comes first
        log.event(
            "model_loaded",
            model=files.name,
            device=device,
            compute_type=whisper.model.compute_type,
            seconds=time.monotonic() - started,
        )
        return cls(whisper, files, threads, settings)

    def check(self, request: Request) -> None:
        """Raises UnknownModel or BadInput for what this model can't do, before any work is put into it."""
        if request.model is not None and not self._files.is_called(request.model):
            raise UnknownModel(f"this worker serves the model {self.name}, not {request.model}")
        if self.speaks_english_only and request.language not in (None, "en"):
            raise BadInput(f"language: the model {self.name} knows English only")
        # The library cuts a longer prompt without a word, and a token that doesn't exist fails inside CTranslate2.
        if request.initial_prompt and (count := len(self.tokens(request.initial_prompt))) > MAX_PROMPT_TOKENS:
            raise BadInput(f"initial_prompt: has {count} tokens, {MAX_PROMPT_TOKENS} are allowed")
        if max(request.suppress_tokens, default=0) > self._last_token:
            raise BadInput(f"suppress_tokens: the model has tokens up to {self._last_token}")

    def walk(self, pieces: Sequence[Piece], samples: Samples, request: Request, stop: Stop) -> "Walk":
        """The way through one job's pieces of a recording, `samples`."""
        return Walk(self, pieces, samples, request, stop)

    @property
    def longest_call_s(self) -> float:
        """Seconds that a call of the model has been running; 0 when none is."""
        return self._model.longest_call_s

    def reload(self) -> None:
        """Read the weights once more, for a model that has gone wrong. Takes seconds, and jobs wait meanwhile."""
        self._model.reload()

    def close(self) -> None:
        """Free the weights, once the calls that run have ended."""
        self._model.close()

    def called_for(self, caller: Caller) -> AbstractContextManager[None]:
        """Inside the `with`, this thread's `segments` are for this caller."""
        return self._model.called_for(caller)

    def segments(
        self,
        speech: Speech,
        request: Request,
        *,
        task: Task,
        language: str | None,
        prompt: str | Sequence[int] | None,
    ) -> Iterator[Segment]:
        """The segments of `speech` in the file's times. `language` None: the model is asked, see `Caller`."""
        # Asked for each window's language, faster-whisper has the window's encoder output in hand. Told no language, it
        # would encode the first window once more, only to detect it.
        segments, _ = self._whisper.transcribe(
            speech.samples,
            language=language or "en",
            multilingual=language is None,
            task=task,
            beam_size=request.beam_size,
            best_of=request.best_of,
            patience=request.patience,
            length_penalty=request.length_penalty,
            temperature=request.temperatures,
            compression_ratio_threshold=request.compression_ratio_threshold,
            log_prob_threshold=request.logprob_threshold,
            no_speech_threshold=request.no_speech_threshold,
            condition_on_previous_text=request.condition_on_previous_text,
            prompt_reset_on_temperature=PROMPT_RESET_TEMPERATURE,
            initial_prompt=prompt,
            suppress_tokens=list(request.suppress_tokens),  # the library writes into it
            word_timestamps=request.word_timestamps,
        )
        return map(_segment, speech.in_file_time(segments))

    def passes(self, request: Request, result: Any) -> bool:
        """Whether a result of CTranslate2 is good enough to come from a fitted window.

        That is faster-whisper's rule for taking it without trying a higher temperature, but for log probabilities that
        it would still take: at those, full windows are right more often.
        """
        tokens = result.sequences_ids[0]
        mean_log_prob = result.scores[0] * len(tokens) ** request.length_penalty / (len(tokens) + 1)
        text = self._whisper.hf_tokenizer.decode([token for token in tokens if token < self._end_of_text])
        ratio = fw.get_compression_ratio(text.strip())
        least = max(request.logprob_threshold, FIT_LOG_PROB)
        return bool(mean_log_prob >= least and ratio <= request.compression_ratio_threshold)

    def tokens(self, prompt: str) -> list[int]:
        """As faster-whisper makes them of an initial prompt."""
        return list(self._whisper.hf_tokenizer.encode(" " + prompt.strip(), add_special_tokens=False).ids)

    @contextmanager
    def faults_told_apart(self) -> Iterator[None]:
        """Raises Unhealthy and OutOfMemory for what CTranslate2 says in other words."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if is_device_lost(error) or not self._model.model_is_loaded:  # it couldn't be loaded again
                raise Unhealthy("the device failed: send the job again, another worker takes it", EXIT_SICK) from error
            if is_memory_error(error):
                raise OutOfMemory("the device has too little memory for this job at the moment: try again") from error
            raise

    @property
    def _last_token(self) -> int:
        """The timestamps 0.00 to 30.00 are a vocabulary's last, but the tokenizer's file doesn't always list them."""
        return self._token("<|notimestamps|>") + 1501

    def _token(self, name: str) -> int:
        return int(self._whisper.hf_tokenizer.token_to_id(name))


class Walk:
    """One job's way through the model: piece by piece, or several pieces at once, each on a thread of its own.

    With `condition_on_previous_text` pieces must be asked for one after the other.
    """

    def __init__(self, engine: Engine, pieces: Sequence[Piece], samples: Samples, request: Request, stop: Stop) -> None:
        self.first_run: float | None = None
        """When, in monotonic seconds, the first window reached the model."""
        self._engine = engine
        self._pieces = pieces
        self._samples = samples
        self._request = request
        self._stop = stop
        self._transcribed: list[Segment] = []  # so far, for the prompts
        self._translated: list[Segment] = []
        self.language: Future[Language] = Future()
        """That of the job, once it is known; it fails when the first piece does, or holds no speech."""
        if known := "en" if engine.speaks_english_only else request.language:
            self.language.set_result((known, 1.0))

    def piece(self, index: int) -> Iterator[Said]:
        """What is said in one piece, segment by segment, and its translation. Takes as long as it takes, all on the
        thread that iterates; raises OutOfMemory, Unhealthy or Stopped.

        Unless the language is known, that of the first piece holds for all: the others wait until it is found.
        """
        before = self._frames_before(index)
        try:
            with self._engine.faults_told_apart():
                for said in self._piece(index):
                    yield said.shifted(before)
        finally:
            if index == 0 and not self.language.done():
                self.language.set_exception(Stopped())  # whatever it is: that is what the job fails with

    def _piece(self, index: int) -> Iterator[Said]:
        self._stop.check()
        speech = self._pieces[index].speech(self._samples)
        if speech.is_empty:  # then it's the only piece
            return
        request, engine = self._request, self._engine
        known = self._stop.wait_for(self.language)[0] if index or self.language.done() else None
        caller = Caller(
            self._stop,
            passes=partial(engine.passes, request),
            on_language=self._note_language,
            on_run=self._note_run,
            keeps=TRANSLATED_WINDOWS if request.translate else 1,
            rank=index,  # the segments of the first piece that isn't done are waited for
        )
        with engine.called_for(caller):
            for segment in self._segments(index, speech, "transcribe", known, self._transcribed):
                yield Said((segment,), (), self.language.result(0), until=segment.end)
            language = self.language.result(0)  # known by now, also if there was no segment
            if request.translate and not engine.speaks_english_only:
                translated = tuple(self._segments(index, speech, "translate", language[0], self._translated))
                yield Said((), translated, language)
        yield Said((), (), language, until=self._pieces[index].spans[-1].end / SAMPLE_RATE)

    def _segments(
        self, index: int, speech: Speech, task: Task, language: str | None, before: list[Segment]
    ) -> Iterator[Segment]:
        """Of one piece, each added to those `before` it."""
        prompt = self._prompt(index, before)
        for segment in self._engine.segments(speech, self._request, task=task, language=language, prompt=prompt):
            before.append(segment)
            yield segment

    def _prompt(self, index: int, before: Sequence[Segment]) -> str | list[int] | None:
        """What a piece's first window is shown: nearly what it would be if the job were one walk through all windows.

        That walk isn't made, because it needs the features of the whole recording: 3.3 GB for an hour.
        """
        if index == 0:
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

    def _frames_before(self, index: int) -> int:
        return round(sum(piece.seconds for piece in self._pieces[:index]) * FRAMES_PER_S)

    def _note_language(self, languages: list[tuple[str, float]]) -> None:
        if not self.language.done():
            token, probability = languages[0]
            self.language.set_result((token.strip("<|>"), probability))

    def _note_run(self) -> None:
        self.first_run = self.first_run or time.monotonic()


class _Features:
    """faster-whisper's feature extractor, for many threads.

    At most `at_once` work at the same time: it's work for the processor alone, and takes some ten MB for a while. A
    piece that is transcribed and then translated has its features made once.
    """

    def __init__(self, extractor: Any, model: SharedModel, *, at_once: int) -> None:
        self._extractor = extractor
        self._model = model
        self._places = threading.BoundedSemaphore(at_once)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extractor, name)

    def __call__(self, samples: Samples, **options: Any) -> Mel:
        """Float32, shape (n_mels, frames of 10 ms)."""
        caller = self._model.caller
        if caller.features is None or caller.features[0] is not samples:
            with self._places:
                caller.features = samples, self._extractor(samples, **options)
        return caller.features[1]


def _segment(segment: fw.Segment) -> Segment:
    """Ours of the library's: plain Python numbers (numpy's can't be written as JSON), and no reference kept."""
    words = None
    if segment.words is not None:
        words = tuple(Word(w.word, float(w.start), float(w.end), float(w.probability)) for w in segment.words)
    return Segment(
        id=segment.id,
        seek=segment.seek,
        start=float(segment.start),
        end=float(segment.end),
        text=segment.text,
        tokens=tuple(segment.tokens),
        temperature=float(segment.temperature or 0.0),
        avg_logprob=float(segment.avg_logprob),
        compression_ratio=float(segment.compression_ratio),
        no_speech_prob=float(segment.no_speech_prob),
        words=words,
    )
