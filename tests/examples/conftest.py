"""The examples are scripts beside each other: make them importable by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
