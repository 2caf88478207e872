"""A service with real models, as the worker has it: the bundled English one and multilingual Whisper base, where that
is installed. Jobs of any number of tests run on its one event loop."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import multilingual as multilingual_model

from whisper_worker.engine import Engine
from whisper_worker.health import Health
from whisper_worker.models import Catalog
from whisper_worker.registry import Registry
from whisper_worker.service import Service
from whisper_worker.settings import Settings, Threads

THREADS = Threads(inter=2, intra=1, batch=1, jobs=6, media=2)

Json = dict[str, Any]


class RealService:
    """`tight_bytes`: the largest reply to a job that asks for a `tight` one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, registry: Registry, health: Health, tight_bytes: int) -> None:
        self._loop = loop
        self._roomy = Service(_settings(), THREADS, registry, health)
        self._tight = Service(_settings(MAX_INLINE_BYTES=str(tight_bytes)), THREADS, registry, health)

    def outputs(self, *jobs: Json, tight: bool = False) -> list[Json]:
        """Of jobs that run at the same time."""
        service = self._tight if tight else self._roomy

        async def run() -> list[Json]:
            return await asyncio.gather(*map(service.run, jobs))

        return self._loop.run_until_complete(run())

    def close(self) -> None:
        self._roomy.close()
        self._tight.close()


@contextmanager
def real_service(tight_bytes: int) -> Iterator[RealService]:
    settings = _settings()
    health = Health(settings)
    registry = Registry(
        settings,
        Catalog.from_settings(settings),
        health,
        load=lambda files: Engine.load(files, "cpu", "int8", THREADS, settings),
    )
    loop = asyncio.new_event_loop()
    service = RealService(loop, registry, health, tight_bytes)
    try:
        yield service
    finally:
        service.close()
        health.close()
        loop.close()
        registry.close()


def _settings(**env: str) -> Settings:
    other = multilingual_model.find()
    models = {"MODELS": str(other)} if other else {}
    return Settings.from_env({"MODEL": "bundled", "MAX_LOADED_MODELS": "2", "CANARY_JOBS": "0", **models, **env})
