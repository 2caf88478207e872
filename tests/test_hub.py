"""Downloads of models from a hub on a loopback address, by the real process."""

import errno
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import Answer, Exchange, answer, head, in_turn
from huggingface_hub.errors import OfflineModeIsEnabled
from local_hub import COMMIT, LocalHub
from model_folders import FILES

from whisper_worker import hub, model_files
from whisper_worker.model_files import Store
from whisper_worker.models import Model, ModelUnavailable
from whisper_worker.settings import Settings
from whisper_worker.whole import check_whole

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
    assert Store("volume", tmp_path).snapshots(REPOSITORY) == [snapshot]


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


@pytest.mark.parametrize("name", ["model.bin", "config.json"])  # with a SHA-256, and with Git's name only
def test_bytes_that_are_not_the_hubs_are_thrown_away(
    name: str, local_hub: LocalHub, model_folder: Path, tmp_path: Path
) -> None:
    path = local_hub.paths[name]
    wrong = answer(200, bytes((model_folder / name).stat().st_size))
    local_hub.routes[path] = in_turn(wrong, local_hub.routes[path])
    hub.download("tiny.en", tmp_path, SOON_S)
    check_whole(tmp_path / SNAPSHOT)
    assert local_hub.requests[path] == 2
    assert (tmp_path / SNAPSHOT / name).read_bytes() == (model_folder / name).read_bytes()


def hiccup(exchange: Exchange) -> None:
    """A part of a file, and then the connection is reset."""
    exchange.send(head(200, "Content-Length: 75537502") + bytes(1_000_000))
    exchange.reset()


HICCUPS = {"503": answer(503), "429": answer(429), "a reset connection": hiccup, "no answer": lambda _: None}


@pytest.mark.parametrize("what", ["question", "model.bin"])
@pytest.mark.parametrize("trouble", HICCUPS.values(), ids=HICCUPS.keys())
def test_a_hiccup_of_the_hub_is_got_over(what: str, trouble: Answer, local_hub: LocalHub, tmp_path: Path) -> None:
    path = local_hub.paths.get(what, local_hub.question)
    local_hub.routes[path] = in_turn(trouble, local_hub.routes[path])
    hub.download("tiny.en", tmp_path, SOON_S)
    check_whole(tmp_path / SNAPSHOT)
    assert local_hub.requests[path] >= 2


def test_what_keeps_failing_is_given_up(
    local_hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", local_hub.url(""))
    monkeypatch.setattr(hub, "PAUSES_S", (0.01, 0.01))
    local_hub.routes[local_hub.question] = answer(503)
    with pytest.raises(SystemExit, match=r"^HfHubHTTPError: Server error '503"):
        hub.main(["tiny.en", str(tmp_path)])
    assert local_hub.requests[local_hub.question] == 3
    assert capsys.readouterr().err.count("another try in 0.01 s: HfHubHTTPError") == 2


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (
            401,
            "RepoNotFound",
            "there is no such repository on the hub, or it is private, and HF_TOKEN opens it to nobody",
        ),
        (403, "GatedRepo", "its repository is gated: ask for access to it on the hub, and set HF_TOKEN"),
    ],
)
def test_who_may_not_read_a_repository_is_told_what_to_do(
    status: int, error: str, said: str, local_hub: LocalHub, tmp_path: Path
) -> None:
    local_hub.routes[local_hub.question] = answer(status, b"", f"X-Error-Code: {error}")
    with pytest.raises(ModelUnavailable, match=rf"^the model 'tiny\.en' can't be downloaded: {said}"):
        hub.download("tiny.en", tmp_path, SOON_S)
    assert local_hub.requests[local_hub.question] == 1


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "of the right size"])
def test_a_broken_copy_in_the_place_for_downloads_is_mended(
    cut: bool, local_hub: LocalHub, model_folder: Path, tmp_path: Path
) -> None:
    """As the hub's own client has it: links to files elsewhere, one of which is broken."""
    store = Store("hugging_face_cache", tmp_path / "cache", under=tmp_path)
    snapshot = store.folder / SNAPSHOT
    shutil.copytree(model_folder, tmp_path / "blobs")
    name = "model.bin" if cut else "config.json"
    blob = tmp_path / "blobs" / name
    blob.write_bytes(blob.read_bytes()[:1000] if cut else bytes(blob.stat().st_size))
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text(COMMIT)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(path)
    assert model_files.find("tiny.en", Settings(), [store]).folder == snapshot
    assert (snapshot / name).read_bytes() == (model_folder / name).read_bytes()
    assert [file for file, path in local_hub.paths.items() if local_hub.requests[path]] == [name]


def test_more_than_there_is_on_the_hub_is_begun_anew(local_hub: LocalHub, model_folder: Path, tmp_path: Path) -> None:
    part = tmp_path / SNAPSHOT / "config.json.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(1_000_000))
    hub.download("tiny.en", tmp_path, SOON_S)
    assert (part.parent / "config.json").read_bytes() == (model_folder / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["README.md", "config.json", "model.safetensors", "tokenizer.json"], r"model\.bin and vocabulary\.\*"),
        (["config.json", "model.bin", "vocabulary.json"], r"tokenizer\.json"),
    ],
)
def test_a_repository_that_lacks_something_is_refused_before_it_is_downloaded(
    names: list[str], missing: str, local_hub: LocalHub, tmp_path: Path
) -> None:
    local_hub.routes[local_hub.question] = local_hub.about(dict.fromkeys(names, b"x"))
    with pytest.raises(ModelUnavailable, match=rf"tiny\.en lacks {missing}: it isn't a model in CTranslate2's format"):
        hub.download("tiny.en", tmp_path, SOON_S)
    assert local_hub.requests.keys() == {local_hub.question}


