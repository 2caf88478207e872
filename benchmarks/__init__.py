"""What the worker is worth, in numbers: `python -m benchmarks NAME [options]`.

The package measures from outside: the real worker process behind the endpoint of the tests, or the libraries alone for
comparison. It runs from a checkout, and finds the worker and the tests' helpers by the path set here.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEAM_SIZE = 5  # the worker\'s default, and faster-whisper\'s

sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
