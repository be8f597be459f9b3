"""Import paths of radar_configs.py beside this file, and of gguf_writer.py."""

import sys
from pathlib import Path

here = Path(__file__).parent
sys.path += [str(here), str(here.parent / "targets")]
