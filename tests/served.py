"""A service with a fake engine and real everything else, for tests of what it does with jobs."""

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from fakes import FakeEngine
from media import RATE, encode, speech

from whisper_worker.health import Health
from whisper_worker.service import Service
from whisper_worker.settings import Settings, Threads
from whisper_worker.speech import Speech
from whisper_worker.stop import Stop
from whisper_worker.transcript import Said

THREADS = Threads(inter=2, intra=1, batch=1, jobs=6, media=2)
SPEECH = encode("ogg", "libopus", [speech()])


@contextmanager
def service(engine: FakeEngine | None = None, threads: Threads = THREADS, **env: Any) -> Iterator[Service]:
    with service_and_health(engine, threads, **env) as (served, _):
        yield served


@contextmanager
def service_and_health(
    engine: FakeEngine | None = None, threads: Threads = THREADS, **env: Any
) -> Iterator[tuple[Service, Health]]:
    settings, engine = Settings.from_env(env), engine or FakeEngine()
    health = Health(engine, settings)
    served = Service(settings, threads, engine, health)
    try:
        yield served, health
    finally:
        health.close()
        served.close()


def job(file: bytes = SPEECH, id: str = "job", **options: Any) -> dict[str, Any]:
    return {"id": id, "input": {"audio_base64": base64.b64encode(file).decode(), **options}}


def answer(job: dict[str, Any], engine: FakeEngine | None = None, **env: Any) -> dict[str, Any]:
    with service(engine, **env) as served:
        output = asyncio.run(served.run(job))
    json.dumps(output, allow_nan=False)
    return output


def error(job: dict[str, Any], engine: FakeEngine | None = None, **env: Any) -> str:
    output = answer(job, engine, **env)
    assert set(output) <= {"error", "partial"}
    assert isinstance(output["error"], str)
    return output["error"]


def raising(problem: BaseException) -> FakeEngine:
    def act(speech: Speech, stop: Stop) -> Said:
        raise problem

    return FakeEngine(act)


def speech_for(seconds: int) -> Any:
    return np.tile(speech(), 1 + seconds // 4)[: seconds * RATE]


def together(*jobs: dict[str, Any], served: Service) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        return await asyncio.gather(*(served.run(job) for job in jobs))

    return asyncio.run(run())
