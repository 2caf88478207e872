"""Which models callers may name, and what their names mean."""

from pathlib import Path

import pytest
from faster_whisper import available_models
from model_folders import make_model

from whisper_worker.errors import UnknownModel
from whisper_worker.model_files import ModelFiles, find, find_offered
from whisper_worker.models import Catalog, Model, ModelUnavailable, repository
from whisper_worker.settings import Settings, SettingsError

TURBO = "mobiuslabsgmbh/faster-whisper-large-v3-turbo"
NO_HUB = Settings(allow_download=False)


def test_an_unknown_size_is_refused_with_those_there_are() -> None:
    with pytest.raises(ModelUnavailable, match=r"neither a folder nor one of tiny\.en, tiny, base\.en"):
        find("huge")


@pytest.mark.parametrize("size", available_models())
def test_all_sizes_of_faster_whisper_are_known(size: str) -> None:
    assert "/" in repository(size)


# --- the catalog


def catalog(**env: str) -> Catalog:
    return Catalog.from_settings(Settings.from_env(env))


def test_a_worker_offers_its_model_alone_unless_told_otherwise() -> None:
    assert catalog().choose(None) == catalog().choose("bundled") == Model("bundled")
    for name in ("base", "org/name"):
        with pytest.raises(UnknownModel, match=f"no '{name}' here; this worker offers bundled$"):
            catalog().choose(name)


@pytest.mark.parametrize("own", ["turbo", "large-v3-turbo", TURBO])
@pytest.mark.parametrize("asked", ["turbo", "large-v3-turbo", TURBO])
def test_all_names_of_a_repository_are_one_model_under_the_operators_name(own: str, asked: str) -> None:
    assert catalog(MODEL=own).choose(asked) == Model(own)
    assert catalog(MODEL="base", MODELS=f"tiny, {own}, turbo").choose(asked) == Model(own)


def test_where_any_model_is_allowed_all_names_of_one_are_one_model_too() -> None:
    assert len({catalog(MODELS="*").choose(name) for name in ("turbo", "large-v3-turbo", TURBO)}) == 1
    assert catalog(MODELS="*").choose("org/name.v2") == Model("org/name.v2")
    assert catalog(MODEL="base", MODELS="*").choose("bundled") == Model("bundled")


def test_a_listed_model_may_be_named_and_no_other() -> None:
    offered = catalog(MODEL="base", MODELS="org/name,small")
    assert offered.choose("org/name") == Model("org/name")
    with pytest.raises(UnknownModel, match=r"no 'medium' here; this worker offers base, org/name, small$"):
        offered.choose("medium")


def test_a_folder_is_called_by_its_name_which_tells_nothing_of_where_it_is(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "mine")
    offered = catalog(MODELS=f"*,{folder}/")
    assert find_offered(offered.choose("mine")) == ModelFiles("mine", folder)
    for name in (str(folder), f"{folder}/", f"{tmp_path}/./mine"):
        with pytest.raises(UnknownModel) as caught:
            offered.choose(name)
        assert str(tmp_path) not in str(caught.value).partition("here; ")[2]


def test_two_models_of_one_name_end_the_start(tmp_path: Path) -> None:
    folders = [make_model(tmp_path / parent / "base") for parent in ("a", "b")]
    for entries in (f"{folders[0]},{folders[1]}", f"base,{folders[0]}"):
        with pytest.raises(SettingsError, match=r"^MODELS: two models are called base"):
            catalog(MODELS=entries)
    assert catalog(MODEL=str(folders[0]), MODELS=f"{folders[0]},tiny").others == (Model("tiny"),)


OUTSIDE = ["../x", "/etc", "./x", ".", "~", "~/x", "a/../b", "a/b/c", "org/", "/name", "org/..", "org/a..b", "org/a--b"]
OUTSIDE += [
    "org/x.git",
    "org/name\n",
    "org/n\u00e4me",
    "org/n ame",
    "huge",
    "",
    " base",
    "*",
    "org/" + "x" * 97,
    "C:\\x/y",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_where_any_model_is_allowed_a_path_is_none(name: str) -> None:
    with pytest.raises(UnknownModel, match=r"tiny\.en, tiny, .*and any CTranslate2 repository"):
        catalog(MODELS="*").choose(name)


@pytest.mark.parametrize("name", ["src/foo", "base"])
def test_a_callers_name_is_never_taken_for_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    offered = catalog(MODELS="*")
    make_model(tmp_path / name)
    with pytest.raises(ModelUnavailable, match="isn't on this machine"):
        find_offered(offered.choose(name), NO_HUB, stores=())
    assert find(name).folder == tmp_path / name  # the operator may mean it


@pytest.mark.parametrize("models", ["huge", "base,huge", "/no/such/folder", "../x", "base,,tiny", "base,", ","])
def test_a_list_with_an_entry_that_is_no_model_ends_the_start(models: str) -> None:
    with pytest.raises(SettingsError, match=r"^MODELS[=:]") as caught:
        catalog(MODELS=models)
    assert "\n" not in str(caught.value)


def test_a_default_that_is_no_model_ends_the_start() -> None:
    with pytest.raises(ModelUnavailable, match="'huge' is neither a folder nor one of"):
        catalog(MODEL="huge")
