"""The loaded model: speech → transcript. All that the worker knows of faster-whisper and CTranslate2 is here.

`transcribe` is called by the threads of the model pool, as many at once as the model has `inter_threads`: CTranslate2
runs so many calls in parallel on one set of weights, and lets go of the GIL in each.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import ctranslate2
import faster_whisper.transcribe as fw
from faster_whisper.vad import get_vad_model

from whisper_worker import log
from whisper_worker.errors import BadInput, OutOfMemory, UnknownModel
from whisper_worker.models import ModelFiles
from whisper_worker.request import Request
from whisper_worker.settings import Settings, SettingsError, Threads
from whisper_worker.shared_model import SharedModel
from whisper_worker.speech import Speech
from whisper_worker.stop import Stop
from whisper_worker.transcript import NOTHING_SAID, Segment, Transcript, Word, within

MAX_PROMPT_TOKENS = 223  # half the decoder's 448 positions, less the token that opens a prompt

OUT_OF_MEMORY_SIGNS = ("out of memory", "bad_alloc", "alloc_failed")

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

    def __init__(self, whisper: fw.WhisperModel, files: ModelFiles) -> None:
        self._model = SharedModel(whisper.model)
        whisper.model = self._model
        self._whisper = whisper
        self._files = files
        self.name = files.name
        self.device: str = whisper.model.device
        self.speaks_english_only = not whisper.model.is_multilingual

    @classmethod
    def load(cls, files: ModelFiles, device: str, compute_type: str, threads: Threads) -> "Engine":
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
            inter_threads=threads.inter,
            intra_threads=threads.intra,
            seconds=time.monotonic() - started,
        )
        return cls(whisper, files)

    def check(self, request: Request) -> None:
        """Raises UnknownModel or BadInput for what this model can't do, before any work is put into it."""
        if request.model is not None and not self._files.is_called(request.model):
            raise UnknownModel(f"this worker serves the model {self.name}, not {request.model}")
        if self.speaks_english_only and request.language not in (None, "en"):
            raise BadInput(f"language: the model {self.name} knows English only")
        # The library cuts a longer prompt without a word, and a token that doesn't exist fails inside CTranslate2.
        if request.initial_prompt and (count := self._tokens(request.initial_prompt)) > MAX_PROMPT_TOKENS:
            raise BadInput(f"initial_prompt: has {count} tokens, {MAX_PROMPT_TOKENS} are allowed")
        if max(request.suppress_tokens, default=0) > self._last_token:
            raise BadInput(f"suppress_tokens: the model has tokens up to {self._last_token}")

    def transcribe(
        self, speech: Speech, request: Request, stop: Stop, *, duration: float, task: Task, language: str | None
    ) -> Transcript:
        """The words of `speech`, with times inside the file of `duration` seconds that it is part of.

        `language` None: detected. Without speech the model isn't run. Blocks for as long as it takes; `stop` is read
        before each call of the model, several times in a window. Raises OutOfMemory or Stopped.
        """
        stop.check()
        if speech.is_empty:
            return NOTHING_SAID
        with self._model.called_for(stop), _memory_told_apart():
            segments, info = self._whisper.transcribe(
                speech.samples,
                language=language,
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
                initial_prompt=request.initial_prompt,
                suppress_tokens=list(request.suppress_tokens),  # the library writes into it
                word_timestamps=request.word_timestamps,
            )
            decoded = list(segments)
        return Transcript(
            segments=within(map(_segment, speech.in_file_time(decoded)), duration),
            language=info.language,
            language_probability=float(info.language_probability),
        )

    def close(self) -> None:
        """Free the weights. No call may be running."""
        self._whisper.model.unload_model()

    @property
    def _last_token(self) -> int:
        """The timestamps 0.00 to 30.00 are a vocabulary's last, but the tokenizer's file doesn't always list them."""
        return int(self._whisper.hf_tokenizer.token_to_id("<|notimestamps|>")) + 1501

    def _tokens(self, prompt: str) -> int:
        return len(self._whisper.hf_tokenizer.encode(" " + prompt.strip(), add_special_tokens=False).ids)


@contextmanager
def _memory_told_apart() -> Iterator[None]:
    """CTranslate2 raises RuntimeError for everything; only its text tells what was short."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error).lower()
        if isinstance(error, MemoryError) or any(sign in text for sign in OUT_OF_MEMORY_SIGNS):
            raise OutOfMemory("the device has too little memory for this job at the moment: try again") from error
        raise


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
