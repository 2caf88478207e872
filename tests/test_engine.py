"""The real model on real audio."""

import re
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faster_whisper
import numpy as np
import pytest
from conftest import Recording
from media import CLIP_WORDS, RATE, noise, silence, speech

from whisper_worker.audio import decode
from whisper_worker.engine import Engine
from whisper_worker.errors import BadInput, OutOfMemory, UnknownModel
from whisper_worker.models import ModelFiles, find
from whisper_worker.request import InputRules, Request, parse_request
from whisper_worker.runpod_io import warm_up
from whisper_worker.speech import find_speech, whole
from whisper_worker.stop import Stop, Stopped
from whisper_worker.transcript import NOTHING_SAID, Transcript

RULES = InputRules(allow_local_files=False, max_base64_bytes=100)


def request(**options: Any) -> Request:
    return parse_request({"audio": "http://a.test/x", **options}, RULES)


def transcribe(engine: Engine, samples: Any, task: Any = "transcribe", **options: Any) -> Transcript:
    asked = request(**options)
    heard = find_speech(samples) if asked.enable_vad else whole(samples)
    duration = len(samples) / RATE
    return engine.transcribe(heard, asked, Stop(), duration=duration, task=task, language=asked.language)


def text_of(transcript: Transcript) -> str:
    return words_of("".join(segment.text for segment in transcript.segments))


def words_of(text: str) -> str:
    """Lower case, letters and digits only, one space between words."""
    plain = unicodedata.normalize("NFKC", text).lower()
    return " ".join(re.sub(r"[^\w\s]", " ", plain).split())


def word_errors(heard: str, said: str) -> float:
    """Word error rate: edits over words said."""
    a, b = heard.split(), said.split()
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        row = _next_row(row, i, word, b)
    return row[-1] / len(b)


def _next_row(row: list[int], i: int, word: str, b: list[str]) -> list[int]:
    new = [i]
    for j, other in enumerate(b, 1):
        new.append(min(row[j] + 1, new[-1] + 1, row[j - 1] + (word != other)))
    return new


def samples_of(path: Path) -> Any:
    with path.open("rb") as file:
        return decode(file, Stop(), max_seconds=60, extension=path.suffix[1:]).samples


def test_the_clip_is_understood(english: Engine) -> None:
    transcript = transcribe(english, speech())
    assert text_of(transcript) == CLIP_WORDS
    assert (transcript.language, transcript.language_probability) == ("en", 1.0)


ENGLISH = [
    "en_jfk_16k.flac",
    "en_lj001-0014.mp3",
    "en_librispeech_61-70968-0000.flac",
    "en_librivox_austen_0930.wav",
    "en_asterisk_vm-invalid-password_8k.wav",
    "en_asterisk_queue-periodic-announce.g722",
]


@pytest.mark.parametrize("name", ENGLISH)
def test_human_speech_is_understood(name: str, english: Engine, recording: Callable[[str], Recording]) -> None:
    said = recording(name)
    samples = samples_of(said.path)
    transcript = transcribe(english, samples, word_timestamps=True)
    assert word_errors(text_of(transcript), words_of(said.facts["text"])) < 0.1
    times = [time for segment in transcript.segments for time in (segment.start, segment.end)]
    assert times == sorted(times)
    assert times[-1] <= len(samples) / RATE
    for segment in transcript.segments:
        assert segment.words is not None
        assert "".join(word.word for word in segment.words).strip() == segment.text.strip()
        assert all(word.start <= word.end for word in segment.words)


def test_music_is_no_speech(english: Engine, recording: Callable[[str], Recording]) -> None:
    samples = samples_of(recording("music_morning_coffee_15s_8k.flac").path)
    assert transcribe(english, samples) == NOTHING_SAID


def test_the_text_is_that_of_faster_whisper_itself(english: Engine) -> None:
    """Our own voice activity detection, in front of the model, changes nothing of what the library would say."""
    samples = np.concatenate([speech(), silence(6), speech(), noise(3, 0.01)])
    segments, info = english._whisper.transcribe(
        samples, vad_filter=True, word_timestamps=True, condition_on_previous_text=False
    )
    theirs, ours = list(segments), transcribe(english, samples, word_timestamps=True)
    assert [segment.text for segment in ours.segments] == [segment.text for segment in theirs]
    assert [list(segment.tokens) for segment in ours.segments] == [segment.tokens for segment in theirs]
    for mine, other in zip(ours.segments, theirs, strict=True):
        assert (mine.start, mine.end) == pytest.approx((other.start, min(other.end, info.duration)), abs=0.01)
        assert mine.words is not None
        assert [word.word for word in mine.words] == [word.word for word in other.words]


