"""Downloads of models from a hub on a loopback address, by the real process."""

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import Exchange, answer
from local_hub import COMMIT, LocalHub

from whisper_worker import hub, model_files
from whisper_worker.model_files import Store, check_whole
from whisper_worker.models import Model, ModelUnavailable
from whisper_worker.settings import Settings

REPOSITORY = "Systran/faster-whisper-tiny.en"
SNAPSHOT = f"models--Systran--faster-whisper-tiny.en/snapshots/{COMMIT}"
SOON_S = 60


def package_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(hub.ROOT)}


def process(*arguments: object) -> "subprocess.Popen[bytes]":
    """Downloads as an image's build does."""
    return subprocess.Popen([sys.executable, "-m", "whisper_worker.hub", *map(str, arguments)], env=package_env())


@pytest.fixture(scope="module")
def model_folder() -> Path:
    return model_files.find("bundled").folder


@pytest.fixture
def local_hub(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with LocalHub(REPOSITORY, model_folder) as hub:
        for key, value in hub.env.items():
            monkeypatch.setenv(key, value)
        yield hub


def test_a_download_has_the_hubs_files_and_can_be_loaded(
    local_hub: LocalHub, model_folder: Path, tmp_path: Path
) -> None:
    hub.download("tiny.en", tmp_path, SOON_S)
    snapshot = tmp_path / SNAPSHOT
    check_whole(snapshot)
    assert {path.name for path in snapshot.iterdir()} == {path.name for path in model_folder.iterdir()}
    for path in snapshot.iterdir():
        assert path.read_bytes() == (model_folder / path.name).read_bytes()
    assert Store("volume", tmp_path).snapshot(REPOSITORY) == snapshot


def test_what_is_there_is_not_downloaded_again(local_hub: LocalHub, tmp_path: Path) -> None:
    for _ in range(2):
        hub.download("tiny.en", tmp_path, SOON_S)
    assert {local_hub.requests[path] for path in local_hub.paths.values()} == {1}


def test_a_download_that_was_broken_off_goes_on_where_it_ended(local_hub: LocalHub, tmp_path: Path) -> None:
    sent = local_hub.stop_after("model.bin", 40_000_000)  # it is written in parts of ten
    with process("tiny.en", tmp_path) as download:
        assert sent.wait(SOON_S)
        download.kill()
    assert not (tmp_path / SNAPSHOT / "model.bin").exists()
    begun = (tmp_path / SNAPSHOT / "model.bin.incomplete").stat().st_size
    assert begun
    assert model_files.find_here(Model("tiny.en"), [Store("volume", tmp_path)]) is None, "half a model is none"
    hub.download("tiny.en", tmp_path, SOON_S)
    check_whole(tmp_path / SNAPSHOT)
    assert local_hub.received[local_hub.paths["model.bin"]][-1].headers["range"] == f"bytes={begun}-"
    assert not list(tmp_path.rglob("*.incomplete"))


def test_bytes_that_are_not_the_hubs_are_thrown_away(local_hub: LocalHub, model_folder: Path, tmp_path: Path) -> None:
    for name in ("model.bin", "config.json"):  # with a SHA-256, and with Git's name only
        path = local_hub.paths[name]
        good = local_hub.routes[path]
        local_hub.routes[path] = answer(200, bytes((model_folder / name).stat().st_size))
        with pytest.raises(ModelUnavailable, match=rf"{name} came with other bytes than the hub says it has"):
            hub.download("tiny.en", tmp_path, SOON_S)
        assert not (tmp_path / SNAPSHOT / f"{name}.incomplete").exists()
        assert not (tmp_path / SNAPSHOT).parent.parent.joinpath("refs/main").exists()
        local_hub.routes[path] = good
    hub.download("tiny.en", tmp_path, SOON_S)
    check_whole(tmp_path / SNAPSHOT)


def test_a_broken_copy_in_the_place_for_downloads_is_mended(
    local_hub: LocalHub, model_folder: Path, tmp_path: Path
) -> None:
    """As the hub's own client has it: links to files elsewhere, one of which was cut."""
    store = Store("hugging_face_cache", tmp_path / "cache", under=tmp_path)
    snapshot = store.folder / SNAPSHOT
    shutil.copytree(model_folder, tmp_path / "blobs")
    os.truncate(tmp_path / "blobs/model.bin", 1_000_000)
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text(COMMIT)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(path)
    assert model_files.find("tiny.en", Settings(), [store]).folder == snapshot
    assert (snapshot / "model.bin").read_bytes() == (model_folder / "model.bin").read_bytes()
    assert [name for name, path in local_hub.paths.items() if local_hub.requests[path]] == ["model.bin"]


def test_more_than_there_is_on_the_hub_is_begun_anew(local_hub: LocalHub, model_folder: Path, tmp_path: Path) -> None:
    part = tmp_path / SNAPSHOT / "config.json.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(1_000_000))
    hub.download("tiny.en", tmp_path, SOON_S)
    assert (part.parent / "config.json").read_bytes() == (model_folder / "config.json").read_bytes()


def test_a_repository_without_weights_is_named(local_hub: LocalHub, tmp_path: Path) -> None:
    local_hub.routes[local_hub.question] = local_hub.about({"README.md": b"x", "model.safetensors": b"x"})
    with pytest.raises(ModelUnavailable, match=r"tiny\.en has no model\.bin: it isn't a model in CTranslate2's format"):
        hub.download("tiny.en", tmp_path, SOON_S)


def test_nothing_outside_the_models_folder_is_written(local_hub: LocalHub, tmp_path: Path) -> None:
    files = {"model.bin": b"x", "vocabulary./../../../../../evil.txt": b"x"}
    local_hub.routes[local_hub.question] = local_hub.about(files)
    local_hub.routes[local_hub.paths["model.bin"]] = answer(200, b"x")
    hub.download("tiny.en", tmp_path, SOON_S)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"model.bin", "main", "download.lock"}


