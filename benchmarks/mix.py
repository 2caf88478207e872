"""Jobs whose outcome is known, drawn at random: good ones, bad ones, and some that their caller cancels.

Knows nothing of who answers them. The file of a job that names a URL is served by its `route`, at an address of its
own: what the server does wrong at first, it does wrong to this job.
"""

import base64
import gzip
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

from file_server import PAGE, ROUTES, Answer, answer, in_turn, redirect
from media import CLIP_WORDS, RATE, encode, pcm, silence, speech, subtitles_only, video_without_sound, wav

from benchmarks import corpus, wer
from whisper_worker.audio import Samples, decode
from whisper_worker.stop import Stop

MAX_AUDIO_S = 600
MAX_FILE_BYTES = 20_000_000
LIMITS = {
    "MAX_AUDIO_S": f"{MAX_AUDIO_S}",
    "MAX_DOWNLOAD_BYTES": f"{MAX_FILE_BYTES}",
    "DOWNLOAD_TIMEOUT_S": "8",
    "RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS": "true",
}
"""The worker's settings that the outcomes rest on."""

LONG_S = (60.0, 120.0, 240.0)
LONG_ERROR_RATE = 0.4  # of words in a long file: another file's text is wrong in nearly all
TOO_SHORT_S = 0.3  # for a long file

Input = dict[str, Any]
Moment = Literal["waits", "downloads", "runs"]


@dataclass(frozen=True)
class Words:
    """What is said in the audio, and how much of it may be heard wrong. In lower case, without punctuation."""

    said: str
    max_error_rate: float = 0.0

    def mismatch(self, job_input: Input, output: Mapping[str, Any]) -> str | None:
        """Why the output isn't that of such a job."""
        texts = {"transcription": output["transcription"]}
        if job_input.get("translate"):
            texts["translation"] = output["translation"]
        if job_input.get("word_timestamps") and "word_timestamps" in output:  # a stream has them in its items
            texts["word_timestamps"] = "".join(word["word"] for word in output["word_timestamps"])
        for name, text in texts.items():
            if not self._are_in(text):
                return f"{name}: {text!r}"
        return None

    def _are_in(self, text: str) -> bool:
        heard = _spoken(text)
        if heard == self.said or not self.said:
            return heard == self.said
        return wer.rate([wer.errors(heard, self.said)]) <= self.max_error_rate


@dataclass(frozen=True)
class Kind:
    """A job to send. `expected`: what is said, or the code with which it fails."""

    name: str
    input: Any
    expected: Words | str
    route: Answer | None = None
    suffix: str = ""  # of the address
    cancelled_while_it: Moment | None = None


@dataclass(frozen=True)
class Sound:
    """The same words as files of several formats, by the ending of their names."""

    words: Words
    files: Mapping[str, bytes] = field(repr=False)


OPTIONS: Sequence[Input] = (
    {},
    {},
    {"word_timestamps": True},
    {"translate": True},
    {"transcription": "srt"},
    {"transcription": "vtt", "word_timestamps": True},
    {"transcription": "formatted_text"},
    {"transcription": "srt", "max_line_width": 20, "max_line_count": 2},
    {"formats": ["srt", "verbose_json"], "word_timestamps": True},
    {"channels": "split"},
    {"clip": {"start": 0}},
    {"enable_vad": False},
    {"language": "en"},
)


