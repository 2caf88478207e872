"""What some benchmarks measure and `plan` reads: the part of their JSON that has an agreed form."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class NotMeasured(Exception):
    """The text is a sentence that says which command measures it."""


@dataclass(frozen=True)
class Point:
    """`growth`: a worker with so many jobs in flight all the time. Each that ends is followed by the next."""

    variant: str
    inter_threads: int
    batch_size: int
    job_concurrency: int
    clip_s: float  # mean length of the jobs' audio
    jobs_per_s: float
    latencies_s: Sequence[float]  # of all jobs of all repeats
    peak_bytes: int  # of the process

    @property
    def audio_s_per_s(self) -> float:
        return self.jobs_per_s * self.clip_s


@dataclass(frozen=True)
class Window:
    """`memory`: what one window of so many seconds takes while a call of the model with `batch` windows runs."""

    batch: int
    window_s: float
    bytes: int


@dataclass(frozen=True)
class DeviceMemory:
    """`memory`: what the model's device holds."""

    weights_bytes: int
    kept_bytes: int  # more than the weights once calls have run, and while none is running
    windows: Sequence[Window]

    def window_bytes(self, batch: int) -> int:
        """For one window of the longest kind. Of a batch that wasn't measured: what the worst one takes."""
        of_batch = [window.bytes for window in self.windows if window.batch == batch]
        return max(of_batch or [window.bytes for window in self.windows])


@dataclass(frozen=True)
class Measurements:
    device: str
    model: str
    points: Sequence[Point]
    memory: DeviceMemory

    @classmethod
    def read(cls, folder: Path) -> "Measurements":
        """Those of `growth` and `memory` in a folder of results. Raises NotMeasured."""
        growth, memory = _report(folder, "growth"), _report(folder, "memory")
        for option in ("device", "model", "compute_type"):
            if growth["options"][option] != memory["options"][option]:
                raise NotMeasured(
                    f"growth was measured with {option} {growth['options'][option]}, memory with "
                    f"{memory['options'][option]}: measure both alike"
                )
        data = memory["data"]
        windows = [Window(**window) for window in data["working_bytes_per_window"]]
        return cls(
            device=growth["options"]["device"],
            model=growth["options"]["model"],
            points=[Point(**point) for point in growth["data"]["in_flight"]],
            memory=DeviceMemory(data["weights_bytes"], data["kept_bytes"], windows),
        )


def _report(folder: Path, name: str) -> dict[str, Any]:
    file = folder / f"{name}.json"
    if not file.is_file():
        raise NotMeasured(
            f"{file} is missing: `python -m benchmarks {name}` makes it, with the model and device to plan for"
        )
    report: dict[str, Any] = json.loads(file.read_text())
    return report
