"""What a worker needs besides its model, checked before it takes a job. Each failure is one line for the operator."""

import ctypes
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from whisper_worker.settings import Settings

CUBLAS = "libcublas.so.12"  # CTranslate2 loads it by this name, but only when the first matrices are multiplied


class Unfit(RuntimeError):
    """The worker can't work here."""


def check_temp_space(settings: Settings) -> None:
    """Downloads are kept in the folder for temporary files: there must be room for at least the largest."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
    except OSError as error:
        raise Unfit(f"no temporary file can be written: {error}; TMPDIR names another folder") from error
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < settings.max_download_bytes:
        raise Unfit(
            f"{folder} has {free / 1e9:.2f} GB free, less than one download may take: MAX_DOWNLOAD_BYTES is "
            f"{settings.max_download_bytes / 1e9:.2f} GB"
        )


def is_made_writable(folder: Path) -> bool:
    """Whether there is such a folder now, made if need be, in which files can be written."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder.is_dir() and os.access(folder, os.W_OK)


def check_cublas(device: str) -> None:
    if device != "cuda":
        return
    try:
        ctypes.CDLL(CUBLAS)
    except OSError as error:
        raise Unfit(f"{CUBLAS} can't be loaded, and CTranslate2 needs it on a GPU: {error}") from error
