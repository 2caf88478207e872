"""Real speech with its text: what the benchmarks say to the worker. Knows no model and no server.

Read are the recordings of ../shared/audio and Debian packages (`PACKAGES`): the prompts of the Asterisk telephone
exchange, spoken by one professional voice for each language, and a few readings of LibriVox. A package that isn't
there is named in the log and done without. To use packages without installing them, unpack them with `dpkg -x PACKAGE
FOLDER` and set CORPUS_ROOT to the folder.
"""

import gzip
import io
import json
import logging
import os
import re
import wave
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from media import CLIP, CLIP_WORDS

from whisper_worker.audio import SAMPLE_RATE, Samples, decode
from whisper_worker.stop import Stop

log = logging.getLogger(__name__)

SHARED = Path(__file__).parents[2] / "shared" / "audio"
SHARE = Path(os.environ.get("CORPUS_ROOT", "/")) / "usr" / "share"
READINGS = SHARE / "pocketsphinx" / "test" / "data" / "librivox"
PROMPTS = {  # language: folder of the voice, and format
    "en": (SHARE / "asterisk" / "sounds" / "en_US_f_Allison", "g722"),
    "es": (SHARE / "asterisk" / "sounds" / "es_MX_f_Allison", "wav"),
    "fr": (SHARE / "asterisk" / "sounds" / "fr_CA_f_June", "wav"),
    "it": (SHARE / "asterisk" / "sounds" / "it_IT_m_Carlo", "wav"),
    "ru": (SHARE / "asterisk" / "sounds" / "ru_RU_f_IvrvoiceRU", "wav"),
}
PACKAGES = {
    "pocketsphinx-testdata": READINGS / "transcription",
    **{
        f"asterisk-core-sounds-{lang}-{kind}": folder / f"hello-world.{kind}"
        for lang, (folder, kind) in PROMPTS.items()
    },
}
G722_BYTES_PER_S = 8_000

CLIP_S = 4.2
MIN_S, MAX_S, MIN_WORDS = 1.5, 120.0, 3  # of fewer words, one error is a third
LETTERS_PER_S = (6.0, 24.0)  # nobody speaks slower or faster: the text is another recording's
NOT_SENTENCES = re.compile(
    r"(digits|letters|phonetic|silence)/|spy-|beep|.*-2tone|confbridge-(join|leave)$|tt-monkeys$"
)
# Remarks in brackets, signs that have several names, addresses, numbers that are read digit by digit, accents that
# became question marks, and two lines run into one.
UNSPOKEN = re.compile(r"[][(){}<>*#/@=&$%+_]|www|\d\d|\?.*\w|\w-\w+:")
OTHER_WORDS = {"fr/please-try-call-later", "it/please-try-call-later", "it/vm-then-pound"}
LATIN = re.compile(r"[a-zA-Z]")

PAUSE_S = (0.3, 2.5)
NOISE, LEVEL, PEAK = 1e-4, 0.07, 0.95  # RMS of the pauses (-80 dB) and of the speech (-23 dB), and the highest sample
BLOCK = 1 << 20  # samples


@dataclass(frozen=True)
class Clip:
    """One person saying `text`; `name` is unique."""

    name: str
    language: str
    text: str
    seconds: float
    file: Path

    def load(self) -> Samples:
        """The samples as the worker decodes them: float32, mono, 16 kHz. Read anew with each call."""
        with self.file.open("rb") as file:
            return decode(file, Stop(), max_seconds=MAX_S, extension=self.file.suffix[1:]).samples


class Span(NamedTuple):
    """Where, in seconds, a text is said."""

    start: float
    end: float
    text: str


class LongRecording(NamedTuple):
    samples: Samples
    text: str
    spans: list[Span]


def clips(languages: Collection[str] | None = None, limit: int | None = None) -> list[Clip]:
    """All clips of the languages, or `limit` of them, in an order that is mixed but always the same.

    Left out are clips on which an error rate says nothing: single letters, digits and sounds; fewer than MIN_WORDS
    words or MIN_S seconds; texts that aren't what is said (`UNSPOKEN`, Latin letters in Russian), or that nobody can
    say in that time (`LETTERS_PER_S`). No rule looks at what a model made of a clip; three
    clips were found, by reading what models hear, to say something else.

    Where no recording is there at all, the one clip of the worker's own tests has to do.
    """
    if missing := missing_packages():
        log.warning("not installed, and missing from the benchmark: %s", ", ".join(missing))
    everything = list(_all()) or [Clip(CLIP.name, "en", CLIP_WORDS, CLIP_S, CLIP)]
    found = [clip for clip in everything if (languages is None or clip.language in languages) and _is_fair(clip)]
    return sorted(found, key=lambda clip: zlib.crc32(clip.name.encode()))[:limit]


def missing_packages() -> list[str]:
    return [package for package, file in PACKAGES.items() if not file.exists()]


def _all() -> Iterator[Clip]:
    yield from _shared()
    if READINGS.exists():
        yield from _readings()
    for language, (folder, kind) in PROMPTS.items():
        if folder.exists():
            yield from _prompts(language, folder, kind)


