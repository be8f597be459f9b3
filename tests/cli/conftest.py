"""For gguf_writer.py and fake_server.py, which lie beside other tests."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("targets", "evaluation/servers")]