def test_a_model_that_does_not_exist_is_one_line(local_hub: LocalHub, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"^the model 'org/none' can't be downloaded: \w+Error: [^\n]*$"):
        hub.download("org/none", tmp_path, SOON_S)


def test_a_download_that_takes_too_long_is_ended(local_hub: LocalHub, tmp_path: Path) -> None:
    local_hub.routes[local_hub.question] = Exchange.stall
    with pytest.raises(
        ModelUnavailable, match=r"wasn't downloaded within 2 s; another try goes on where this one ended"
    ):
        hub.download("tiny.en", tmp_path, 2)


def test_two_processes_download_it_once(local_hub: LocalHub, tmp_path: Path) -> None:
    with process("tiny.en", tmp_path) as one, process("tiny.en", tmp_path) as other:
        assert [one.wait(SOON_S), other.wait(SOON_S)] == [0, 0]
    assert {local_hub.requests[path] for path in local_hub.paths.values()} == {1}


def test_a_download_ends_with_the_worker(local_hub: LocalHub, tmp_path: Path) -> None:
    path = local_hub.paths["model.bin"]
    local_hub.routes[path] = Exchange.stall
    code = "import sys, pathlib; from whisper_worker import hub; hub.download('tiny.en', pathlib.Path(sys.argv[1]), 60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=package_env()) as worker:
        local_hub.wait_for_request(path)
        (child,) = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        download = os.pidfd_open(int(child))
        worker.kill()
    try:
        assert select.select([download], [], [], SOON_S)[0], "the download goes on"
    finally:
        os.close(download)


@pytest.mark.parametrize("name", ["huge", "bundled", "../x"])
def test_only_what_the_hub_can_have_is_baked(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        hub.main([name, str(tmp_path)])
    assert "is no model on the hub" in capsys.readouterr().err


# --- where downloads go


def stores(tmp_path: Path) -> tuple[Store, ...]:
    volume = tmp_path / "volume"
    return (
        Store("hugging_face_cache", tmp_path / "home/hub", under=tmp_path),
        Store("volume", volume / "models", under=volume),
    )


@pytest.mark.parametrize("has_volume", [True, False])
def test_a_model_is_downloaded_to_the_volume_if_there_is_one(
    has_volume: bool, local_hub: LocalHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if has_volume:
        (tmp_path / "volume").mkdir()
    caplog.set_level("INFO", "whisper_worker")
    files = model_files.find("tiny.en", Settings(), stores(tmp_path))
    assert files.folder == tmp_path / ("volume/models" if has_volume else "home/hub") / SNAPSHOT
    assert "source=hub found=True" in caplog.text
    found = model_files.find("tiny.en", Settings(allow_download=False), stores(tmp_path))
    assert found == files
    assert local_hub.requests[local_hub.question] == 1


def test_where_nothing_can_be_written_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    nowhere = [Store("hugging_face_cache", tmp_path / "file/hub", under=tmp_path), Store("image", tmp_path / "image")]
    with pytest.raises(ModelUnavailable, match="no folder to write it to; HF_HOME can name one"):
        model_files.find("tiny.en", Settings(), nowhere)


def test_without_permission_the_hub_is_not_asked(local_hub: LocalHub, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"'tiny\.en' isn't on this machine, and ALLOW_DOWNLOAD is false"):
        model_files.find("tiny.en", Settings(allow_download=False), stores(tmp_path))
    assert not local_hub.requests
