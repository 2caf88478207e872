"""The model hub: a model's files → a folder of this machine, by a process of its own.

A process can be ended in time; a thread that waits for a silent or slow server can't. `python -m whisper_worker.hub
NAME FOLDER` is that process, and how a model gets into an image.

Files lie there as in the Hugging Face cache, but without links: `models--org--name/snapshots/COMMIT/…`. `refs/main`
names a commit only once all of its files are there, with the digests that the hub tells: half a model is never found.
Of a download that was broken off the next one takes what there is, `….incomplete`. Where a file system has no locks,
each process writes files of its own; where it only pretends to have them, the digest tells, and a file is begun anew.
"""

import errno
import hashlib
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from whisper_worker import log
from whisper_worker.models import BUNDLED, ModelUnavailable, is_public, repository
from whisper_worker.whole import NEEDED, OPTIONAL, check_whole

ANSWERS_S = 10.0  # longest time until the hub tells what there is
PAUSES_S = (1.0, 3.0, 9.0)  # before another try, when none has brought anything since the last
PROGRESS_S = 30.0  # between two lines in the log
ROOT = Path(__file__).parent.parent  # the package needn't be installed
NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOLCK)  # what some file systems answer to who wants one
TRANSIENT = (408, 429)  # and all from 500 on


def download(name: str, cache: Path, timeout_s: float) -> None:
    """A size's or repository's files, into `cache`. Takes at most `timeout_s`, in which it may wait for another process
    that does the same. Raises ModelUnavailable."""
    started = time.monotonic()
    log.event("model_download", model=name, repository=repository(name), folder=cache)
    command = [sys.executable, "-m", __name__, "--parent", str(os.getpid()), name, str(cache)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with TemporaryFile("w+") as said:  # a pipe that is full would hold it up
        with subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, env=env
        ) as process:
            try:
                has_ended = _has_ended(process, name, cache, timeout_s)
            finally:
                process.kill()  # one that has ended doesn't mind
        said.seek(0)
        last_words = said.read().strip().splitlines()[-1:]
    if not has_ended:
        text = f"the model {name!r} wasn't downloaded within {timeout_s:g} s" + "".join(f" ({w})" for w in last_words)
        raise ModelUnavailable(f"{text}; another try goes on where this one ended")
    if process.returncode:
        reason = "".join(last_words) or f"the download ended with code {process.returncode}"
        raise ModelUnavailable(f"the model {name!r} can't be downloaded: {reason}")
    log.event("model_downloaded", model=name, seconds=time.monotonic() - started)


def folder_name(name: str) -> str:
    """Of a size's or repository's folder in a cache."""
    return f"models--{repository(name).replace('/', '--')}"


def _has_ended(process: "subprocess.Popen[bytes]", name: str, cache: Path, timeout_s: float) -> bool:
    """Within so long. How far it is stands in the log now and then."""
    until = time.monotonic() + timeout_s
    while (left_s := until - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(left_s, PROGRESS_S))
            return True
        log.event("model_downloading", model=name, bytes=_bytes_in(cache / folder_name(name)))
    return False


def _bytes_in(folder: Path) -> int:
    sizes = 0
    for file in folder.glob("snapshots/*/*"):
        with suppress(OSError):  # it has just been renamed
            sizes += file.stat().st_size
    return sizes


# The process.


