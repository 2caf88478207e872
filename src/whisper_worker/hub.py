"""The model hub: a model's files → a folder of this machine, by a process of its own.

A process can be ended in time; a thread that waits for a silent or slow server can't. `python -m whisper_worker.hub
NAME FOLDER` is that process, and how a model gets into an image.

Files lie there as in the Hugging Face cache, but without links: `models--org--name/snapshots/COMMIT/…`. `refs/main`
names a commit only once all of its files are there, with the digests that the hub tells: half a model is never found.
Of a download that was broken off the next one takes what there is, `….incomplete`.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from whisper_worker import log
from whisper_worker.models import BUNDLED, ModelUnavailable, is_public, repository

FILES = ("config.json", "model.bin", "preprocessor_config.json", "tokenizer.json", "vocabulary.*")
ANSWERS_S = 10.0  # longest time until the hub answers, or between two parts of a file
ROOT = Path(__file__).parent.parent  # the package needn't be installed
SHA256_DIGITS = 64


def download(name: str, cache: Path, timeout_s: float) -> None:
    """A size's or repository's files, into `cache`. Takes at most `timeout_s`, in which it may wait for another process
    that does the same. Raises ModelUnavailable."""
    started = time.monotonic()
    log.event("model_download", model=name, repository=repository(name))
    command = [sys.executable, "-m", __name__, "--parent", str(os.getpid()), name, str(cache)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    try:
        done = subprocess.run(  # noqa: S603
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelUnavailable(
            f"the model {name!r} wasn't downloaded within {timeout_s:g} s; another try goes on where this one ended"
        ) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"the download ended with code {done.returncode}"])[-1]
        raise ModelUnavailable(f"the model {name!r} can't be downloaded: {reason}")
    log.event("model_downloaded", model=name, seconds=time.monotonic() - started)


def folder_name(name: str) -> str:
    """Of a size's or repository's folder in a cache."""
    return f"models--{repository(name).replace('/', '--')}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The process. What went wrong is the last line on stderr."""
    parser = ArgumentParser(prog="python -m whisper_worker.hub", description="Download a model from the hub.")
    parser.add_argument("name", help="a size, such as turbo, or a repository, org/name")
    parser.add_argument("cache", type=Path, metavar="folder", help="for its files, laid out as the Hugging Face cache")
    parser.add_argument("--parent", type=int, help="end with the process that has this number")
    options = parser.parse_args(arguments)
    if options.name == BUNDLED or not is_public(options.name):
        parser.error(f"{options.name!r} is no model on the hub")
    if options.parent:
        threading.Thread(target=_end_with, args=[options.parent], daemon=True).start()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read when the client is imported
    try:
        _fetch_model(repository(options.name), options.cache / folder_name(options.name))
    except Exception as error:  # the hub's client raises dozens of types, its HTTP library more, disks OSError
        sys.exit(f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no more is known'])[0]}")


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _fetch_model(repository_id: str, folder: Path) -> None:
    import huggingface_hub  # takes a while, and workers that find their model on this machine don't need it
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # public, but not marked so

    folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(folder / "download.lock"):
        info = huggingface_hub.HfApi().model_info(repository_id, files_metadata=True, timeout=ANSWERS_S)
        snapshot = folder / "snapshots" / str(info.sha)
        snapshot.mkdir(parents=True, exist_ok=True)
        files = [file for file in info.siblings or () if _is_needed(file.rfilename)]
        if not any(file.rfilename == "model.bin" for file in files):
            raise ModelUnavailable(f"{repository_id} has no model.bin: it isn't a model in CTranslate2's format")
        _check_space(files, snapshot)
        for file in files:
            _fetch_file(file, repository_id, str(info.sha), snapshot / file.rfilename)
        (folder / "refs").mkdir(exist_ok=True)
        ref = folder / "refs/main.incomplete"
        ref.write_text(str(info.sha))
        ref.replace(folder / "refs/main")


def _is_needed(name: str) -> bool:
    return "/" not in name and any(fnmatch(name, kind) for kind in FILES)


def _is_there(file: Any, path: Path) -> bool:
    return path.is_file() and path.stat().st_size == file.size


def _check_space(files: Sequence[Any], snapshot: Path) -> None:
    missing = sum(file.size for file in files if not _is_there(file, snapshot / file.rfilename))
    begun = sum(part.stat().st_size for part in snapshot.glob("*.incomplete"))
    free = shutil.disk_usage(snapshot).free
    if missing - begun > free:
        raise OSError(f"{snapshot} has {free / 1e9:.2f} GB free, and the model's files need {missing / 1e9:.2f} GB")


def _fetch_file(file: Any, repository_id: str, commit: str, path: Path) -> None:
    """`file`: the hub's RepoSibling. What has its size at `path` is taken for it: we put there only what is whole."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # as above

    if _is_there(file, path):
        return
    part = path.with_name(f"{path.name}.incomplete")
    with part.open("ab") as target:
        if target.tell() > file.size:
            target.seek(target.truncate(0))
        http_get(
            hf_hub_url(repository_id, file.rfilename, revision=commit),
            target,
            resume_size=target.tell(),
            expected_size=file.size,
            headers=build_hf_headers(),
        )
    expected = file.lfs.sha256 if file.lfs else file.blob_id
    if _digest(part, expected) != expected:
        part.unlink()  # another try has to begin anew
        raise OSError(f"{file.rfilename} came with other bytes than the hub says it has")
    part.replace(path)


def _digest(path: Path, like: str) -> str:
    """SHA-256 for large files, Git's name of a blob for others."""
    if len(like) == SHA256_DIGITS:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    for part in _parts(path):
        digest.update(part)
    return digest.hexdigest()


def _parts(path: Path, size: int = 1 << 20) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(size):
            yield part


if __name__ == "__main__":
    main()
