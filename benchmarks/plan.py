"""How many workers an endpoint needs, with which settings, and what an hour of audio then costs.

Arithmetic over what `growth` and `memory` measured with the same model on the same device; nothing is measured here.

The rule is conservative on purpose. W workers with n jobs in flight each are taken for one queue with c = W × n places
(M/M/c: jobs come at random and are served in their order). A place's service time is what growth measured while all n
were busy; a worker that isn't full is faster. Erlang's formula C (A. K. Erlang, 1917) gives the probability that a job
waits, and P(wait > t) = C · exp(-(c - a) · t / S), with the offered load a = arrivals × S. It takes service times to
be exponential; real ones of alike jobs vary less, and so does the wait. At most 2.5 % of jobs are served more slowly
than the service time's 97.5th percentile, at most 2.5 % wait longer than the wait's: so at least 95 % take no longer
than the sum of both (Boole's inequality). The start of a worker isn't in it: plan for workers that run.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, log
from pathlib import Path

from benchmarks.measured import DeviceMemory, Measurements, NotMeasured, Point
from benchmarks.report import Report, Table
from benchmarks.turns import percentile
from whisper_worker.audio import SAMPLE_RATE

NAME = "plan"
HELP = "settings, number of workers and cost for a demand, from what growth and memory measured"
QUICK: dict[str, object] = {}
IS_IN_ALL = False

GB = 1e9  # as sellers count
MAX_UTILISATION = 0.85  # beyond, a busy minute or a lost worker makes the queue grow
TAIL = 0.025  # of jobs, each: served too slowly, waiting too long
AUDIO_BYTES_PER_S = 4 * SAMPLE_RATE  # 3.8 MB a minute


class Impossible(Exception):
    """The text is a sentence for the operator."""


@dataclass(frozen=True)
class Demand:
    jobs_per_s: float
    seconds_per_job: float
    p95_s: float
    memory_bytes: float
    price_per_hour: float

    @property
    def audio_hours_per_hour(self) -> float:
        return self.jobs_per_s * self.seconds_per_job

    def length_factor(self, point: Point) -> float:
        """How many times as long a job takes as a measured one. Shorter jobs aren't taken to be faster."""
        return max(1.0, self.seconds_per_job / point.clip_s)


@dataclass(frozen=True)
class Service:
    """What one worker does for the demand, with all its places busy."""

    point: Point
    jobs_per_s: float
    slow_s: float  # 97.5 % of jobs are served within

    @classmethod
    def of(cls, point: Point, demand: Demand) -> "Service":
        factor = demand.length_factor(point)
        slow_s = percentile(point.latencies_s, 100 * (1 - TAIL)) * factor
        return cls(point, point.jobs_per_s / factor, slow_s)

    @property
    def mean_s(self) -> float:
        """By Little's law: jobs in the system = arrivals × time in it."""
        return self.point.job_concurrency / self.jobs_per_s


@dataclass(frozen=True)
class Fleet:
    """So many workers, and what becomes of the demand there."""

    service: Service
    workers: int
    load: float  # erlangs: places that are busy on average
    waiting: float  # probability that a job waits
    slow_wait_s: float  # 97.5 % of jobs wait no longer

    @property
    def places(self) -> int:
        return self.workers * self.service.point.job_concurrency

    @property
    def utilisation(self) -> float:
        return self.load / self.places

    @property
    def p95_s(self) -> float:
        """No more than this."""
        return self.service.slow_s + self.slow_wait_s


def erlang_c(places: int, load: float) -> float:
    """The probability that a job finds all places busy; `load` in erlangs, below `places`.

    By way of formula B, whose recursion doesn't overflow as its factorials do.
    """
    blocked = 1.0
    for busy in range(1, places + 1):
        blocked = load * blocked / (busy + load * blocked)
    return blocked / (1 - load / places * (1 - blocked))


def wait_s(waiting: float, places: int, load: float, mean_s: float, tail: float) -> float:
    """Longer than this no more than `tail` of all jobs wait, if `waiting` of them wait at all."""
    return log(waiting / tail) * mean_s / (places - load) if waiting > tail else 0.0


def smallest_fleet(point: Point, demand: Demand) -> Fleet | None:
    """None: served too slowly even without waiting."""
    service = Service.of(point, demand)
    if service.slow_s > demand.p95_s:
        return None
    load = demand.jobs_per_s * service.mean_s
    fewest = ceil(load / MAX_UTILISATION / point.job_concurrency)
    for workers in count(max(fewest, 1)):
        places = workers * point.job_concurrency
        waiting = erlang_c(places, load)
        fleet = Fleet(service, workers, load, waiting, wait_s(waiting, places, load, service.mean_s, TAIL))
        if fleet.p95_s <= demand.p95_s:
            return fleet
    raise AssertionError("more workers always shorten the wait")


