"""Whether this worker can still transcribe: a watch over the models' calls, and for each model a clip whose words are
known.

What is wrong for good ends in `alarm`: the jobs fail (`service`) and the process ends, so that RunPod starts another.
"""

import asyncio
import difflib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from whisper_worker import log
from whisper_worker.audio import Audio, decode
from whisper_worker.errors import EXIT_HUNG, EXIT_SICK, OutOfMemory, Unhealthy
from whisper_worker.pieces import Track, whole
from whisper_worker.request import Request
from whisper_worker.settings import Settings
from whisper_worker.stop import Alarm, Stop, in_thread
from whisper_worker.transcriber import Transcriber

CLIP = Path(__file__).with_name("warm_up.ogg")
WORDS = "please open the window and close the door before you go home"
ALIKE = 0.6  # how alike what is heard in the clip must be to what is said there, or was heard at first, from 0 to 1
TRUSTED_S = 60.0  # a model that was right isn't tried again for so long
LOOKS = 10  # at the calls that run, in the time that one may take


class Health:
    """Of the worker: watches the models' calls, and says once, by `alarm`, that the worker is past help."""

    def __init__(self, settings: Settings, on_alarm: Callable[[Unhealthy], None] = lambda _: None) -> None:
        self.alarm: Alarm[Unhealthy] = Alarm()
        self._on_alarm = on_alarm
        self._call_timeout_s = settings.window_timeout_s
        self._trials = 0
        self._closed = threading.Event()

    @property
    def unhealthy(self) -> Unhealthy | None:
        """Why the worker is past help, once it is."""
        return self.alarm.message

    def watch(self, longest_call_s: Callable[[], float]) -> None:
        """From now on, until `close()`, look at the running calls from a thread of its own. `longest_call_s` tells how
        many seconds the one has been running that began first."""
        threading.Thread(target=self._watch, args=[longest_call_s], name="watchdog", daemon=True).start()

    def give_up(self, error: Unhealthy) -> None:
        """The worker is past help: from any thread, more than once if need be."""
        if self.alarm.ring(error):
            self._on_alarm(error)
            log.event("unhealthy", level=log.ERROR, reason=error, exit_code=error.exit_code)

    @property
    def is_trying_model(self) -> bool:
        """Whether a thread is at work for a canary, of whichever model."""
        return self._trials > 0

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Around that of one model, on the event loop."""
        self._trials += 1
        try:
            yield
        finally:
            self._trials -= 1

    def close(self) -> None:
        self._closed.set()

    def _watch(self, longest_call_s: Callable[[], float]) -> None:
        while not self._closed.wait(self._call_timeout_s / LOOKS):
            if longest_call_s() > self._call_timeout_s:
                self.give_up(
                    Unhealthy("a call of the model hangs: send the job again, another worker takes it", EXIT_HUNG)
                )
                return


class Canary:
    """Tries one loaded model, loads it again when it hears wrong, and has `health` give up when that doesn't help."""

    def __init__(
        self,
        engine: Transcriber,
        settings: Settings,
        health: Health,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reloads = 0
        """So many times the weights have been read again: what was transcribed before the last one is in doubt."""
        self.on_idle: Callable[[], None] = lambda: None
        """Called on the event loop when a trial that nobody waited for is over, and no other goes on."""
        self._engine = engine
        self._health = health
        self._clock = clock
        self._canary_jobs = settings.canary_jobs
        self._checks_words = settings.check_words
        self._words: list[str] = []  # of the clip, as this model hears them when it is well
        self._jobs = 0
        self._trusted_until = 0.0
        self._one_at_a_time = asyncio.Lock()
        self._trials: set[asyncio.Task[None]] = set()  # those that nobody waits for
        self._pool = ThreadPoolExecutor(1, "canary")
        self._is_closed = False

    def warm_up(self) -> None:
        """Transcribe the clip for the first time. Raises what the engine raises, and RuntimeError when the model hears
        nothing, or other words than are said (which models of other languages may: see CHECK_WORDS)."""
        started = time.monotonic()
        self._words = self._heard(Stop())
        if not self._words:
            raise RuntimeError("the model hears nothing in a clip of clear speech")
        if self._checks_words and _alike(self._words, WORDS.split()) < ALIKE:
            raise RuntimeError(
                f"the model heard {' '.join(self._words)!r} in a clip that says {WORDS!r}; with CHECK_WORDS=false, "
                "as for models of other languages, any words do"
            )
        log.event("warmed_up", model=self._engine.name, seconds=time.monotonic() - started)

    def count_job(self) -> None:
        """One more is done: after every so many the model is tried, and nobody waits for it."""
        self._jobs += 1
        if self._canary_jobs and self._jobs % self._canary_jobs == 0 and not self._is_closed:
            trial = asyncio.create_task(self.try_model())
            self._trials.add(trial)
            trial.add_done_callback(self._end_trial)

    async def try_model(self) -> None:
        """Transcribe the clip again, unless the model was right a moment ago. When its words are wrong, load the model
        again (`reloads` counts that); when they still are, ring the alarm."""
        async with self._one_at_a_time:
            if self._words and self._clock() >= self._trusted_until and not self._health.alarm.has_rung:
                stop = Stop()
                with self._health.trial():
                    await in_thread(self._pool, stop, self._try_model, stop)

    @property
    def is_idle(self) -> bool:
        """Whether no trial goes on that nobody waits for: the model must not be freed before."""
        return not self._trials

    def close(self) -> None:
        """The model is about to be freed: it isn't tried any more."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end_trial(self, trial: "asyncio.Task[None]") -> None:
        self._trials.discard(trial)
        if self.is_idle:
            self.on_idle()

    def _try_model(self, stop: Stop) -> None:
        if self._is_well(stop):
            return
        try:
            self._engine.reload()
        except RuntimeError as error:
            log.event("reload_failed", level=log.ERROR, model=self._engine.name, error=error)
        else:
            self.reloads += 1
            log.event("model_reloaded", level=log.WARNING, model=self._engine.name)
            if self._is_well(stop):
                return
        self._health.give_up(Unhealthy("the model hears wrong: send the job again, another worker takes it", EXIT_SICK))

    def _is_well(self, stop: Stop) -> bool:
        try:
            words = self._heard(stop)
        except OutOfMemory:
            return True  # says nothing about the model; the jobs meet the same, and are told
        except Unhealthy as error:
            self._health.give_up(error)
            return True
        except RuntimeError as error:
            log.event("canary_failed", level=log.WARNING, model=self._engine.name, error=error)
            return False
        alike = _alike(words, self._words)
        level = log.INFO if alike >= ALIKE else log.WARNING
        log.event("canary", level=level, alike=alike, model=self._engine.name, words=" ".join(words))
        if alike < ALIKE:
            return False
        self._trusted_until = self._clock() + TRUSTED_S
        return True

    def _heard(self, stop: Stop) -> list[str]:
        samples = _clip().samples
        walk = self._engine.walk([Track(samples, tuple(whole(samples)))], Request(language="en"), stop)
        return " ".join(segment.text for said in walk.piece(0) for segment in said.segments).lower().split()


def _alike(words: Sequence[str], others: Sequence[str]) -> float:
    return difflib.SequenceMatcher(None, words, others).ratio()


def _clip() -> Audio:
    with CLIP.open("rb") as clip:
        return decode(clip, Stop(), max_seconds=60)
