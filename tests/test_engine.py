"""The real model on real audio."""

import json
import re
import threading
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Recording, load
from media import CLIP_WORDS, RATE, noise, silence, speech

from whisper_worker.audio import decode
from whisper_worker.engine import Engine
from whisper_worker.errors import EXIT_SICK, BadInput, OutOfMemory, Unhealthy
from whisper_worker.model_files import ModelFiles, find
from whisper_worker.pieces import Track, cut
from whisper_worker.request import InputRules, Request, parse_request
from whisper_worker.shared_model import Caller, SharedModel
from whisper_worker.speech import listen
from whisper_worker.stop import Stop, Stopped
from whisper_worker.transcript import Growing, Language, Said, Transcript
from whisper_worker.walk import Walk, _Ear

RULES = InputRules(allow_local_files=False, max_base64_bytes=100)


def request(**options: Any) -> Request:
    return parse_request({"audio": "http://a.test/x", **options}, RULES)


def transcribe(engine: Engine, samples: Any, piece_s: float = 60, **options: Any) -> Transcript:
    asked = request(**options)
    walk = walk_through(engine, samples, asked, Stop(), piece_s)
    done = Growing(len(samples) / RATE, chain.from_iterable(map(walk.piece, range(len(walk)))))
    return done.translation if asked.translate else done.transcript


def walk_through(engine: Engine, samples: Any, asked: Request, stop: Stop, piece_s: float = 60) -> Walk:
    return engine.walk([track(samples, asked, piece_s)], asked, stop)


def track(samples: Any, asked: Request, piece_s: float = 60, channel: int | None = None) -> Track:
    pieces = cut(listen(samples, Stop()), max_s=piece_s, keep_silence=not asked.enable_vad)
    return Track(samples, tuple(pieces), channel)


def said_in(walk: Walk, index: int) -> list[Said]:
    return list(walk.piece(index))


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
    assert transcript.language == Language.given("en")


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
    assert (transcribe(english, samples).segments, transcribe(english, samples).language) == ((), None)


def test_the_words_are_those_of_faster_whisper_itself(english: Engine) -> None:
    """Voice activity detection and fitted windows, in front of the model, change nothing of what it would say."""
    samples = np.concatenate([speech(), silence(6), speech(), noise(3, 0.01)])
    segments, info = english._whisper.transcribe(
        samples, vad_filter=True, word_timestamps=True, condition_on_previous_text=False
    )
    theirs, ours = list(segments), transcribe(english, samples, word_timestamps=True)
    assert len(ours.segments) == len(theirs) == 2
    for mine, other in zip(ours.segments, theirs, strict=True):
        assert words_of(mine.text) == words_of(other.text)
        assert (mine.start, mine.end) == pytest.approx((other.start, min(other.end, info.duration)), abs=0.3)
        assert mine.words is not None
        assert [words_of(word.word) for word in mine.words] == [words_of(word.word) for word in other.words]


def test_pieces_say_what_the_whole_says_in_the_files_times(english: Engine) -> None:
    samples = np.concatenate([part for _ in range(6) for part in (speech(), silence(1))])
    options = {"compression_ratio_threshold": 100}  # the same sentence, over and over
    whole = transcribe(english, samples, **options)
    parts = transcribe(english, samples, piece_s=10, **options)
    assert text_of(parts) == text_of(whole) == " ".join([CLIP_WORDS] * 6)
    assert [s.id for s in parts.segments] == list(range(1, len(parts.segments) + 1))
    seeks = [s.seek for s in parts.segments]
    assert seeks == sorted(seeks)
    assert seeks[-1] > 1500
    sentence = len(samples) / 6 / RATE
    starts = [segment.start for segment in parts.segments]
    assert starts == pytest.approx([sentence * n for n in range(6)], abs=1.2)


