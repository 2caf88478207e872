"""Builds the image and shows that it works: `scripts/container-smoke`.

It runs from a checkout, and finds the tests' helpers by the path set here.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
