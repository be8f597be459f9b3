"""Lets the tests here import `engine_schemas`, and `fake_server` from beside other tests."""

import sys
from pathlib import Path

here = Path(__file__).parent
sys.path += [str(here), str(here.parents[1] / "evaluation/servers")]
