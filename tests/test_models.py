"""From a model's name to its folder, without a hub in reach."""

from pathlib import Path

import pytest
from faster_whisper import available_models, download_model

from whisper_worker import models
from whisper_worker.models import ModelUnavailable, find, repository


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
        if not local_files_only:
            raise ConnectionError("no hub")
        return str(download_model(name, local_files_only=True, cache_dir=cache_dir or str(tmp_path / "own-cache")))

    monkeypatch.setattr(models, "download_model", offline)


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


@pytest.mark.parametrize("name", ["turbo", "large-v3-turbo", "mobiuslabsgmbh/faster-whisper-large-v3-turbo"])
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
    assert str(caught.value) == "MODEL='base' can't be downloaded: ConnectionError"


def test_an_unknown_size_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"neither a folder nor one of tiny\.en, tiny, base\.en"):
        find("huge", runpod_cache=tmp_path)


@pytest.mark.parametrize("size", available_models())
def test_all_sizes_of_faster_whisper_are_known(size: str) -> None:
    assert "/" in repository(size)
