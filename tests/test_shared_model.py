"""The shared model against the one it stands in for: what faster-whisper says must not change.

Results are *equal* where a window has a call of its own. In a batch, sums are made in another order: there texts and
tokens are equal, and scores and times as close as `CLOSE` says.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import faster_whisper.transcribe as fw
import numpy as np
import pytest
from conftest import Recording, find_multilingual
from ctranslate2 import DataType, StorageView
from media import RATE, noise, silence, speech

from whisper_worker.audio import decode
from whisper_worker.batching import BatcherClosed
from whisper_worker.model_files import find
from whisper_worker.shared_model import (
    FULL,
    Caller,
    Fit,
    Languages,
    SharedModel,
    Window,
    _joined,
    _split,
    is_device_lost,
    is_memory_error,
)
from whisper_worker.stop import Stop, Stopped

CLOSE = 2e-3
OPTIONS: dict[str, Any] = {"word_timestamps": True, "temperature": [0.0]}  # sampling draws at random


class Calls:
    """A CTranslate2 model that notes each call that reaches it: its kind, windows, frames, and thread."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.made: list[tuple[str, int, int]] = []
        self.threads: set[str] = set()
        self.before: Callable[[int], None] = lambda _: None  # called before each call, with its number

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._model, name)
        if name not in ("encode", "generate", "detect_language", "align"):
            return real

        def call(features: StorageView, *args: Any, **options: Any) -> Any:
            frames = features.shape[2] if name == "encode" else 2 * features.shape[1]
            self.made.append((name, features.shape[0], frames))
            self.threads.add(threading.current_thread().name)
            self.before(len(self.made))
            return real(features, *args, **options)

        return call

    def count(self, kind: str) -> int:
        return sum(made[0] == kind for made in self.made)


class Shared:
    """A faster-whisper model, and the same with a shared one inside."""

    def __init__(self, folder: Path) -> None:
        self.plain, self.whisper = (
            fw.WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=1, num_workers=2)
            for _ in range(2)
        )
        self.calls = Calls(self.whisper.model)
        self.model: SharedModel = self.whisper.model
        self.start = self.whisper.hf_tokenizer.token_to_id("<|startoftranscript|>")

    def share(self, batch_size: int = 1, fit: Fit | None = None, max_wait_s: float = 0, threads: int = 2) -> "Shared":
        self.calls.made.clear()
        self.calls.before = lambda _: None
        self.model = self.whisper.model = SharedModel(
            self.calls, self.start, threads=threads, batch_size=batch_size, max_wait_s=max_wait_s, fit=fit
        )
        return self


@pytest.fixture(scope="module")
def english() -> Shared:
    return Shared(find("bundled").folder)


@pytest.fixture(scope="module")
def multilingual() -> Shared:
    return Shared(find_multilingual())


def said(whisper: fw.WhisperModel, samples: Any, **options: Any) -> tuple[list[fw.Segment], Any]:
    segments, info = whisper.transcribe(samples, **{**OPTIONS, **options})
    return list(segments), (info.language, info.language_probability, info.all_language_probs)


