"""Import path of fake_server.py beside this file."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
