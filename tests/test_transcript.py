"""What leaves the model is brought inside the file."""

import pytest
from fakes import segment

from whisper_worker.transcript import Growing, Language, Said, Word, within

ENGLISH = Language("en", 0.9, (("en", 0.9), ("de", 0.1)))


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
    growing.add(Said((segment(0, 2), segment(2, 4)), language=ENGLISH, until=4.0))
    [new] = growing.add(Said((segment(1.5, 3),), language=Language.given("de"), until=3.0))  # words can make it overlap
    assert (new.id, new.start, new.end) == (3, 2.0, 3.0)
    assert (growing.until, growing.transcript.language) == (4.0, ENGLISH)


def test_a_transcript_is_complete_up_to_the_end_of_the_file_at_most() -> None:
    assert Growing(10.0, [Said(until=12.0)]).until == 10.0


@pytest.mark.parametrize(("characters", "tail"), [(5, "tail."), (12, "A long tail."), (100, "First. A long tail.")])
def test_the_tail_is_the_end_of_the_text(characters: int, tail: str) -> None:
    growing = Growing(10.0, [Said((segment(0, 2, " First."), segment(2, 4, " A long tail.")))])
    assert growing.tail(characters) == tail


def test_what_one_channel_says_waits_until_the_others_have_come_as_far() -> None:
    growing = Growing(10.0, channels=(0, 1))
    assert growing.add(Said((segment(1, 2), segment(5, 6)), until=6.0, channel=0)) == ()
    new = growing.add(Said((segment(0, 1), segment(3, 4)), until=4.0, channel=1))
    assert [(s.id, s.start, s.channel) for s in new] == [(1, 0, 1), (2, 1, 0), (3, 3, 1)]
    assert growing.until == 4.0
    [last] = growing.add(Said((segment(4.5, 7),), until=7.0, channel=1))[:1]
    assert (last.id, last.start) == (4, 4.5)
    assert [s.id for s in growing.transcript.segments] == [1, 2, 3, 4, 5]


def test_what_is_held_back_comes_at_the_end() -> None:
    growing = Growing(10.0, channels=(0, 1))
    growing.add(Said((segment(5, 6),), until=10.0, channel=0))
    assert [s.start for s in growing.end()] == [5]
    assert growing.until == 10.0


def test_the_translation_of_all_channels_is_in_order() -> None:
    growing = Growing(10.0, channels=(0, 1))
    growing.add(Said((), (segment(5, 6),), channel=0))
    growing.add(Said((), (segment(1, 2),), channel=1))
    translation = growing.translation
    assert [(s.id, s.start, s.channel) for s in translation.segments] == [(1, 1, 1), (2, 5, 0)]
    assert translation.task == "translate"


def test_a_part_of_a_file_has_the_times_of_the_file() -> None:
    word = Word(" Hello.", 0.5, 1.25, 0.9)
    growing = Growing(3.0, [Said((segment(0, 2, words=(word,)),), until=2.0)], offset=100.0)
    [one] = growing.transcript.segments
    assert (one.start, one.end) == (100.0, 102.0)
    assert one.words is not None
    assert (one.words[0].start, one.words[0].end) == (100.5, 101.25)
    assert growing.until == 2.0  # of the part: that is its progress