def _shared() -> Iterator[Clip]:
    """Recordings of one speaker. Those that were taken from a package only where the package isn't there."""
    there = [f"Debian package {package} " for package in PACKAGES.keys() - missing_packages()]
    manifest = SHARED / "manifest.jsonl"
    for line in manifest.read_text("utf-8").splitlines() if manifest.exists() else ():
        row = json.loads(line)
        if row["text"] and row["channels"] == 1 and not row["source"].startswith(tuple(there)):
            yield Clip(row["file"], row["lang"], row["text"], row["seconds"], SHARED / row["file"])


def _readings() -> Iterator[Clip]:
    for line in (READINGS / "transcription").read_text("utf-8").splitlines():
        if match := re.fullmatch(r"<s> (.*) </s> \((.*)\)", line):
            file = READINGS / f"{match[2]}.wav"
            yield Clip(file.name, "en", match[1], _seconds(file), file)


def _prompts(language: str, folder: Path, kind: str) -> Iterator[Clip]:
    """A line of the list is `name: text`; some names have no file, and of a name that comes twice the last counts."""
    core = f"asterisk-core-sounds-{language}"
    with gzip.open(SHARE / "doc" / core / f"core-sounds-{language}.txt.gz", "rt", encoding="utf-8-sig") as file:
        lines = [line.partition(":") for line in file if not line.startswith(";")]
    for name, text in {name.strip(): text.strip() for name, _, text in lines}.items():
        recording = folder / f"{name}.{kind}"
        if text and not NOT_SENTENCES.match(name) and recording.exists():
            yield Clip(f"{language}/{name}", language, text, _seconds(recording), recording)


def _seconds(file: Path) -> float:
    if file.suffix == ".g722":
        return file.stat().st_size / G722_BYTES_PER_S
    with wave.open(str(file)) as recording:
        return float(recording.getnframes() / recording.getframerate())


def _is_fair(clip: Clip) -> bool:
    if clip.name in OTHER_WORDS or not MIN_S <= clip.seconds <= MAX_S or len(re.findall(r"\w+", clip.text)) < MIN_WORDS:
        return False
    if UNSPOKEN.search(clip.text) or (clip.language == "ru" and LATIN.search(clip.text)):
        return False
    slowest, fastest = LETTERS_PER_S
    return slowest <= len(re.findall(r"\w", clip.text)) / clip.seconds <= fastest


def long_recording(seconds: float, language: str = "en", seed: int = 0) -> LongRecording:
    """Clips of the language, one after another at the same level, with pauses of almost silent noise between.

    All are said once, in mixed order, before one is repeated. The same arguments give the same recording, of exactly
    that length; no memory is used but that of the result and one clip.
    """
    rng = np.random.default_rng(seed)
    samples = np.empty(round(seconds * SAMPLE_RATE), np.float32)
    spans: list[Span] = []
    said: dict[int, slice] = {}  # a repeated clip is copied from where it was said before, not decoded again
    available, end, placed = clips([language]), 0, -1
    while len(spans) > placed:
        placed = len(spans)
        for index in rng.permutation(len(available)):
            clip, start = available[index], end + round(rng.uniform(*PAUSE_S) * SAMPLE_RATE)
            if start + (clip.seconds + 0.1) * SAMPLE_RATE > len(samples):
                continue
            speech = samples[said[index]] if index in said else _levelled(clip.load())
            samples[end:start] = _noise(rng, start - end)
            end = start + len(speech)
            samples[start:end] = speech
            said[index] = slice(start, end)
            spans.append(Span(start / SAMPLE_RATE, end / SAMPLE_RATE, clip.text))
    for start in range(end, len(samples), BLOCK):
        samples[start : start + BLOCK] = _noise(rng, min(BLOCK, len(samples) - start))
    return LongRecording(samples, " ".join(span.text for span in spans), spans)


def _levelled(speech: Samples) -> Samples:
    rms, peak = float(np.sqrt(np.mean(speech**2))), float(np.abs(speech).max())
    return speech * np.float32(min(LEVEL / rms, PEAK / peak))


def _noise(rng: np.random.Generator, count: int) -> Samples:
    return rng.standard_normal(count, np.float32) * np.float32(NOISE)


def wav_bytes(samples: Samples) -> bytes:
    """A 16-bit WAV file."""
    file = io.BytesIO()
    _write(file, samples)
    return file.getvalue()


def write_wav(path: Path, samples: Samples) -> None:
    """The same on disk, without a second copy in memory."""
    with path.open("wb") as file:
        _write(file, samples)


def _write(file: IO[bytes], samples: Samples) -> None:
    with wave.open(file, "wb") as recording:
        recording.setnchannels(1)
        recording.setsampwidth(2)
        recording.setframerate(SAMPLE_RATE)
        recording.setnframes(len(samples))
        for start in range(0, len(samples), BLOCK):
            block = np.clip(samples[start : start + BLOCK], -1.0, 1.0) * 32_767
            recording.writeframesraw(block.round().astype("<i2").tobytes())
