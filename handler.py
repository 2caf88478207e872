"""The door: `python handler.py` runs the worker. Importing this file starts nothing."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "src"))  # works without being installed, as RunPod's tools start it

if __name__ == "__main__":
    from whisper_worker.process import end_when_told

    end_when_told()  # before what takes a while

    from whisper_worker.runpod_io import main

    main()