def test_nothing_outside_the_models_folder_is_written(local_hub: LocalHub, tmp_path: Path) -> None:
    local_hub.routes[local_hub.question] = local_hub.about({**FILES, "vocabulary./../../../../../evil.txt": b"x"})
    for name, content in FILES.items():
        local_hub.routes[local_hub.paths[name]] = answer(200, content)
    hub.download("tiny.en", tmp_path, SOON_S)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {*FILES, "main", "download.lock"}


def test_what_is_broken_on_the_hub_is_told_and_not_taken_for_a_model(local_hub: LocalHub, tmp_path: Path) -> None:
    files = {**FILES, "tokenizer.json": b'{"half": '}
    local_hub.routes[local_hub.question] = local_hub.about(files)
    for name, content in files.items():
        local_hub.routes[local_hub.paths[name]] = answer(200, content)
    with pytest.raises(ModelUnavailable, match=r"has only a part of tokenizer\.json"):
        hub.download("tiny.en", tmp_path, SOON_S)
    assert not list(tmp_path.glob("*/refs/main"))


def test_a_model_that_does_not_exist_is_one_line(local_hub: LocalHub, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"^the model 'org/none' can't be downloaded: \w+Error: [^\n]*$"):
        hub.download("org/none", tmp_path, SOON_S)


def test_a_download_that_takes_too_long_is_ended(local_hub: LocalHub, tmp_path: Path) -> None:
    local_hub.routes[local_hub.question] = Exchange.stall
    with pytest.raises(ModelUnavailable, match=r"wasn't downloaded within 2 s; another try goes on"):
        hub.download("tiny.en", tmp_path, 2)


NO_LOCKS = """
import errno, huggingface_hub.utils, sys
def no_lock(*_):
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")
huggingface_hub.utils.WeakFileLock = no_lock
from whisper_worker import hub
hub.main(sys.argv[1:])
"""


def test_where_locks_are_not_kept_two_processes_spoil_nothing_in_the_end(local_hub: LocalHub, tmp_path: Path) -> None:
    command = [sys.executable, "-c", NO_LOCKS, "tiny.en", str(tmp_path)]
    with subprocess.Popen(command, env=package_env()) as one, subprocess.Popen(command, env=package_env()) as other:
        assert [one.wait(SOON_S), other.wait(SOON_S)] == [0, 0]
    check_whole(tmp_path / SNAPSHOT)


ERRORS: dict[str, tuple[Exception, bool]] = {
    "told not to ask": (OfflineModeIsEnabled("HF_HUB_OFFLINE"), True),
    "no model": (ModelUnavailable("it lacks model.bin"), True),
    "a full disk": (OSError(errno.ENOSPC, "No space left on device"), True),
    "no right to write": (PermissionError(errno.EACCES, "Permission denied", "/models/x"), True),
    "put in its place by another": (FileNotFoundError(errno.ENOENT, "No such file", "x.incomplete"), False),
    "other bytes": (OSError("model.bin came with other bytes than the hub says it has"), False),
    "a reset connection": (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), False),
    "whatever a client raises": (RuntimeError("x"), False),
}


@pytest.mark.parametrize(("error", "is_final"), ERRORS.values(), ids=ERRORS.keys())
def test_what_another_try_would_meet_again_is_not_tried(error: Exception, is_final: bool) -> None:
    assert hub._is_final(error) is is_final


def test_how_far_a_download_is_stands_in_the_log(
    local_hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "whisper_worker")
    monkeypatch.setattr(hub, "PROGRESS_S", 0.05)
    hub.download("tiny.en", tmp_path, SOON_S)
    sizes = [int(size) for size in re.findall(r"event=model_downloading model=tiny\.en bytes=(\d+)", caplog.text)]
    assert sizes
    assert sizes == sorted(sizes)


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


def test_a_volume_that_cannot_be_written_to_is_named(
    local_hub: LocalHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume/models").write_text("x")  # root, who may run this, may write to all folders
    files = model_files.find("tiny.en", Settings(), stores(tmp_path))
    assert files.folder == tmp_path / "home/hub" / SNAPSHOT
    (warning,) = [record.getMessage() for record in caplog.records if "store_not_writable" in record.getMessage()]
    assert f"store=volume folder={tmp_path}/volume/models" in warning


def test_where_nothing_can_be_written_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    nowhere = [Store("hugging_face_cache", tmp_path / "file/hub", under=tmp_path), Store("image", tmp_path / "image")]
    with pytest.raises(ModelUnavailable, match="no folder to write it to; HF_HOME can name one"):
        model_files.find("tiny.en", Settings(), nowhere)


def test_without_permission_the_hub_is_not_asked(local_hub: LocalHub, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"'tiny\.en' isn't on this machine, and ALLOW_DOWNLOAD is false"):
        model_files.find("tiny.en", Settings(allow_download=False), stores(tmp_path))
    assert not local_hub.requests
