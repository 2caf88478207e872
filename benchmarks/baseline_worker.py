"""The worker that most people write, to compare with: `python -m benchmarks.baseline_worker`, with MODEL and so on.

A synchronous handler, as in RunPod's documentation: the SDK gives it one job at a time. Model and decoding have
faster-whisper's defaults; VAD_FILTER=true adds its speech detection.
"""

import os
from tempfile import NamedTemporaryFile
from typing import Any

DOWNLOAD_TIMEOUT_S = 300


def main() -> None:
    import requests  # here, as the next two: every benchmark imports this file, and few need what takes seconds
    import runpod
    from faster_whisper import WhisperModel

    model = WhisperModel(os.environ["MODEL"], device=os.environ["DEVICE"], compute_type=os.environ["COMPUTE_TYPE"])
    vad_filter = os.environ.get("VAD_FILTER") == "true"

    def handler(job: dict[str, Any]) -> dict[str, str]:
        reply = requests.get(job["input"]["audio"], timeout=DOWNLOAD_TIMEOUT_S)
        reply.raise_for_status()
        with NamedTemporaryFile(suffix=".wav") as file:
            file.write(reply.content)
            file.flush()
            segments, _ = model.transcribe(file.name, beam_size=5, vad_filter=vad_filter)
            return {"transcription": "".join(segment.text for segment in segments)}

    runpod.serverless.start({"handler": handler})


if __name__ == "__main__":
    main()
