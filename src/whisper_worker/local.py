"""One job on this machine, `python handler.py`: what a terminal shows of it."""

import json
import sys
from contextlib import aclosing
from typing import Any

from tqdm import tqdm

from whisper_worker.live import Progress, Watcher
from whisper_worker.service import Service


class Bar(Watcher):
    """A progress bar on stderr, in seconds of audio, where that is a terminal; it goes when the `with` ends."""

    def __enter__(self) -> "Bar":
        self._bar = tqdm(unit="s", leave=False, disable=not sys.stderr.isatty(), dynamic_ncols=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def progress(self, progress: Progress) -> None:
        self._bar.set_description(progress.stage, refresh=False)
        self._bar.total = progress.seconds_total and round(progress.seconds_total, 1)
        self._bar.n = round(progress.seconds_done, 1)
        self._bar.refresh()


async def with_bar(service: Service, job: dict[str, Any]) -> dict[str, Any]:
    """The job's output, with a bar while it runs."""
    with Bar() as bar:
        return await service.run(job, bar)


async def printed(service: Service, job: dict[str, Any]) -> Any:
    """The job's items, each printed as it comes, one line of JSON; or the job's error."""
    items = []
    async with aclosing(service.stream(job)) as stream:
        async for item in stream:
            if "error" in item:
                return item
            print(json.dumps(item, ensure_ascii=False), flush=True)
            items.append(item)
    return items
