"""The files that RunPod reads: what the hub shows and tries (.runpod), and what its command-line tools read
(runpod.toml). They say of the worker what is so."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import tomlkit
from caller import words
from local_endpoint import API_KEY, ENDPOINT_ID, LocalEndpoint
from media import CLIP_WORDS
from real_service import real_service
from worker_process import ROOT, WorkerProcess

from benchmarks.gpus import COMPUTE_TYPES, GB, POOLS, cpu_bytes, gpu_bytes, window_bytes
from benchmarks.models import SHAPES
from whisper_worker.models import is_public, repository
from whisper_worker.request import InputRules, parse_request
from whisper_worker.settings import Settings, Threads

Json = dict[str, Any]

README = (ROOT / "README.md").read_text()
HUB: Json = json.loads((ROOT / ".runpod/hub.json").read_text())
TESTS: Json = json.loads((ROOT / ".runpod/tests.json").read_text())
CONFIG: Json = HUB["config"]
INPUTS: dict[str, Json] = {entry["key"]: entry["input"] for entry in CONFIG["env"]}
PRESETS: dict[str, Json] = {preset["name"]: preset["defaults"] for preset in CONFIG["presets"]}
FIELDS: Json = Settings.model_json_schema()["properties"]

CATEGORIES = ("audio", "embedding", "language", "video", "image")
GPU_IDS = {  # some of those in RunPod's reference
    "NVIDIA A40",
    "NVIDIA GeForce RTX 3090",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA L4",
    "NVIDIA RTX A4000",
    "NVIDIA RTX A4500",
    "NVIDIA RTX A5000",
    "NVIDIA RTX A6000",
}
RUNPOD_RULES = InputRules(allow_local_files=False, max_base64_bytes=20_000_000)


def env_of(preset: Json) -> dict[str, str]:
    """As the hub sets it: texts, with the values that the input has for true and false."""
    texts = {True: "trueValue", False: "falseValue"}
    return {key: INPUTS[key][texts[value]] if isinstance(value, bool) else str(value) for key, value in preset.items()}


def field_of(key: str) -> Json:
    """What the JSON Schema says of a setting that is set."""
    field: Json = FIELDS[key.lower()]
    return {**field, **next((kind for kind in field.get("anyOf", []) if kind["type"] != "null"), {})}


# --- the hub


def test_the_hub_is_told_what_it_needs() -> None:
    assert all(HUB[name].strip() for name in ("title", "description"))
    assert (HUB["type"], HUB["category"]) == ("serverless", "audio")
    assert HUB["category"] in CATEGORIES
    assert (CONFIG["runsOn"], CONFIG["gpuCount"]) == ("GPU", 1)
    assert CONFIG["containerDiskInGb"] >= 10
    assert set(CONFIG["gpuIds"].split(",")) <= POOLS.keys()


def test_only_drivers_that_the_kernels_run_with_are_allowed() -> None:
    """Those of CUDA 12 and newer; GPUs that compile the kernels themselves, which need 12.8, aren't in the pools."""
    for versions in (CONFIG["allowedCudaVersions"], TESTS["config"]["allowedCudaVersions"]):
        assert versions == sorted(versions, key=float, reverse=True)
        assert all(re.fullmatch(r"1[23]\.\d", version) for version in versions)
    assert not {"ADA_80_PRO", "HOPPER_141"} & set(CONFIG["gpuIds"].split(","))


def test_no_input_is_there_twice() -> None:
    assert len(INPUTS) == len(CONFIG["env"])


@pytest.mark.parametrize("key", INPUTS)
def test_an_input_is_of_its_settings_type_with_the_same_choices_and_limits(key: str) -> None:
    given, field = INPUTS[key], field_of(key)
    assert given["name"]
    assert given["description"]
    assert isinstance(given["advanced"], bool)
    types = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean"}
    assert given["type"] == types[field["type"]]
    assert [option["value"] for option in given.get("options", [])] == field.get("enum", [])
    assert given.get("max") == field.get("maximum")
    if "minimum" in field:
        assert given["min"] == field["minimum"]
    if "exclusiveMinimum" in field:  # which the hub doesn't know
        assert given["min"] > field["exclusiveMinimum"]


@pytest.mark.parametrize("key", INPUTS)
def test_an_input_has_its_settings_default_and_is_required_only_without_one(key: str) -> None:
    default = INPUTS[key].get("default")
    assert default == Settings.model_fields[key.lower()].default
    if default is not None:
        assert Settings.from_env(env_of({key: default})) == Settings.from_env({})
    assert not (INPUTS[key].get("required") and default is not None)


