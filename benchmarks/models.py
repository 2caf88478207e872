"""The model of a benchmark: one the worker could serve, the multilingual one of the tests, or `random:SIZE`, made here.

A random model has the shape of a size, and so its memory and its time for each token, but says the same words whatever
it hears: each of its decoder's positions points so strongly at one token that nothing else counts. Random weights alone
would never end a window, and be so unsure of it that each is decoded at six temperatures; this one goes through the
whole worker as a real one does, at a real one's length. Not for word timestamps: its attention is at random too.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import multilingual
import numpy as np
from ctranslate2.specs.whisper_spec import WhisperSpec
from faster_whisper.tokenizer import _LANGUAGE_CODES as LANGUAGES  # has no public name
from numpy.typing import NDArray

from benchmarks import ROOT
from whisper_worker import model_files
from whisper_worker.model_files import ModelFiles

PREFIX = "random:"
MULTILINGUAL = "multilingual"
CACHE = ROOT / ".cache"

TEXT_TOKENS = 50_257  # then come the special ones: end, start, languages …, and the times in steps of 0.02 s
TIMES = 1_501
AUDIO_POSITIONS, TEXT_POSITIONS = 1_500, 448

SPOKEN_WORDS = 60  # those of a window with 20 s of speech
SPOKEN_S = 4.0  # where the model's only segment ends: inside any window
LOUDNESS = 20.0  # of the positions, so that the layers' noise, of 3 at most, is lost beside them
SURENESS = 25.0  # logit of the token a position points at; all others together reach 11


@dataclass(frozen=True)
class Shape:
    mels: int
    width: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    cantonese: bool = False  # the third generation's additional language

    @property
    def languages(self) -> list[str]:
        return [code for code in LANGUAGES if self.cantonese or code != "yue"]

    @property
    def tokens(self) -> int:
        """How many there are: text, its end and its start, languages, six tasks, times."""
        return TEXT_TOKENS + 2 + len(self.languages) + 6 + TIMES


SHAPES = {
    "tiny": Shape(80, 384, 6, 4, 4),
    "base": Shape(80, 512, 8, 6, 6),
    "small": Shape(80, 768, 12, 12, 12),
    "medium": Shape(80, 1024, 16, 24, 24),
    "large-v2": Shape(80, 1280, 20, 32, 32),
    "large-v3": Shape(128, 1280, 20, 32, 32, cantonese=True),
    "large-v3-turbo": Shape(128, 1280, 20, 32, 4, cantonese=True),
    "distil-large-v3": Shape(128, 1280, 20, 32, 2, cantonese=True),
}


def find(name: str) -> ModelFiles:
    """The files of `--model`. A random model is made once, in the checkout's cache folder, and may take a minute."""
    if name == MULTILINGUAL:
        folder = multilingual.find()
        if folder is None:
            raise SystemExit(f"--model {name}: scripts/fetch-test-model installs it")
        return ModelFiles(name, folder)
    if not name.startswith(PREFIX):
        return model_files.find(name)
    size = name.removeprefix(PREFIX)
    if size not in SHAPES:
        raise SystemExit(f"--model {name}: the sizes are {', '.join(SHAPES)}")
    folder = CACHE / f"random-{size}"
    if not folder.is_dir():
        CACHE.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=CACHE) as made:
            model = Path(made) / "model"
            model.mkdir()
            _write(SHAPES[size], model)
            model.rename(folder)  # whole, or not there
    return ModelFiles(name, folder)


def _write(shape: Shape, folder: Path) -> None:
    vocabulary = _vocabulary(shape)
    spec = WhisperSpec(shape.encoder_layers, shape.heads, shape.decoder_layers, shape.heads)
    _Weights(shape.width).fill(spec, shape, _script(vocabulary))
    spec.config.lang_ids = [vocabulary.index(f"<|{code}|>") for code in shape.languages]
    spec.config.suppress_ids = []
    spec.config.suppress_ids_begin = [vocabulary.index("<|endoftext|>")]
    spec.config.alignment_heads = [[shape.decoder_layers - 1, head] for head in range(shape.heads)]
    spec.register_vocabulary(vocabulary)
    spec.validate()
    spec.optimize("float16")
    spec.save(str(folder))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(vocabulary)))
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": shape.mels}))


# What it says.


def _demo_tokenizer() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((model_files.find("bundled").folder / "tokenizer.json").read_text())
    return parsed


