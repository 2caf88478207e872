"""The loaded model: speech → transcript. All that the worker knows of faster-whisper is here.

faster-whisper runs on the threads of the pieces, which mostly wait; what it asks of the model goes through
`shared_model` and that one's threads.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ctranslate2
import faster_whisper.transcribe as fw
from faster_whisper.vad import get_vad_model

from whisper_worker import log
from whisper_worker.audio import Samples
from whisper_worker.errors import EXIT_SICK, BadInput, OutOfMemory, Unhealthy
from whisper_worker.model_files import ModelFiles
from whisper_worker.pieces import Track
from whisper_worker.request import Request
from whisper_worker.settings import Settings, SettingsError, Threads
from whisper_worker.shared_model import (
    FRAMES_PER_S,
    FULL,
    MAX_LENGTH,
    MAX_PROMPT_TOKENS,
    Caller,
    Fit,
    Languages,
    Mel,
    SharedModel,
    is_device_lost,
    is_memory_error,
)
from whisper_worker.speech import Speech
from whisper_worker.stop import Stop
from whisper_worker.transcript import Segment, Task, Word
from whisper_worker.walk import PROMPT_RESET_TEMPERATURE, Walk

FIT_LOG_PROB = -0.5  # mean log probability of a fitted window's tokens; measured, see docs/tuning.md


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
        """Raises BadInput with all that this model can't do of a request, before any work is put into it."""
        if problems := [*self._language_problems(request), *self._prompt_problems(request)]:
            raise BadInput("; ".join(problems))
        if request.word_timestamps and not self._files.has_alignment_heads:
            raise BadInput(
                f"word_timestamps: the model {self.name} lacks the alignment heads that words' times come from"
            )
        if max(request.suppress_tokens, default=0) > self._last_token:
            raise BadInput(f"suppress_tokens: the model has tokens up to {self._last_token}")

    def remarks(self, request: Request) -> tuple[str, ...]:
        """What of a request this model does only in part, in sentences for the caller."""
        return tuple(self._remarks(request))

    def walk(self, tracks: Sequence[Track], request: Request, stop: Stop) -> Walk:
        """The way through one recording."""
        return Walk(self, tracks, request, stop)

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
        language: str,
        prompt: str | Sequence[int] | None,
        prefix: str | None,
    ) -> Iterator[Segment]:
        """The segments of `speech` in the recording's times. `prefix`: what the first one's text begins with.

        With `request.multilingual` the model is asked for each window's language, and the caller chooses (`Caller`).
        """
        segments, _ = self._whisper.transcribe(
            speech.samples,
            language=language,
            multilingual=request.multilingual,
            task=task,
            beam_size=request.beam_size,
            best_of=request.best_of,
            patience=request.patience,
            length_penalty=request.length_penalty,
            repetition_penalty=request.repetition_penalty,
            no_repeat_ngram_size=request.no_repeat_ngram_size,
            temperature=request.temperatures,
            compression_ratio_threshold=request.compression_ratio_threshold,
            log_prob_threshold=request.logprob_threshold,
            no_speech_threshold=request.no_speech_threshold,
            condition_on_previous_text=request.condition_on_previous_text,
            prompt_reset_on_temperature=PROMPT_RESET_TEMPERATURE,
            initial_prompt=prompt,
            prefix=prefix,
            hotwords=request.hotwords,
            suppress_tokens=list(request.suppress_tokens),  # the library writes into it
            max_new_tokens=request.max_new_tokens,
            word_timestamps=request.word_timestamps,
            hallucination_silence_threshold=request.hallucination_silence_threshold,
        )
        return map(_segment, speech.in_file_time(segments))

    def languages(self, speech: Speech) -> Languages:
        """Those of its first window, most probable first. That window's encoding is kept for the thread's caller."""
        mel = self._whisper.feature_extractor(speech.samples)
        frames = min(FULL, mel.shape[1] - 1)  # as faster-whisper takes them: the last one belongs to the padding
        return self._model.detect_language(self._whisper.encode(fw.pad_or_trim(mel[:, :frames])))[0]

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

    def _language_problems(self, request: Request) -> Iterator[str]:
        for name, codes in (("language", [request.language]), ("languages", request.languages or [])):
            asked = [code for code in codes if code is not None]
            if self.speaks_english_only:
                if asked and "en" not in asked:
                    yield f"{name}: the model {self.name} knows English only"
            elif unknown := [code for code in asked if self._whisper.hf_tokenizer.token_to_id(f"<|{code}|>") is None]:
                yield f"{name}: the model {self.name} doesn't know {', '.join(unknown)}"

    def _prompt_problems(self, request: Request) -> Iterator[str]:
        """The library cuts what is too long without a word, or fails in the middle of the job."""
        counts = {
            name: len(self.tokens(text))
            for name in ("initial_prompt", "prefix", "hotwords")
            if (text := getattr(request, name))
        }
        if (count := sum(counts.values())) > MAX_PROMPT_TOKENS:
            tokens = f"has {count} tokens" if len(counts) == 1 else f"have {count} tokens together"
            yield f"{', '.join(counts)}: {tokens}, {MAX_PROMPT_TOKENS} are allowed"
        hotwords = counts.get("hotwords", 0)
        room = MAX_LENGTH - MAX_PROMPT_TOKENS - 4 - hotwords  # 4: the tokens that open a prompt, and a task
        if request.condition_on_previous_text and hotwords and (request.max_new_tokens or 0) > room:
            yield f"max_new_tokens: with condition_on_previous_text, and {hotwords} tokens of hotwords, at most {room}"

    def _remarks(self, request: Request) -> Iterator[str]:
        if request.wants_translation:
            if self.speaks_english_only:
                yield f"the model {self.name} can't translate: the translation is its transcription"
            elif not self._files.translates or self._files.is_shallow(self._model.n_mels):
                yield f"the model {self.name} wasn't trained to translate: the translation may be a transcription"
        if self.speaks_english_only and (others := [code for code in request.languages or () if code != "en"]):
            yield f"the model {self.name} knows English only: {', '.join(others)} can't be detected"
        if request.multilingual and self.speaks_english_only:
            yield f"the model {self.name} knows English only: multilingual has no effect"
        if request.task == "detect_language" and self.speaks_english_only:
            yield f"the model {self.name} knows English only, and takes all speech for it"
        other = [code for code in (request.language, *(request.languages or ())) if code not in (None, "en")]
        if other and self._files.knows_english_only and not self.speaks_english_only:
            yield f"the model {self.name} was trained on English only: {', '.join(other)} may come out wrong"

    @property
    def _last_token(self) -> int:
        """The timestamps 0.00 to 30.00 are a vocabulary's last, but the tokenizer's file doesn't always list them."""
        return self._token("<|notimestamps|>") + 1501

    def _token(self, name: str) -> int:
        return int(self._whisper.hf_tokenizer.token_to_id(name))


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
