"""Subtitles that people can read: what is promised of each cue, in many scripts and layouts."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from fakes import segment
from wcwidth import iter_graphemes, width

from whisper_worker.subtitles import Cue, Layout, cues
from whisper_worker.transcript import Segment, Word

TEXTS = {
    "english": " The quick brown fox, it is well-known, jumps over the lazy dog... and (then) sleeps!",
    "french": " Il a dit : « Bonjour ! » Puis il est parti très vite, n'est-ce pas ?",
    "long word": " Das ist die Donaudampfschifffahrtsgesellschaftskapitänsmütze von Herrn Müller.",
    "chinese": "我们今天去了北京，天气非常好！「你好吗？」他问道。我用iPhone拍了2024张照片……",
    "japanese": "ちょっと待ってください。「ラーメン」を食べましょう、きょうはとてもいい天気ですね！",
    "korean": " 오늘은 날씨가 매우 좋습니다. 우리는 공원에 갔어요!",
    "thai": "สวัสดีครับวันนี้อากาศดีมากๆเราไปเที่ยวทะเลกันเถอะน้ำใสมาก",
    "khmer": "សួស្តីពិភពលោកថ្ងៃនេះអាកាសធាតុល្អណាស់។",
    "hindi": " नमस्ते दुनिया, आज मौसम बहुत अच्छा है।",
    "arabic": " مرحبا بكم في العالم، كيف حالكم اليوم؟ الطقس جميل جدا.",
    "hebrew": " שָׁלוֹם לְכֻלָּם, מה שלומכם היום? מזג האוויר נהדר!",
    "combining": " Cafe\u0301 re\u0301sume\u0301 " + "か\u3099き\u3099く\u3099け\u3099こ\u3099" * 2,
    "emoji": " Great 👩\u200d👩\u200d👧👨\u200d👩\u200d👦🇩🇪🇫🇷👍🏽👍🏿❤\ufe0f🎉🎉🎉 news",
    "punctuation": " ... ... ! ! ! ! ! ! ! ! ! ! ! « « « « « « «",
    "marks only": "！！！！！！！！",
}
LAYOUTS = [
    Layout(),
    Layout(max_line_width=42),
    Layout(max_line_width=10),
    Layout(max_line_width=10, max_line_count=1),
    Layout(max_line_width=16, max_line_count=2),
    Layout(max_line_width=1, max_line_count=3),
    Layout(max_words_per_line=1),
    Layout(max_words_per_line=3),
    Layout(max_words_per_line=3, max_line_count=2),
    Layout(max_line_width=12, max_words_per_line=2),
    Layout(max_line_count=2),
]


def with_words(text: str, start: float = 0.0, each: float = 0.5) -> Segment:
    """As the model does: words keep their leading space; text without spaces has a word for each few characters."""
    parts: list[str] = []
    for token in text.split():
        pieces = (
            [token] if token.isascii() or width(token) < 12 else [token[i : i + 2] for i in range(0, len(token), 2)]
        )
        parts += [" " * (text[0] == " " or bool(parts)) + pieces[0], *pieces[1:]]
    words = tuple(Word(part, start + i * each, start + (i + 1) * each, 0.9) for i, part in enumerate(parts))
    return segment(start, start + each * len(parts), text, words)


def said(name: str) -> list[Segment]:
    text = TEXTS[name]
    return [segment(1, 7.5, text), with_words(text, 8), segment(70, 70, text, ()), with_words(text, 80, each=0.0)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", TEXTS)
def test_cues_keep_their_promises(name: str, layout: Layout) -> None:
    for spoken in said(name):
        made = cues([spoken], layout)
        assert made
        assert squeezed(cue.text for cue in made) == squeezed([TEXTS[name]])
        for cue in made:
            lines = cue.text.split("\n")
            assert all(line.strip() == line != "" for line in lines)
            assert layout.max_line_count is None or len(lines) <= layout.max_line_count
            assert all(fits(line, layout) for line in lines)
            assert cue.start_ms < cue.end_ms
        assert all(before.start_ms <= after.start_ms for before, after in pairwise(made))


def fits(line: str, layout: Layout) -> bool:
    if layout.max_words_per_line and len(line.split()) > layout.max_words_per_line:
        return False
    return not layout.max_line_width or width(line) <= layout.max_line_width or len(line.split()) == 1


@pytest.mark.parametrize("name", ["chinese", "japanese", "thai", "emoji"])
def test_no_line_of_text_without_spaces_is_too_wide(name: str) -> None:
    for spoken in said(name):
        for cue in cues([spoken], Layout(max_line_width=16)):
            assert max(width(line) for line in cue.text.split("\n")) <= 16


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", TEXTS)
def test_lines_end_between_characters(name: str, layout: Layout) -> None:
    whole = list(iter_graphemes("".join(TEXTS[name].split())))
    for spoken in said(name):
        lines = [line for cue in cues([spoken], layout) for line in cue.text.split("\n")]
        assert [char for line in lines for char in iter_graphemes("".join(line.split()))] == whole


@pytest.mark.parametrize("name", ["english", "french", "chinese", "japanese", "korean", "thai", "arabic", "hindi"])
@pytest.mark.parametrize("columns", [16, 20, 31])
def test_no_line_begins_with_closing_or_ends_with_opening_punctuation(name: str, columns: int) -> None:
    for spoken in said(name):
        lines = [line for cue in cues([spoken], Layout(max_line_width=columns)) for line in cue.text.split("\n")]
        assert not [line for line in lines if line[0] in "!?:»,.，。！？」…ーょっๆ،؟।"]
        assert not [line for line in lines if line[-1] in "«「(เไ"]


@pytest.mark.parametrize("name", ["arabic", "hebrew"])
def test_text_from_right_to_left_is_unchanged(name: str) -> None:
    [cue] = cues([segment(0, 1, TEXTS[name])])
    assert cue.text == TEXTS[name].strip()


def test_a_width_alone_wraps_lines_and_leaves_one_cue() -> None:
    [cue] = cues([segment(1, 2, " The quick brown fox jumps over")], Layout(max_line_width=10))
    assert cue == Cue(1000, 2000, "The quick\nbrown fox\njumps over")


def test_a_word_that_is_too_long_stays_whole() -> None:
    [cue] = cues([segment(0, 1, " an extraordinarily long word")], Layout(max_line_width=10))
    assert cue.text == "an\nextraordinarily\nlong word"


def test_times_are_shared_out_by_width_where_there_are_no_words() -> None:
    made = cues([segment(10, 20, " aaaa bbbb 你好吗")], Layout(max_line_width=4, max_line_count=1))
    assert made == [
        Cue(10_000, 12_857, "aaaa"),
        Cue(12_857, 15_714, "bbbb"),
        Cue(15_714, 18_571, "你好"),
        Cue(18_571, 20_000, "吗"),
    ]


def test_cues_have_their_words_times() -> None:
    words = (Word(" One", 1.25, 1.5, 1), Word(" two", 1.75, 2.0, 1), Word(" three", 4.0, 4.5, 1))
    made = cues([segment(1, 5, " One two three", words)], Layout(max_line_width=8, max_line_count=1))
    assert made == [Cue(1250, 2000, "One two"), Cue(4000, 4500, "three")]


def test_a_line_made_by_words_alone_is_a_cue() -> None:
    spoken = segment(0, 6, " a b c d e")
    assert [cue.text for cue in cues([spoken], Layout(max_words_per_line=2))] == ["a b", "c d", "e"]
    made = cues([spoken], Layout(max_words_per_line=2, max_line_count=2))
    assert [cue.text for cue in made] == ["a b\nc d", "e"]


def test_a_word_in_text_without_spaces_is_kept_together_where_it_is_known() -> None:
    words = (Word("こんにちは", 0, 1, 1), Word("世界", 1, 2, 1), Word("。", 2, 2.5, 1))
    made = cues([segment(0, 3, "こんにちは世界。", words)], Layout(max_line_width=12, max_line_count=1))
    assert made == [Cue(0, 1000, "こんにちは"), Cue(1000, 2500, "世界。")]


def test_a_known_word_that_is_too_wide_is_cut_and_its_time_with_it() -> None:
    words = (Word("こんにちは", 0, 1, 1), Word("世界", 1, 2, 1))
    made = cues([segment(0, 2, "こんにちは世界", words)], Layout(max_line_width=4, max_line_count=1))
    assert made == [Cue(0, 400, "こん"), Cue(400, 800, "にち"), Cue(800, 1000, "は"), Cue(1000, 2000, "世界")]


def test_words_without_a_space_between_them_are_not_parted() -> None:
    words = (Word(" a", 0, 1, 1), Word(" well", 1, 2, 1), Word("-known", 2, 3, 1), Word(" man", 3, 4, 1))
    [cue] = cues([segment(0, 4, " a well-known man", words)], Layout(max_line_width=10))
    assert cue.text == "a\nwell-known\nman"


def test_a_space_behind_a_word_is_kept_too() -> None:
    [cue] = cues([segment(0, 2, "Hello there", (Word("Hello ", 0, 1, 1), Word("there", 1, 2, 1)))])
    assert cue.text == "Hello there"


@pytest.mark.parametrize("words", [None, (), (Word(" ", 0, 1, 1),)])
def test_a_segment_without_words_has_its_text(words: tuple[Word, ...] | None) -> None:
    assert cues([segment(0, 1, " Hello", words)], Layout(highlight_words=True)) == [Cue(0, 1000, "Hello")]
    assert cues([segment(0, 1, " \n", words)], Layout(highlight_words=True)) == []


def test_text_without_any_width_is_no_trouble() -> None:
    assert cues([segment(0, 1, "\u200b")], Layout(max_line_width=10)) == [Cue(0, 1, "\u200b")]


def test_words_that_begin_too_early_or_end_before_they_start_leave_cues_in_order() -> None:
    early = (Word(" Two.", 1.0, 0.5, 1), Word(" Three.", 0.25, 0.3, 1))
    for highlight in (False, True):
        layout = Layout(max_words_per_line=1, highlight_words=highlight)
        made = cues([segment(2, 3, " One.", (Word(" One.", 2, 3, 1),)), segment(2, 4, " Two. Three.", early)], layout)
        assert [cue.text for cue in made] == ["One.", "Two.", "Three."]
        assert all(before.start_ms <= after.start_ms for before, after in pairwise(made))
        assert all(cue.start_ms < cue.end_ms for cue in made)


def test_each_word_is_highlighted_while_it_is_spoken_and_none_in_the_gaps() -> None:
    words = (Word(" One", 1.0, 1.5, 1), Word(" two", 2.0, 2.5, 1), Word(" three", 2.5, 3.0, 1))
    made = cues([segment(1, 4, " One two three", words)], Layout(max_line_width=8, highlight_words=True))
    text = "One two\nthree"
    assert made == [
        Cue(1000, 1500, text, spoken=(0, 3)),
        Cue(1500, 2000, text),
        Cue(2000, 2500, text, spoken=(4, 7)),
        Cue(2500, 3000, text, spoken=(8, 13)),
    ]


def test_highlights_of_words_without_length_and_out_of_order_follow_each_other() -> None:
    words = (Word(" One", 1.0, 1.0, 1), Word(" two", 0.5, 0.25, 1), Word(" three", 1.0, 3.0, 1))
    made = cues([segment(1, 4, " One two three", words)], Layout(highlight_words=True))
    assert [(cue.start_ms, cue.end_ms) for cue in made] == [(1000, 1001), (1001, 1002), (1002, 3000)]


@pytest.mark.parametrize("name", TEXTS)
def test_highlights_follow_each_other_and_cover_the_text(name: str) -> None:
    made = cues([with_words(TEXTS[name])], Layout(max_line_width=20, highlight_words=True))
    assert all(before.end_ms == after.start_ms for before, after in pairwise(made))
    assert squeezed(cue.text[slice(*cue.spoken)] for cue in made if cue.spoken) == squeezed([TEXTS[name]])


def test_channels_that_speak_at_once_stand_in_the_order_of_their_starts() -> None:
    first = replace(segment(0, 4, " one two three four"), channel=0)
    second = replace(segment(1, 3, " yes"), channel=1)
    layout = Layout(max_line_width=20, max_line_count=1)
    assert [(cue.start_ms, cue.text) for cue in cues([first, second], layout, labelled=True)] == [
        (0, "Channel 0: one two"),
        (1000, "Channel 1: yes"),
        (1600, "Channel 0: three"),
        (2933, "Channel 0: four"),
    ]
    assert [cue.channel for cue in cues([first, second])] == [0, 1]


def squeezed(texts: Iterable[str]) -> str:
    return "".join("".join(text.split()) for text in texts)