def _vocabulary(shape: Shape) -> list[str]:
    """The demo model's text tokens, and the special ones in a multilingual model's order.

    The last text token is empty, as in Whisper: CTranslate2 knows a multilingual model by it.
    """
    ids = {number: token for token, number in _demo_tokenizer()["model"]["vocab"].items()}
    text = [ids[number] for number in range(TEXT_TOKENS - 1)] + [""]
    tasks = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
    special = [f"<|{name}|>" for name in ["endoftext", "startoftranscript", *shape.languages, *tasks]]
    return [*text, *special, *(f"<|{step * 0.02:.2f}|>" for step in range(TIMES))]


def _tokenizer(vocabulary: Sequence[str]) -> dict[str, Any]:
    tokenizer = _demo_tokenizer()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    numbers = tokenizer["model"]["vocab"]
    numbers[vocabulary[TEXT_TOKENS - 1]] = numbers.pop("<|endoftext|>")  # special tokens are numbered on from here
    tokenizer["added_tokens"] = [
        {"id": number, "content": vocabulary[number], **flags, "special": True}
        for number in range(TEXT_TOKENS, len(vocabulary) - TIMES)
    ]
    tokenizer["post_processor"] = None  # names tokens by their numbers in the demo model, and isn't used
    return tokenizer


def _script(vocabulary: Sequence[str]) -> list[int]:
    """For each of the decoder's positions the token that follows. Words that don't repeat pass as a good transcript."""
    words = [number for number, token in enumerate(vocabulary[:TEXT_TOKENS]) if token[1:].isalpha() and token[0] == "Ġ"]
    spoken = random.Random(1).sample(words, SPOKEN_WORDS)
    prompt = [vocabulary.index("<|en|>"), vocabulary.index("<|transcribe|>")]
    times = [vocabulary.index("<|0.00|>"), vocabulary.index(f"<|{SPOKEN_S:.2f}|>")]
    said = [*prompt, times[0], *spoken, times[1]]
    return said + [vocabulary.index("<|endoftext|>")] * (TEXT_POSITIONS - len(said))


# How.


class _Weights:
    """Seeded, in float16, scaled so that no layer drowns the sum that passes through all of them."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._random = np.random.default_rng(1)

    def fill(self, spec: WhisperSpec, shape: Shape, script: Sequence[int]) -> None:
        width = self._width
        self._conv(spec.encoder.conv1, shape.mels)
        self._conv(spec.encoder.conv2, width)
        spec.encoder.position_encodings.encodings = _sinusoids(AUDIO_POSITIONS, width)
        self._norm(spec.encoder.layer_norm)
        for layer in spec.encoder.layer:
            self._attention(layer.self_attention, [3 * width, width])
            self._feed_forward(layer.ffn)

        tokens = self._normal((shape.tokens, width), SURENESS / width)
        spec.decoder.embeddings.weight = spec.decoder.projection.weight = tokens  # one array, as in Whisper
        spec.decoder.position_encodings.encodings = tokens[script] * np.float16(LOUDNESS * width / SURENESS)
        self._norm(spec.decoder.layer_norm)
        for layer in spec.decoder.layer:
            self._attention(layer.self_attention, [3 * width, width])
            self._attention(layer.attention, [width, 2 * width, width])
            self._feed_forward(layer.ffn)

    def _attention(self, spec: Any, heights: Sequence[int]) -> None:
        self._norm(spec.layer_norm)
        for linear, height in zip(spec.linear, heights, strict=True):
            self._linear(linear, height, self._width)

    def _feed_forward(self, spec: Any) -> None:
        self._norm(spec.layer_norm)
        self._linear(spec.linear_0, 4 * self._width, self._width)
        self._linear(spec.linear_1, self._width, 4 * self._width)

    def _linear(self, spec: Any, height: int, width: int) -> None:
        spec.weight = self._normal((height, width))
        spec.bias = np.zeros(height, np.float16)

    def _conv(self, spec: Any, channels: int) -> None:
        spec.weight = self._normal((self._width, channels, 3))
        spec.bias = np.zeros(self._width, np.float16)

    def _norm(self, spec: Any) -> None:
        spec.gamma = np.ones(self._width, np.float16)
        spec.beta = np.zeros(self._width, np.float16)

    def _normal(self, shape: tuple[int, ...], scale: float = 0.02) -> NDArray[np.float16]:
        return (self._random.standard_normal(shape, np.float32) * np.float32(scale)).astype(np.float16)


def _sinusoids(length: int, width: int) -> NDArray[np.float16]:
    rates = np.exp(-np.log(10_000) / (width // 2 - 1) * np.arange(width // 2))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float16)
