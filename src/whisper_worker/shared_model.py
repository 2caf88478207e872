"""The CTranslate2 model as faster-whisper sees it, shared by the threads of all jobs.

It stands in for `ctranslate2.models.Whisper` inside an unchanged `faster_whisper.WhisperModel`. `encode` only notes its
window; the calls that need a result (`generate`, `detect_language`, `align`) put it into the batcher's queue and wait.
There the windows of all jobs meet, and what CTranslate2 allows in one call runs in one call. A window is encoded once,
by the first call that needs it.

Windows are *fitted*: the encoder's cost follows their length, and CTranslate2 accepts less than the 30 s that
Whisper was trained on. A result that doesn't pass the caller's quality gates is decoded again on the full window.
"""

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from ctranslate2 import DataType, StorageView
from numpy.typing import NDArray

from whisper_worker import log
from whisper_worker.batching import Batcher
from whisper_worker.gate import Gate
from whisper_worker.stop import Stop

FRAMES_PER_S = 100
FULL = 30 * FRAMES_PER_S

MAX_LENGTH = 448  # the decoder's positions, prompt and text together
MAX_PROMPT_TOKENS = MAX_LENGTH // 2 - 1  # the other half is the text's, and one token opens a prompt

# cuBLAS says that it isn't initialized when there was no memory for that.
OUT_OF_MEMORY_SIGNS = ("out of memory", "bad_alloc", "alloc_failed", "cublas_status_not_initialized")

# What CUDA says of errors after which nothing runs on the device any more, in this process: the texts of
# cudaGetErrorString for the errors that its documentation calls sticky, of a device that is gone, and cuBLAS's names.
DEVICE_LOST_SIGNS = (
    "illegal memory access",
    "launch failure",
    "device-side assert",
    "launch timed out",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "global/shared address space",
    "hardware stack error",
    "uncorrectable",
    "no cuda-capable device",
    "busy or unavailable",
    "invalid device context",
    "context is destroyed",
    "driver shutting down",
    "cuda failed with error unknown error",
    "cublas_status_execution_failed",
    "cublas_status_internal_error",
    "cublas_status_mapping_error",
)

Mel = NDArray[np.float32]
Languages = list[tuple[str, float]]
"""Tokens such as `<|en|>` with their probabilities, most probable first."""


def is_memory_error(error: BaseException) -> bool:
    """CTranslate2 raises RuntimeError for everything; only its text tells what was short."""
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in OUT_OF_MEMORY_SIGNS)


def is_device_lost(error: BaseException) -> bool:
    """Whether the device is past use for this process, whatever is run on it next."""
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in DEVICE_LOST_SIGNS)


@dataclass(frozen=True)
class Fit:
    """Windows with little sound are `length` long, all others full, in frames of 10 ms.

    So much silence as `margin` must follow the sound: with less, the model doesn't hear it end, and goes on. There are
    but two lengths, because only windows of one length can share a batch, and because where there is more sound than
    fits into about half a window, a shorter one saves little.
    """

    length: int
    margin: int = 200

    def frames(self, sound: int) -> int:
        return self.length if sound + self.margin <= self.length else FULL


class Window:
    """What `encode` returns: up to 30 s of one job's audio, and its encoder output once a call has needed that.

    `mel`: float32, shape (n_mels, frames of sound), without padding. `frames`: the length with padding. `encoded`:
    shape (1, frames // 2, d_model), on the CPU, so that what waits takes no memory of a GPU.
    """

    def __init__(self, mel: Mel, frames: int) -> None:
        self.mel = mel
        self.frames = frames
        self.since = time.monotonic()
        self.encoded: StorageView | None = None
        self.languages: Languages | None = None

    def padded(self) -> Mel:
        """Float32, shape (n_mels, frames)."""
        return np.pad(self.mel, ((0, 0), (0, self.frames - self.mel.shape[1])))

    def make_full(self) -> None:
        self.frames, self.encoded = FULL, None


@dataclass(eq=False)
class Caller:
    """The piece of a job that a thread works for, and what is kept until it ends.

    `stop`: the job's; it also tells jobs apart, which take turns. `passes`: does a generation result of CTranslate2
    pass the job's quality gates? Without it no window is fitted. `choose`: of a window's languages, most probable
    first, those that the job takes it for. `on_run` is called when a window reaches the model. `hotwords`: so many
    tokens at the start of each prompt stay there. `max_new_tokens`: the most of a window's text. `keeps`: so many
    windows last seen are found again, with their encoding, when the piece is gone through once more. `rank`: of the
    job's pieces, those with a lower one are served first.
    """

    stop: Stop
    passes: Callable[[Any], bool] | None = None
    choose: Callable[[Languages], Languages] = lambda languages: languages
    on_run: Callable[[], None] = lambda: None
    hotwords: int = 0
    max_new_tokens: int | None = None
    keeps: int = 1
    rank: int = 0
    features: tuple[Any, Mel] | None = None

    def __post_init__(self) -> None:
        self.windows: deque[Window] = deque(maxlen=self.keeps)