def test_many_jobs_on_one_model_get_each_their_own_text(english: Engine) -> None:
    one, two, nothing = speech(), speech()[: 2 * RATE], silence(3)
    alone = [text_of(transcribe(english, samples)) for samples in (one, two, nothing)]
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda samples: text_of(transcribe(english, samples)), [one, two, nothing] * 4))
    assert texts == alone * 4


def test_plain_numbers_leave_the_engine(english: Engine) -> None:
    [segment] = transcribe(english, speech(), word_timestamps=True).segments
    assert segment.words is not None
    numbers = [segment.start, segment.end, segment.temperature, segment.avg_logprob, segment.words[0].probability]
    assert {type(number) for number in numbers} == {float}


@pytest.mark.parametrize("seconds", [0, 0.001, 0.01, 0.05])
def test_a_fragment_is_not_given_to_the_model(seconds: float, english: Engine) -> None:
    fragment = speech()[RATE : RATE + int(seconds * RATE)]
    assert transcribe(english, fragment, enable_vad=False, word_timestamps=True) == NOTHING_SAID


@pytest.mark.parametrize("seconds", [0.1, 0.3, 1.0])
def test_a_short_piece_does_not_hurt(seconds: float, english: Engine) -> None:
    options = {"enable_vad": False, "word_timestamps": True, "temperature_increment_on_fallback": 0}
    transcript = transcribe(english, speech()[RATE : RATE + int(seconds * RATE)], **options)
    assert all(segment.end <= seconds for segment in transcript.segments)


# --- every option that is accepted does something


