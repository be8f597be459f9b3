"""What holds for all tests, and the fixtures of `tiny_models.py`."""

import gc
import os
import shutil
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
# What tests measure and learn is none of what the user's own runs begin with; compiled libraries are kept for the next.
OWN_CACHE = Path(__file__).parents[1] / "build/tests-cache"
os.environ.setdefault("BLOCKDRAFT_CACHE", str(OWN_CACHE))
if "PYTEST_XDIST_WORKER" not in os.environ and os.environ["BLOCKDRAFT_CACHE"] == str(OWN_CACHE):
    shutil.rmtree(OWN_CACHE / "costs", ignore_errors=True)

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    """Whoever only hands tests out to workers need not import torch, for which all of them would wait."""
    gc.disable()  # what is imported and collected stays; looking through it again and again takes a quarter of the time
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        config.pluginmanager.import_plugin("tiny_models")


def pytest_collection_finish() -> None:
    """What stays need not be looked through by later collections of garbage either."""
    gc.collect()
    gc.freeze()
    gc.enable()
