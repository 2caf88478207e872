"""The command line of scripts/container-smoke: build the image, show that it works, remove it."""

import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from typing import NoReturn

from local_hub import LocalHub

from container import checks
from container.engine import Engine, found
from container.programs import Clock, Failed
from whisper_worker.model_files import find
from whisper_worker.models import BUNDLED, repository

READ_BYTES = 1024 * 1024


def arguments() -> Namespace:
    parser = ArgumentParser(
        "scripts/container-smoke",
        description="Build the image and show that it works: with Docker where a daemon answers, else as root on "
        "Debian with podman, on a base made here. Needs Linux: containers use the machine's own network. All that "
        "it makes is removed. Exit code 0 when all is well.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="which image (default: cpu)")
    parser.add_argument("--model", help="a model to bake in")
    parser.add_argument("--hf-endpoint", metavar="URL", help="a mirror of the hub to take that model from")
    parser.add_argument("--local-hub", action="store_true", help="bake tiny.en in, from a hub of our own")
    parser.add_argument("--base-image", metavar="NAME", help="build on this one, which can be pulled")
    parser.add_argument(
        "--build-arg", type=_pair, metavar="K=V", action="append", default=[], help="any other build argument"
    )
    parser.add_argument("--sizes", action="store_true", help="tell the image's size too, unpacked and gzipped")
    parser.add_argument("--time-limit", metavar="S", type=float, default=1500, help="for everything (default: 1500 s)")
    options = parser.parse_args()
    if options.local_hub:
        options.model = "tiny.en"
    return options


def _pair(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    if "=" not in text or key == "DEVICE":
        raise ArgumentTypeError("K=V is wanted, and --device for DEVICE")
    return key, value


def say(text: str) -> None:
    print(f"smoke: {text}", flush=True)


def main() -> int:
    options = arguments()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    begin = time.monotonic()
    try:
        with found(options.base_image, Clock(options.time_limit)) as engine:
            try:
                show(engine, options)
            finally:
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)  # clearing up is to be whole
    except (Failed, AssertionError) as problem:
        say(f"FAIL: {problem}")
        return 1
    say(f"PASS in {time.monotonic() - begin:.0f} s")
    return 0


def _leave(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def show(engine: Engine, options: Namespace) -> None:
    steps: list[Callable[[], str]] = [
        lambda: build(engine, options),
        lambda: checks.test_input(engine, options.model),
        lambda: checks.contents(engine),
        lambda: checks.byte_code(engine),
        lambda: checks.jobs(engine),
    ]
    if options.device == "cuda":
        steps.insert(1, lambda: checks.cublas(engine))
    if options.sizes:
        steps.append(lambda: sizes(engine))
    for step in steps:
        begin = time.monotonic()
        say(f"ok: {step()} ({time.monotonic() - begin:.0f} s)")


def build(engine: Engine, options: Namespace) -> str:
    given = dict(options.build_arg)
    given["DEVICE"] = options.device
    if options.model:
        given["MODEL"] = options.model
    say(f"building the image for {options.device} with {engine.command[0]} {engine.note}".rstrip())
    with ExitStack() as stack:
        hub = options.hf_endpoint
        if options.local_hub:
            hub = stack.enter_context(LocalHub(repository("tiny.en"), find(BUNDLED).folder)).url("")
        if hub:
            given["HF_ENDPOINT"] = hub
        engine.build(given, *(("--network", "host") if hub else ()))  # it may be this machine's
    return f"the image builds {engine.note}".rstrip()


def sizes(engine: Engine) -> str:
    """In units of 10^6 bytes."""
    unpacked = int(engine.call("image", "inspect", "--format", "{{.Size}}", engine.name))
    save = [*engine.command, "save", engine.name]
    with (
        subprocess.Popen(save, env=engine.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tar,
        subprocess.Popen(["gzip"], stdin=tar.stdout, stdout=subprocess.PIPE) as gzip,
    ):
        gzipped = 0
        try:
            assert tar.stdout
            assert gzip.stdout
            tar.stdout.close()
            while part := gzip.stdout.read(READ_BYTES):
                gzipped += len(part)
                engine.clock.left_s()
            codes = [process.wait(engine.clock.left_s(60)) for process in (tar, gzip)]
        finally:
            tar.kill()
            gzip.kill()
    if any(codes):
        raise Failed(f"saving the image and gzip ended with codes {codes}")
    return f"the image has {unpacked / 1e6:.0f} MB, gzipped {gzipped / 1e6:.0f} MB"


if __name__ == "__main__":
    sys.exit(main())
