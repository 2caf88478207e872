"""Segments → cues: what a viewer reads at one time, in which lines. Knows no file format.

A segment is taken apart into units, a unit being what stays on one line; lines are filled with units, and cues with
lines. Each unit has its time: its words', or else its share of the segment's, by the width it is displayed with.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from wcwidth import grapheme_boundary_before, iter_graphemes, width

from whisper_worker.transcript import Segment, Word


@dataclass(frozen=True)
class Layout:
    """How subtitles are to be laid out; by default a segment is one cue of one line.

    `max_line_width` counts characters, wide ones (Chinese, Japanese, Korean) twice; only a longer word passes it.
    Lines that `max_words_per_line` alone makes are cues of their own. `highlight_words`: underline each word while it
    is spoken, where segments have words.
    """

    max_line_width: int | None = None
    max_line_count: int | None = None
    max_words_per_line: int | None = None
    highlight_words: bool = False

    def has_room(self, columns: int, words: int) -> bool:
        """Whether one line may have so many."""
        return (self.max_line_width is None or columns <= self.max_line_width) and (
            self.max_words_per_line is None or words <= self.max_words_per_line
        )

    @property
    def lines_per_cue(self) -> int | None:
        return self.max_line_count or (1 if self.max_words_per_line else None)


PLAIN = Layout()


@dataclass(frozen=True)
class Cue:
    """Some lines of text and when they are shown; `spoken`: from where to where in the text to underline it."""

    start_ms: int
    end_ms: int
    text: str
    channel: int | None = None
    spoken: tuple[int, int] | None = None


def cues(segments: Iterable[Segment], layout: Layout = PLAIN, *, labelled: bool = False) -> list[Cue]:
    """All cues, in the order of their starts, none empty, each with a length: WebVTT demands one.

    `labelled`: the text of each cue begins with its channel's label, which takes room from its first line. One word
    stands behind it even so.
    """
    made: list[Cue] = []
    latest: dict[int | None, int] = {}  # start of the last cue of each channel
    for segment in segments:
        for cue in _cues(segment, layout, label(segment) if labelled else ""):
            start_ms = max(cue.start_ms, latest.get(cue.channel, 0))  # words may begin before those they follow
            latest[cue.channel] = start_ms
            made.append(replace(cue, start_ms=start_ms, end_ms=max(cue.end_ms, start_ms + 1)))
    return sorted(made, key=lambda cue: cue.start_ms)


def label(segment: Segment) -> str:
    """What stands before text of a channel that is transcribed apart. Counts from 0, as the field `channel` does."""
    return "" if segment.channel is None else f"Channel {segment.channel}: "


def to_ms(seconds: float) -> int:
    return round(seconds * 1000)


def _cues(segment: Segment, layout: Layout, prefix: str) -> Iterator[Cue]:
    if layout == PLAIN and (text := " ".join(segment.text.split())):
        yield Cue(to_ms(segment.start), to_ms(segment.end), prefix + text, segment.channel)
        return
    for lines in _filled(_units(segment, layout), layout, indent=width(prefix)):
        units = [unit for line in lines for unit in line]
        text, places = _written(lines, prefix)
        cue = Cue(to_ms(units[0].start), to_ms(units[-1].end), text, segment.channel)
        if layout.highlight_words and _words(segment):
            yield from _highlighted(cue, units, places)
        else:
            yield cue


@dataclass(frozen=True)
class _Unit:
    """What stays on one line: a word, or a character of a script without spaces, and what sticks to it.

    `spaced`: a space parts it from what stands before it in its line.
    """

    text: str
    start: float
    end: float
    spaced: bool

    def __add__(self, other: "_Unit") -> "_Unit":
        text = self.text + " " * other.spaced + other.text
        return replace(self, text=text, end=max(self.end, other.end))

    @property
    def columns(self) -> int:
        return width(self.text)

    @property
    def words(self) -> int:
        return self.text.count(" ") + 1


def _units(segment: Segment, layout: Layout) -> list[_Unit]:
    units: list[_Unit] = []
    for piece in _pieces(segment, layout):
        if units and _stick(units[-1], piece, layout):
            units[-1] += piece
        else:
            units.append(piece)
    return units


def _pieces(segment: Segment, layout: Layout) -> Iterator[_Unit]:
    """The segment's words; what has no times of its own, and what is too wide for a line, in smaller pieces."""
    words = _words(segment)
    if not words:
        yield from _divided(Word(segment.text, segment.start, segment.end, 1.0), spaced=True)
    spaced = False
    for word in words:
        spaced = spaced or word.word[0].isspace()
        piece = _Unit(" ".join(word.word.split()), word.start, word.end, spaced)
        if layout.has_room(piece.columns, piece.words):
            yield piece
        else:
            yield from _divided(word, spaced)
        spaced = word.word[-1].isspace()