def device_bytes(point: Point, memory: DeviceMemory) -> int:
    """What stays counts once, what a call needs once for each that runs at the same moment."""
    calls = point.inter_threads * point.batch_size * memory.window_bytes(point.batch_size)
    return memory.weights_bytes + memory.kept_bytes + calls


def host_bytes(point: Point, demand: Demand) -> float:
    """The process as it was measured, and the audio by which jobs are longer than those it was measured with."""
    longer_s = max(0.0, demand.seconds_per_job - point.clip_s)
    return point.peak_bytes + point.job_concurrency * longer_s * AUDIO_BYTES_PER_S


def needed_bytes(point: Point, demand: Demand, measured: Measurements) -> float:
    """Of the memory that the demand names: the GPU's, or the machine's when it is the device itself."""
    on_device = device_bytes(point, measured.memory)
    return on_device if measured.device != "cpu" else max(on_device, host_bytes(point, demand))


def possible_fleets(demand: Demand, measured: Measurements) -> list[Fleet]:
    """One for each setting that fits the memory and is fast enough, the best first: the fewest workers, and of equals
    the fewest jobs in flight. Raises Impossible when there is none."""
    points = [point for point in measured.points if point.jobs_per_s]
    fitting = [point for point in points if needed_bytes(point, demand, measured) <= demand.memory_bytes]
    fleets = [fleet for point in fitting if (fleet := smallest_fleet(point, demand))]
    if not points:
        raise Impossible("growth found no setting with which a job ended well")
    if not fitting:
        least = min(needed_bytes(point, demand, measured) for point in points)
        raise Impossible(
            f"no measured setting fits {_gb(demand.memory_bytes)} of memory: the smallest needs {_gb(least)}"
        )
    if not fleets:
        fastest = min((Service.of(point, demand) for point in fitting), key=lambda service: service.slow_s)
        raise Impossible(
            f"no number of workers reaches a p95 of {demand.p95_s:g} s: even without a wait, 97.5 % of jobs of "
            f"{demand.seconds_per_job:g} s take up to {fastest.slow_s:.1f} s with the fastest setting that fits "
            f"({_settings(fastest.point)}). `python -m benchmarks growth --worker NAME:KEY=VALUE` measures others"
        )
    return sorted(fleets, key=lambda fleet: (fleet.workers, fleet.service.point.job_concurrency))


def arithmetic(fleet: Fleet, demand: Demand, measured: Measurements) -> list[str]:
    """How the figures of a fleet come about, a line for each step."""
    arrivals, hours, cost = demand.jobs_per_s, demand.audio_hours_per_hour, cost_per_audio_hour(fleet, demand)
    return [
        f"Demand: {60 * arrivals:g} jobs a minute = {arrivals:.3g} jobs/s; of {demand.seconds_per_job:g} s each, "
        f"that is {hours:.3g} hours of audio an hour.",
        *_service_lines(fleet.service, demand),
        *_queue_lines(fleet, demand),
        *_memory_lines(fleet.service.point, demand, measured.memory),
        f"Cost: {fleet.workers} × {demand.price_per_hour:g} an hour / {hours:.3g} hours of audio an hour = {cost:.4f} "
        "for an hour of audio, with workers that always run.",
    ]


def _service_lines(service: Service, demand: Demand) -> list[str]:
    point, factor = service.point, demand.length_factor(service.point)
    jobs = point.job_concurrency
    return [
        f"Measured by growth, with {jobs} in flight: {point.jobs_per_s:.3g} jobs/s of {point.clip_s:.1f} s, "
        f"97.5 % of them within {service.slow_s / factor:.2f} s.",
        f"Jobs of {demand.seconds_per_job:g} s take {factor:.2f} times as long: {service.jobs_per_s:.3g} jobs/s "
        f"a worker, 97.5 % within {service.slow_s:.2f} s.",
        f"Mean service time S = {jobs} in flight / {service.jobs_per_s:.3g} jobs/s = {service.mean_s:.2f} s (Little).",
    ]


