"""The watch over the model, and the clip that it is tried on."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest
from fakes import FakeEngine, segment
from media import CLIP_WORDS

from whisper_worker.engine import Engine
from whisper_worker.errors import EXIT_HUNG, EXIT_SICK, OutOfMemory, Unhealthy
from whisper_worker.health import TRUSTED_S, Canary, Health
from whisper_worker.settings import Settings
from whisper_worker.transcript import Said

SOON_S = 20
SETTINGS = Settings.from_env({"CANARY_JOBS": "2"})


class Model(FakeEngine):
    """Hears the clip until it falls ill: then it hears nothing, or fails with an error, until it is loaded again."""

    def __init__(self) -> None:
        super().__init__(self._hear)
        self.illness: Exception | str | None = None  # what it fails with, or what it hears instead
        self.reload_heals = True
        self.reload_error: Exception | None = None

    def _hear(self, *_: object) -> Said:
        if isinstance(self.illness, Exception):
            raise self.illness
        text = CLIP_WORDS if self.illness is None else self.illness
        return Said((segment(0, 4, text),) if text else ())

    def reload(self) -> None:
        super().reload()
        if self.reload_error:
            raise self.reload_error
        if self.reload_heals:
            self.illness = None


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def alarms() -> list[Unhealthy]:
    return []


@pytest.fixture
def health(alarms: list[Unhealthy]) -> Iterator[Health]:
    health = Health(SETTINGS, alarms.append)
    yield health
    health.close()


@pytest.fixture
def canary(model: Model, health: Health, clock: Clock) -> Iterator[Canary]:
    """Of a model that is warm."""
    canary = Canary(model, SETTINGS, health, clock)
    canary.warm_up()
    model.pieces = 0
    yield canary
    canary.close()


def exit_codes(alarms: list[Unhealthy]) -> list[int]:
    return [alarm.exit_code for alarm in alarms]


# --- the warm-up


def test_the_real_model_hears_the_clip_and_fails_as_it_fails(
    english: Engine, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = Canary(english, SETTINGS, health)
    canary.warm_up()
    assert " ".join(canary._words) == f"{CLIP_WORDS}."

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Library libcublas.so.12 is not found or cannot be loaded")

    monkeypatch.setattr(english._whisper, "transcribe", fail)
    with pytest.raises(RuntimeError, match="libcublas"):
        canary.warm_up()
    canary.close()


def test_a_warm_up_that_hears_nothing_fails(model: Model, health: Health) -> None:
    model.illness = ""
    with pytest.raises(RuntimeError, match="hears nothing"):
        Canary(model, SETTINGS, health).warm_up()


@pytest.mark.parametrize("words", ["thank you for watching", "bitte öffnen Sie das Fenster und schließen Sie die Tür"])
def test_a_model_that_hears_other_words_is_refused_unless_told_otherwise(
    words: str, model: Model, health: Health
) -> None:
    model.illness = words
    with pytest.raises(RuntimeError, match=f"heard '{words.lower()}' in a clip that says .*; with CHECK_WORDS=false"):
        Canary(model, SETTINGS, health).warm_up()
    any_words = Settings.from_env({"CHECK_WORDS": "false"})
    Canary(model, any_words, health).warm_up()


# --- the trial


def test_a_model_that_is_well_is_left_alone(canary: Canary, model: Model, alarms: list[Unhealthy]) -> None:
    asyncio.run(canary.try_model())
    assert (model.pieces, model.reloads, canary.reloads, alarms) == (1, 0, 0, [])


ILL: dict[str, Exception | str] = {
    "deaf": "",
    "hears something else": "thank you for watching",
    "fails": RuntimeError("x"),
}


@pytest.mark.parametrize("illness", ILL.values(), ids=ILL.keys())
def test_a_model_that_is_ill_is_loaded_again(
    illness: Exception | str, canary: Canary, model: Model, alarms: list[Unhealthy]
) -> None:
    model.illness = illness
    asyncio.run(canary.try_model())
    assert (model.reloads, canary.reloads, alarms) == (1, 1, [])


@pytest.mark.parametrize("illness", ILL.values(), ids=ILL.keys())
def test_a_model_that_is_ill_even_then_is_past_help(
    illness: Exception | str, canary: Canary, health: Health, model: Model, alarms: list[Unhealthy]
) -> None:
    model.illness, model.reload_heals = illness, False
    asyncio.run(canary.try_model())
    assert model.reloads == 1
    assert exit_codes(alarms) == [EXIT_SICK]
    assert health.unhealthy is alarms[0]


def test_a_model_that_cannot_be_loaded_again_is_past_help(
    canary: Canary, model: Model, alarms: list[Unhealthy]
) -> None:
    model.illness, model.reload_error = "", RuntimeError("no such file")
    asyncio.run(canary.try_model())
    assert exit_codes(alarms) == [EXIT_SICK]
    assert canary.reloads == 0


def test_a_slip_of_the_model_is_no_illness(canary: Canary, model: Model, alarms: list[Unhealthy]) -> None:
    model.illness = CLIP_WORDS.replace("window", "windows")
    asyncio.run(canary.try_model())
    assert (model.reloads, alarms) == (0, [])


def test_too_little_memory_for_the_trial_is_no_verdict(canary: Canary, model: Model, alarms: list[Unhealthy]) -> None:
    model.illness = OutOfMemory("too little")
    asyncio.run(canary.try_model())
    assert (model.reloads, alarms) == (0, [])
    asyncio.run(canary.try_model())
    assert model.pieces == 2  # it isn't trusted for that


def test_a_device_that_fails_in_the_trial_is_past_help_and_not_loaded_again(
    canary: Canary, model: Model, alarms: list[Unhealthy]
) -> None:
    model.illness = Unhealthy("the device has failed", EXIT_SICK)
    asyncio.run(canary.try_model())
    assert (model.reloads, alarms) == (0, [model.illness])


def test_a_model_that_was_right_is_trusted_for_a_minute(canary: Canary, model: Model, clock: Clock) -> None:
    asyncio.run(canary.try_model())
    model.illness = ""
    clock.now += TRUSTED_S - 1
    asyncio.run(canary.try_model())
    assert model.reloads == 0
    clock.now += 1
    asyncio.run(canary.try_model())
    assert model.reloads == 1


def test_those_who_ask_at_the_same_time_wait_for_one_trial(canary: Canary, model: Model) -> None:
    model.illness = ""

    async def ask() -> int:
        await canary.try_model()
        return canary.reloads

    async def ask_together() -> list[int]:
        return list(await asyncio.gather(*[ask() for _ in range(5)]))

    assert asyncio.run(ask_together()) == [1] * 5
    assert model.pieces == 2  # once deaf, once well


def test_a_model_past_help_is_tried_no_more(canary: Canary, health: Health, model: Model) -> None:
    health.give_up(Unhealthy("hangs", EXIT_HUNG))
    asyncio.run(canary.try_model())
    assert model.pieces == 0


def test_every_so_many_jobs_the_model_is_tried(canary: Canary, model: Model, clock: Clock) -> None:
    async def end_jobs(count: int) -> int:
        for _ in range(count):
            canary.count_job()
        await asyncio.gather(*canary._trials)
        clock.now += TRUSTED_S
        return model.pieces

    assert asyncio.run(end_jobs(1)) == 0
    assert asyncio.run(end_jobs(1)) == 1
    assert asyncio.run(end_jobs(1)) == 1
    assert asyncio.run(end_jobs(1)) == 2


def test_while_any_model_is_tried_it_is_told(canary: Canary, health: Health, model: Model) -> None:
    seen: list[bool] = []

    def hear(*_: object) -> Said:
        seen.append(health.is_trying_model)
        return model._hear()

    model.act = hear
    asyncio.run(canary.try_model())
    assert (seen, health.is_trying_model) == ([True], False)


def test_a_trial_that_nobody_waits_for_is_over_when_it_says_so(canary: Canary, model: Model) -> None:
    async def end_jobs() -> None:
        idle = asyncio.Event()
        canary.on_idle = idle.set
        canary.count_job()
        assert canary.is_idle
        canary.count_job()
        assert not canary.is_idle
        await asyncio.wait_for(idle.wait(), SOON_S)
        assert canary.is_idle

    asyncio.run(end_jobs())
    assert model.pieces == 1


def test_closed_it_tries_nothing(canary: Canary, model: Model) -> None:
    async def end_jobs() -> None:
        canary.close()
        canary.count_job()
        canary.count_job()
        assert canary.is_idle

    asyncio.run(end_jobs())
    assert model.pieces == 0


# --- the alarm


def test_the_first_reason_to_give_up_counts_and_is_told_once(health: Health, alarms: list[Unhealthy]) -> None:
    first, second = Unhealthy("hangs", EXIT_HUNG), Unhealthy("deaf", EXIT_SICK)
    health.give_up(first)
    health.give_up(second)
    assert alarms == [first]
    assert health.unhealthy is first


def test_a_call_that_takes_too_long_rings_the_alarm(model: Model) -> None:
    rung: Future[Unhealthy] = Future()
    health = Health(Settings.from_env({"WINDOW_TIMEOUT_S": "0.2"}), rung.set_result)
    model.longest_call_s = 0.19
    health.watch(lambda: model.longest_call_s)
    assert not wait([rung], 0.1).done
    model.longest_call_s = 0.21
    assert rung.result(SOON_S).exit_code == EXIT_HUNG
    health.close()


def test_closed_it_watches_no_more(health: Health) -> None:
    before = set(threading.enumerate())
    health.watch(lambda: 0.0)
    [watchdog] = set(threading.enumerate()) - before
    health.close()
    watchdog.join(SOON_S)
    assert not watchdog.is_alive()
