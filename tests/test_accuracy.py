"""How `python -m benchmarks accuracy` counts errors, adds them up and judges."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("num2words")  # of the extra `bench`
pytest.importorskip("rapidfuzz")
pytest.importorskip("whisper_normalizer")

from benchmarks.accuracy import (
    SILENT,
    Clip,
    Heard,
    Pair,
    Score,
    by_language,
    chosen,
    failures,
    read,
    tables,
    verdict,
)

SAID = "Dogs bark at night."
ENGLISH = Clip(Path("dogs.wav"), "en", 2.0, SAID)
GERMAN = Clip(Path("hunde.wav"), "de", 2.0, "Zehn Hunde bellen nachts.")
JAPANESE = Clip(Path("inu.wav"), "ja", 2.0, "電球がともっていた")
MUSIC = Clip(Path("music.wav"), None, 15.0, "")
BOTH_SPEAK = Clip(Path("stereo.flac"), "en", 5.0, "Dogs bark. Cats sleep.", has_two_speakers=True)


def pair(clip: Clip, worker: str, library: str) -> Pair:
    return Pair(clip, [Heard(worker)], [Heard(library)])


ERRORS = {
    "the same": (ENGLISH, "Dogs bark at night.", 0, 4),
    "other spelling": (ENGLISH, "dogs BARK, at night", 0, 4),
    "another word": (ENGLISH, "Dogs park at night.", 1, 4),
    "a word too many": (ENGLISH, "Dogs bark at the night.", 1, 4),
    "nothing": (ENGLISH, "", 4, 4),
    "digits": (GERMAN, "10 Hunde bellen nachts", 0, 4),
    "characters": (JAPANESE, "電球が灯っていた。", 2, 9),
    "spaces between characters": (JAPANESE, "電球が ともって いた", 0, 9),
    "a voiced sound": (JAPANESE, "電球かともっていた", 1, 9),
    "silence": (MUSIC, "", 0, 0),
    "invented": (MUSIC, "Thank you.", 2, 0),
}


@pytest.mark.parametrize(("clip", "heard", "errors", "said"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_are_counted_in_the_language_s_units(clip: Clip, heard: str, errors: int, said: int) -> None:
    assert clip.errors(Heard(heard)) == (errors, said)


def test_clips_are_added_up_by_language() -> None:
    pairs = [pair(ENGLISH, SAID, ""), pair(ENGLISH, "Dogs", SAID), pair(MUSIC, "", "Thank you.")]
    assert by_language(pairs) == {"en": Score(8, 3, 4), SILENT: Score(0, 0, 2)}


def test_repeats_are_added_up() -> None:
    repeated = Pair(ENGLISH, [Heard(SAID), Heard("Dogs bark at")], [Heard(""), Heard("")])
    assert repeated.score == Score(8, 1, 8)


def test_two_speakers_at_once_are_left_out_of_the_sums() -> None:
    pairs = [pair(ENGLISH, SAID, SAID), pair(BOTH_SPEAK, "", BOTH_SPEAK.text)]
    scores = by_language(pairs)
    assert scores == {"en": Score(4, 0, 0)}
    _, mixed, languages = tables(pairs, scores, with_texts=False)
    assert mixed.rows == [["stereo.flac", "en", 5.0, 4, 4, 0, 4, 100.0, 0.0]]
    assert languages.rows[-1] == ["total", 4, 0, 0, 0, 0.0, 0.0]


VERDICTS = {
    "equal": ({"en": Score(9, 2, 2)}, True, "no worse than the library in any language. Errors more or less .*: none"),
    "better": ({"en": Score(9, 1, 2)}, True, "no worse .*: en -1"),
    "worse in one": ({"de": Score(9, 3, 2), "en": Score(9, 0, 5)}, False, r"is worse .* in: de\. .*: de \+1, en -5"),
    "invents words": ({"en": Score(9, 1, 2), SILENT: Score(0, 1, 0)}, False, "is worse .* in: no speech"),
}


@pytest.mark.parametrize(("scores", "is_good", "told"), VERDICTS.values(), ids=VERDICTS.keys())
def test_the_worker_must_be_no_worse_in_any_language(scores: dict[str, Score], is_good: bool, told: str) -> None:
    assert (failures(scores) == []) is is_good
    assert re.search(told, verdict(scores))


def test_a_row_without_speech_has_no_rate() -> None:
    pairs = [pair(ENGLISH, SAID, "Dogs bark"), pair(MUSIC, "Oh no.", "")]
    clips, languages = tables(pairs, by_language(pairs), with_texts=False)
    assert clips.rows == [
        ["dogs.wav", "en", 2.0, 4, 0, 2, -2, 0.0, 50.0],
        ["music.wav", SILENT, 15.0, 0, 2, 0, 2, None, None],
    ]
    assert languages.rows == [
        ["en", 4, 0, 2, -2, 0.0, 50.0],
        [SILENT, 0, 2, 0, 2, None, None],
        ["total", 4, 2, 2, 0, 50.0, 50.0],
    ]


def test_texts_are_shown_once_each() -> None:
    pairs = [Pair(ENGLISH, [Heard("Dogs."), Heard("Dogs.")], [Heard("Cats."), Heard("Dogs.")])]
    _, texts, _ = tables(pairs, by_language(pairs), with_texts=True)
    assert texts.rows == [("said", SAID), ("worker", "Dogs."), ("library", "Cats."), ("library", "Dogs.")]


def test_a_clip_that_failed_has_heard_nothing_and_says_so() -> None:
    failed = Pair(ENGLISH, [Heard(failure="NOT_AUDIO: no audio")] * 2, [Heard(SAID)] * 2)
    assert failed.score == Score(8, 8, 0)
    assert failed.failures == ["dogs.wav: the worker failed with: NOT_AUDIO: no audio"]


def test_a_failure_counts_also_where_nothing_is_said() -> None:
    assert Pair(MUSIC, [Heard(failure="NOT_AUDIO: no audio")], [Heard()]).score == Score(0, 1, 0)


def test_the_command_fails_for_each_language_in_which_the_worker_is_worse() -> None:
    scores = {"de": Score(9, 3, 2), "en": Score(9, 0, 5), "fr": Score(9, 2, 2), SILENT: Score(0, 1, 0)}
    assert failures(scores) == [
        "de: errors of the worker 3, of the library 2",
        "no speech: errors of the worker 1, of the library 0",
    ]


def test_an_english_model_is_asked_about_english_and_silence() -> None:
    clips = [GERMAN, ENGLISH, JAPANESE, MUSIC]
    assert chosen(clips, english_only=True, per_language=None) == [ENGLISH, MUSIC]
    assert chosen(clips, english_only=False, per_language=None) == clips


def test_so_many_clips_of_each_language_are_taken() -> None:
    clips = [ENGLISH, ENGLISH, BOTH_SPEAK, GERMAN, MUSIC]
    assert chosen(clips, english_only=False, per_language=1) == [ENGLISH, BOTH_SPEAK, GERMAN, MUSIC]


MANIFEST = """
{"file": "dogs.wav", "lang": "en", "seconds": 2.0, "channels": 1, "text": "Dogs bark at night."}
{"file": "stereo.flac", "lang": "en", "seconds": 5.0, "channels": 2, "text": "left: Dogs bark. / right: Cats sleep."}
{"file": "music.wav", "lang": null, "seconds": 15.0, "channels": 1, "text": ""}
"""


def test_clips_are_read_from_a_folder_s_manifest(tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").write_text(MANIFEST)
    assert read(tmp_path) == [replace(clip, file=tmp_path / clip.file) for clip in (ENGLISH, BOTH_SPEAK, MUSIC)]


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--clips: .* manifest\.jsonl"):
        read(tmp_path)
