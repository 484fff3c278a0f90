"""The examples are scripts beside each other, and so are the hand-written computations: make them importable by name."""

import sys
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(here.parents[1] / "examples"), str(here)]
