"""The files that the image is made of fit each other. That they make one that works, scripts/container-smoke shows."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from worker_process import ROOT

import whisper_worker

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

DOCKERFILE = (ROOT / "Dockerfile").read_text()
LOCKS = sorted((ROOT / "locks").glob("*.txt"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")


def entries(lock: Path) -> Iterator[tuple[Requirement, list[str]]]:
    """The packages of a lock file, with their hashes."""
    for entry in re.sub(r"#.*|\\\n", "", lock.read_text()).splitlines():
        if entry.strip():
            requirement, *hashes = entry.split(" --hash=")
            yield Requirement(requirement), [each.strip() for each in hashes]


def locked(lock: Path, python: str, machine: str) -> dict[str, str]:
    """The versions that are installed there, by package."""
    there = {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_machine": machine,
        "extra": "",
    }
    needed = [each for each, _ in entries(lock) if each.marker is None or each.marker.evaluate(there)]
    versions = {canonical(each.name): str(each.specifier).removeprefix("==") for each in needed}
    assert len(versions) == len(needed)
    return versions


def canonical(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def argument(name: str) -> str:
    """The default of a build argument."""
    [value] = set(re.findall(rf"^ARG {name}=(.*)$", DOCKERFILE, re.MULTILINE))
    return str(value)


def copied() -> set[str]:
    """What the Dockerfile takes from the build context, each by the first part of its path."""
    lines = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
    return {path.split("/")[0] for line in lines for path in line.split()[:-1]}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_has_the_exact_version_and_the_hashes_of_each_package_and_no_address(lock: Path) -> None:
    listed = list(entries(lock))
    assert listed
    for requirement, hashes in listed:
        assert re.fullmatch(r"==[^=,*]+", str(requirement.specifier)), requirement
        assert hashes, requirement
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", each) for each in hashes), requirement
    assert "://" not in lock.read_text()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_locks_hold_what_the_project_depends_on(python: str, machine: str) -> None:
    extra = PROJECT["optional-dependencies"]["bundled"]
    for lock, wanted in (("worker", PROJECT["dependencies"]), ("bundled", extra)):
        versions = locked(ROOT / f"locks/{lock}.txt", python, machine)
        for each in map(Requirement, wanted):
            assert each.specifier.contains(versions[canonical(each.name)]), f"{each}: run scripts/lock"


def test_the_extra_brings_nothing_that_the_worker_has_anyway() -> None:
    both = [{each.name for each, _ in entries(ROOT / f"locks/{lock}.txt")} for lock in ("worker", "bundled")]
    assert not set.intersection(*both)


def test_each_version_of_cublas_has_a_lock_of_its_own() -> None:
    files = {lock.stem.removeprefix("cublas-"): lock for lock in LOCKS if lock.stem.startswith("cublas-")}
    for version, lock in files.items():
        assert [str(each) for each, _ in entries(lock)] == [f"nvidia-cublas-cu12=={version}"]
    assert argument("CUBLAS_VERSION") in files


def test_the_python_of_the_image_is_one_that_the_project_supports_and_runpods_tools_use() -> None:
    name, _, tag = argument("BASE_IMAGE").partition(":")
    python = tag.removesuffix("-slim")
    assert name == "python"
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)
    assert tomllib.loads((ROOT / "runpod.toml").read_text())["runtime"]["python_version"] == python


def test_the_image_says_what_the_project_says() -> None:
    assert argument("VERSION") == whisper_worker.__version__
    assert f'org.opencontainers.image.title="{PROJECT["name"]}"' in DOCKERFILE
    assert f'org.opencontainers.image.description="{PROJECT["description"]}"' in DOCKERFILE
    assert f'org.opencontainers.image.licenses="{PROJECT["license"]["text"]}"' in DOCKERFILE


def test_the_build_gets_what_the_dockerfile_copies_and_nothing_else() -> None:
    first, *lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert first == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied()
    assert [path for path in copied() if not (ROOT / path).exists()] == []
