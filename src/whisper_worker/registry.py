"""The loaded models: which stay, which goes for another, and who waits. Knows no job.

A model is leased for as long as a job uses it; who needs one that isn't loaded waits until it is. Its files are found,
and downloaded, before another is freed for it: a model that can't be had costs those of others nothing.

All is decided on the event loop, in `_arrange`. Some threads look for files on this machine, others wait for downloads,
so that a slow hub keeps nobody from what is here; again others free and load models.
"""

import asyncio
import ctypes
import gc
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from whisper_worker import log, model_files
from whisper_worker.errors import EXIT_SICK, ModelFailed, Unhealthy, WorkerError, forget_locals
from whisper_worker.health import Canary, Health
from whisper_worker.model_files import ModelFiles, find_here
from whisper_worker.models import Catalog, Model
from whisper_worker.settings import Settings
from whisper_worker.shared_model import is_device_lost
from whisper_worker.transcriber import Transcriber

PATIENCE_S = 5.0  # so long the jobs of one model go on passing those that wait for another
DRAIN_S = 15.0  # so long they then wait, the first time, for it to be idle
FAILED_S = 60.0  # so long a model that failed isn't tried again: each try may have cost another model its place
FINDERS = 8  # look for models on this machine's disks
DOWNLOADERS = 8  # wait for downloads, each for one at a time


@dataclass(frozen=True)
class Loaded:
    """A model for jobs to use, as long as they lease it."""

    engine: Transcriber
    canary: Canary
    name: str


@dataclass(eq=False)
class _Place:
    """One of the places for loaded models, with a model that is there, or on its way."""

    files: ModelFiles | None  # None for the one that start-up has loaded
    loaded: Loaded | None = None
    leases: int = 0
    is_reserved: bool = False  # for those who wait for another model: no new leases
    reserved_until: float = 0.0
    windows: int = 0  # that it was reserved for, and not idle by their end
    used: float = 0.0
    since: float = 0.0  # it is open to all: it was loaded, or its last window ended

    @property
    def is_idle(self) -> bool:
        return self.loaded is not None and not self.leases and self.loaded.canary.is_idle


@dataclass(eq=False)
class _Want:
    """Those who wait for one model, and its files once they are found."""

    waiting: "list[asyncio.Future[Loaded]]" = field(default_factory=list)
    files: ModelFiles | None = None
    since: float = 0.0  # its files are found

    @property
    def is_live(self) -> bool:
        return any(not future.done() for future in self.waiting)


@dataclass(frozen=True)
class _Failure:
    sentence: str
    cause: Exception
    until: float

    @property
    def error(self) -> WorkerError:
        """A new one for each job: a raised exception is written to."""
        if isinstance(self.cause, Unhealthy):
            return Unhealthy(str(self.cause), self.cause.exit_code)
        error = ModelFailed(self.sentence)
        error.__cause__ = self.cause
        return error


