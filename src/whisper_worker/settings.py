"""What the operator chose: the environment, read once into a frozen object. Every key is explained here.

`python -m whisper_worker.settings` prints the README's table.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

MiB = 1024**2
GiB = 1024**3
VOLUME = Path("/runpod-volume")  # where RunPod mounts an endpoint's network volume, and its model cache


class SettingsError(Exception):
    """The environment can't be used. The text is one line that names each key at fault."""


Count = Annotated[int, Field(ge=1, le=1024)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=1)]
UpperCase = BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)


BUCKET = ("bucket_endpoint_url", "bucket_name", "bucket_access_key_id", "bucket_secret_access_key")  # all, or none


class Settings(BaseModel):
    """One field for each environment variable, under its name in lower case. None: chosen at start."""

    model_config = ConfigDict(frozen=True)

    model: str | None = Field(
        None,
        min_length=1,
        description="The model to serve: a size (`tiny` … `large-v3`, `turbo`, `distil-large-v3` …), a CTranslate2 "
        "repository on the Hugging Face hub, a folder (called by its last part), or `bundled`. Default: `bundled`, the "
        "demo model (tiny.en), where it is installed",
    )
    models: str | None = Field(
        None,
        description="The models that a job's `model` may name besides `MODEL`, separated by commas; `*`: any size, any "
        "CTranslate2 repository on the hub, and `bundled`",
    )
    max_loaded_models: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="So many models stay loaded; the one that was idle longest is freed for another"
    )
    allow_download: bool = Field(
        True, description="Download a model that isn't on this machine from the hub; `false`: never ask the hub"
    )
    model_download_timeout_s: Seconds = Field(
        900, description="Longest download of a model; another try goes on where this one ended"
    )
    check_words: bool = Field(
        True,
        description="At start a model must hear the words of a clip of English speech; `false`: any words do, for "
        "models of other languages",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs")
    compute_type: Literal[
        "auto",
        "default",
        "int8",
        "int8_float16",
        "int8_bfloat16",
        "int8_float32",
        "int16",
        "float16",
        "bfloat16",
        "float32",
    ] = Field("auto", description="Number format of the weights; `auto`: `int8` on a CPU, `float16` on a GPU")
    inter_threads: Count | None = Field(
        None,
        description="Calls of the model that run at the same moment: its `num_workers`, and the size of the thread "
        "pool that calls it. Default: the cores on a CPU, 2 on a GPU",
    )
    intra_threads: Count | None = Field(
        None,
        description="CPU threads inside one call. Default: on a CPU the cores shared out to `INTER_THREADS`, 4 on a "
        "GPU (where few are used)",
    )
    batch_size: Count | None = Field(
        None,
        description="Windows, of any jobs, that share one call of the model, at most. Default: 2 on a CPU, 8 on a GPU",
    )
    batch_wait_s: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = Field(
        0.01,
        description="How long a batch that isn't full waits, at most, for jobs whose windows have just been decoded",
    )
    fit_windows: bool = Field(
        True,
        description="Encode short audio in windows shorter than 30 s, and again in full when the text is doubtful",
    )
    fit_window_s: Annotated[float, Field(ge=4, le=30, allow_inf_nan=False)] = Field(
        16, description="Length of such windows; what sounds in them is at least 2 s shorter"
    )
    piece_seconds: Annotated[float, Field(ge=5, le=3600, allow_inf_nan=False)] = Field(
        30, description="Long audio is cut, at pauses, into pieces of at most so much speech, transcribed side by side"
    )
    job_concurrency: Count | None = Field(
        None,
        description="Jobs in flight, those that download or wait included. Default: "
        "2 × `INTER_THREADS` × `BATCH_SIZE` + 16",
    )
    media_threads: Count | None = Field(
        None,
        description="Threads that decode audio, look for speech or make features. Default: the cores, at most "
        "`JOB_CONCURRENCY`",
    )
    max_download_bytes: Bytes = Field(1 * GiB, description="Largest file that is downloaded")
    download_timeout_s: Seconds = Field(300, description="Longest download, retries included")
    download_attempts: Annotated[int, Field(ge=1, le=10)] = Field(
        3, description="Tries for one download; another is made after a lost connection, HTTP 429 and HTTP 5xx"
    )
    max_redirects: Annotated[int, Field(ge=0, le=20)] = Field(5, description="Redirects that a download follows")
    max_base64_bytes: Bytes = Field(20 * MiB, description="Longest `audio_base64`, in characters")
    max_audios: Count = Field(100, description="Most files in one job's `audios`")
    max_audio_s: Seconds = Field(
        4 * 3600, description="Longest audio. An hour takes 230 MB of memory for as long as its job is in flight"
    )
    job_timeout_s: Seconds = Field(
        3600, description="Longest job, from being taken to its reply; a job's `timeout_s` can make it shorter"
    )
    window_timeout_s: Seconds = Field(
        300, description="Longest call of the model; one that takes longer hangs, and the worker ends with code 3"
    )
    canary_jobs: Annotated[int, Field(ge=0)] = Field(
        500, description="After so many jobs the model is tried on a known clip; 0: only when it seems to be deaf"
    )
    shutdown_grace_s: Annotated[float, Field(ge=0, le=24 * 3600, allow_inf_nan=False)] = Field(
        30, description="How long, after SIGTERM or SIGINT, jobs may go on, before they fail as `SHUTTING_DOWN`"
    )
    streaming: bool = Field(
        False, description="Answer each job with a stream of items, for `/stream`, instead of with one object"
    )
    stream_interval_s: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = Field(
        0.5, description="Shortest time between two items of a stream"
    )
    progress_interval_s: Annotated[float, Field(ge=0.1, le=3600, allow_inf_nan=False)] = Field(
        2, description="Time from a job's start to its first progress report in `/status`, and between two of them"
    )
    max_inline_bytes: Bytes = Field(
        8_000_000, description="Largest reply, larger ones go to the bucket; RunPod loses those over 10 MB"
    )
    bucket_endpoint_url: str | None = Field(
        None,
        pattern="^https?://",
        description="S3-compatible storage for larger results; a job's `s3Config` goes first",
    )
    bucket_name: str | None = Field(
        None, description="The bucket there. Default: the one that the endpoint's host begins with (`name.s3.…`)"
    )
    bucket_access_key_id: str | None = Field(None, description="Its access key's id")
    bucket_secret_access_key: SecretStr | None = Field(None, description="Its access key")
    bucket_region: str | None = Field(None, description="Its region, where the storage insists on one")
    result_url_expires_s: Annotated[int, Field(ge=60, le=7 * 24 * 3600)] = Field(
        7 * 24 * 3600, description="How long the links to stored results work"
    )
    result_timeout_s: Seconds = Field(60, description="How long RunPod may take to accept a reply, before another try")
    result_retry_s: Seconds = Field(600, description="How long the worker goes on trying to deliver a reply")
    allow_local_files: bool | None = Field(
        None, description="Accept a path of the worker's own disk as `audio`. Default: only off RunPod"
    )
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], UpperCase] = Field(
        "INFO", description="Which of the worker's log lines are printed"
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Settings":
        """The settings in `env`. An empty value counts as absent.

        Raises SettingsError that names every key with a value that can't be used, not just the first.
        """
        present = {name: env.get(name.upper(), "").strip() for name in cls.model_fields}
        try:
            settings = cls.model_validate({name: value for name, value in present.items() if value})
        except ValidationError as error:
            problems = (f"{str(e['loc'][0]).upper()}={e['input']!r}: {e['msg']}" for e in error.errors())
            raise SettingsError("; ".join(problems)) from None
        if settings.bucket_name is None and settings.bucket_endpoint_url:
            name = bucket_in(settings.bucket_endpoint_url)
            settings = settings.model_copy(update={"bucket_name": name})
        given = [name for name in BUCKET if getattr(settings, name) is not None]
        if missing := [name.upper() for name in BUCKET if given and name not in given]:
            raise SettingsError(f"{given[0].upper()} is set, but not {', '.join(missing)}")
        if settings.allow_local_files is None:
            settings = settings.model_copy(update={"allow_local_files": not on_runpod(env)})
        return settings


def bucket_in(endpoint_url: str) -> str | None:
    """The bucket that an endpoint such as `https://name.s3.eu-west-1.amazonaws.com` names, as in RunPod's guides."""
    named = re.match(r"https?://(?:[^/@]*@)?([a-z0-9][a-z0-9.-]+?)\.s3[.-]", endpoint_url)
    return named[1] if named else None


def on_runpod(env: Mapping[str, str]) -> bool:
    """True on RunPod's machines, where callers are strangers."""
    return any(env.get(key) for key in ("RUNPOD_WEBHOOK_GET_JOB", "RUNPOD_ENDPOINT_ID", "RUNPOD_POD_ID"))


@dataclass(frozen=True)
class Threads:
    """How the machine is shared out; see README, "How the work is shared"."""

    inter: int
    intra: int
    batch: int
    jobs: int
    media: int
    warning: str | None = None

    @classmethod
    def plan(cls, settings: Settings, device: str, cores: int) -> "Threads":
        """The operator's numbers, and for those not given the defaults for this device and so many cores."""
        on_cpu = device == "cpu"
        inter = settings.inter_threads or (max(cores // (settings.intra_threads or 1), 1) if on_cpu else 2)
        intra = settings.intra_threads or (max(cores // inter, 1) if on_cpu else 4)
        batch = settings.batch_size or (2 if on_cpu else 8)
        jobs = settings.job_concurrency or 2 * inter * batch + 16
        warning = None
        if on_cpu and inter * intra > cores:
            warning = f"INTER_THREADS {inter} × INTRA_THREADS {intra} = {inter * intra} threads on {cores} cores"
        return cls(
            inter=inter,
            intra=intra,
            batch=batch,
            jobs=jobs,
            media=settings.media_threads or min(cores, jobs),
            warning=warning,
        )


def available_cores(env: Mapping[str, str] = os.environ, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores this process may really use: a container on RunPod sees all those of its host, but is given a few."""
    limits = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        limits.append(ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no version 2 cgroup, or "max": no limit
    if (given := env.get("RUNPOD_CPU_COUNT", "")).isascii() and given.isdigit():
        limits.append(int(given))
    return max(min(limits), 1)


def markdown_table() -> str:
    """The README's table of settings."""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = "" if field.default is None else f"`{field.default}`"
        rows.append(f"| `{name.upper()}` | {_type_name(field.annotation)} | {default} | {field.description} |")
    return "\n".join(rows)


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is Annotated or (get_args(annotation) and type(None) in get_args(annotation)):
        return _type_name(next(part for part in get_args(annotation) if part is not type(None)))
    return {str: "text", SecretStr: "text", int: "whole number", float: "number", bool: "true or false"}[annotation]


if __name__ == "__main__":
    print(markdown_table())
