"""Lets the tests here import `beside` and the repository's `benchmarks`."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