@pytest.mark.parametrize("key", [key for key, given in INPUTS.items() if given["type"] == "boolean"])
def test_both_values_of_a_switch_are_read_as_they_are_meant(key: str) -> None:
    for value in (True, False):
        assert getattr(Settings.from_env(env_of({key: value})), key.lower()) is value


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_an_operator_sees_to_what_the_worker_accepts(name: str) -> None:
    preset = PRESETS[name]
    assert preset.keys() <= INPUTS.keys()
    settings = Settings.from_env(env_of(preset))
    assert {key: getattr(settings, key.lower()) for key in preset} == preset
    assert preset["MODEL"] is not None
    assert is_public(preset["MODEL"])


def test_each_preset_changes_something_else() -> None:
    assert PRESETS.keys() == {"Voice messages", "Long recordings", "Lowest cost"}
    unset = Settings.from_env({})
    for preset in PRESETS.values():
        assert all(getattr(unset, key.lower()) != value for key, value in preset.items())


def test_the_readme_explains_the_presets() -> None:
    _, _, below = README.partition("| preset | settings | because |\n")
    rows = [line.strip("| ").split(" | ") for line in below.partition("\n\n")[0].splitlines()[1:]]
    told = {name: re.findall("`([^`]+)`", settings) for name, settings, _ in rows}
    assert told == {name: [f"{key}={value}" for key, value in preset.items()] for name, preset in PRESETS.items()}
    assert all(because for _, _, because in rows)


# --- the hub's tests


@pytest.mark.parametrize("test", TESTS["tests"], ids=lambda test: test["name"])
def test_a_job_of_the_hub_is_one_that_the_worker_accepts(test: Json) -> None:
    parse_request(test["input"], RUNPOD_RULES)
    assert 10_000 <= test["timeout"] <= 600_000  # milliseconds


def test_the_hub_tries_text_subtitles_with_words_and_the_language() -> None:
    plain, subtitles, detection = (test["input"] for test in TESTS["tests"])
    assert "transcription" not in plain
    assert (subtitles["transcription"], subtitles["word_timestamps"]) == ("srt", True)
    assert detection["task"] == "detect_language"


def test_the_hub_tries_on_a_gpu_of_its_pools_with_settings_that_the_worker_accepts() -> None:
    config = TESTS["config"]
    assert (config["gpuTypeId"], config["gpuCount"]) == ("NVIDIA GeForce RTX 4090", 1)
    assert config["gpuTypeId"] in GPU_IDS
    settings = Settings.from_env({entry["key"]: entry["value"] for entry in config["env"]})
    assert settings.model is not None
    assert is_public(settings.model)


def test_the_audio_that_the_hub_sends_itself_is_heard_right() -> None:
    plain, _, detection = (test["input"] for test in TESTS["tests"])
    with real_service(tight_bytes=1) as service:
        text, language = service.outputs({"id": "a", "input": plain}, {"id": "b", "input": detection})
    assert words(text["transcription"]) == CLIP_WORDS
    assert language["detected_language"] == "en"


# --- the command-line tools


@pytest.fixture(scope="module")
def project() -> Json:
    """As the Python tool reads it, by the library that it uses."""
    return tomlkit.parse((ROOT / "runpod.toml").read_text()).unwrap()


def test_both_tools_find_the_project_by_the_same_name(project: Json) -> None:
    assert project["name"] == project["title"] == project["project"]["name"] == "whisper_worker"
    assert re.fullmatch("[0-9a-f]{8}", project["project"]["uuid"])


def test_the_keys_that_the_tools_read_are_there_and_of_the_types_that_they_take(project: Json) -> None:
    kinds = {"base_image": str, "gpu_types": list, "gpu_count": int, "storage_id": str, "ports": str}
    kinds |= {"volume_mount_path": str, "container_disk_size_gb": int, "env_vars": dict}
    assert {key: type(project["project"][key]) for key in kinds} == kinds
    assert set(project["project"]["gpu_types"]) <= GPU_IDS
    assert all(isinstance(value, str) for value in project["project"]["env_vars"].values())
    kinds = {"active_workers": int, "max_workers": int, "flashboot": bool, "idle_timeout": int, "model_refs": list}
    assert {key: type(value) for key, value in project["endpoint"].items()} == kinds


