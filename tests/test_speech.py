"""Voice activity detection, and the way back to the file's times."""

import tracemalloc
from collections.abc import Callable

import faster_whisper.transcribe as fw
import numpy as np
import pytest
from conftest import Recording
from faster_whisper.vad import VadOptions, get_speech_timestamps, get_vad_model
from media import RATE, noise, silence, speech

from whisper_worker.audio import Samples, decode
from whisper_worker.request import VadParameters
from whisper_worker.speech import FRAME, Heard, Span, Speech, find_spans, listen
from whisper_worker.stop import Stop, Stopped

DEFAULTS = VadParameters()
OPTIONS = {
    "defaults": DEFAULTS,
    "deaf": VadParameters(threshold=0.9),
    "keen": VadParameters(threshold=0.1),
    "hardly any speech ends": VadParameters(neg_threshold=0.02),
    "speech ends where it began": VadParameters(threshold=0.5, neg_threshold=0.5),
    "no short speech": VadParameters(min_speech_duration_ms=900, min_silence_duration_ms=100),
    "short pauses": VadParameters(min_silence_duration_ms=100),
    "any pause": VadParameters(min_silence_duration_ms=0, speech_pad_ms=0),
    "pauses shorter than what belongs to speech": VadParameters(min_silence_duration_ms=200, speech_pad_ms=1000),
    "a pause just as long": VadParameters(min_silence_duration_ms=64, speech_pad_ms=32),
    "bare speech": VadParameters(speech_pad_ms=0),
    "odd figures": VadParameters(
        threshold=0.33, min_speech_duration_ms=33, min_silence_duration_ms=77, speech_pad_ms=13
    ),
}
any_options = pytest.mark.parametrize("vad", OPTIONS.values(), ids=OPTIONS.keys())


def segment(start: float, end: float, *words: tuple[float, float]) -> fw.Segment:
    spoken = [fw.Word(*times, " text", 1.0) for times in words]
    return fw.Segment(1, 0, start, end, " text", [], -0.1, 1.0, 0.0, spoken or None, 0.0)


def heard(samples: Samples, vad: VadParameters = DEFAULTS) -> Heard:
    return listen(samples, Stop(), vad)


def by_the_library(samples: Samples, vad: VadParameters = DEFAULTS) -> tuple[Span, ...]:
    """What faster-whisper makes of the same, with quiet recordings raised."""
    loud = float(np.percentile(np.abs(samples), 99.9))
    return library_spans(samples * np.float32(min(max(0.5 / loud, 1), 1000) if loud else 1), vad)


def library_spans(samples: Samples, vad: VadParameters = DEFAULTS) -> tuple[Span, ...]:
    given = vad.model_dump(exclude={"max_speech_duration_s"})
    return tuple(Span(**chunk) for chunk in get_speech_timestamps(samples, VadOptions(**given)))


TWO_STRETCHES = [{"start": 1 * RATE, "end": 11 * RATE}, {"start": 60 * RATE, "end": 70 * RATE}]


@pytest.mark.parametrize(
    ("inside", "in_file"),
    [
        ((0.0, 5.0), (1.0, 6.0)),
        ((2.0, 10.0), (3.0, 11.0)),
        ((2.0, 10.2), (3.0, 11.0)),  # reaches just past the seam: it would end 49 s later
        ((9.8, 15.0), (60.0, 65.0)),  # begins just before the seam: it would begin 49 s earlier
        ((12.0, 15.0), (62.0, 65.0)),
        ((5.0, 15.0), (6.0, 65.0)),  # really spans the silence
        ((15.0, 21.0), (65.0, 70.0)),  # reaches past the end
    ],
)
def test_times_are_those_of_the_file(inside: tuple[float, float], in_file: tuple[float, float]) -> None:
    speech = Speech(np.zeros(20 * RATE, np.float32), TWO_STRETCHES)
    [moved] = speech.in_file_time([segment(*inside)])
    assert (moved.start, moved.end) == pytest.approx(in_file)


def test_words_move_with_their_segment() -> None:
    speech = Speech(np.zeros(20 * RATE, np.float32), TWO_STRETCHES)
    [moved] = speech.in_file_time([segment(9, 21, (9, 9.5), (11, 12), (19, 21))])
    assert moved.words is not None
    assert [(w.start, w.end) for w in moved.words] == [(10, 10.5), (61, 62), (69, 70)]
    assert (moved.start, moved.end) == (10, 70)


def test_one_stretch_that_begins_later_moves_its_times_too() -> None:
    speech = Speech(np.zeros(10 * RATE, np.float32), [{"start": 100 * RATE, "end": 110 * RATE}])
    [moved] = speech.in_file_time([segment(1, 2)])
    assert (moved.start, moved.end) == (101, 102)


def test_times_stay_when_nothing_was_taken_out() -> None:
    [same] = Speech(speech()).in_file_time([segment(1, 2)])
    assert (same.start, same.end) == (1, 2)


@pytest.mark.parametrize("chunks", [None, [{"start": 50 * RATE, "end": 60 * RATE}]])
def test_a_segment_past_the_end_is_dropped(chunks: list[dict[str, int]] | None) -> None:
    speech = Speech(np.zeros(10 * RATE, np.float32), chunks)
    assert list(speech.in_file_time([segment(10.5, 12)])) == []


