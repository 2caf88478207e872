"""The models and recordings that tests share; those that a machine lacks are skipped by name."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import multilingual as multilingual_model
import pytest
from local_endpoint import LocalEndpoint

from whisper_worker.engine import Engine
from whisper_worker.model_files import ModelFiles, find
from whisper_worker.settings import Settings, Threads

ROOT = Path(__file__).parent.parent
RECORDINGS = ROOT.parent / "shared/audio"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[LocalEndpoint]:
    with LocalEndpoint() as server:
        yield server


@pytest.fixture(scope="session")
def english() -> Engine:
    """The embedded demo model, tiny.en."""
    return load(find("bundled"))


@pytest.fixture(scope="session")
def multilingual() -> Engine:
    """Multilingual Whisper base."""
    return load(ModelFiles("base", find_multilingual()))


def find_multilingual() -> Path:
    folder = multilingual_model.find()
    if folder is None:
        pytest.skip("no multilingual test model: scripts/fetch-test-model installs it")
    return folder


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