def test_the_projects_settings_are_accepted_and_its_cached_model_is_the_one_served(project: Json) -> None:
    settings = Settings.from_env(project["project"]["env_vars"])
    assert settings.model is not None
    assert project["endpoint"]["model_refs"] == [repository(settings.model)]


def test_what_is_installed_and_started_is_there_and_copied(project: Json) -> None:
    runtime = project["runtime"]
    needed = [runtime["handler_path"], runtime["requirements_path"], "pyproject.toml", "README.md"]
    needed += [str(path.relative_to(ROOT)) for path in (ROOT / "src/whisper_worker").iterdir() if path.is_file()]
    assert all((ROOT / path).is_file() for path in needed)
    assert runtime["python_version"] in ("3.10", "3.11", "3.12", "3.13")
    for pattern in ignored():
        assert not any(re.search(pattern, f"/runpod-volume/7c1f0a3e/dev/whisper_worker/{path}") for path in needed)


def test_the_requirements_install_this_folder_which_is_where_the_tools_do_it(project: Json) -> None:
    lines = (ROOT / project["runtime"]["requirements_path"]).read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["."]


def ignored() -> Iterator[str]:
    """The lines of .runpodignore that count."""
    for line in (ROOT / ".runpodignore").read_text().splitlines():
        if line and not line.startswith("#"):
            yield line


def test_what_is_not_copied_is_named_so_that_each_of_the_tools_understands_it() -> None:
    """As a pattern of rsync, of .gitignore and of a regular expression, with the same meaning."""
    patterns = list(ignored())
    assert ".venv/" in patterns
    assert all(re.fullmatch(r"\.?[a-z_]+/", pattern) for pattern in patterns)


# --- the README


def test_the_readme_tells_what_a_cpu_needs_as_it_is_computed() -> None:
    threads = Threads.plan(Settings(), "cpu", 4)
    base, turbo = (cpu_bytes(SHAPES[name], threads) / GB for name in ("base", "large-v3-turbo"))
    assert f"base takes {base:.1f} GB with 4 cores, turbo {turbo:.1f} GB" in README


def test_the_readme_tells_what_the_settings_for_low_cost_need_as_it_is_computed() -> None:
    settings = Settings.from_env(env_of(PRESETS["Lowest cost"]))
    shape, numbers = SHAPES[settings.model or ""], COMPUTE_TYPES[settings.compute_type]
    threads = Threads.plan(settings, "cuda", cores=4)
    calls = threads.inter * threads.batch * window_bytes(shape, numbers)
    assert f"{gpu_bytes(shape, numbers, threads.inter, calls) / GB:.1f} GB, computed, so the cheapest" in README


def test_the_repositories_that_the_readme_names_are_those_of_the_sizes() -> None:
    told = dict(re.findall(r"for\s+`([\w-]+)`\s+`([\w-]+/[\w-]+)`", README))
    assert told.keys() == {"turbo", "large-v3"}
    assert all(repository(size) == name for size, name in told.items())


@pytest.mark.skipif(not shutil.which("curl"), reason="no curl on this machine")
def test_the_readmes_check_of_a_deployed_worker_prints_its_health_and_a_transcript() -> None:
    [example] = re.findall("```bash\n(.*?)```", README, re.DOTALL)
    with LocalEndpoint() as endpoint, WorkerProcess(endpoint, INTER_THREADS="1") as worker:
        worker.wait_until_ready()
        command = example.replace("https://api.runpod.ai/v2", endpoint.url)
        env = {"ENDPOINT_ID": ENDPOINT_ID, "RUNPOD_API_KEY": API_KEY, "PATH": "/usr/bin:/bin"}
        ran = subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    health, end = json.JSONDecoder().raw_decode(ran.stdout)
    assert health.keys() == {"jobs", "workers"}
    answer = json.loads(ran.stdout[end:])
    assert answer["status"] == "COMPLETED"
    assert "station" in answer["output"]["transcription"]


WORKFLOWS = ROOT / ".github/workflows"


@pytest.mark.skipif(not WORKFLOWS.is_dir(), reason="there are no workflows here")
def test_the_badge_is_of_a_workflow_that_exists() -> None:
    named = set(re.findall(r"actions/workflows/([\w.-]+?)(?:/badge\.svg)?\)", README))
    assert named
    assert all((WORKFLOWS / name).is_file() for name in named)


def test_pages_that_the_readme_and_the_guides_name_are_there() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        links = re.findall(r"\]\((?!https?:|#|\.\./\.\./actions)([^)#]+)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == []
