"""Capacity planning: the arithmetic of `python -m benchmarks plan`."""

import json
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measured import DeviceMemory, Measurements, NotMeasured, Point, Window
from benchmarks.plan import (
    GB,
    MAX_UTILISATION,
    Demand,
    Impossible,
    add_arguments,
    arithmetic,
    cost_per_audio_hour,
    device_bytes,
    erlang_c,
    host_bytes,
    possible_fleets,
    smallest_fleet,
    wait_s,
)

POINT = Point(
    variant="worker",
    inter_threads=2,
    batch_size=4,
    job_concurrency=8,
    clip_s=10.0,
    jobs_per_s=4.0,
    latencies_s=[2.0] * 39 + [3.0],
    peak_bytes=2_000_000_000,
)
MEMORY = DeviceMemory(
    weights_bytes=1_600_000_000,
    kept_bytes=300_000_000,
    windows=[Window(1, 30.0, 200_000_000), Window(4, 16.0, 80_000_000), Window(4, 30.0, 150_000_000)],
)
DEMAND = Demand(jobs_per_s=2.0, seconds_per_job=30.0, p95_s=10.0, memory_bytes=24 * GB, price_per_hour=0.69)


def measured(*points: Point, device: str = "cuda") -> Measurements:
    return Measurements(device, "turbo", points, MEMORY)


@pytest.mark.parametrize(
    ("places", "load", "probability"),
    [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (10, 8.0, 0.4092), (100, 1e-9, 0.0)],  # the third from published tables
)
def test_a_job_waits_with_erlangs_probability(places: int, load: float, probability: float) -> None:
    assert erlang_c(places, load) == pytest.approx(probability, abs=5e-5)


def test_the_probability_of_waiting_is_found_for_thousands_of_places() -> None:
    assert 0 < erlang_c(5000, 4950.0) < 1


def test_a_single_place_makes_jobs_wait_as_in_the_textbook() -> None:
    # M/M/1, half busy, mean service 1 s: P(wait > t) = 0.5 · exp(-0.5 t)
    assert wait_s(0.5, places=1, load=0.5, mean_s=1.0, tail=0.05) == pytest.approx(4.6052, abs=1e-4)


def test_nobody_counts_as_waiting_when_fewer_wait_than_may() -> None:
    assert wait_s(0.02, places=4, load=1.0, mean_s=1.0, tail=0.025) == 0.0


def test_longer_jobs_take_longer_in_proportion_and_shorter_ones_no_less_than_measured() -> None:
    assert DEMAND.length_factor(POINT) == 3.0
    assert replace(DEMAND, seconds_per_job=1.0).length_factor(POINT) == 1.0


def test_the_fleet_is_the_smallest_that_keeps_the_limits() -> None:
    # 4 jobs/s of 10 s are 1.33 of 30 s: S = 8 / 1.33 = 6 s, 12 busy places; 16 would be 75 % busy
    fleet = smallest_fleet(POINT, replace(DEMAND, p95_s=20.0))
    assert fleet is not None
    assert (fleet.workers, fleet.places) == (2, 16)
    assert fleet.load == pytest.approx(12.0)
    assert fleet.service.slow_s == 9.0
    assert fleet.p95_s <= 20.0


def test_a_tight_limit_takes_more_workers_than_the_load_alone() -> None:
    fleet = smallest_fleet(POINT, replace(DEMAND, p95_s=9.01))
    assert fleet is not None
    assert fleet.workers == 3
    assert fleet.p95_s == pytest.approx(9.0)


def test_no_fleet_is_busier_than_allowed() -> None:
    for jobs_per_s in (0.01, 1.0, 3.3, 50.0):
        fleet = smallest_fleet(POINT, replace(DEMAND, jobs_per_s=jobs_per_s, p95_s=1000.0))
        assert fleet is not None
        assert fleet.utilisation <= MAX_UTILISATION


def test_no_number_of_workers_makes_a_slow_job_fast() -> None:
    assert smallest_fleet(POINT, replace(DEMAND, p95_s=8.9)) is None
    with pytest.raises(Impossible, match=r"p95 of 8\.9 s.* take up to 9\.0 s"):
        possible_fleets(replace(DEMAND, p95_s=8.9), measured(POINT))


def test_weights_count_once_and_windows_for_each_call_that_runs() -> None:
    assert device_bytes(POINT, MEMORY) == 1_600_000_000 + 300_000_000 + 2 * 4 * 150_000_000


