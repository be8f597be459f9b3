"""Add the import paths of radar_configs.py and of the benchmarks."""

import sys
from pathlib import Path

here = Path(__file__).parent
root = here.parents[2]
sys.path += [str(here), str(here.parent), str(root)]
