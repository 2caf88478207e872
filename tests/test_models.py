"""From a model's name to its folder, with no hub but a silent one."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from faster_whisper import available_models, download_model
from file_server import Exchange, FileServer

from whisper_worker import models
from whisper_worker.errors import UnknownModel
from whisper_worker.models import (
    Catalog,
    Model,
    ModelFiles,
    ModelUnavailable,
    download,
    find,
    find_here,
    find_offered,
    repository,
)
from whisper_worker.settings import Settings, SettingsError

TURBO = "mobiuslabsgmbh/faster-whisper-large-v3-turbo"
QUESTION = "/api/models/Systran/faster-whisper-base"


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("model.bin", "config.json", "tokenizer.json", "vocabulary.txt"):
        (folder / name).write_bytes(b"x")
    return folder


def cache_model(cache: Path, repo: str) -> Path:
    """A snapshot in the layout of the Hugging Face cache, as RunPod's model cache has it."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("0" * 40)
    return make_model(folder / "snapshots" / ("0" * 40))


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever isn't found locally fails at once; the machine's own cache isn't looked at."""

    def offline(name: str, local_files_only: bool = False, cache_dir: str | None = None) -> str:
        assert local_files_only, "nobody asked whether the hub is there"
        return str(download_model(name, local_files_only=True, cache_dir=cache_dir or str(tmp_path / "own-cache")))

    monkeypatch.setattr(models, "download_model", offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """One that takes any question about base, and never answers."""
    with FileServer({QUESTION: Exchange.stall}) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url(""))
        yield hub


def test_the_demo_model_is_the_default_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert find(None) == find("bundled")
    assert find(None).name == "bundled"
    assert "event=demo_model" in caplog.text
    assert caplog.records[-1].levelname == "WARNING"


def test_without_the_demo_model_a_model_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "BUNDLED_PACKAGE", "no_such_package")
    with pytest.raises(ModelUnavailable, match="MODEL is not set"):
        find(None)
    with pytest.raises(ModelUnavailable, match="extra `bundled`"):
        find("bundled")


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "mine")
    assert find(str(folder)).folder == folder


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "mine")
    (folder / "model.bin").unlink()
    with pytest.raises(ModelUnavailable, match=r"lacks model\.bin"):
        find(str(folder))


@pytest.mark.parametrize("name", ["turbo", "large-v3-turbo", TURBO])
def test_runpods_model_cache_is_used_under_any_name_of_the_model(name: str, tmp_path: Path) -> None:
    folder = cache_model(tmp_path / "runpod", repository("turbo"))
    files = find(name, runpod_cache=tmp_path / "runpod")
    assert files.folder == folder
    assert files.name == name


def test_half_a_model_in_a_cache_is_passed_over(tmp_path: Path) -> None:
    (cache_model(tmp_path / "runpod", repository("base")) / "model.bin").unlink()
    whole = cache_model(tmp_path / "own-cache", repository("base"))
    assert find("base", runpod_cache=tmp_path / "runpod").folder == whole


def test_a_model_that_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        find("base", runpod_cache=tmp_path)
    assert re.fullmatch(r"the model 'base' can't be downloaded: Connect\w*Error", str(caught.value))


def test_a_hub_that_never_answers_is_noticed(silent_hub: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "HUB_ANSWERS_S", 0.1)
    with pytest.raises(ModelUnavailable, match=r"can't be downloaded: \w*Timeout$"):
        download(Model("base"))
    assert silent_hub.requests[QUESTION] == 1


def test_what_is_on_this_machine_is_told_without_the_hub(silent_hub: FileServer, tmp_path: Path) -> None:
    assert find_here(Model("base"), tmp_path / "runpod") is None
    folder = cache_model(tmp_path / "own-cache", repository("base"))
    assert find_here(Model("base"), tmp_path / "runpod") == ModelFiles("base", folder)
    assert not silent_hub.requests


def test_an_unknown_size_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"neither a folder nor one of tiny\.en, tiny, base\.en"):
        find("huge", runpod_cache=tmp_path)


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
    with pytest.raises(ModelUnavailable, match="can't be downloaded"):
        find_offered(offered.choose(name), runpod_cache=tmp_path)
    assert find(name).folder == tmp_path / name  # the operator may mean it


@pytest.mark.parametrize("models", ["huge", "base,huge", "/no/such/folder", "../x", "base,,tiny", "base,", ","])
def test_a_list_with_an_entry_that_is_no_model_ends_the_start(models: str) -> None:
    with pytest.raises(SettingsError, match=r"^MODELS[=:]") as caught:
        catalog(MODELS=models)
    assert "\n" not in str(caught.value)


def test_a_default_that_is_no_model_ends_the_start() -> None:
    with pytest.raises(ModelUnavailable, match="'huge' is neither a folder nor one of"):
        catalog(MODEL="huge")


# --- what a model can do


@pytest.mark.parametrize(
    ("name", "translates"),
    [
        ("base", True),
        ("large-v3", True),
        ("turbo", False),
        ("large-v3-turbo", False),
        (TURBO, False),
        ("distil-large-v3", False),
        ("distil-large-v3.5", False),
        ("Systran/faster-distil-whisper-large-v2", False),
        ("org/whisper-large-v3-turbo-german", False),
        ("distil-whisper/my-base", True),
        ("org/turbocharged", True),
    ],
)
def test_turbo_and_distilled_models_do_not_translate(name: str, translates: bool) -> None:
    assert ModelFiles(name, Path()).translates is translates


def test_distilled_sizes_know_english_only() -> None:
    english = {size for size in available_models() if ModelFiles(size, Path()).knows_english_only}
    assert english == {size for size in available_models() if size.startswith("distil-")}
    assert ModelFiles("Systran/faster-distil-whisper-large-v3", Path()).knows_english_only
    assert not ModelFiles("org/distil-whisper-german", Path()).knows_english_only


@pytest.mark.parametrize(
    ("config", "has_them"),
    [
        ('{"alignment_heads": [[1, 2]]}', True),
        ('{"alignment_heads": []}', False),
        ("{}", False),
        ("[]", False),
        ("x", False),
    ],
)
def test_alignment_heads_are_read_from_the_models_configuration(config: str, has_them: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert ModelFiles("mine", tmp_path).has_alignment_heads is has_them


def test_the_demo_model_has_alignment_heads() -> None:
    assert find("bundled").has_alignment_heads
