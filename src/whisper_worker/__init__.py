"""A RunPod serverless worker that serves faster-whisper: many jobs in flight, one set of weights."""

import os

__version__ = "0.1.0"

# Nobody is told what runs here. Both are read when faster-whisper imports their libraries, so it is said before all:
# onnxruntime, which runs the speech detector, reports its use to its maker, the model hub's client who asks it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