def test_pieces_that_follow_each_other_are_shown_the_text_before_them(
    english: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[Any] = []
    real = english._whisper.transcribe

    def spy(samples: Any, **options: Any) -> Any:
        prompts.append(options["initial_prompt"])
        return real(samples, **options)

    monkeypatch.setattr(english._whisper, "transcribe", spy)
    samples = np.concatenate([part for _ in range(3) for part in (speech(), silence(3))])
    options = {"initial_prompt": "Home.", "condition_on_previous_text": True, "compression_ratio_threshold": 100}
    said = transcribe(english, samples, piece_s=5, **options)
    assert len(said.segments) == 3
    tokens = [list(segment.tokens) for segment in said.segments]
    start = english.tokens("Home.")
    assert prompts == ["Home.", start + tokens[0], start + tokens[0] + tokens[1]]

    prompts.clear()
    transcribe(english, samples, piece_s=5, initial_prompt="Home.")
    assert prompts == ["Home.", None, None]


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
    assert not transcribe(english, fragment, enable_vad=False, word_timestamps=True).segments


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
        hallucination_silence_threshold=2,
        repetition_penalty=1.5,
        no_repeat_ngram_size=3,
        max_new_tokens=100,
        prefix="Please",
        hotwords="window",
    )
    assert seen == {
        "language": "en",
        "multilingual": False,
        "prompt_reset_on_temperature": 0.5,
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
        "hallucination_silence_threshold": 2,
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 3,
        "max_new_tokens": 100,
        "prefix": "Please",
        "hotwords": "window",
    }


def test_a_list_of_temperatures_is_tried_as_it_is() -> None:
    assert request(temperature=[0, 0.3, 0.9]).temperatures == [0, 0.3, 0.9]


def test_a_prefix_begins_the_first_window_alone(english: Engine) -> None:
    plain = transcribe(english, np.tile(speech(), 3), piece_s=5)
    begun = transcribe(english, np.tile(speech(), 3), piece_s=5, prefix="Quickly")
    assert words_of(begun.segments[0].text).startswith("quickly open the window")
    assert [s.text for s in begun.segments[1:]] == [s.text for s in plain.segments[1:]]


def test_hotwords_and_the_text_before_leave_room_for_the_text(english: Engine) -> None:
    """Together they have more tokens than CTranslate2 takes."""
    many = "word " * 200
    transcript = transcribe(
        english, np.tile(speech(), 20), 5, hotwords=many, condition_on_previous_text=True, max_new_tokens=20
    )
    assert len(transcript.segments) >= 15


@pytest.mark.parametrize("prompt", [None, "word " * 100, "word " * 223])
@pytest.mark.parametrize("count", [4, 14, 220])
def test_a_window_has_as_many_new_tokens_as_are_allowed(count: int, prompt: str | None, english: Engine) -> None:
    few: dict[str, Any] = {"max_new_tokens": count, "initial_prompt": prompt, "temperature_increment_on_fallback": 0}
    endless = transcribe(english, np.tile(speech(), 6), **few, suppress_tokens=[english._end_of_text], beam_size=1)
    window = endless.segments[0].seek
    assert sum(len(segment.tokens) for segment in endless.segments if segment.seek == window) <= count
    if count == 4:
        plain = transcribe(english, speech(), **few)
        assert sum(len(segment.tokens) for segment in plain.segments) in (0, count)


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
    assert transcribe(english, speech(), **options).segments


@pytest.mark.parametrize(
    ("options", "log_prob", "text", "good"),
    [
        ({}, -0.45, " Please.", True),
        ({}, -0.6, " Please.", False),  # faster-whisper would take it: a full window decides
        ({"logprob_threshold": -0.3}, -0.45, " Please.", False),
        ({"logprob_threshold": -20}, -0.6, " Please.", False),
        ({}, -0.1, " Please, please." * 20, False),  # a loop
        ({"compression_ratio_threshold": 100}, -0.1, " Please, please." * 20, True),
        ({"length_penalty": 0}, -0.45, " Please.", True),
        ({}, -0.1, "", True),
    ],
)
def test_only_good_results_are_taken_from_fitted_windows(
    options: dict[str, Any], log_prob: float, text: str, good: bool, english: Engine
) -> None:
    asked = request(**options)
    tokens = [50363, *english._whisper.hf_tokenizer.encode(text, add_special_tokens=False).ids, 50463]
    score = log_prob * (len(tokens) + 1) / len(tokens) ** asked.length_penalty  # as CTranslate2 has it
    assert english.passes(asked, SimpleNamespace(sequences_ids=[tokens], scores=[score])) == good


