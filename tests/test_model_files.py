"""Where a model's files are, whether they are whole, and what a model can do by them."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import huggingface_hub
import pytest
from faster_whisper import available_models
from media import CLIP, CLIP_WORDS
from model_folders import COMMIT, cache_model, make_model
from worker_process import run_handler

from whisper_worker import model_files, whole
from whisper_worker.model_files import STORES, ModelFiles, Store, find, find_here
from whisper_worker.models import Model, ModelUnavailable
from whisper_worker.settings import Settings
from whisper_worker.whole import check_whole

TURBO = "mobiuslabsgmbh/faster-whisper-large-v3-turbo"
NO_HUB = Settings(allow_download=False)
NAMES = ["runpod_cache", "image", "hugging_face_cache", "volume"]


@pytest.fixture
def stores(tmp_path: Path) -> list[Store]:
    """All of them, empty, and none that takes downloads."""
    return [Store(store.name, tmp_path / store.name) for store in STORES]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(find("bundled").folder, tmp_path / "copy"))


# --- where


def test_the_demo_model_is_the_default_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert find(None) == find("bundled")
    assert find(None).name == "bundled"
    assert "event=demo_model" in caplog.text
    assert caplog.records[-1].levelname == "WARNING"


def test_without_the_demo_model_a_model_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "BUNDLED_PACKAGE", "no_such_package")
    with pytest.raises(ModelUnavailable, match="MODEL is not set"):
        find(None)
    with pytest.raises(ModelUnavailable, match="extra `bundled`"):
        find("bundled")


def test_a_folder_is_taken_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "whisper_worker")
    folder = make_model(tmp_path / "mine")
    assert find(str(folder)).folder == folder
    assert "event=model_source model=mine source=folder found=True seconds=" in caplog.text


def test_the_stores_are_looked_at_in_their_order(stores: list[Store], caplog: pytest.LogCaptureFixture) -> None:
    assert [store.name for store in stores] == NAMES
    caplog.set_level("INFO", "whisper_worker")
    for store in reversed(stores):  # each goes before those that had it so far
        folder = cache_model(store.folder, "base")
        caplog.clear()
        assert find("base", NO_HUB, stores) == ModelFiles("base", folder)
        looks = [record.getMessage() for record in caplog.records]
        last = NAMES.index(store.name)
        assert [look.rpartition(" seconds=")[0] for look in looks] == [
            f"event=model_source model=base source={name} found={number == last}"
            for number, name in enumerate(NAMES[: last + 1])
        ]


@pytest.mark.parametrize("name", ["turbo", "large-v3-turbo", TURBO])
@pytest.mark.parametrize("number", range(len(NAMES)))
def test_a_model_is_found_under_any_of_its_names_everywhere(name: str, number: int, stores: list[Store]) -> None:
    folder = cache_model(stores[number].folder, TURBO)
    assert find(name, NO_HUB, stores) == ModelFiles(name, folder)


def test_refs_main_says_which_snapshot(stores: list[Store]) -> None:
    cache_model(stores[0].folder, "base", "1" * 40)
    folder = cache_model(stores[0].folder, "base", "2" * 40)
    newest = cache_model(stores[0].folder, "base", "3" * 40)
    ref = folder.parent.parent / "refs/main"
    ref.write_text("2" * 40 + "\n")
    assert find("base", NO_HUB, stores).folder == folder
    ref.unlink()
    os.utime(folder, (1, 1))
    os.utime(folder.parent / ("1" * 40), (2, 2))
    assert find("base", NO_HUB, stores).folder == newest


@pytest.mark.parametrize("ref", [b"9" * 40, b"2" * 40, b"\xff\xfe", b""])
def test_where_refs_main_leads_nowhere_a_whole_snapshot_beside_it_is_taken(
    ref: bytes, stores: list[Store], caplog: pytest.LogCaptureFixture
) -> None:
    whole = cache_model(stores[0].folder, "base", "1" * 40)
    (cache_model(stores[0].folder, "base", "2" * 40) / "tokenizer.json").unlink()
    (whole.parent.parent / "refs/main").write_bytes(ref)
    assert find("base", NO_HUB, stores).folder == whole
    assert "event=model_broken model=base source=runpod_cache" in caplog.text


def test_what_is_being_downloaded_is_not_called_broken(stores: list[Store], caplog: pytest.LogCaptureFixture) -> None:
    snapshot = cache_model(stores[3].folder, "base")
    (snapshot.parent.parent / "refs/main").unlink()
    (snapshot / "model.bin").rename(snapshot / "model.bin.incomplete")
    assert find_here(Model("base"), stores) is None
    assert "model_broken" not in caplog.text


def test_what_the_hubs_own_client_has_cached_is_found(stores: list[Store], weights: Path) -> None:
    """Its snapshots are links to files elsewhere."""
    cache = stores[2].folder
    folder = cache_model(cache, "tiny.en")
    for path in weights.iterdir():
        (blob := folder.parent.parent / "blobs" / path.name).parent.mkdir(exist_ok=True)
        path.rename(blob)
        (folder / path.name).unlink(missing_ok=True)
        (folder / path.name).symlink_to(Path("../../blobs") / path.name)
    theirs = huggingface_hub.snapshot_download("Systran/faster-whisper-tiny.en", cache_dir=cache, local_files_only=True)
    assert find("tiny.en", NO_HUB, stores).folder == Path(theirs) == folder


def test_none_is_found_where_there_is_none(stores: list[Store], tmp_path: Path) -> None:
    assert find_here(Model("base"), stores) is None
    (tmp_path / "image").write_text("a file")
    assert find_here(Model("base"), stores) is None


# --- whole


BROKEN = {
    "no weights": ("model.bin", None, r"lacks model\.bin"),
    "half the weights": ("model.bin", 0.5, r"has only a part of model\.bin"),
    "the weights but for their last byte": ("model.bin", -1, r"has only a part of model\.bin"),
    "no configuration": ("config.json", None, r"lacks config\.json"),
    "half a configuration": ("config.json", 0.5, r"has only a part of config\.json"),
    "an empty configuration": ("config.json", 0, r"has only a part of config\.json"),
    "no tokenizer": ("tokenizer.json", None, r"lacks tokenizer\.json"),
    "half a tokenizer": ("tokenizer.json", 0.5, r"has only a part of tokenizer\.json"),
    "half a vocabulary": ("vocabulary.txt", 0.5, r"has only a part of vocabulary\.txt"),
    "no vocabulary": ("vocabulary.txt", None, r"lacks vocabulary\.json"),
}


@pytest.mark.parametrize(("name", "keep", "said"), BROKEN.values(), ids=BROKEN.keys())
def test_half_a_model_is_told_before_it_is_used(name: str, keep: float | None, said: str, weights: Path) -> None:
    check_whole(weights)
    path = weights / name
    data = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(data[:keep] if isinstance(keep, int) else data[: int(len(data) * keep)])
    with pytest.raises(ModelUnavailable, match=said):
        find(str(weights))


@pytest.mark.parametrize("features", [None, b"{", b"[]", b"{}", b'{"feature_size": 80}'])
def test_a_model_of_the_third_generation_must_say_how_many_mels_it_takes(
    features: bytes | None, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "LARGE_V3_MELS", 80)  # so that the demo model is one
    if features != b'{"feature_size": 80}':
        if features is not None:
            (weights / "preprocessor_config.json").write_bytes(features)
        with pytest.raises(ModelUnavailable, match=r"lacks preprocessor_config\.json with a feature_size of 80"):
            check_whole(weights)
        return
    (weights / "preprocessor_config.json").write_bytes(features)
    check_whole(weights)


def test_a_vocabulary_in_json_is_counted_too(weights: Path) -> None:
    words = (weights / "vocabulary.txt").read_text().splitlines()
    (weights / "vocabulary.txt").unlink()
    (weights / "vocabulary.json").write_text(json.dumps(words))
    check_whole(weights)
    for text in (json.dumps(words[:-1]), json.dumps(words)[:-10], "{}"):
        (weights / "vocabulary.json").write_text(text)
        with pytest.raises(ModelUnavailable, match=r"only a part of vocabulary\.json"):
            check_whole(weights)


def test_a_pointer_of_git_lfs_is_no_file_of_weights(weights: Path) -> None:
    (weights / "model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 75537502\n")
    with pytest.raises(ModelUnavailable, match=r"has only a part of model\.bin"):
        check_whole(weights)


@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_weights_of_the_right_size_with_zeros_for_what_has_not_come_are_a_part(part: float, weights: Path) -> None:
    data = (weights / "model.bin").read_bytes()
    come = data[: int(len(data) * part)]
    (weights / "model.bin").write_bytes(come + bytes(len(data) - len(come)))
    with pytest.raises(ModelUnavailable, match=r"has only a part of model\.bin"):
        check_whole(weights)


def test_weights_in_a_format_of_another_age_are_left_to_the_library(weights: Path) -> None:
    data = bytearray((weights / "model.bin").read_bytes()[:1000])
    data[0] = 99
    (weights / "model.bin").write_bytes(data)
    check_whole(weights)


def test_a_broken_copy_is_named_and_passed_over(stores: list[Store], caplog: pytest.LogCaptureFixture) -> None:
    (cache_model(stores[0].folder, "base") / "model.bin").unlink()
    (cache_model(stores[1].folder, "base") / "tokenizer.json").write_text('{"half": ')
    whole = cache_model(stores[3].folder, "base")
    assert find("base", NO_HUB, stores).folder == whole
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "event=model_broken model=base source=runpod_cache" in warnings[0]
    assert "lacks model.bin" in warnings[0]
    assert "source=image" in warnings[1]
    assert "only a part of tokenizer.json" in warnings[1]


def test_a_snapshot_that_is_named_but_gone_is_broken(stores: list[Store], caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(cache_model(stores[0].folder, "base"))
    assert find_here(Model("base"), stores) is None
    assert f"snapshots/{COMMIT} lacks model.bin" in caplog.text


# --- without a network


OFFLINE = """
import runpy, sys
def forbid(event, arguments):
    network = event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
    if network or (event == "subprocess.Popen" and "whisper_worker.hub" in arguments[1]):
        print("NETWORK:", event, arguments, flush=True)
        raise OSError("no network")
