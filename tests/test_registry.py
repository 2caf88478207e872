"""Which models stay loaded, with fake ones: each test decides when a step of theirs is over."""

import asyncio
import gc
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fakes import FakeEngine, FakeHub, segment

from whisper_worker.errors import EXIT_SICK, ModelFailed, Unhealthy, UnknownModel
from whisper_worker.health import Canary, Health
from whisper_worker.model_files import ModelFiles
from whisper_worker.models import Catalog, ModelUnavailable
from whisper_worker.registry import DOWNLOADERS, DRAIN_S, FAILED_S, Loaded, Registry
from whisper_worker.settings import Settings
from whisper_worker.transcript import Said

SOON_S = 20
PATIENCE_S = 1000.0  # longer than any test


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001  # no two uses at the same time
        return self.now


class House:
    """A registry with its hub. The default model, `tiny`, is loaded; any other can be."""

    def __init__(
        self,
        places: int = 1,
        patience_s: float = PATIENCE_S,
        drain_s: float = DRAIN_S,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.settings = Settings.from_env(
            {
                "MODEL": "tiny",
                "MODELS": "*",
                "MAX_LOADED_MODELS": str(places),
                "CANARY_JOBS": "1",
                "CHECK_WORDS": "false",
            }
        )
        self.hub = FakeHub()
        self.clock = Clock()
        self.health = Health(self.settings)
        self.registry = Registry(
            self.settings,
            Catalog.from_settings(self.settings),
            self.health,
            self.hub.load,
            find=self.hub.find,
            download=self.hub.download,
            patience_s=patience_s,
            drain_s=drain_s,
            clock=clock or self.clock,
        )
        engine = self.hub.engine("tiny")
        self.registry.preload(Loaded(engine, Canary(engine, self.settings, self.health), "tiny"))
        self.registry.warm_up()
        self._jobs: list[Job] = []

    def run(self, act: Callable[["House"], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            await asyncio.wait_for(act(self), SOON_S)
            for job in reversed(self._jobs):  # first those who wait: nothing is to be loaded for them
                await job.leave()

        try:
            asyncio.run(run())
        finally:
            self.registry.close()
            self.health.close()

    def job(self, name: str | None) -> "Job":
        job = Job(self.registry, name)
        self._jobs.append(job)
        return job

    async def until_found(self) -> None:
        """Until somebody waits for a place, the files of the model having been found."""
        while not self.registry._waiting():  # noqa: ASYNC110  (the registry tells nobody)
            await asyncio.sleep(0)

    def pass_time(self, seconds: float) -> None:
        """And have the registry look at it, as its timer would."""
        self.clock.now += seconds
        self.registry._arrange()

    def hold_downloads(self, count: int) -> list[str]:
        """The names of models whose downloads hang."""
        names = [f"org/far-{number}" for number in range(count)]
        self.hub.far.update(names)
        for name in names:
            self.hub.hold(f"download {name}")
        return names

    async def use_tiny_during(self, step: str) -> None:
        """A step on the way of a job to `base`, which has that in the end."""
        self.hub.hold(step)
        job = self.job("base")
        await self.hub.begun(step)
        await self.use("tiny")
        self.hub.let_go(step)
        await job.begun()

    async def use(self, *names: str) -> None:
        for name in names:
            async with self.registry.leased(name) as model:
                assert model.name == name


class Job:
    """Leases a model, and keeps it until it is ended."""

    def __init__(self, registry: Registry, name: str | None) -> None:
        self.has_it = asyncio.Event()
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._run(registry, name))

    async def _run(self, registry: Registry, name: str | None) -> None:
        async with registry.leased(name) as self.model:
            self.has_it.set()
            await self._end.wait()

    async def begun(self) -> "Job":
        await asyncio.wait_for(self.has_it.wait(), SOON_S)
        return self

    async def end(self) -> None:
        self._end.set()
        await asyncio.wait_for(self.task, SOON_S)

    async def error(self) -> BaseException:
        await asyncio.wait([self.task], timeout=SOON_S)
        error = self.task.exception()
        assert error
        return error

    async def cancel(self) -> None:
        await self.leave()
        assert self.task.cancelled()

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def turns() -> None:
    """As many as whatever can go on without a thread needs."""
    for _ in range(10):
        await asyncio.sleep(0)


def house(places: int = 1) -> Callable[[Callable[[House], Coroutine[Any, Any, None]]], Callable[[], None]]:
    """Makes a test of a coroutine, in a house with so many places for models."""

    def make(act: Callable[[House], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def test() -> None:
            House(places).run(act)

        test.__name__, test.__doc__ = act.__name__, act.__doc__
        return test

    return make


# --- loading


@house()
async def test_the_model_of_the_start_is_there_at_once(house: House) -> None:
    job = await house.job(None).begun()
    assert job.model.name == "tiny"
    assert house.hub.steps == []
    await job.end()


@house()
async def test_a_model_that_is_not_on_offer_is_refused(house: House) -> None:
    with pytest.raises(UnknownModel):
        async with house.registry.leased("../models/mine"):
            pass
    await house.use("base")  # any that has a public name is


@house(places=2)
async def test_a_model_is_loaded_once_however_many_ask_at_the_same_moment(house: House) -> None:
    jobs = [house.job(name) for name in ("base", "base", "Systran/faster-whisper-base") * 3]
    models = {(await job.begun()).model for job in jobs}
    assert [model.name for model in models] == ["base"]
    assert house.hub.steps == ["find base", "load base"]
    for job in jobs:
        await job.end()


@house(places=2)
async def test_a_model_is_warmed_up_before_it_is_leased(house: House) -> None:
    await house.use("base")
    assert house.hub.engines["base"].pieces == 1


@house(places=3)
async def test_several_models_load_at_the_same_time(house: House) -> None:
    house.hub.hold("load base")
    house.hub.hold("load small")
    jobs = [house.job("base"), house.job("small")]
    await house.hub.begun("load base")
    await house.hub.begun("load small")
    house.hub.let_go("load small")
    await jobs[1].begun()
    house.hub.let_go("load base")
    await jobs[0].begun()


@house(places=2)
async def test_jobs_of_a_loaded_model_go_on_while_others_are_freed_and_loaded(house: House) -> None:
    await house.use("base", "tiny")
    steps = ["find small", "free base", "load small"]
    for step in steps:
        house.hub.hold(step)
    job = house.job("small")
    for step in steps:
        await house.hub.begun(step)
        await house.use("tiny")
        house.hub.let_go(step)
    await job.begun()


# --- places


@house(places=2)
async def test_the_idle_model_that_was_used_least_recently_goes_first(house: House) -> None:
    await house.use("base", "tiny", "small")
    assert house.hub.steps[-2:] == ["free base", "load small"]
    await house.use("small", "tiny", "medium")
    assert house.hub.steps[-2:] == ["free small", "load medium"]


@house(places=2)
async def test_no_more_models_are_loaded_than_there_are_places(house: House) -> None:
    loaded = {"tiny"}
    for name in ["base", "small", "tiny", "medium", "base", "tiny"]:
        await house.use(name)
    for what, name in (step.split() for step in house.hub.steps):
        if what == "load":
            loaded.add(name)
        elif what == "free":
            loaded.remove(name)
        assert len(loaded) <= 2


@house()
async def test_a_leased_model_is_not_freed(house: House) -> None:
    first, second = await house.job("tiny").begun(), await house.job("tiny").begun()
    other = house.job("base")
    await house.hub.begun("find base")
    await first.end()
    await turns()
    assert house.hub.steps == ["find base"]
    await second.end()
    await other.begun()
    assert house.hub.steps == ["find base", "free tiny", "load base"]


@house()
async def test_a_model_that_is_tried_is_not_freed(house: House) -> None:
    trying, well = threading.Event(), threading.Event()
    job = await house.job("tiny").begun()

    def hear(*_: object) -> Said:
        trying.set()
        well.wait(SOON_S)
        return Said((segment(0, 1),))

    assert isinstance(job.model.engine, FakeEngine)
    job.model.engine.act = hear
    job.model.canary.count_job()
    await asyncio.to_thread(trying.wait, SOON_S)
    await job.end()
    other = house.job("base")
    await house.until_found()
    assert house.hub.steps == ["find base"]
    well.set()
    await other.begun()


@house()
async def test_the_files_are_found_before_another_model_is_freed(house: House) -> None:
    await house.use_tiny_during("find base")
    assert house.hub.steps == ["find base", "free tiny", "load base"]


@house()
async def test_a_model_that_does_not_exist_costs_nobody_anything(house: House) -> None:
    house.hub.fails["find org/none"] = ModelUnavailable("the model 'org/none' can't be downloaded: NotFound")
    error = await house.job("org/none").error()
    assert isinstance(error, ModelFailed)
    assert isinstance(error.__cause__, ModelUnavailable)
    await house.use("tiny")
    assert house.hub.steps == ["find org/none"]


# --- downloads


@house()
async def test_what_is_not_on_this_machine_is_downloaded_before_another_model_is_freed(house: House) -> None:
    house.hub.far.add("base")
    await house.use_tiny_during("download base")
    assert house.hub.steps == ["find base", "download base", "free tiny", "load base"]


@house()
async def test_what_is_on_this_machine_is_found_beside_any_number_of_downloads(house: House) -> None:
    names = house.hold_downloads(DOWNLOADERS + 1)
    jobs = [house.job(name) for name in names]
    first = await house.hub.begun_of(names, DOWNLOADERS)
    await house.use("base")
    house.hub.let_go(f"download {first[0]}")
    await house.hub.begun_of(names, DOWNLOADERS + 1)  # the last was in line
    for job, name in zip(jobs, names, strict=True):
        await job.leave()
        house.hub.let_go(f"download {name}")


# --- patience


@house()
async def test_jobs_of_a_loaded_model_pass_those_of_another_for_a_while(house: House) -> None:
    before = await house.job("tiny").begun()
    other = house.job("base")
    await house.until_found()
    await house.use("tiny")
    await turns()
    assert not other.has_it.is_set()
    await before.end()
    await other.begun()


@house()
async def test_then_they_queue_behind_them(house: House) -> None:
    before, short = await house.job("tiny").begun(), await house.job("tiny").begun()
    other = house.job("base")
    await house.until_found()
    house.clock.now += PATIENCE_S
    await short.end()
    behind = house.job("tiny")
    await turns()
    assert not behind.has_it.is_set()
    await before.end()
    await other.begun()
    assert not behind.has_it.is_set()
    await other.end()
    await behind.begun()
    steps = [step for step in house.hub.steps if not step.startswith("find")]
    assert steps == ["free tiny", "load base", "free base", "load tiny"]


def test_a_model_that_is_never_idle_does_not_starve_others() -> None:
    house = House(patience_s=0.05, clock=time.monotonic)

    async def short_job() -> None:
        async with house.registry.leased("tiny"):
            await asyncio.sleep(0.05)

    async def run() -> None:
        other, jobs = house.job("base"), []
        while not other.has_it.is_set():
            jobs.append(asyncio.create_task(short_job()))
            await asyncio.sleep(0.005)  # several have it at any time
        await other.end()
        await asyncio.gather(*jobs)

    asyncio.run(asyncio.wait_for(run(), SOON_S))
    house.registry.close()
    house.health.close()


@house()
async def test_a_model_that_has_just_come_stays_as_long_as_the_others_waited(house: House) -> None:
    house.hub.hold("load base")
    base = house.job("base")
    await house.hub.begun("load base")
    tiny = house.job("tiny")
    await house.until_found()
    house.clock.now += PATIENCE_S
    house.hub.let_go("load base")
    await base.begun()
    await house.use("base")
    house.clock.now += PATIENCE_S
    await house.use("base")
    late = house.job("base")
    await turns()
    assert not late.has_it.is_set()
    await base.end()
    await tiny.begun()


async def reserved(house: House) -> tuple[Job, Job, Job]:
    """A job that has base, one that has waited too long for small, and one that waits behind that for base."""
    await house.use("base")
    job, short = await house.job("base").begun(), await house.job("base").begun()
    other = house.job("small")
    await house.until_found()
    house.clock.now += PATIENCE_S
    await short.end()
    behind = house.job("base")
    await turns()
    assert not behind.has_it.is_set()
    return job, other, behind


@house()
async def test_once_nobody_waits_for_another_model_those_behind_go_on(house: House) -> None:
    job, other, behind = await reserved(house)
    await other.cancel()
    await behind.begun()
    await job.end()
    assert "free base" not in house.hub.steps


# --- drain windows


@house()
async def test_steady_short_jobs_make_way_in_the_first_window(house: House) -> None:
    running = [await house.job("tiny").begun() for _ in range(3)]
    other = house.job("base")
    await house.until_found()
    house.pass_time(PATIENCE_S)
    behind = house.job("tiny")
    for job in running:
        house.pass_time(DRAIN_S / 4)
        await job.end()
    await other.begun()
    assert not behind.has_it.is_set()


@house()
async def test_beside_an_endless_job_others_are_let_in_again_and_again(house: House) -> None:
    endless = await house.job("tiny").begun()
    other = house.job("base")
    await house.until_found()
    for window_s in (DRAIN_S, 2 * DRAIN_S, 4 * DRAIN_S, 8 * DRAIN_S):
        house.pass_time(PATIENCE_S)
        behind = house.job("tiny")
        house.pass_time(window_s - 1)
        await turns()
        assert not behind.has_it.is_set()
        house.pass_time(1)
        await behind.begun()
        await behind.end()
        house.pass_time(PATIENCE_S - 1)
        await house.use("tiny")
    assert not other.has_it.is_set()
    await endless.end()
    await other.begun()


@house()
async def test_jobs_longer_than_a_window_make_way_in_a_longer_one(house: House) -> None:
    running = await house.job("tiny").begun()
    other = house.job("base")
    await house.until_found()
    for window_s in (DRAIN_S, 2 * DRAIN_S):  # each job begins before the one before it ends
        house.pass_time(PATIENCE_S)
        behind = house.job("tiny")
        house.pass_time(window_s)
        await behind.begun()
        await running.end()
        running = behind
    house.pass_time(PATIENCE_S)
    behind = house.job("tiny")
    house.pass_time(3 * DRAIN_S)
    await running.end()
    await other.begun()
    assert not behind.has_it.is_set()


async def failed_window(house: House) -> tuple[Job, Job]:
    """The endless job that has tiny, and one that still waits for base after a window."""
    endless = await house.job("tiny").begun()
    other = house.job("base")
    await house.until_found()
    house.pass_time(PATIENCE_S)
    house.pass_time(DRAIN_S)
    await house.use("tiny")
    return endless, other


async def check_first_window(house: House, name: str) -> None:
    """Of those who have waited for another model than this."""
    house.pass_time(PATIENCE_S)
    behind = house.job(name)
    await turns()
    assert not behind.has_it.is_set()
    house.pass_time(DRAIN_S)
    await behind.begun()


@house()
async def test_once_nobody_waits_windows_are_short_again(house: House) -> None:
    _, other = await failed_window(house)
    await other.cancel()
    house.job("base")
    await house.until_found()
    await check_first_window(house, "tiny")


@house()
async def test_once_the_place_has_changed_hands_windows_are_short_again(house: House) -> None:
    endless, other = await failed_window(house)
    await endless.end()
    await other.begun()
    house.job("tiny")
    await house.until_found()
    await check_first_window(house, "base")


@house(places=2)
async def test_where_one_place_is_not_emptied_the_next_one_is_tried(house: House) -> None:
    await house.job("tiny").begun()
    base = await house.job("base").begun()
    other = house.job("small")
    await house.until_found()
    house.pass_time(PATIENCE_S)
    await house.use("base")
    house.pass_time(DRAIN_S)
    behind = house.job("base")
    await turns()
    assert not behind.has_it.is_set()
    await house.use("tiny")
    await base.end()
    await other.begun()


def test_a_window_begins_and_ends_by_itself() -> None:
    async def act(house: House) -> None:
        await house.job("tiny").begun()
        house.job("base")
        for _ in range(2):
            while not any(place.is_reserved for place in house.registry._places.values()):  # noqa: ASYNC110
                await asyncio.sleep(0)
            await house.job("tiny").begun()

    House(patience_s=0.02, drain_s=0.02, clock=time.monotonic).run(act)


# --- those who leave


@house()
async def test_who_leaves_while_waiting_for_a_place_leaves_nothing(house: House) -> None:
    job = await house.job("tiny").begun()
    other = house.job("base")
    await house.until_found()
    await other.cancel()
    await job.end()
    await house.use("tiny")
    assert house.hub.steps == ["find base"]


@house()
async def test_files_that_nobody_waits_for_any_more_free_no_model(house: House) -> None:
    house.hub.hold("find base")
    other = house.job("base")
    await house.hub.begun("find base")
    await other.cancel()
    house.hub.let_go("find base")
    house.hub.hold("find small")
    small = house.job("small")
    await house.hub.begun("find small")
    await house.use("tiny")
    assert house.hub.steps == ["find base", "find small"]
    house.hub.let_go("find small")
    await small.begun()


@house()
async def test_a_load_goes_on_when_one_of_those_who_wait_leaves(house: House) -> None:
    house.hub.hold("load base")
    leaver, stayer = house.job("base"), house.job("base")
    await house.hub.begun("load base")
    await leaver.cancel()
    house.hub.let_go("load base")
    await stayer.begun()


@house()
async def test_a_model_that_all_have_left_while_it_was_loaded_stays_idle(house: House) -> None:
    house.hub.hold("load base")
    leaver = house.job("base")
    await house.hub.begun("load base")
    await leaver.cancel()
    house.hub.let_go("load base")
    await house.use("base")
    assert house.hub.steps.count("load base") == 1
    await house.use("tiny")


@house()
async def test_a_lease_that_comes_with_the_cancellation_is_given_back(house: House) -> None:
    job, other, behind = await reserved(house)
    other.task.cancel()  # in the next turn, it makes way for the one behind
    asyncio.get_running_loop().call_soon(behind.task.cancel)
    await asyncio.wait([behind.task])
    assert behind.task.cancelled()
    assert not behind.has_it.is_set()
    await job.end()
    await house.use("small")


# --- failures


@house()
async def test_a_load_that_fails_fails_those_who_wait_for_it_and_nobody_else(house: House) -> None:
    cause = RuntimeError("can't open /models/base/model.bin")
    house.hub.hold("load base")
    house.hub.fails["load base"] = cause
    waiting = [house.job("base"), house.job("base")]
    await house.hub.begun("load base")
    other = house.job("tiny")
    house.hub.let_go("load base")
    errors = [await job.error() for job in waiting]
    assert [str(error) for error in errors] == ["the model base can't be loaded"] * 2
    assert {type(error) for error in errors} == {ModelFailed}
    assert errors[0] is not errors[1]
    assert errors[0].__cause__ is cause
    await other.begun()


@house()
async def test_a_model_that_failed_is_not_tried_again_for_a_minute(house: House) -> None:
    house.hub.fails["load base"] = RuntimeError("broken")
    first = await house.job("base").error()
    await house.use("tiny")
    before = list(house.hub.steps)
    again = await house.job("base").error()
    assert (type(again), str(again)) == (type(first), str(first))
    await house.use("tiny")
    assert house.hub.steps == before
    house.clock.now += FAILED_S
    del house.hub.fails["load base"]
    await house.use("base")


@house()
async def test_a_model_that_is_deaf_is_freed_and_fails(house: House) -> None:
    def deaf(files: ModelFiles) -> FakeEngine:
        engine = house.hub.load(files)
        engine.act = lambda *_: Said()
        return engine

    house.registry._load_engine = deaf
    error = await house.job("base").error()
    assert isinstance(error, ModelFailed)
    assert "hears nothing" in str(error.__cause__)
    assert house.hub.steps == ["find base", "free tiny", "load base", "free base"]
    house.registry._load_engine = house.hub.load
    await house.use("tiny")


@house()
async def test_a_device_that_is_lost_while_loading_is_the_end_of_the_worker(house: House) -> None:
    house.hub.fails["load base"] = RuntimeError("CUDA failed with error an illegal memory access was encountered")
    error = await house.job("base").error()
    assert isinstance(error, Unhealthy)
    assert house.health.unhealthy
    assert house.health.unhealthy.exit_code == error.exit_code == EXIT_SICK


@house()
async def test_a_model_that_cannot_be_freed_makes_room_all_the_same(house: House) -> None:
    house.hub.fails["free tiny"] = RuntimeError("CUDA failed")
    await house.use("base")


# --- memory and the watchdog


@house(places=2)
async def test_nothing_refers_to_a_model_that_was_freed(house: House) -> None:
    await house.use("base")
    engine = weakref.ref(house.hub.engines.pop("base"))
    await house.use("tiny", "small")
    assert house.hub.steps[-2:] == ["free base", "load small"]
    assert engine() is None


@house()
async def test_a_failure_that_is_remembered_keeps_no_weights(house: House) -> None:
    class Weights:
        pass

    kept: list[weakref.ref[Weights]] = []

    def load(files: ModelFiles) -> FakeEngine:
        weights = Weights()
        kept.append(weakref.ref(weights))
        raise RuntimeError("broken")

    house.registry._load_engine = load
    error = await house.job("base").error()
    gc.collect()
    assert [weights() for weights in kept] == [None]
    assert "broken" in "".join(traceback.format_exception(error))


@house(places=2)
async def test_the_longest_call_is_that_of_any_model(house: House) -> None:
    assert house.registry.longest_call_s == 0
    await house.use("base")
    house.hub.engines["base"].longest_call_s = 7.0
    assert house.registry.longest_call_s == 7
    await house.use("tiny", "small")
    assert house.registry.longest_call_s == 0


@house(places=2)
async def test_a_warm_up_is_watched_as_well(house: House) -> None:
    seen: list[float] = []

    def hang(files: ModelFiles) -> FakeEngine:
        engine = house.hub.load(files)
        engine.longest_call_s = 9.0

        def hear(*_: object) -> Said:
            seen.append(house.registry.longest_call_s)
            return Said((segment(0, 1),))

        engine.act = hear
        return engine

    house.registry._load_engine = hang
    await house.use("base")
    assert seen == [9.0]


def test_unloading_is_logged_with_its_seconds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "whisper_worker"):
        House().registry.close()
    [line] = [message for message in caplog.messages if message.startswith("event=model_unloaded ")]
    assert line.startswith("event=model_unloaded model=tiny seconds=")


# --- the end


def test_closed_it_has_freed_all() -> None:
    house = House(places=2)
    asyncio.run(house.use("base"))
    house.registry.close()
    assert sorted(house.hub.steps[-2:]) == ["free base", "free tiny"]
    house.health.close()


def test_a_loop_that_ends_while_a_model_is_loaded_leaves_nothing() -> None:
    house = House()

    async def leave() -> None:
        house.hub.hold("load base")
        house.job("base")
        await house.hub.begun("load base")

    async def come_back() -> None:
        house.hub.let_go("load base")
        await house.hub.begun("free base")
        await house.use("base")

    asyncio.run(leave())
    asyncio.run(come_back())
    house.registry.close()
    assert house.hub.steps.count("load base") == house.hub.steps.count("free base") == 2
    house.health.close()
