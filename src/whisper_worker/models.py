"""Which models callers may name, and what their names mean. Only the operator's can mean a folder."""

import re
from dataclasses import dataclass
from pathlib import Path

from faster_whisper.utils import _MODELS  # the library's own table of sizes has no public name

from whisper_worker.errors import UnknownModel
from whisper_worker.settings import Settings, SettingsError

REPOSITORIES: dict[str, str] = _MODELS
ANY = "*"
BUNDLED = "bundled"

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
    return REPOSITORIES.get(name, name)
