"""What leaves the model is brought inside the file."""

import pytest
from fakes import segment

from whisper_worker.transcript import Growing, Said, Word, within


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0.0, 2.0, (0.0, 2.0)),
        (1.0, 30.0, (1.0, 5.0)),  # the model's last window reaches past the file
        (4.9999, 5.2, (5.0, 5.0)),
        (-0.02, 1.0, (0.0, 1.0)),
        (3.0, 2.0, (3.0, 3.0)),
        (1.23456, 2.34567, (1.235, 2.346)),
    ],
)
def test_times_are_kept_inside_the_file(start: float, end: float, expected: tuple[float, float]) -> None:
    [kept] = within([segment(start, end)], duration=5.0)
    assert (kept.start, kept.end) == expected


def test_segments_that_start_after_the_end_are_dropped() -> None:
    kept = within([segment(0, 2), segment(5.0, 7.0), segment(28.0, 30.0)], duration=5.0)
    assert [s.start for s in kept] == [0]


def test_segments_are_put_in_order_and_numbered_again() -> None:
    kept = within([segment(3, 4), segment(9, 9), segment(1, 2)], duration=5.0)
    assert [(s.id, s.start) for s in kept] == [(1, 1), (2, 3)]


def test_the_end_never_passes_the_duration_by_rounding() -> None:
    [kept] = within([segment(0, 9)], duration=1.23456)
    assert kept.end <= 1.23456


def test_words_are_kept_inside_the_file_too() -> None:
    [kept] = within([segment(0, 9, words=(Word(" a", 0.0, 1.0, 0.9), Word(" b", 4.0, 9.0, 0.9)))], duration=5.0)
    assert kept.words is not None
    assert [(w.start, w.end) for w in kept.words] == [(0, 1), (4, 5)]


def test_parts_come_behind_one_another_and_never_go_back() -> None:
    growing = Growing(10.0)
    growing.add(Said((segment(0, 2), segment(2, 4)), language=("en", 0.9), until=4.0))
    [new] = growing.add(Said((segment(1.5, 3),), language=("de", 0.8), until=3.0))  # words can make it overlap
    assert (new.id, new.start, new.end) == (3, 2.0, 3.0)
    assert (growing.until, growing.transcript.language) == (4.0, "en")


def test_a_transcript_is_complete_up_to_the_end_of_the_file_at_most() -> None:
    assert Growing(10.0, [Said(until=12.0)]).until == 10.0


@pytest.mark.parametrize(("characters", "tail"), [(5, "tail."), (12, "A long tail."), (100, "First. A long tail.")])
def test_the_tail_is_the_end_of_the_text(characters: int, tail: str) -> None:
    growing = Growing(10.0, [Said((segment(0, 2, " First."), segment(2, 4, " A long tail.")))])
    assert growing.tail(characters) == tail