def main(arguments: Sequence[str] | None = None) -> None:
    """What went wrong is the last line on stderr."""
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
        _fetch_in_tries(repository(options.name), options.cache / folder_name(options.name))
    except Exception as error:  # the hub's client raises dozens of types, its HTTP library more, disks OSError
        sys.exit(_reason(error))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _fetch_in_tries(repository_id: str, folder: Path) -> None:
    """For as long as they bring something, and a few times more. The time limit is the parent's."""
    pauses, had = iter(PAUSES_S), -1
    while True:
        try:
            return _fetch_model(repository_id, folder)
        except Exception as error:
            if (has := _bytes_in(folder)) > had:
                pauses, had = iter(PAUSES_S), has
            pause = None if _is_final(error) else next(pauses, None)
            if pause is None:
                raise
            print(f"another try in {pause:g} s: {_reason(error)}", file=sys.stderr, flush=True)  # noqa: T201
        time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311  (not at the same time as another's)


def _is_final(error: Exception) -> bool:
    """Whether another try would meet the same."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, (ModelUnavailable, OfflineModeIsEnabled)):
        return True
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return 400 <= status < 500 and status not in TRANSIENT
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):
        return False  # the last: another process, which no lock kept away, has put the file in its place
    # A disk's. Those of connections, and of the hub's client, have none of these.
    return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def _reason(error: Exception) -> str:
    """In one line."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):  # one of those not found, to the client
        return "its repository is gated: ask for access to it on the hub, and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such repository on the hub, or it is private, and HF_TOKEN opens it to nobody or not to you"
    text = (str(error).strip().splitlines() or ["no more is known"])[0]
    return text if isinstance(error, ModelUnavailable) else f"{type(error).__name__}: {text}"


def _fetch_model(repository_id: str, folder: Path) -> None:
    import huggingface_hub  # takes a while, and workers that find their model on this machine don't need it

    folder.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(folder) as owner:
        info = huggingface_hub.HfApi().model_info(repository_id, files_metadata=True, timeout=ANSWERS_S)
        files = [file for file in info.siblings or () if _is_any_of(file.rfilename, (*NEEDED, *OPTIONAL))]
        missing = [kind for kind in NEEDED if not any(_is_any_of(file.rfilename, (kind,)) for file in files)]
        if missing:
            lacks = f"{repository_id} lacks {' and '.join(missing)}"
            raise ModelUnavailable(f"{lacks}: it isn't a model in CTranslate2's format, or not a whole one")
        snapshot, ref = folder / "snapshots" / str(info.sha), folder / "refs/main"
        if _is_there(snapshot, ref):  # another process has just downloaded it
            return
        snapshot.mkdir(parents=True, exist_ok=True)
        _check_space(files, snapshot)
        for file in files:
            _fetch_file(file, repository_id, str(info.sha), snapshot / file.rfilename, owner)
        check_whole(snapshot)  # what the hub has needn't be
        ref.parent.mkdir(exist_ok=True)
        part = ref.with_name("main.incomplete")
        part.write_text(str(info.sha))
        part.replace(ref)
        for part in folder.glob("snapshots/*/*.incomplete"):  # of commits that have gone by
            part.unlink(missing_ok=True)


def _is_there(snapshot: Path, ref: Path) -> bool:
    with suppress(OSError, ModelUnavailable):
        if ref.read_text() == snapshot.name:
            check_whole(snapshot)
            return True
    return False


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[str]:
    """Whose the files are that are being written: "" stands for everybody's, who take turns."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # public, but not marked so

    with ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(folder / "download.lock"))
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            yield f".{socket.gethostname()}-{os.getpid()}"
        else:
            yield ""


def _is_any_of(name: str, kinds: Sequence[str]) -> bool:
    return "/" not in name and any(fnmatch(name, kind) for kind in kinds)


def _check_space(files: Sequence[Any], snapshot: Path) -> None:
    missing = sum(file.size for file in files if not (snapshot / file.rfilename).exists())
    begun = sum(part.stat().st_size for part in snapshot.glob("*.incomplete"))
    free = shutil.disk_usage(snapshot).free
    if missing - begun > free:
        text = f"{free / 1e9:.2f} GB free, and the model's files need {missing / 1e9:.2f} GB"
        raise OSError(errno.ENOSPC, text, str(snapshot))


def _fetch_file(file: Any, repository_id: str, commit: str, path: Path, owner: str) -> None:
    """`file`: the hub's RepoSibling. What is at `path` may be someone else's, and broken."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # as above

    if path.exists() and _is_right(path, file):
        return
    part = path.with_name(f"{path.name}{owner}.incomplete")
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
    if not _is_right(part, file):
        part.unlink(missing_ok=True)  # another try has to begin anew
        raise OSError(f"{file.rfilename} came with other bytes than the hub says it has")
    part.replace(path)


def _is_right(path: Path, file: Any) -> bool:
    """By SHA-256 for large files, by Git's name of a blob for others."""
    size = path.stat().st_size
    if size != file.size:
        return False
    if file.lfs:
        digest, expected = hashlib.sha256(), file.lfs.sha256
    else:
        digest, expected = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), file.blob_id
    for part in _parts(path):
        digest.update(part)
    return bool(digest.hexdigest() == expected)


def _parts(path: Path, size: int = 1 << 20) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(size):
            yield part


if __name__ == "__main__":
    main()
