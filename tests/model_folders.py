"""Folders that look like models on a disk, as far as can be told without loading them."""

from pathlib import Path

from whisper_worker.models import repository

COMMIT = "0" * 40
FILES = {"model.bin": b"\0\0\0\0", "config.json": b"{}", "tokenizer.json": b"{}\n", "vocabulary.txt": b"x"}


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def cache_model(cache: Path, name: str, commit: str = COMMIT) -> Path:
    """A size's or repository's snapshot in the layout of the Hugging Face cache, as RunPod's model cache has it too."""
    folder = cache / f"models--{repository(name).replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs/main").write_text(commit)
    return make_model(folder / "snapshots" / commit)
