"""The container engine: Docker where its daemon answers, else podman, whose command line is the same.

Podman needs root, and a Debian machine, which lends its package sources to the base image: see `base`. All that podman
keeps lies in a folder that goes at the end, with whatever still runs in it.
"""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from container import ROOT, base
from container.programs import Clock, Failed, output_of

CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
PACKAGES = {"podman": "podman", "runc": "runc", "mmdebstrap": "mmdebstrap"}  # program → Debian's package
MAX_LIMIT = 4096
KILL_TRIES = 20
KILL_AGAIN_S = 0.1


@dataclass(frozen=True)
class Engine:
    """`name` is that of the image, and begins those of its containers."""

    command: tuple[str, ...]
    name: str
    clock: Clock
    env: Mapping[str, str]
    build_options: tuple[str, ...] = ()
    run_options: tuple[str, ...] = ()
    base: str | None = None  # the image to build on, None for the Dockerfile's own
    note: str = ""  # what isn't as it will be elsewhere
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def build(self, arguments: Mapping[str, str], *options: str) -> None:
        if self.base:
            arguments = {"BASE_IMAGE": self.base, **arguments}
        listed = [option for pair in arguments.items() for option in ("--build-arg", "=".join(pair))]
        self.call("build", *self.build_options, *options, *listed, "--tag", self.name, str(ROOT))

    def run_command(
        self, container: str, *arguments: str, network: str = "none", options: Sequence[str] = (), **env: str
    ) -> list[str]:
        """The command that runs a container of the image as strictly as a host may: only /tmp can be written to."""
        return [
            *(*self.command, "run", "--rm", "--pull", "never", "--name", container, "--network", network),
            *("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),  # noqa: S108
            *self.run_options,
            *options,
            *(option for pair in env.items() for option in ("--env", "=".join(pair))),
            *(self.name, *arguments),
        ]

    def run(self, *arguments: str, options: Sequence[str] = ()) -> str:
        """What a container without network prints, until its end. Raises Failed."""
        return output_of(self.run_command(self.new_name(), *arguments, options=options), self.clock, self.env)

    def new_name(self) -> str:
        """For a container."""
        return f"{self.name}-{next(self._numbers)}"

    def call(self, *arguments: str) -> str:
        return output_of([*self.command, *arguments], self.clock, self.env)

    def remove(self) -> None:
        """The containers and the image."""
        with suppress(Failed):
            if containers := self.call("ps", "--all", "--quiet", "--filter", f"name={self.name}-").split():
                self.call("rm", "--force", *containers)
        with suppress(Failed):
            self.call("rmi", "--force", self.name)


@contextmanager
def found(base_image: str | None, clock: Clock) -> Iterator[Engine]:
    """The engine of this machine. Everything it has made is removed at the end. Raises Failed."""
    name = f"whisper-worker-smoke-{os.getpid()}-{time.time_ns() % 10**6}"
    if _docker_answers(clock):
        engine = Engine(("docker",), name, clock, dict(os.environ), base=base_image)
        try:
            yield engine
        finally:
            Engine(("docker",), name, Clock(60), dict(os.environ)).remove()
        return
    if os.geteuid():
        raise Failed("no Docker daemon answers, and podman needs root here")
    _install_podman(clock)
    folder = Path(tempfile.mkdtemp(prefix="whisper-worker-smoke-", dir=base.cache_folder()))
    try:
        yield _podman(folder, name, base_image, clock)
    finally:
        _clear(folder, name)


def _docker_answers(clock: Clock) -> bool:
    try:
        output_of(["docker", "info", "--format", "{{.ServerVersion}}"], Clock(clock.left_s(20)))
    except Failed:
        return False
    return True


def _install_podman(clock: Clock) -> None:
    missing = [package for program, package in PACKAGES.items() if not shutil.which(program)]
    if not Path("/etc/containers/policy.json").exists():
        missing.append("golang-github-containers-image")
    if not missing and base.sources(clock):
        return
    if not shutil.which("apt-get"):
        raise Failed(f"no Docker daemon answers, and {', '.join(missing)} can only be installed on Debian")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    output_of(["apt-get", "update"], clock, env)
    if missing:
        output_of(["apt-get", "install", "--yes", "--no-install-recommends", *missing], clock, env)


def _podman(folder: Path, name: str, base_image: str | None, clock: Clock) -> Engine:
    for part in ("tmp", "libpod"):
        (folder / part).mkdir()
    (folder / "containers.conf").write_text(_settings(folder))
    (folder / "pip.conf").write_text(_pip_settings(clock))
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(("BUILDAH_", "CONTAINER_", "STORAGE_"))
    }
    env |= {"CONTAINERS_CONF": str(folder / "containers.conf"), "TMPDIR": str(folder / "tmp")}
    command = _command(folder)
    group = ("--cgroup-parent", f"/{name}")
    # Its steps reach the package registries as this machine does: what they need for that is mounted, and stays out of
    # the image.
    mounts = [f"{folder}/pip.conf:/etc/pip.conf:ro"]
    if bundle := _ca_bundle():
        mounts.append(f"{bundle}:{CA_BUNDLE}:ro")
    engine = Engine(
        command,
        name,
        clock,
        env,
        build_options=(
            *("--isolation", "oci", "--network", "host", "--format", "docker", "--layers=false", *group),
            *(option for mount in mounts for option in ("--volume", mount)),
        ),
        run_options=("--read-only-tmpfs=false", *group),
        base=base_image,
    )
    if base_image:
        return engine
    made, stand_in = base.make(folder, clock), f"localhost/{name}-base"
    changes = ("ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", 'CMD ["python3"]')
    options = [option for change in changes for option in ("--change", change)]
    engine.call("import", "--quiet", *options, str(made.tar), stand_in)
    return replace(
        engine,
        build_options=(*engine.build_options, "--pull-never"),
        base=stand_in,
        note=f"on a stand-in for the base image: Debian {made.suite} with its own Python",
    )