def test_options_reach_the_model(english: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def spy(samples: Any, **options: Any) -> Any:
        seen.update(options)
        return [], SimpleNamespace(language="en", language_probability=1.0)

    monkeypatch.setattr(english._whisper, "transcribe", spy)
    transcribe(
        english,
        speech(),
        language="english",
        temperature=0.4,
        best_of=3,
        beam_size=2,
        patience=1.5,
        length_penalty=0.5,
        suppress_tokens="-1,13",
        initial_prompt="Home.",
        condition_on_previous_text=True,
        temperature_increment_on_fallback=0.3,
        compression_ratio_threshold=2.0,
        logprob_threshold=-0.5,
        no_speech_threshold=0.7,
        word_timestamps=True,
    )
    assert seen == {
        "language": "en",
        "task": "transcribe",
        "temperature": [0.4, 0.7, 1.0],
        "best_of": 3,
        "beam_size": 2,
        "patience": 1.5,
        "length_penalty": 0.5,
        "suppress_tokens": [-1, 13],
        "initial_prompt": "Home.",
        "condition_on_previous_text": True,
        "compression_ratio_threshold": 2.0,
        "log_prob_threshold": -0.5,
        "no_speech_threshold": 0.7,
        "word_timestamps": True,
    }


def test_a_suppressed_token_is_never_produced(english: Engine) -> None:
    window = next(t for t in transcribe(english, speech()).segments[0].tokens if "window" in _spelled(english, t))
    without = transcribe(english, speech(), suppress_tokens=[-1, window])
    assert window not in without.segments[0].tokens


def _spelled(engine: Engine, token: int) -> str:
    return str(engine._whisper.hf_tokenizer.decode([token]))


@pytest.mark.parametrize(
    "options",
    [
        {"beam_size": 1},
        {"beam_size": 10, "patience": 5, "length_penalty": 2},
        {"beam_size": 10, "patience": 0.1, "length_penalty": 0},
        {"temperature": 0.1, "best_of": 10},
        {"temperature": 1, "best_of": 1},
        {"suppress_tokens": []},
        {"initial_prompt": "word " * 200},
    ],
)
def test_the_extremes_of_the_options_are_decoded(options: dict[str, Any], english: Engine) -> None:
    assert transcribe(english, speech(), **options).language == "en"


# --- what the model can't do


def test_another_model_is_not_served_silently(english: Engine) -> None:
    english.check(request(model="bundled"))
    with pytest.raises(UnknownModel, match="serves the model bundled, not large-v2"):
        english.check(request(model="large-v2"))


def test_a_model_goes_by_all_its_names() -> None:
    files = ModelFiles("turbo", Path())
    assert files.is_called("large-v3-turbo")
    assert files.is_called("mobiuslabsgmbh/faster-whisper-large-v3-turbo")
    assert not files.is_called("large-v3")


def test_an_english_model_refuses_other_languages(english: Engine) -> None:
    english.check(request(language="en"))
    with pytest.raises(BadInput, match="knows English only"):
        english.check(request(language="de"))


def test_a_prompt_that_would_be_cut_is_refused_with_its_count(english: Engine) -> None:
    english.check(request(initial_prompt="word " * 220))
    with pytest.raises(BadInput, match="has 300 tokens, 223 are allowed"):
        english.check(request(initial_prompt="word " * 300))


def test_a_token_that_the_model_lacks_is_refused(english: Engine) -> None:
    english.check(request(suppress_tokens=[50_363, 51_863]))  # timestamps are tokens too
    with pytest.raises(BadInput, match="tokens up to"):
        english.check(request(suppress_tokens=[51_864]))


# --- trouble


def test_a_job_is_stopped_within_a_window_even_where_no_segment_comes(
    english: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, windows = Stop(), []
    real = english._model._model.encode

    def count(*args: Any, **kwargs: Any) -> Any:
        windows.append(1)
        stop.set()
        return real(*args, **kwargs)

    monkeypatch.setattr(english._model, "_model", SimpleNamespace(**_methods(english), encode=count))
    skipped = request(enable_vad=False, logprob_threshold=0, no_speech_threshold=0)  # no window gives a segment
    with pytest.raises(Stopped):
        english.transcribe(whole(silence(120)), skipped, stop, duration=120, task="transcribe", language="en")
    assert len(windows) == 1


def _methods(engine: Engine) -> dict[str, Any]:
    model = engine._model._model
    return {name: getattr(model, name) for name in ("generate", "device", "device_index", "is_multilingual")}


def test_a_stopped_job_does_not_start(english: Engine) -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(Stopped):
        english.transcribe(whole(speech()), request(), stop, duration=4, task="transcribe", language=None)


@pytest.mark.parametrize(
    "message",
    ["CUDA failed with error out of memory", "std::bad_alloc", "cuBLAS failed with status CUBLAS_STATUS_ALLOC_FAILED"],
)
def test_too_little_memory_is_told_apart(message: str, english: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(message)

    monkeypatch.setattr(english._whisper, "transcribe", fail)
    with pytest.raises(OutOfMemory):
        transcribe(english, speech())


def test_the_warm_up_hears_the_clip_and_fails_with_the_engine(english: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(english)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Library libcublas.so.12 is not found or cannot be loaded")

    monkeypatch.setattr(english._whisper, "transcribe", fail)
    with pytest.raises(RuntimeError, match="libcublas"):
        warm_up(english)


def test_a_warm_up_that_hears_nothing_fails(english: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(english, "transcribe", lambda *_, **__: NOTHING_SAID)
    with pytest.raises(RuntimeError, match="hears nothing"):
        warm_up(english)


def test_weights_are_given_back() -> None:
    engine = Engine(faster_whisper.WhisperModel(str(find("bundled").folder), device="cpu"), find("bundled"))
    engine.close()
    assert not engine._whisper.model.model_is_loaded


# --- many languages

FOREIGN = [
    ("de_kerstin_0973.flac", 0.1),
    ("es_asterisk_queue-youarenext_8k.wav", 0.1),
    ("fr_asterisk_demo-enterkeywords_8k.wav", 0.2),
    ("it_asterisk_vm-rec-busy_8k.wav", 0.15),
    ("ru_asterisk_queue-periodic-announce_8k.wav", 0.15),
]


@pytest.mark.parametrize(("name", "errors"), FOREIGN)
def test_languages_are_detected_and_understood(
    name: str, errors: float, multilingual: Engine, recording: Callable[[str], Recording]
) -> None:
    said = recording(name)
    transcript = transcribe(multilingual, samples_of(said.path))
    assert transcript.language == said.facts["lang"]
    assert transcript.language_probability is not None
    assert 0.5 < transcript.language_probability <= 1
    assert word_errors(text_of(transcript), words_of(said.facts["text"])) <= errors


def test_speech_is_translated(multilingual: Engine, recording: Callable[[str], Recording]) -> None:
    samples = samples_of(recording("es_asterisk_queue-youarenext_8k.wav").path)
    translation = transcribe(multilingual, samples, task="translate", language="es")
    assert "the next representative" in text_of(translation)