def _words(segment: Segment) -> list[Word]:
    return [word for word in segment.words or () if word.word.strip()]


def _divided(word: Word, spaced: bool) -> Iterator[_Unit]:
    """The smallest pieces that may ever be parted, each with its share of the time."""
    pieces = [
        (piece, at == 0)
        for part in word.word.split()
        for at, piece in enumerate(iter_graphemes(part) if _UNSPACED.search(part) else (part,))
    ]
    total = sum(width(piece) for piece, _ in pieces) or 1
    columns = 0
    for piece, begins_part in pieces:
        start = word.start + (word.end - word.start) * columns / total
        columns += width(piece)
        end = word.start + (word.end - word.start) * columns / total
        yield _Unit(piece, start, end, begins_part and spaced)
        spaced = True


# Scripts written without spaces between words, where a line may end at any character: Thai, Lao, Tibetan (at its marks
# between syllables), Burmese, Khmer, Chinese, Japanese, wide signs, emoji. Korean has spaces.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u0f0b-\u0f14\u1000-\u109f\u1780-\u17ff\u2e80-\u312f\u3190-\u9fff\uf900-\ufaff"
    "\ufe30-\ufe4f\uff01-\uff9f\U0001f300-\U0001faff\U00020000-\U0003ffff]"
)

# No line begins with these: closing punctuation, small kana and marks of repetition and length, vowels of Thai and Lao
# that follow their consonant.
_CLOSING = frozenset(
    "!,.:;?%)]}…‥’”»›、。，．：；？！％）］｝」』】〕〉》〗〙〛｠｡｣､・･،؛؟۔।॥፣።་།၊။។៕"
    "ーｰ～〜々ゝゞヽヾ〻ぁぃぅぇぉっゃゅょゎゕゖァィゥェォッャュョヮヵヶｧｨｩｪｫｬｭｮｯะาๅๆฯະາໆຯ"
)

# No line ends with these: opening punctuation, vowels of Thai and Lao that stand before their consonant.
_OPENING = frozenset("([{¿¡‘“„‚«‹（［｛「『【〔〈《〖〘〚｟｢เแโใไເແໂໃໄ")


def _stick(before: _Unit, after: _Unit, layout: Layout) -> bool:
    """Whether no line may end between the two."""
    if after.spaced:
        punctuation = _CLOSING.issuperset(after.text) or _OPENING.issuperset(before.text)
        both = before + after
        return punctuation and layout.has_room(both.columns, both.words)
    last, first = before.text[-1], after.text[0]
    if last in _OPENING or first in _CLOSING:
        return True
    if not (_UNSPACED.match(last) or _UNSPACED.match(first)):
        return True
    joined = before.text + first  # the model's words may part even a character from its combining marks
    return grapheme_boundary_before(joined, len(joined)) < len(before.text)


_Lines = list[list[_Unit]]


def _filled(units: Iterable[_Unit], layout: Layout, indent: int) -> list[_Lines]:
    """Cues of lines of units, as full as they may be. The first line of each cue has `indent` columns less."""
    filled: list[_Lines] = []
    columns = words = 0
    for unit in units:
        longer = columns + unit.spaced + unit.columns
        if filled and layout.has_room(longer, words + unit.words):
            filled[-1][-1].append(unit)
            columns, words = longer, words + unit.words
        elif filled and (layout.lines_per_cue is None or len(filled[-1]) < layout.lines_per_cue):
            filled[-1].append([unit])
            columns, words = unit.columns, unit.words
        else:
            filled.append([[unit]])
            columns, words = indent + unit.columns, unit.words
    return filled


def _written(lines: _Lines, prefix: str) -> tuple[str, list[tuple[int, int]]]:
    """The text of a cue, and where in it each unit stands."""
    text, places = prefix, []
    for number, line in enumerate(lines):
        text += "\n" * (number > 0)
        for at, unit in enumerate(line):
            text += " " * (unit.spaced and at > 0)
            places.append((len(text), len(text) + len(unit.text)))
            text += unit.text
    return text, places


def _highlighted(cue: Cue, units: Sequence[_Unit], places: Sequence[tuple[int, int]]) -> Iterator[Cue]:
    """The cue once for each unit, underlined while it is spoken, and as it is in the gaps between."""
    now_ms = cue.start_ms
    for unit, place in zip(units, places, strict=True):
        start_ms = max(now_ms, to_ms(unit.start))
        end_ms = max(start_ms + 1, to_ms(unit.end))
        if now_ms < start_ms:
            yield replace(cue, start_ms=now_ms, end_ms=start_ms)
        yield replace(cue, start_ms=start_ms, end_ms=end_ms, spoken=place)
        now_ms = end_ms
