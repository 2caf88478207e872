"""The shared model against the one it stands in for: what faster-whisper says must not change.

Results are *equal* where a window has a call of its own. In a batch, sums are made in another order: there texts and
tokens are equal, and scores and times as close as `CLOSE` says.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from whisper_worker.models import find
from whisper_worker.shared_model import FULL, Caller, Fit, SharedModel, Window, _Encoded, _joined
from whisper_worker.stop import Stop, Stopped

CLOSE = 2e-3
OPTIONS: dict[str, Any] = {"word_timestamps": True, "temperature": [0.0]}  # sampling draws at random


class Calls:
    """A CTranslate2 model that notes each call that reaches it: its kind, windows, frames, and thread."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.made: list[tuple[str, int, int]] = []
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._model, name)
        if name not in ("encode", "generate", "detect_language", "align"):
            return real

        def call(features: StorageView, *args: Any, **options: Any) -> Any:
            frames = features.shape[2] if name == "encode" else 2 * features.shape[1]
            self.made.append((name, features.shape[0], frames))
            self.threads.add(threading.current_thread().name)
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
    assert caller.languages
    assert caller.languages[0][0] == "<|en|>"


def test_a_job_has_one_language(multilingual: Shared, caller: Caller) -> None:
    shared = multilingual.share()
    found: list[Any] = []
    caller.on_language = found.append
    samples = np.concatenate([np.tile(speech(), 8), silence(2)])
    with shared.model.called_for(caller):
        said(shared.whisper, samples, language="de", multilingual=True, word_timestamps=False)
    assert shared.calls.count("encode") >= 2
    assert shared.calls.count("detect_language") == len(found) == 1


def test_a_higher_temperature_and_a_translation_reuse_the_encoder_output(multilingual: Shared, caller: Caller) -> None:
    shared = multilingual.share()
    with shared.model.called_for(caller):
        hot = {"temperature": [0.0, 0.2], "log_prob_threshold": 0.0, "language": "en", "word_timestamps": False}
        said(shared.whisper, speech(), **hot)
        said(shared.whisper, speech(), task="translate", **hot)
    assert (shared.calls.count("encode"), shared.calls.count("generate")) == (1, 4)


def test_windows_of_a_batch_keep_their_own_encoder_output(english: Shared) -> None:
    """Encoded together, aligned with others: each gets the words of its own audio."""
    clips = [speech()[: n * RATE // 2] for n in (3, 5, 7, 8)]
    alone = [said(english.plain, clip)[0] for clip in clips]
    shared = english.share(batch_size=4, threads=1, max_wait_s=0.5)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda clip: said(shared.whisper, clip)[0], clips))
    assert shared.calls.count("encode") < 4
    assert [[s.text for s in mine] for mine in together] == [[s.text for s in theirs] for theirs in alone]


def test_encoder_outputs_are_joined_whatever_numbers_they_are() -> None:
    for kind in (DataType.float32, DataType.float16, DataType.bfloat16):
        first, second = (np.arange(n, n + 24, dtype=np.float32).reshape(2, 3, 4) for n in (0, 24))
        items = [_Encoded(StorageView.from_array(a).to(kind), index) for a in (first, second) for index in (1, 0)]
        joined = _joined(items)
        assert joined.dtype == kind
        values = np.asarray(joined.to(DataType.float32))
        assert values.tolist() == np.stack([first[1], first[0], second[1], second[0]]).tolist()


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
