"""The real worker, with a clock on its event loop: `python -m benchmarks.lag_worker`, started by `gil`.

The clock asks to be woken every 10 ms and writes down how much later it was: any other coroutine, the SDK's own too,
would have been as late. Into LAG_FILE: lines with the time of `time.monotonic` and the lag, both in seconds.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

TICK_S = 0.01

Handler = Callable[[dict[str, Any]], Awaitable[Any]]


async def write_lags(path: Path) -> None:
    with path.open("w", buffering=1) as file:  # by the line: the worker may be ended at any time
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            file.write(f"{now:.6f} {now - due:.6f}\n")


def with_clock(handle: Handler, path: Path) -> Handler:
    """`handle`, whose first call starts the clock: before it there is no loop to be seen."""
    clock: asyncio.Task[None] | None = None

    async def handle_with_clock(job: dict[str, Any]) -> Any:
        nonlocal clock
        clock = clock or asyncio.create_task(write_lags(path))
        return await handle(job)

    return handle_with_clock


def main() -> None:
    import runpod  # here, as the next: every benchmark imports this file, and few need what takes seconds

    from whisper_worker import runpod_io

    start = runpod.serverless.start

    def start_with_clock(config: dict[str, Any]) -> None:
        start({**config, "handler": with_clock(config["handler"], Path(os.environ["LAG_FILE"]))})

    runpod.serverless.start = start_with_clock
    runpod_io.main()


if __name__ == "__main__":
    main()
