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

from whisper_worker.health import Canary, Health
from whisper_worker.model_files import ModelFiles
from whisper_worker.models import Catalog
from whisper_worker.registry import Loaded, Registry
from whisper_worker.service import Service
from whisper_worker.settings import Settings, Threads
from whisper_worker.speech import Speech
from whisper_worker.stop import Stop
from whisper_worker.transcript import Said

THREADS = Threads(inter=2, intra=1, batch=1, jobs=6, media=2)
SPEECH = encode("ogg", "libopus", [speech()])


@contextmanager
def service(engine: FakeEngine | None = None, threads: Threads = THREADS, **env: Any) -> Iterator[Service]:
    with service_in_parts(engine, threads, **env) as (served, _, _):
        yield served


@contextmanager
def service_in_parts(
    engine: FakeEngine | None = None, threads: Threads = THREADS, **env: Any
) -> Iterator[tuple[Service, Health, Loaded]]:
    """With the worker's health, and the one model that it has, which hears its own words."""
    settings, engine = Settings.from_env({"CHECK_WORDS": "false", **env}), engine or FakeEngine()
    health = Health(settings)
    registry = Registry(settings, Catalog.from_settings(settings), health, load=no_other)
    loaded = Loaded(engine, Canary(engine, settings, health), engine.name)
    registry.preload(loaded)
    served = Service(settings, threads, registry, health)
    try:
        yield served, health, loaded
    finally:
        health.close()
        served.close()
        registry.close()


def no_other(files: ModelFiles) -> FakeEngine:
    raise RuntimeError("there is but one model")


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
