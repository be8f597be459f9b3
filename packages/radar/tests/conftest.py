"""Add the import paths of radar_configs.py, gguf_writer.py and the benchmarks."""

import sys
from pathlib import Path

here = Path(__file__).parent
root = here.parents[2]
sys.path += [str(path) for path in (here, here.parent, root, root / "tests" / "targets")]
