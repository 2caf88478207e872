"""Word error rate: how far what was heard is from what was said. Knows no audio and no model.

Spelling is no error: capitals, punctuation, accents (the Spanish prompts are written without), English contractions
and variants, and whether a number is in digits or in words. English goes through Whisper's own normaliser, which its
published error rates use; for the other languages that one has no numbers, so they become words first. Languages
written without spaces are counted in characters, as they are there.
"""

import re
from collections.abc import Iterable

from num2words import CONVERTER_CLASSES, num2words
from rapidfuzz.distance import Levenshtein
from whisper_normalizer.basic import BasicTextNormalizer
from whisper_normalizer.english import EnglishTextNormalizer

_english = EnglishTextNormalizer()
_other = BasicTextNormalizer(remove_diacritics=True)
_characters = BasicTextNormalizer(split_letters=True)  # with its marks: without, が would be か
WITHOUT_SPACES = {"ja", "yue", "zh"}
NUMBER = re.compile(r"\d{1,4}")  # a longer one in pieces: invented ones have no limit, and num2words has


def normalise(text: str, language: str) -> str:
    """The words (or characters) of a text, with a space between. `language`: a code, as Whisper has it."""
    if language == "en":
        return str(_english(text)).strip()
    if language in CONVERTER_CLASSES:
        text = NUMBER.sub(lambda number: f" {num2words(int(number[0]), lang=language)} ", text)
    spelt = _characters if language in WITHOUT_SPACES else _other
    return str(spelt(text)).strip()


def errors(heard: str, said: str) -> tuple[int, int]:
    """Words put in, left out or mistaken, and words said. Both texts must be normalised."""
    words = said.split()
    return Levenshtein.distance(heard.split(), words), len(words)


def rate(counts: Iterable[tuple[int, int]]) -> float:
    """The error rate of many texts together: a long one counts for more than a short one."""
    edits, words = map(sum, zip(*counts, strict=True))
    return edits / words