sys.addaudithook(forbid)
sys.argv[:] = sys.argv[1:]
runpy.run_path("handler.py", run_name="__main__")
"""


def run_offline(home: Path, *, model: str, asked: str | None = None) -> "subprocess.CompletedProcess[str]":
    job = json.dumps({"input": {"audio": str(CLIP), **({"model": asked} if asked else {})}})
    program = ("-c", OFFLINE, "handler.py")
    return run_handler("--test_input", job, program=program, MODEL=model, MODELS="*", HF_HOME=str(home))


@pytest.mark.parametrize(
    ("model", "asked"),
    [("tiny.en", None), ("Systran/faster-whisper-tiny.en", None), ("bundled", None), ("bundled", "tiny.en")],
)
def test_no_network_is_asked_for_when_the_files_are_here(
    model: str, asked: str | None, weights: Path, tmp_path: Path
) -> None:
    cached = cache_model(tmp_path / "home/hub", "tiny.en")
    shutil.rmtree(cached)
    weights.rename(cached)
    done = run_offline(tmp_path / "home", model=model, asked=asked)
    assert done.returncode == 0, done.stderr
    assert CLIP_WORDS in done.stdout.lower()
    assert "NETWORK:" not in done.stdout
    source = "package" if (asked or model) == "bundled" else "hugging_face_cache"
    assert f"model={asked or model} source={source} found=True" in done.stderr


def test_otherwise_it_is_and_the_test_above_would_see_it(tmp_path: Path) -> None:
    done = run_offline(tmp_path, model="tiny.en")
    assert done.returncode == 1
    assert "NETWORK: subprocess.Popen" in done.stdout


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
