"""A RunPod serverless worker that serves faster-whisper: many jobs in flight, one set of weights."""

__version__ = "0.1.0"
