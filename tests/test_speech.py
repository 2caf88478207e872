"""Voice activity detection, and the way back to the file's times."""

import faster_whisper.transcribe as fw
import numpy as np
import pytest
from media import RATE, noise, silence, speech

from whisper_worker.audio import Samples
from whisper_worker.speech import Speech, find_speech, whole


def heard(start: float, end: float) -> fw.Segment:
    return fw.Segment(1, 0, start, end, " text", [], -0.1, 1.0, 0.0, None, 0.0)


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
    ],
)
def test_times_are_those_of_the_file(inside: tuple[float, float], in_file: tuple[float, float]) -> None:
    speech = Speech(np.zeros(20 * RATE, np.float32), TWO_STRETCHES)
    [segment] = speech.in_file_time([heard(*inside)])
    assert (segment.start, segment.end) == pytest.approx(in_file)


def test_times_stay_when_nothing_was_taken_out() -> None:
    [segment] = whole(speech()).in_file_time([heard(1, 2)])
    assert (segment.start, segment.end) == (1, 2)


def test_silence_between_speech_is_taken_out() -> None:
    found = find_speech(np.concatenate([speech(), silence(20), speech()]))
    assert found.chunks is not None
    assert len(found.chunks) == 2
    assert found.duration == pytest.approx(2 * len(speech()) / RATE, abs=1.5)


@pytest.mark.parametrize(
    "samples",
    [silence(5), noise(5), noise(5, 1e-4), silence(0), silence(0.01)],
    ids=["silence", "noise", "faint noise", "nothing", "10 ms"],
)
def test_no_speech_is_found_in_silence_and_noise(samples: Samples) -> None:
    assert find_speech(samples).is_empty


@pytest.mark.parametrize("decibels", [0, -40, -60])
def test_quiet_speech_is_found(decibels: int) -> None:
    found = find_speech(speech() * np.float32(10 ** (decibels / 20)))
    assert found.duration > 0.8 * len(speech()) / RATE


def test_the_model_hears_quiet_speech_at_its_own_level() -> None:
    quiet = speech() * np.float32(0.01)
    assert np.abs(find_speech(quiet).samples).max() == np.abs(quiet).max()
