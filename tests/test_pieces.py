"""Where long recordings are cut."""

from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise

import faster_whisper.transcribe as fw
import numpy as np
import pytest
from conftest import Recording
from media import RATE, noise, silence, speech

from whisper_worker.audio import Samples, decode
from whisper_worker.pieces import Piece, cut
from whisper_worker.speech import FRAME, Heard, Span, find_spans, listen
from whisper_worker.stop import Stop


def made_up(seed: int) -> Heard:
    """A recording of up to 7 minutes: speech with pauses of all lengths, and stretches that might be some."""
    random = np.random.default_rng(seed)
    turns = int(random.integers(1, 80))
    levels = np.repeat(
        random.choice([0.05, 0.4, 0.6, 0.99], turns, p=[0.2, 0.1, 0.3, 0.4]), random.integers(1, 300, turns)
    )
    probabilities = np.clip(levels + random.normal(0, 0.05, len(levels)), 0, 1).astype(np.float32)
    length = len(probabilities) * FRAME - int(random.integers(0, FRAME))
    # Each sample is its own number, so that pieces can tell where they are from.
    return Heard(np.arange(length, dtype=np.float32), probabilities, find_spans(probabilities, length))


def spoken(*seconds: float) -> Heard:
    """Stretches of speech without any pause in them, 10 s of silence before each."""
    frames = [np.repeat([0.02, 0.98], [10 * RATE // FRAME, int(s * RATE) // FRAME]) for s in seconds]
    probabilities = np.concatenate(frames).astype(np.float32)
    spans, end = [], 0
    for s in seconds:
        start = end + 10 * RATE
        end = start + int(s * RATE)
        spans.append(Span(start, end))
    return Heard(np.zeros(end, np.float32), probabilities, tuple(spans))


def merged(pieces: Iterable[Piece]) -> tuple[Span, ...]:
    """The spans of all pieces, with those that touch made one again."""
    whole: list[Span] = []
    for span in (span for piece in pieces for span in piece.spans):
        if whole and whole[-1].end == span.start:
            span = Span(whole.pop().start, span.end)
        whole.append(span)
    return tuple(whole)


def seconds(pieces: Iterable[Piece]) -> list[float]:
    return [piece.seconds for piece in pieces]


def cuts(pieces: list[Piece]) -> list[int]:
    """Samples of the recording at which it was cut inside of speech."""
    return [b.spans[0].start for a, b in pairwise(pieces) if a.spans[-1].end == b.spans[0].start]


any_recording = pytest.mark.parametrize("seed", range(20))
any_length = pytest.mark.parametrize("max_s", [3, 7.7, 30, 60])
either_way = pytest.mark.parametrize("keep_silence", [False, True])


@any_recording
@any_length
def test_no_speech_is_lost_or_heard_twice(seed: int, max_s: float) -> None:
    heard = made_up(seed)
    assert merged(cut(heard, max_s, keep_silence=False)) == heard.spans


@any_recording
@any_length
def test_nothing_is_lost_when_silence_is_kept(seed: int, max_s: float) -> None:
    heard = made_up(seed)
    assert merged(cut(heard, max_s, keep_silence=True)) == (Span(0, len(heard.samples)),)


@any_recording
@any_length
@either_way
def test_pieces_are_neither_long_nor_tiny(seed: int, max_s: float, keep_silence: bool) -> None:
    pieces = cut(made_up(seed), max_s, keep_silence=keep_silence)
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    assert all(piece.seconds <= max_s for piece in pieces)
    if len(pieces) > 1:
        assert all(piece.seconds >= 1 for piece in pieces)
        assert all(piece.seconds >= max_s * 0.49 for piece in pieces[:-2])


@any_recording
@either_way
def test_times_in_any_piece_become_those_of_the_file(seed: int, keep_silence: bool) -> None:
    heard = made_up(seed)
    for piece in cut(heard, 30, keep_silence=keep_silence):
        speech = piece.speech(heard.samples)
        assert speech.duration == piece.seconds
        places = speech.duration * np.array([0.05, 0.3, 0.55, 0.8])
        segments = [fw.Segment(1, 0, at, at + 0.01, "", [], 0.0, 1.0, 0.0, None, 0.0) for at in places]
        moved = [segment.start * RATE for segment in speech.in_file_time(segments)]
        assert moved == pytest.approx([speech.samples[int(at * RATE)] for at in places], abs=0.006 * RATE)


@either_way
def test_a_short_recording_is_one_piece(keep_silence: bool) -> None:
    samples = np.concatenate([silence(1), speech(), silence(3), speech()])
    [piece] = cut(listen(samples, Stop()), 30, keep_silence=keep_silence)
    assert piece.seconds < 30


def test_what_stays_in_place_keeps_its_times() -> None:
    [piece] = cut(listen(speech(), Stop()), 30, keep_silence=True)
    assert piece.speech(speech()).chunks is None


@pytest.mark.parametrize("samples", [silence(40), noise(40), silence(0)], ids=["silence", "noise", "nothing"])
def test_without_speech_there_is_no_piece(samples: Samples) -> None:
    assert cut(listen(samples, Stop()), 30, keep_silence=False) == []


def test_without_a_sample_there_is_no_piece() -> None:
    assert cut(listen(silence(0), Stop()), 30, keep_silence=True) == []


@pytest.mark.parametrize(
    ("stretches", "pieces"),
    [
        ((10, 10, 10), [30]),
        ((20, 20, 20), [20, 20, 20]),
        ((10, 15, 10, 15), [25, 25]),
        ((29, 2), [29, 2]),
        ((12, 19), [12, 19]),
    ],
)
def test_cuts_fall_between_stretches_of_speech(stretches: tuple[float, ...], pieces: list[float]) -> None:
    assert seconds(cut(spoken(*stretches), 30, keep_silence=False)) == pieces


@pytest.mark.parametrize("stretches", [(31,), (5, 29), (29.5, 0.9), (59,), (300,)])
def test_rather_than_waste_a_piece_speech_is_divided(stretches: tuple[float, ...]) -> None:
    assert min(seconds(cut(spoken(*stretches), 30, keep_silence=False))) > 10


@cache
def with_pauses(pause_s: float) -> Heard:
    """A minute of sentences; nothing but the pauses between them is silent for so long."""
    voiced = np.flatnonzero(np.abs(speech()) > 0.01)
    sentence = speech()[voiced[0] : voiced[-1]]
    return listen(np.resize(np.concatenate([sentence, silence(pause_s)]), 60 * RATE), Stop())


@pytest.mark.parametrize("pause_s", [0.1, 0.3, 0.8])
@pytest.mark.parametrize("max_s", [12, 20, 30])
@either_way
def test_cuts_inside_speech_fall_into_pauses(pause_s: float, max_s: float, keep_silence: bool) -> None:
    heard = with_pauses(pause_s)
    places = cuts(cut(heard, max_s, keep_silence=keep_silence))
    assert len(places) >= 60 // max_s
    assert all(np.abs(heard.samples[at - 200 : at + 200]).max() < 0.01 for at in places)


@pytest.mark.parametrize("name", ["en_jfk_16k.flac", "en_lj001-0014.mp3", "es_mls_13697_11991_000000.opus"])
def test_cuts_in_human_speech_fall_into_pauses(name: str, recording: Callable[[str], Recording]) -> None:
    with recording(name).path.open("rb") as file:
        once = decode(file, Stop(), max_seconds=60).samples
    samples = np.resize(once, 90 * RATE)
    loudness = np.sqrt(np.mean(samples**2))
    places = cuts(cut(listen(samples, Stop()), 30, keep_silence=False))
    assert len(places) >= 3
    assert all(np.sqrt(np.mean(samples[at - 800 : at + 800] ** 2)) < loudness / 5 for at in places)


def test_of_several_pauses_the_longest_is_chosen() -> None:
    probabilities = np.full(40 * RATE // FRAME, 0.98, np.float32)
    probabilities[500:510] = probabilities[600:612] = probabilities[700:704] = 0.1
    heard = Heard(silence(40), probabilities, (Span(0, 40 * RATE),))
    assert cuts(cut(heard, 30, keep_silence=False)) == [606 * FRAME]


def test_what_is_a_pause_is_for_the_detectors_options_to_say() -> None:
    probabilities = np.full(40 * RATE // FRAME, 0.98, np.float32)
    probabilities[500:510] = 0.6
    heard = Heard(silence(40), probabilities, (Span(0, 40 * RATE),), silent=0.7)
    assert cuts(cut(heard, 30, keep_silence=False)) == [505 * FRAME]


def test_of_several_long_pauses_the_last_is_chosen_shortly_before_its_end() -> None:
    probabilities = np.full(40 * RATE // FRAME, 0.98, np.float32)
    probabilities[450:520] = probabilities[600:650] = 0.1
    heard = Heard(silence(40), probabilities, (Span(0, 40 * RATE),))
    assert cuts(cut(heard, 30, keep_silence=False)) == [641 * FRAME]


def test_in_silence_that_is_kept_pieces_are_nearly_full() -> None:
    pieces = cut(listen(silence(300), Stop()), 30, keep_silence=True)
    assert min(seconds(pieces[:-2])) > 29


def test_without_a_pause_the_least_certain_place_is_chosen() -> None:
    probabilities = np.full(40 * RATE // FRAME, 0.98, np.float32)
    probabilities[600:603] = 0.6
    heard = Heard(silence(40), probabilities, (Span(0, 40 * RATE),))
    assert cuts(cut(heard, 30, keep_silence=False)) == [int(601.5 * FRAME)]