def test_a_batch_that_was_not_measured_counts_with_the_largest_window() -> None:
    assert device_bytes(replace(POINT, batch_size=16), MEMORY) == 1_900_000_000 + 2 * 16 * 200_000_000


def test_the_host_holds_the_audio_of_all_jobs_in_flight() -> None:
    hour = replace(DEMAND, seconds_per_job=3610.0)
    assert host_bytes(POINT, hour) == 2_000_000_000 + 8 * 3600 * 64_000


def test_what_does_not_fit_is_left_out_and_said_when_nothing_does() -> None:
    larger = replace(POINT, batch_size=64, jobs_per_s=40.0)
    assert [fleet.service.point for fleet in possible_fleets(DEMAND, measured(larger, POINT))] == [POINT]
    with pytest.raises(Impossible, match=r"fits 3\.00 GB of memory: the smallest needs 3\.10 GB"):
        possible_fleets(replace(DEMAND, memory_bytes=3 * GB), measured(POINT))


def test_without_a_gpu_the_process_counts() -> None:
    with pytest.raises(Impossible, match="memory"):
        possible_fleets(
            replace(DEMAND, memory_bytes=4 * GB), measured(replace(POINT, peak_bytes=5 * 10**9), device="cpu")
        )


def test_the_cheapest_fleet_comes_first() -> None:
    slower = replace(POINT, job_concurrency=4, jobs_per_s=1.0)
    fleets = possible_fleets(DEMAND, measured(slower, POINT))
    assert [fleet.service.point for fleet in fleets] == [POINT, slower]
    assert fleets[0].workers < fleets[1].workers


def test_the_price_is_shared_by_the_audio() -> None:
    fleet = smallest_fleet(POINT, replace(DEMAND, p95_s=20.0))
    assert fleet is not None
    assert cost_per_audio_hour(fleet, DEMAND) == pytest.approx(2 * 0.69 / 60)


def test_the_arithmetic_is_told_with_its_figures() -> None:
    best = possible_fleets(DEMAND, measured(POINT))[0]
    told = "\n".join(arithmetic(best, DEMAND, measured(POINT)))
    for part in (
        "120 jobs a minute",
        "60 hours of audio",
        "Little",
        "Erlang C",
        "Boole",
        "2 × 4 windows × 0.15 GB = 3.10",
    ):
        assert part in told


def test_points_at_which_no_job_ended_well_are_no_plan() -> None:
    with pytest.raises(Impossible, match="found no setting with which a job ended well"):
        possible_fleets(DEMAND, measured(replace(POINT, jobs_per_s=0.0)))


def saved(folder: Path, name: str, data: dict[str, Any], **options: str) -> None:
    options = {"device": "cuda", "model": "turbo", "compute_type": "float16", **options}
    (folder / f"{name}.json").write_text(json.dumps({"options": options, "data": data}))


GROWTH = {"in_flight": [vars(POINT)]}
MEMORY_DATA = {
    "weights_bytes": MEMORY.weights_bytes,
    "kept_bytes": MEMORY.kept_bytes,
    "working_bytes_per_window": [vars(window) for window in MEMORY.windows],
}


def test_measurements_are_read_from_the_results_folder(tmp_path: Path) -> None:
    saved(tmp_path, "growth", GROWTH)
    saved(tmp_path, "memory", MEMORY_DATA)
    assert Measurements.read(tmp_path) == Measurements("cuda", "turbo", [POINT], MEMORY)


def test_a_missing_measurement_names_the_command_that_makes_it(tmp_path: Path) -> None:
    saved(tmp_path, "growth", GROWTH)
    with pytest.raises(NotMeasured, match=r"memory\.json is missing: `python -m benchmarks memory` makes it"):
        Measurements.read(tmp_path)


def test_measurements_of_different_models_are_not_mixed(tmp_path: Path) -> None:
    saved(tmp_path, "growth", GROWTH)
    saved(tmp_path, "memory", MEMORY_DATA, model="tiny")
    with pytest.raises(NotMeasured, match="growth was measured with model turbo, memory with tiny"):
        Measurements.read(tmp_path)


def test_a_demand_of_nothing_is_refused_by_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    assert "95 % of jobs" in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["--jobs-per-minute", "0"])
    assert "--jobs-per-minute: invalid positive value: '0'" in capsys.readouterr().err