def _command(folder: Path) -> tuple[str, ...]:
    places = ("--root", str(folder / "store"), "--runroot", str(folder / "run"))
    return ("podman", *places, "--storage-driver", "overlay")


def _settings(folder: Path) -> str:
    """Podman asks for higher limits than a machine without CAP_SYS_RESOURCE may set, unless told how high; and crun,
    its default, refuses hybrid cgroups."""
    files, processes = map(_limit, (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    return f"""
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
tmp_dir = "{folder}/libpod"
static_dir = "{folder}/store/libpod"
volume_path = "{folder}/store/volumes"
"""


def _limit(which: int) -> int:
    _, hard = resource.getrlimit(which)
    return MAX_LIMIT if hard == resource.RLIM_INFINITY else min(hard, MAX_LIMIT)


def _pip_settings(clock: Clock) -> str:
    """This machine's, as far as they say how to reach a registry."""
    lines = {"disable-pip-version-check": "true", "root-user-action": "ignore"}
    if _ca_bundle():
        lines["cert"] = CA_BUNDLE
    listed = output_of([sys.executable, "-m", "pip", "config", "list"], clock)
    lines |= dict(
        re.findall(r"^(?:global|install|:env:)\.(index-url|trusted-host|proxy|timeout)='([^']*)'$", listed, re.M)
    )
    return "[global]\n" + "".join(f"{key} = {value}\n" for key, value in lines.items())


def _ca_bundle() -> str | None:
    places = (os.environ.get("SSL_CERT_FILE"), os.environ.get("CURL_CA_BUNDLE"), CA_BUNDLE)
    return next((place for place in places if place and Path(place).is_file()), None)


def _clear(folder: Path, name: str) -> None:
    """End what runs, unmount what is mounted, remove what is left: of this engine alone, and even after a failure."""
    command = _command(folder)
    env = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
    with suppress(Failed):
        if (folder / "store").exists():
            output_of([*command, "rm", "--all", "--force", "--time", "0"], Clock(60), env)
    for _ in range(KILL_TRIES):
        processes = set(_processes(name))
        if not processes:
            break
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(KILL_AGAIN_S)
    for mount in reversed(_mounts(folder)):
        subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
    for group in sorted(_groups(name), reverse=True):
        with suppress(OSError):
            group.rmdir()
    if _mounts(folder):
        print(f"smoke: left in place, still mounted: {folder}", file=sys.stderr, flush=True)
    else:
        shutil.rmtree(folder)


def _groups(name: str) -> Sequence[Path]:
    found = []
    for top in Path("/sys/fs/cgroup").glob(f"**/{name}"):
        found += [top, *(path for path in top.rglob("*") if path.is_dir())]
    return found


def _processes(name: str) -> Iterator[int]:
    for group in _groups(name):
        with suppress(OSError):
            yield from map(int, (group / "cgroup.procs").read_text().split())


def _mounts(folder: Path) -> list[str]:
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [place for place in places if place.startswith(f"{folder}/")]