class Registry:
    """At most `max_loaded_models` models at a time, each loaded once for all jobs that use it.

    The least recently used one that nobody leases goes for another. When all are leased, the others wait until one
    isn't; and once they have waited for `patience_s`, the least recently used one takes no new leases, though not
    before it was open to all for as long itself, so that it can go when those that it has are given back.

    It does so for a window of `drain_s`. If it is still leased then, those who wait for it are let in, and the next
    window is that of another place, or, after `patience_s`, its own, twice as long; windows are short again once the
    place has changed hands or nobody waits for one. So short jobs make way in the first window, and jobs of any length
    in one that is longer than they are, after three times their length at most, and `patience_s` a window. Beside a
    very long job, others wait for one window at a time, and get in between two.

    `find` looks for a model's files on this machine, and tells None where `download` has to get them; `load` reads
    the weights. All are called on threads, several at once.
    """

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        health: Health,
        load: Callable[[ModelFiles], Transcriber],
        *,
        find: Callable[[Model], ModelFiles | None] = find_here,
        download: Callable[[Model], ModelFiles] | None = None,
        patience_s: float = PATIENCE_S,
        drain_s: float = DRAIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._health = health
        self._load_engine = load
        self._find_files = find
        self._download_files = download or partial(model_files.download, settings=settings)
        self._patience_s = patience_s
        self._drain_s = drain_s
        self._clock = clock
        self._places: dict[Model, _Place] = {}
        self._wants: dict[Model, _Want] = {}
        self._failures: dict[Model, _Failure] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._finders = ThreadPoolExecutor(FINDERS, "find")
        self._downloaders = ThreadPoolExecutor(DOWNLOADERS, "download")
        self._loaders = ThreadPoolExecutor(settings.max_loaded_models, "load")
        self._engines: set[Transcriber] = set()  # whose calls are watched; written by the loaders' threads, too

    def preload(self, loaded: Loaded) -> None:
        """Have the default model, which start-up has loaded; it is to be warmed up before the first job."""
        self._engines.add(loaded.engine)
        self._settle(self._catalog.default, _Place(None, used=self._clock()), loaded)

    def warm_up(self) -> None:
        """What was preloaded. Raises what `Canary.warm_up` raises."""
        for place in self._places.values():
            if place.loaded:
                place.loaded.canary.warm_up()
        _trim_heap()  # as below

    @asynccontextmanager
    async def leased(self, name: str | None) -> AsyncIterator[Loaded]:
        """The model that a caller calls so, None: the default. Inside the `with` it stays loaded.

        Raises UnknownModel, and ModelFailed or Unhealthy when it can't be loaded.
        """
        model = self._catalog.choose(name)
        loaded = await self._lease(model)
        try:
            yield loaded
        finally:
            self._give_back(model)

    @property
    def longest_call_s(self) -> float:
        """Seconds that the one call has been running, of whichever model, that began first; 0 when none is."""
        return max((engine.longest_call_s for engine in self._engines.copy()), default=0.0)

    def close(self) -> None:
        """Free all models. Jobs, and the loop they ran on, should have ended."""
        for pool in (self._finders, self._downloaders, self._loaders):
            pool.shutdown(wait=False, cancel_futures=True)
        for model in list(self._places):
            self._free(self._emptied(model))

    # Leases.

    async def _lease(self, model: Model) -> Loaded:
        place = self._places.get(model)
        if place and place.loaded and not place.is_reserved:
            return self._count(place, place.loaded)
        if (failure := self._failures.get(model)) and self._clock() < failure.until:
            raise failure.error
        future: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        want = self._wants.get(model)
        if want is None:
            want = self._wants[model] = _Want(files=place.files if place else None, since=self._clock())
            if want.files is None:
                self._start(self._find(model, want))
        want.waiting.append(future)
        self._arrange()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                self._give_back(model)  # it came with the cancellation
            else:
                want.waiting.remove(future)
                self._drop(model, want)
                self._arrange()
            raise

    def _count(self, place: _Place, loaded: Loaded) -> Loaded:
        place.leases += 1
        place.used = self._clock()
        return loaded

    def _give_back(self, model: Model) -> None:
        place = self._places[model]
        place.leases -= 1
        place.used = self._clock()
        self._arrange()

    def _grant(self, model: Model) -> None:
        """All who wait for it have it now."""
        place, want = self._places[model], self._wants.pop(model, None)
        for future in want.waiting if want else ():
            if place.loaded and not future.done():
                future.set_result(self._count(place, place.loaded))

    def _fail(self, model: Model, sentence: str, cause: Exception) -> None:
        log.event("model_failed", level=log.WARNING, model=model.name, error=cause)
        forget_locals(cause)
        now = self._clock()
        self._failures = {other: failure for other, failure in self._failures.items() if now < failure.until}
        self._failures[model] = failure = _Failure(sentence, cause, now + FAILED_S)
        want = self._wants.pop(model, None)
        for future in want.waiting if want else ():
            if not future.done():
                future.set_exception(failure.error)

    def _drop(self, model: Model, want: _Want) -> None:
        """Unless somebody waits, or its files are still being found, for whoever comes meanwhile."""
        if want.files and not want.is_live and self._wants.get(model) is want:
            del self._wants[model]

    # Places.

    def _arrange(self) -> None:
        """Give places to those who wait, as far as there are any. To be called after each change."""
        while (waiting := self._waiting()) and self._fill(*waiting[0]):
            pass
        self._reserve([want for _, want in waiting])

    def _waiting(self) -> list[tuple[Model, _Want]]:
        """For a place, in the order in which their files were found."""
        wants = sorted(self._wants.items(), key=lambda item: item[1].since)
        return [(model, want) for model, want in wants if want.files and want.is_live and model not in self._places]

    def _fill(self, model: Model, want: _Want) -> bool:
        """Begin to load a model in a free place, or in that of an idle one, which is freed before; False: no place."""
        before = None
        if len(self._places) >= self._settings.max_loaded_models:
            idle = next((other for other, place in self._by_use() if place.is_idle), None)
            if idle is None:
                return False
            before = self._emptied(idle)
        assert want.files
        place = self._places[model] = _Place(want.files)
        self._start(self._load(model, place, want.files, before))
        return True

    def _emptied(self, model: Model) -> _Place:
        place = self._places.pop(model)
        if place.loaded:
            place.loaded.canary.close()
        return place

    def _by_use(self) -> list[tuple[Model, _Place]]:
        """Those with a loaded model, in the order in which they are to go: reserved ones first; then those that weren't
        reserved in vain, or less often; of these the one that wasn't used for longest."""
        loaded = [(model, place) for model, place in self._places.items() if place.loaded]
        return sorted(loaded, key=lambda item: (not item[1].is_reserved, item[1].windows, item[1].used))

    def _reserve(self, waiting: list[_Want]) -> None:
        """Keep new leases away from as many models as there are others that were waited for long enough."""
        now, looks = self._clock(), []
        were_reserved = [(model, place) for model, place in self._places.items() if place.is_reserved]
        for place in self._places.values():
            if not waiting:
                place.windows = 0
            elif place.is_reserved and now >= place.reserved_until:
                place.is_reserved, place.since = False, now
                place.windows += 1
        for number, (_, place) in enumerate(self._by_use()):
            was_reserved, place.is_reserved = place.is_reserved, False
            if number >= len(waiting):
                continue
            due = max(waiting[number].since, place.since) + self._patience_s
            if now < due:
                looks.append(due)
                continue
            if not was_reserved:
                place.reserved_until = now + self._drain_s * 2**place.windows
            place.is_reserved = True
            looks.append(place.reserved_until)
        for model, place in were_reserved:
            if not place.is_reserved:
                self._grant(model)
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if looks:
            self._timer = asyncio.get_running_loop().call_later(min(looks) - now, self._arrange)

    # Work.

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """It goes on when those who wait for it leave."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _find(self, model: Model, want: _Want) -> None:
        try:
            here = await asyncio.wrap_future(self._finders.submit(self._find_files, model))
            want.files = here or await asyncio.wrap_future(self._downloaders.submit(self._download_files, model))
        except asyncio.CancelledError:  # the loop ends
            self._wants.pop(model, None)
            raise
        except Exception as error:  # ModelUnavailable, or what a disk says
            self._fail(model, f"the model {model.name} isn't to be had: it doesn't exist, or not at the moment", error)
        else:
            want.since = self._clock()
            self._drop(model, want)
        self._arrange()

    async def _load(self, model: Model, place: _Place, files: ModelFiles, before: _Place | None) -> None:
        work = self._loaders.submit(self._replace, before, files)
        try:
            loaded = await asyncio.wrap_future(work)
        except asyncio.CancelledError:  # the loop ends
            work.add_done_callback(lambda work: self._free_all(work, before))
            del self._places[model]
            raise
        except Exception as error:
            # Whatever CTranslate2 and the tokenizer say of broken files, or of too little memory.
            del self._places[model]
            if isinstance(error, Unhealthy):
                self._health.give_up(error)
            self._fail(model, f"the model {model.name} can't be loaded", error)
        else:
            place.used = place.since = self._clock()
            self._settle(model, place, loaded)
        self._arrange()

    def _settle(self, model: Model, place: _Place, loaded: Loaded) -> None:
        place.loaded = loaded
        self._places[model] = place
        loaded.canary.on_idle = self._arrange
        self._grant(model)

    # On the loaders' threads.

    def _replace(self, before: _Place | None, files: ModelFiles) -> Loaded:
        """Raises what loading and the warm-up raise."""
        if before:
            self._free(before)
        try:
            engine = self._load_engine(files)
        except RuntimeError as error:
            if is_device_lost(error):
                raise Unhealthy("the device failed: send the job again, another worker takes it", EXIT_SICK) from error
            raise
        self._engines.add(engine)
        loaded = Loaded(engine, Canary(engine, self._settings, self._health), files.name)
        try:
            loaded.canary.warm_up()
        except BaseException:
            loaded.canary.close()
            self._free(_Place(files, loaded))
            raise
        _trim_heap()  # reading the weights took more than they need
        return loaded

    def _free(self, place: _Place) -> None:
        """Nothing here may keep a reference to the model: its memory is needed for the next."""
        loaded, place.loaded = place.loaded, None
        if loaded is None:
            return
        began, name = time.monotonic(), loaded.name
        self._engines.discard(loaded.engine)
        try:
            loaded.engine.close()
        except RuntimeError as error:
            log.event("unload_failed", level=log.ERROR, model=name, error=error)
        del loaded
        gc.collect()
        _trim_heap()
        log.event("model_unloaded", model=name, seconds=time.monotonic() - began)

    def _free_all(self, work: "Future[Loaded]", before: _Place | None) -> None:
        """What nobody is there for any more."""
        if before:
            self._free(before)
        if not work.cancelled() and not work.exception():
            self._free(_Place(None, work.result()))


def _trim_heap() -> None:
    """glibc keeps freed memory for itself."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