# --- what the model can't do


def test_an_english_model_refuses_other_languages(english: Engine) -> None:
    english.check(request(language="en"))
    with pytest.raises(BadInput, match="knows English only"):
        english.check(request(language="de"))


def test_a_prompt_that_would_be_cut_is_refused_with_its_count(english: Engine) -> None:
    english.check(request(initial_prompt="word " * 220))
    with pytest.raises(BadInput, match="has 300 tokens, 223 are allowed"):
        english.check(request(initial_prompt="word " * 300))


def test_all_that_is_shown_before_the_text_is_counted_together(english: Engine) -> None:
    english.check(request(initial_prompt="word " * 100, hotwords="word " * 100, prefix="word " * 23))
    with pytest.raises(BadInput, match=r"^initial_prompt, prefix, hotwords: have 224 tokens together, 223 are allowed"):
        english.check(request(initial_prompt="word " * 100, hotwords="word " * 100, prefix="word " * 24))
    with pytest.raises(BadInput, match=r"^hotwords: has 224 tokens, 223 are allowed"):
        english.check(request(hotwords="word " * 224))


def test_new_tokens_that_have_no_room_behind_hotwords_and_the_text_before_are_refused(english: Engine) -> None:
    conditioned: dict[str, Any] = {"hotwords": "word " * 100, "condition_on_previous_text": True}
    english.check(request(max_new_tokens=121, **conditioned))
    with pytest.raises(BadInput, match=r"^max_new_tokens: .* 100 tokens of hotwords, at most 121"):
        english.check(request(max_new_tokens=122, **conditioned))
    english.check(request(max_new_tokens=220, hotwords="word " * 100))


def test_words_need_alignment_heads(tmp_path: Path) -> None:
    folder = Path(find("bundled").folder)
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "alignment_heads"}))
    engine = load(ModelFiles("fine-tuned", tmp_path))
    engine.check(request())
    with pytest.raises(BadInput, match="word_timestamps: the model fine-tuned lacks the alignment heads"):
        engine.check(request(word_timestamps=True))
    engine.close()


def test_a_language_outside_the_models_vocabulary_is_refused(multilingual: Engine) -> None:
    with pytest.raises(BadInput, match="language: the model base doesn't know yue"):
        multilingual.check(request(language="cantonese"))
    with pytest.raises(BadInput, match="languages: the model base doesn't know yue"):
        multilingual.check(request(languages=["zh", "yue"]))


@pytest.mark.parametrize(
    ("options", "remark"),
    [
        ({"translate": True}, "can't translate"),
        ({"task": "translate"}, "can't translate"),
        ({"multilingual": True}, "multilingual has no effect"),
        ({"languages": ["de", "en"]}, "de can't be detected"),
        ({"task": "detect_language"}, "takes all speech for it"),
        ({}, None),
    ],
)
def test_an_english_model_says_what_it_does_only_in_part(
    options: dict[str, Any], remark: str | None, english: Engine
) -> None:
    remarks = english.remarks(request(**options))
    assert len(remarks) == (remark is not None)
    assert remark is None or remark in remarks[0]


