"""What the figures were measured on, for the report's last lines. Names the hardware and versions, never the host."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from whisper_worker.settings import GiB, available_cores

PACKAGES = ("ctranslate2", "faster-whisper", "onnxruntime", "runpod")


def machine(device: str) -> dict[str, str]:
    """Facts by name, ready to be printed; with the GPU when `device` is cuda."""
    facts = {
        "cpu": _cpu_model(),
        "cores": str(available_cores()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GiB:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }
    return {**facts, **_gpu()} if device == "cuda" else facts


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _gpu() -> dict[str, str]:
    try:
        with gpu() as (nvml, handle):
            return {
                "gpu": str(nvml.nvmlDeviceGetName(handle)),
                "gpu memory": f"{nvml.nvmlDeviceGetMemoryInfo(handle).total / GiB:.0f} GiB",
                "driver": str(nvml.nvmlSystemGetDriverVersion()),
            }
    except GpuNotReadable as error:
        return {"gpu": str(error)}


class GpuNotReadable(Exception):
    """NVML, or its Python package, isn't there."""


@contextmanager
def gpu(index: int = 0) -> Iterator[tuple[Any, Any]]:
    """NVML and its handle of one GPU. Raises GpuNotReadable."""
    try:
        import pynvml
    except ImportError:
        raise GpuNotReadable("can't be read without the package nvidia-ml-py (extra `bench`)") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise GpuNotReadable(f"NVML: {error}") from error
    try:
        yield pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)
    finally:
        pynvml.nvmlShutdown()