@pytest.mark.parametrize(
    "parts",
    [
        [speech()],
        [silence(3), speech(), silence(1.5), speech(), silence(5), speech(), silence(1)],
        [noise(3, 0.01), speech(), noise(4, 0.01), speech(), noise(3, 0.1)],
        [speech() * np.float32(0.003), silence(3), speech() * np.float32(0.003)],
        [silence(20), noise(10), silence(5)],
        [speech()[:512]],
        [speech()[:8192]],
        [silence(0.01)],
    ],
    ids=["speech", "pauses", "noise", "quiet", "nobody", "one frame", "whole frames", "10 ms"],
)
def test_spans_are_those_of_the_library(parts: list[Samples]) -> None:
    samples = np.concatenate(parts)
    assert heard(samples).spans == by_the_library(samples)


@pytest.mark.parametrize(
    "name",
    [
        "en_jfk_16k.flac",
        "en_lj001-0014.mp3",
        "es_mls_13697_11991_000000.opus",
        "ja_commonvoice_24511055.mp3",
        "music_morning_coffee_15s_8k.flac",
        "ru_asterisk_queue-periodic-announce_8k.wav",
    ],
)
def test_spans_in_recordings_are_those_of_the_library(name: str, recording: Callable[[str], Recording]) -> None:
    with recording(name).path.open("rb") as file:
        once = decode(file, Stop(), max_seconds=60).samples
    samples = np.concatenate([once, silence(2.5), once])
    assert heard(samples).spans == by_the_library(samples)


@any_options
def test_spans_by_other_options_are_those_of_the_library(vad: VadParameters) -> None:
    parts = [silence(3), speech(), silence(1.5), speech(), noise(0.7, 0.01), speech(), silence(5), speech(), silence(1)]
    samples = np.concatenate(parts)[:-3]
    assert heard(samples, vad).spans == by_the_library(samples, vad)
    assert heard(samples, vad).silent == vad.silent


@any_options
@pytest.mark.parametrize("seed", range(40))
def test_spans_of_any_probabilities_are_those_of_the_library(
    seed: int, vad: VadParameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(seed)
    levels, repeats = random.choice([0.01, 0.1, 0.3, 0.34, 0.4, 0.49, 0.5, 0.9], 60), random.integers(1, 60, 60)
    probabilities = np.repeat(levels, repeats).astype(np.float32)
    length = len(probabilities) * FRAME - int(random.integers(1, FRAME))
    monkeypatch.setattr("faster_whisper.vad.get_vad_model", lambda: lambda _: probabilities)
    assert find_spans(probabilities, length, vad) == library_spans(np.zeros(length, np.float32), vad)


@pytest.mark.parametrize("seconds", [0, 0.01, 0.032, 8.192, 8.2, 20])
def test_each_frame_has_its_probability(seconds: float) -> None:
    samples = np.resize(speech(), int(seconds * RATE))
    probabilities = heard(samples).probabilities
    assert probabilities.shape == (np.ceil(len(samples) / FRAME),)
    assert probabilities.dtype == np.float32


def test_blocks_leave_no_trace() -> None:
    """The detector's memory goes on from block to block: an hour is judged as if it were heard at once."""
    samples = np.resize(np.concatenate([speech(), silence(0.3)]), 40 * RATE)
    rows = np.concatenate([np.zeros(64, np.float32), samples, np.zeros(-len(samples) % FRAME, np.float32)])
    frames = np.lib.stride_tricks.sliding_window_view(rows, 64 + FRAME)[::FRAME]
    start = np.zeros((1, 1, 128), np.float32)
    at_once, _, _ = get_vad_model().session.run(None, {"input": frames.copy(), "h": start, "c": start})
    np.testing.assert_allclose(heard(samples).probabilities, at_once, atol=1e-5)


def test_a_long_recording_takes_little_memory() -> None:
    samples = np.resize(speech(), 20 * 60 * RATE)  # 77 MB
    tracemalloc.start()
    try:
        heard(samples)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8e6


def test_listening_stops_between_blocks() -> None:
    class Impatient(Stop):
        checks = 0

        def check(self) -> None:
            self.checks += 1
            if self.checks == 3:
                self.set()
            super().check()

    with pytest.raises(Stopped):
        listen(silence(60), Impatient())


def test_silence_between_speech_is_no_speech() -> None:
    first, second = heard(np.concatenate([speech(), silence(20), speech()])).spans
    assert len(first) + len(second) == pytest.approx(2 * len(speech()), abs=1.5 * RATE)


@pytest.mark.parametrize(
    "samples",
    [silence(5), noise(5), noise(5, 1e-4), silence(0), silence(0.01)],
    ids=["silence", "noise", "faint noise", "nothing", "10 ms"],
)
def test_no_speech_is_found_in_silence_and_noise(samples: Samples) -> None:
    assert heard(samples).spans == ()


@pytest.mark.parametrize("decibels", [0, -40, -60])
@pytest.mark.parametrize("minutes", [0, 3])  # all samples tell the level of a short recording, some that of a long one
def test_quiet_speech_is_found(decibels: int, minutes: int) -> None:
    samples = np.resize(speech(), max(minutes * 60 * RATE, len(speech()))) * np.float32(10 ** (decibels / 20))
    assert sum(map(len, heard(samples).spans)) > 0.8 * len(samples)


def test_the_recording_keeps_its_own_level() -> None:
    quiet = speech() * np.float32(0.01)
    assert heard(quiet).samples is quiet