SET: dict[str, Callable[[], Any]] = {
    "a sentence": speech,
    "two windows": lambda: np.concatenate([np.tile(speech(), 7), silence(1), speech()[::-1]]),
    "silence": lambda: silence(5),
    "noise around": lambda: np.concatenate([noise(2, 0.02), speech(), noise(2, 0.02)]),
    "a fragment": lambda: speech()[RATE : RATE + 3000],
}
WAYS: dict[str, dict[str, Any]] = {
    "beam": {},
    "greedy, without words": {"beam_size": 1, "word_timestamps": False},
    "on from the text before": {"condition_on_previous_text": True, "initial_prompt": "The window."},
    "penalties": {"length_penalty": 0.6, "repetition_penalty": 1.1, "patience": 2, "suppress_tokens": [-1, 13]},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("samples", SET.values(), ids=SET.keys())
def test_alone_everything_is_equal_to_faster_whisper(
    samples: Callable[[], Any], way: dict[str, Any], english: Shared
) -> None:
    english.share()
    assert said(english.whisper, samples(), **way) == said(english.plain, samples(), **way)


FOREIGN = ["de_kerstin_0973.flac", "es_asterisk_queue-youarenext_8k.wav", "ru_asterisk_queue-periodic-announce_8k.wav"]


@pytest.mark.parametrize("name", FOREIGN)
def test_alone_other_languages_are_equal_too(
    name: str, multilingual: Shared, recording: Callable[[str], Recording]
) -> None:
    samples = samples_of(recording(name))
    multilingual.share()
    assert said(multilingual.whisper, samples) == said(multilingual.plain, samples)
    translate = {"task": "translate", "language": name[:2]}
    assert said(multilingual.whisper, samples, **translate) == said(multilingual.plain, samples, **translate)


def samples_of(recording: Recording) -> Any:
    with recording.path.open("rb") as file:
        return decode(file, Stop(), max_seconds=60).samples


def test_together_texts_are_equal_and_figures_as_close_as_a_batch_allows(
    multilingual: Shared, recording: Callable[[str], Recording]
) -> None:
    """Several languages, both tasks, with and without words, in the same batches."""
    jobs = [
        (samples_of(recording(name)), {"task": task, "language": name[:2], "word_timestamps": words})
        for name in FOREIGN
        for task, words in (("transcribe", True), ("translate", False))
    ]
    alone = [said(multilingual.plain, samples, **options) for samples, options in jobs]
    shared = multilingual.share(batch_size=4, threads=1, max_wait_s=0.5)
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: said(shared.whisper, job[0], **job[1]), jobs))
    assert max(windows for kind, windows, _ in shared.calls.made if kind == "generate") >= 3

    for (mine, my_info), (theirs, their_info) in zip(together, alone, strict=True):
        assert my_info[0] == their_info[0]
        assert [s.text for s in mine] == [s.text for s in theirs]
        assert [s.tokens for s in mine] == [s.tokens for s in theirs]
        for a, b in zip(mine, theirs, strict=True):
            assert (a.avg_logprob, a.no_speech_prob) == pytest.approx((b.avg_logprob, b.no_speech_prob), abs=CLOSE)
            assert [w.word for w in a.words or ()] == [w.word for w in b.words or ()]
            starts = [w.start for w in a.words or ()]
            assert starts == pytest.approx([w.start for w in b.words or ()], abs=0.05)


def test_only_the_model_threads_call_the_model(english: Shared) -> None:
    english.share()
    english.calls.threads.clear()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: said(english.whisper, speech()), range(8)))
    assert english.calls.threads <= {"model_0", "model_1"}


# --- each window is encoded once


@pytest.fixture
def caller() -> Caller:
    return Caller(Stop(), passes=lambda _: True)


def test_language_detection_and_words_reuse_the_encoder_output(multilingual: Shared, caller: Caller) -> None:
    shared = multilingual.share()
    with shared.model.called_for(caller):
        segments, _ = said(shared.whisper, speech(), language="de", multilingual=True)
    assert "open the window" in segments[0].text
    assert [kind for kind, _, _ in shared.calls.made] == ["encode", "detect_language", "generate", "align"]


def test_the_caller_chooses_each_windows_language(multilingual: Shared) -> None:
    shared = multilingual.share()
    found: list[Any] = []

    def choose(languages: Languages) -> Languages:
        found.append(languages[0][0])
        return [("<|de|>", 0.9)]

    caller = Caller(Stop(), choose=choose, keeps=8)
    samples = np.concatenate([np.tile(speech(), 8), silence(2)])
    for _ in range(2):  # the second time nothing is asked of the model
        with shared.model.called_for(caller):
            said(shared.whisper, samples, language="fr", multilingual=True, word_timestamps=False)
    windows = len(found) // 2
    assert windows >= 2
    assert found == ["<|en|>"] * 2 * windows
    assert shared.calls.count("detect_language") == windows


