"""How many jobs in flight a worker needs: `.venv/bin/python benchmarks/jobs_in_flight.py`.

The real worker process behind the local endpoint of the tests. All jobs are sent at once; each is a URL whose server
takes 0.3 s to answer. Settings take turns and the whole is repeated, so that a change in the machine's speed hits all
of them; the figures are medians, and the ratios are to the first row of the same repeat.
"""

import argparse
import base64
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import requests  # noqa: E402  (found through the path above, as are the next two)
from local_endpoint import ENDPOINT_ID, LocalEndpoint  # noqa: E402
from worker_process import WorkerProcess  # noqa: E402

DOWNLOAD_S = 0.3
SETTINGS = [(1, 1), (2, 2), (2, 4), (2, 6), (2, 8)]  # INTER_THREADS, JOB_CONCURRENCY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    rates: dict[tuple[int, int], list[float]] = {setting: [] for setting in SETTINGS}
    with _slow_file_server() as url:
        for repeat in range(options.repeats):
            for setting in SETTINGS:
                rates[setting].append(_jobs_per_second(setting, url, options.jobs))
                print(f"repeat {repeat + 1}: {setting} {rates[setting][-1]:.2f} jobs/s", file=sys.stderr)

    print(f"{platform.machine()}, {os.cpu_count()} cores, demo model")
    print(f"{options.jobs} jobs of 5.3 s, {options.repeats} repeats\n")
    print("| `INTER_THREADS` | `JOB_CONCURRENCY` | jobs/s | times the first row |")
    print("| --- | --- | --- | --- |")
    for inter, jobs in SETTINGS:
        figures = rates[inter, jobs]
        ratio = statistics.median(rate / first for rate, first in zip(figures, rates[SETTINGS[0]], strict=True))
        print(f"| {inter} | {jobs} | {statistics.median(figures):.2f} | {ratio:.2f} |")


def _jobs_per_second(setting: tuple[int, int], url: str, count: int) -> float:
    """From the sending of all jobs to the last result, on a worker that has started and warmed up."""
    inter, concurrency = map(str, setting)
    env = {"RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS": "true", "INTER_THREADS": inter, "JOB_CONCURRENCY": concurrency}
    with LocalEndpoint() as endpoint, WorkerProcess(endpoint, **env) as worker:
        worker.wait_until_ready()
        started = time.monotonic()
        with requests.Session() as session:
            ids = [
                session.post(f"{endpoint.url}/{ENDPOINT_ID}/run", json={"input": {"audio": url}}).json()["id"]
                for _ in range(count)
            ]
        ended = [endpoint.wait_until_ended(job_id, timeout_s=300) for job_id in ids]
        seconds = time.monotonic() - started
    assert all(job.status == "COMPLETED" for job in ended)
    return count / seconds


@contextmanager
def _slow_file_server() -> Iterator[str]:
    clip = base64.b64decode(json.loads((ROOT / "test_input.json").read_text())["input"]["audio_base64"])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(DOWNLOAD_S)
            self.send_response(200)
            self.send_header("Content-Length", str(len(clip)))
            self.end_headers()
            self.wfile.write(clip)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/clip.ogg"
        server.shutdown()
        thread.join()


if __name__ == "__main__":
    main()
