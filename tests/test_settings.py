"""The operator's choices."""

import logging
from pathlib import Path

import pytest

from whisper_worker import log
from whisper_worker.engine import choose_compute_type
from whisper_worker.settings import Settings, SettingsError, Threads, available_cores, bucket_in, markdown_table

ROOT = Path(__file__).parent.parent


def test_the_readme_explains_each_setting_as_the_code_does() -> None:
    assert markdown_table() in (ROOT / "README.md").read_text()


def test_nothing_set_gives_the_defaults() -> None:
    settings = Settings.from_env({})
    assert settings.max_audio_s == 14_400
    assert settings.inter_threads is None


def test_values_are_read_from_the_environment() -> None:
    settings = Settings.from_env(
        {"INTER_THREADS": " 3 ", "MODEL": "turbo", "LOG_LEVEL": "debug", "MAX_AUDIO_S": "90.5"}
    )
    assert (settings.inter_threads, settings.model, settings.log_level, settings.max_audio_s) == (
        3,
        "turbo",
        "DEBUG",
        90.5,
    )


def test_an_empty_value_counts_as_absent() -> None:
    assert Settings.from_env({"MODEL": "", "DEVICE": "  "}) == Settings.from_env({})


BAD = [
    ("INTER_THREADS", "two"),
    ("INTER_THREADS", "0"),
    ("DEVICE", "tpu"),
    ("COMPUTE_TYPE", "int4"),
    ("MAX_AUDIO_S", "nan"),
    ("MAX_AUDIO_S", "-1"),
    ("ALLOW_LOCAL_FILES", "maybe"),
    ("LOG_LEVEL", "LOUD"),
    ("DOWNLOAD_ATTEMPTS", "0"),
    ("BATCH_SIZE", "0"),
    ("FIT_WINDOWS", "perhaps"),
    ("FIT_WINDOW_S", "31"),
    ("PIECE_SECONDS", "4"),
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_value_that_cannot_be_used_is_named_with_its_key(key: str, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({key: value})
    assert str(caught.value).startswith(f"{key}={value!r}: ")
    assert "\n" not in str(caught.value)


def test_all_bad_values_are_named_at_once() -> None:
    with pytest.raises(SettingsError, match=r"DEVICE=.*; INTRA_THREADS="):
        Settings.from_env({"DEVICE": "tpu", "INTRA_THREADS": "x"})


def test_a_compute_type_that_the_device_lacks_is_named_with_its_key() -> None:
    assert choose_compute_type(Settings.from_env({}), "cpu") == "int8"
    assert choose_compute_type(Settings.from_env({}), "cuda") == "float16"
    assert choose_compute_type(Settings.from_env({"COMPUTE_TYPE": "float32"}), "cpu") == "float32"
    with pytest.raises(SettingsError, match=r"COMPUTE_TYPE='int8_float16': this cpu can compute in .*float32"):
        choose_compute_type(Settings.from_env({"COMPUTE_TYPE": "int8_float16"}), "cpu")


def test_settings_cannot_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings.from_env({}).device = "cpu"  # type: ignore[misc]


@pytest.mark.parametrize("key", ["RUNPOD_WEBHOOK_GET_JOB", "RUNPOD_ENDPOINT_ID", "RUNPOD_POD_ID"])
def test_local_files_are_for_local_machines(key: str) -> None:
    assert Settings.from_env({}).allow_local_files is True
    assert Settings.from_env({key: "x"}).allow_local_files is False
    assert Settings.from_env({key: "x", "ALLOW_LOCAL_FILES": "true"}).allow_local_files is True


def plan(device: str = "cpu", cores: int = 4, **env: str) -> Threads:
    return Threads.plan(Settings.from_env(env), device, cores)


def test_a_cpu_decodes_a_batch_on_each_core() -> None:
    assert plan() == Threads(inter=4, intra=1, batch=2, jobs=32, media=4)
    assert plan(INTRA_THREADS="2").inter == 2
    assert plan(cores=1, INTRA_THREADS="2").inter == 1


def test_a_gpu_decodes_batches_and_has_as_many_windows_ready() -> None:
    assert plan("cuda", cores=16) == Threads(inter=2, intra=4, batch=8, jobs=48, media=16)
    assert plan("cuda", cores=16, BATCH_SIZE="4", INTER_THREADS="1").jobs == 24


def test_more_threads_than_cores_are_warned_about_on_a_cpu() -> None:
    assert plan().warning is None
    warning = plan(INTER_THREADS="4", INTRA_THREADS="2").warning
    assert warning is not None
    assert "4 × INTRA_THREADS 2 = 8 threads on 4 cores" in warning
    assert plan("cuda", INTER_THREADS="4", INTRA_THREADS="2").warning is None


@pytest.mark.parametrize(
    ("quota", "given", "most"),
    [("150000 100000", "", 2), ("max 100000", "1", 1), ("", "", 4096), ("100000 100000", "8", 1), ("", "²", 4096)],
)
def test_a_containers_share_of_the_cores_is_what_counts(quota: str, given: str, most: int, tmp_path: Path) -> None:
    if quota:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert 1 <= available_cores({"RUNPOD_CPU_COUNT": given}, tmp_path) <= most


def test_log_lines_can_be_grepped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "whisper_worker"):
        log.event("job_done", job="a1", seconds=1.5, note='two words, "quoted"', left_out=None, empty="")
    assert caplog.messages == ['event=job_done job=a1 seconds=1.5 note="two words, \\"quoted\\"" empty=""']


BUCKET = {
    "BUCKET_ENDPOINT_URL": "https://s3.test",
    "BUCKET_NAME": "results",
    "BUCKET_ACCESS_KEY_ID": "AKID",
    "BUCKET_SECRET_ACCESS_KEY": "s3cret",
}


@pytest.mark.parametrize("missing", BUCKET)
def test_a_bucket_is_described_whole_or_not_at_all(missing: str) -> None:
    assert Settings.from_env(BUCKET).bucket_name == "results"
    with pytest.raises(SettingsError, match=f"is set, but not {missing}$") as caught:
        Settings.from_env({key: value for key, value in BUCKET.items() if key != missing})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://my-results.s3.us-west-2.amazonaws.com", "my-results"),
        ("https://my.results.s3-eu-west-1.amazonaws.com/", "my.results"),
        ("https://s3.us-west-2.amazonaws.com", None),
        ("https://minio.test:9000", None),
    ],
)
def test_a_bucket_may_be_named_by_its_endpoint_alone(url: str, name: str | None) -> None:
    assert bucket_in(url) == name
    if name:
        unnamed = {key: value for key, value in BUCKET.items() if key != "BUCKET_NAME"}
        assert Settings.from_env({**unnamed, "BUCKET_ENDPOINT_URL": url}).bucket_name == name


def test_the_secret_of_a_bucket_is_in_no_text() -> None:
    assert "s3cret" not in repr(Settings.from_env(BUCKET))