def test_a_prompt_leaves_half_of_the_positions_to_the_text(multilingual: Shared, caller: Caller) -> None:
    """Of hotwords and the text before, the end of the text before is kept, and all hotwords."""
    shared = multilingual.share()
    hotwords, before = [11] * 100, list(range(500, 723))
    prompt = [50361, *hotwords, *before, *PROMPT["en"]]
    caller.hotwords = len(hotwords)
    with shared.model.called_for(caller):
        kept = shared.model._shortened(prompt)
    assert kept == [50361, *hotwords, *before[100:], *PROMPT["en"]]
    assert shared.model._shortened(kept) == kept


def test_a_higher_temperature_and_a_translation_reuse_the_encoder_output(multilingual: Shared, caller: Caller) -> None:
    shared = multilingual.share()
    with shared.model.called_for(caller):
        hot = {"temperature": [0.0, 0.2], "log_prob_threshold": 0.0, "language": "en", "word_timestamps": False}
        said(shared.whisper, speech(), **hot)
        said(shared.whisper, speech(), task="translate", **hot)
    assert (shared.calls.count("encode"), shared.calls.count("generate")) == (1, 4)


def test_windows_of_a_batch_keep_their_own_encoder_output(english: Shared) -> None:
    """Encoded together, aligned in another order: each gets the words of its own audio."""
    clips = [speech()[: n * RATE // 2] for n in (3, 5, 7, 8)]
    alone = [said(english.plain, clip)[0] for clip in clips]
    shared = english.share(batch_size=4, threads=1, max_wait_s=0.5)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda clip: said(shared.whisper, clip)[0], clips))
    assert shared.calls.count("encode") < 4
    assert list(map(words_of, together)) == list(map(words_of, alone))


def words_of(segments: list[fw.Segment]) -> list[tuple[str, float]]:
    return [(word.word, word.start) for segment in segments for word in segment.words or ()]


@pytest.mark.parametrize("order", [(1, 0), (1, 0, 2), (2, 1), (1,)])
def test_windows_encoded_together_are_told_apart_in_any_order(order: tuple[int, ...], english: Shared) -> None:
    shared = english.share()
    mels = [english.plain.feature_extractor(speech()[RATE * n : RATE * n + RATE])[:, :100] for n in range(3)]
    windows = [Window(mel, FULL) for mel in mels]
    alone = [np.asarray(english.plain.encode(window.padded())) for window in windows]
    shared.model._encoder_output(windows[:2])
    joined = np.asarray(shared.model._encoder_output([windows[n] for n in order]))
    assert np.array_equal(joined, np.concatenate([alone[n] for n in order]))


def test_encoder_outputs_are_split_and_joined_whatever_numbers_they_are() -> None:
    for kind in (DataType.float32, DataType.float16, DataType.bfloat16):
        numbers = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        first, second = _split(StorageView.from_array(numbers).to(kind))
        joined = _joined([second, first, second])
        assert joined.dtype == first.dtype == kind
        assert np.asarray(joined.to(DataType.float32)).tolist() == numbers[[1, 0, 1]].tolist()


# --- what may share a call

PROMPT = {"en": [50258, 50259, 50359], "de": [50258, 50261, 50359]}  # start, language, transcribe


def generate(shared: Shared, window: Window, prompt: list[int], **options: Any) -> Any:
    return shared.model.generate(window, [prompt], **{"beam_size": 2, "max_length": 20, **options})


def align(shared: Shared, window: Window, prompt: list[int], frames: int = 100) -> Any:
    return shared.model.align(window, prompt, [[1029, 1029]], frames, median_filter_width=7)