def test_models_that_were_not_trained_for_it_say_so(multilingual: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert multilingual.remarks(request(translate=True, language="de")) == ()
    table: list[tuple[str, dict[str, Any], str]] = [
        ("turbo", {"translate": True}, "wasn't trained to translate"),
        ("distil-large-v3", {"translate": True}, "wasn't trained to translate"),
        ("distil-large-v3", {"language": "de"}, "trained on English only: de may come out wrong"),
    ]
    for name, options, remark in table:
        monkeypatch.setattr(multilingual, "_files", ModelFiles(name, Path()))
        assert remark in multilingual.remarks(request(**options))[0]


def test_a_token_that_the_model_lacks_is_refused(english: Engine) -> None:
    english.check(request(suppress_tokens=[50_363, 51_863]))  # timestamps are tokens too
    with pytest.raises(BadInput, match="tokens up to"):
        english.check(request(suppress_tokens=[51_864]))


# --- trouble


def test_a_job_is_stopped_within_a_window_even_where_no_segment_comes(
    english: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, windows = Stop(), []
    real = english._model._model

    def count(*args: Any, **kwargs: Any) -> Any:
        windows.append(1)
        stop.set()
        return real.encode(*args, **kwargs)

    counting = SimpleNamespace(encode=count, generate=real.generate, is_multilingual=False, device="cpu")
    monkeypatch.setattr(english._model, "_model", counting)
    skipped = request(enable_vad=False, logprob_threshold=0, no_speech_threshold=0)  # no window gives a segment
    walk = walk_through(english, silence(50), skipped, stop)
    with pytest.raises(Stopped):
        list(walk.piece(0))
    assert len(windows) == 1


def test_a_stopped_job_does_not_start(english: Engine) -> None:
    stop = Stop()
    walk = walk_through(english, speech(), request(), stop)
    stop.set()
    with pytest.raises(Stopped):
        list(walk.piece(0))


def test_pieces_without_a_language_do_not_wait_for_a_first_that_failed(
    multilingual: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = walk_through(multilingual, np.tile(speech(), 3), request(), Stop(), piece_s=5)
    assert len(walk) >= 2

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(multilingual, "languages", fail)
    with ThreadPoolExecutor(2) as pool:
        later, first = pool.submit(said_in, walk, 1), pool.submit(said_in, walk, 0)
        with pytest.raises(RuntimeError, match="no"):
            first.result(30)
        with pytest.raises(Stopped):
            later.result(30)


def test_a_stopped_piece_does_not_wait_for_the_language(multilingual: Engine) -> None:
    waits = threading.Event()

    class WatchedStop(Stop):
        def wait_for(self, future: Any) -> Any:
            waits.set()
            return super().wait_for(future)

    stop = WatchedStop()
    walk = walk_through(multilingual, np.tile(speech(), 3), request(), stop, piece_s=5)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(said_in, walk, 1)
        assert waits.wait(30)
        stop.set()
        with pytest.raises(Stopped):
            later.result(30)


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


def test_a_model_that_could_not_be_loaded_again_makes_the_worker_unhealthy(tmp_path: Path) -> None:
    bundled, folder = find("bundled"), tmp_path / "model"
    folder.symlink_to(bundled.folder)
    engine = load(ModelFiles(bundled.name, folder))
    folder.unlink()
    with pytest.raises(RuntimeError):
        engine.reload()
    with pytest.raises(Unhealthy) as failure:
        transcribe(engine, speech())
    assert failure.value.exit_code == EXIT_SICK
    engine.close()


def test_the_model_is_asked_for_earlier_pieces_first(english: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[int] = []

    def called_for(caller: Caller) -> Any:
        ranks.append(caller.rank)
        return english._model.called_for(caller)

    monkeypatch.setattr(english, "called_for", called_for)
    walk = walk_through(english, np.tile(speech(), 3), request(), Stop(), piece_s=5)
    for index in range(len(walk)):
        list(walk.piece(index))
    assert ranks == list(range(len(walk)))
    assert len(ranks) > 1


def test_weights_are_given_back() -> None:
    engine = load(find("bundled"))
    model = engine._model._model
    engine.close()
    assert not model.model_is_loaded


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
    assert transcript.language is not None
    assert transcript.language.code == said.facts["lang"]
    assert 0.5 < transcript.language.probability <= 1
    assert transcript.language.likely[0] == (transcript.language.code, transcript.language.probability)
    assert len(transcript.language.likely) == 5
    assert word_errors(text_of(transcript), words_of(said.facts["text"])) <= errors


def test_speech_is_translated(multilingual: Engine, recording: Callable[[str], Recording]) -> None:
    samples = samples_of(recording("es_asterisk_queue-youarenext_8k.wav").path)
    translation = transcribe(multilingual, samples, translate=True, language="es")
    assert "the next representative" in text_of(translation)


def test_only_the_translation_is_made_when_it_alone_is_wanted(
    multilingual: Engine, recording: Callable[[str], Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = samples_of(recording("es_asterisk_queue-youarenext_8k.wav").path)
    tasks: list[str] = []
    real = multilingual._whisper.transcribe

    def noted(*args: Any, **options: Any) -> Any:
        tasks.append(options["task"])
        return real(*args, **options)

    monkeypatch.setattr(multilingual._whisper, "transcribe", noted)
    walk = walk_through(multilingual, samples, request(task="translate"), Stop())
    said = [part for index in range(len(walk)) for part in walk.piece(index)]
    assert "the next representative" in words_of("".join(s.text for part in said for s in part.segments))
    assert not any(part.translated for part in said)
    assert tasks == ["translate"]
    assert walk.language.result(0).code == "es"


@pytest.fixture
def mixed(recording: Callable[[str], Recording]) -> Any:
    """German, English and Spanish speech of about 6 s each."""
    names = ("de_kerstin_0726.webm", "en_asterisk_vm-invalid-password_8k.wav", "es_asterisk_queue-youarenext_8k.wav")
    parts = [part for name in names for part in (samples_of(recording(name).path), silence(3))]
    return np.concatenate(parts)


def test_the_language_may_change_from_window_to_window(multilingual: Engine, mixed: Any) -> None:
    transcript = transcribe(multilingual, mixed, 7, multilingual=True, word_timestamps=True)
    assert [segment.language for segment in transcript.segments][:1] == ["de"]
    assert list(dict.fromkeys(segment.language for segment in transcript.segments)) == ["de", "en", "es"]
    text = text_of(transcript)
    assert "algorithmus" in text
    assert "password" in text
    assert "llamada" in text


def test_without_multilingual_segments_name_no_language(multilingual: Engine) -> None:
    assert transcribe(multilingual, speech()).segments[0].language is None


def test_only_the_languages_allowed_are_detected(multilingual: Engine) -> None:
    language = transcribe(multilingual, speech(), languages=["german", "nl"]).language
    assert language is not None
    assert language.code in ("de", "nl")
    assert [code for code, _ in language.likely] in (["de", "nl"], ["nl", "de"])
    assert sum(probability for _, probability in language.likely) < 0.5  # it is English


def sounding(*windows: dict[str, float]) -> Any:
    """Stands in for what the engine hears of a piece: one answer after the other."""
    heard = [[(f"<|{code}|>", probability) for code, probability in window.items()] for window in windows]
    return lambda _speech: heard.pop(0)


@pytest.mark.parametrize(
    ("windows", "expected", "asked"),
    [
        ([{"de": 0.8, "nl": 0.2}, {"nl": 1.0}], ("de", 0.8), 1),
        ([{"de": 0.6, "nl": 0.4}, {"nl": 0.9, "de": 0.1}, {"nl": 0.9, "de": 0.1}], ("nl", 11 / 15), 3),
        ([{"de": 0.5, "nl": 0.4}] * 9, ("de", 0.5), 4),
    ],
)
def test_a_language_in_doubt_is_looked_for_in_other_windows(
    windows: list[dict[str, float]],
    expected: tuple[str, float],
    asked: int,
    multilingual: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = [0]
    walk = walk_through(multilingual, np.tile(speech(), 12), request(), Stop(), piece_s=5)
    assert len(walk) > 4
    hear = sounding(*windows)

    def heard(speech: Any) -> Any:
        pieces[0] += 1
        return hear(speech)

    monkeypatch.setattr(multilingual, "languages", heard)
    language = walk.detect()
    assert language is not None
    assert language.code == expected[0]
    assert language.probability == pytest.approx(expected[1])
    assert pieces[0] == asked


def test_the_only_language_in_question_is_not_looked_for_elsewhere(
    multilingual: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = walk_through(multilingual, np.tile(speech(), 12), request(languages=["de"]), Stop(), piece_s=5)
    hear = sounding({"en": 0.9, "de": 0.01}, {"en": 0.9, "de": 0.01})
    monkeypatch.setattr(multilingual, "languages", hear)
    language = walk.detect()
    assert language is not None
    assert (language.code, language.probability, language.is_sure) == ("de", 0.01, True)
    assert len(hear("the second, which nobody asked for")) == 2


def test_a_window_in_doubt_has_the_language_of_the_one_before() -> None:
    ear = _Ear(lambda: "en", None)
    said = [ear.choose([("<|de|>", p), ("<|en|>", 1 - p)])[0][0] for p in (0.45, 0.55)]
    unsure = ear.choose([("<|cy|>", 0.4), ("<|en|>", 0.3), ("<|de|>", 0.3)])[0][0]
    assert [*said, unsure] == ["<|en|>", "<|de|>", "<|de|>"]


def test_a_window_in_none_of_the_languages_allowed_has_that_of_the_one_before() -> None:
    ear = _Ear(lambda: "es", ["en", "es"])
    assert ear.choose([("<|de|>", 0.9), ("<|en|>", 0.001), ("<|es|>", 0.0009)])[0][0] == "<|es|>"


def test_a_piece_in_doubt_goes_on_in_the_language_that_the_piece_before_ended_with(
    multilingual: Engine, mixed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is asked for first: it waits for the one before."""
    walk = walk_through(multilingual, mixed, request(multilingual=True), Stop(), piece_s=7)
    windows = {0: ("de", 0.9), 1: ("en", 0.9), 2: ("fr", 0.3)}
    asked = threading.Event()

    def detected(self: Any, window: Any) -> Any:
        code, probability = windows[self.caller.rank]
        if self.caller.rank == 2:
            asked.set()
        return [self.caller.choose([(f"<|{code}|>", probability)])]

    monkeypatch.setattr(SharedModel, "detect_language", detected)
    with ThreadPoolExecutor(2) as pool:
        first = said_in(walk, 0)
        third = pool.submit(said_in, walk, 2)
        assert asked.wait(30)
        second = pool.submit(said_in, walk, 1)
        pieces = [first, second.result(30), third.result(30)]
    languages = [{s.language for part in piece for s in part.segments} for piece in pieces]
    assert languages == [{"de"}, {"en"}, {"en"}]


def test_a_prefix_is_not_that_of_the_translation_beside(
    multilingual: Engine, recording: Callable[[str], Recording]
) -> None:
    samples = samples_of(recording("es_asterisk_queue-youarenext_8k.wav").path)
    asked = request(translate=True, language="es", prefix="Su llamada")
    walk = walk_through(multilingual, samples, asked, Stop())
    done = Growing(len(samples) / RATE, walk.piece(0))
    assert text_of(done.transcript).startswith("su llamada")
    assert "representative" in text_of(done.translation)


def test_a_language_is_detected_without_any_text(multilingual: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multilingual._whisper, "transcribe", None)
    walk = walk_through(multilingual, speech(), request(task="detect_language"), Stop())
    language = walk.detect()
    assert language is not None
    assert language.code == "en"
    assert walk_through(multilingual, silence(3), request(task="detect_language"), Stop()).detect() is None


def test_channels_are_transcribed_apart_and_share_one_language(
    multilingual: Engine, recording: Callable[[str], Recording]
) -> None:
    caller = np.concatenate([speech(), silence(8)])
    other = samples_of(recording("en_librispeech_61-70968-0000.flac").path)
    agent = np.concatenate([silence(5), other])
    agent = np.pad(agent, (0, max(len(caller) - len(agent), 0)))[: len(caller)]
    asked = request(channels="split", word_timestamps=True)
    walk = multilingual.walk([track(agent, asked, channel=0), track(caller, asked, channel=1)], asked, Stop())
    done = Growing(len(caller) / RATE, chain.from_iterable(map(walk.piece, range(len(walk)))), channels=(0, 1))
    done.end()
    first, second = done.transcript.segments[0], done.transcript.segments[-1]
    assert (first.channel, words_of(first.text)) == (1, CLIP_WORDS)
    assert second.channel == 0
    assert "wizard" in second.text
    assert second.start > 4.5
    assert done.language is not None
    assert done.language.code == "en"


def test_a_channel_without_speech_does_not_hold_up_the_others(english: Engine) -> None:
    asked = request(channels="split")
    walk = english.walk([track(silence(5), asked, channel=0), track(speech(), asked, channel=1)], asked, Stop())
    assert len(walk) == 1
    assert {part.channel for part in walk.piece(0)} == {1}
