"""A base image made on a Debian machine, for where none can be pulled: the machine's own Debian release, with its
Python in /usr/local as the public Python images have it. It stands in for one of those: that theirs works, it can't
show.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from container.programs import Clock, Failed, output_of

MAX_AGE_S = 7 * 24 * 3600
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")
FORMAT = "deb $(REPO_URI) $(RELEASE) $(COMPONENT)"
# apt's own settings that this machine needs, and so the image while it is made
APT_SETTINGS = ("Acquire::Check-Valid-Until ", "Acquire::Check-Date ", "Acquire::http::Proxy ", "Acquire::https::")


@dataclass(frozen=True)
class Base:
    suite: str
    tar: Path


def cache_folder() -> Path:
    folder = Path(os.environ.get("TMPDIR", "/var/tmp")).resolve()  # noqa: S108  (kept from run to run)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def sources(clock: Clock) -> str:
    """The package sources that apt knows, of Debian itself."""
    filters = ("Created-By: Packages", "Origin: Debian")
    try:
        listed = output_of(["apt-get", "indextargets", "--format", FORMAT, *filters], clock)
    except Failed:
        return ""
    return "".join(f"{line}\n" for line in sorted(set(listed.splitlines())))


def make(folder: Path, clock: Clock) -> Base:
    """Or take the one made before, which is kept for a week. `folder` is for what is half made, and lies on the same
    disk as those that are kept. Raises Failed."""
    suite = _suite()
    kept = cache_folder() / f"whisper-worker-base-{suite}.tar"
    if _is_ours(kept) and time.time() - kept.stat().st_mtime < MAX_AGE_S:
        return Base(suite, kept)
    lists, tar = folder / "sources.list", folder / "base.tar"
    lists.write_text(sources(clock))
    settings = [line.rstrip(";") for line in output_of(["apt-config", "dump"], clock).splitlines()]
    settings = [line for line in settings if line.startswith(APT_SETTINGS)]
    output_of(
        [
            *(
                "mmdebstrap",
                "--quiet",
                "--mode=root",
                "--variant=minbase",
                "--include=ca-certificates,python3,python3-venv",
            ),
            *(f"--dpkgopt=path-exclude={path}" for path in LEFT_OUT),
            *(f"--aptopt={line}" for line in settings),
            '--customize-hook=chroot "$1" python3 -m venv /usr/local',
            *(suite, str(tar), str(lists)),
        ],
        clock,
        {**os.environ, "LC_ALL": "C.UTF-8"},
    )
    tar.replace(kept)  # at once: others may look for it
    return Base(suite, kept)


def _is_ours(file: Path) -> bool:
    """All may write to its folder, and what is in it will run."""
    return file.is_file() and not file.is_symlink() and file.stat().st_uid == os.geteuid()


def _suite() -> str:
    lines = Path("/etc/os-release").read_text().splitlines()
    release = dict(line.split("=", 1) for line in lines if "=" in line)
    if release.get("ID") != "debian" or "VERSION_CODENAME" not in release:
        raise Failed("no Docker daemon answers, and a base image can only be made on Debian: give --base-image")
    return release["VERSION_CODENAME"].strip('"')
