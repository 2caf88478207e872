"""How `python -m benchmarks gpus` computes what the models need of a GPU's memory."""

import pytest
from worker_process import ROOT

from benchmarks.gpus import (
    COMPUTE_TYPES,
    GB,
    MOST_BATCH,
    POOLS,
    USABLE,
    cpu_bytes,
    gpu_bytes,
    largest_batch,
    parameters,
    table,
    weights_bytes,
    window_bytes,
)
from benchmarks.models import SHAPES, find
from whisper_worker.settings import MiB, Settings, Threads

README, TUNING = (ROOT / "README.md").read_text(), (ROOT / "docs/tuning.md").read_text()
FLOAT16, INT8 = COMPUTE_TYPES["float16"], COMPUTE_TYPES["int8_float16"]

PUBLISHED_MILLIONS = {  # by OpenAI's model card, and that of distil-large-v3
    "tiny": 39,
    "base": 74,
    "small": 244,
    "medium": 769,
    "large-v2": 1550,
    "large-v3": 1550,
    "large-v3-turbo": 809,
    "distil-large-v3": 756,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_as_many_weights_as_are_published(name: str) -> None:
    assert parameters(SHAPES[name]) / 1e6 == pytest.approx(PUBLISHED_MILLIONS[name], rel=0.04)


def test_the_weights_of_a_real_file_are_counted_to_the_last_percent() -> None:
    """One made here in the shape of tiny, in float16, as CTranslate2 saves it."""
    saved = (find("random:tiny").folder / "model.bin").stat().st_size
    assert weights_bytes(SHAPES["tiny"], FLOAT16) == pytest.approx(saved, rel=0.01)


MEASURED_ON_CPU = [  # MiB at the peak of one call, by `memory` with random weights
    ("float32", "base", 1, 147.9),
    ("float32", "base", 4, 476.7),
    ("float32", "small", 1, 254.3),
    ("float32", "small", 4, 1023),
    ("int8", "base", 1, 134.0),
    ("int8", "base", 4, 528.9),
    ("int8", "small", 1, 288.8),
    ("int8", "small", 4, 809.2),
]


@pytest.mark.parametrize(("compute_type", "name", "batch", "measured"), MEASURED_ON_CPU)
def test_a_window_is_computed_to_take_about_what_was_measured_on_a_cpu_and_hardly_ever_less(
    compute_type: str, name: str, batch: int, measured: float
) -> None:
    computed = batch * window_bytes(SHAPES[name], COMPUTE_TYPES[compute_type]) / MiB
    assert 0.98 <= computed / measured < 1.45


PUBLISHED_ON_GPU = [  # MiB in use, by two READMEs of faster-whisper: large-v2, one call of so many windows
    ("float16", 1, 4755),  # V100S
    ("int8_float16", 1, 3091),
    ("float16", 1, 4525),  # RTX 3070 Ti
    ("float16", 8, 6090),
    ("int8_float16", 1, 2926),
    ("int8_float16", 8, 4500),
]


@pytest.mark.parametrize(("compute_type", "batch", "published"), PUBLISHED_ON_GPU)
def test_what_is_published_of_a_gpu_is_no_more_than_what_is_computed(
    compute_type: str, batch: int, published: int
) -> None:
    shape, numbers = SHAPES["large-v2"], COMPUTE_TYPES[compute_type]
    assert gpu_bytes(shape, numbers, 1, batch * window_bytes(shape, numbers)) / MiB >= published


def test_more_beams_take_more_of_a_deep_decoder_and_nothing_of_a_shallow_one_whose_encoder_is_what_counts() -> None:
    assert window_bytes(SHAPES["large-v3"], FLOAT16, beams=6) > window_bytes(SHAPES["large-v3"], FLOAT16, beams=5)
    assert window_bytes(SHAPES["large-v3-turbo"], FLOAT16, beams=6) == window_bytes(SHAPES["large-v3-turbo"], FLOAT16)


def test_eight_bits_halve_the_weights_but_not_the_windows() -> None:
    shape = SHAPES["large-v3"]
    assert weights_bytes(shape, INT8) == pytest.approx(weights_bytes(shape, FLOAT16) / 2, rel=0.01)
    assert window_bytes(shape, INT8) == window_bytes(shape, FLOAT16)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("memory_gb", sorted({pool.memory_gb for pool in POOLS.values()}))
def test_the_largest_batch_fits_and_one_more_does_not(name: str, memory_gb: int) -> None:
    shape, usable = SHAPES[name], USABLE * memory_gb * GB
    window = window_bytes(shape, FLOAT16)
    most = largest_batch(shape, FLOAT16, 2, window, memory_gb * GB)
    assert gpu_bytes(shape, FLOAT16, 2, 2 * most * window) <= usable
    assert most == MOST_BATCH or gpu_bytes(shape, FLOAT16, 2, 2 * (most + 1) * window) > usable


def test_a_gpu_that_the_weights_alone_would_fill_holds_no_batch() -> None:
    shape = SHAPES["large-v3"]
    assert largest_batch(shape, FLOAT16, 2, window_bytes(shape, FLOAT16), 4 * GB) == 0


def test_a_cpu_needs_more_the_more_calls_run_on_it() -> None:
    two, four = (Threads.plan(Settings(), "cpu", cores) for cores in (2, 4))
    assert cpu_bytes(SHAPES["base"], two) < cpu_bytes(SHAPES["base"], four)


def test_the_readme_has_the_table() -> None:
    assert table().markdown() in README


def test_the_guide_has_the_table_for_eight_bits() -> None:
    assert table("int8_float16").markdown() in TUNING