APART: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "beams": (lambda s, w: generate(s, w, PROMPT["en"]), lambda s, w: generate(s, w, PROMPT["en"], beam_size=3)),
    "temperatures": (
        lambda s, w: generate(s, w, PROMPT["en"], sampling_temperature=0.2),
        lambda s, w: generate(s, w, PROMPT["en"], sampling_temperature=0.4),
    ),
    "suppressed tokens": (
        lambda s, w: generate(s, w, PROMPT["en"], suppress_tokens=[1]),
        lambda s, w: generate(s, w, PROMPT["en"], suppress_tokens=[2]),
    ),
    "lengths of prompts": (
        lambda s, w: generate(s, w, PROMPT["en"]),
        lambda s, w: generate(s, w, [50361, 1029, *PROMPT["en"]]),
    ),
    "lengths of windows": (
        lambda s, w: generate(s, w, PROMPT["en"]),
        lambda s, w: generate(s, Window(w.mel, 1600), PROMPT["en"]),
    ),
    "kinds": (lambda s, w: s.model.detect_language(w), lambda s, w: align(s, w, PROMPT["en"])),
    "languages to align": (lambda s, w: align(s, w, PROMPT["en"]), lambda s, w: align(s, w, PROMPT["de"])),
}
TOGETHER: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "languages": (lambda s, w: generate(s, w, PROMPT["en"]), lambda s, w: generate(s, w, PROMPT["de"])),
    "lengths to align": (lambda s, w: align(s, w, PROMPT["en"], 80), lambda s, w: align(s, w, PROMPT["en"], 100)),
    "detections": (lambda s, w: s.model.detect_language(w), lambda s, w: s.model.detect_language(w)),
}