@dataclass(frozen=True)
class _Call:
    """One window's share in a call of the model: `act` with the windows' encoder output and what each `gives`.

    `same`: what must be equal in all calls of a batch, besides the window's length.
    """

    kind: str
    same: Hashable
    caller: Caller
    window: Window
    gives: Any
    act: Callable[[StorageView, list[Any]], list[Any]]


class SharedModel:
    """The methods and attributes of `ctranslate2.models.Whisper` that faster-whisper uses, for one window a call.

    `start_token` is the id of `<|startoftranscript|>`; `fit` None leaves all windows full. All methods raise
    what the model raises, Stopped, and BatcherClosed after `close()`.
    """

    def __init__(
        self, model: Any, start_token: int, *, threads: int, batch_size: int, max_wait_s: float, fit: Fit | None
    ) -> None:
        self._model = model
        self._start_token = start_token
        self._fit = fit
        self._threads = threading.local()
        self._gate = Gate()
        self._batcher: Batcher[_Call, Any] = Batcher(
            self._run,
            threads=threads,
            max_size=batch_size,
            max_wait_s=max_wait_s,
            is_memory_error=is_memory_error,
            on_failure=_log_failure,
            name="model",
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @contextmanager
    def called_for(self, caller: Caller) -> Iterator[None]:
        """Calls of this thread, inside the `with`, are for this caller."""
        before = getattr(self._threads, "caller", None)
        self._threads.caller = caller
        try:
            yield
        finally:
            self._threads.caller = before

    @property
    def longest_call_s(self) -> float:
        """Seconds that a call of the model has been running; 0 when none is."""
        return self._gate.longest_s

    def reload(self) -> None:
        """Read the weights once more. Calls that run end first, those that wait go on with the new ones."""
        with self._gate.alone(watched=False):
            self._model.unload_model()
            self._model.load_model()

    def close(self) -> None:
        """Let what runs end, fail what waits, free the weights."""
        self._batcher.close()
        self._model.unload_model()
        self._model = None  # unloaded, it still holds memory; a thread that has worked for it may hold us for a while

    def encode(self, features: StorageView, to_cpu: bool = False) -> Window:  # noqa: ARG002  (always)
        """A window for the calls below. `features`: float32, shape (1, n_mels, 3000), on the CPU.

        One that this caller has had already (to transcribe, then to translate it) is found again, with its encoding.
        """
        caller = self.caller
        caller.stop.check()
        mel = _without_padding(np.asarray(features)[0])
        for window in caller.windows:
            if np.array_equal(window.mel, mel):
                return window
        frames = self._fit.frames(mel.shape[1]) if self._fit and caller.passes else FULL
        window = Window(mel, frames)
        caller.windows.append(window)
        return window

    def generate(self, window: Window, prompts: list[list[int]], **options: Any) -> list[Any]:
        """In one call of CTranslate2 all prompts have one length and start their task at one index."""
        prompt = self._shortened(prompts[0])
        if count := self.caller.max_new_tokens:
            # CTranslate2 gives the text half of `max_length`, or what is left of it behind all but one of the prompt's
            # tokens, if that is less; faster-whisper asks for the sum of both numbers.
            options["max_length"] = max(2 * count, len(prompt) - 1 + count)

        def act(encoded: StorageView, prompts: list[list[int]]) -> list[Any]:
            return list(self._model.generate(encoded, prompts, **options))

        same = len(prompt), prompt.index(self._start_token), _hashable(options)
        call = _Call("generate", same, self.caller, window, prompt, act)
        result = self._result_of(call)
        if window.frames < FULL and call.caller.passes and not call.caller.passes(result):
            window.make_full()
            result = self._result_of(call)
        return [result]

    def detect_language(self, window: Window) -> list[Languages]:
        """What the caller chooses of the window's languages."""
        caller = self.caller

        def act(encoded: StorageView, _: list[Any]) -> list[Any]:
            return list(self._model.detect_language(encoded))

        if window.languages is None:
            window.languages = self._result_of(_Call("detect_language", None, caller, window, None, act))
        return [caller.choose(window.languages)]

    def align(
        self,
        window: Window,
        start_sequence: Sequence[int],
        text_tokens: list[list[int]],
        num_frames: int,
        **options: Any,
    ) -> list[Any]:
        """In one call of CTranslate2 the start sequence (so the language) is shared."""
        [tokens] = text_tokens

        def act(encoded: StorageView, given: list[tuple[list[int], int]]) -> list[Any]:
            texts, lengths = map(list, zip(*given, strict=True))
            return list(self._model.align(encoded, start_sequence, texts, lengths, **options))

        same = tuple(start_sequence), _hashable(options)
        return [self._result_of(_Call("align", same, self.caller, window, (tokens, num_frames), act))]

    @property
    def caller(self) -> Caller:
        """Whom this thread works for."""
        caller: Caller | None = getattr(self._threads, "caller", None)
        return caller or Caller(Stop())

    def _shortened(self, prompt: list[int]) -> list[int]:
        """A prompt that leaves half of the decoder's positions to the text: faster-whisper puts the hotwords into it,
        and as many tokens of the text before as fit by themselves: together more than CTranslate2 takes."""
        context = prompt[1 : prompt.index(self._start_token)]
        if (too_many := len(context) - MAX_PROMPT_TOKENS) <= 0:
            return prompt
        kept = self.caller.hotwords
        return [prompt[0], *context[:kept], *context[kept + too_many :], *prompt[1 + len(context) :]]

    def _result_of(self, call: _Call) -> Any:
        future = self._batcher.submit(
            call,
            key=(call.kind, call.window.frames, call.same),
            owner=call.caller.stop.whole,
            since=call.window.since,
            rank=call.caller.rank,
            has_sequel=call.kind == "detect_language",
        )
        return call.caller.stop.result_of(future)

    def _run(self, calls: Sequence[_Call]) -> list[Any]:
        """On a thread of the batcher: the only place that calls the model."""
        first, jobs = calls[0], {call.caller.stop.whole for call in calls}
        for call in calls:
            call.caller.on_run()
        try:
            with self._gate.together() as running:
                log.event(
                    "model_call",
                    level=log.DEBUG,
                    kind=first.kind,
                    frames=first.window.frames,
                    windows=len(calls),
                    jobs=len(jobs),
                    running=running,
                )
                return self._act(calls)
        except (RuntimeError, MemoryError) as error:
            if len(calls) > 1 or not is_memory_error(error):
                raise
            _log_failure(error, windows=1)
        # A window that doesn't fit beside what the other threads run may still fit alone.
        gc.collect()
        with self._gate.alone():
            return self._act(calls)

    def _act(self, calls: Sequence[_Call]) -> list[Any]:
        encoded = self._encoder_output([call.window for call in calls])
        return calls[0].act(encoded, [call.gives for call in calls])

    def _encoder_output(self, windows: list[Window]) -> StorageView:
        """Shape (windows, frames // 2, d_model), with each window encoded at most once."""
        new = [window for window in windows if window.encoded is None]
        if new:
            mels = StorageView.from_array(np.stack([window.padded() for window in new]))
            output = self._model.encode(mels, to_cpu=True)
            for window, encoded in zip(new, _split(output), strict=True):
                window.encoded = encoded
            if len(new) == len(windows):
                return output
        return _joined([window.encoded for window in windows if window.encoded])


def _split(batch: StorageView) -> list[StorageView]:
    """The items of a batch as batches of one, with memory of their own: they may outlive each other by long."""
    if batch.shape[0] == 1:
        return [batch]
    return [_view(item[np.newaxis].copy(), batch.dtype) for item in _numbers(batch)]


def _joined(items: list[StorageView]) -> StorageView:
    if len(items) == 1:
        return items[0]
    return _view(np.concatenate([_numbers(item) for item in items]), items[0].dtype)


def _numbers(view: StorageView) -> NDArray[Any]:
    return np.asarray(view.to(DataType.float32) if view.dtype == DataType.bfloat16 else view)  # numpy lacks bfloat16


def _view(numbers: NDArray[Any], dtype: DataType) -> StorageView:
    view = StorageView.from_array(numbers)
    return view.to(dtype) if view.dtype != dtype else view


def _log_failure(error: BaseException, windows: int) -> None:
    log.event("model_call_failed", level=log.WARNING, windows=windows, error=error)


def _without_padding(mel: Mel) -> Mel:
    """faster-whisper fills a window up with columns of exact zeros, which sound, and even digital silence, is not."""
    sounding = np.flatnonzero(mel.any(axis=0))
    return np.array(mel[:, : sounding[-1] + 1 if len(sounding) else 1])


def _hashable(options: dict[str, Any]) -> Hashable:
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in sorted(options.items()))