def _queue_lines(fleet: Fleet, demand: Demand) -> list[str]:
    service, places, load = fleet.service, fleet.places, fleet.load
    slow_wait = (
        f"ln(C / {TAIL:g}) × S / (c - a) = {fleet.slow_wait_s:.2f} s" if fleet.slow_wait_s else "0 s: C is small"
    )
    return [
        f"Offered load a = {demand.jobs_per_s:.3g} jobs/s × S = {load:.2f} busy places.",
        f"Places c = workers {fleet.workers} × {service.point.job_concurrency} jobs = {places}: "
        f"{100 * fleet.utilisation:.0f} % busy, at most {100 * MAX_UTILISATION:.0f} % allowed.",
        f"A job waits with probability C = {fleet.waiting:.3g} (Erlang C); 97.5 % wait no longer than {slow_wait}.",
        f"p95 at most {service.slow_s:.2f} + {fleet.slow_wait_s:.2f} = {fleet.p95_s:.2f} s (Boole), asked for: "
        f"{demand.p95_s:g} s.",
    ]


def _memory_lines(point: Point, demand: Demand, memory: DeviceMemory) -> list[str]:
    window, needed = memory.window_bytes(point.batch_size), device_bytes(point, memory)
    return [
        f"Device memory: weights {_gb(memory.weights_bytes)} + kept after calls {_gb(memory.kept_bytes)} + "
        f"during calls {point.inter_threads} × {point.batch_size} windows × {_gb(window)} = {_gb(needed)}.",
        f"Host memory: {_gb(host_bytes(point, demand))}: growth's peak, and {point.job_concurrency} times the audio "
        f"by which jobs are longer, at {60 * AUDIO_BYTES_PER_S / 1e6:.1f} MB a minute.",
    ]


def cost_per_audio_hour(fleet: Fleet, demand: Demand) -> float:
    """Of an hour of audio, in the price's currency."""
    return fleet.workers * demand.price_per_hour / demand.audio_hours_per_hour


def _gb(count: float) -> str:
    return f"{count / GB:.2f} GB"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--jobs-per-minute", type=positive, required=True, help="in the busiest minute")
    parser.add_argument("--seconds-per-job", type=positive, required=True, help="mean length of a job's audio")
    parser.add_argument("--p95", type=positive, required=True, help="seconds within which 95 %% of jobs must end")
    parser.add_argument(
        "--device-memory-gb", type=positive, required=True, help="the GPU's memory; without one, the machine's"
    )
    parser.add_argument("--price-per-hour", type=positive, required=True, help="of one worker")
    parser.add_argument("--measured", type=Path, help="folder with the results of growth and memory (that of --out)")


def positive(text: str) -> float:
    if not (0 < (number := float(text)) < float("inf")):
        raise ValueError
    return number


def run(options: Namespace) -> Report:
    demand = Demand(
        jobs_per_s=options.jobs_per_minute / 60,
        seconds_per_job=options.seconds_per_job,
        p95_s=options.p95,
        memory_bytes=options.device_memory_gb * GB,
        price_per_hour=options.price_per_hour,
    )
    folder = options.measured or options.out
    options.measured = folder.name  # for the report: where it lies is nobody's business
    try:
        measured = Measurements.read(folder)
        fleets = possible_fleets(demand, measured)
    except (NotMeasured, Impossible) as error:
        raise SystemExit(f"plan: {error}") from None
    return Report(
        NAME,
        f"Plan: workers: {fleets[0].workers}, each with {_settings(fleets[0].service.point)}",
        tables=[_table(fleets, demand, measured)],
        notes=arithmetic(fleets[0], demand, measured),
        data={"workers": fleets[0].workers, "cost_per_audio_hour": cost_per_audio_hour(fleets[0], demand)},
    )


def _settings(point: Point) -> str:
    return (
        f"INTER_THREADS={point.inter_threads}, BATCH_SIZE={point.batch_size}, JOB_CONCURRENCY={point.job_concurrency}"
    )


def _table(fleets: Sequence[Fleet], demand: Demand, measured: Measurements) -> Table:
    settings = ["INTER_THREADS", "BATCH_SIZE", "JOB_CONCURRENCY"]
    return Table(
        f"Settings that do, the best first ({measured.model} on {measured.device})",
        ["worker", *settings, "workers", "p95 at most, s", "busy, %", "memory, GB", "an hour of audio"],
        [
            [
                fleet.service.point.variant,
                fleet.service.point.inter_threads,
                fleet.service.point.batch_size,
                fleet.service.point.job_concurrency,
                fleet.workers,
                fleet.p95_s,
                100 * fleet.utilisation,
                needed_bytes(fleet.service.point, demand, measured) / GB,
                round(cost_per_audio_hour(fleet, demand), 4),
            ]
            for fleet in fleets
        ],
    )
