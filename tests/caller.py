"""RunPod's own client as the tests call a worker with it, and what they ask of it."""

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import runpod
from file_server import PAGE, FileServer, answer, redirect
from local_endpoint import API_KEY, ENDPOINT_ID, LocalEndpoint
from media import CLIP, pcm, silence, speech, wav
from worker_process import ROOT

STATION = json.loads((ROOT / "test_input.json").read_text())["input"]["audio_base64"]
STATION_WORDS = "we will meet at the station tomorrow morning and take the first train to london"
WINDOW = base64.b64encode(CLIP.read_bytes()).decode()
SILENCE = base64.b64encode(wav(pcm(silence(2)))).decode()
HTML = base64.b64encode(PAGE).decode()
LONG_CLIP_REPEATS = 40
LONG = wav(pcm(np.tile(speech(), LONG_CLIP_REPEATS)))
ONE_TRY = {"temperature_increment_on_fallback": 0}  # the clip over and over compresses so well that there would be six

FILES = "{files}"  # in an input: the file server's address
ROUTES = {
    "/window.ogg": answer(200, CLIP.read_bytes()),
    "/station.ogg": answer(200, base64.b64decode(STATION)),
    "/moved": redirect("/station.ogg?signature=SECRET"),
    "/long.wav": answer(200, LONG),
}


def words(text: str) -> str:
    """The spoken words alone: lower case, no punctuation, no times."""
    return " ".join(re.findall(r"[a-z']+", text.removeprefix("WEBVTT").lower()))


class Caller:
    """RunPod's own client, set to the local endpoint and, in inputs, to the file server."""

    def __init__(self, endpoint: LocalEndpoint, files: FileServer) -> None:
        runpod.endpoint_url_base = endpoint.url
        self._endpoint = endpoint
        self._files = files
        self.client = runpod.Endpoint(ENDPOINT_ID, api_key=API_KEY)

    def close(self) -> None:
        self.client.rp_client.rp_session.close()

    def run(self, job_input: Any) -> str:
        """The new job's id."""
        if isinstance(job_input, dict) and "audio" in job_input:
            job_input = {**job_input, "audio": job_input["audio"].replace(FILES, self._files.url(""))}
        if not job_input:  # the client would wrap it into another input
            return str(self.client.rp_client.post(f"{ENDPOINT_ID}/run", {"input": job_input})["id"])
        return str(self.client.run({"input": job_input}).job_id)

    def status(self, job_id: str) -> dict[str, Any]:
        status: dict[str, Any] = self.client.rp_client.get(f"{ENDPOINT_ID}/status/{job_id}")
        return status

    def unread(self, job_id: str) -> dict[str, Any]:
        """What `/stream` answers: the status, and the items since it was last asked."""
        answer: dict[str, Any] = self.client.rp_client.get(f"{ENDPOINT_ID}/stream/{job_id}")
        return answer

    def stream(self, job_id: str) -> Iterator[Any]:
        """The items that nobody has read yet, and those to come, until the job has ended."""
        yield from runpod.endpoint.Job(ENDPOINT_ID, job_id, self.client.rp_client).stream()

    def cancel(self, job_id: str) -> None:
        self.client.rp_client.post(f"{ENDPOINT_ID}/cancel/{job_id}", None)

    def result(self, job_id: str) -> dict[str, Any]:
        """The final status, waited for."""
        self._endpoint.wait_until_ended(job_id)
        return self.status(job_id)