class Mix:
    """The same seed gives the same jobs in the same order. Not for several threads at once."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._sounds = _sounds()
        self._long = [_long(seconds) for seconds in LONG_S]
        self._bad = [*_bad_inputs(), *_bad_files()]

    def draw(self) -> Kind:
        draws = {self.good: 10, self._long_one: 1, self._silent: 1, self._bad_one: 6, self._cancelled: 3}
        (draw,) = self._random.choices(list(draws), list(draws.values()))
        return draw()

    def good(self) -> Kind:
        sound = self._random.choice(self._sounds)
        return self._short(sound.words, sound.files)

    def _silent(self) -> Kind:
        silent = wav(pcm(silence(self._random.choice((0.05, 2.0, 60.0)))))
        kind = self._short(Words(""), {".wav": silent})
        heard = {name: value for name, value in kind.input.items() if name != "enable_vad"}  # without it: inventions
        return replace(kind, name="silence", input=heard)

    def _short(self, words: Words, files: Mapping[str, bytes]) -> Kind:
        suffix = self._random.choice(list(files))
        file = files[suffix]
        options = self._random.choice(OPTIONS)
        whole = answer(200, file)
        half = answer(200, file[: len(file) // 2], f"Content-Length: {len(file)}")
        routes: dict[str, Answer | None] = {
            "base64": None,
            "url": whole,
            "gzip": answer(200, gzip.compress(file), "Content-Encoding: gzip"),
            "503, then fine": in_turn(answer(503), whole),
            "429, then fine": in_turn(answer(429), whole),
            "cut off, then fine": in_turn(half, whole),
            "hung up, then fine": in_turn(lambda _: None, whole),
            "redirect": in_turn(redirect("?signature=SECRET"), whole),  # to the same address, where it is asked again
        }
        name = self._random.choice(list(routes))
        if route := routes[name]:
            return Kind(name, options, words, route, suffix)
        return Kind(name, {"audio_base64": base64.b64encode(file).decode(), **options}, words)

    def _long_one(self) -> Kind:
        return self._random.choice(self._long)

    def _bad_one(self) -> Kind:
        return self._random.choice(self._bad)

    def _cancelled(self) -> Kind:
        moment = self._random.choice(("waits", "downloads", "runs"))
        if moment == "waits":
            return replace(self.good(), name="cancelled: waits", cancelled_while_it="waits")
        if moment == "downloads":
            stalling = Kind("cancelled: downloads", {}, "TIMEOUT", ROUTES["/stall"])
            return replace(stalling, cancelled_while_it="downloads")
        return replace(self._long_one(), name="cancelled: runs", cancelled_while_it="runs")


# What is said well. `caller` imports the SDK, which takes longer than telling a command's options: so not above.


def _spoken(text: str) -> str:
    from caller import words

    return words(text)


def _sounds() -> list[Sound]:
    from caller import STATION, STATION_WORDS

    station = base64.b64decode(STATION)
    samples = decode(io.BytesIO(station), Stop(), max_seconds=MAX_AUDIO_S).samples
    return [
        Sound(Words(CLIP_WORDS), _encoded(speech())),
        Sound(Words(STATION_WORDS), _encoded(samples) | {".ogg": station}),
    ]


def _encoded(samples: Samples) -> dict[str, bytes]:
    return {
        ".wav": wav(pcm(samples)),
        ".ogg": encode("ogg", "libopus", [samples]),
        ".flac": encode("flac", "flac", [samples]),
        ".mp3": encode("mp3", "libmp3lame", [samples]),
        ".m4a": encode("mp4", "aac", [samples]),
        ".mp4": encode("mp4", "aac", [samples], picture=True),
        ".webm": encode("webm", "libopus", [samples]),
    }


def _long(seconds: float) -> Kind:
    recording = corpus.long_recording(seconds)
    said = Words(_spoken(recording.text), LONG_ERROR_RATE)
    file = encode("flac", "flac", [recording.samples], rate=RATE)
    return Kind(f"{seconds / 60:g} minutes", {}, said, answer(200, file), ".flac")


# What fails.


def _bad_inputs() -> list[Kind]:
    clip = base64.b64encode(wav(pcm(speech()))).decode()
    inputs: dict[str, Any] = {
        "no object": "please transcribe",
        "nothing": {},
        "both": {"audio": "http://127.0.0.1/clip.wav", "audio_base64": clip},
        "unknown field": {"audio_base64": clip, "langauge": "en"},
        "number in quotes": {"audio_base64": clip, "beam_size": "5"},
        "unknown language": {"audio_base64": clip, "language": "Klingon"},
        "no base64": {"audio_base64": "%%%"},
        "path": {"audio": "/etc/hostname"},
        "other scheme": {"audio": "ftp://127.0.0.1/clip.wav"},
    }
    others = [
        Kind("another model", {"audio_base64": clip, "model": "whisper-of-oz"}, "UNKNOWN_MODEL"),
        Kind("base64 of a web page", {"audio_base64": base64.b64encode(PAGE).decode()}, "NOT_AUDIO"),
        Kind("nobody listens", {"audio": "http://127.0.0.1:9/clip.wav"}, "DOWNLOAD_FAILED"),
    ]
    return [*(Kind(name, value, "BAD_INPUT") for name, value in inputs.items()), *others]


def _bad_files() -> list[Kind]:
    cut_off = encode("mp4", "aac", [speech()])
    endless = encode("flac", "flac", [silence(MAX_AUDIO_S + 60)], rate=RATE)
    routes: dict[str, tuple[Answer, str]] = {
        "web page": (ROUTES["/page"], "NOT_AUDIO"),
        "empty": (ROUTES["/empty"], "NOT_AUDIO"),
        "junk": (answer(200, Random(0).randbytes(50_000)), "NOT_AUDIO"),
        "half an mp4": (answer(200, cut_off[: len(cut_off) // 2]), "NOT_AUDIO"),
        "video without sound": (answer(200, video_without_sound()), "NO_AUDIO_STREAM"),
        "subtitles": (answer(200, subtitles_only()), "NO_AUDIO_STREAM"),
        "too long": (answer(200, endless), "TOO_LONG"),
        "too large": (ROUTES["/huge"], "TOO_LARGE"),
        "bomb": (ROUTES["/gzip-bomb"], "TOO_LARGE"),
        "endless": (ROUTES["/endless"], "TOO_LARGE"),
        "404": (ROUTES["/missing"], "DOWNLOAD_FAILED"),
        "always 500": (ROUTES["/broken"], "DOWNLOAD_FAILED"),
        "always hung up": (ROUTES["/no-answer"], "DOWNLOAD_FAILED"),
        "always cut off": (ROUTES["/cut-off"], "DOWNLOAD_FAILED"),
        "refused address": (redirect("file:///etc/hostname"), "DOWNLOAD_REFUSED"),
        "stalls": (ROUTES["/stall"], "TIMEOUT"),
        "trickles": (ROUTES["/trickle"], "TIMEOUT"),
    }
    files = [Kind(name, {}, code, route) for name, (route, code) in routes.items()]
    hurried = replace(_long(LONG_S[0]), name="hurried", input={"timeout_s": TOO_SHORT_S}, expected="TIMEOUT")
    return [*files, hurried]
