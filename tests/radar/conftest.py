"""Import path of gguf_writer.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "targets"))
