"""What freeing a model really gives back, seen from outside: a process of its own, and real models."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import find_multilingual

ROOT = Path(__file__).parent.parent
ROUNDS = 6
MB = 1_000_000


def rss() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Print, for each round, how much memory there was with the small model, and then with the large one."""
    from whisper_worker.engine import Engine
    from whisper_worker.health import Health
    from whisper_worker.model_files import ModelFiles
    from whisper_worker.models import Catalog
    from whisper_worker.registry import Registry
    from whisper_worker.settings import Settings, Threads

    large = str(find_multilingual())
    settings = Settings.from_env({"MODEL": "bundled", "MODELS": large})
    threads = Threads(inter=2, intra=1, batch=1, jobs=6, media=2)

    def load(files: ModelFiles) -> Engine:
        return Engine.load(files, "cpu", "int8", threads, settings)

    health = Health(settings)
    registry = Registry(settings, Catalog.from_settings(settings), health, load)

    async def used(name: str) -> int:
        async with registry.leased(name) as model:
            model.canary.warm_up()  # a real transcription; on no thread that might not be done with the model yet
            return rss()

    async def run() -> list[tuple[int, int]]:
        return [(await used("bundled"), await used(Path(large).name)) for _ in range(ROUNDS)]

    print(json.dumps(asyncio.run(run())))  # noqa: T201
    registry.close()
    health.close()


# Freed memory between blocks that are in use is lost for the system. The second environment leaves little of that, as
# large blocks are given back one by one; the worker would be slow in it.
ALLOCATORS: dict[str, tuple[dict[str, str], float, float]] = {
    "glibc as it is": ({}, 1.0, 0),
    "glibc without holes": ({"MALLOC_MMAP_THRESHOLD_": "1000000"}, 0.25, 30 * MB),
}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own figures")
@pytest.mark.parametrize(("env", "most", "least"), ALLOCATORS.values(), ids=ALLOCATORS.keys())
def test_a_model_that_went_for_another_gives_its_memory_back(env: dict[str, str], most: float, least: float) -> None:
    """In all rounds together at most so much is left behind as one model's weights, times `most`; and each time that
    the small model comes back there is less than with the large one, by `least`."""
    weights = (find_multilingual() / "model.bin").stat().st_size / 2  # stored in 16 bits, loaded in 8
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "src", "tests"))
    process = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    rounds = json.loads(process.stdout)
    small, large = ([figures[i] for figures in rounds] for i in (0, 1))
    shown = f"MB in each round: {[[round(figure / MB) for figure in figures] for figures in rounds]}"
    assert all(after < before - least for before, after in zip(large, small[1:], strict=False)), shown
    assert small[-1] - small[1] < most * weights, shown
    assert large[-1] - large[0] < most * weights, shown


if __name__ == "__main__":
    main()