@pytest.mark.parametrize("calls", APART.values(), ids=APART.keys())
def test_calls_that_differ_in_what_is_shared_run_apart(
    calls: tuple[Callable[..., Any], ...], multilingual: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    assert batches_of(calls, multilingual) == [1, 1]
    assert "model_call_failed" not in caplog.text


@pytest.mark.parametrize("calls", TOGETHER.values(), ids=TOGETHER.keys())
def test_calls_that_differ_only_in_what_is_their_own_run_together(
    calls: tuple[Callable[..., Any], ...], multilingual: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    assert batches_of(calls, multilingual) == [2]
    assert "model_call_failed" not in caplog.text


def batches_of(calls: tuple[Callable[..., Any], ...], shared: Shared) -> list[int]:
    """How many windows each call of the model had, `encode` aside, when all of `calls` waited at the same time."""
    shared.share(batch_size=4, threads=1)
    mel = shared.plain.feature_extractor(speech()[:RATE])[:, :100]
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert release.wait(30)

    def first() -> None:
        with shared.model.called_for(Caller(Stop(), on_run=hold)):
            shared.model.detect_language(Window(mel, FULL))

    with ThreadPoolExecutor(1 + len(calls)) as pool:
        work = [pool.submit(first)]
        assert held.wait(30)
        work += [pool.submit(call, shared, Window(mel, FULL)) for call in calls]
        while shared.model._batcher._waiting.count < len(calls):
            threading.Event().wait(0.01)
        release.set()
        for done in work:
            done.result(60)
    return [windows for kind, windows, _ in shared.calls.made[2:] if kind != "encode"]


def test_a_second_jobs_window_goes_before_the_firsts_next_ones(english: Shared) -> None:
    shared = english.share(threads=1)
    window = Window(english.plain.feature_extractor(speech()[:RATE])[:, :100], FULL)
    long, short = Stop(), Stop()
    order: list[str] = []
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert release.wait(30)

    def call(stop: Stop, on_run: Callable[[], None]) -> None:
        with shared.model.called_for(Caller(stop, on_run=on_run)):
            shared.model.generate(Window(window.mel, FULL), [[shared.start]], max_length=5)

    with ThreadPoolExecutor(6) as pool:
        work = [pool.submit(call, Stop(), hold)]
        assert held.wait(30)
        for number, (name, stop) in enumerate([("long", long)] * 3 + [("short", short)], 1):
            work.append(pool.submit(call, stop, partial(order.append, name)))
            while shared.model._batcher._waiting.count < number:
                threading.Event().wait(0.01)
        release.set()
        for done in work:
            done.result(60)
    assert order == ["long", "short", "long", "long"]


def test_an_error_of_a_batch_is_logged(english: Shared, caplog: pytest.LogCaptureFixture) -> None:
    shared = english.share()
    window = Window(english.plain.feature_extractor(speech()[:RATE])[:, :100], FULL)
    with pytest.raises(ValueError, match="beam"):
        shared.model.generate(window, [[shared.start]], beam_size=0)
    assert "event=model_call_failed windows=1" in caplog.text


# --- too little memory, and worse


def failing(*numbers: int, error: str = "CUDA failed with error out of memory") -> Callable[[int], None]:
    """The calls of these numbers fail."""

    def before(number: int) -> None:
        if number in numbers:
            raise RuntimeError(error)

    return before


def test_a_window_without_enough_memory_is_tried_once_more(english: Shared, caplog: pytest.LogCaptureFixture) -> None:
    shared = english.share()
    shared.calls.before = failing(1)
    assert said(shared.whisper, speech()) == said(english.plain, speech())
    assert [kind for kind, _, _ in shared.calls.made] == ["encode", "encode", "generate", "align"]
    assert 'event=model_call_failed windows=1 error="CUDA failed with error out of memory"' in caplog.text


@pytest.mark.parametrize(("fails", "error"), [((1, 2), "CUDA failed with error out of memory"), ((1,), "bad weather")])
def test_a_second_failure_counts_and_so_does_the_first_for_other_reasons(
    fails: tuple[int, ...], error: str, english: Shared
) -> None:
    shared = english.share()
    shared.calls.before = failing(*fails, error=error)
    with pytest.raises(RuntimeError, match=error):
        said(shared.whisper, speech())
    assert len(shared.calls.made) == len(fails)
    assert said(shared.whisper, speech())[0]


def test_a_window_without_enough_memory_waits_until_it_is_alone(english: Shared) -> None:
    shared, release = english.share(threads=2), threading.Event()

    def before(number: int) -> None:
        if number == 1:
            assert release.wait(30)
        failing(2)(number)

    shared.calls.before = before
    with ThreadPoolExecutor(2) as pool:
        work = [pool.submit(said, shared.whisper, speech()) for _ in range(2)]
        while not shared.model._gate._loners:
            threading.Event().wait(0.01)
        assert len(shared.calls.made) == 2
        release.set()
        assert [done.result(60) for done in work] == [said(english.plain, speech())] * 2


def test_a_model_that_is_loaded_again_says_the_same_and_what_ran_ends_first(english: Shared) -> None:
    shared, running, release = english.share(), threading.Event(), threading.Event()

    def before(number: int) -> None:
        if number == 1:
            running.set()
            assert release.wait(30)

    shared.calls.before = before
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(said, shared.whisper, speech())
        assert running.wait(30)
        assert shared.model.longest_call_s > 0
        reloaded = pool.submit(shared.model.reload)
        while not shared.model._gate._loners:
            threading.Event().wait(0.01)
        assert shared.calls.model_is_loaded
        release.set()
        reloaded.result(60)
        assert first.result(60) == said(shared.whisper, speech()) == said(english.plain, speech())
    assert shared.model.longest_call_s == 0


LOST = [
    "CUDA failed with error an illegal memory access was encountered",
    "CUDA failed with error unspecified launch failure",
    "CUDA failed with error device-side assert triggered",
    "CUDA failed with error no CUDA-capable device is detected",
    "CUDA failed with error the launch timed out and was terminated",
    "CUDA failed with error misaligned address",
    "CUDA failed with error uncorrectable ECC error encountered",
    "CUDA failed with error unknown error",
    "cuBLAS failed with status CUBLAS_STATUS_EXECUTION_FAILED",
    "cuBLAS failed with status CUBLAS_STATUS_INTERNAL_ERROR",
]
SHORT_OF_MEMORY = [
    "CUDA failed with error out of memory",
    "cuBLAS failed with status CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
]
OTHER = ["Library libcublas.so.12 is not found or cannot be loaded", "unknown error", "beam_size must be > 0", ""]


@pytest.mark.parametrize(
    ("error", "memory", "lost"),
    [
        *[(RuntimeError(text), False, True) for text in LOST],
        *[(RuntimeError(text), True, False) for text in SHORT_OF_MEMORY],
        *[(RuntimeError(text), False, False) for text in OTHER],
        (MemoryError(), True, False),
        (ValueError("an illegal memory access was encountered"), False, False),
    ],
    ids=lambda value: str(value) if isinstance(value, Exception) else "",
)
def test_an_error_tells_what_is_wrong_with_the_device(error: Exception, memory: bool, lost: bool) -> None:
    assert (is_memory_error(error), is_device_lost(error)) == (memory, lost)


# --- fitted windows


@pytest.mark.parametrize(("sound", "frames"), [(1, 1600), (1400, 1600), (1401, FULL), (2900, FULL), (FULL, FULL)])
def test_a_window_is_short_where_sound_and_some_silence_fit_into_it(sound: int, frames: int) -> None:
    assert Fit(1600).frames(sound) == frames


def test_short_audio_is_encoded_in_a_short_window(english: Shared, caller: Caller) -> None:
    shared = english.share(fit=Fit(1600))
    with shared.model.called_for(caller):
        segments, _ = said(shared.whisper, speech(), word_timestamps=False)
    assert "open the window" in segments[0].text
    assert shared.calls.made == [("encode", 1, 1600), ("generate", 1, 1600)]


def test_a_result_that_fails_is_decoded_again_in_full_before_the_temperature_rises(english: Shared) -> None:
    shared, verdicts = english.share(fit=Fit(1600)), iter([False])
    with shared.model.called_for(Caller(Stop(), passes=lambda _: next(verdicts))):
        segments, _ = said(shared.whisper, speech())
    assert segments[0].temperature == 0
    assert shared.calls.made == [
        ("encode", 1, 1600),
        ("generate", 1, 1600),
        ("encode", 1, FULL),
        ("generate", 1, FULL),
        ("align", 1, FULL),
    ]
    assert segments == said(english.plain, speech())[0]


def test_without_quality_gates_windows_are_full(english: Shared) -> None:
    shared = english.share(fit=Fit(1600))
    said(shared.whisper, speech(), word_timestamps=False)
    assert shared.calls.made == [("encode", 1, FULL), ("generate", 1, FULL)]


# --- stopping and closing


def test_a_stopped_job_asks_the_model_for_nothing(english: Shared, caller: Caller) -> None:
    shared = english.share()
    caller.stop.set()
    with shared.model.called_for(caller), pytest.raises(Stopped):
        said(shared.whisper, speech())
    assert shared.calls.made == []


def test_a_job_stopped_while_it_waits_leaves_the_queue_at_once(english: Shared, caller: Caller) -> None:
    shared = english.share(threads=1)
    running, release = threading.Event(), threading.Event()

    def hold() -> None:
        running.set()
        assert release.wait(30)

    def work(whose: Caller) -> Any:
        with shared.model.called_for(whose):
            return said(shared.whisper, speech())

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(work, Caller(Stop(), on_run=hold))
        assert running.wait(30)
        second = pool.submit(work, caller)
        while not shared.model._batcher._waiting:
            threading.Event().wait(0.01)
        caller.stop.set()
        with pytest.raises(Stopped):
            second.result(30)
        release.set()
        assert first.result(30)[0]
    assert shared.calls.count("generate") == 1


def test_after_close_nobody_waits_and_the_weights_are_free() -> None:
    shared = Shared(find("bundled").folder).share()
    window = shared.whisper.encode(np.zeros((80, FULL), np.float32))
    shared.model.close()
    with pytest.raises(BatcherClosed):
        shared.model.generate(window, [[shared.start]])
    assert not shared.calls.model_is_loaded


def test_a_window_without_sound_has_a_frame() -> None:
    assert Window(np.zeros((80, 1), np.float32), FULL).padded().shape == (80, FULL)
