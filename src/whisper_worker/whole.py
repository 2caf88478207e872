"""Whether a folder holds a whole model, as far as that is told without reading all of it."""

import json
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from whisper_worker.models import ModelUnavailable

WEIGHTS = "model.bin"
FEATURES = "preprocessor_config.json"  # says how many mels: without it, faster-whisper takes them to be 80
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"  # without one, faster-whisper asks the hub
VOCABULARIES = ("vocabulary.json", "vocabulary.txt")  # one of them
NEEDED = (WEIGHTS, CONFIG, TOKENIZER, "vocabulary.*")  # from the hub
OPTIONAL = (FEATURES,)
LARGE_V3_MELS = 128  # all others have 80
KNOWN_FORMATS = range(4, 7)  # of the weights: versions of CTranslate2's file that `WeightsHead` can read
GIT_LFS_POINTER = int.from_bytes(b"vers", "little")  # a checkout without Git LFS has a text there, "version https…"


def check_whole(folder: Path) -> None:
    """Raises ModelUnavailable, which names the files that are missing or broken."""
    try:
        fault = _fault(folder)
    except OSError as error:
        raise ModelUnavailable(f"the model's folder {folder} can't be read: {error}") from error
    if fault:
        raise ModelUnavailable(f"the model's folder {folder} {fault}")


@dataclass(frozen=True)
class WeightsHead:
    """What a file of weights says of itself; zeros where it isn't told."""

    mels: int = 0
    tokens: int = 0  # of the vocabulary

    @classmethod
    def told_by(cls, file: BinaryIO) -> "WeightsHead | None":
        """None: it isn't all there."""
        with suppress(
            AttributeError, OSError
        ):  # a hint, where there is one: all of it is about to be read, not just this
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        shapes: dict[str, list[int]] = {}
        try:
            version = _number(file, "<I")
            if version not in KNOWN_FORMATS:
                return None if version == GIT_LFS_POINTER else cls()
            _text(file)  # what kind of model it is
            _number(file, "<I")  # which revision of that
            for _ in range(_number(file, "<I")):
                name = _text(file)
                shapes[name] = [_number(file, "<I") for _ in range(_number(file, "<B"))]
                _number(file, "<B")  # the type of its numbers
                file.seek(_number(file, "<I"), os.SEEK_CUR)
            for _ in range(2 * _number(file, "<I")):  # other names for some
                _text(file)
        except struct.error:  # it ends in the midst of something
            return None
        if file.tell() != os.fstat(file.fileno()).st_size:  # shorter, too: what hasn't come yet may be zeros
            return None
        convolution = [*shapes.get("encoder/conv1/weight", []), 0, 0]
        embeddings = [*shapes.get("decoder/embeddings/weight", []), 0]
        return cls(mels=convolution[1], tokens=embeddings[0])


def _fault(folder: Path) -> str | None:
    """What is wrong with it, in words that follow its name. Raises OSError."""
    if missing := _missing(folder):
        return f"lacks {' and '.join(missing)}"
    with (folder / WEIGHTS).open("rb") as file:
        weights = WeightsHead.told_by(file)
    if broken := _broken(folder, weights):
        return f"has only a part of {' and '.join(broken)}"
    if weights and weights.mels == LARGE_V3_MELS and _feature_size(folder) != LARGE_V3_MELS:
        return f"lacks {FEATURES} with a feature_size of {weights.mels}"
    return None


def _missing(folder: Path) -> list[str]:
    missing = [name for name in (WEIGHTS, CONFIG, TOKENIZER) if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in VOCABULARIES):
        missing.append(VOCABULARIES[0])
    return missing


def _broken(folder: Path, weights: WeightsHead | None) -> list[str]:
    vocabulary = next(folder / name for name in VOCABULARIES if (folder / name).is_file())
    is_broken = {
        CONFIG: not isinstance(_json_in(folder / CONFIG), dict),
        TOKENIZER: not _ends_with_brace(folder / TOKENIZER),  # to parse it would hold up the other threads' imports
        WEIGHTS: weights is None,
        vocabulary.name: weights is not None and _count_tokens(vocabulary) < weights.tokens,
    }
    return [name for name, broken in is_broken.items() if broken]


def _feature_size(folder: Path) -> int | None:
    features = _json_in(folder / FEATURES) if (folder / FEATURES).is_file() else None
    return features.get("feature_size") if isinstance(features, dict) else None


def _count_tokens(vocabulary: Path) -> int:
    """0 in one that can't be read."""
    if vocabulary.suffix == ".json":
        tokens = _json_in(vocabulary)
        return len(tokens) if isinstance(tokens, list) else 0
    return vocabulary.read_bytes().count(b"\n")


def _ends_with_brace(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-min(100, path.stat().st_size), os.SEEK_END)
        return file.read().rstrip().endswith(b"}")


def _json_in(path: Path) -> Any:
    """None for what is none."""
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def _text(file: BinaryIO) -> str:
    length = _number(file, "<H")
    (text,) = struct.unpack(f"{length}s", file.read(length))
    return bytes(text).rstrip(b"\0").decode(errors="replace")


def _number(file: BinaryIO, kind: str) -> int:
    number: int = struct.unpack(kind, file.read(struct.calcsize(kind)))[0]
    return number
