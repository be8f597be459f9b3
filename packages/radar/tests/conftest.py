"""Add the import paths of radar_configs.py and gguf_writer.py."""

import sys
from pathlib import Path

here = Path(__file__).parent
sys.path += [str(here), str(here.parent / "targets")]
